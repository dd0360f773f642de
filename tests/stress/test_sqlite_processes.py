"""Many processes on one SQLite file: exactly the limit, no denial for a busy lock, and nothing lost to a kill -9."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shmlimit import FixedWindow, SlidingLog, StoreError, TokenBucket
from shmlimit.stores.sqlite import SqliteStore
from tests.stress.workers import together

WORKERS = 8
YEAR = 366 * 86_400  # nothing refills meanwhile
SIXTY = TokenBucket(60, YEAR)
HITS = 40
FEW = TokenBucket(10**6, YEAR)


def hit(store: SqliteStore, barrier: Any, results: Any) -> None:
    """Hits on keys that all share, alone and all or nothing, and on one of its own."""
    log, window = SlidingLog(60, YEAR), FixedWindow(60, 10**9)
    barrier.wait()
    allowed: Counter[str] = Counter()
    for _ in range(HITS):
        allowed["one"] += store.take(SIXTY, "one").allowed
        allowed["log"] += store.take(log, "log").allowed
        allowed["all"] += all(store.take_all([(SIXTY, "all", 1), (window, "all", 1)]))
        allowed["own"] += store.take(FEW, str(os.getpid())).allowed
    results.put(allowed)
    store.close()


@pytest.mark.parametrize("used_before", [False, True], ids=["not opened before the fork", "opened before the fork"])
def test_exactly_the_limit(tmp_path: Path, used_before: bool) -> None:
    """Two processes got 61 of 60, or "database is locked" (PyrateLimiter#60, #61, #67), or a denial for a busy lock
    (4.5); here 8 get 60 of 320 together, each all of its own, and no error.
    """
    with SqliteStore(tmp_path / "limits.sqlite3") as store:
        if used_before:
            store.take(FEW, "parent")
        total: Counter[str] = sum(together(hit, (store,), "fork", WORKERS), Counter())
        assert total == {"one": 60, "log": 60, "all": 60, "own": WORKERS * HITS}
        assert store.peek(SIXTY, "one").remaining == 0


def hit_and_tell(path: str, end: Any, first: int) -> None:
    """Charges keys one after the other, and says each over the pipe once it is allowed."""
    store = SqliteStore(path)
    for number in range(first, first + 10**6):
        if store.take(SlidingLog(3, YEAR), f"key {number}").allowed:
            end.send_bytes(b"%d" % number)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Users that die of SIGKILL at random moments: every charge that was acknowledged is in the file, no lock stays,
    and the file is sound.
    """
    path = str(tmp_path / "limits.sqlite3")
    context = multiprocessing.get_context("fork")
    chance = random.Random(9)
    told: set[int] = set()
    with SqliteStore(path) as bystander:
        for lap in range(20):
            pairs = []
            for number in range(3):
                ours, theirs = context.Pipe(duplex=False)
                first = (lap * 3 + number) * 10**6
                worker = context.Process(target=hit_and_tell, args=(path, theirs, first))
                worker.start()
                theirs.close()
                pairs.append((worker, ours))
            time.sleep(chance.uniform(0.02, 0.15))
            for worker, ours in pairs:
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()
                with contextlib.suppress(EOFError):
                    while True:
                        told.add(int(ours.recv_bytes()))
                ours.close()
            begin = time.perf_counter()
            assert bystander.take(FEW, "bystander").remaining == 10**6 - lap - 1
            assert time.perf_counter() - begin < 2
        assert len(told) > 100
        remaining = [bystander.peek(SlidingLog(3, YEAR), f"key {number}").remaining for number in told]
        assert set(remaining) == {2}
        # At most the one charge of each that was killed between commit and telling.
        assert len(told) <= bystander.count() - 1 <= len(told) + 60
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def hit_what_is_there(path: str, stop: Any, results: Any) -> None:
    """Hits one key until told to stop; who is allowed says so. A StoreError must be about the file's removal."""
    said: list[str] = []
    allowed = 0
    with SqliteStore(path) as store:
        while not stop.is_set():
            try:
                allowed += store.take(SIXTY, "one").allowed
            except StoreError as error:  # noqa: PERF203
                said.append(str(error))
    assert all("removed" in one or "replaced" in one for one in said), set(said)
    results.put((allowed, len(said)))


@pytest.mark.parametrize("what", ["file", "file and log", "log"])
def test_removed_again_and_again(tmp_path: Path, what: str) -> None:
    """The file is removed under eight processes, time after time: each file grants its limit once, and never are there
    two at a time that count. Removed logs grant nothing.
    """
    path = tmp_path / "limits.sqlite3"
    ends = {"file": ("",), "file and log": ("", "-wal", "-shm"), "log": ("-wal", "-shm")}[what]
    context = multiprocessing.get_context("fork")
    stop, results = context.Event(), context.Queue()
    workers = [context.Process(target=hit_what_is_there, args=(str(path), stop, results)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    chance = random.Random(5)
    removals = 0
    until = time.monotonic() + 60
    while removals < 30 and time.monotonic() < until:
        time.sleep(chance.uniform(0, 0.05))
        for end in ends:
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{end}").unlink()
                removals += end in {"", "-wal"}
    stop.set()
    answers = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    allowed, said = (sum(column) for column in zip(*answers, strict=True))
    files = 1 if what == "log" else removals + 1
    assert removals >= 30
    assert said >= 10
    assert allowed <= 60 * files
    assert allowed == 60 or what != "log"
    with SqliteStore(path) as store:
        assert sum(store.take(SIXTY, "one").allowed for _ in range(61)) <= 60
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
