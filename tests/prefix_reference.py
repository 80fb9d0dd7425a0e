"""The twin of `PrefixCache`: every known beginning is an entry of a dict, and everything is found by looking at all.

With a window, beginnings whose block is not known are entries too, holes: as long as a known block continues them.

Imports nothing of pagedkv. Blocks are ids here, since the test tells it which ones a sequence has, and `is_held(id)`
whether a sequence holds one.
"""


class Entry:
    def __init__(self, block, used, priority, until):
        self.block = block  # None is a hole
        self.used = used
        self.priority = priority
        self.until = until


class Prefixes:
    def __init__(self, block_size, is_held, now, window=None):
        self.block_size = block_size
        self.window = window  # positions that a query sees, itself included
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
        return {entry.block for entry in self.entries()} - {None}

    # --- looking ---

    def remaining(self, entry):
        left = None if entry.until is None else entry.until - self.now()
        return left if left is not None and left > 0 else None

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
        return self.usable(namespace, self.common(namespace, tokens[:-1]), tokens)

    def first_seen(self, n):
        """The first block that has a position which the next query sees: those from n - window + 1 on."""
        return 0 if self.window is None else max(0, n - self.window + 1) // self.block_size

    def usable(self, namespace, n, tokens):
        """Of n known tokens, or of whole blocks: the most whose blocks are there, as far as the next query sees."""
        while None in self.seen_blocks(namespace, n, tokens):
            n = (n - 1) // self.block_size * self.block_size
        return n

    def seen_blocks(self, namespace, n, tokens):
        """The last one's are those of the continuation that was used last."""
        blocks = self.whole_blocks(namespace, n, tokens)
        if sources := self.sources(namespace, n, tokens):
            blocks.append(self.spaces[namespace][self.last_used(namespace, sources)].block)
        return blocks[self.first_seen(n) :]

    def whole_blocks(self, namespace, n, tokens):
        """The blocks of the first n tokens, as far as they are whole; None for holes."""
        ends = range(self.block_size, n + 1, self.block_size)
        return [self.spaces[namespace][tokens[:end]].block for end in ends]

    def shared_blocks(self, namespace, n, tokens):
        """What a sequence shares that starts on these; -1 for what it does not see."""
        first = self.first_seen(n)
        return [-1] * min(first, n // self.block_size) + self.whole_blocks(namespace, n, tokens)[first:]

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
        """`table` has None where a block was dropped. Returns the new blocks, those that fill a hole among them."""
        space = self.spaces.get(namespace, {})
        size = self.block_size
        until = None if ttl is None else self.now() + ttl
        new = {}
        for i in range(len(tokens) // size):
            if tokens[: (i + 1) * size] not in space:
                new[tokens[: (i + 1) * size]] = Entry(table[i], 0, priority, until)
        blocks = [entry.block for entry in new.values()]
        if None in (blocks[-1:] if self.window else blocks):
            return []
        known = self.blocks()
        for i in self.gaps(namespace, tokens, table):
            entry = space[tokens[: (i + 1) * size]]
            entry.block = table[i]
            blocks.append(table[i])
        self.spaces.setdefault(namespace, space).update(new)
        self.use(namespace, tokens, priority, until)
        blocks = [block for block in blocks if block is not None]
        self.inserted += len({*blocks} - known)
        return blocks

    def gaps(self, namespace, tokens, table):
        """Where the table has what is a hole."""
        space, size = self.spaces.get(namespace, {}), self.block_size
        known = [space.get(tokens[: (i + 1) * size]) for i in range(len(tokens) // size)]
        return [i for i, entry in enumerate(known) if entry and entry.block is None and table[i] is not None]

    # --- giving up ---

    def idle(self):
        """The blocks that could be given up now: no sequence holds them, and none of their names has a term."""
        protected = {e.block for e in self.entries() if e.until is not None and e.until > self.now()}
        return {block for block in self.blocks() if not self.is_held(block)} - protected

    def next_victim(self):
        """The namespace and tokens of the name that goes next, and whether others go before since they continue it.

        Of the namespace that has the most names: an end, or where none has one, what lies before held blocks, which
        cannot be found without it, unless there is a window.
        """
        idle = self.idle()
        spaces = sorted(self.spaces.items(), key=lambda item: -sum(e.block is not None for e in item[1].values()))
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
            if self.window:
                self.evicted += self.remove(namespace, tokens)
                continue
            for known in [known for known in self.spaces[namespace] if known[: len(tokens)] == tokens]:
                if is_end or known != tokens:
                    self.evicted += self.remove(namespace, known)

    def remove(self, namespace, tokens):
        """Take a name away, which leaves a hole if others continue it; returns whether it was its block's last one."""
        space = self.spaces.get(namespace, {})
        if tokens not in space:
            return False  # a hole that went with what continued it
        block = space[tokens].block
        space[tokens].block = None
        needed = {known[:n] for known, entry in space.items() if entry.block is not None for n in range(len(known) + 1)}
        for known in [known for known, entry in space.items() if entry.block is None and known not in needed]:
            del space[known]
        if not space:
            del self.spaces[namespace]
        return block is not None and block not in self.blocks()

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
