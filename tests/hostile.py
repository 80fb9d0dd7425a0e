"""Things that a caller may pass and nobody should: numbers and arrays that lie, refuse, or act while they are read."""

import numpy as np
from helpers import append, rows

import pagedkv


class World:
    """A store of three layers, a sequence of six positions in it, and a contiguous cache."""

    def __init__(self):
        self.store = pagedkv.PagedKvStore(4, 8, 2, 3, v_head_dim=2, n_layers=3)
        self.cache = pagedkv.PagedKvCache()
        append(self.store, self.cache, 6)
        self.contiguous = pagedkv.KvCache(2, 3)
        self.contiguous.extend(rows(3, 6), rows(3, 6))
        self.pool = pagedkv.KvBlockPool(4, 8)

    def k(self, n):
        return np.zeros((3, n, 6), np.float32)

    def v(self, n):
        return np.zeros((3, n, 4), np.float32)


class Unwilling(Exception):
    pass


def refuse():
    raise Unwilling


class Indexed:
    """Stands for an integer, as NumPy's do; and may do something else first."""

    def __init__(self, value, first=lambda: None):
        self.value = value
        self.first = first

    def __index__(self):
        self.first()
        return self.value


class Liar(np.ndarray):
    """What it says of itself must not be believed."""

    def reshape(self, *shape):
        return np.zeros(1, np.float32)

    def min(self):
        return 0

    max = min


class Array:
    def __init__(self, array, first=lambda: None):
        self.array = array
        self.first = first

    def __array__(self, dtype=None, copy=None):
        self.first()
        return self.array


class Iterated:
    """Gives one thing after the other, and may do something else first."""

    def __init__(self, things, first=lambda: None):
        self.things = things
        self.first = first

    def __iter__(self):
        self.first()
        return iter(self.things)
