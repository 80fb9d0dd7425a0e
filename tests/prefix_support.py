"""What the tests of the prefix cache share."""

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


def fill(store):
    """Takes what is free, and nothing from the prefix cache."""
    return store.acquire(store.free_block_count)
