"""The command line: `python -m pagedkv COMMAND`, or `pagedkv COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import pagedkv
from pagedkv.cli import bench, info, plan, tier
from pagedkv.cli.common import CliError
from pagedkv.demo import cli as demo
from pagedkv.demo.errors import DemoError

COMMANDS = {"info": info, "bench": bench, "plan": plan, "tier": tier, "demo": demo}
_EPILOG = """\
exit codes:
  0    done
  1    bench --compare: a figure got worse; demo --verify: a text differs; tier check: a record is wrong;
       whoever read the output has gone
  2    something that you can put right: one line on stderr says what
  130  interrupted"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 2 for what the user can put right, 130 after Ctrl-C."""
    # What the user typed.
    prog = "pagedkv" if os.path.basename(sys.argv[0]).split(".")[0] == "pagedkv" else "python -m pagedkv"
    parser = _Parser(
        prog=prog,
        description="A paged KV cache for LLM inference on CPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pagedkv {pagedkv.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    parsers = {}
    for name, command in COMMANDS.items():
        summary = command.SUMMARY
        parsers[name] = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(parsers[name])
    options = parser.parse_args(arguments)
    try:
        code: int = COMMANDS[options.command].run(options)
        sys.stdout.flush()
        return code
    except (CliError, DemoError) as error:
        parsers[options.command].error(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted" + ("; all blocks were given back" if options.command == "demo" else ""), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Who read the output has gone: that is no error, but the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
