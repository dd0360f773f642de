"""Many processes on one table: exactly the limit is admitted, and the counters prove that they met."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from shmlimit import FixedWindow, SharedTable, TokenBucket

WORKERS = 8
# On two busy cores a run may happen to pass without a collision, and then proves little: it is done again.
ATTEMPTS = 10
YEAR = 366 * 86_400  # nothing refills meanwhile
HOT = TokenBucket(100_000, YEAR)
MANY = TokenBucket(20, YEAR)
KEYS = 2_000


def table_of(name: str, inherited: SharedTable | None) -> SharedTable:
    return inherited if inherited is not None else SharedTable.attach(name)


def hit_one_key(name: str, inherited: SharedTable | None, barrier: Any, results: Any) -> None:
    """Takes until 1,000 denials in a row: nobody can be allowed after that."""
    table = table_of(name, inherited)
    barrier.wait()
    allowed = denied = 0
    while denied < 1_000:
        if table.take(HOT, "hot").allowed:
            allowed, denied = allowed + 1, 0
        else:
            denied += 1
    results.put(allowed)


def hit_new_keys(name: str, inherited: SharedTable | None, barrier: Any, results: Any) -> None:
    """Everybody takes each key once, in the same order, 25 times: all keys appear at once in all processes."""
    table = table_of(name, inherited)
    barrier.wait()
    allowed: Counter[int] = Counter()
    for _ in range(25):
        for key in range(KEYS):
            allowed[key] += table.take(MANY, f"key {key}").allowed
    results.put(allowed)


@pytest.fixture(params=["fork", "spawn"])
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the workers come by the table: inherited, or attached by name."""
    return request.param


def run(target: Any, name: str, table: SharedTable, method: str) -> list[Any]:
    context = multiprocessing.get_context(method)
    barrier, results = context.Barrier(WORKERS), context.Queue()
    inherited = table if method == "fork" else None
    workers = [context.Process(target=target, args=(name, inherited, barrier, results)) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * WORKERS
    return answers


def runs(target: Any, name: str, slots: int, method: str) -> Iterator[tuple[list[Any], dict[str, int], int]]:
    """Answers, counters and used slots of runs on new tables, until one saw swaps lost; fails if none of them does."""
    for _ in range(ATTEMPTS):
        with SharedTable.create(name, slots) as table:
            answers = run(target, name, table, method)
            stats, used = table.stats(), table.used()
            table.unlink()
        yield answers, stats, used
        if stats["contended"]:
            return
    pytest.fail(f"no swap was lost in {ATTEMPTS} runs: nothing was shown")


def test_one_key_admits_exactly_its_limit(name: str, method: str) -> None:
    """8 processes on one key: 100,000 allowed, not one more or less, with swaps lost on the way."""
    for answers, stats, _ in runs(hit_one_key, name, 1024, method):
        assert sum(answers) == 100_000
        assert sum(1 for allowed in answers if allowed) >= 2
        assert stats["allowed"] == 100_000
        assert stats["denied"] == 8_000


def test_new_keys_admit_exactly_their_limit(name: str, method: str) -> None:
    """2,000 keys that all appear at once in 8 processes: 20 allowed for each."""
    for answers, stats, used in runs(hit_new_keys, name, 8192, method):
        total: Counter[int] = sum(answers, Counter())
        assert set(total.values()) == {20}
        assert len(total) == KEYS
        assert used == KEYS
        assert stats["full"] == 0


BURST, HOURLY = TokenBucket(1_000, YEAR), TokenBucket(50_000, YEAR)
DAILY = FixedWindow(20_000, 366 * 86_400)


def hit_several(name: str, inherited: SharedTable | None, barrier: Any, results: Any) -> None:
    """Takes of three limits at once until 1,000 refusals in a row."""
    table = table_of(name, inherited)
    barrier.wait()
    allowed = refused = 0
    while refused < 1_000:
        if all(table.take_all([(HOURLY, "k", 1), (DAILY, "k", 1), (BURST, "k", 1)])):
            allowed, refused = allowed + 1, 0
        else:
            refused += 1
    results.put(allowed)


def test_refused_requests_consume_nothing(name: str, method: str) -> None:
    """8 processes: the smallest of three limits admits exactly its number, and the others have lost just that."""
    with SharedTable.create(name, 1024) as table:
        answers = run(hit_several, name, table, method)
        stats = table.stats()
        hourly, daily = table.peek(HOURLY, "k"), table.peek(DAILY, "k")
    assert sum(answers) == BURST.limit
    assert stats["allowed"] == 3 * BURST.limit
    assert daily.remaining == DAILY.limit - BURST.limit
    # Giving back costs the time that it took, and time refills: both are seconds of a refill that takes days.
    spent_us = BURST.limit * HOURLY.period_us // HOURLY.limit
    assert abs(hourly.reset_us - spent_us) < 60 * 10**6


def test_every_process_counts_on_its_own_line(name: str) -> None:
    """A child chooses its line again, and the line of one that is gone is reused."""
    with SharedTable.create(name, 64) as table:
        for _ in range(200):
            pid = os.fork()
            if pid == 0:
                table.take(TokenBucket(1000, YEAR), "k")
                os._exit(0)
            os.waitpid(pid, 0)
        from shmlimit.table import layout

        lanes = [
            layout._LANE.unpack_from(table._opened()[0].mapping, layout.LANES_AT + layout.LANE_BYTES * i)
            for i in range(layout.LANES)
        ]
        assert sum(1 for lane in lanes if lane[0]) == 2
        assert table.stats()["allowed"] == 200


def take_for_ever(table: SharedTable) -> None:
    i = 0
    while True:
        table.take(HOT, "hot")
        table.take(TokenBucket(1, 0.001), f"short {i}")
        i += 1


def test_killed_workers_leave_nothing_that_stops_the_rest(name: str) -> None:
    """SIGKILL at random moments: the others go on, and the key admits exactly its limit."""
    with SharedTable.create(name, 256) as table:
        context = multiprocessing.get_context("fork")
        for round_ in range(30):
            workers = [context.Process(target=take_for_ever, args=(table,)) for _ in range(3)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join(0.002 * (round_ % 7 + 1))
                os.kill(worker.pid or 0, signal.SIGKILL)
            for worker in workers:
                worker.join(30)
        spent = table.peek(HOT, "hot")
        used = HOT.limit - spent.remaining
        stats = table.stats()
        rest = sum(table.take(HOT, "hot").allowed for _ in range(spent.remaining + 100))
    assert used + rest == HOT.limit
    assert used > 1000
    assert stats["reclaimed"] > 0
