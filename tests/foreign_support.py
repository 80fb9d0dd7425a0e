"""Blocks of somebody else for the tests of `AttentionBatch`: all layouts and dtypes, NaN where nothing was written."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from dense_reference import dense_attention
from dtype_reference import encode, round_trip

import pagedkv

DTYPES = ("float32", "float16", "bfloat16")
RAW = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
# Rounding of a result in that dtype, and of what was computed before.
CLOSE = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}


def given(dtype, values):
    """float32 values as an array of that dtype; bfloat16 as bits."""
    return encode(dtype, np.asarray(values, np.float32)).values


def read(dtype, array):
    """Such an array as float32 again, in a way of its own."""
    array = np.asarray(array)
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array.astype(np.float32)


def nan(dtype, *shape):
    array = np.empty(shape, RAW[dtype])
    array.view(np.uint8).fill(0xFF)
    return array


@dataclass
class Blocks:
    """K and V of a layer: what the methods are given, and views of both [n_blocks, block_size, n_kv_heads, dim]."""

    layout: str
    arrays: tuple[Any, Any]
    k: np.ndarray
    v: np.ndarray
    owners: list = field(default_factory=list)


def turned(array):
    return array.swapaxes(1, 2)


def nhd(dtype, n, size, heads, dim, v_dim):
    k, v = nan(dtype, n, size, heads, dim), nan(dtype, n, size, heads, v_dim)
    return Blocks("NHD", (k, v), k, v)


def hnd(dtype, n, size, heads, dim, v_dim):
    k, v = nan(dtype, n, heads, size, dim), nan(dtype, n, heads, size, v_dim)
    return Blocks("HND", (k, v), turned(k), turned(v))


def stacked(dtype, n, size, heads, dim, v_dim):
    both = nan(dtype, n, 2, size, heads, dim)
    return Blocks("NHD", (both, None), both[:, 0], both[:, 1])


def stacked_first(dtype, n, size, heads, dim, v_dim):
    both = nan(dtype, 2, n, heads, size, dim)
    return Blocks("HND", (both, None), turned(both[0]), turned(both[1]))


def in_rows(dtype, n, size, heads, dim, v_dim):
    both = nan(dtype, n, heads, 2 * size, dim)
    return Blocks("HND", (both, None), turned(both[:, :, :size]), turned(both[:, :, size:]))


def in_heads(dtype, n, size, heads, dim, v_dim):
    both = nan(dtype, n, heads, size, 2 * dim)
    return Blocks("HND", (both, None), turned(both[..., :dim]), turned(both[..., dim:]))


def in_heads_by_row(dtype, n, size, heads, dim, v_dim):
    both = nan(dtype, n, size, heads, 2 * dim)
    return Blocks("NHD", (both, None), both[..., :dim], both[..., dim:])


def strided(dtype, n, size, heads, dim, v_dim):
    """Every third block, every other row, of heads with room between them; V is what is left out of K's room."""
    room = nan(dtype, 3 * n, 2 * size, heads, dim + v_dim + 3)
    k, v = room[::3, ::2, :, 2 : 2 + dim], room[1::3, 1::2, :, 3 : 3 + v_dim]
    return Blocks("NHD", (k, v), k, v, [room])


def turned_views(dtype, n, size, heads, dim, v_dim):
    """Named HND, but of rows that lie NHD."""
    k, v = nan(dtype, n, size, heads, dim), nan(dtype, n, size, heads, v_dim)
    return Blocks("HND", (turned(k), turned(v)), k, v)


def heads_first(dtype, n, size, heads, dim, v_dim):
    """All blocks of one head before those of the next."""
    k, v = (nan(dtype, heads, n, size, width).transpose(1, 2, 0, 3) for width in (dim, v_dim))
    return Blocks("NHD", (k, v), k, v)


LAYOUTS = [
    nhd,
    hnd,
    stacked,
    stacked_first,
    in_rows,
    in_heads,
    in_heads_by_row,
    strided,
    turned_views,
    heads_first,
]
APART = [nhd, hnd, strided, turned_views, heads_first]  # V may have heads of its own width


@dataclass
class Case:
    """A batch over blocks that hold its K and V, and what attention over it gives."""

    blocks: Blocks
    tables: np.ndarray
    seq_lens: list[int]
    query_lens: list[int]
    size: int
    k: list[np.ndarray]
    v: list[np.ndarray]
    q: np.ndarray
    dtype: str

    def batch(self, **options):
        if self.dtype == "bfloat16":
            options.setdefault("dtype", "bfloat16")
        return pagedkv.AttentionBatch(
            self.tables, self.seq_lens, self.query_lens, block_size=self.size, layout=self.blocks.layout, **options
        )

    def expected(self, q=None, **options):
        q = self.q if q is None else q
        rows = np.cumsum([0, *self.query_lens])
        parts = [
            dense_attention(q[rows[i] : rows[i + 1]], k, v, **options)
            for i, (k, v) in enumerate(zip(self.k, self.v, strict=True))
        ]
        return np.concatenate([out for out, _ in parts]), np.concatenate([lse for _, lse in parts])


def case(rng, make, dtype, seq_lens, query_lens, *, size=4, heads=2, group=2, dim=8, v_dim=None, common=0):
    """Blocks in a shuffled order; `common` leading ones belong to all sequences. Nothing else is in a row than NaN."""
    v_dim = v_dim or dim
    needs = [-(-n // size) for n in seq_lens]
    n_blocks = sum(needs) + 3
    blocks = make(dtype, n_blocks, size, heads, dim, v_dim)
    ids = rng.permutation(n_blocks)
    shared, ids = ids[:common], ids[common:]
    tables = np.full((len(seq_lens), max([*needs, 1]) + 2), -7, np.int32)  # entries past a length are anything
    k_all = round_trip(dtype, rng.standard_normal((n_blocks, size, heads, dim), dtype=np.float32))
    v_all = round_trip(dtype, rng.standard_normal((n_blocks, size, heads, v_dim), dtype=np.float32))
    ks, vs = [], []
    for i, (need, n) in enumerate(zip(needs, seq_lens, strict=True)):
        own, ids = ids[: max(0, need - common)], ids[max(0, need - common) :]
        table = np.concatenate([shared, own])[:need]
        tables[i, :need] = table
        ks.append(k_all[table].reshape(-1, heads, dim)[:n])
        vs.append(v_all[table].reshape(-1, heads, v_dim)[:n])
        for j, block in enumerate(table):
            rows = min(size, n - j * size)
            blocks.k[block, :rows] = given(dtype, k_all[block, :rows])
            blocks.v[block, :rows] = given(dtype, v_all[block, :rows])
    q = rng.standard_normal((sum(query_lens), heads * group, dim), dtype=np.float32)
    return Case(blocks, tables, list(seq_lens), list(query_lens), size, ks, vs, q, dtype)
