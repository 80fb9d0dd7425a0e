"""Continuous batching: who computes what next, on whose blocks.

`Scheduler` serves the requests of a model out of its `pagedkv.ModelStores`, step by step. It knows no model: it says
what is to be computed, a `Batch`, and opens a `pagedkv.Step` for it.

Examples
--------
>>> import numpy as np
>>> from pagedkv.serving import LayerShape, ModelStores, Scheduler
>>> shapes = [LayerShape(window, n_kv_heads=2, head_dim=4) for window in (None, 8)]     # two layers
>>> stores = ModelStores(shapes, total_blocks=32, block_size=4)
>>> def compute(batch, step):
...     rows = np.ones((len(batch.token_ids), 2, 4), np.float32)            # stands for the model
...     for layer in range(stores.n_layers):
...         step.write(layer, rows, rows)
...         step.attend(layer, rows)
...     return [request.tokens[-1] + 1 for request in batch.sampled]
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

from pagedkv.groups import LayerGroup, ModelSequence, ModelStores
from pagedkv.serving.counts import SchedulerCounts
from pagedkv.serving.requests import Batch, Request
from pagedkv.serving.scheduler import Scheduler
from pagedkv.serving.tokens import TokenIds
from pagedkv.shapes import LayerShape

__all__ = [
    "Batch",
    "LayerGroup",
    "LayerShape",
    "ModelSequence",
    "ModelStores",
    "Request",
    "Scheduler",
    "SchedulerCounts",
    "TokenIds",
]
