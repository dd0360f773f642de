"""A SQLite store with a clock in the test's hands."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmlimit import FixedWindow, Gcra, SlidingCounter, SlidingLog, TokenBucket
from shmlimit.stores.sqlite import SqliteStore
from shmlimit.testing import FakeClock as Clock

T0 = 1_767_225_600_000_000  # 2026-01-01, a whole minute
S = 1_000_000
DAY = 86_400 * S
KINDS = [TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter]
TEN = TokenBucket(10, 60)
SECOND = TokenBucket(1, 1)


def rows(store: SqliteStore) -> list[Any]:
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        return connection.execute(f'SELECT * FROM "{store.table}" ORDER BY id').fetchall()


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
