"""What many tests use: rows to write, snapshots to compare, and what must be true of every error."""

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import numpy as np
import pytest
from dtype_reference import SCALED

import pagedkv

_row_numbers = itertools.count(1)

unsanitized = pytest.mark.skipif(
    bool(os.environ.get("PAGEDKV_SANITIZE")), reason="a sanitizer has memory and instructions of its own"
)


def rows(*shape):
    """float32 values with exactly representable, never repeated numbers: a row in the wrong place is seen."""
    n = int(np.prod(shape, dtype=np.int64))
    values = [next(_row_numbers) % 2**24 for _ in range(n)]
    return np.array(values, np.float32).reshape(shape)


def assert_same_bits(got, expected):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.tobytes() == expected.tobytes()


def store_rows(store, cache, layer=0):
    """A sequence's readable K and V, read one row at a time through its block table."""
    table = cache.block_table.tolist()
    places = [(table[p // store.block_size], p % store.block_size) for p in range(cache.first_position, cache.seq_len)]
    k = [store.k_row(block, offset, layer) for block, offset in places]
    v = [store.v_row(block, offset, layer) for block, offset in places]
    return (
        np.array(k, np.float32).reshape(len(places), store.k_width),
        np.array(v, np.float32).reshape(len(places), store.v_width),
    )


def append(store, cache, n):
    """Append n positions of new rows; returns them as ``[n_layers, n, width]``."""
    k = rows(store.n_layers, n, store.k_width)
    v = rows(store.n_layers, n, store.v_width)
    cache.append_contiguous(store, k, v, n)
    return k, v


def assert_rows(store, cache, k, v):
    """The readable positions of all layers are these ``[n_layers, n, width]``."""
    for layer in range(store.n_layers):
        got_k, got_v = store_rows(store, cache, layer)
        assert_same_bits(got_k, k[layer])
        assert_same_bits(got_v, v[layer])


def by_append(store, cache, k, v):
    cache.append_contiguous(store, k, v, len(k))


def by_push(store, cache, k, v):
    for k_step, v_step in zip(k, v, strict=True):
        cache.push(store, k_step, v_step)


def by_step(store, cache, k, v):
    with pagedkv.Step(store, cache, len(k)) as step:
        step.write(0, k, v)


# Every way to write the rows of a sequence.
WAYS = [by_append, by_push, by_step]


def stored(store, cache, side):
    """All rows of a sequence as they are stored: ``values [n, width]``, and for int8 ``scales [n, n_kv_heads]``."""

    def joined(view):
        return np.concatenate([view(block) for block in cache.block_table.tolist()])[: cache.seq_len]

    scales = joined(getattr(store, f"{side}_scales")) if store.dtype in SCALED else None
    return joined(getattr(store, f"{side}_block")), scales


def step_of(store):
    """One position's K and V, in the shape that push takes."""
    shape = () if store.n_layers == 1 else (store.n_layers,)
    return rows(*shape, store.k_width), rows(*shape, store.v_width)


def batch(store, *lengths):
    """Sequences of those lengths, and their rows."""
    caches = [pagedkv.PagedKvCache() for _ in lengths]
    return caches, [append(store, cache, n) for cache, n in zip(caches, lengths, strict=True)]


def write_all(step):
    """Write new rows to every layer; returns K and V, ``[n_layers, n_rows, width]``."""
    store = step.store
    k = rows(store.n_layers, step.n_rows, store.k_width)
    v = rows(store.n_layers, step.n_rows, store.v_width)
    for layer in range(store.n_layers):
        step.write(layer, k[layer], v[layer])
    return k, v


def grown(old, new, rows_of_it):
    """K and V of a sequence after a step: what it was, and its share of the new rows."""
    return tuple(np.concatenate([old[side], new[side][:, rows_of_it]], axis=1) for side in (0, 1))


def store_state(store):
    """Everything that can be seen of a store: counts, and the bytes of every block that is held."""
    counts = [store.refcount(block) for block in range(store.total_blocks)]
    held = [block for block, count in enumerate(counts) if count]
    content = [
        tuple(view(block, layer).tobytes() for view in block_views(store))
        for block in held
        for layer in range(store.n_layers)
    ]
    counters = store.stats()._replace(exhaustions=0)  # a refused request may be counted
    return counts, content, counters, store.free_block_count


def block_views(store):
    """The functions that show all bytes of a block."""
    return store.k_block, store.v_block, *((store.k_scales, store.v_scales) if store.dtype in SCALED else ())


def books_of(store):
    """A store's own books, to break them: the holders of each block, and the stack of those that were held before."""
    [blocks] = [each for each in gc.get_referents(store) if type(each).__name__ == "BlockAllocator"]
    fields = id(blocks) + object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)  # past the table of its methods
    return [
        (ctypes.c_int32 * blocks.total).from_address(address)
        for address in (ctypes.c_void_p * 2).from_address(fields)
    ]


def cache_state(cache):
    return (
        cache.seq_len,
        cache.capacity,
        cache.first_position,
        cache.block_table.tolist(),
        None if cache.store is None else id(cache.store),
    )


def contiguous_state(cache):
    return cache.seq_len, cache.k.tobytes(), cache.v.tobytes(), cache.allocated_bytes, cache.is_within_planned_capacity


@contextmanager
def unchanged(store, *caches):
    """The body leaves the store and the caches exactly as they were, and the books in order."""
    before = store_state(store), [cache_state(cache) for cache in caches]
    yield
    assert (store_state(store), [cache_state(cache) for cache in caches]) == before
    store.check(caches)


@contextmanager
def undone(store, *caches):
    """As `unchanged`, after something that began and was taken back: blocks may have come and gone, and the rows
    past a sequence's end, which nobody reads, may hold anything."""

    def look():
        readable = [
            view(block, layer)[: cache.seq_len - i * store.block_size].tobytes()
            for cache in caches
            for layer in range(store.n_layers)
            for view in block_views(store)
            for i, block in enumerate(cache.block_table.tolist())
            if block >= 0 and i * store.block_size < cache.seq_len
        ]
        counts = [store.refcount(block) for block in range(store.total_blocks)]
        return counts, readable, [cache_state(cache) for cache in caches]

    before = look()
    yield
    assert look() == before
    store.check(caches)


@contextmanager
def refused(error, argument, store, *caches):
    """The body raises that error, which names the argument, and changes nothing."""
    with unchanged(store, *caches):
        with pytest.raises(error) as caught:
            yield caught
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    assert argument in str(caught.value), f"{argument!r} is not named: {caught.value}"


def run_python(code, timeout=60, **environment):
    """Run code in an interpreter of its own, which has to end well; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        cwd=os.path.dirname(__file__),  # not where a pagedkv beside the tests would be found first
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def scrambled(number, n):
    """n float32 of arbitrary bits: denormals, infinities and NaNs with all kinds of payloads among them."""
    seeds = np.arange(number, number + n, dtype=np.uint32)
    return (seeds * np.uint32(2654435761) ^ np.uint32(0x7F800000) * (seeds % 5 == 0)).astype(np.uint32).view(np.float32)
