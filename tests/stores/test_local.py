"""LocalStore: the table and the file beside it decide as one."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shmlimit import FixedWindow, SharedTable, SlidingLog, StoreError, TokenBucket
from shmlimit.stores.local import LocalStore
from shmlimit.stores.sqlite import SqliteStore

YEAR = 366 * 86_400
IN_TABLE, SMALL_IN_TABLE = TokenBucket(100, YEAR), FixedWindow(3, YEAR)
IN_FILE, SMALL_IN_FILE = SlidingLog(100, YEAR), SlidingLog(3, YEAR)


@pytest.fixture
def store(table: SharedTable, tmp_path: Path) -> Iterator[LocalStore]:
    """Both empty."""
    store = LocalStore(table, SqliteStore(tmp_path / "limits.sqlite3"))
    yield store
    store.sqlite.close()


def left(store: LocalStore, *policies: Any) -> list[int]:
    return [store.peek(policy, "k").remaining for policy in policies]


def test_policy_picks_the_place(store: LocalStore) -> None:
    """What the table supports is kept there, and the file isn't opened for it."""
    store.take(IN_TABLE, "k")
    assert not Path(store.sqlite.path).exists()
    store.take(IN_FILE, "k")
    assert (store.table.used(), store.sqlite.count()) == (1, 1)
    assert left(store, IN_TABLE, IN_FILE) == [99, 99]
    assert store.supports(IN_TABLE)
    assert store.supports(IN_FILE)
    assert store.reset(IN_FILE, "k")
    assert store.reset(IN_TABLE, "k")
    assert left(store, IN_TABLE, IN_FILE) == [100, 100]


def test_table_refuses_and_the_file_loses_nothing(store: LocalStore) -> None:
    """A refusal by the table rolls the file back."""
    requests = [(IN_FILE, "k", 1), (SMALL_IN_TABLE, "k", 1)]
    decisions = [store.take_all(requests) for _ in range(5)]
    assert [[d.allowed for d in both] for both in decisions] == [[True, True]] * 3 + [[True, False]] * 2
    assert [both[0].remaining for both in decisions] == [99, 98, 97, 97, 97]
    assert left(store, IN_FILE, SMALL_IN_TABLE) == [97, 0]


def test_file_refuses_and_the_table_loses_nothing(store: LocalStore) -> None:
    """A refusal by the file charges nothing in the table; the answers come in the order of the requests."""
    requests = [(IN_TABLE, "k", 1), (SMALL_IN_FILE, "k", 1), (SMALL_IN_TABLE, "k", 1)]
    decisions = [store.take_all(requests) for _ in range(5)]
    assert [[d.allowed for d in three] for three in decisions] == [[True] * 3] * 3 + [[True, False, False]] * 2
    assert [three[0].remaining for three in decisions] == [99, 98, 97, 97, 97]
    assert left(store, IN_TABLE, SMALL_IN_FILE, SMALL_IN_TABLE) == [97, 0, 0]
    assert store.table.stats()["allowed"] == 6


@pytest.mark.parametrize("policies", [(IN_TABLE, SMALL_IN_TABLE), (IN_FILE, SMALL_IN_FILE), (IN_FILE, SMALL_IN_TABLE)])
def test_joint_answer_over_any_mix(store: LocalStore, policies: tuple[Any, Any]) -> None:
    """The same policy and key twice adds up, wherever it is kept."""
    large, small = policies
    decisions = store.take_all([(small, "k", 2), (large, "k", 5), (small, b"k", 1)])
    assert [d.remaining for d in decisions] == [0, 95, 0]
    decisions = store.take_all([(small, "k", 1), (large, "k", 5), (small, b"k", 1)])
    assert [d.allowed for d in decisions] == [False, True, False]
    assert left(store, large, small) == [95, 0]


def test_write_that_fails_gives_the_charge_back(store: LocalStore) -> None:
    """The file can't be written after the table was charged: a StoreError, and neither of the two has lost anything."""
    requests = [(IN_TABLE, "k", 10), (IN_FILE, "k", 10)]
    store.take_all(requests)
    with closing(sqlite3.connect(store.sqlite.path)) as other:
        other.execute(
            f"CREATE TRIGGER full BEFORE UPDATE ON {store.sqlite.table}"
            " BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
        )
        other.commit()
    with pytest.raises(StoreError, match="disk is full"):
        store.take_all(requests)
    assert left(store, IN_TABLE, IN_FILE) == [90, 90]
    assert store.table.stats()["allowed"] == 1


def test_coroutines_give_the_same_answers(store: LocalStore) -> None:
    """`atake` and its like go through the same states."""

    async def go() -> list[Any]:
        first = await store.atake(IN_TABLE, "k")
        second = await store.atake(IN_FILE, "k")
        both = await store.atake_all([(IN_TABLE, "k", 1), (IN_FILE, "k", 1)])
        only = await store.atake_all([(IN_TABLE, "k", 1)])
        peeks = [await store.apeek(IN_TABLE, "k"), await store.apeek(IN_FILE, "k")]
        resets = [await store.areset(IN_TABLE, "k"), await store.areset(IN_FILE, "k")]
        return [first.remaining, second.remaining, *(d.remaining for d in both + only + peeks), *resets]

    assert asyncio.run(go()) == [99, 99, 98, 98, 97, 97, 98, True, True]


def test_closed_store_says_so(store: LocalStore) -> None:
    """Both are closed."""
    store.close()
    for policy in (IN_TABLE, IN_FILE):
        with pytest.raises(StoreError, match="closed"):
            store.take(policy, "k")


def hit(store: LocalStore, results: Any) -> None:
    requests = [(IN_TABLE, "k", 1), (IN_FILE, "k", 1), (FixedWindow(60, YEAR), "k", 1)]
    results.put(sum(all(store.take_all(requests)) for _ in range(40)))


def test_exact_over_processes(store: LocalStore) -> None:
    """4 processes over table and file: the smallest limit admits its number, and the others have lost just that."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=hit, args=(store, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    allowed = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert sum(allowed) == 60
    assert left(store, IN_TABLE, IN_FILE) == [40, 40]
