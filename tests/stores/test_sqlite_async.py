"""SqliteStore and LocalStore under an event loop: it runs on while the file is locked, and nobody waits twice."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmlimit import Guard, SharedTable, SlidingLog, StoreError, TokenBucket
from shmlimit.adapters.asgi import RateLimit
from shmlimit.stores import _threads
from shmlimit.stores.local import LocalStore
from shmlimit.stores.memory import MemoryStore
from shmlimit.stores.sqlite import SqliteStore

LOG, BUCKET = SlidingLog(10, 10**6), TokenBucket(10, 10**6)
CROWD = 5 * _threads.THREADS


class Locked:
    """Another user of the file, who has its write lock."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("BEGIN IMMEDIATE")

    def release(self) -> None:
        self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def locked(path: Path) -> Iterator[Locked]:
    """The file is there and locked."""
    with SqliteStore(path) as store:
        store.take(LOG, "made")
        with contextlib.closing(Locked(path)) as locked:
            yield locked


CALLS: dict[str, Callable[[Any], Any]] = {
    "atake": lambda store: store.atake(LOG, "k"),
    "atake_all": lambda store: store.atake_all([(LOG, "k", 1), (BUCKET, "k", 1)]),
    "areset": lambda store: store.areset(LOG, "k"),
}


@pytest.mark.parametrize("local", [False, True], ids=["sqlite", "local"])
@pytest.mark.parametrize("call", CALLS)
def test_loop_runs_on_while_the_file_is_locked(
    path: Path, table: SharedTable, locked: Locked, call: str, local: bool
) -> None:
    """What waits for the file holds up nothing else: the lock is released by the loop itself, after a hundred turns,
    and the table's decisions and the loop's other threads answer meanwhile.
    """
    sqlite = SqliteStore(path, timeout=60)
    store: Any = LocalStore(table, sqlite) if local else sqlite

    async def run() -> Any:
        waiting = [asyncio.create_task(CALLS[call](store)) for _ in range(CROWD)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert await asyncio.to_thread(lambda: "another thread") == "another thread"
        if local:
            assert (await store.atake(BUCKET, "other")).remaining == 9
            assert (await store.apeek(BUCKET, "other")).remaining == 9
            assert len(await store.atake_all([(BUCKET, "other", 1)])) == 1
            assert await store.areset(BUCKET, "other")
        assert (await MemoryStore().atake(LOG, "k")).allowed
        assert not any(task.done() for task in waiting)
        locked.release()
        return await asyncio.gather(*waiting)

    answers = asyncio.run(run())
    sqlite.close()
    assert len(answers) == CROWD
    if call != "areset":
        assert sum(all(one) if isinstance(one, list) else one.allowed for one in answers) == 10


def test_peek_does_not_wait(path: Path, locked: Locked) -> None:
    """Readers don't wait for the write lock at all."""
    with SqliteStore(path, timeout=60) as store:
        assert asyncio.run(store.apeek(LOG, "made")).remaining == 9


@pytest.mark.parametrize("local", [False, True], ids=["sqlite", "local"])
def test_waiting_for_a_thread_counts(path: Path, table: SharedTable, locked: Locked, local: bool) -> None:
    """Many more calls than there are threads, all at once: the last one, too, waits no longer than `timeout` from when
    it was made, whenever its turn among the threads comes.
    """
    sqlite = SqliteStore(path, timeout=0.2)
    store: Any = LocalStore(table, sqlite) if local else sqlite
    deadlines: list[float] = []
    within = sqlite._file.within

    def watched(until: float, *arguments: Any, **named: Any) -> Any:
        deadlines.append(until)
        return within(until, *arguments, **named)

    sqlite._file.within = watched  # type: ignore[method-assign]

    async def run() -> tuple[float, list[Any]]:
        calls = [CALLS["atake_all" if local else "atake"](store) for _ in range(CROWD)]
        pending = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)  # each of them runs as far as to its thread
        return time.monotonic(), await pending

    made, answers = asyncio.run(run())
    sqlite.close()
    assert {type(one) for one in answers} == {StoreError}
    assert len(deadlines) == CROWD
    assert max(deadlines) <= made + 0.2


def test_late_calls_answer_when_the_file_is_free(path: Path, locked: Locked) -> None:
    """A call whose time was over before its turn came is tried once: if nobody has the file, it is answered."""
    with SqliteStore(path, timeout=0.0) as store:

        async def run() -> list[Any]:
            refused = await asyncio.gather(*(store.atake(LOG, "k") for _ in range(3)), return_exceptions=True)
            locked.release()
            return [*refused, await store.atake(LOG, "k")]

        *refused, answered = asyncio.run(run())
        assert [type(one) for one in refused] == [StoreError] * 3
        assert answered.remaining == 9


def test_other_requests_are_answered_first(path: Path, locked: Locked) -> None:
    """An ASGI application with one limit in the file and one in memory: while the file is locked a hundred requests to
    the other routes are answered, and then, once it is free, that one.
    """
    order: list[str] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        order.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with SqliteStore(path, timeout=60) as store:
        in_file = RateLimit(app, Guard("file", "sliding-log 10/hour", key=lambda _: "k"), store=store)
        in_memory = RateLimit(app, Guard("memory", "1000/hour", key=lambda _: "k"), store=MemoryStore())
        routes = {"/file": in_file, "/memory": in_memory, "/free": app}

        async def request(path: str) -> int:
            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "GET", "path": path, "headers": [], "client": ("203.0.113.7", 1)}
            await routes[path](scope, None, send)
            status: int = sent[0]["status"]
            return status

        async def run() -> list[int]:
            waiting = [asyncio.create_task(request("/file")) for _ in range(CROWD)]
            statuses = [await request(path) for _ in range(50) for path in ("/memory", "/free")]
            assert "/file" not in order
            locked.release()
            return statuses + await asyncio.gather(*waiting)

        statuses = asyncio.run(run())
    assert statuses[:100] == [200] * 100
    assert sorted(statuses[100:]) == [200] * 10 + [429] * (CROWD - 10)
    assert order[-10:] == ["/file"] * 10


def test_cancelled_while_it_waits_for_a_thread(path: Path, locked: Locked) -> None:
    """A request that is given up before its turn charges nothing."""
    with SqliteStore(path, timeout=60) as store:

        async def run() -> list[Any]:
            tasks = [asyncio.create_task(store.atake(LOG, "k")) for _ in range(_threads.THREADS)]
            behind = [asyncio.create_task(store.atake(LOG, "behind")) for _ in range(5)]
            await asyncio.sleep(0)
            for task in behind:
                task.cancel()
            assert all(
                isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*behind, return_exceptions=True)
            )
            locked.release()
            return await asyncio.gather(*tasks)

        assert all(one.allowed for one in asyncio.run(run()))
        assert store.peek(LOG, "behind").remaining == 10


def test_closing_does_not_make_others_wait(path: Path, locked: Locked) -> None:
    """Calls in the queue of a store that is closed fail one after the other, without waiting for the lock."""
    store = SqliteStore(path, timeout=60)

    async def run() -> list[Any]:
        tasks = [asyncio.create_task(store.atake(LOG, "k")) for _ in range(CROWD)]
        await asyncio.sleep(0)
        closing = threading.Thread(target=store.close)
        closing.start()
        while not store._file._closed:
            pass
        locked.release()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        closing.join()
        return answers

    answers = asyncio.run(run())
    failed = [str(one) for one in answers if isinstance(one, StoreError)]
    assert len(failed) >= CROWD - 1
    assert all("store is closed" in one for one in failed)
