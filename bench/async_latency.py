"""How long an event loop's other requests wait while the SQLite file of one limit is locked.

    python bench/async_latency.py [rounds]

One ASGI application in one event loop, driven in this process. `/reports` is limited by a sliding log in a SQLite file,
`/` by a token bucket in the shared table. A request to `/` comes every 5 ms, eight to `/reports` at once. What is
measured is the time from when a request was due to its answer, so that a loop that stands still can't hide it by asking
later.

The contenders take turns: nobody else has the file; another process holds its write lock for a second; and the same
with a store that is called on the loop itself, as a limiter does it that has no coroutines of its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from _rounds import machine, publish, ratios, spread

from shmlimit import Decision, Guard, Policy, SharedTable
from shmlimit.adapters.asgi import RateLimit
from shmlimit.stores.sqlite import SqliteStore

LOCKED_S, GAP_S, AFTER_S, CROWD = 1.0, 0.005, 0.2, 8
FREE, THREADS, ON_LOOP = "the file is free", "locked for 1 s", "locked for 1 s, called on the loop"
Request = Callable[[str], Awaitable[None]]


class OnTheLoop:
    """A store whose coroutine is its method: what `atake` must not be."""

    def __init__(self, store: SqliteStore) -> None:
        self.take, self.peek, self.reset, self.close = store.take, store.peek, store.reset, store.close
        self.supports = store.supports

    async def atake(self, policy: Policy, key: str | bytes, cost: int = 1) -> Decision:
        return self.take(policy, key, cost)


async def hello(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"hello"})


def application(store: Any, table: SharedTable) -> Request:
    routes = {
        "/reports": RateLimit(hello, Guard("reports", "sliding-log 1000000/hour"), store=store),
        "/": RateLimit(hello, Guard("per-ip", "1000000/hour"), store=table),
    }

    async def request(path: str) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "client": ("203.0.113.7", 1)}
        await routes[path](scope, None, send)  # type: ignore[arg-type]
        assert sent[0]["status"] == 200, sent

    return request


def hold(path: str, end: Any) -> None:
    """Holds the file's write lock for a second, whenever it is told to."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    while end.recv():
        connection.execute("BEGIN IMMEDIATE")
        end.send("locked")
        time.sleep(LOCKED_S)
        connection.execute("ROLLBACK")
        end.send("free")
    connection.close()


async def round_of(request: Request, other: Any) -> tuple[list[float], list[float]]:
    """Seconds that the requests to `/` took, and those to `/reports`."""

    async def timed(path: str, due: float) -> float:
        await asyncio.sleep(due - time.perf_counter())
        await request(path)
        return time.perf_counter() - due

    await request("/reports")  # the file is open, threads are there
    if other is not None:
        other.send(True)
        assert other.recv() == "locked"
    begin = time.perf_counter() + 0.02
    count = int((LOCKED_S + AFTER_S) / GAP_S)
    quick = [asyncio.create_task(timed("/", begin + i * GAP_S)) for i in range(count)]
    slow = [asyncio.create_task(timed("/reports", begin + 0.05)) for _ in range(CROWD)]
    times = await asyncio.gather(*quick), await asyncio.gather(*slow)
    if other is not None:
        assert other.recv() == "free"
    return times


def main(rounds: int) -> None:
    worst: dict[str, list[float]] = {FREE: [], THREADS: [], ON_LOOP: []}
    usual: dict[str, list[float]] = {name: [] for name in worst}
    limited: dict[str, list[float]] = {name: [] for name in worst}
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with (
        tempfile.TemporaryDirectory() as directory,
        SqliteStore(Path(directory) / "limits.sqlite3") as store,
        SharedTable.create(f"shmlimit-bench-{os.getpid():x}", 1024) as table,
    ):
        holder = context.Process(target=hold, args=(store.path, theirs))
        holder.start()
        try:
            stores = {FREE: store, THREADS: store, ON_LOOP: OnTheLoop(store)}
            for number in range(rounds):
                turn = number % len(stores)
                for name in [*stores][turn:] + [*stores][:turn]:
                    request = application(stores[name], table)
                    quick, slow = asyncio.run(round_of(request, None if name == FREE else ours))
                    worst[name].append(max(quick) * 1000)
                    usual[name].append(statistics.median(quick) * 1000)
                    limited[name].append(max(slow) * 1000)
        finally:
            ours.send(False)
            holder.join()
            table.unlink()
    others = int((LOCKED_S + AFTER_S) / GAP_S)
    lines = [
        "# Other requests of an event loop while the SQLite file is locked",
        "",
        f"{machine('shmlimit')}, SQLite {sqlite3.sqlite_version}; {rounds} rounds. Median (middle half), in ms.",
        "",
        f"| | the worst of {others} others | their median | worst ÷ the file is free | last of {CROWD} for the file |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {spread(worst[name], 1)} | {spread(usual[name], 2)} | {spread(ratios(worst, name, FREE), 1)} "
        f"| {spread(limited[name])} |"
        for name in worst
    ]
    share = [100 * one for one in ratios(worst, THREADS, ON_LOOP)]
    lines += ["", f"In threads the worst wait is {spread(share, 1)} % of what it is on the loop."]
    publish("async_latency.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
