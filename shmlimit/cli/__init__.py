"""The command line: one file a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shmlimit.cli import rm
from shmlimit.errors import ShmlimitError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; its exit status (0 done, 1 it could not be done, 2 it was misspelt)."""
    parser = argparse.ArgumentParser(prog="python -m shmlimit", description="Look after shared rate limit tables.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    rm.add(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ShmlimitError as error:
        print(f"shmlimit: {error}", file=sys.stderr)
        return 1
    return 0
