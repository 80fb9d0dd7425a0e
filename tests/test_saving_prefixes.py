"""What prefix caches know, saved and restored: the same tokens find the same bits, and no others do."""

import random

import numpy as np
import pytest
from helpers import append
from test_saving import bits, make, sequence

import pagedkv
from pagedkv.tiers import restore_prefixes, save_prefixes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved"


def remember(prefixes, tokens, namespace=None):
    """Compute what is not known, and insert it."""
    cache = pagedkv.PagedKvCache()
    n = prefixes.attach(cache, tokens, namespace=namespace)
    append(prefixes.store, cache, len(tokens) - n)
    prefixes.insert(tokens, cache, namespace=namespace)
    cache.release(prefixes.store)


def seen(prefixes, tokens, namespace=None):
    """What a request would start on: how many positions, from where, and all their bits."""
    cache = pagedkv.PagedKvCache()
    n = prefixes.attach(cache, [*tokens, 0], namespace=namespace)
    found = n, cache.first_position, bits(prefixes.store, cache)
    if n:
        cache.release(prefixes.store)
    return found


def tree(rng, n=12):
    """Prompts that begin alike, and part inside chunks and at their ends, in several namespaces."""
    prompts = []
    for _ in range(n):
        name, tokens = rng.choice([None, b"", b"a"]), []
        if prompts and rng.random() < 0.7:
            name, other = rng.choice(prompts)
            tokens = other[: rng.randrange(len(other))]
        prompts.append((name, [*tokens, *(rng.randrange(1, 9) for _ in range(rng.randrange(4, 40)))]))
    return prompts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_tokens_find_the_same_bits(path, dtype, seed):
    prompts = tree(random.Random(seed))
    prefixes = pagedkv.PrefixCache(make(dtype, blocks=400))
    for name, tokens in prompts:
        remember(prefixes, tokens, name)
    before = prefixes.stats(), prefixes.store.free_block_count
    saved = save_prefixes(path, prefixes, model=b"m")
    assert (prefixes.stats(), prefixes.store.free_block_count) == before
    other = pagedkv.PrefixCache(make(dtype, blocks=400))
    restored = restore_prefixes(path, other, model=b"m")
    assert restored.ended is None
    assert (restored.tokens, restored.records) == (saved.tokens, saved.records)
    for name, tokens in prompts:
        for each in (tokens, tokens[: len(tokens) // 2], [9, *tokens]):
            assert seen(other, each, name) == seen(prefixes, each, name)
    assert other.stats().blocks_held == prefixes.stats().blocks_held
    other.check()
    other.clear()
    assert other.store.free_block_count == 400


def test_one_namespace_alone(path):
    prefixes = pagedkv.PrefixCache(make(blocks=100))
    for name in (None, b"", b"a"):
        remember(prefixes, range(1, 30), name)
    for name in (None, b"", b"a"):
        save_prefixes(path, prefixes, model=b"m", namespace=name)
        other = pagedkv.PrefixCache(make(blocks=100))
        assert restore_prefixes(path, other, model=b"m").tokens == 28
        assert [other.match(range(1, 30), namespace=n) for n in (None, b"", b"a")] == [
            28 * (n == name) for n in (None, b"", b"a")
        ]
    save_prefixes(path, prefixes, model=b"m")
    other = pagedkv.PrefixCache(make(blocks=100))
    assert restore_prefixes(path, other, model=b"m", namespace=b"a").tokens == 28
    assert other.stats().namespaces == 1


def test_layers_with_a_window_keep_what_the_next_query_sees(path):
    full, windowed = (pagedkv.PrefixCache(make(blocks=100), window=window) for window in (None, 10))
    prompts = [[*range(1, 42)], [*range(1, 22), *range(50, 70)]]
    for tokens in prompts:
        for prefixes in (full, windowed):
            cache = sequence(prefixes.store, 41)
            prefixes.insert(tokens, cache)
            cache.release(prefixes.store)
    saved = save_prefixes(path, [full, windowed], model=b"m")
    block = full.store.nbytes // full.store.total_blocks
    assert saved.nbytes < (15 + 6 + 2) * block + 8000
    others = [pagedkv.PrefixCache(make(blocks=30), window=window) for window in (None, 10)]
    restored = restore_prefixes(path, others, model=b"m")
    assert restored.ended is None
    for tokens in prompts:
        assert seen(others[0], tokens) == seen(full, tokens)
        n, first, found = seen(others[1], tokens)
        assert n == 40
        assert first > 0
        assert found == seen(windowed, tokens)[2][-len(found) :]


def test_what_is_wrong_ends_it_and_what_was_right_stays(path):
    prefixes = pagedkv.PrefixCache(make(blocks=400))
    prompts = [[i, *range(1, 30)] for i in range(10)]
    for tokens in prompts:
        remember(prefixes, tokens)
    saved = save_prefixes(path, prefixes, model=b"m")
    good, rng = path.read_bytes(), random.Random(1)
    n_block = prefixes.store.nbytes // prefixes.store.total_blocks * 7
    for _ in range(40):
        data, at = bytearray(good), rng.randrange(600, len(good))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        other = pagedkv.PrefixCache(make(blocks=400))
        restored = restore_prefixes(path, other, model=b"m")
        assert restored.ended is not None
        assert restored.records >= at // (n_block + 500) - 1
        assert restored.records < saved.records
        known = [tokens for tokens in prompts if other.match([*tokens, 0])]
        assert len(known) == restored.records
        for tokens in known:
            assert seen(other, tokens) == seen(prefixes, tokens)
        other.clear()
        assert other.store.free_block_count == 400


def test_less_room_than_it_takes(path):
    prefixes = pagedkv.PrefixCache(make(blocks=400))
    prompts = [[i, *range(1, 30)] for i in range(10)]
    for tokens in prompts:
        remember(prefixes, tokens)
    save_prefixes(path, prefixes, model=b"m")
    for blocks in (1, 6, 7, 13, 30):
        other = pagedkv.PrefixCache(make(blocks=blocks))
        running = pagedkv.PagedKvCache()
        append(other.store, running, 4)  # what a sequence holds stays
        restored = restore_prefixes(path, other, model=b"m")
        assert restored.ended == (None if blocks > 7 else "no room")
        assert sum(other.match([*tokens, 0]) for tokens in prompts) == (4 * (blocks - 1) if blocks > 7 else 0)
        for tokens in prompts:
            found = seen(other, tokens)[2]
            n = other.match([*tokens, 0])
            assert found == seen(prefixes, tokens[:n])[2]
        running.release(other.store)
        other.clear()
        assert other.store.free_block_count == blocks


def test_an_interrupt_keeps_what_is_known(path):
    prefixes = pagedkv.PrefixCache(make(blocks=400))
    for i in range(10):
        remember(prefixes, [i, *range(1, 30)])
    save_prefixes(path, prefixes, model=b"m")
    other, calls = pagedkv.PrefixCache(make(blocks=400)), []

    def stop(done, total):
        calls.append((done, total))
        if len(calls) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_prefixes(path, other, model=b"m", progress=stop)
    assert sum(other.match([i, *range(1, 30)]) > 0 for i in range(10)) == 4
    other.clear()
    assert other.store.free_block_count == 400


def test_what_does_not_fit_is_named_and_nothing_changed(path):
    prefixes = pagedkv.PrefixCache(make(blocks=40))
    remember(prefixes, range(1, 30))
    save_prefixes(path, prefixes, model=b"m")
    other = pagedkv.PrefixCache(make(blocks=40), window=8)
    for error, name, call in (
        (ValueError, "window", lambda: restore_prefixes(path, other, model=b"m")),
        (ValueError, "dtype", lambda: restore_prefixes(path, pagedkv.PrefixCache(make("int8")), model=b"m")),
        (ValueError, "model", lambda: restore_prefixes(path, prefixes, model=b"x")),
        (ValueError, "model", lambda: save_prefixes(path, prefixes, model=b"")),
        (TypeError, "model", lambda: restore_prefixes(path, prefixes, model=None)),
        (TypeError, "namespace", lambda: save_prefixes(path, prefixes, model=b"m", namespace="a")),
        (TypeError, "namespace", lambda: restore_prefixes(path, prefixes, model=b"m", namespace="a")),
        (TypeError, r"prefixes\[0\]", lambda: save_prefixes(path, [3], model=b"m")),
        (ValueError, "prefixes", lambda: save_prefixes(path, [], model=b"m")),
    ):
        with pytest.raises(error, match=f"^{name}: expected"):
            call()
    assert other.stats().blocks_held == 0
    many = [pagedkv.PrefixCache(make(blocks=40)) for _ in range(2)]
    save_prefixes(path, many, model=b"m")
    for each in many:
        remember(each, np.arange(1, 30))
    save_prefixes(path, many, model=b"m")
    with pytest.raises(ValueError, match="^prefixes: expected one for each group"):
        restore_prefixes(path, prefixes, model=b"m")
