"""`python -m pagedkv plan`: how many sequences of what length fit a memory budget."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

import pagedkv
from pagedkv.cli.common import CliError, bytes_text, positive, size, table, write_json
from pagedkv.formats import DTYPES
from pagedkv.shapes import LayerShape, model_shapes

if TYPE_CHECKING:
    from pagedkv.shapes.reading import _LatentForm

SUMMARY = "tell how many sequences of what length fit a memory budget"
EXAMPLES = """\
examples:
  python -m pagedkv plan --memory 8GiB --layers 32 --kv-heads 8 --head-dim 128
  python -m pagedkv plan --memory 2GiB --config path/to/config.json --length 2048 --length 8192
  python -m pagedkv plan --memory 4GiB --layers 26 --kv-heads 4 --head-dim 256 --window 512 --window-layers 22
  python -m pagedkv plan --memory 8GiB --config model/ --dtype int8 --block-size 16 --block-size 64 --json

Layers with a window have a store of their own, and give back what the window has left behind. "waste" is what the
last blocks have room for beyond the sequence: at this length, and on average over the lengths that take as many blocks.

exit codes:
  0  a table was printed, also if nothing fits
  2  something is wrong with the options or the configuration"""

LATENT = {
    "split": "a latent and a rotary part, as the caches of transformers",
    "absorbed": "K is latent and rotary part, V the latent, for queries that have taken in the expansion",
    "expanded": "K and V of every query head",
}
LENGTHS = (512, 2048, 8192, 32768)
_LARGEST_BLOCK = 65536
_MOST_BLOCKS = 2**31 - 1


class Model(NamedTuple):
    """What a model keeps of every position."""

    name: str
    layers: Mapping[LayerShape, int]
    """How many there are of each shape."""
    longest: int | None
    """Positions that the model was made for, where that is known."""
    notes: tuple[str, ...] = ()


class Fit(NamedTuple):
    """What fits, for one dtype, block size and length."""

    dtype: str
    block_size: int
    length: int
    sequences: int
    """Sequences that long that fit together."""
    bytes_each: int
    blocks_each: tuple[int, ...]
    """Blocks that a sequence holds at most, in each store."""
    total_blocks: tuple[int, ...]
    """Blocks of each store for so many sequences."""
    wasted_bytes: int
    """Of a sequence of this length: bytes of rows that it holds and does not need."""
    mean_wasted_bytes: float
    """The same, on average over the lengths that take as many blocks."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("--memory", type=size, required=True, metavar="SIZE", help="the budget for K/V: 8GiB, 500MB")
    model = parser.add_argument_group("the model: its configuration, or its numbers")
    model.add_argument("--config", metavar="PATH", help="a Hugging Face config.json, or its folder")
    model.add_argument(
        "--latent", choices=LATENT, default="split", help="with --config: how latent attention is kept (default: split)"
    )
    model.add_argument("--layers", type=positive, metavar="N", help="layers that keep K/V")
    model.add_argument("--kv-heads", type=positive, metavar="N", help="K/V heads of a layer")
    model.add_argument("--head-dim", type=positive, metavar="N", help="values of a K head")
    model.add_argument("--v-head-dim", type=positive, metavar="N", help="values of a V head (default: --head-dim)")
    model.add_argument("--window", type=positive, metavar="N", help="positions that a layer with a window sees")
    model.add_argument(
        "--window-layers", type=positive, metavar="N", help="how many of the layers have it (default: all)"
    )
    parser.add_argument(
        "--length", type=positive, action="append", metavar="N", help=f"positions of a sequence (default: {LENGTHS})"
    )
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="what K/V are stored as (default: each)")
    parser.add_argument(
        "--block-size", type=positive, action="append", metavar="N", help="positions in a block (default: 16)"
    )
    parser.add_argument(
        "--chunk",
        type=positive,
        default=1,
        metavar="N",
        help="new positions of a sequence in a step, held beside the window (default: 1, decoding)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the plan; returns 0.

    Raises
    ------
    CliError
        What the user can put right.
    """
    model = _model(options)
    longest = model.longest or LENGTHS[-1]
    lengths: list[int] = options.length or [n for n in LENGTHS if n <= longest] or [longest]
    block_sizes = options.block_size or [16]
    if max(block_sizes) > _LARGEST_BLOCK:
        raise CliError(f"--block-size: expected at most {_LARGEST_BLOCK}, got {max(block_sizes)}")
    fits = [
        fit(model.layers, options.memory, dtype, block_size, length, options.chunk)
        for dtype in dict.fromkeys(options.dtype or DTYPES)
        for block_size in dict.fromkeys(block_sizes)
        for length in dict.fromkeys(lengths)
    ]
    if options.json:
        stores = [{"n_layers": n_layers, **asdict(shape)} for shape, n_layers in model.layers.items()]
        plan = {"memory": options.memory, "model": model.name, "stores": stores, "notes": model.notes}
        write_json({**plan, "fits": [each._asdict() for each in fits]})
    else:
        print(report(model, options.memory, fits))
    return 0


def fit(layers: Mapping[LayerShape, int], memory: int, dtype: str, block_size: int, length: int, chunk: int = 1) -> Fit:
    """What fits into so many bytes, of a model with so many layers of each shape.

    Raises
    ------
    CliError
        A block of that shape is more than a store can address.
    """
    blocks = tuple(held_blocks(shape, block_size, length, chunk) for shape in layers)
    rows = [row_bytes(shape, n_layers, dtype) for shape, n_layers in layers.items()]
    each = sum(n * block_size * row for n, row in zip(blocks, rows, strict=True))
    sequences = min(memory // each, _MOST_BLOCKS // max(blocks))

    def wasted(n: int) -> int:
        return sum(
            row * (held_blocks(shape, block_size, n, chunk) * block_size - shape.most_held(n, chunk))
            for shape, row in zip(layers, rows, strict=True)
        )

    first = (length - 1) // block_size * block_size + 1
    mean = sum(wasted(first + i) for i in range(block_size)) / block_size
    total = tuple(sequences * n for n in blocks)
    return Fit(dtype, block_size, length, sequences, each, blocks, total, wasted(length), mean)


def held_blocks(shape: LayerShape, block_size: int, length: int, chunk: int) -> int:
    """The most blocks that a sequence holds at once while it grows to that length."""
    return -(-shape.most_held(length, chunk, block_size) // block_size)


def row_bytes(shape: LayerShape, n_layers: int, dtype: str) -> int:
    """Bytes of one position in so many layers, as a store lays it out."""
    try:
        # Costs no memory: none is written.
        return pagedkv.PagedKvStore(
            1, 1, shape.n_kv_heads, shape.head_dim, n_layers=n_layers, v_head_dim=shape.v_head_dim, dtype=dtype
        ).nbytes
    except (ValueError, MemoryError, OverflowError):
        raise CliError("the model: a position is more than a store can hold") from None


def report(model: Model, memory: int, fits: list[Fit]) -> str:
    """The plan as text."""
    lines = [f"{bytes_text(memory)} for K/V of {model.name}:"]
    for shape, n_layers in model.layers.items():
        dims = f"{shape.head_dim}" if shape.head_dim == shape.v_head_dim else f"{shape.head_dim}/{shape.v_head_dim}"
        seen = "all positions" if shape.window is None else f"the last {shape.window}"
        lines.append(f"  {n_layers} layers of {shape.n_kv_heads} K/V heads of {dims} that see {seen}")
    lines += (f"  {note}" for note in model.notes)
    rows = [["dtype", "block", "length", "sequences", "bytes each", "blocks each", "waste", "mean waste"]]
    for each in fits:
        rows.append(
            [
                each.dtype,
                str(each.block_size),
                str(each.length),
                str(each.sequences),
                bytes_text(each.bytes_each),
                " + ".join(map(str, each.blocks_each)),
                f"{each.wasted_bytes / each.bytes_each:.1%}",
                f"{each.mean_wasted_bytes / each.bytes_each:.1%}",
            ]
        )
    return "\n".join([*lines, "", table(rows, "<>>>>>>>")])


def _model(options: argparse.Namespace) -> Model:
    numbers = {
        "--layers": options.layers,
        "--kv-heads": options.kv_heads,
        "--head-dim": options.head_dim,
        "--v-head-dim": options.v_head_dim,
        "--window": options.window,
        "--window-layers": options.window_layers,
    }
    if options.config is not None:
        given = [name for name, value in numbers.items() if value is not None]
        if given:
            raise CliError(f"{given[0]}: not together with --config")
        return _read(options.config, options.latent)
    missing = [name for name in ("--layers", "--kv-heads", "--head-dim") if numbers[name] is None]
    if missing:
        raise CliError(f"expected --config, or --layers, --kv-heads and --head-dim; {missing[0]} is missing")
    if options.window_layers and not options.window:
        raise CliError("--window-layers: expected --window too")
    n_windowed = (options.window_layers or options.layers) if options.window else 0
    if n_windowed > options.layers:
        raise CliError(f"--window-layers: expected at most {options.layers}, got {n_windowed}")
    layers = {None: options.layers - n_windowed, options.window: n_windowed} if n_windowed else {None: options.layers}
    heads = (options.kv_heads, options.head_dim, options.v_head_dim or 0)
    return Model("the model", {LayerShape(window, *heads): n for window, n in layers.items() if n}, None)


def _read(path: str, latent: _LatentForm) -> Model:
    try:
        model = model_shapes(path, latent=latent)
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise CliError(f"{path}: {error}") from None
    notes = [f"kept {latent}: {LATENT[latent]}"] if model.is_latent else []
    if n_shared := len(model.layers) - len(model.kept):
        notes.append(f"{n_shared} layers use the K/V of others")
    return Model(model.name, Counter(model.kept), model.max_positions, tuple(notes))
