"""The twin of `PrefixCache`: every known beginning is an entry of a dict, and everything is found by looking at all.

Imports nothing of pagedkv. Blocks are ids here, since the test tells it which ones a sequence has, and `is_held(id)`
whether a sequence holds one.
"""


class Entry:
    def __init__(self, block, used, priority, until):
        self.block = block
        self.used = used
        self.priority = priority
        self.until = until


class Prefixes:
    def __init__(self, block_size, is_held, now):
        self.block_size = block_size
        self.is_held = is_held
        self.now = now
        self.spaces = {}  # namespace -> {tuple of tokens up to a block's end: Entry}
        self.n_uses = 0
        self.hit_tokens = 0
        self.missed_tokens = 0
        self.inserted = 0
        self.evicted = 0

    def entries(self):
        return [entry for space in self.spaces.values() for entry in space.values()]

    def blocks(self):
        return [entry.block for entry in self.entries()]

    # --- looking ---

    def common(self, namespace, tokens):
        """How many of the tokens begin something known."""
        best = 0
        for known in self.spaces.get(namespace, {}):
            n = 0
            while n < min(len(known), len(tokens)) and known[n] == tokens[n]:
                n += 1
            best = max(best, n)
        return best

    def match(self, namespace, tokens):
        return self.common(namespace, tokens[:-1])

    def whole_blocks(self, namespace, n, tokens):
        """The blocks of the first n tokens, as far as they are whole."""
        ends = range(self.block_size, n + 1, self.block_size)
        return [self.spaces[namespace][tokens[:end]].block for end in ends]

    def sources(self, namespace, n, tokens):
        """Beginnings one block longer, from which the last rows of n tokens may be copied; empty if none are needed."""
        end = -(-n // self.block_size) * self.block_size
        known = self.spaces.get(namespace, {}) if n % self.block_size else {}
        return [known_tokens for known_tokens in known if len(known_tokens) == end and known_tokens[:n] == tokens[:n]]

    def last_used(self, namespace, beginnings):
        """Of several, the one whose rows are copied."""
        return max(beginnings, key=lambda tokens: self.spaces[namespace][tokens].used)

    # --- changing ---

    def use(self, namespace, tokens, priority=None, until=None):
        """Touch the beginnings of `tokens`: the longer, the older, so that ends go first."""
        space = self.spaces[namespace]
        for n in range(len(tokens), 0, -1):
            entry = space.get(tokens[:n])
            if entry is not None:
                self.n_uses += 1
                entry.used = self.n_uses
                if priority is not None:
                    entry.priority = max(entry.priority, priority)
                if until is not None:
                    entry.until = until if entry.until is None else max(entry.until, until)

    def insert(self, namespace, tokens, table, priority, ttl):
        """`table` has None where a block was dropped. Returns the new blocks."""
        space = self.spaces.get(namespace, {})
        size = self.block_size
        until = None if ttl is None else self.now() + ttl
        new = {}
        for i in range(len(tokens) // size):
            if tokens[: (i + 1) * size] not in space:
                new[tokens[: (i + 1) * size]] = Entry(table[i], 0, priority, until)
        if any(entry.block is None for entry in new.values()):
            return []
        self.spaces.setdefault(namespace, space).update(new)
        self.use(namespace, tokens, priority, until)
        self.inserted += len(new)
        return [entry.block for entry in new.values()]

    # --- evicting ---

    def is_protected(self, entry):
        return entry.until is not None and entry.until > self.now()

    def idle(self):
        return [e for e in self.entries() if not self.is_held(e.block) and not self.is_protected(e)]

    def next_victim(self):
        """The namespace and tokens of the block that goes next: one at an end that can; else None."""
        for namespace, space in sorted(self.spaces.items(), key=lambda item: -len(item[1])):
            parents = {tokens[: -self.block_size] for tokens in space}
            ends = [
                (entry.priority, entry.used, tokens)
                for tokens, entry in space.items()
                if tokens not in parents and not self.is_held(entry.block) and not self.is_protected(entry)
            ]
            if ends:
                return namespace, min(ends)[2]
        return None

    def evict(self, n):
        """The n blocks that go, of those that can."""
        gone = []
        while len(gone) < n and (victim := self.next_victim()):
            gone.append(self.forget(*victim))
        # What is left lies before blocks that a sequence holds, and these cannot be found without it.
        for namespace, space in sorted(self.spaces.items(), key=lambda item: -len(item[1])):
            for tokens, entry in sorted(space.items(), key=lambda item: (item[1].priority, item[1].used)):
                if len(gone) < n and not self.is_held(entry.block) and not self.is_protected(entry):
                    gone.append(entry.block)
                    for other in [known for known in space if known[: len(tokens)] == tokens]:
                        self.forget(namespace, other)
        return gone

    def forget(self, namespace, tokens):
        block = self.spaces[namespace].pop(tokens).block
        if not self.spaces[namespace]:
            del self.spaces[namespace]
        self.evicted += 1
        return block
