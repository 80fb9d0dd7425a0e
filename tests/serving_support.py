"""The demo's engine on a tiny model, step by step, and what a prompt is continued with when it is alone."""

from types import SimpleNamespace

import numpy as np
from demo_support import write_model

from pagedkv.demo.engine import Engine
from pagedkv.demo.gguf_file import GgufFile
from pagedkv.demo.model import Gemma3
from pagedkv.demo.verify import ContiguousKv
from pagedkv.serving import ModelStores, Scheduler


def load(directory, **options):
    return Gemma3(GgufFile.open(write_model(directory / "model.gguf", **options)))


def server(model, *, block_size=4, n_blocks=64, stop_tokens=(), **options):
    stores = ModelStores(model.config.layers, n_blocks, block_size=block_size)
    scheduler = Scheduler(stores, **options)
    return SimpleNamespace(stores=stores, scheduler=scheduler, engine=Engine(model, scheduler, stop_tokens))


def run(served, most_steps=2000):
    """Steps until nothing is left, and checks that the stores are whole and empty then."""
    for _ in range(most_steps):
        if served.scheduler.is_idle:
            break
        served.engine.step()
        check(served)
    assert served.scheduler.is_idle
    served.stores.prefixes.clear()
    assert_all_free(served)


def check(served):
    """The books balance."""
    served.stores.prefixes.check()
    for number, group in enumerate(served.stores.groups):
        group.store.check([request.sequence.caches[number] for request in served.scheduler.running])


def assert_all_free(served):
    assert served.stores.nbytes_in_use == 0
    for group in served.stores.groups:
        group.store.check()
        assert group.store.free_block_count == group.store.total_blocks


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(5, 300, n).tolist()


def alone(model, prompt, n):
    """The greedy continuation of one prompt through contiguous caches."""
    kv, sequence, first = ContiguousKv(model), list(prompt), 0
    for _ in range(n):
        hidden = model.forward(sequence[first:], np.arange(first, len(sequence)), kv.attend)
        first = len(sequence)
        sequence.append(int(model.logits(hidden[-1:]).argmax()))
    return sequence[len(prompt) :]
