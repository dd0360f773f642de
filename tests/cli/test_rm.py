"""`python -m shmlimit rm NAME`."""

from __future__ import annotations

import subprocess
import sys

from shmlimit import SharedTable, TokenBucket

ONCE = TokenBucket(1, 3600)


def shmlimit(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shmlimit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_rm_starts_afresh(name: str) -> None:
    """A removed table is gone; the next that opens the name counts from the start."""
    with SharedTable.create(name, 64) as table:
        table.take(ONCE, "k")
    del table
    done = shmlimit("rm", name)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"removed {name}\n", "")
    with SharedTable.create(name, 64) as table:
        assert table.take(ONCE, "k").allowed


def test_rm_tells_of_those_that_go_on(name: str) -> None:
    """Removing a table that is in use is done, and says who has to be restarted."""
    with SharedTable.create(name, 64) as table:
        done = shmlimit("rm", name)
        assert done.returncode == 0
        assert "restart them" in done.stderr
        assert table.take(ONCE, "k").allowed


def test_rm_of_nothing_is_an_error(name: str) -> None:
    """A name that isn't there is told, with exit status 1."""
    done = shmlimit("rm", name)
    assert done.returncode == 1
    assert "no such table" in done.stderr
    assert name in done.stderr


def test_misspelt_command_shows_the_usage() -> None:
    """An unknown command exits with 2 and names the known ones."""
    done = shmlimit("remove", "x")
    assert done.returncode == 2
    assert "rm" in done.stderr
