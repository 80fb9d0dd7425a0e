"""A model's KV-cache groups as one store: the layers of each shape in a store of their own, over one budget of bytes.

Layers of one store share a block table, so they hold and drop the same positions. A layer with a sliding window needs
its last positions only, a full one needs all, and heads of other widths make other rows: hence a store for each shape.
`ModelStores` has these stores, and a `ModelSequence` a cache in each. Whatever works on a store and its sequences works
on them: `pagedkv.Step`, `pagedkv.reorder`, `pagedkv.PrefixCache`, `pagedkv.plan_admission`. All groups change, or none
does.
"""

from pagedkv.groups.sequence import ModelSequence
from pagedkv.groups.stores import LayerGroup, ModelStores

__all__ = ["LayerGroup", "ModelSequence", "ModelStores"]
