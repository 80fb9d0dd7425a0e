"""TieredPrefixes: what one process has computed the next one loads, whatever the tier does meanwhile."""

import os
import random
import threading
import time

import numpy as np
import pytest
from helpers import append, run_python
from test_saving import bits, make
from test_saving_prefixes import remember, seen, tree

import pagedkv
from pagedkv.tiers import FileTier, TieredPrefixes, TierStats

LONG = 60.0  # nobody is to wait so long


class MemoryTier:
    """The tier of the manual, and what tests do to one."""

    def __init__(self):
        self.values = {}
        self.calls = []

    def find(self, keys):
        self.calls.append("find")
        return next((i for i, key in enumerate(keys) if key not in self.values), len(keys))

    def load(self, keys, into):
        self.calls.append("load")
        for i, (key, buffers) in enumerate(zip(keys, into, strict=True)):
            value = memoryview(self.values.get(key, b""))
            if value.nbytes != sum(buffer.nbytes for buffer in buffers):
                return i
            for buffer in buffers:
                buffer[:], value = value[: buffer.nbytes], value[buffer.nbytes :]
        return len(keys)

    def store(self, records):
        self.calls.append("store")
        self.values.update((record.key, record.tobytes()) for record in records)
        return len(records)

    def remove(self, keys):
        return sum(self.values.pop(key, None) is not None for key in keys)

    def stats(self):
        return TierStats(records=len(self.values))

    def close(self):
        pass


def over(tier, blocks=100, dtype="float32", window=None, chunk=None, **options):
    """A new process, as far as memory goes."""
    tiered = TieredPrefixes(pagedkv.PrefixCache(make(dtype, blocks=blocks), window=window), tier, model=b"m", **options)
    if chunk is not None:
        tiered._formats = [f.__class__(**{**f.__dict__, "chunk_blocks": chunk}) for f in tiered._formats]
    return tiered


def serve(tiered, tokens, namespace=None):
    """As `remember`, by way of the tier; how many positions were there."""
    cache, store = pagedkv.PagedKvCache(), tiered.prefixes.store
    n = tiered.attach(cache, tokens, namespace=namespace, deadline=LONG)
    append(store, cache, len(tokens) - n)
    tiered.insert(tokens, cache, namespace=namespace)
    cache.release(store)
    return n


def nothing_is_held(tiered, blocks=100):
    tiered.prefixes.check()
    tiered.prefixes.clear()
    return tiered.prefixes.store.free_block_count == blocks


def filled(tokens=range(1, 102), **options):
    """A tier that has these, and the prefix cache that they came from."""
    tier = MemoryTier()
    with over(tier, **options) as tiered:
        serve(tiered, tokens)
    return tier, tiered.prefixes


# --- what comes back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 7, None])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("seed", range(3))
def test_the_next_process_finds_the_same_bits(dtype, chunk, seed):
    tier, prompts = MemoryTier(), tree(random.Random(seed))
    first = pagedkv.PrefixCache(make(dtype, blocks=400))
    for name, tokens in prompts:
        remember(first, tokens, name)
    with over(tier, 400, dtype, chunk=chunk) as tiered:
        tiered.prefixes = first
        for name, tokens in prompts:
            tiered.store(tokens, namespace=name)
    with over(tier, 400, dtype, chunk=chunk) as tiered:
        for name, tokens in random.Random(seed).sample(prompts, len(prompts)):
            loaded = tiered.load([*tokens, 0], namespace=name, deadline=LONG).wait()
            assert loaded.ended is None
            assert tiered.prefixes.match([*tokens, 0], namespace=name) >= len(tokens) // 4 * 4
        for name, tokens in prompts:
            n, first_position, found = seen(tiered.prefixes, tokens, name)
            assert (n // 4, first_position) == (len(tokens) // 4, 0)
            assert found[: n // 4 * 4] == seen(first, tokens, name)[2][: n // 4 * 4]
        stats = tiered.stats()
        assert stats.misses == stats.corrupt == stats.skipped == stats.errors == stats.waiting == 0
        assert stats.hits == 4 * tiered.prefixes.stats().blocks_held
        assert nothing_is_held(tiered, 400)


def test_another_process_with_other_hashes(tmp_path):
    pytest.importorskip("fcntl")
    code = f"""
        import hashlib, numpy as np, pagedkv
        from pagedkv.tiers import FileTier, TieredPrefixes
        store = pagedkv.PagedKvStore(4, 100, 2, 6, n_layers=3)
        prompt, cache = [*range(7, 70)], pagedkv.PagedKvCache()
        with FileTier({str(tmp_path / "tier")!r}, max_bytes=2**30) as tier:
            with TieredPrefixes(pagedkv.PrefixCache(store), tier, model=b"m", deadline=60) as tiered:
                n = tiered.attach(cache, prompt)
                rows = np.random.default_rng(5).standard_normal((2, 3, 63, 12), np.float32)[:, :, n:]
                cache.append_contiguous(store, *rows, 63 - n)
                tiered.insert(prompt, cache)
        all_rows = cache.to_contiguous(store, layer=2)
        print(n, hashlib.sha256(all_rows.k.tobytes() + all_rows.v.tobytes()).hexdigest())
    """
    first, second = (run_python(code, PYTHONHASHSEED=seed).split() for seed in "12")
    assert (first[0], second[0]) == ("0", "60")
    assert first[1:] == second[1:]


def test_a_prompt_shorter_than_a_chunk_and_what_is_longer_than_one():
    """By the records that are there: whole chunks under their keys, the tail under one of its own."""
    for n_blocks in range(1, 17):
        tokens = [*range(1, 4 * n_blocks + 2)]
        tier, _ = filled(tokens, chunk=8)
        assert len(tier.values) == -(-n_blocks // 8)
        with over(tier, chunk=8) as tiered:
            assert serve(tiered, tokens) == 4 * n_blocks
        with over(tier, chunk=8) as tiered:  # one that parts from it has the whole chunks alone
            assert serve(tiered, [*tokens[: 4 * n_blocks - 1], 999, 5]) == (4 * n_blocks - 1) // 32 * 32


def test_where_prompts_part_is_stored_once_it_was_seen():
    tier, _ = filled([*range(1, 25), 100, 101, 102, 103, 104], chunk=8)
    with over(tier, chunk=8) as tiered:
        assert serve(tiered, [*range(1, 25), 100, 101, 102, 103, 105]) == 28
        assert serve(tiered, [*range(1, 25), 200, 201, 202, 203, 204]) == 24
    with over(tier, chunk=8) as tiered:
        assert serve(tiered, [*range(1, 25), 300, 301]) == 24


def test_namespaces_and_models_share_nothing():
    tier, _ = filled(range(1, 30))
    with over(tier) as tiered:
        assert serve(tiered, range(1, 30), b"") == 0
        assert serve(tiered, range(1, 30), b"a") == 0
        assert serve(tiered, range(1, 30)) == 28
    other = TieredPrefixes(pagedkv.PrefixCache(make(blocks=100)), tier, model=b"other")
    assert other.attach(pagedkv.PagedKvCache(), range(1, 30), deadline=LONG) == 0
    other.close()


def test_from_the_second_use_on():
    tier, system = MemoryTier(), [*range(1, 22)]
    with over(tier, from_use=2) as tiered:
        serve(tiered, [*system, 50, 51, 52, 53, 54])
        assert tiered.flush()
        assert not tier.values
        serve(tiered, [*system, 60, 61, 62, 63, 64])
    assert tiered.stats().stored == len(tier.values) == 1
    with over(tier) as tiered:
        assert serve(tiered, [*system, 70, 71]) == 20
        assert tiered.stats().hits == 20


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_the_same_prompt_again(chunk):
    """Its last token is computed, and all whole blocks before it are there."""
    for n in range(5, 70):
        tier, _ = filled([*range(1, n + 1)], chunk=chunk)
        with over(tier, chunk=chunk) as tiered:
            assert tiered.load(range(1, n + 1), deadline=LONG).wait().tokens >= (n - 1) // 4 * 4
            assert tiered.prefixes.match(range(1, n + 1)) >= (n - 1) // 4 * 4


@pytest.mark.parametrize("n", [5, 41, 64, 90])
def test_layers_with_a_window_store_what_the_next_query_sees(n):
    full, windowed = pagedkv.LayerShape(None, 1, 4), pagedkv.LayerShape(12, 1, 4)
    tier, tokens, computed = MemoryTier(), [*range(1, n + 1)], {}

    def run():
        stores = pagedkv.ModelStores([full, windowed, windowed], block_size=4, total_blocks=64)
        sequence = pagedkv.ModelSequence(stores)
        with TieredPrefixes(stores.prefixes, tier, model=b"m", deadline=LONG) as tiered:
            start = tiered.attach(sequence, tokens)
            rows = np.random.default_rng(3).standard_normal((3, 2, n, 1, 4), np.float32)
            with pagedkv.Step(stores, sequence, n - start) as step:
                for layer in range(3):
                    step.write(layer, *rows[layer, :, start:])
            q = np.ones((1, 2, 4), np.float32)
            with pagedkv.Step(stores, sequence, 1) as step:
                for layer in range(3):
                    step.write(layer, q[:, :1], q[:, :1])
                    computed.setdefault(layer, []).append(step.attend(layer, q).copy())
            tiered.insert(tokens, sequence)
        sequence.release()
        stores.prefixes.check()
        stores.prefixes.clear()
        assert all(store.free_block_count == store.total_blocks for store in stores.stores)
        return start, tiered.stats()

    assert run()[0] == 0
    whole = (n // 4) * 4
    first_seen = max(whole - 4 + 1 - 12, 0) // 4
    assert len(tier.values) == 1 + n // 4 - first_seen  # one chunk, and blocks that are seen there and a block before
    start, stats = run()
    assert start == (n - 1) // 4 * 4
    assert stats.corrupt == stats.errors == 0
    for first, second in computed.values():
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("window", [None, 12, 40])
def test_what_memory_knows_is_not_loaded(window):
    common, tier = [*range(1, 65)], MemoryTier()
    prompts = [common + [100 + i] * 17 for i in range(4)]
    with over(tier, window=window, chunk=1) as tiered:
        for prompt in prompts:
            serve(tiered, prompt)
    with over(tier, window=window, chunk=1) as tiered:
        for i, prompt in enumerate(prompts):
            before = tiered.stats().loaded
            assert serve(tiered, prompt) == 80
            n_loaded = tiered.stats().loaded - before
            most = 20 if i == 0 or window == 40 else 4  # of 40, not all that is seen at the common ones' end is known
            assert n_loaded == min(most, 20 if window is None else -(-window // 4))
    assert nothing_is_held(tiered)


def test_more_than_memory_has_room_for():
    tier, first = filled(range(1, 102), chunk=2)
    for blocks in (1, 2, 5, 12, 26):
        with over(tier, blocks, chunk=2) as tiered:
            loaded = tiered.load(range(1, 102), deadline=LONG).wait()
            assert loaded.ended == (None if blocks >= 26 else "no room")
            n = tiered.prefixes.match(range(1, 102))
            assert n == loaded.tokens == min(blocks // 2 * 8, 100)
            assert seen(tiered.prefixes, range(1, n + 1))[2] == seen(first, range(1, n + 1))[2]
            assert nothing_is_held(tiered, blocks)


# --- a tier that does what it should not -----------------------------------------------------------------


def test_flipped_bits_never_get_in():
    tier, first = filled(range(1, 102), chunk=2)
    good, rng = dict(tier.values), random.Random(1)
    for _ in range(60):
        tier.values = dict(good)
        key = rng.choice(list(good))
        data = bytearray(good[key])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        tier.values[key] = bytes(data)
        with over(tier, chunk=2) as tiered:
            loaded = tiered.load(range(1, 102), deadline=LONG).wait()
            n = 8 * list(good).index(key)
            assert loaded.ended.startswith("wrong ")
            assert (loaded.tokens, tiered.prefixes.match(range(1, 102))) == (n, n)
            assert seen(tiered.prefixes, range(1, n + 1)) == seen(first, range(1, n + 1))
            assert key not in tier.values
            assert tiered.stats().corrupt == 1
            assert serve(tiered, range(1, 102)) == n
            assert tiered.flush()
            assert tier.values.keys() == good.keys()
            assert nothing_is_held(tiered)


def test_somebody_elses_records():
    tier, _ = filled(range(1, 102), chunk=2)
    keys = list(tier.values)
    tier.values = dict(zip(keys, [tier.values[key] for key in keys[1:] + keys[:1]], strict=True))
    with over(tier, chunk=2) as tiered:
        assert tiered.load(range(1, 102), deadline=LONG).wait()[0::3] == (0, "wrong first_position")
        assert nothing_is_held(tiered)


@pytest.mark.parametrize("answer", [10**9, -5, 2**70, True, np.int64(3)])
@pytest.mark.parametrize("method", ["find", "load", "store"])
def test_a_tier_that_lies(method, answer):
    tier, _ = filled(range(1, 102), chunk=2)
    if method == "load":
        setattr(tier, method, lambda keys, into: answer)
    else:
        setattr(tier, method, lambda keys: answer)
    with over(tier, chunk=2) as tiered:
        n = serve(tiered, range(1, 110))
        assert n in range(0, 101, 4)
        assert tiered.prefixes.match(range(1, 110)) == 108
    assert nothing_is_held(tiered)


ERRORS = [ValueError, OSError, MemoryError, KeyboardInterrupt, SystemExit, StopIteration, RecursionError]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", ["find", "load", "store", "remove"])
def test_a_tier_that_raises(method, error):
    tier, _ = filled(range(1, 102), chunk=2)
    last = list(tier.values)[-3]
    tier.values[last] = bytes(len(tier.values[last]))

    def fail(*arguments):
        raise error("mine")

    setattr(tier, method, fail)
    with over(tier, chunk=2) as tiered:
        n = serve(tiered, range(1, 110))
        assert n == {"find": 0, "load": 0}.get(method, 80)
    assert tiered.stats().errors > 0
    assert nothing_is_held(tiered)


@pytest.mark.parametrize("answer", [None, "x", 1.5, [3], object()])
@pytest.mark.parametrize("method", ["find", "load", "store"])
def test_a_tier_that_returns_no_number(method, answer):
    tier, _ = filled(range(1, 102), chunk=2)
    setattr(tier, method, lambda *arguments: answer)
    with over(tier, chunk=2) as tiered:
        assert serve(tiered, range(1, 102)) == (100 if method == "store" else 0)
        tiered.store(range(1, 5))
    assert tiered.stats().errors > 0 or method == "store"
    assert nothing_is_held(tiered)


def test_one_that_keeps_what_it_was_lent():
    """Late bytes find nothing that they could be written to."""
    kept = []

    class Keeping(MemoryTier):
        def load(self, keys, into):
            kept.append([buffer for buffers in into for buffer in buffers])
            return super().load(keys, into)

        def store(self, records):
            kept.append([buffer for record in records for buffer in record.buffers])
            return super().store(records)

    tier, first = filled(range(1, 102), chunk=2)
    keeping = Keeping()
    keeping.values = tier.values
    with over(keeping, chunk=2) as tiered:
        assert serve(tiered, range(1, 110)) == 100
        assert tiered.flush()
        expected = seen(first, range(1, 101))
        assert seen(tiered.prefixes, range(1, 101)) == expected
        for buffer in [buffer for buffers in kept for buffer in buffers[1:]]:
            with pytest.raises(ValueError, match="released"):
                buffer[:1] = b"\0"
        assert seen(tiered.prefixes, range(1, 101)) == expected
        assert nothing_is_held(tiered)


def test_one_that_keeps_a_slice_brings_nothing_until_it_lets_go():
    kept = []

    class Slicing(MemoryTier):
        def load(self, keys, into):
            n = super().load(keys, into)
            kept.extend(buffer[1:] for buffers in into for buffer in buffers)
            return n

    tier, _ = filled(range(1, 102), chunk=2)
    slicing = Slicing()
    slicing.values = tier.values
    with over(slicing, chunk=2) as tiered:
        loaded = tiered.load(range(1, 102), deadline=LONG).wait()
        assert loaded[0::3] == (0, "still in use")
        assert tiered.prefixes.store.free_block_count == 98
        kept.clear()
        assert nothing_is_held(tiered)


# --- a tier that takes its time ----------------------------------------------------------------------------


class Gate(MemoryTier):
    """One that hangs in a method, after some calls of it, until it is let go."""

    def __init__(self, values, method, after=0):
        super().__init__()
        self.values, self.method, self.after = values, method, after
        self.go, self.hangs = threading.Event(), threading.Event()
        for name in ("find", "load", "store"):
            setattr(self, name, self._guarded(name, getattr(self, name)))

    def _guarded(self, name, inner):
        def call(*arguments):
            if name == self.method:
                self.after -= 1
                if self.after < 0:
                    self.hangs.set()
                    assert self.go.wait(LONG)
            return inner(*arguments)

        return call


@pytest.mark.parametrize(("method", "after", "n"), [("find", 0, 0), ("load", 0, 0), ("load", 3, 24)])
def test_the_deadline_gives_what_was_there_by_then(method, after, n):
    tier, first = filled(range(1, 102), chunk=2)
    gate = Gate(tier.values, method, after)
    with over(gate, chunk=2) as tiered:
        started, cache = time.monotonic(), pagedkv.PagedKvCache()
        assert tiered.attach(cache, range(1, 102), deadline=0.4) == n
        assert 0.3 < time.monotonic() - started < 20
        assert bits(tiered.prefixes.store, cache) == (seen(first, range(1, n + 1))[2] if n else [])
        # While it hangs nobody else waits.
        started = time.monotonic()
        loading = tiered.load(range(1, 102), deadline=LONG)
        assert loading.wait().ended == "busy"
        assert time.monotonic() - started < 20
        assert tiered.stats().skipped == 1
        # What comes late is as right as what comes in time, and no sequence has it.
        before = bits(tiered.prefixes.store, cache)
        gate.go.set()
        while tiered.is_busy:
            time.sleep(0.01)
        assert bits(tiered.prefixes.store, cache) == before
        assert tiered.stats().late == 1
        if n:
            cache.release(tiered.prefixes.store)
        gate.method = None
        assert tiered.load(range(1, 102), deadline=LONG).wait().ended is None
        assert tiered.prefixes.match(range(1, 102)) == 100
        assert nothing_is_held(tiered)


def test_a_store_that_hangs_holds_little_and_nobody_waits_for_it():
    gate = Gate({}, "store")
    tiered = over(gate, chunk=2, max_waiting=3)
    for i in range(8):
        serve(tiered, [100 * (i + 1) + j for j in range(41)])
        assert gate.hangs.wait(LONG)
    assert tiered.prefixes.clear() == 80
    assert tiered.prefixes.store.free_block_count >= 90
    started = time.monotonic()
    assert not tiered.flush(0.05)
    assert not tiered.close(0.05)
    assert time.monotonic() - started < 20
    assert tiered.stats().dropped == 7
    gate.go.set()
    assert tiered.close(LONG)
    assert nothing_is_held(tiered)


@pytest.mark.parametrize("method", ["find", "load"])
def test_closing_while_it_loads(method):
    tier, _ = filled(range(1, 102), chunk=2)
    gate = Gate(tier.values, method)
    tiered = over(gate, chunk=2)
    loads = [tiered.load(range(1, 102), deadline=LONG) for _ in range(5)]
    assert gate.hangs.wait(LONG)
    assert not tiered.close(0.05)
    assert [load.wait().ended for load in loads] == ["cancelled"] + ["closed"] * 4
    assert tiered.load(range(1, 102)).wait().ended == "closed"
    tiered.store(range(1, 20))
    gate.go.set()
    assert tiered.close(LONG)
    assert nothing_is_held(tiered)


def test_cancelling_ends_the_wait():
    tier, _ = filled(range(1, 102), chunk=2)
    gate = Gate(tier.values, "load")
    with over(gate, chunk=2) as tiered:
        loading = tiered.load(range(1, 102), deadline=LONG)
        assert gate.hangs.wait(LONG)
        assert not loading.is_done
        threading.Timer(0.1, loading.cancel).start()
        assert loading.wait().ended == "cancelled"
        gate.go.set()
    assert gate.calls.count("load") == 1
    assert nothing_is_held(tiered)


def test_a_tier_that_fails_is_left_alone_for_a_while():
    tier, calls = MemoryTier(), []

    def fail(*arguments):
        calls.append(0)
        raise OSError

    tier.find = fail
    with over(tier) as tiered:
        ended = [tiered.load([i, *range(1, 30)], deadline=LONG).wait().ended for i in range(20)]
        assert ended == ["error"] * 3 + ["left alone"] * 17
        assert len(calls) == 3
        tier.find = MemoryTier.find.__get__(tier)
        time.sleep(1.1)
        assert tiered.load(range(1, 30), deadline=LONG).wait().ended is None
        assert tiered.stats().skipped == 17
        assert tiered.stats().errors == 3


def test_computing_that_is_faster_than_loading_is_not_waited_for():
    tier, _ = filled(range(1, 102))
    gate = Gate(tier.values, "find")
    with over(gate, token_seconds=0.001, deadline=LONG) as tiered:
        started = time.monotonic()
        assert tiered.attach(pagedkv.PagedKvCache(), range(1, 102)) == 0
        assert time.monotonic() - started < 20
        gate.go.set()


# --- many at once ------------------------------------------------------------------------------------------


def test_many_threads_and_little_memory(tmp_path):
    pytest.importorskip("fcntl")
    rng = random.Random(3)
    prompts = tree(rng, 30)
    expected = {}
    with FileTier(tmp_path / "tier", max_bytes=2**30) as tier, over(tier, 40, deadline=LONG) as tiered:
        store, wrong = tiered.prefixes.store, []

        def rows(ids):  # what is computed of a position depends on the tokens up to it alone
            seed = hash(tuple(ids)) % 2**32
            return np.random.default_rng(seed).standard_normal((2, 3, 1, 12), np.float32)

        def run(seed):
            own = random.Random(seed)
            for _ in range(40):
                name, tokens = own.choice(prompts)
                cache = pagedkv.PagedKvCache()
                n = tiered.attach(cache, tokens, namespace=name)
                try:
                    for i in range(n, len(tokens)):
                        k, v = rows(tokens[: i + 1])
                        cache.append_contiguous(store, k, v[:, :, : store.v_width], 1)
                except pagedkv.PagedStoreExhausted:
                    if cache.seq_len:
                        cache.release(store)
                    continue
                found = bits(store, cache)
                if expected.setdefault(tuple(tokens), found) != found:
                    wrong.append(tokens)
                tiered.insert(tokens, cache, namespace=name)
                cache.release(store)
                if own.random() < 0.1:
                    tiered.prefixes.clear()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert tiered.close(LONG)
        assert tiered.stats().hits > 0
        assert tiered.stats().corrupt == tiered.stats().errors == 0
        assert nothing_is_held(tiered, 40)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_it_hangs():
    tier, _ = filled(range(1, 102), chunk=2)
    gate = Gate(tier.values, "load")
    tiered = over(gate, chunk=2)
    tiered.load(range(1, 102), deadline=LONG)
    assert gate.hangs.wait(LONG)
    child = os.fork()
    if not child:
        try:
            gate.method = None
            is_right = tiered.load(range(1, 102), deadline=LONG).wait().tokens == 100 and tiered.close(LONG)
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    gate.go.set()
    assert os.waitpid(child, 0)[1] == 0
    assert tiered.close(LONG)


# --- arguments ---------------------------------------------------------------------------------------------


def test_what_is_refused():
    prefixes, tier = pagedkv.PrefixCache(make()), MemoryTier()
    tiered = TieredPrefixes(prefixes, tier, model=b"m")
    for error, name, call in (
        (TypeError, "prefixes", lambda: TieredPrefixes(3, tier, model=b"m")),
        (TypeError, "tier", lambda: TieredPrefixes(prefixes, 3, model=b"m")),
        (TypeError, "model", lambda: TieredPrefixes(prefixes, tier, model="m")),
        (ValueError, "model", lambda: TieredPrefixes(prefixes, tier, model=b"")),
        (ValueError, "from_use", lambda: TieredPrefixes(prefixes, tier, model=b"m", from_use=0)),
        (ValueError, "max_waiting", lambda: TieredPrefixes(prefixes, tier, model=b"m", max_waiting=0)),
        (ValueError, "deadline", lambda: TieredPrefixes(prefixes, tier, model=b"m", deadline=0)),
        (ValueError, "deadline", lambda: TieredPrefixes(prefixes, tier, model=b"m", deadline=float("nan"))),
        (TypeError, "token_seconds", lambda: TieredPrefixes(prefixes, tier, model=b"m", token_seconds="1")),
        (TypeError, "tokens", lambda: tiered.load(None)),
        (TypeError, "namespace", lambda: tiered.load([1], namespace="a")),
        (TypeError, "deadline", lambda: tiered.load([1], deadline=True)),
        (ValueError, "tokens", lambda: tiered.store([-1])),
        (TypeError, "tokens", lambda: tiered.attach(pagedkv.PagedKvCache(), "a")),
        (TypeError, "namespace", lambda: tiered.insert([1], pagedkv.PagedKvCache(), namespace=3)),
        (ValueError, "timeout", lambda: tiered.flush(-1)),
        (ValueError, "timeout", lambda: tiered.close(0)),
    ):
        with pytest.raises(error, match=f"^{name}: expected"):
            call()
    assert tier.calls == []
    assert tiered.close()
