"""The prefix cache: looking up a prompt, and evicting, against what Python does in C for keys of the same bytes."""

import math
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest

import pagedkv

BLOCK_SIZE = 16
N_TOKENS = 32768
N_BLOCKS = N_TOKENS // BLOCK_SIZE


def filled(n_prompts, *, n_tokens=N_TOKENS, n_common=0, seed=0):
    """A prefix cache of so many prompts, and they: int64 ``[n_prompts, n_tokens]``. The first tokens may be common."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, 150_000, (n_prompts, n_tokens))
    prompts[:, :n_common] = prompts[0, :n_common]
    store = pagedkv.PagedKvStore(BLOCK_SIZE, n_prompts * n_tokens // BLOCK_SIZE + 64, 1, 1)
    prefixes = pagedkv.PrefixCache(store)
    row = np.zeros((n_tokens, 1), np.float32)
    for prompt in prompts:
        cache = pagedkv.PagedKvCache()
        n = prefixes.attach(cache, prompt)
        cache.append_contiguous(store, row[n:], row[n:], n_tokens - n)
        prefixes.insert(prompt, cache)
        cache.release(store)
    return prefixes, prompts


class Hashed:
    """A dict of all blocks by their bytes alone, which is less than a prefix cache has to compare."""

    def __init__(self, prompts):
        self.known = {key: None for prompt in prompts for key in self.keys(prompt)}

    @staticmethod
    def keys(prompt):
        data = prompt.astype(np.int64).tobytes()
        step = 8 * BLOCK_SIZE
        return [data[i : i + step] for i in range(0, len(data), step)]

    def match(self, prompt):
        n = 0
        for key in self.keys(prompt):
            if key not in self.known:
                break
            n += BLOCK_SIZE
        return n


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("n_held", [1, 500], ids=["2e3 blocks", "1e6 blocks"])
def test_match_32768_tokens(against, n_held, dtype):
    """Each round another prompt of those that are held, so that its key comes from memory where there are many."""
    prefixes, prompts = filled(n_held)
    prompts = prompts.astype(dtype)
    hashed = Hashed(prompts[: min(n_held, 20)])
    turn = iter(range(1 << 30))

    def match():
        assert prefixes.match(prompts[next(turn) % n_held]) == N_TOKENS - 1

    against(match, lambda: hashed.match(prompts[0]), "cost", rounds=200)


@pytest.mark.parametrize("n_held", [1, 1000], ids=["1e3 blocks", "1e6 blocks"])
def test_match_16000_tokens(against, n_held):
    """The same prompt, and the same of it known, whatever else is held."""
    prefixes, prompts = filled(n_held, n_tokens=16000)
    hashed = Hashed(prompts[:1])
    against(lambda: prefixes.match(prompts[0]), lambda: hashed.match(prompts[0]), "cost", rounds=200)


def test_attach_32768_tokens(against):
    """Taking the blocks too, and giving them back."""
    prefixes, prompts = filled(20)
    hashed = Hashed(prompts)
    caches = []

    def attach():
        caches.append(pagedkv.PagedKvCache())
        prefixes.attach(caches[-1], prompts[3])

    against(attach, lambda: hashed.match(prompts[3]), "cost", setup=caches.clear, rounds=100)


def named(n_prompts, n_tokens, **options):
    """A prefix cache of so many prompts that no sequence holds, and they; no row is written. Options by number."""
    store = pagedkv.PagedKvStore(BLOCK_SIZE, n_prompts * n_tokens // BLOCK_SIZE + 4 * N_BLOCKS, 1, 1)
    prefixes = pagedkv.PrefixCache(store)
    prompts = np.random.default_rng(0).integers(0, 150_000, (n_prompts, n_tokens))
    for number, prompt in enumerate(prompts):
        cache = adopted(store, n_tokens)
        prefixes.insert(prompt, cache, **{name: of(number) for name, of in options.items()})
        cache.release(store)
    return prefixes, prompts


def adopted(store, n_tokens):
    cache = pagedkv.PagedKvCache()
    cache.adopt_blocks(store.acquire(n_tokens // BLOCK_SIZE), n_tokens, BLOCK_SIZE, store=store)
    return cache


def test_insert_2048_new_blocks(against):
    """Into memory that the tree had before, as in a cache that is full."""
    prefixes, _ = named(1, N_TOKENS)
    cache, prompt, known = adopted(prefixes.store, N_TOKENS), np.arange(N_TOKENS), {}

    def insert():
        assert prefixes.insert(prompt, cache) == N_BLOCKS

    def clear():
        prefixes.clear()
        known.clear()

    against(insert, lambda: known.update(dict.fromkeys(Hashed.keys(prompt))), "cost", setup=clear, rounds=100)


def test_remember_a_block_of_32768_tokens(against):
    """A sequence that grows, by a handle; the yardstick hashes the one block."""
    prefixes, _ = named(1, BLOCK_SIZE)
    store, cache, handle = prefixes.store, pagedkv.PagedKvCache(), pagedkv.PrefixHandle()
    prompt, rows, known = np.arange(2 * N_TOKENS), np.zeros((N_TOKENS, 1), np.float32), {}
    cache.append_contiguous(store, rows, rows, N_TOKENS)
    prefixes.insert(prompt[:N_TOKENS], cache, handle=handle)

    def grow():
        cache.append_contiguous(store, rows[:BLOCK_SIZE], rows[:BLOCK_SIZE], BLOCK_SIZE)

    def remember():
        assert prefixes.insert(prompt[: cache.seq_len], cache, handle=handle) <= 1

    against(remember, lambda: known.update(dict.fromkeys(Hashed.keys(prompt[:BLOCK_SIZE]))), "cost", setup=grow)


def test_evict_100000_of_1000000_blocks(against):
    prefixes, _ = named(500, N_TOKENS)
    order = OrderedDict.fromkeys(range(1_000_000))

    def evict():
        assert prefixes.evict(100_000) == 100_000

    def forget():
        for _ in range(100_000):
            order.popitem(last=False)

    against(evict, forget, "cost", rounds=3)


HELD = {  # what is there beside the block that goes: prompts, their tokens, and options of each
    "one namespace": (100, 1600, {}),
    "a namespace for each prompt": (10_000, 16, {"namespace": lambda number: b"%d" % number}),
    "terms": (1000, 160, {"ttl": lambda number: math.inf if number % 2 else 3600.0}),
}


@pytest.mark.parametrize("n", [1, 5], ids=["1e4 blocks", "5e4 blocks"])
@pytest.mark.parametrize("held", [*HELD, "held by sequences"])
def test_evict_one_block(against, held, n):
    """A short store takes one; the cost must not depend on what else is held."""
    n_prompts, n_tokens, options = HELD.get(held, HELD["one namespace"])
    prefixes, prompts = named(n * n_prompts, n_tokens, **options)
    store, caches = prefixes.store, []
    if held == "held by sequences":
        for prompt in prompts:
            caches.append(pagedkv.PagedKvCache())
            prefixes.attach(caches[-1], [*prompt.tolist(), 0])
    last = adopted(store, 1600)
    prefixes.insert(np.arange(1600), last)
    last.release(store)
    store.acquire(store.free_block_count)
    order = OrderedDict.fromkeys(range(1_000_000))
    against(lambda: store.acquire(1), lambda: order.popitem(last=False), "cost", rounds=50)


@pytest.mark.parametrize("n_tokens", [16, 512, N_TOKENS], ids=lambda n: f"prompts of {n}")
def test_memory_of_the_tree(benchmark, n_tokens):
    """Bytes a block of 16 tokens, of 32768 blocks, all alone or in long prompts: what is measured is no time."""
    n_blocks = 16 * N_BLOCKS

    def build():
        tracemalloc.start()
        prefixes = named(n_blocks * BLOCK_SIZE // n_tokens, n_tokens)[0]
        full = tracemalloc.get_traced_memory()[0]
        prefixes.clear()
        empty = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return (full - empty) / n_blocks

    bytes_a_block = benchmark.pedantic(build, rounds=1)
    benchmark.extra_info["bytes_a_block"] = round(bytes_a_block, 1)
    print(f"\nprompts of {n_tokens} tokens: {bytes_a_block:.1f} bytes a block, and 12 for each block of the store")


@pytest.mark.parametrize("n_common", [0, 2048])
def test_serve_from_a_full_cache(against, n_common):
    """Each prompt that comes makes the longest unused one go: against a dict of blocks by their bytes, oldest first."""
    n_tokens, n_held = 2304, 200
    prefixes, prompts = filled(n_held, n_tokens=n_tokens, n_common=n_common)
    store = prefixes.store
    store.acquire(store.free_block_count)
    row = np.zeros((n_tokens, 1), np.float32)
    order = OrderedDict.fromkeys(key for prompt in prompts for key in Hashed.keys(prompt))
    turn, turn_of_theirs = iter(range(1 << 30)), iter(range(1 << 30))

    def next_prompt(number):
        prompt = prompts[number % n_held].copy()
        prompt[n_common:] += 200_000 * (1 + number // n_held)
        return prompt

    def serve():
        prompt, cache = next_prompt(next(turn)), pagedkv.PagedKvCache()
        n = prefixes.attach(cache, prompt)
        assert n >= n_common
        cache.append_contiguous(store, row[n:], row[n:], n_tokens - n)
        prefixes.insert(prompt, cache)
        cache.release(store)

    def replace():
        keys = Hashed.keys(next_prompt(next(turn_of_theirs)))
        for key in keys[: n_common // BLOCK_SIZE]:
            order.move_to_end(key)
        for key in keys[n_common // BLOCK_SIZE :]:
            order.popitem(last=False)
            order[key] = None

    against(serve, replace, "cost", rounds=100)
