"""Moves of a server while signals from another thread interrupt it all the time: nothing is lost and nothing mixed up.

Which state a move that was interrupted has left, nobody knows: every row must be right for its tokens nevertheless,
every block must have the holders that can be found, and the next moves go on from there.
"""

import contextlib
import random
import time
from collections import Counter

import numpy as np
import pytest
from proof_core import text
from proof_ways import Thread, Timer, needs_signals
from proof_world import END, ROUNDS, World, Wrong

import pagedkv

NAMES = "abcdef"
SPACES = [None, b"", b"other"]


class Moves:
    """Sequences whose tokens come from a few texts with common beginnings. A name's tokens stay while it runs."""

    def __init__(self, seed, total_blocks):
        self.draw = random.Random(seed)
        self.world = World.plain(total_blocks)
        shared = text(1, 22)
        texts = [shared + text(2, 70), shared[:17] + text(3, 70), shared[:12] + text(4, 70), text(5, 80)]
        self.texts = {space: [[token + 10**7 * i for token in tokens] for tokens in texts]
                      for i, space in enumerate(SPACES)}  # fmt: skip
        for space, its_texts in self.texts.items():
            for tokens in its_texts:
                self.world.may_know(tokens, space)
        self.spaces = {}
        for name in NAMES:
            self.begin(name)

    def begin(self, name):
        self.spaces[name] = space = self.draw.choice(SPACES)
        self.world.start(name, self.draw.choice(self.texts[space]))

    def plan(self):
        """The next move, of which only what is to be interrupted is left to do."""
        name = self.draw.choice(NAMES)
        plans = [self.attach, self.append, self.append, self.push, self.step, self.step, self.insert, self.insert,
                 self.insert_for_a_time, self.evict, self.truncate, self.clear, self.fork, self.reorder, self.look,
                 self.end, self.end]  # fmt: skip
        return self.draw.choice(plans)(name)

    def room(self, name):
        return len(self.world.sequences[name].tokens) - self.world.cache(name).seq_len

    def attach(self, name):
        self.world.cache(name).release(self.world.store)
        self.begin(name)
        cache, tokens, space = self.world.cache(name), self.world.sequences[name].tokens, self.spaces[name]
        prompt = [*tokens[: self.draw.randrange(1, len(tokens))], END]
        return lambda: self.world.prefixes.attach(cache, prompt, namespace=space)

    def append(self, name):
        n = min(self.draw.randrange(30), self.room(name))
        kv = self.world.rows(name, n)
        return lambda: self.world.cache(name).append_contiguous(self.world.store, *kv, n)

    def push(self, name):
        n = min(self.draw.randrange(6), self.room(name))
        k, v = self.world.rows(name, n)
        cache = self.world.cache(name)
        return lambda: [cache.push(self.world.store, k[:, i], v[:, i]) for i in range(n)]

    def step(self, name):
        names = self.draw.sample(NAMES, 3)
        lens = [min(self.draw.randrange(9), self.room(name)) for name in names]
        rows = [self.world.rows(name, n) for name, n in zip(names, lens, strict=True)]
        k, v = (np.concatenate(sides, axis=1) for sides in zip(*rows, strict=True))
        caches = [self.world.cache(name) for name in names]
        comes_to_nothing = self.draw.random() < 0.2

        def act():
            with pagedkv.Step(self.world.store, caches, lens) as step:
                for layer in range(2):
                    step.write(layer, k[layer], v[layer])
                if comes_to_nothing:
                    step.rollback()

        return act

    def insert(self, name, **options):
        tokens, space = self.world.sequences[name].tokens, self.spaces[name]
        return lambda: self.world.prefixes.insert(tokens, self.world.cache(name), namespace=space, **options)

    def insert_for_a_time(self, name):
        self.world.clock.now += self.draw.choice([0, 1, 9])
        return self.insert(name, ttl=5, priority=self.draw.choice([0, 2]))

    def evict(self, name):
        n = self.draw.randrange(12)
        return lambda: self.world.prefixes.evict(n)

    def truncate(self, name):
        cache = self.world.cache(name)
        n = self.draw.randint(cache.first_position, cache.seq_len)
        if self.draw.random() < 0.3:
            return lambda: cache.drop_before(self.world.store, n)
        return lambda: cache.truncate(self.world.store, n)

    def clear(self, name):
        tokens, space, start = self.world.sequences[name].tokens, self.spaces[name], self.draw.randrange(40)
        if self.draw.random() < 0.2:
            return lambda: self.world.prefixes.clear(namespace=space)
        return lambda: self.world.prefixes.forget(tokens, namespace=space, start=start)

    def fork(self, name):
        other = self.draw.choice(NAMES)
        if name == other:
            return lambda: self.world.cache(name).clone()
        cache = self.world.cache(other)
        cache.release(self.world.store)
        self.spaces[other] = self.spaces[name]
        self.world.sequences[other].tokens = self.world.sequences[name].tokens
        return lambda: cache.clone_from(self.world.cache(name))

    def reorder(self, name):
        """Beams of one text, so that it makes no difference to the tokens who goes on from whom."""
        tokens = self.world.sequences[name].tokens
        beams = [self.world.cache(other) for other in NAMES if self.world.sequences[other].tokens == tokens]
        parents = [self.draw.randrange(len(beams)) for _ in beams]
        return lambda: pagedkv.reorder(self.world.store, beams, parents)

    def look(self, name):
        prefixes, store, tokens = self.world.prefixes, self.world.store, self.world.sequences[name].tokens
        looks = [prefixes.stats, prefixes.check, store.check, store.stats, lambda: prefixes.evictable_block_count,
                 lambda: prefixes.match_blocks(tokens), lambda: self.world.cache(name).block_table]  # fmt: skip
        return self.draw.choice(looks)

    def end(self, name):
        cache = self.world.cache(name)
        return lambda: cache.release(self.world.store)


def refused(act):
    """What a server would see to; the error must not keep the frames that hold on to a sequence."""
    with contextlib.suppress(pagedkv.PagedStoreExhausted):
        act()


@needs_signals
@pytest.mark.parametrize("fire", [Timer, Thread])
@pytest.mark.parametrize("total_blocks", [20, 60, 400])
def test_moves_under_fire(total_blocks, fire):
    """In a store that is always short, in one that is now and then, and in one that never is."""
    moves = Moves(total_blocks, total_blocks)
    n_moves = Counter()
    end = time.monotonic() + 60
    with fire(moves.draw) as fire:
        while fire.n_interrupts < ROUNDS and time.monotonic() < end:
            act = moves.plan()
            interrupted = fire.run(lambda: refused(act))  # noqa: B023
            n_moves[interrupted] += 1
            if interrupted or n_moves[False] % 20 == 0:
                moves.world.truth()
            if n_moves.total() % 50 == 0:
                moves.world.spoil()
                moves.world.truth()
    print(n_moves)
    assert fire.n_interrupts >= min(ROUNDS, 20), "too few interrupts to prove anything"
    moves.world.finish()


@pytest.mark.parametrize("seed", range(2))
def test_the_moves_themselves(seed):
    """That they find what is wrong: without interrupts all is right, and what is broken on purpose is seen."""
    moves = Moves(seed, 30)
    for _ in range(150):
        refused(moves.plan())
        moves.world.truth()
    moves.world.know(text(9, 12))
    blocks = moves.world.prefixes.match_blocks([*text(9, 12), END])
    assert len(blocks) == 3
    moves.world.store.retain(blocks)
    with pytest.raises(Wrong, match="a holder that nobody knows"):
        moves.world.truth()
    moves.world.store.release(blocks)
    moves.world.truth()
    with pytest.raises(ValueError, match="the prefix cache alone holds"):
        moves.world.store.release(blocks)
    moves.world.truth()
    moves.world.start("robbed", [*text(9, 12), END])
    moves.world.prefixes.attach(moves.world.cache("robbed"), [*text(9, 12), END])
    moves.world.store.release(blocks)
    moves.world.prefixes.evict(moves.world.store.total_blocks)
    with pytest.raises(Wrong, match="are free"):
        moves.world.truth()
