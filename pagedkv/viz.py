"""Pictures of who holds which block. They import nothing of the package, since the store returns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Marks: TypeAlias = npt.NDArray[np.uint8]

MAX_LINES = 32  # of the map, and of sequences: a picture stays one, however large the store
MAX_NAME = 16

_FREE, _PRIVATE, _KEPT, _EVICTABLE, _MORE = (ord(mark) for mark in ".#Cc+")
_DROPPED = "_"
_GOES_ON = ">"
_MOST_SHOWN = 9

_LEGEND = {
    ".": "free",
    "#": "private",
    "2": "shared, by so many (+: ten or more)",
    "c": "cached, evictable",
    "C": "cached, kept by its ttl",
    _DROPPED: "dropped",
}
_COLOURS = {".": "#e4e7eb", "#": "#4c78a8", "2": "#e45756", "c": "#72b7b2", "C": "#2a7f79", _DROPPED: "#ffffff"}
_PITCH, _SIDE, _LEFT = 11, 10, 120  # of a square, in pixels; and the column of the labels


@dataclass(frozen=True)
class BlockMap:
    """What `PagedKvStore.block_map` returns: a picture of a moment, as text, as SVG, and of itself in a notebook.

    Attributes
    ----------
    total_blocks : int
        ``free + private + shared + evictable + kept``.
    free, private, shared : int
        Blocks that nobody holds, that one sequence (or caller, or step) holds, and that several do. A prefix cache
        counts as a holder.
    evictable, kept : int
        Blocks that the prefix cache alone holds, and that it could give up, or keeps for the sake of their ttl.
    cached : int
        All that the prefix cache holds, shared ones too.
    most_holders : int
        The most that hold one block.
    blocks_per_mark : int
        1, or how many neighbours one mark of the map stands for: it shows what most of them are, and of those that
        are shared the greatest number of holders.
    rows : tuple of (str, str)
        The lines of the map: the id of the first block, and a mark a block.
    sequences : tuple of (str, str)
        The sequences that were asked for: name, and a mark for each block of the table, in order.

    Notes
    -----
    Threads: where other threads use the store, what it shows of a block is right, of a moment.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store, cache = pagedkv.PagedKvStore(4, 16, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> cache.append_contiguous(store, *np.ones((2, 11, 2), np.float32), 11)
    >>> fork = cache.clone()
    >>> fork.push(store, *np.ones((2, 2), np.float32))
    >>> print(store.block_map({"cache": cache, "fork": fork}))
    16 blocks: 12 free, 2 private, 2 shared by up to 2
        0 22##............
    . free  # private  2 shared, by so many (+: ten or more)
    cache 22#
     fork 22#
    """

    total_blocks: int
    free: int
    private: int
    shared: int
    evictable: int
    kept: int
    cached: int
    most_holders: int
    blocks_per_mark: int
    rows: tuple[tuple[str, str], ...]
    sequences: tuple[tuple[str, str], ...] = ()

    @classmethod
    def _draw(cls, holders: Ids, kinds: Marks, sequences: Sequence[tuple[str, list[int]]], width: int) -> BlockMap:
        """The map of blocks with so many `holders`, which to the prefix cache are of these `kinds`, ``[total]`` each.

        Lines have up to `width` marks.
        """
        marks = _marks(holders, kinds)
        per_mark = max(1, -(-len(marks) // (width * MAX_LINES)))
        drawn = _summary(marks, per_mark)
        rows = [(str(i * per_mark), _text(drawn[i : i + width])) for i in range(0, len(drawn) or 1, width)]
        n_of = np.bincount(marks, minlength=256)
        alone = [int(n_of[mark]) for mark in (_FREE, _PRIVATE, _EVICTABLE, _KEPT)]
        free, private, evictable, kept = alone
        return cls(
            total_blocks=len(marks),
            free=free,
            private=private,
            shared=len(marks) - sum(alone),
            evictable=evictable,
            kept=kept,
            cached=int(np.count_nonzero(kinds)),
            most_holders=int(holders.max(initial=0)),
            blocks_per_mark=per_mark,
            rows=tuple(rows),
            sequences=tuple(_lines_of(sequences, marks, width)),
        )

    @property
    def summary(self) -> str:
        """The counts, in one line."""
        shared = f"{self.shared} shared" + (f" by up to {self.most_holders}" if self.shared else "")
        parts = [f"{self.free} free", f"{self.private} private", shared]
        if self.cached:
            parts.append(f"{self.cached} cached, {self.evictable} of them evictable")
        return f"{self.total_blocks} blocks: " + ", ".join(parts)

    @property
    def text(self) -> str:
        """The map for a terminal: ASCII but for the names of sequences, and of bounded size. So is ``str()``."""
        lines = [*self.rows, *self.sequences]
        column = max(len(label) for label, _ in lines)
        drawn = [f"{label:>{column}} {marks}" for label, marks in lines]
        drawn.insert(len(self.rows), self._legend_line())
        return "\n".join([self.summary, *drawn])

    def __str__(self) -> str:
        return self.text

    @property
    def svg(self) -> str:
        """The map as an SVG document. Colours say what a block is, digits how many share it."""
        lines = [*self.rows, *self.sequences]
        top = {i: (i + 2 + 2 * (i >= len(self.rows))) * _PITCH for i in range(len(lines))}
        width = _LEFT + _PITCH * max(64, *(len(marks) for _, marks in lines))
        height = (len(lines) + 4) * _PITCH
        squares: dict[str, list[str]] = {}
        xs, ys, digits = [], [], []
        labels = []
        for i, (label, marks) in enumerate(lines):
            labels.append(f'<text x="{_LEFT - 6}" y="{top[i] + 9}" text-anchor="end">{escape(label)}</text>')
            for j, mark in enumerate(marks.rstrip(_GOES_ON)):
                x = _LEFT + j * _PITCH
                squares.setdefault(_kind(mark), []).append(f"M{x} {top[i]}h{_SIDE}v{_SIDE}h-{_SIDE}z")
                if _kind(mark) == "2":
                    xs.append(str(x + 3))
                    ys.append(str(top[i] + 8))
                    digits.append(mark)
        paths = [f'<path fill="{_COLOURS[kind]}" d="{"".join(parts)}"/>' for kind, parts in squares.items()]
        numbers = f'<text fill="#fff" x="{" ".join(xs)}" y="{" ".join(ys)}">{"".join(digits)}</text>' if digits else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="monospace" font-size="9"><title>{escape(self.summary)}</title>'
            f'<text x="0" y="12" font-size="11">{escape(self.summary)}</text>'
            f"{''.join(paths)}{numbers}{''.join(labels)}{self._legend_squares((len(self.rows) + 2) * _PITCH + 6)}</svg>"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.svg

    def _legend_line(self) -> str:
        scale = f"; a mark is {self.blocks_per_mark} blocks" if self.blocks_per_mark > 1 else ""
        return "  ".join(f"{mark} {meaning}" for mark, meaning in self._legend()) + scale

    def _legend(self) -> list[tuple[str, str]]:
        shown = {_kind(mark) for _, marks in (*self.rows, *self.sequences) for mark in marks}
        return [(mark, meaning) for mark, meaning in _LEGEND.items() if mark in shown]

    def _legend_squares(self, y: int) -> str:
        parts: list[str] = []
        x = _LEFT
        for mark, meaning in self._legend():
            size = f'width="{_SIDE}" height="{_SIDE}"'
            parts.append(f'<rect x="{x}" y="{y}" {size} fill="{_COLOURS[mark]}" stroke="#bbb"/>')
            parts.append(f'<text x="{x + _PITCH + 2}" y="{y + 8}">{escape(meaning)}</text>')
            x += 6 * len(meaning) + 3 * _PITCH
        return "".join(parts)


def _marks(holders: Ids, kinds: Marks) -> Marks:
    """One ASCII code a block."""
    marks = np.full(len(holders), _MORE, np.uint8)
    few = holders <= _MOST_SHOWN
    marks[few] = (ord("0") + holders[few]).astype(np.uint8)
    marks[holders == 0] = _FREE
    alone = holders == 1
    marks[alone] = np.array([_PRIVATE, _EVICTABLE, _KEPT], np.uint8)[kinds[alone]]  # BlockKind in _radix/order.pxd
    return marks


def _summary(marks: Marks, per_mark: int) -> Marks:
    """One mark for each group of `per_mark` neighbours."""
    if per_mark == 1:
        return marks
    n = -(-len(marks) // per_mark)
    padding = np.zeros(n * per_mark - len(marks), np.uint8)  # 0: no block
    groups = np.concatenate([marks, padding]).reshape(n, per_mark)
    alone = [np.count_nonzero(groups == mark, axis=1) for mark in (_PRIVATE, _KEPT, _EVICTABLE, _FREE)]
    is_shared = (groups >= ord("2")) & (groups <= ord("9")) | (groups == _MORE)
    # The greatest number: "+" stands for more than any digit.
    number = np.where(is_shared, np.where(groups == _MORE, np.uint8(ord("9") + 1), groups), 0).max(axis=1)
    number = np.where(number > ord("9"), _MORE, number)
    candidates = np.stack([number, *(np.full(n, mark) for mark in (_PRIVATE, _KEPT, _EVICTABLE, _FREE))])
    most = np.argmax([np.count_nonzero(is_shared, axis=1), *alone], axis=0)
    drawn: Marks = candidates[most, np.arange(n)].astype(np.uint8)
    return drawn


def _lines_of(sequences: Sequence[tuple[str, list[int]]], marks: Marks, width: int) -> Iterable[tuple[str, str]]:
    for name, table in sequences[:MAX_LINES]:
        shown = "".join(_DROPPED if block < 0 else chr(marks[block]) for block in table[:width])
        yield _printable(name), shown + (_GOES_ON if len(table) > width else "")
    if len(sequences) > MAX_LINES:
        yield f"{len(sequences) - MAX_LINES} more", ""


def _kind(mark: str) -> str:
    """The mark that stands for it in the legend: all numbers are of one kind."""
    return "2" if mark in "23456789+" else mark


def _printable(name: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in name)
    return shown if len(shown) <= MAX_NAME else shown[: MAX_NAME - 1] + "~"


def _text(marks: Marks) -> str:
    return marks.tobytes().decode("ascii")
