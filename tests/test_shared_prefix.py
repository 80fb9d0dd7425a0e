"""Sequences that begin with the same blocks: attention reads those once, and nobody can tell but by the time it takes.

Every batch is compared with the dense reference, with each sequence alone, and to the bit with other thread counts.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from attention_support import assert_close, expected, options, rows, shuffled_store
from dtype_reference import DTYPES, STORED, round_trip
from hypothesis import given
from hypothesis import strategies as st

import pagedkv


class Family:
    """Sequences in one store, and the dense K and V that each of them reads as.

    Short or narrow prefixes are not worth sharing: `unit` is the number of positions that surely are.
    """

    def __init__(self, rng, n_kv_heads=2, head_dim=64, *, v_head_dim=None, block_size=4, dtype="float32", n_layers=1,
                 n_units=24):
        self.rng = rng
        values = np.dtype(STORED[dtype]).itemsize * n_kv_heads
        least = max(64, -(-(64 << 10) // (values * (head_dim + (v_head_dim or head_dim)))))
        self.unit = -(-least // block_size) * block_size
        n_blocks = n_units * self.unit // block_size
        self.store = shuffled_store(rng, n_blocks, n_kv_heads, head_dim, v_head_dim=v_head_dim, block_size=block_size,
                                    dtype=dtype, n_layers=n_layers)
        self.caches, self.dense = [], []

    def new_rows(self, n):
        store = self.store
        return [rows(self.rng, store.n_layers, n, store.n_kv_heads, d) for d in (store.head_dim, store.v_head_dim)]

    def root(self, n):
        """A sequence of its own; returns its number."""
        self.caches.append(pagedkv.PagedKvCache())
        self.dense.append([x[:, :0] for x in self.new_rows(0)])
        return self.grow(len(self.caches) - 1, n)

    def grow(self, i, n):
        given = self.new_rows(n)
        if n:
            self.caches[i].append_contiguous(self.store, *given, n)
        read = [round_trip(self.store.dtype, x) for x in given]
        self.dense[i] = [np.concatenate(both, axis=1) for both in zip(self.dense[i], read, strict=True)]
        return i

    def fork(self, parent, n, keep=None):
        """A clone, cut to `keep` positions, that goes on alone for n."""
        self.caches.append(self.caches[parent].clone())
        keep = self.caches[parent].seq_len if keep is None else keep
        self.caches[-1].truncate(self.store, keep)
        self.dense.append([x[:, :keep] for x in self.dense[parent]])
        return self.grow(len(self.caches) - 1, n)

    def adopt(self, blocks, n, sources):
        """A sequence on any full blocks; sources are ``(number, block index)`` of their rows."""
        size = self.store.block_size
        self.store.retain(blocks)
        cache = pagedkv.PagedKvCache()
        cache.adopt_blocks(blocks, len(blocks) * size, size, store=self.store)
        self.caches.append(cache)
        parts = [[x[:, j * size:(j + 1) * size] for x in self.dense[i]] for i, j in sources]
        self.dense.append([np.concatenate(side, axis=1) for side in zip(*parts, strict=True)])
        return self.grow(len(self.caches) - 1, n)

    def block(self, i, j):
        return int(self.caches[i].block_table[j])

    def queries(self, n_rows, group):
        return rows(self.rng, n_rows, self.store.n_kv_heads * group, self.store.head_dim)


def check(family, query_lens=1, group=2, *, order=None, layer=0, size=1.0, n_threads=(2, 3), tolerance=3e-6, **options):
    """Attends for the sequences in that order, each with its query length; returns out."""
    order = list(range(len(family.caches))) if order is None else list(order)
    query_lens = [query_lens] * len(order) if isinstance(query_lens, int) else list(query_lens)
    caches, dense = [family.caches[i] for i in order], [family.dense[i] for i in order]
    q = family.queries(sum(query_lens), group) * np.float32(size)
    options |= {"layer": layer, "return_lse": True}

    def attend(q, caches, query_lens, threads=1):
        return pagedkv.paged_attention(q, family.store, caches, query_lens=query_lens, n_threads=threads, **options)

    got = attend(q, caches, query_lens)
    for threads in n_threads:
        for one, other in zip(got, attend(q, caches, query_lens, threads), strict=True):
            np.testing.assert_array_equal(one, other)
    row = 0
    for cache, n in zip(caches, query_lens, strict=True):
        assert_close([x[row:row + n] for x in got], attend(q[row:row + n], cache, n), tolerance)
        row += n
    plain = {name: value for name, value in options.items() if name not in ("return_lse", "layer")}
    assert_close(got, expected(q, dense, query_lens, layer, **plain), tolerance)
    return got


def siblings(rng, n, units, own, more=0, **shape):
    """n sequences over one prefix of so many units, and some positions more; then each goes on alone."""
    family = Family(rng, **shape)
    root = family.root(units * family.unit + more)
    for i in range(n - 1):
        family.fork(root, own[i % len(own)])
    family.grow(root, own[-1])
    return family


# --- one prefix --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("simd")
class TestOnePrefix:
    @pytest.mark.parametrize("group", [*range(1, 17), 71])
    @pytest.mark.parametrize("n_kv_heads", [1, 3])
    def test_groups(self, rng, group, n_kv_heads):
        check(siblings(rng, 5, 1, [3, 0, 9], 5, n_kv_heads=n_kv_heads), group=group)

    @pytest.mark.parametrize("head_dim", [1, 3, 5, 7, 8, 33, 64, 80, 96, 112, 128, 192, 256])
    def test_head_dims(self, rng, head_dim):
        check(siblings(rng, 4, 1, [3, 0, 9], 1, head_dim=head_dim, n_units=3))

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(576, 512), (192, 128), (33, 31), (9, 65)])
    def test_another_width_of_v(self, rng, head_dim, v_head_dim):
        check(siblings(rng, 4, 2, [3, 0, 9], 1, n_kv_heads=1, head_dim=head_dim, v_head_dim=v_head_dim), group=16)

    @pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64, 100])
    @pytest.mark.parametrize("more", [-1, 0, 1, 40])
    def test_block_sizes(self, rng, block_size, more):
        check(siblings(rng, 4, 2, [3, 1, 20], more, block_size=block_size), [1, 2, 1, 3])

    @pytest.mark.parametrize("n", [2, 3, 16, 17, 64, 130])
    def test_any_number_of_sequences(self, rng, n):
        """The last ones are more than 256 query rows for each K/V head."""
        check(siblings(rng, n, 1, [3, 0, 9], 2, n_kv_heads=1), group=4)

    def test_many_query_rows_of_few_sequences(self, rng):
        check(siblings(rng, 60, 1, [5, 6, 9], 3, n_kv_heads=1), 5, group=4)
        check(siblings(rng, 60, 1, [5, 6, 9], 3, n_kv_heads=1), 1, group=16)

    @pytest.mark.parametrize("n_kv_heads", [1, 8])
    def test_a_prefix_that_is_worked_on_in_parts(self, rng, n_kv_heads):
        family = siblings(rng, 6, 16, [3, 0, 900, 70], 7, n_kv_heads=n_kv_heads, block_size=16, n_units=90)
        check(family, [1, 2, 1, 5, 0, 3])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", [13, 64])
    def test_dtypes(self, rng, dtype, head_dim):
        family = siblings(rng, 7, 2, [3, 0, 9], 7, head_dim=head_dim, block_size=16, dtype=dtype)
        check(family, [1, 2, 0, 3, 1, 1, 5])

    @pytest.mark.parametrize("layer", [0, 2])
    def test_layers(self, rng, layer):
        check(siblings(rng, 4, 2, [3, 5, 9], n_layers=3), [1, 2, 3, 1], layer=layer)

    def test_what_is_too_short_to_share(self, rng):
        for prefix in (1, 4, 9, 41):
            check(siblings(rng, 5, 0, [0, 3, 9], prefix))


class TestQueriesNearThePrefix:
    """No query may be computed with positions after its own, though they stand in a shared block."""

    @pytest.mark.parametrize("units", [1, 2])
    @pytest.mark.parametrize("more", [-4, -3, -1, 0, 1, 2, 3, 4, 5, 6, 8])
    @pytest.mark.parametrize("causal", [True, False])
    def test_sequences_that_are_the_same(self, rng, units, more, causal):
        family = siblings(rng, 4, units, [0], more)
        length = family.caches[0].seq_len
        for query_lens in ([1, 1, 1, 1], [0, 1, 2, 5], [5, 5, 5, 5], [1, length, 1, 1], [5, length, 4, 3]):
            check(family, query_lens, causal=causal, n_threads=(2,))

    def test_all_lengths_around_the_ends_of_blocks(self, rng):
        for more in range(-6, 8):
            check(siblings(rng, 5, 1, [0, 1, 2, 3, 4, 5], more), [5, 3, 1, 2, 4], n_threads=(2,))

    def test_prefill_beside_decode(self, rng):
        family = siblings(rng, 6, 1, [70, 0, 3, 50])
        unit = family.unit
        check(family, [1, 100, 1, 53, 0, 5])
        check(family, [1, unit, 1, 60, unit, unit + 50])
        check(family, 60)

    def test_the_same_cache_several_times(self, rng):
        family = siblings(rng, 3, 1, [3, 9])
        check(family, [1, 3, 2, 1, 5, 0, 1], order=[0, 0, 1, 2, 0, 1, 1])
        check(family, [1] * 40, order=[1] * 40)

    def test_a_child_whose_prefix_is_another_whole_sequence(self, rng):
        family = Family(rng)
        short = family.root(family.unit)
        family.fork(short, 30)
        family.fork(short, 0)
        check(family, [1, 1, 1])
        check(family, [family.unit, 2, 1])


# --- trees -------------------------------------------------------------------------------------------


class TestTrees:
    def test_groups_within_groups(self, rng):
        family = Family(rng, n_units=60)
        unit = family.unit
        root = family.root(unit)
        for branch in [family.fork(root, n * unit + 5) for n in (1, 2, 0)]:
            for leaf in [family.fork(branch, n) for n in (unit, 2 * unit + 3, 1)]:
                family.fork(leaf, 3)
                family.fork(leaf, 12, keep=family.caches[leaf].seq_len - 2)
        for order in (range(len(family.caches)), rng.permutation(len(family.caches))):
            check(family, 1, order=order)
            check(family, rng.integers(0, 6, len(family.caches)).tolist(), order=order)

    def test_several_trees_beside_sequences_of_their_own(self, rng):
        family = Family(rng, n_units=40)
        for n in (1, 2, 3):
            root = family.root(n * family.unit + n)
            for more in (0, 5, 80):
                family.fork(root, more)
            family.root(n * family.unit)
        check(family, 1, order=rng.permutation(len(family.caches)))

    @pytest.mark.parametrize("group", [1, 4])
    def test_a_deep_chain(self, rng, group):
        """300 sequences, each one block longer than the last, in any order."""
        family = Family(rng, n_kv_heads=1, head_dim=128, n_units=40)
        last = family.root(5)
        for _ in range(299):
            last = family.fork(last, 4)
        check(family, 1, group, n_threads=(2,))
        check(family, 1, group, order=rng.permutation(300), n_threads=(2,))
        check(family, 1, group, order=range(299, -1, -1), n_threads=(2,))

    def test_a_deep_chain_of_stretches(self, rng):
        """Each sequence is one stretch longer, so that the tree is as deep as the batch is wide."""
        family = Family(rng, n_kv_heads=1, head_dim=128, block_size=64, n_units=200)
        last = family.root(family.unit + 5)
        for _ in range(79):
            last = family.fork(last, family.unit)
        check(family, 1, n_threads=(2,))
        check(family, 2, order=rng.permutation(80), n_threads=(2,))

    def test_a_wide_tree_of_pairs(self, rng):
        """Each pair shares one block more than it shares with the next."""
        family = Family(rng, n_kv_heads=1, head_dim=128, n_units=30)
        trunk = family.root(10 * family.unit)
        for i in range(10, 10 * family.unit // 4, 3):
            pair = family.fork(trunk, 5, keep=4 * i)
            family.fork(pair, 2)
        check(family, 1, order=rng.permutation(len(family.caches)), n_threads=(2,))

    def test_tables_that_meet_again(self, rng):
        """Blocks that are the same, but not from the start on, are not a prefix; a block may occur twice in a table."""
        family = Family(rng, block_size=64)
        a, b = family.root(256), family.root(256)
        [a0, a1, a2, a3], [b0, b1, _, _] = (family.caches[i].block_table.tolist() for i in (a, b))
        family.adopt([a0, b1, a2], 3, [(a, 0), (b, 1), (a, 2)])
        family.adopt([b0, a1, a2, a3], 3, [(b, 0), (a, 1), (a, 2), (a, 3)])
        family.adopt([a0, a0, a1], 2, [(a, 0), (a, 0), (a, 1)])
        family.adopt([a0, a0, a0], 5, [(a, 0), (a, 0), (a, 0)])
        family.adopt([a1, a0], 1, [(a, 1), (a, 0)])
        check(family, 1)
        check(family, [2, 1, 3, 0, 5, 1, 2], order=[6, 5, 4, 3, 2, 1, 0])

    def test_nothing_to_share(self, rng):
        """To the bit what each sequence is alone."""
        family = Family(rng, block_size=16, n_units=60)
        for n in (1700, 3, 900, 16, 64):
            family.root(n)
        q = family.queries(5, 4)
        together = pagedkv.paged_attention(q, family.store, family.caches)
        for i, cache in enumerate(family.caches):
            np.testing.assert_array_equal(together[i:i + 1], pagedkv.paged_attention(q[i:i + 1], family.store, cache))


# --- options, numbers, what was dropped --------------------------------------------------------------


class TestOptions:
    @pytest.mark.parametrize("query_lens", [[1, 1, 1, 1, 1], [1, 3, 0, 5, 2]])
    @pytest.mark.parametrize("causal", [True, False])
    def test_all_together(self, rng, query_lens, causal):
        family = siblings(rng, 5, 1, [5, 8, 20], 3)
        chosen = {"softcap": 2.0, "sinks": rows(rng, 6), "alibi_slopes": abs(rows(rng, 6)) / 30, "scale": 0.4,
                  "window": family.unit + 14}
        for names in [[name] for name in chosen] + [list(chosen)]:
            check(family, query_lens, 3, causal=causal, **{name: chosen[name] for name in names})

    @pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [1, 4, 2, 5]])
    @pytest.mark.parametrize("causal", [True, False])
    def test_windows_edge_by_edge(self, rng, query_lens, causal):
        """They hide none of the prefix from a short sequence, and some or all of it from a long one."""
        family = siblings(rng, 4, 1, [0, 6, 13, 30])
        unit = family.unit
        for window in [1, 4, 29, 30, 31, *range(unit - 6, unit + 20), unit + 29, unit + 30, unit + 31, 1 << 60]:
            check(family, query_lens, window=window, causal=causal, n_threads=(2,))

    def test_dropped_blocks_are_not_a_prefix(self, rng):
        """The places of dropped blocks look alike in every table."""
        family = Family(rng)
        unit = family.unit
        for n in (3 * unit, 3 * unit, 2 * unit + 50):
            family.root(n)
        family.fork(0, 5)
        family.fork(0, 9)
        for i, position in enumerate((2 * unit, 2 * unit, 2 * unit, 2 * unit + 4, 8)):
            family.caches[i].drop_before(family.store, position)
        check(family, 1, window=unit // 2)
        check(family, [2, 1, 2, 1, 0], window=unit // 2)

    def test_one_dropped_what_another_still_reads(self, rng):
        family = siblings(rng, 4, 2, [5, 0, 7])
        family.caches[1].drop_before(family.store, family.unit + 30)
        check(family, 1, window=10)
        check(family, [1, 0, 3, 2])


class TestNumbers:
    @pytest.mark.parametrize("size", [0.0, 1e-4, 30.0, 1e3])
    def test_scores_of_any_size(self, rng, size):
        """The prefix has the greatest score of one query, the rest that of another: parts are merged by their sums."""
        tolerance = 1e-4 if size > 1 else 3e-6
        check(siblings(rng, 8, 2, [9, 20, 3]), [1, 2, 1, 3, 1, 1, 1, 5], size=size, tolerance=tolerance)

    @pytest.mark.parametrize("side", "kv")
    def test_nan_of_one_is_not_the_others(self, rng, side):
        family = siblings(rng, 4, 1, [3, 4, 5])
        bad = {"k": np.zeros(128, np.float32), "v": np.zeros(128, np.float32)}
        bad[side][:] = np.nan
        family.caches[2].push(family.store, bad["k"], bad["v"])
        q = family.queries(4, 2)
        out = pagedkv.paged_attention(q, family.store, family.caches)
        assert np.isnan(out[2]).all()
        assert np.isfinite(np.delete(out, 2, axis=0)).all()
        q[1] = np.nan
        out = pagedkv.paged_attention(q, family.store, family.caches)
        assert np.isnan(out[1:3]).all()
        assert np.isfinite(out[[0, 3]]).all()

    def test_nan_of_the_prefix_is_everybodys_who_sees_it(self, rng):
        family = Family(rng)
        root = family.root(10)
        family.caches[root].push(family.store, np.full(128, np.nan, np.float32), np.zeros(128, np.float32))
        family.dense[root] = [np.concatenate([x, x[:, :1]], axis=1) for x in family.dense[root]]
        family.grow(root, family.unit)
        for n in (3, 9, 30):
            family.fork(root, n)
        out = pagedkv.paged_attention(family.queries(4, 2), family.store, family.caches)
        assert np.isnan(out).all()
        # The NaN stands at 10; the queries stand at unit + 10, 13, 19 and 40.
        window = family.unit + 4
        out = pagedkv.paged_attention(family.queries(4, 2), family.store, family.caches, window=window)
        assert np.isnan(out).all(axis=(1, 2)).tolist() == [True, True, False, False]
        assert np.isfinite(out[2:]).all()


# --- steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_lens", [[1] * 6, [1, 3, 0, 5, 40, 2]])
def test_steps(rng, dtype, query_lens):
    """The new rows are each one's own, and forks of a part-full block are parted before they are written."""
    family = siblings(rng, 6, 1, [0, 0, 7, 20], 6, dtype=dtype, n_layers=2)
    k, v = family.new_rows(sum(query_lens))
    q = family.queries(sum(query_lens), 2)
    row, dense = 0, []
    for n, mine in zip(query_lens, family.dense, strict=True):
        new = [round_trip(dtype, x[:, row:row + n]) for x in (k, v)]
        dense.append([np.concatenate(both, axis=1) for both in zip(mine, new, strict=True)])
        row += n
    with pagedkv.Step(family.store, family.caches, query_lens) as step:
        for layer in (0, 1):
            step.write(layer, k[layer], v[layer])
            for window in (None, family.unit):
                got = step.attend(layer, q, window=window, return_lse=True)
                assert_close(got, expected(q, dense, query_lens, layer, window=window))
    for layer in (0, 1):
        after = pagedkv.paged_attention(q, family.store, family.caches, layer=layer, query_lens=query_lens)
        assert_close([after], expected(q, dense, query_lens, layer)[:1])


def test_a_step_that_attends_in_many_ways(rng):
    """Windows, masks and numbers of query heads in turn, again and again: more of them than a step remembers plans."""
    family = siblings(rng, 5, 1, [0, 3, 9], 2, n_layers=1)
    k, v = family.new_rows(5)
    dense = [[np.concatenate([x, new[:, i:i + 1]], axis=1) for x, new in zip(mine, (k, v), strict=True)]
             for i, mine in enumerate(family.dense)]
    unit = family.unit
    ways = [(window, causal, group) for window in (None, 1, 7, unit, unit + 5, unit + 9) for causal in (True, False)
            for group in (1, 4)]
    with pagedkv.Step(family.store, family.caches) as step:
        step.write(0, k[0], v[0])
        for i in [*range(len(ways)), *rng.integers(0, len(ways), 60)]:
            window, causal, group = ways[i]
            q = family.queries(5, group)
            got = step.attend(0, q, window=window, causal=causal, return_lse=True)
            assert_close(got, expected(q, dense, [1] * 5, window=window, causal=causal))


def test_many_python_threads_at_once(rng):
    """Each call has its own plan and scratch: all get what one gets alone, to the bit."""
    family = siblings(rng, 12, 3, [3, 0, 9], 5)
    q = family.queries(12, 4)
    want = pagedkv.paged_attention(q, family.store, family.caches)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: pagedkv.paged_attention(q, family.store, family.caches), range(200)):
            np.testing.assert_array_equal(got, want)


# --- by chance ---------------------------------------------------------------------------------------


@st.composite
def families(draw):
    """Forks of forks, cut anywhere."""
    shape = {"n_kv_heads": draw(st.integers(2, 4)), "head_dim": draw(st.integers(24, 80)),
             "v_head_dim": draw(st.integers(24, 80)), "block_size": draw(st.integers(1, 40)),
             "dtype": draw(st.sampled_from(DTYPES))}
    family = Family(np.random.default_rng(draw(st.integers(0, 1 << 30))), **shape, n_units=60)
    unit = family.unit
    family.root(draw(st.integers(0, 4 * unit)))
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, len(family.caches) - 1))
        if parent < 0:
            family.root(draw(st.integers(0, unit)))
        else:
            keep = draw(st.integers(0, family.caches[parent].seq_len))
            family.fork(parent, draw(st.integers(0, 2 * unit)), keep=draw(st.sampled_from([None, keep])))
    order = draw(st.lists(st.integers(0, len(family.caches) - 1), min_size=1, max_size=16))
    query_lens = [min(draw(st.integers(0, 5)), family.caches[i].seq_len) for i in order]
    group = draw(st.integers(1, 16))
    return family, order, query_lens, group, draw(options(group * shape["n_kv_heads"]))


@given(families())
def test_random_trees(drawn):
    family, order, query_lens, group, chosen = drawn
    check(family, query_lens, group, order=order, n_threads=(2,), **chosen)
