"""A SQLite store with a clock in the test's hands, and a Redis store on each kind of server."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _servers import Server

from shmlimit import FixedWindow, Gcra, SlidingCounter, SlidingLog, TokenBucket
from shmlimit.stores.redis import RedisStore
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


@pytest.fixture(params=["valkey", "redis"])
def redis_kind(request: pytest.FixtureRequest) -> str:
    """Both servers that speak the protocol."""
    kind: str = request.param
    return kind


@pytest.fixture
def redis_server(server_of: Callable[[str], Server], redis_kind: str) -> Server:
    """The one of the kind that the tests share."""
    return server_of(redis_kind)


@pytest.fixture
def redis_store(redis_server: Server) -> Iterator[RedisStore]:
    """A store with a prefix of its own on the shared server, and with patience."""
    with RedisStore(redis_server.url, prefix=f"t{secrets.token_hex(6)}", timeout=10) as store:
        yield store
