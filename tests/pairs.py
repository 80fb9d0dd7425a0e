"""The real thing and its twin side by side: do the same to both, and compare all that can be seen."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import reference
from dtype_reference import SCALED, Rows, assert_same, assert_same_rows
from helpers import assert_same_bits

import pagedkv

_ERRORS = {reference.StoreShort: pagedkv.PagedStoreExhausted, reference.PoolShort: pagedkv.KvPoolExhausted}


def both(real_action, twin_action):
    """Run both. Returns ``(real, twin)`` results; None where both refused, which has to be for the same reason."""
    twin, refusal = outcome(twin_action)
    real, error = outcome(real_action)
    if refusal is None:
        if error is not None:
            raise error
        return real, twin
    expected = _ERRORS.get(type(refusal), type(refusal))
    assert type(error) is expected, f"expected {expected.__name__} ({refusal}), got {error!r}"
    for name, value in vars(refusal).items():
        assert getattr(error, name) == value, f"{name}: expected {value}, got {error!r}"
    if isinstance(error, pagedkv.PagedKvError):
        assert error.__context__ is None, f"{error!r} holds on to the frames of {error.__context__!r}"
    return None


def outcome(action):
    """``(result, None)`` or ``(None, error)``; no traceback, which would keep caches alive."""
    try:
        return action(), None
    except Exception as error:
        return None, error.with_traceback(None)


@dataclass(eq=False)
class StorePair:
    real: pagedkv.PagedKvStore
    twin: reference.Store

    @classmethod
    def make(cls, block_size, total_blocks, n_kv_heads, head_dim, v_head_dim, n_layers, dtype="float32", debug=False,
             twin=reference.Store):
        """A store of these sizes and one of the class `twin`."""
        options = {"v_head_dim": v_head_dim, "n_layers": n_layers, "dtype": dtype, "debug": debug}
        real = pagedkv.PagedKvStore(block_size, total_blocks, n_kv_heads, head_dim, **options)
        k_width, v_width = n_kv_heads * head_dim, n_kv_heads * v_head_dim
        return cls(real, twin(block_size, total_blocks, k_width, v_width, n_layers, n_kv_heads, dtype))

    def poison(self):
        """Write NaN into every row of the store, and give all blocks back."""
        n = self.real.block_size * self.real.total_blocks
        cache = pagedkv.PagedKvCache()
        k = np.full((self.real.n_layers, n, self.real.k_width), np.nan, np.float32)
        v = np.full((self.real.n_layers, n, self.real.v_width), np.nan, np.float32)
        cache.append_contiguous(self.real, k, v, n)
        cache.release(self.real)


@dataclass(eq=False)
class CachePair:
    real: pagedkv.PagedKvCache
    twin: reference.Cache


@dataclass(eq=False)
class StepPair:
    real: pagedkv.Step
    twin: reference.Step
    caches: list


@dataclass(eq=False)
class Handle:
    """Blocks that the test holds itself, by id and by twin."""

    store: StorePair
    ids: list
    blocks: list


@dataclass(eq=False)
class Books:
    """Which id stands for which block of the twin, and how often the test has seen it held."""

    block_of: dict = field(default_factory=dict)
    id_of: dict = field(default_factory=dict)

    def enter(self, block_id, block):
        assert self.block_of.setdefault(block_id, block) is block, f"block {block_id} stands for two"
        assert self.id_of.setdefault(block, block_id) == block_id, f"{block_id} and {self.id_of[block]} stand for one"


def compare(store, caches, handles, n_in_steps):
    """One store and everything that holds blocks of it; steps hold n_in_steps blocks that nobody sees."""
    real, twin = store.real, store.twin
    books = Books()
    for cache in caches:
        compare_cache(cache, books)
    for handle in handles:
        for block_id, block in zip(handle.ids, handle.blocks, strict=True):
            books.enter(block_id, block)
    real.check([cache.real for cache in caches if cache.real.store is real])
    assert real.free_block_count == twin.free_block_count
    unseen = Counter()
    for block_id in range(real.total_blocks):
        block = books.block_of.get(block_id)
        if block is None:
            unseen[real.refcount(block_id)] += 1
        else:
            assert real.refcount(block_id) == block.holders
    assert Counter({1: n_in_steps, 0: twin.free_block_count}) == +unseen
    compare_blocks(real, books.block_of)


def compare_cache(cache, books):
    real, twin = cache.real, cache.twin
    assert real.seq_len == twin.seq_len
    assert real.capacity == twin.capacity
    assert real.first_position == twin.first_position
    table = real.block_table
    assert table.dtype == np.int32
    assert len(table) == len(twin.table)
    for block_id, block in zip(table.tolist(), twin.table, strict=True):
        if block is None:
            assert block_id == -1
        else:
            books.enter(block_id, block)


def compare_blocks(store, block_of):
    """Every row that was written and not lost, in every layer, as it is stored."""
    if not block_of:
        return
    written = np.stack([block.written for block in block_of.values()])

    def stored(view):
        parts = np.concatenate([view(block_id, layer) for block_id in block_of for layer in range(store.n_layers)])
        return parts.reshape(len(block_of), store.n_layers, store.block_size, -1).swapaxes(1, 2)[written]

    for side in ("k", "v"):
        sides = [getattr(block, side) for block in block_of.values()]
        values = np.stack([rows.values for rows in sides]).swapaxes(1, 2)[written]
        scales = stored_scales = None
        if store.dtype in SCALED:
            scales = np.stack([rows.scales for rows in sides]).swapaxes(1, 2)[written]
            stored_scales = stored(getattr(store, f"{side}_scales"))
        assert_same_rows(stored(getattr(store, f"{side}_block")), stored_scales, Rows(store.dtype, values, scales))


def compare_contiguous(real, rows, layer=0, dtype="float32"):
    """A KvCache against the twin's ``(k, v)`` rows, which were in a store of that dtype."""
    compare_rows = assert_same_bits if dtype == "float32" else assert_same
    assert real.seq_len == len(rows)
    for got, side in ((real.k, 0), (real.v, 1)):
        assert got.shape[0] == len(rows)
        if rows:
            compare_rows(got, np.stack([row[side][layer] for row in rows]))
