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
        """A block counts once, however many names it has."""
        return {entry.block for entry in self.entries()}

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
        known = self.blocks()
        self.spaces.setdefault(namespace, space).update(new)
        self.use(namespace, tokens, priority, until)
        self.inserted += len({entry.block for entry in new.values()} - known)
        return [entry.block for entry in new.values()]

    # --- giving up ---

    def idle(self):
        """The blocks that could be given up now: no sequence holds them, and none of their names has a term."""
        protected = {e.block for e in self.entries() if e.until is not None and e.until > self.now()}
        return {block for block in self.blocks() if not self.is_held(block)} - protected

    def next_victim(self):
        """The namespace and tokens of the name that goes next, and whether others go before since they continue it.

        Of the namespace that has the most names: an end, or where none has one, what lies before held blocks, which
        cannot be found without it.
        """
        idle = self.idle()
        spaces = sorted(self.spaces.items(), key=lambda item: -len(item[1]))
        for is_end in (True, False):
            for namespace, space in spaces:
                parents = {tokens[: -self.block_size] for tokens in space}
                found = [
                    (entry.priority, entry.used, tokens)
                    for tokens, entry in space.items()
                    if entry.block in idle and (tokens not in parents) == is_end
                ]
                if found:
                    return namespace, min(found)[2], is_end
        return None

    def evict(self, n):
        """Names until n blocks are free that could be given up."""
        n_left = len(self.idle()) - n
        while len(self.idle()) > max(n_left, 0):
            namespace, tokens, is_end = self.next_victim()
            for known in [known for known in self.spaces[namespace] if known[: len(tokens)] == tokens]:
                if is_end or known != tokens:
                    self.evicted += self.remove(namespace, known)

    def remove(self, namespace, tokens):
        """Take a name away; returns whether it was the last one of its block."""
        block = self.spaces[namespace].pop(tokens).block
        if not self.spaces[namespace]:
            del self.spaces[namespace]
        return block not in self.blocks()

    def forget(self, namespace, tokens, start):
        """Returns how many blocks have no name any more."""
        first = start // self.block_size
        if first >= self.common(namespace, tokens) // self.block_size:
            return 0
        begin = tokens[: (first + 1) * self.block_size]
        names = [known for known in self.spaces[namespace] if known[: len(begin)] == begin]
        return sum(self.remove(namespace, known) for known in names)

    def clear(self, namespace):
        return sum(self.remove(namespace, known) for known in list(self.spaces.get(namespace, ())))
