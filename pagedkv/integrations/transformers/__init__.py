"""transformers on pagedkv: a cache, an attention function, and continuous batching.

Importing this module registers the attention function ``pagedkv``.
"""

from pagedkv.integrations.transformers import attention
from pagedkv.integrations.transformers.batch import TokenEvent, generate_batch
from pagedkv.integrations.transformers.cache import PagedCache
from pagedkv.integrations.transformers.stores import PagedStores

attention.register()

__all__ = ["PagedCache", "PagedStores", "TokenEvent", "generate_batch"]
