"""Random walks over a model's prefix cache: whatever a sequence starts on is the K/V of its tokens, in every layer.

A row says which tokens led to it, so one that belongs to other tokens is seen. Budgets are small: what is known is
evicted all the time, in one store or another, also between two stores that know the same.
"""

import random

import numpy as np
import pytest

import pagedkv
from pagedkv import LayerShape, ModelSequence, ModelStores

SHAPES = [LayerShape(None, 1, 4), LayerShape(5, 2, 4), LayerShape(None, 1, 4), LayerShape(9, 1, 8, 4)]
SIZE = 4


def row_numbers(tokens, layer):
    """One number a position: a digest of all tokens up to it."""
    numbers, digest = [], layer + 1
    for token in tokens:
        digest = (digest * 31 + token + 7) % 8191
        numbers.append(digest)
    return np.array(numbers, np.float32)


def grow(stores, sequence, tokens):
    n = len(tokens) - sequence.seq_len
    with pagedkv.Step(stores, sequence, n) as step:
        for layer, shape in enumerate(SHAPES):
            new = row_numbers(tokens, layer)[len(tokens) - n :, None]
            k = np.repeat(new, shape.n_kv_heads * shape.head_dim, axis=1)
            step.write(layer, k, k[:, : shape.n_kv_heads * shape.v_head_dim])


def check(stores, running):
    for sequence, tokens in running:
        assert {cache.seq_len for cache in sequence.caches} == {sequence.seq_len}
        for layer, (group, _) in enumerate(stores.places):
            first = sequence.caches[group].first_position
            assert first <= SHAPES[layer].first_needed(sequence.seq_len)
            got = sequence.to_contiguous(layer, start=first)
            right = row_numbers(tokens[: sequence.seq_len], layer)[first:, None]
            assert (got.k == right).all()
            assert (got.v == right).all()
    stores.check([sequence for sequence, _ in running])
    stats = stores.stats()
    held = 0  # by sequences, whoever else knows it
    for number, group in enumerate(stores.groups):
        blocks = {block for sequence, _ in running for block in sequence.caches[number].block_table.tolist()} - {-1}
        held += len(blocks) * group.block_nbytes
    assert stats.held_bytes <= stats.nbytes
    assert stats.held_bytes - stats.evictable_bytes == stores.nbytes_in_use == held


@pytest.mark.parametrize("seed", range(16))
def test_a_walk(seed):
    chance = random.Random(seed)
    least = ModelStores(SHAPES, 1, block_size=SIZE).nbytes
    if seed % 2:
        stores = ModelStores.from_bytes(chance.randrange(8, 40) * least, SHAPES, block_size=SIZE, max_bytes=60 * least)
    else:
        stores = ModelStores(SHAPES, chance.randrange(8, 40), block_size=SIZE)
    prefixes, running, reused, refused = stores.prefixes, [], 0, 0
    for _ in range(300):
        act = chance.choice("ssssggggggggiidrrrfecqb")
        if act == "s" and len(running) < 6:
            tokens = [chance.randrange(2) if i < 3 else i for i in range(chance.randrange(1, 40))]
            sequence, n = ModelSequence(stores), prefixes.match(tokens)
            got = prefixes.attach(sequence, tokens)
            assert got == sequence.seq_len
            assert got in (n, n // SIZE * SIZE) or got < n  # no block for the copy of a part
            reused += got
            running.append((sequence, tokens))
        if not running:
            continue
        at = chance.randrange(len(running))
        sequence, tokens = running[at]
        if act == "g" and sequence.seq_len < len(tokens):
            try:
                grow(stores, sequence, tokens[: chance.randrange(sequence.seq_len + 1, len(tokens) + 1)])
            except pagedkv.PagedStoreExhausted:
                refused += 1
                sequence.release()
                del running[at]
        elif act == "i":
            known = prefixes.match([*tokens, 0])
            assert prefixes.insert(tokens, sequence) >= 0
            assert prefixes.match([*tokens, 0]) >= min(known, sequence.seq_len // SIZE * SIZE)
        elif act == "d":
            sequence.drop_unneeded()
        elif act == "r":
            prefixes.insert(tokens, sequence)
            sequence.release()
            del running[at]
        elif act == "f":
            running.append((sequence.clone(), tokens))
        elif act == "e":
            chance.choice([prefixes, *prefixes.groups]).evict(chance.randrange(4))
        elif act == "c":
            chance.choice([prefixes, *prefixes.groups]).forget(tokens, start=chance.randrange(len(tokens)))
        elif act == "q" and sequence.can_truncate_to(sequence.seq_len // 2):
            sequence.truncate(sequence.seq_len // 2)
        elif act == "b" and seed % 2:
            try:
                stores.resize(chance.randrange(1, 61) * least)
            except ValueError:
                refused += 1
        check(stores, running)
    assert reused
    for sequence, _ in running:
        sequence.release()
    prefixes.clear()
    assert stores.stats().held_bytes == 0
