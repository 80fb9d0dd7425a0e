"""Text to tokens and back: the byte-pair encoding of SentencePiece, from a GGUF file's vocabulary."""

from __future__ import annotations

import codecs
import heapq
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedkv.demo.errors import ModelFileError

# SentencePiece writes a space inside a piece as this visible one.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


# What a piece is: values of `tokenizer.ggml.token_type`. Others (unknown, unused) are never made from text.
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6


class Tokenizer:
    """Gemma's tokenizer: control and user-defined pieces first, then byte pairs, then bytes.

    Parameters
    ----------
    metadata
        A GGUF file's metadata; the keys `tokenizer.ggml.*` are read.

    Raises
    ------
    ModelFileError
        Another kind of tokenizer, or a vocabulary that is missing or inconsistent.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = metadata.get("tokenizer.ggml.model")
        if model != "llama":
            raise ModelFileError(f"tokenizer.ggml.model: expected 'llama' (SentencePiece), got {model!r}")
        self._pieces: list[str] = _column(metadata, "tokens", list)
        self._scores: list[float] = _column(metadata, "scores", np.ndarray).tolist()
        self._kinds: list[int] = _column(metadata, "token_type", np.ndarray).tolist()
        if not len(self._pieces) == len(self._scores) == len(self._kinds) > 0:
            raise ModelFileError("tokenizer.ggml: tokens, scores and token_type differ in length")
        vocabulary = list(enumerate(zip(self._pieces, self._kinds, strict=True)))
        verbatim = (_CONTROL, _USER_DEFINED)
        self._mergeable = {piece: token for token, (piece, kind) in vocabulary if kind == _NORMAL}
        self._bytes = {_byte_of(piece): token for token, (piece, kind) in vocabulary if kind == _BYTE}
        self._verbatim = {piece.replace(_SPACE, " "): token for token, (piece, kind) in vocabulary if kind in verbatim}
        # The longest piece wins where several begin at the same place; with one group in the pattern,
        # `split` gives text and piece by turns.
        longest_first = sorted(filter(None, self._verbatim), key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

        self._add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
        self._unknown = self._special(metadata, "unknown_token_id", 0)
        has_bos = metadata.get("tokenizer.ggml.add_bos_token", True)
        self._prefix = [self._special(metadata, "bos_token_id", 1)] if has_bos else []
        self.stop_tokens = {self._special(metadata, "eos_token_id", 2)}
        if "<end_of_turn>" in self._verbatim:
            self.stop_tokens.add(self._verbatim["<end_of_turn>"])

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, begin-of-sequence first. Control pieces in the text count as such."""
        tokens = list(self._prefix)
        if self._add_space and text:
            text = " " + text
        for index, part in enumerate(self._splitter.split(text)):
            if index % 2:
                tokens.append(self._verbatim[part])
            else:
                tokens += self._merge(part.replace(" ", _SPACE))
        return tokens

    def piece(self, token: int) -> bytes:
        """What `token` adds to the text: UTF-8, though not always whole characters; nothing for a control token."""
        piece, kind = self._pieces[token], self._kinds[token]
        if kind == _CONTROL:
            return b""
        return bytes([_byte_of(piece)]) if kind == _BYTE else piece.replace(_SPACE, " ").encode()

    def _merge(self, text: str) -> list[int]:
        """Byte-pair encoding: joins the neighbours whose union has the best score, leftmost first, until none has."""
        pieces = list(text)
        # Neighbours as linked lists over the positions of `pieces`; a piece that was joined to its left is "".
        left = list(range(-1, len(pieces) - 1))
        right = [*range(1, len(pieces)), -1]
        candidates: list[tuple[float, int, str]] = []

        def propose(first: int, second: int) -> None:
            if first >= 0 and second >= 0:
                union = pieces[first] + pieces[second]
                token = self._mergeable.get(union)
                if token is not None:
                    heapq.heappush(candidates, (-self._scores[token], first, union))

        for first in range(len(pieces) - 1):
            propose(first, first + 1)
        while candidates:
            _, first, union = heapq.heappop(candidates)
            second = right[first]
            # Stale if a neighbour has been joined elsewhere since the pair was proposed.
            if second < 0 or not pieces[first] or pieces[first] + pieces[second] != union:
                continue
            pieces[first], pieces[second] = union, ""
            right[first] = right[second]
            if right[first] >= 0:
                left[right[first]] = first
            propose(left[first], first)
            propose(first, right[first])

        tokens = []
        for piece in filter(None, pieces):
            token = self._mergeable.get(piece)
            if token is not None:
                tokens.append(token)
            else:
                tokens += [self._bytes.get(byte, self._unknown) for byte in piece.encode()]
        return tokens

    def _special(self, metadata: Mapping[str, Any], name: str, default: int) -> int:
        token = metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(token, int) or not 0 <= token < len(self._pieces):
            raise ModelFileError(f"tokenizer.ggml.{name}: expected a token of the vocabulary, got {token!r}")
        return token


class TextStream:
    """Turns tokens into text as they come, and holds back the bytes of a character until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that `token` completes; often those of one word, sometimes none."""
        return self._decoder.decode(self._tokenizer.piece(token))

    def finish(self) -> str:
        """What is left at the end: a replacement character if the text broke off inside one, else nothing."""
        return self._decoder.decode(b"", final=True)


def _column(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    """One property of every piece: strings come as a list, numbers as an array."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, kind):
        raise ModelFileError(f"tokenizer.ggml.{name}: missing, or not an array of the right type")
    return values


def _byte_of(piece: str) -> int:
    """The byte that a piece such as `<0x0A>` stands for."""
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    if match is None:
        raise ModelFileError(f"tokenizer.ggml.tokens: {piece!r} is no byte")
    return int(match[1], 16)
