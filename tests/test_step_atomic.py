"""Step: all or nothing, whatever goes wrong, and nobody interferes while it is open."""

import copy
import gc
import pickle
import threading

import numpy as np
import pytest
from helpers import (
    append,
    assert_rows,
    batch,
    cache_state,
    grown,
    refused,
    rows,
    run_python,
    unchanged,
    undone,
    write_all,
)
from hostile import Array, Unwilling, refuse

import pagedkv

# --- all or nothing ---


@pytest.mark.parametrize("stop", ["before any layer", "after a layer", "after all layers", "while writing"])
def test_an_exception_rolls_everything_back(layered, stop):
    caches, _ = batch(layered, 3, 4, 0)
    clone = caches[0].clone()

    def forward_pass():
        with pagedkv.Step(layered, caches, [1, 2, 9]) as step:
            if stop == "after a layer":
                step.write(1, rows(12, 6), rows(12, 4))
            elif stop == "after all layers":
                write_all(step)
            elif stop == "while writing":
                step.write(0, rows(12, 6), Array(rows(12, 4), refuse))
            raise Unwilling

    with undone(layered, *caches, clone), pytest.raises(Unwilling):
        forward_pass()
    with pagedkv.Step(layered, caches, [1, 2, 9]) as step:
        write_all(step)


@pytest.mark.parametrize("written", [[], [0], [0, 2], [1, 2]])
def test_a_layer_that_was_not_written_rolls_back(layered, written):
    caches, _ = batch(layered, 3, 4)

    def forward_pass():
        with pagedkv.Step(layered, caches) as step:
            for layer in written:
                step.write(layer, rows(2, 6), rows(2, 4))

    with undone(layered, *caches), pytest.raises(RuntimeError, match="not written"):
        forward_pass()
    append(layered, caches[0], 1)


@pytest.mark.parametrize("free", range(5))
def test_a_store_that_is_short_refuses_the_whole_batch(store, free):
    caches, _ = batch(store, 3, 4, 0)  # they need 1 + 1 + 3 blocks
    store.acquire(store.free_block_count - free)
    step = pagedkv.Step(store, caches, [2, 1, 9])
    with refused(pagedkv.PagedStoreExhausted, f"5 blocks needed, {free} of 16 free", store, *caches) as caught:
        step.__enter__()
    assert (caught.value.needed, caught.value.free, caught.value.total) == (5, free, 16)
    assert caught.value.can_ever_fit
    assert caught.value.__context__ is None  # or its frames could hold on to the caches
    for cache in caches:
        append(store, cache, 0)  # none is locked


@pytest.mark.parametrize("n", [2**31, 2**39])
def test_a_batch_beyond_the_store_can_never_fit(store, n):
    caches, _ = batch(store, 3)
    with refused(pagedkv.PagedStoreExhausted, "never", store, *caches) as caught:
        pagedkv.Step(store, caches, n).__enter__()
    assert not caught.value.can_ever_fit


def test_can_ever_fit_counts_what_the_batch_holds(store):
    caches, _ = batch(store, 16, 16)
    store.acquire(8)
    for lens, fits in [([16, 16], True), ([16, 17], False)]:
        with refused(pagedkv.PagedStoreExhausted, "needed", store, *caches) as caught:
            pagedkv.Step(store, caches, lens).__enter__()
        assert caught.value.can_ever_fit is fits


def test_can_ever_fit_does_not_count_copies_that_others_cause():
    store = pagedkv.PagedKvStore(4, 1, 1, 1)
    [cache], _ = batch(store, 1)
    other = cache.clone()
    with refused(pagedkv.PagedStoreExhausted, "1 blocks needed", store, cache, other) as caught:
        pagedkv.Step(store, [cache]).__enter__()
    assert caught.value.can_ever_fit
    with refused(pagedkv.PagedStoreExhausted, "2 blocks needed", store, cache, other) as caught:
        pagedkv.Step(store, [cache, other]).__enter__()
    assert not caught.value.can_ever_fit
    other.release(store)
    with pagedkv.Step(store, [cache]) as step:
        write_all(step)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_step_ends_early_and_once(store, end):
    caches, _ = batch(store, 3)
    with pagedkv.Step(store, caches) as step:
        write_all(step)
        getattr(step, end)()
        assert caches[0].seq_len == (4 if end == "commit" else 3)
        caches[0].reserve(store, 1)
        for again in (step.commit, step.rollback, lambda: write_all(step)):
            with pytest.raises(RuntimeError, match="step"):
                again()
    assert caches[0].seq_len == (4 if end == "commit" else 3)


def test_an_exception_after_the_commit_undoes_nothing(store):
    caches, _ = batch(store, 3)

    def forward_pass():
        with pagedkv.Step(store, caches) as step:
            write_all(step)
            step.commit()
            raise Unwilling

    with pytest.raises(Unwilling):
        forward_pass()
    assert caches[0].seq_len == 4


def test_a_step_is_entered_once(store):
    caches, _ = batch(store, 3)
    step = pagedkv.Step(store, caches)
    for early in (step.commit, step.rollback, lambda: step.write(0, rows(1, 6), rows(1, 4))):
        with refused(RuntimeError, "step", store, *caches):
            early()
    with step:
        with pytest.raises(RuntimeError, match="step"):
            step.__enter__()
        write_all(step)
    with refused(RuntimeError, "step", store, *caches):
        step.__enter__()


def test_leaving_a_step_that_never_began_is_no_change(store):
    caches, _ = batch(store, 3)
    with unchanged(store, *caches):
        pagedkv.Step(store, caches).__exit__(None, None, None)


# --- while it is open ---


def test_its_sequences_are_locked_and_can_be_looked_at(store):
    [cache], _ = batch(store, 6)
    other = pagedkv.PagedKvCache()
    k, v = rows(6), rows(4)
    state = cache_state(cache)
    with pagedkv.Step(store, [cache]) as step:
        for name, attempt in {
            "push": lambda: cache.push(store, k, v),
            "append_contiguous": lambda: append(store, cache, 1),
            "append_contiguous of nothing": lambda: append(store, cache, 0),
            "reserve": lambda: cache.reserve(store, 0),
            "release": lambda: cache.release(store),
            "truncate": lambda: cache.truncate(store, 6),
            "drop_before": lambda: cache.drop_before(store, 0),
            "clone": cache.clone,
            "copy": lambda: copy.copy(cache),
            "clone_from it": lambda: other.clone_from(cache),
            "clone_from another": lambda: cache.clone_from(other),
            "adopt_blocks": lambda: cache.adopt_blocks([], 0, 4),
            "to_contiguous": lambda: cache.to_contiguous(store),
            "paged_attention": lambda: pagedkv.paged_attention(np.zeros((1, 2, 3), np.float32), store, cache),
            "another step": lambda: pagedkv.Step(store, [other, cache]).__enter__(),
        }.items():
            with refused(RuntimeError, "in use", store, cache, other):
                attempt()
            assert name
        assert cache_state(cache) == state
        assert repr(cache) == "PagedKvCache(seq_len=6, capacity=8, blocks=[0, 1])"
        append(store, other, 5)  # others are free to go on
        write_all(step)
    assert cache.seq_len == 7
    cache.release(store)


def test_a_refused_step_unlocks_those_it_had_locked(store):
    caches, _ = batch(store, 3, 3, 3)
    with pagedkv.Step(store, caches[2]) as step:
        with refused(RuntimeError, "in use", store, *caches):
            pagedkv.Step(store, caches).__enter__()
        append(store, caches[0], 1)
        append(store, caches[1], 1)
        write_all(step)


def test_two_steps_of_one_store_side_by_side(layered):
    (a, b), old = batch(layered, 3, 4)
    with pagedkv.Step(layered, [a], 2) as first, pagedkv.Step(layered, [b], 3) as second:
        new_b = write_all(second)
        new_a = write_all(first)
    assert_rows(layered, a, *grown(old[0], new_a, slice(0, 2)))
    assert_rows(layered, b, *grown(old[1], new_b, slice(0, 3)))


def test_a_forgotten_step_rolls_back(store):
    caches, _ = batch(store, 3, 4)
    clone = caches[0].clone()
    step = pagedkv.Step(store, caches, [9, 9])
    with undone(store, *caches, clone):
        step.__enter__()
        write_all(step)
        del step
        gc.collect()
    append(store, caches[0], 1)


@pytest.mark.parametrize("order", ["[step, cache, store]", "[store, cache, step]", "[cache, step, store]"])
def test_a_cycle_of_an_open_step_is_collected(order):
    run_python(f"""
        import gc, weakref, pagedkv
        gc.disable()
        for _ in range(20):
            store, cache = pagedkv.PagedKvStore(4, 8, 1, 1, debug=True), pagedkv.PagedKvCache()
            cache.reserve(store, 5)
            step = pagedkv.Step(store, [cache, pagedkv.PagedKvCache()], 9)
            step.__enter__()
            seen = weakref.ref(store), weakref.ref(cache), weakref.ref(step)
            cycle = {order}
            cycle.append(cycle)
            del store, cache, step, cycle
            gc.collect()
            assert [ref() for ref in seen] == [None] * 3
    """)


def test_a_step_in_another_thread_is_refused_while_one_runs(store):
    """Two threads in one step: the second call is refused or follows, and the rows are those of one of them."""
    large = pagedkv.PagedKvStore(16, 64, 8, 128)
    cache = pagedkv.PagedKvCache()
    errors = []

    def write(step, k, v):
        try:
            step.write(0, k, v)
        except RuntimeError as error:
            errors.append(str(error))

    for _ in range(10):
        with pagedkv.Step(large, cache, 1000) as step:
            parts = [np.full((1000, 1024), value, np.float32) for value in (1, 2)]
            threads = [threading.Thread(target=write, args=(step, part, part)) for part in parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        k = cache.to_contiguous(large).k
        assert (k == k[0, 0]).all()
        cache.release(large)
    assert all("another call on it is running" in error for error in errors)


# --- what it refuses ---


@pytest.mark.parametrize(
    ("caches", "error"),
    [
        (None, TypeError),
        (5, TypeError),
        ([None], TypeError),
        ([pagedkv.PagedKvCache], TypeError),
        ("ab", TypeError),
        ([[pagedkv.PagedKvCache()]], TypeError),
        ({"a": 1}, TypeError),
    ],
)
def test_what_are_no_caches(store, caches, error):
    with refused(error, "caches", store):
        pagedkv.Step(store, caches)


def test_the_same_cache_twice(store):
    caches, _ = batch(store, 3, 4)
    with refused(ValueError, "caches", store, *caches):
        pagedkv.Step(store, [*caches, caches[0]])


def test_a_cache_of_another_store(store, layered):
    (mine,), _ = batch(store, 3)
    (other,), _ = batch(layered, 3)
    with unchanged(layered, other), refused(ValueError, "store", store, mine):
        pagedkv.Step(store, [mine, other]).__enter__()
    append(store, mine, 1)
    append(layered, other, 1)


@pytest.mark.parametrize(
    "lens", [[1], [1, 1, 1], [], [1, -1], -1, [1, 2**63], 2**64, [2**39, 2**41], np.array([1]), ()]
)
def test_query_lens_of_another_number_or_size(store, lens):
    caches, _ = batch(store, 3, 4)
    with refused(ValueError, "query_lens", store, *caches):
        pagedkv.Step(store, caches, lens)


@pytest.mark.parametrize(
    "lens", [None, 1.0, True, "11", b"11", [1, 1.0], [1, None], [True, 1], {1, 2}, {1: 1, 2: 2}, object()]
)
def test_what_are_no_query_lens(store, lens):
    caches, _ = batch(store, 3, 4)
    with refused(TypeError, "query_lens", store, *caches):
        pagedkv.Step(store, caches, lens)


@pytest.mark.parametrize("wrong", [None, 5, object(), pagedkv.PagedKvStore])
def test_what_is_no_store(store, wrong):
    with pytest.raises(TypeError, match="store"):
        pagedkv.Step(wrong, [])


@pytest.mark.parametrize(
    ("n_threads", "error"), [(0, ValueError), (-1, ValueError), (257, ValueError), (True, TypeError), (1.5, TypeError)]
)
def test_numbers_of_threads(store, n_threads, error):
    with refused(error, "n_threads", store):
        pagedkv.Step(store, [], n_threads=n_threads)
    caches, old = batch(store, 3)
    with pagedkv.Step(store, caches, n_threads=3) as step:
        new = write_all(step)
    assert_rows(store, caches[0], *grown(old[0], new, slice(0, 1)))


def test_layers_out_of_range(layered):
    caches, _ = batch(layered, 3)
    with pagedkv.Step(layered, caches) as step:
        for layer in (-1, 3, 2**32, 2**64):
            with refused(IndexError, "layer", layered, *caches):
                step.write(layer, rows(1, 6), rows(1, 4))
        for layer in (None, True, 1.0, "0"):
            with refused(TypeError, "layer", layered, *caches):
                step.write(layer, rows(1, 6), rows(1, 4))
        step.rollback()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda a: None, TypeError),
        (lambda a: a.astype(np.float64), TypeError),
        (lambda a: a.astype(">f4"), TypeError),
        (lambda a: a.tolist(), TypeError),
        (lambda a: a[:2], ValueError),
        (lambda a: a[:, :3], ValueError),
        (lambda a: np.concatenate([a, a]), ValueError),
        (lambda a: a[None, None], ValueError),
        (lambda a: a.reshape(-1), ValueError),
        (lambda a: a[:0], ValueError),
    ],
)
def test_rows_that_do_not_fit(store, spoil, error):
    caches, old = batch(store, 3, 4)
    with pagedkv.Step(store, caches, [1, 2]) as step:
        k, v = write_all(step)
        with refused(error, "k: expected float32 [3, 6]", store, *caches):
            step.write(0, spoil(k[0]), v[0])
        with refused(error, "v: expected float32 [3, 4]", store, *caches):
            step.write(0, k[0], spoil(v[0]))
    assert_rows(store, caches[1], *grown(old[1], (k, v), slice(1, 3)))  # the refused rows were not written


def test_repr_and_pickling(store):
    caches, _ = batch(store, 3, 4)
    step = pagedkv.Step(store, caches, [1, 2])
    assert repr(step) == "Step(sequences=2, n_rows=3, ready)"
    with step:
        assert "open" in repr(step)
        write_all(step)
    assert "committed" in repr(step)
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError):
            attempt(step)


def test_an_unfinished_step_lets_its_sequences_go_at_exit():
    run_python("""
        import pagedkv
        store, cache = pagedkv.PagedKvStore(4, 8, 1, 1), pagedkv.PagedKvCache()
        pagedkv.kept = pagedkv.Step(store, [cache], 3)
        pagedkv.kept.__enter__()
    """)
