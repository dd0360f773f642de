"""How much of the C helper the tests reach, by lines and branches.

    python -m tests.coverage_c [TESTS …]     (make coverage)

Builds the helper with gcov, runs the tests over it and the schedules of `tests/schedule`, and prints what is left
out. Ends with 1 below the bar: over 95 % of lines and branches of `_table.c` and the protocol that it includes.
Processes that are killed, or are forked by multiprocessing, write no counts: what is reached only where processes
meet is reached by `test_between.py`, in one, and by the scheduler.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tests.between import HOOK
from tests.instrumented import CHOOSE, ROOT, SOURCES, build

BAR = 95
BARRED = ("_table.c", "_share.h", "_claim.h")
FILES = (*BARRED, "_policies.h", "_memory.h")
# Those that call the helper in this process or in one that ends by itself.
TESTS = ["tests/table", "tests/sanitize/test_memory.py", "-k", "not watched and not instrumented and not segment"]


class Covered(NamedTuple):
    """A file's lines and branches: how many there are, and those that were not taken."""

    lines: int
    missed_lines: list[int]
    branches: int
    missed_branches: list[str]


Counts: TypeAlias = dict[Any, int]


def add(report: dict[str, Any], names: Iterable[str], lines: dict[str, Counts], branches: dict[str, Counts]) -> None:
    """Adds what gcov counted in the files `names`, which says a line once for each function it is compiled into."""
    for file in report["files"]:
        name = Path(file["file"]).name
        if name not in names:
            continue
        for line in file["lines"]:
            number = line["line_number"]
            lines[name][number] = lines[name].get(number, 0) + line["count"]
            for index, branch in enumerate(line["branches"]):
                branches[name][number, index] = branches[name].get((number, index), 0) + branch["count"]


def covered(name: str, lines: Counts, branches: Counts) -> Covered:
    text = (SOURCES / name).read_text(encoding="utf-8").splitlines()
    return Covered(
        len(lines),
        sorted(number for number, count in lines.items() if count == 0),
        len(branches),
        [
            f"{number} {at}: {text[number - 1].strip()}"
            for (number, at), count in sorted(branches.items())
            if count == 0
        ],
    )


def gcov(directory: Path, *data: Path) -> Iterator[dict[str, Any]]:
    """What gcov reports of data files."""
    command = ["gcov", "--branch-probabilities", "--json-format", *map(str, data)]
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    for report in directory.glob("*.gcov.json.gz"):
        yield json.loads(gzip.decompress(report.read_bytes()))
        report.unlink()


def share(missed: int, of: int) -> float:
    return 100 * (of - missed) / of


def main(tests: list[str]) -> int:
    lines: dict[str, Counts] = {name: {} for name in FILES}
    branches: dict[str, Counts] = {name: {} for name in FILES}
    flags = ["-O0", "--coverage", "-fprofile-update=atomic"]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        library = build(directory / "helper.so", *flags, *HOOK, "-shared", "-fPIC")
        options = ["-q", "-p", "tests.instrumented", "-p", "no:cacheprovider"]
        environ = os.environ | {CHOOSE: str(library)}
        done = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=environ, check=False)
        if done.returncode:
            return 1
        for report in gcov(directory, *directory.glob("*.gcda")):
            add(report, FILES, lines, branches)
    with tempfile.TemporaryDirectory() as place:  # what only a race reaches; its hook makes other branches in _memory.h
        directory = Path(place)
        driver = build(directory / "driver", *flags, "-U_FORTIFY_SOURCE", source=ROOT / "tests/schedule/driver.c")
        subprocess.run([driver, "-k", "2"], check=True, stdout=subprocess.DEVNULL)
        for report in gcov(directory, *directory.glob("*.gcda")):
            add(report, [name for name in FILES if name != "_memory.h"], lines, branches)
    files = {name: covered(name, lines[name], branches[name]) for name in FILES}
    below = 0
    for name in FILES:
        file = files[name]
        of_lines, of_branches = (
            share(len(file.missed_lines), file.lines),
            share(len(file.missed_branches), file.branches),
        )
        print(f"{name}: {of_lines:.1f} % of {file.lines} lines, {of_branches:.1f} % of {file.branches} branches")
        for number in file.missed_lines:
            print(f"  line {number} not reached")
        for what in file.missed_branches:
            print(f"  branch not taken: {what}")
        if name in BARRED and min(of_lines, of_branches) <= BAR:
            print(f"  {name} is below the bar of {BAR} %")
            below += 1
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or TESTS))
