"""Every public name, used as a user would, with the types that a checker sees.

`mypy --strict` reads this file: `assert_type` says what a result is, and ``# type: ignore[code]`` marks a line that
must be an error, since an ignore of nothing is one itself. test_typing.py runs it: what is right for the checker works,
and what is an error for it raises.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

import pagedkv
from pagedkv.formats import _DTypeName

if TYPE_CHECKING:
    from typing_extensions import assert_type
else:

    def assert_type(value: Any, kind: Any) -> Any:
        """Of Python 3.11."""
        return value


Floats = npt.NDArray[np.float32]
Stored = npt.NDArray[np.float32 | np.float16 | np.int8 | np.uint16]


def ones(*shape: int) -> Floats:
    return np.ones(shape, np.float32)


def make_store(**options: Any) -> pagedkv.PagedKvStore:
    return pagedkv.PagedKvStore(4, 16, 2, 8, **options)


# --- the store ----------------------------------------------------------------------------------------


def example_store() -> None:
    store = pagedkv.PagedKvStore(
        block_size=4,
        total_blocks=16,
        n_kv_heads=2,
        head_dim=8,
        n_layers=2,
        v_head_dim=4,
        dtype="float32",
        prefault=False,
        debug=False,
    )
    assert_type(store.block_size, int)
    assert_type(store.total_blocks, int)
    assert_type(store.free_block_count, int)
    assert_type(store.n_layers, int)
    assert_type(store.n_kv_heads, int)
    assert_type(store.head_dim, int)
    assert_type(store.v_head_dim, int)
    assert_type(store.k_width, int)
    assert_type(store.v_width, int)
    assert_type(store.nbytes, int)
    assert_type(store.dtype, _DTypeName)
    with pytest.raises(AttributeError):
        store.total_blocks = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        pagedkv.PagedKvStore(4, 16, 2, 8, 2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        pagedkv.PagedKvStore(4, 16, 2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        pagedkv.PagedKvStore(4.0, 16, 2, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype"):
        pagedkv.PagedKvStore(4, 16, 2, 8, dtype=np.float64)  # type: ignore[arg-type]


def example_dtypes() -> None:
    name: str = "bfloat16"  # of a command line, say
    for store in (
        pagedkv.PagedKvStore(4, 16, 2, 8, dtype=name),
        pagedkv.PagedKvStore(4, 16, 2, 8, dtype=np.float16),
        pagedkv.PagedKvStore(4, 16, 2, 8, dtype=np.dtype(np.int8)),
    ):
        again = pagedkv.PagedKvStore(4, 16, 2, 8, dtype=store.dtype)
        assert again.dtype == store.dtype


def example_blocks() -> None:
    store = pagedkv.PagedKvStore.from_bytes(
        1 << 16, 4, 2, 8, n_layers=1, v_head_dim=None, dtype="int8", prefault=False, debug=False
    )
    assert_type(store, pagedkv.PagedKvStore)
    ids = assert_type(store.acquire(3), list[int])
    assert_type(store.acquire(), list[int])
    store.retain(ids)
    store.release(tuple(ids))
    store.release(np.array(ids))
    [first, second] = store.acquire(np.int64(2))
    store.retain(range(first, first + 1))
    assert_type(store.refcount(first), int)
    store.copy_block(first, second)
    assert_type(store.k_row(first, 0), Stored)
    assert_type(store.v_row(first, 0, layer=0), Stored)
    assert_type(store.k_block(first), Stored)
    assert_type(store.v_block(first, 0), Stored)
    assert_type(store.k_scales(first), npt.NDArray[np.float16])
    assert_type(store.v_scales(first, layer=0), npt.NDArray[np.float16])
    with pytest.raises(TypeError):
        store.release([0.5])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        store.retain(np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pagedkv.PagedKvStore.from_bytes(1 << 16, 4, 2, 8, prefautl=True)  # type: ignore[call-arg]


def example_pieces() -> None:
    store = pagedkv.PagedKvStore(4, 16, 2, 8)
    ids = store.acquire(2)
    with store.pieces(ids) as pieces:
        assert_type(pieces, pagedkv.BlockPieces)
        stored = [bytes(view) for view in assert_type(pieces.views, tuple[memoryview, ...])]
        assert_type(pieces.nbytes, int)
    pieces.release()
    with store.fill(np.int64(2)) as filling:
        assert_type(filling, pagedkv.BlockFilling)
        for view, of in zip(filling.views, stored, strict=True):
            view[:] = of
        assert_type(filling.commit(), list[int])
    assert_type(filling.ids, list[int])
    store.fill(3).commit(n=1)
    with pytest.raises(TypeError):
        store.fill(2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.pieces("0")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pagedkv.BlockPieces()


def example_looking() -> None:
    store, cache = make_store(), pagedkv.PagedKvCache()
    cache.append_contiguous(store, ones(6, 16), ones(6, 16), 6)
    stats = assert_type(store.stats(), pagedkv.StoreStats)
    assert_type(stats.held_blocks + stats.copies_on_write, int)
    total, *_ = stats
    assert_type(total, int)
    blocks = assert_type(store.block_map({"a": cache}, width=32), pagedkv.BlockMap)
    assert_type(store.block_map([cache]), pagedkv.BlockMap)
    assert_type(blocks.text, str)
    assert_type(blocks.svg, str)
    assert_type(blocks.summary, str)
    assert_type(blocks.free, int)
    assert_type(blocks.rows, tuple[tuple[str, str], ...])
    assert_type(store.trim(), int)
    store.check()
    store.check([cache])
    with pytest.raises(AttributeError):
        stats.held_blocks = 0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        blocks.free = 0  # type: ignore[misc]


# --- sequences ----------------------------------------------------------------------------------------


def example_cache() -> None:
    store, cache = make_store(), pagedkv.PagedKvCache()
    assert_type(cache.store, pagedkv.PagedKvStore | None)
    cache.push(store, ones(16), ones(2, 8))
    cache.append_contiguous(store, memoryview(bytearray(5 * 16 * 4)).cast("f", (5, 16)), ones(5, 2, 8), 5)
    assert_type(cache.seq_len, int)
    assert_type(cache.capacity, int)
    assert_type(cache.first_position, int)
    assert_type(cache.block_table, npt.NDArray[np.int32])
    assert_type(cache.blocks_needed_for(store, 9), int)
    cache.reserve(store, 9)
    assert_type(cache.can_truncate_to(4), bool)
    fork = assert_type(cache.clone(), pagedkv.PagedKvCache)
    fork.clone_from(cache)
    assert_type(copy.copy(cache), pagedkv.PagedKvCache)
    assert_type(copy.deepcopy(cache), pagedkv.PagedKvCache)
    contiguous = assert_type(cache.to_contiguous(store, layer=0), pagedkv.KvCache)
    assert_type(cache.to_contiguous(store, out=contiguous), pagedkv.KvCache)
    fork.truncate(store, 5)
    fork.drop_before(store, 4)
    fork.release(store)
    ids = store.acquire(2)
    fork.adopt_blocks(ids, seq_len=8, block_size=4, store=store, first_position=0)
    assert_type(cache.to_contiguous(store, layer=None, start=1, stop=2), list[pagedkv.KvCache])
    with pytest.raises(TypeError):
        cache.push(store, [1.0] * 16, [1.0] * 16)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        cache.push(store, np.ones(16), np.ones(16))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        cache.push(ones(16), ones(16))  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        cache.to_contiguous(store, 0)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        cache.release()  # type: ignore[call-arg]


def example_narrow_rows() -> None:
    halves, bits = np.ones(16, np.float16), np.ones(16, np.uint16)
    pagedkv.PagedKvCache().push(make_store(dtype="float16"), halves, halves)
    pagedkv.PagedKvCache().push(make_store(dtype="bfloat16"), bits, bits)
    pair, raw = (np.ones((1, 16), np.int8), np.ones((1, 2, 1), np.float16)), np.zeros((1, 20), np.uint8)
    pagedkv.PagedKvCache().append_contiguous(make_store(dtype="int8"), pair, raw, 1)


def example_contiguous() -> None:
    cache = pagedkv.KvCache(2, 8, v_head_dim=4)
    cache.push(ones(16), ones(2, 4))
    cache.extend(ones(3, 16), ones(3, 2, 4))
    assert_type(cache.k, Floats)
    assert_type(cache.v, Floats)
    assert_type(cache.seq_len, int)
    assert_type(cache.n_kv_heads, int)
    assert_type(cache.head_dim, int)
    assert_type(cache.v_head_dim, int)
    assert_type(cache.allocated_bytes, int)
    assert_type(cache.is_within_planned_capacity, bool)
    cache.truncate(2)
    cache.clear()
    assert_type(pagedkv.KvCache.with_capacity(2, 8, 100, v_head_dim=None), pagedkv.KvCache)
    pool = pagedkv.KvBlockPool(block_size=4, total_blocks=8)
    pooled = assert_type(pagedkv.KvCache.with_pool(2, 8, pool, 10), pagedkv.KvCache)
    assert_type(pool.free_blocks + pool.held + pool.block_size + pool.total_blocks, int)
    pool.resize(9)
    pooled.release_to_pool()
    halves = np.ones(16, np.float16)
    with pytest.raises(TypeError):
        cache.push(halves, ones(8))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pagedkv.KvCache.with_pool(2, 8, 100)  # type: ignore[call-arg, arg-type]


# --- attention and steps --------------------------------------------------------------------------------


def example_attention() -> None:
    store, cache = make_store(), pagedkv.PagedKvCache()
    cache.append_contiguous(store, ones(6, 16), ones(6, 16), 6)
    q, flag = ones(2, 4, 8), bool(store.n_layers)
    assert_type(pagedkv.paged_attention(q[:1], store, cache), Floats)
    out = assert_type(
        pagedkv.paged_attention(
            q,
            store,
            [cache],
            layer=0,
            query_lens=[2],
            scale=np.float32(0.5),
            window=4,
            softcap=30.0,
            sinks=ones(4),
            alibi_slopes=ones(4),
            causal=True,
            out=ones(2, 4, 8),
            n_threads=1,
        ),
        Floats,
    )
    both = pagedkv.paged_attention(q, store, (cache for _ in range(2)), query_lens=np.array([1, 1]), return_lse=True)
    assert_type(both, tuple[Floats, Floats])
    either = pagedkv.paged_attention(q, store, [cache], query_lens=2, return_lse=flag)
    assert_type(either, Floats | tuple[Floats, Floats])

    contiguous = cache.to_contiguous(store)
    assert_type(pagedkv.attention(q, contiguous.k, contiguous.v, window=3, out=out), Floats)
    out, lse = pagedkv.attention(q, ones(6, 2, 8), ones(6, 2, 8), causal=False, return_lse=True)
    merged, both_lse = pagedkv.merge_attention_states(out, lse, out, lse)
    assert_type(merged, Floats)
    assert_type(both_lse, Floats)
    assert_type(lse, Floats)
    with pytest.raises(TypeError):
        pagedkv.paged_attention(np.ones((1, 4, 8)), store, cache)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pagedkv.paged_attention(q[:1], store, cache, 0)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        pagedkv.attention(q, contiguous, contiguous)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        pagedkv.attention(q, contiguous.k, contiguous.v, out=np.ones((2, 4, 8)))  # type: ignore[arg-type]


def example_step() -> None:
    store, caches = make_store(n_layers=2), [pagedkv.PagedKvCache(), pagedkv.PagedKvCache()]
    with pagedkv.Step(store, caches, [3, 1], n_threads=1) as step:
        assert_type(step, pagedkv.Step)
        assert_type(step.positions, npt.NDArray[np.int64])
        assert_type(step.query_lens, tuple[int, ...])
        assert_type(step.seq_lens, tuple[int, ...])
        assert_type(step.n_rows, int)
        assert_type(step.new_blocks, int)
        assert step.store is store
        for layer in range(2):
            step.write(layer, ones(4, 16), ones(4, 2, 8))
            assert_type(step.attend(layer, ones(4, 4, 8), scale=0.5, window=3, out=ones(4, 4, 8)), Floats)
        _, lse = step.attend(1, ones(4, 4, 8), return_lse=True)
        assert_type(lse, Floats)
    opened = pagedkv.Step(store, caches[0], np.int64(1)).__enter__()
    assert_type(opened.rollback(), None)
    opened = pagedkv.Step(store, iter(caches)).__enter__()
    for layer in range(2):
        opened.write(layer, ones(2, 16), ones(2, 16))
    assert_type(opened.commit(), None)
    with pytest.raises(TypeError):
        pagedkv.Step(store, [store])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        pagedkv.Step(store, caches, "11")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        opened.write(0, [[1.0]], [[1.0]])  # type: ignore[arg-type]


def example_reorder() -> None:
    store, beams = make_store(), [pagedkv.PagedKvCache() for _ in range(2)]
    pagedkv.reorder(store, beams, [1, 1])
    pagedkv.reorder(store, tuple(beams), np.array([0, 0]))
    with pytest.raises(TypeError):
        pagedkv.reorder(store, beams, [0.0, 1.0])  # type: ignore[list-item]


def example_store_in_lent_memory() -> None:
    k, v = ones(2, 8, 4, 2, 8), ones(2, 8, 4, 2, 8)
    assert_type(pagedkv.PagedKvStore.from_arrays(k, v), pagedkv.PagedKvStore)
    flat = np.zeros((2, 8, 4, 16), np.uint16)
    store = pagedkv.PagedKvStore.from_arrays(flat, flat.copy(), n_kv_heads=2, dtype="bfloat16", debug=True)
    assert_type(store.n_layers, int)
    with pytest.raises(TypeError):
        pagedkv.PagedKvStore.from_arrays([1.0], v)  # type: ignore[arg-type]


def example_foreign_blocks() -> None:
    k_cache, v_cache, q = ones(8, 4, 2, 8), ones(8, 4, 2, 8), ones(3, 4, 8)
    batch = pagedkv.AttentionBatch(
        np.array([[1, 2], [3, -1]], np.int32), [5, 2], [2, 1], block_size=4, layout="NHD", dtype="float32", n_threads=1
    )
    ragged = pagedkv.AttentionBatch([1, 2, 3], [5, 2], np.array([2, 1]), block_size=4, indptr=[0, 2, 3])
    assert_type(ragged, pagedkv.AttentionBatch)
    assert_type((batch.n_seqs, batch.n_rows, batch.block_size), tuple[int, int, int])
    assert_type(batch.layout, str)
    assert_type(batch.positions, npt.NDArray[np.int64])
    batch.write(k_cache, v_cache, ones(3, 2, 8), ones(3, 2, 8))
    batch.write(np.zeros((8, 2, 4, 2, 8), np.float32), None, ones(3, 2, 8), ones(3, 2, 8), slots=batch.slots)
    assert_type(batch.attend(q, k_cache, v_cache, scale=0.5, window=4, softcap=30.0, sinks=ones(4)), npt.NDArray[Any])
    out = assert_type(batch.attend(q, k_cache, v_cache, alibi_slopes=ones(4), causal=True, out=ones(3, 4, 8)), Floats)
    assert_type(batch.attend(q, k_cache, v_cache, out=out, return_lse=True), tuple[Floats, Floats])
    with pytest.raises(TypeError):
        batch.attend([[1.0]], k_cache, v_cache)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        pagedkv.AttentionBatch([[1]], [5])  # type: ignore[call-arg]


# --- prefixes and admission -----------------------------------------------------------------------------


def example_prefixes() -> None:
    store, cache = make_store(), pagedkv.PagedKvCache()
    prefixes = pagedkv.PrefixCache(store, clock=lambda: 0.0, window=8)
    assert_type(prefixes.window, int | None)
    assert_type(prefixes.namespaces(), list[bytes | None])
    for block in prefixes.walk(namespace=None):
        assert_type(block, pagedkv.KnownBlock)
        assert_type(block.tokens, npt.NDArray[np.int64])
        assert_type(block.remaining, float | None)
    with prefixes.events(capacity=10) as events:
        assert_type(events, pagedkv.PrefixEvents)
        for event in assert_type(events.poll(n=5), list[pagedkv.PrefixEvent]):
            assert_type(event.kind, Literal["stored", "removed", "cleared"])
            assert_type(event.namespace, bytes | EllipsisType | None)
            assert_type(event.tokens, npt.NDArray[np.int64] | None)
        assert_type((events.sequence, events.n_dropped, events.incarnation, events.capacity), tuple[int, int, int, int])
        assert_type(events.ended, bool)
        events.close()
    cache.append_contiguous(store, ones(9, 16), ones(9, 16), 9)
    assert_type(prefixes.insert(range(9), cache, namespace=b"a", priority=1, ttl=60.0), int)
    assert_type(prefixes.match([*range(8), 99], namespace=b"a"), int)
    blocks = assert_type(prefixes.match_blocks(np.arange(9), namespace=b"a"), npt.NDArray[np.int32])
    assert_type(prefixes.attach(pagedkv.PagedKvCache(), (1, 2, 3)), int)
    assert_type(prefixes.is_evictable(blocks[0]), bool)
    assert_type(prefixes.evictable_block_count, int)
    assert_type(prefixes.store, pagedkv.PagedKvStore)
    assert_type(prefixes.stats(), pagedkv.PrefixStats)
    assert_type(prefixes.stats().hit_tokens, int)
    assert_type(prefixes.evict(1), int)
    assert_type(prefixes.forget([1, 2, 3, 4], namespace=b"a", start=2), int)
    assert_type(prefixes.insert(range(9), cache, handle=pagedkv.PrefixHandle()), int)
    assert_type(prefixes.clear(namespace=b"a") + prefixes.clear(namespace=None) + prefixes.clear(), int)
    prefixes.check()
    with pytest.raises(TypeError):
        prefixes.match("a prompt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="integers"):
        prefixes.match(np.ones(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        prefixes.match([1, 2], namespace="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        prefixes.match([1, 2], b"a")  # type: ignore[call-arg]


def example_admission() -> None:
    store = make_store()
    prefixes = pagedkv.PrefixCache(store)
    room = assert_type(pagedkv.room_for(store, pagedkv.PagedKvCache(), prefix=prefixes), pagedkv.Room)
    assert_type(room.now + room.with_eviction + room.ever, int)
    pending = [
        pagedkv.PendingRequest(tokens=[1, 2, 3], n_positions=3, n_most=30, namespace=b"a"),
        pagedkv.PendingRequest(cache=pagedkv.PagedKvCache()),
    ]
    plan = pagedkv.plan_admission(store, iter(pending), prefix=prefixes, keep_free=1, overtake=True)
    assert_type(plan, list[pagedkv.Admission])
    assert_type(plan[0].verdict, Literal["now", "evict", "wait", "never"])
    assert_type(plan[0].n_blocks + plan[0].num_cached_tokens, int)
    assert_type(plan[0].can_start, bool)
    assert not [one for one in plan if one.verdict == "later"]  # type: ignore[comparison-overlap]
    stores = pagedkv.ModelStores([pagedkv.LayerShape(None, 1, 4)], 8)
    queue = [pagedkv.PendingRequest([1, 2], chunk=2), pagedkv.PendingRequest(cache=pagedkv.ModelSequence(stores))]
    assert_type(pagedkv.plan_admission(stores, queue, prefix=stores.prefixes), list[pagedkv.Admission])
    with pytest.raises(AttributeError):
        pending[0].n_most = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        pagedkv.plan_admission(store, [[1, 2, 3]])  # type: ignore[list-item]


def example_shapes() -> None:
    from pagedkv.serving import ModelStores
    from pagedkv.shapes import LayerShape, group_layers, layer_shapes, model_shapes, window_of

    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16}
    shapes = assert_type(layer_shapes(config), tuple[LayerShape, ...])
    assert_type(ModelStores(shapes, 8).groups[0].shape, LayerShape)
    assert_type(shapes[0].v_head_dim + shapes[0].first_needed(9) + shapes[0].most_held(9, chunk=2, block_size=4), int)
    assert_type(group_layers(shapes), dict[LayerShape, tuple[int, ...]])
    assert_type(model_shapes(config, latent="split").max_positions, int | None)
    assert_type(window_of(config, 0), int | None)
    with pytest.raises(ValueError, match="latent"):
        layer_shapes(config, latent="other")  # type: ignore[arg-type]


def example_groups() -> None:
    shapes = [pagedkv.LayerShape(None, 2, 8), pagedkv.LayerShape(window=8, n_kv_heads=2, head_dim=8)]
    stores = pagedkv.ModelStores(shapes, 32, block_size=4, dtype="float32", debug=False)
    shared = pagedkv.ModelStores.from_bytes(1 << 20, shapes, block_size=4, dtype=np.float16, max_bytes=1 << 21)
    shared.resize(1 << 21)
    assert_type(shared, pagedkv.ModelStores)
    assert_type(stores.place_of(1), tuple[int, int])
    group = assert_type(stores.group_of(1), pagedkv.LayerGroup)
    assert_type((group.window, group.row_dtype, group.layers), tuple[int | None, str, tuple[int, ...]])
    assert_type(group.block_nbytes + group.n_blocks_in_use + group.store.total_blocks, int)
    assert_type(stores.blocks_for(9, chunk=2) + stores.bytes_for(9) + stores.trim(), int)
    assert_type(stores.nbytes + stores.nbytes_in_use + stores.total_blocks + stores.free_block_count, int)
    assert_type(stores.can_ever_fit(9, chunk=2), bool)
    assert_type(stores.stats(), pagedkv.GroupStats)
    assert_type(stores.stats().stores[0], pagedkv.StoreStats)
    assert_type((stores.places, stores.windows), tuple[tuple[tuple[int, int], ...], tuple[int | None, ...]])
    sequence = pagedkv.ModelSequence(stores)
    sequence.reserve(8, chunk=2)
    sequence.release_reserved()
    with pagedkv.Step(stores, sequence, query_lens=3) as step:
        assert_type(step.unwritten_layers, tuple[int, ...])
        assert_type(step.state, Literal["ready", "open", "committed", "rolled back"])
        for layer in range(stores.n_layers):
            step.write(layer, ones(3, 16), ones(3, 16))
    assert_type(sequence.clone(), pagedkv.ModelSequence)
    prefixes, handle = assert_type(stores.prefixes, pagedkv.PrefixCache), pagedkv.PrefixHandle()
    assert_type(prefixes.insert([1, 2, 3], sequence, handle=handle), int)
    assert_type(prefixes.attach(pagedkv.ModelSequence(stores), [1, 2, 3, 4]), int)
    assert_type(prefixes.groups[0].evictable_block_count + prefixes.stores[0].evictable_block_count, int)
    pagedkv.reorder(stores, [sequence, sequence.clone()], [1, 0])
    assert_type(sequence.blocks_needed_for(3), tuple[int, ...])
    assert_type(sequence.seq_len + sequence.capacity + sequence.first_position, int)
    assert_type(sequence.to_contiguous(0, start=1, stop=2), pagedkv.KvCache)
    assert_type(stores.block_map([sequence], width=8), tuple[pagedkv.BlockMap, ...])
    stores.check(sequences=[sequence])
    sequence.drop_unneeded()
    if sequence.can_truncate_to(2):
        sequence.truncate(2)
    sequence.release()
    with pytest.raises(TypeError):
        pagedkv.ModelSequence(stores.stores)  # type: ignore[arg-type]


def example_serving() -> None:
    from pagedkv.serving import Batch, LayerShape, ModelSequence, ModelStores, Request, Scheduler

    stores = ModelStores([LayerShape(None, 2, 8), LayerShape(window=8, n_kv_heads=2, head_dim=8)], 32, block_size=4)
    assert_type(stores.groups[0].store, pagedkv.PagedKvStore)
    assert_type(stores.prefixes.match([1, 2, 3]), int)
    assert_type(ModelSequence(stores).seq_len, int)

    def compute(batch: Batch, step: pagedkv.Step) -> list[int]:
        assert_type(batch.token_ids, list[int])
        for layer in range(stores.n_layers):
            step.write(layer, ones(step.n_rows, 16), ones(step.n_rows, 16))
            assert step.attend(layer, ones(step.n_rows, 4, 8)).dtype == np.float32
        return [5 for _ in batch.sampled]

    scheduler = Scheduler(stores, max_running=2)
    request = assert_type(scheduler.submit([1, 2, 3], 2, stop_tokens={7}, namespace=b"a"), Request)
    while not scheduler.is_idle:
        assert_type(scheduler.step(compute), list[Request])
    assert_type(request.generated, list[int])
    assert_type(request.finish_reason, Literal["stop", "length", "cancelled"] | None)
    with pytest.raises(TypeError):
        ModelStores([LayerShape(None, 2, 8)])  # type: ignore[call-arg]


# --- errors, threads, the machine -----------------------------------------------------------------------


def example_errors() -> None:
    with pytest.raises(pagedkv.PagedStoreExhausted) as full:
        make_store().acquire(99)
    assert_type(full.value.needed + full.value.free + full.value.total + full.value.held + full.value.evictable, int)
    assert_type(full.value.can_ever_fit, bool)
    with pytest.raises(pagedkv.KvPoolExhausted) as spent:
        pagedkv.KvCache.with_pool(2, 8, pagedkv.KvBlockPool(4, 1), 100)
    assert_type(spent.value.needed + spent.value.free + spent.value.total, int)
    base: type[pagedkv.PagedKvError] = pagedkv.PagedStoreExhausted
    assert issubclass(pagedkv.KvPoolExhausted, pagedkv.PagedKvError)
    assert issubclass(base, Exception)
    with pytest.raises(AttributeError):
        spent.value.can_ever_fit  # type: ignore[attr-defined]  # noqa: B018


def example_threads() -> None:
    before = assert_type(pagedkv.get_num_threads(), int)
    pagedkv.set_num_threads(1)
    pagedkv.set_num_threads(before)
    assert_type(pagedkv.use_openmp(), bool)
    pagedkv.use_openmp(False)
    info = assert_type(pagedkv.cpu_info(), pagedkv.CpuInfo)
    assert_type(info.simd + info.huge_pages, str)
    assert_type(info.available + info.features, tuple[str, ...])
    assert_type(info.usable_cpus + info.num_threads, int)
    assert_type(pagedkv.__version__, str)
    with pytest.raises(TypeError):
        pagedkv.set_num_threads("2")  # type: ignore[arg-type]


# --- integrations: checked with or without what they integrate, run with it ---------------------------------


def example_torch() -> None:
    torch = pytest.importorskip("torch")
    from pagedkv.integrations.torch import as_rows, as_tensor

    tensor = torch.ones(2, 4, 8)
    assert_type(as_rows(tensor), Floats)
    assert_type(as_rows(tensor, "float16"), npt.NDArray[np.float16])
    assert_type(as_rows(tensor, dtype="bfloat16"), npt.NDArray[np.uint16])
    assert pagedkv.attention(as_rows(tensor), ones(6, 16), ones(6, 16)).shape == (2, 4, 8)
    assert as_tensor(ones(2, 3)).shape == (2, 3)
    with pytest.raises(TypeError):
        as_tensor([1.0])  # type: ignore[arg-type]


def example_transformers() -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from pagedkv.integrations.transformers import PagedCache, PagedStores, TokenEvent, generate_batch

    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    stores = PagedStores(model, total_blocks=64, block_size=4, dtype="float32", debug=False)
    assert_type(stores.free_block_count + stores.nbytes_in_use + stores.blocks_for(9), int)
    assert_type(stores.groups[0].store, pagedkv.PagedKvStore)
    assert_type(stores.groups[0].window, int | None)
    assert_type(PagedStores.from_bytes(1 << 20, model, max_bytes=2 << 20), PagedStores)
    cache = PagedCache(stores)
    assert_type(cache.clone(), PagedCache)
    assert_type(cache.stores, PagedStores)
    events = generate_batch(model, [[1, 2, 3], np.array([4, 5])], stores=stores, max_new_tokens=2, seed=1)
    assert_type(events, Iterator[TokenEvent])
    for event in events:
        assert_type(event.request + event.token, int)
        assert_type(event.finish_reason, Literal["stop", "length"] | None)
    with pytest.raises(TypeError):
        PagedCache(model, 64)  # type: ignore[call-arg]
