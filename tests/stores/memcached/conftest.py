"""Stores on the memcached that the tests of a run share, and a look at what memcached itself says."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _servers import Server

from shmlimit import FixedWindow, Gcra, SlidingCounter, TokenBucket
from shmlimit.stores.memcached import MemcachedStore

T0 = 1_767_225_600_000_000  # 2026-01-01
S = 1_000_000
DAY = 86_400
YEAR = 366 * DAY
KINDS = [TokenBucket, Gcra, FixedWindow, SlidingCounter]
TEN = TokenBucket(10, 60)
HUNDRED = TokenBucket(100, YEAR)


@pytest.fixture
def server(server_of: Callable[[str], Server]) -> Server:
    return server_of("memcached")


@pytest.fixture
def make(server: Server) -> Iterator[Callable[..., MemcachedStore]]:
    """Makes stores that share a prefix which no other test has."""
    prefix = f"test-{secrets.token_hex(6)}"
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(MemcachedStore(server.url, **{"prefix": prefix, **options}))


@pytest.fixture
def store(make: Callable[..., MemcachedStore]) -> MemcachedStore:
    return make()


def ask(port: int, command: str) -> bytes:
    """What memcached itself says: its first line."""
    with socket.create_connection(("127.0.0.1", port), 5) as line, line.makefile("rwb") as stream:
        stream.write(command.encode() + b"\r\n")
        stream.flush()
        return stream.readline().strip()


def name_of(store: MemcachedStore, policy: Any, key: str | bytes) -> str:
    return store._name(policy, key if isinstance(key, bytes) else key.encode())


def seconds_left(store: MemcachedStore, policy: Any, key: str) -> int | None:
    """How long memcached will keep the key; `None` for without end."""
    answer = ask(store._server.address[1], f"mg {name_of(store, policy, key)} t").decode()
    assert answer.startswith("HD t"), answer
    return None if answer == "HD t-1" else int(answer[4:])


def before_write(store: MemcachedStore, act: Callable[[int], None]) -> None:
    """Calls `act` with 0, 1, 2 … before each write of the store reaches memcached: there another may win."""
    put, count = store._server.put, iter(range(10**9))

    def put_late(*arguments: Any) -> bool:
        act(next(count))
        return put(*arguments)

    store._server.put = put_late  # type: ignore[method-assign]
