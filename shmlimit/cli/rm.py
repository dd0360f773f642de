"""`rm NAME`: removes a table, so that the next server that opens the name starts afresh."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from shmlimit.table.segment import remove

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add(commands: Commands) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("rm", help="remove a table and all its counts")
    parser.add_argument("name", metavar="NAME", help="the table's name, such as shmlimit-demo")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    in_use = remove(options.name)
    print(f"removed {options.name}")
    if in_use:
        print(
            f"shmlimit: processes still use what was {options.name}. They go on counting in it, apart from those that "
            "open the name from now on: restart them.",
            file=sys.stderr,
        )
