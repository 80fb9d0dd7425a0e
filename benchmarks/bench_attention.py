"""Attention through the block table: decode against read bandwidth, prefill against matrix products, both against
NumPy and, where it is installed, torch's scaled_dot_product_attention over contiguous K and V."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from common import HEAD_DIM, N_KV_HEADS, N_Q_HEADS, WIDTH, Read, filled, in_turn, position_bytes, queries, rows, visible

import pagedkv

GROUP = N_Q_HEADS // N_KV_HEADS
ROW_BYTES = 2 * WIDTH * 4  # K and V of a position
CACHED, NEW = 4096, 512    # of a prefill


class Product:
    """A product of two square float32 matrices by NumPy's BLAS."""

    n = 1024

    def __init__(self):
        self.a, self.b = rows(np.random.default_rng(0), 2, self.n, self.n)

    def __call__(self):
        return self.a @ self.b


class NumpyDecode:
    """One query row over a sequence: gathers its blocks, then two products a head."""

    def __init__(self, store, cache, q):
        blocks = store.total_blocks
        self.k, self.v = (np.stack([view(i) for i in range(blocks)]) for view in (store.k_block, store.v_block))
        self.table, self.n = cache.block_table, cache.seq_len
        self.q = q.reshape(N_KV_HEADS, GROUP, HEAD_DIM)

    def __call__(self):
        k, v = (x[self.table].reshape(-1, N_KV_HEADS, HEAD_DIM)[:self.n] for x in (self.k, self.v))
        score = self.q @ k.transpose(1, 2, 0) / np.sqrt(HEAD_DIM)
        weight = np.exp(score - score.max(-1, keepdims=True))
        return weight / weight.sum(-1, keepdims=True) @ v.transpose(1, 0, 2)


def torch_attention(q, k, v, n_threads):
    """torch's attention of q [n, heads, dim], the last n positions, over contiguous k and v [s, width]."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(n_threads)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    k, v = (torch.from_numpy(x.copy()).view(len(x), N_KV_HEADS, HEAD_DIM).transpose(0, 1).contiguous() for x in (k, v))
    if len(q) == 1:  # the fastest spelling of a decode: the heads of a group as so many tokens
        q = torch.from_numpy(q.copy()).view(N_KV_HEADS, GROUP, HEAD_DIM)
        return lambda: sdpa(q, k, v)
    mask = torch.zeros(len(q), k.shape[1]).masked_fill(
        ~torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(k.shape[1] - len(q)), -torch.inf)
    q = torch.from_numpy(q.copy()).transpose(0, 1).contiguous()[None]
    return lambda: sdpa(q, k[None], v[None], attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(("batch", "context"), [(1, 4096), (8, 4096), (32, 4096), (1, 32768), (4, 32768)])
def test_decode(against, n_threads, batch, context):
    # Several batches in turn, where one alone would stay in a cache.
    n_sequences = max(batch, 16 * 4096 // context)
    store, caches = filled([context] * n_sequences)
    next_batch = in_turn([caches[i:i + batch] for i in range(0, n_sequences, batch)])
    q = queries(batch)
    against(lambda: pagedkv.paged_attention(q, store, next_batch()), Read(n_threads), "speed", rounds=12,
            work=batch * context * ROW_BYTES / Read.n_bytes)


@pytest.mark.parametrize(("n_q_heads", "n_kv_heads", "head_dim", "v_head_dim"), [
    (32, 32, 128, 128), (71, 1, 64, 64), (16, 8, 256, 256), (16, 1, 576, 512),
], ids=["MHA", "MQA-71", "head_dim-256", "MLA-576-512"])
def test_decode_of_other_shapes(against, n_threads, n_q_heads, n_kv_heads, head_dim, v_head_dim):
    n_sequences = 24
    store, caches = filled([4096] * n_sequences, n_kv_heads=n_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    next_batch = in_turn([caches[i:i + 8] for i in range(0, n_sequences, 8)])
    q = queries(8, n_q_heads, head_dim)
    against(lambda: pagedkv.paged_attention(q, store, next_batch()), Read(n_threads), "speed", rounds=12,
            work=8 * 4096 * position_bytes(store) / Read.n_bytes)


@pytest.mark.parametrize("threads_each", [1, None], ids=["one-each", "as-it-comes"])
def test_two_python_threads(against, threads_each):
    """Each with sequences of its own: how much more they read together than one alone (2.0 at best, and no more than
    `test_reading_with_two_threads`)."""
    store, caches = filled([4096] * 32)
    q = queries(4)
    next_batch = in_turn([caches[i:i + 4] for i in range(0, 32, 4)])
    pool = ThreadPoolExecutor(2)

    def attend(batch, n_threads=threads_each):
        return pagedkv.paged_attention(q, store, batch, n_threads=n_threads)

    against(lambda: list(pool.map(attend, [next_batch(), next_batch()])), lambda: attend(next_batch(), 1), "speed",
            work=2)


def test_reading_with_two_threads(against):
    """The ceiling of the above."""
    against(Read(2), Read(1), "speed", rounds=12)


def test_decode_of_a_ragged_batch(against, n_threads):
    lengths = [32768, 16, 16, 512]
    store, caches = filled(lengths)
    q = queries(len(lengths))
    against(lambda: pagedkv.paged_attention(q, store, caches), Read(n_threads), "speed", rounds=12,
            work=sum(lengths) * ROW_BYTES / Read.n_bytes)


@pytest.mark.parametrize("context", [512, 4096])
def test_decode_against_numpy(against, n_threads, context):
    store, caches = filled([context])
    q = queries(1)
    against(lambda: pagedkv.paged_attention(q, store, caches), NumpyDecode(store, caches[0], q), "cost")


@pytest.mark.parametrize("context", [512, 4096, 32768])
def test_decode_against_torch(against, n_threads, context):
    store, caches = filled([context])
    q = queries(1)
    flat = caches[0].to_contiguous(store)
    against(lambda: pagedkv.paged_attention(q, store, caches), torch_attention(q, flat.k, flat.v, n_threads), "cost")


def test_prefill(against, n_threads):
    """Against matrix products of as many multiplications."""
    store, caches = filled([CACHED + NEW])
    q = queries(NEW)
    product = Product()
    against(lambda: pagedkv.paged_attention(q, store, caches, query_lens=NEW), product, "speed", rounds=5,
            work=2 * visible(NEW, CACHED + NEW) * N_Q_HEADS * HEAD_DIM / product.n ** 3)


@pytest.mark.parametrize("cached", [0, CACHED])
def test_prefill_against_torch(against, n_threads, cached):
    store, caches = filled([cached + NEW])
    q = queries(NEW)
    flat = caches[0].to_contiguous(store)
    against(lambda: pagedkv.paged_attention(q, store, caches, query_lens=NEW),
            torch_attention(q, flat.k, flat.v, n_threads), "cost", rounds=5)
