"""The contract of stores over each of them; what it asks is in `shmlimit.testing`.

A store of this package is a class here.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from _servers import Server

from shmlimit import Decision, Policy, SharedTable
from shmlimit.policies.base import US_PER_S
from shmlimit.stores._memcached_server import MARGIN_S
from shmlimit.stores.fallback import FallbackStore
from shmlimit.stores.local import LocalStore
from shmlimit.stores.memcached import MemcachedStore
from shmlimit.stores.memory import MemoryStore
from shmlimit.stores.redis import RedisStore
from shmlimit.stores.sqlite import SqliteStore
from shmlimit.table.prepared import interval_of
from shmlimit.table.segment import remove
from shmlimit.table.table import NOW_MAX_US
from shmlimit.testing import FailingStore, StoreContract
from tests.bindings import bound
from tests.conftest import TAG
from tests.stores.opened import open_local

PATIENCE_S = 5.0
"""For the answers of servers: the machine may be busy."""


class TestMemoryStore(StoreContract):
    make_store = MemoryStore

    def kept(self, store: MemoryStore) -> Any:
        return dict(store._entries), store._watermark_us

    def forgets(self, _policy: Policy) -> bool:
        return True


class TestSqliteStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_store(self) -> SqliteStore:
        return SqliteStore(self.directory / f"{secrets.token_hex(8)}.sqlite3")

    def kept(self, store: SqliteStore) -> Any:
        tables = [store.table, f"{store.table}:forgotten"]
        with contextlib.closing(sqlite3.connect(store.path)) as connection:
            return [connection.execute(f'SELECT * FROM "{table}"').fetchall() for table in tables]

    def forgets(self, _policy: Policy) -> bool:
        return True

    def opener(self, store: SqliteStore) -> Callable[[], SqliteStore]:
        return partial(SqliteStore, store.path)


class TestSharedTable(StoreContract):
    """It forgets only where it needs the slot."""

    latest_us = NOW_MAX_US
    way = "builtin"

    @pytest.fixture(autouse=True)
    def _bound(self) -> Iterator[None]:
        with bound(self.way):
            yield

    def make_store(self) -> SharedTable:
        table = SharedTable.create(f"{TAG}{secrets.token_hex(5)}", 1024)
        assert table.binding == self.way
        return table

    def discard(self, store: SharedTable) -> None:
        store.close()
        remove(store.name)

    def kept(self, store: SharedTable) -> Any:
        return store.slots.tobytes()

    def exact(self, policy: Policy) -> bool:
        if not hasattr(policy, "burst"):
            return True
        denominator, interval = interval_of(policy.limit, policy.period_us)
        return denominator * policy.period_us == interval * policy.limit

    def opener(self, store: SharedTable) -> Callable[[], SharedTable]:
        return partial(SharedTable.attach, store.name)


class TestSharedTableThroughCtypes(TestSharedTable):
    """The same without the builtin, in the processes that the contract starts as well."""

    way = "ctypes"


class TestLocalStore(StoreContract):
    """What the two promise, and policies of both in one step."""

    table, file = TestSharedTable(), TestSqliteStore()
    latest_us = NOW_MAX_US

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.file.directory = tmp_path

    def make_store(self) -> LocalStore:
        return LocalStore(SharedTable.create(f"{TAG}{secrets.token_hex(5)}", 1024), self.file.make_store())

    def discard(self, store: LocalStore) -> None:
        store.close()
        self.table.discard(store.table)

    def kept(self, store: LocalStore) -> Any:
        store.sqlite.count()  # makes the file
        return self.table.kept(store.table), self.file.kept(store.sqlite)

    def exact(self, policy: Policy) -> bool:
        return not SharedTable.supports(policy) or self.table.exact(policy)

    def forgets(self, policy: Policy) -> bool:
        return not SharedTable.supports(policy)

    def opener(self, store: LocalStore) -> Callable[[], LocalStore]:
        return partial(open_local, store.table.name, store.sqlite.path)


class TestRedisStore(StoreContract):
    """It forgets by its own clock, given times a minute late."""

    kind: ClassVar[str] = "redis"
    lasts_us = 60 * US_PER_S

    @pytest.fixture(autouse=True)
    def _server(self, server_of: Callable[[str], Server]) -> None:
        self.url = server_of(self.kind).url

    def make_store(self) -> RedisStore:
        return RedisStore(self.url, prefix=secrets.token_hex(8), timeout=PATIENCE_S)

    def opener(self, store: RedisStore) -> Callable[[], RedisStore]:
        return partial(RedisStore, self.url, prefix=store.prefix, timeout=PATIENCE_S)


class TestValkey(TestRedisStore):
    kind = "valkey"


class TestMemcachedStore(StoreContract):
    lasts_us = MARGIN_S * US_PER_S

    @pytest.fixture(autouse=True)
    def _server(self, server_of: Callable[[str], Server]) -> None:
        self.url = server_of("memcached").url

    def make_store(self) -> MemcachedStore:
        return MemcachedStore(self.url, prefix=secrets.token_hex(8), timeout=PATIENCE_S)

    def opener(self, store: MemcachedStore) -> Callable[[], MemcachedStore]:
        return partial(MemcachedStore, self.url, prefix=store.prefix, timeout=PATIENCE_S)


class TestFallbackStore(StoreContract):
    """While the first store answers."""

    def make_store(self) -> FallbackStore:
        return FallbackStore(MemoryStore(), MemoryStore())

    def forgets(self, _policy: Policy) -> bool:
        return True


class TestFallbackStoreInAnOutage(TestFallbackStore):
    """While the first store is down, the second is a store like any other."""

    def make_store(self) -> FallbackStore:
        return FallbackStore(FailingStore(MemoryStore(), failing=True), MemoryStore())


class TestFailingStore(StoreContract):
    """The double that can fail is a store like any other while it doesn't."""

    def make_store(self) -> FailingStore:
        return FailingStore(MemoryStore())

    def forgets(self, _policy: Policy) -> bool:
        return True


class Least:
    """No more than a store must have: no `take_all`, no coroutines, no base class."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.supports, self.close = self.inner.supports, self.inner.close

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        return self.inner.take(policy, key, cost, now_us=now_us)

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        return self.inner.peek(policy, key, cost, now_us=now_us)

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        return self.inner.reset(policy, key)


class TestLeastStore(StoreContract):
    make_store = Least
