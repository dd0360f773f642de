"""A SQLite store with a clock in the test's hands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlimit.stores.sqlite import SqliteStore

T0 = 1_767_225_600_000_000  # 2026-01-01, a whole minute


class Clock:
    def __init__(self, now_us: int = T0) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "limits.sqlite3"


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[SqliteStore]:
    """A store with a clock that the test sets."""
    with SqliteStore(path, clock=clock) as store:
        yield store
