"""Showing the texts: as they grow on a terminal, whole elsewhere."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Callable, Collection, Sequence
from typing import TextIO

from pagedkv import ModelStores
from pagedkv.demo.tokenizer import TextStream, Tokenizer

_UP_AND_CLEAR = "\x1b[{}F\x1b[J"


class Transcript:
    """The texts of all requests, in the order of their prompts.

    On a terminal a single text is written as it grows; of several, a board shows each one's latest line, and
    the whole texts follow at the end. Where the output is no terminal, a text is written when its
    request ends. `watch` gives lines of so many columns to show below the board, which then is there for a single text
    too.
    """

    def __init__(
        self,
        out: TextIO,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        watch: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        self._out = out
        self._streams = [TextStream(tokenizer) for _ in prompts]
        self._texts = list(prompts)
        self._ended: set[int] = set()
        self._watch = watch
        self._is_live = out.isatty() and os.environ.get("TERM") != "dumb"
        self._grows = self._is_live and len(prompts) == 1 and watch is None
        self._board_height = 0
        if self._grows:
            self._write(prompts[0])

    def add(self, index: int, token: int) -> None:
        """One more token of text `index`."""
        self._append(index, self._streams[index].feed(token))

    def end(self, index: int) -> None:
        """Text `index` is complete."""
        self._ended.add(index)
        self._append(index, self._streams[index].finish())
        if not self._is_live:
            self._write_whole(index)

    def refresh(self, running: Collection[int]) -> None:
        """Draws the board again; once a step is often enough. `running` are the texts that are being computed."""
        if not self._is_live or self._grows:
            return
        width, height = shutil.get_terminal_size()
        picture = [line[: width - 1] for line in self._watch(width)] if self._watch else []
        picture = picture[: (height - 2) // 2]
        shown = min(len(self._texts), height - 2 - len(picture))
        lines = [self._board_line(index, index in running, width) for index in range(shown)]
        if shown < len(self._texts):
            lines.append(f"... and {len(self._texts) - shown} more")
        lines += picture
        self._clear_board()
        self._write("\n".join(lines) + "\n")
        self._board_height = len(lines)

    def close(self) -> None:
        """Writes what has not been written yet."""
        if not self._is_live:
            return
        if self._grows:
            self._write("\n")
            return
        self._clear_board()
        for index in range(len(self._texts)):
            self._write_whole(index)

    def _append(self, index: int, text: str) -> None:
        self._texts[index] += text
        if self._grows:
            self._write(text)

    def _write_whole(self, index: int) -> None:
        header = f"--- {index + 1} of {len(self._texts)} ---\n" if len(self._texts) > 1 else ""
        self._write(f"{header}{self._texts[index]}\n")

    def _board_line(self, index: int, is_running: bool, width: int) -> str:
        state = "done" if index in self._ended else "running" if is_running else "waiting"
        label = f"{index + 1:3} {state:8}"
        line = "".join(c if c.isprintable() else "?" for c in " ".join(self._texts[index].split()))
        return label + _tail(line, width - len(label) - 1)

    def _clear_board(self) -> None:
        if self._board_height:
            self._write(_UP_AND_CLEAR.format(self._board_height))
            self._board_height = 0

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _tail(text: str, columns: int) -> str:
    """The end of `text` that fits into so many columns; wide characters take two, combining ones none."""
    used = 0
    for start in range(len(text) - 1, -1, -1):
        used += _columns(text[start])
        if used > columns:
            return text[start + 1 :]
    return text


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def picture(stores: ModelStores, columns: int) -> list[str]:
    """Lines of text that show who holds which block of each store."""
    lines: list[str] = []
    for group in stores.groups:
        sight = "everything" if group.window is None else f"{group.window} positions"
        lines.append(f"{len(group.layers)} layers that see {sight}")
        lines += str(group.store.block_map(width=max(8, min(64, columns - 8)))).split("\n")
    return lines
