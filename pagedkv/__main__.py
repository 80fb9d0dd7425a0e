"""The command line: `python -m pagedkv COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pagedkv.demo import cli as demo
from pagedkv.demo.errors import DemoError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 2 for what the user can put right, 130 after Ctrl-C."""
    parser = _Parser(prog="python -m pagedkv", description="A paged KV cache for LLM inference on CPU.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    summary = "serve several prompts at once with Gemma 3 270M, on NumPy and pagedkv"
    demo_parser = commands.add_parser("demo", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    demo.add_options(demo_parser)
    options = parser.parse_args(arguments)
    try:
        return demo.run(options)
    except DemoError as error:
        demo_parser.error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted; all blocks were given back", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Who read the output has gone: that is no error, but the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
