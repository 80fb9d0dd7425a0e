"""What a server builds for a model with layers of several kinds: stores, sequences, prefixes, and a scheduler.

A store's layers share their block tables. A model that mixes full and sliding-window attention, or heads of different
widths, has a store for each kind (`ModelStores`), and a sequence has a cache in each (`ModelSequence`). A forward
pass is a `pagedkv.Step` in every store (`ForwardPass`), and `Scheduler` is continuous batching over them: who computes
what next, on whose blocks. All of it is Python over the rest of the package; none of it knows a model.

Examples
--------
>>> import numpy as np
>>> from pagedkv.serving import LayerShape, ModelStores, Scheduler
>>> shapes = [LayerShape(window, n_kv_heads=2, head_dim=4) for window in (None, 8)]     # two layers
>>> stores = ModelStores(shapes, total_blocks=32, block_size=4)
>>> def compute(batch, running):
...     rows = np.ones((len(batch.token_ids), 2, 4), np.float32)            # stands for the model
...     for layer in range(stores.n_layers):
...         running.write(layer, rows, rows)
...         running.attend(layer, rows)
...     return [request.tokens[-1] + 1 for request in batch.asking]
>>> scheduler = Scheduler(stores)
>>> first, second = scheduler.submit([1, 2, 3, 4, 5], 4), scheduler.submit([1, 2, 3, 4, 9], 4, stop_tokens=[11])
>>> while not scheduler.is_idle:
...     for request in scheduler.step(compute):
...         pass                                                            # request.tokens[-1] is new
>>> first.generated, first.finish_reason, second.generated, second.finish_reason
([6, 7, 8, 9], 'length', [10, 11], 'stop')
>>> scheduler.counts.positions_reused
4
"""

from pagedkv.serving.counts import SchedulerCounts
from pagedkv.serving.prefixes import ModelPrefixes
from pagedkv.serving.requests import Batch, Request
from pagedkv.serving.scheduler import Scheduler
from pagedkv.serving.sequences import ForwardPass, ModelSequence
from pagedkv.serving.stores import LayerGroup, ModelStores
from pagedkv.serving.tokens import TokenIds
from pagedkv.shapes import LayerShape

__all__ = [
    "Batch",
    "ForwardPass",
    "LayerGroup",
    "LayerShape",
    "ModelPrefixes",
    "ModelSequence",
    "ModelStores",
    "Request",
    "Scheduler",
    "SchedulerCounts",
    "TokenIds",
]
