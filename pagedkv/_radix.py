"""A radix tree over token ids, whose path to a block is the key of that block. Knows ids and order, no bytes of K/V.

    block_size = 4                       a, b, ... are tokens; [7] is the block whose last token is the one before it

    root -- a b c d [7] e f -- g h [3] i j k l [9]
                            \\- x y [5]

Edges end anywhere, also inside a block: `[3]` and `[5]` both hold the K/V of `e f`, each followed by its own tokens.
So the longest common beginning is found token by token, and tokens are compared, never hashes of them. Three things
are always true:

- the multiples of the block size along a path each have one block, which belongs to the node they lie in;
- a leaf ends at such a multiple;
- in the order of use a node comes before its parent, and has no higher priority.

The last one makes the order of use an order of eviction: whoever comes first is a leaf, or what is left of its
children cannot go either.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Blocks: TypeAlias = npt.NDArray[np.int32]

TOKEN = 8  # bytes of a token id: little-endian int64
NEVER = float("-inf")


class Node:
    """An edge of the tree and what follows: tokens ``start`` to ``end`` of every sequence that passes here."""

    __slots__ = ("blocks", "children", "expires", "key", "parent", "priority", "start")

    def __init__(
        self, parent: Node | None, start: int, key: bytearray, blocks: Blocks, priority: int = 0, expires: float = NEVER
    ) -> None:
        self.parent = parent
        self.start = start
        self.key = key  # grows and shrinks at its end at no cost
        self.blocks = blocks
        self.priority = priority
        self.expires = expires  # until then it must stay
        self.children: dict[bytes, Node] = {}  # by their first token

    @property
    def first(self) -> bytes:
        """What the parent finds it by."""
        return bytes(self.key[:TOKEN])

    @property
    def end(self) -> int:
        return self.start + len(self.key) // TOKEN


class RadixTree:
    """The blocks of one namespace. `n_blocks` is how many there are."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.n_blocks = 0
        self.root = Node(None, 0, bytearray(), np.empty(0, np.int32))
        self.orders: dict[int, OrderedDict[Node, None]] = {}  # priority -> nodes, longest unused first

    # --- looking ---

    def find(self, data: bytes) -> tuple[Node, int]:
        """The node in which the longest known beginning of `data` ends, and its length in tokens."""
        node, at = self.root, 0
        while (child := node.children.get(data[at : at + TOKEN])) is not None:
            if not data.startswith(child.key, at):
                return child, at // TOKEN + _common(child.key, data, at)
            node = child
            at += len(child.key)
        return node, at // TOKEN

    def path(self, node: Node) -> Iterator[Node]:
        """The node and what is above it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self, node: Node) -> Iterator[Node]:
        """The node and everything beneath it, parents first."""
        todo = [node]
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node

    def descend(self, node: Node, end: int) -> Node:
        """A node below that has the position `end`; any will do, since the tokens up to here are the same."""
        while node.end < end:
            node = next(iter(node.children.values()))
        return node

    def blocks_to(self, node: Node) -> Blocks:
        """The blocks from the beginning to the end of a node."""
        return np.concatenate([self.root.blocks, *reversed([part.blocks for part in self.path(node)])])

    def victims(self, n_idle_at_end: Callable[[Blocks], int]) -> Iterator[tuple[Node, int]]:
        """``(node, n)``: the last n blocks of a node that can go when those yielded before are gone."""
        n_gone: Counter[Node] = Counter()  # children that go as a whole
        for node in self.in_order():
            if n_gone[node] < len(node.children):
                continue
            n = n_idle_at_end(node.blocks)
            if n:
                yield node, n
            if n == len(node.blocks) and node.parent is not None:
                n_gone[node.parent] += 1

    def in_order(self) -> Iterator[Node]:
        """All nodes as they would be evicted: by priority, then by last use; children before parents."""
        for priority in sorted(self.orders):
            yield from self.orders[priority]

    # --- changing ---

    def use(self, node: Node, priority: int | None = None, expires: float = NEVER) -> list[Node]:
        """Note that a path was used just now, and raise its priority and its term; returns nodes that had no term."""
        protected = []
        for part in self.path(node):  # from the leaf up: a parent is younger than its children
            self._leave_order(part)
            part.priority = part.priority if priority is None else max(part.priority, priority)
            self.orders.setdefault(part.priority, OrderedDict())[part] = None
            if part.expires == NEVER < expires:
                protected.append(part)
            part.expires = max(part.expires, expires)
        return protected

    def cut(self, node: Node, at: int) -> Node:
        """A node of the same path that ends at `at`, a position in `node` or at its ends. It has to be used at once."""
        if at == node.end:
            return node
        assert node.parent is not None
        if at == node.start:
            return node.parent
        n_bytes = (at - node.start) * TOKEN
        n_blocks = at // self.block_size - node.start // self.block_size
        upper = Node(node.parent, node.start, node.key[:n_bytes], node.blocks[:n_blocks], node.priority, node.expires)
        upper.children[bytes(node.key[n_bytes : n_bytes + TOKEN])] = node
        node.parent.children[node.first] = upper
        node.parent, node.start, node.key, node.blocks = upper, at, node.key[n_bytes:], node.blocks[n_blocks:]
        self.orders[upper.priority][upper] = None
        return upper

    def grow(self, node: Node, key: bytes, blocks: Blocks, priority: int, expires: float) -> Node:
        """Continue a path that ends with `node`, by tokens that it is not continued with; returns the new end."""
        self.n_blocks += len(blocks)
        if node.parent is not None and not node.children and node.priority <= priority and node.expires <= expires:
            node.key += key  # one node for a sequence that grows: looking it up stays one comparison
            node.blocks = np.concatenate([node.blocks, blocks])
            return node
        child = Node(node, node.end, bytearray(key), blocks, priority, expires)
        self.orders.setdefault(priority, OrderedDict())[child] = None
        node.children[child.first] = child
        return child

    def trim(self, node: Node, n: int) -> Blocks:
        """Take the last n blocks from a leaf, and the tokens that lead nowhere then; returns the blocks."""
        keep = len(node.blocks) - n
        gone = node.blocks[keep:]
        self.n_blocks -= n
        while (parent := node.parent) is not None and not node.children:
            end = (node.start // self.block_size + keep) * self.block_size
            if end > node.start:
                del node.key[(end - node.start) * TOKEN :]
                node.blocks = node.blocks[:keep]
                break
            del parent.children[node.first]
            self._leave_order(node)
            node.parent = None
            node = parent
            keep = len(node.blocks)
        return gone

    def _leave_order(self, node: Node) -> None:
        del self.orders[node.priority][node]
        if not self.orders[node.priority]:
            del self.orders[node.priority]

    def forget_below(self, node: Node, keep: int) -> list[Blocks]:
        """Take everything that comes after the first `keep` blocks of a node; returns the blocks."""
        gone = []
        for part in list(self.below(node))[:0:-1]:  # children first
            gone.append(self.trim(part, len(part.blocks)))
        gone.append(self.trim(node, len(node.blocks) - keep))
        return gone

    def fault(self) -> str | None:
        """What is wrong with the tree, or None. Walks over everything."""
        size, order = self.block_size, list(self.in_order())
        places = {node: place for place, node in enumerate(order)}
        nodes = list(self.below(self.root))[1:]
        if len(order) != len(nodes) or set(order) != set(nodes):
            return f"{len(nodes)} nodes are in the tree, {len(order)} in the order of use"
        if sum(len(node.blocks) for node in nodes) != self.n_blocks:
            return f"{sum(len(node.blocks) for node in nodes)} blocks are in the tree, {self.n_blocks} are counted"
        for node in nodes:
            parent = node.parent
            name = f"the node of tokens {node.start} to {node.end}"
            if parent is None or parent.end != node.start or parent.children.get(node.first) is not node:
                return f"{name} is not where its parent looks for it"
            if len(node.blocks) != node.end // size - node.start // size:
                return f"{name} has {len(node.blocks)} blocks"
            if not node.children and node.end % size:
                return f"{name} is a leaf that ends inside a block"
            if parent is not self.root:
                if places[parent] < places[node]:
                    return f"{name} is younger than its parent"
                if parent.priority < node.priority or parent.expires < node.expires:
                    return f"{name} outlives its parent"
        return None


def plan_eviction(
    trees: Iterable[RadixTree], n_idle_at_end: Callable[[Blocks], int], n: int
) -> list[tuple[RadixTree, Node, int]]:
    """The `n` blocks to evict, in this order: a tree gives as long as none holds more, each from its own order."""
    queue: list[tuple[int, int, RadixTree, Iterator[tuple[Node, int]], tuple[Node, int]]] = []
    for number, tree in enumerate(trees):
        victims = tree.victims(n_idle_at_end)
        first = next(victims, None) if n else None
        if first is not None:
            queue.append((-tree.n_blocks, number, tree, victims, first))
    heapq.heapify(queue)
    plan = []
    while n and queue:
        size, number, tree, victims, (node, n_idle) = heapq.heappop(queue)
        above = -size + queue[0][0] if queue else n
        n_last = min(n, n_idle, max(1, above))
        plan.append((tree, node, n_last))
        n -= n_last
        rest = (node, n_idle - n_last) if n_last < n_idle else next(victims, None)
        if rest is not None:
            heapq.heappush(queue, (size + n_last, number, tree, victims, rest))
    return plan


def cut_out(
    trees: Iterable[RadixTree],
    end_of_idle: Callable[[Blocks], int],
    n_idle_at_end: Callable[[Blocks], int],
    n: int,
    gone: list[Blocks],
) -> int:
    """Take up to `n` idle blocks with others below that a sequence holds, as windows leave them; returns how many.

    What lies below can no longer be found without them: it leaves its tree, and stays the sequence's. All that has left
    is in `gone`.
    """
    n_freed = 0
    for tree in sorted(trees, key=lambda tree: -tree.n_blocks):
        for node in list(tree.in_order()):
            while n_freed < n and (end := end_of_idle(node.blocks)) and node.parent is not None:
                gone += tree.forget_below(node, end)
                n_last = min(n - n_freed, n_idle_at_end(node.blocks))
                gone.append(tree.trim(node, n_last))
                n_freed += n_last
    return n_freed


def _common(key: bytearray, data: bytes, at: int) -> int:
    """How many tokens at the beginning of `key` are those of `data` from byte `at` on; the first one is."""
    n = min(len(key), len(data) - at) // TOKEN
    differ = np.frombuffer(key, np.int64, n) != np.frombuffer(data, np.int64, n, at)
    first = int(differ.argmax())
    return first if differ[first] else n
