"""Tokens as text, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.demo.tokenizer import TextStream, Tokenizer


class StoppingText:
    """The text of tokens as they come, and no character of it after a stop string begins.

    What may be the beginning of a stop string is held back until it is known not to be one.

    Attributes
    ----------
    stopped : bool
        A stop string has been found.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.stopped = False
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self._held = ""

    def feed(self, token: int) -> str:
        """The text that is certain now."""
        return self._release(self._stream.feed(token))

    def finish(self) -> str:
        """What was held back, when no token follows."""
        text = self._release(self._stream.finish())
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        self._held = ""
        return text
