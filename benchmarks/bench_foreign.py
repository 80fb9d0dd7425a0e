"""Attention over blocks of somebody else: against the library's own store, and what the books of a step cost."""

import numpy as np
import pytest
from common import BLOCK_SIZE, HEAD_DIM, N_KV_HEADS, N_Q_HEADS, filled, queries, rows

import pagedkv

BATCH, CONTEXT = 8, 6000
# vLLM's blocks on CPU are a multiple of 32; K of a block and head, then V.
LAYOUTS = {"NHD": 16, "HND": 16, "vLLM": 32}
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def blocks(layout, dtype, block_size):
    """Arrays for BATCH sequences of CONTEXT positions, the tables in a random order, and the layout's name."""
    each = -(-CONTEXT // block_size)
    n_blocks = BATCH * each
    row = rows(np.random.default_rng(0), N_KV_HEADS, 1, HEAD_DIM)
    row = (row.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else row.astype(STORED[dtype])
    shape = {
        "NHD": (2, n_blocks, block_size, N_KV_HEADS, HEAD_DIM),
        "HND": (2, n_blocks, N_KV_HEADS, block_size, HEAD_DIM),
        "vLLM": (n_blocks, N_KV_HEADS, 2 * block_size, HEAD_DIM),
    }[layout]
    both = np.empty(shape, STORED[dtype])
    both[...] = row.swapaxes(0, 1) if layout == "NHD" else row
    tables = np.random.default_rng(0).permutation(n_blocks).reshape(BATCH, each).astype(np.int32)
    arrays = (both, None) if layout == "vLLM" else tuple(both)
    return arrays, tables, "HND" if layout == "vLLM" else layout


@pytest.mark.parametrize("dtype", list(STORED))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_decode(against, n_threads, layout, dtype):
    """Against `paged_attention` over a store of the same dtype with blocks of 16; both are made anew for each step."""
    store, caches = filled([CONTEXT] * BATCH, dtype=dtype)
    arrays, tables, name = blocks(layout, dtype, LAYOUTS[layout])
    q = queries(BATCH)
    out, lens = np.empty_like(q), np.full(BATCH, CONTEXT, np.int32)

    def foreign():
        batch = pagedkv.AttentionBatch(tables, lens, block_size=LAYOUTS[layout], layout=name, dtype=dtype)
        batch.attend(q, *arrays, out=out)

    against(foreign, lambda: pagedkv.paged_attention(q, store, caches, out=out), "speed", rounds=20)


def test_looking_at_the_tables(against, n_threads):
    """What is done with tables and lengths before a step, of the attention of one layer."""
    arrays, tables, name = blocks("NHD", "float32", BLOCK_SIZE)
    q, lens = queries(BATCH), np.full(BATCH, CONTEXT, np.int32)
    batch = pagedkv.AttentionBatch(tables, lens, block_size=BLOCK_SIZE, layout=name)
    against(
        lambda: pagedkv.AttentionBatch(tables, lens, block_size=BLOCK_SIZE, layout=name),
        lambda: batch.attend(q, *arrays), "cost", rounds=20,
    )


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_step_of_one_token(against, kind):
    """A batch, a write and an attend for a sequence of one position, against a `Step` on a store."""
    store, cache = pagedkv.PagedKvStore(BLOCK_SIZE, 4, N_KV_HEADS, HEAD_DIM), pagedkv.PagedKvCache()
    arrays = list(np.zeros((2, 4, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM), np.float32))
    q = np.ones((1, N_Q_HEADS, HEAD_DIM), np.float32)
    k, out = q[:, :N_KV_HEADS].copy(), np.empty_like(q)
    tables, lens, slots = np.array([[2]], np.int32), np.array([1], np.int32), np.array([32])
    own = (q, k, out)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        arrays = [torch.from_numpy(x) for x in arrays]
        q, k, out, tables, lens, slots = (torch.from_numpy(x) for x in (q, k, out, tables, lens, slots))

    def foreign():
        batch = pagedkv.AttentionBatch(tables, lens, block_size=BLOCK_SIZE)
        batch.write(*arrays, k, k, slots)
        batch.attend(q, *arrays, out=out)

    def step():
        with pagedkv.Step(store, cache) as step:
            step.write(0, own[1], own[1])
            step.attend(0, own[0], out=own[2])
        cache.release(store)

    against(foreign, step, "cost", rounds=3000)
