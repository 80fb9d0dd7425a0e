"""What the tests of the prefix cache share."""

import numpy as np
from helpers import append

from pagedkv import PagedKvCache


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def sequence(store, n):
    cache = PagedKvCache()
    return cache, append(store, cache, n)


def remember(prefixes, tokens, **options):
    """Insert a sequence of these tokens and let it go; returns its K and V."""
    cache, kv = sequence(prefixes.store, len(tokens))
    prefixes.insert(tokens, cache, **options)
    cache.release(prefixes.store)
    return kv


def attach(prefixes, tokens, **options):
    cache = PagedKvCache()
    n = prefixes.attach(cache, tokens, **options)
    assert n == cache.seq_len
    return cache, n


def first(kv, n):
    return tuple(side[:, :n] for side in kv)


def used_last(prefixes, space, sources):
    """Which of several equal sources was copied is the cache's choice; it is the one it has just used."""
    tree = prefixes._trees[space]
    ends = [tree.find(np.array(source, "<i8").tobytes())[0] for source in sources]
    for source, node in zip(sources, ends, strict=True):
        nodes = list(tree.orders[node.priority])
        path = set(tree.path(node))
        if all(later in path for later in nodes[nodes.index(node) :]) and node.end == len(source):
            return source
    raise AssertionError("no source was used")


def fill(store):
    """Takes what is free, and nothing from the prefix cache."""
    return store.acquire(store.free_block_count)
