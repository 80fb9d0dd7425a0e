"""The prefix cache: looking up a prompt, and evicting, against what Python does in C for keys of the same bytes."""

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
