"""Many processes on one table: exactly the limit is admitted, and the counters prove that they met."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from shmlimit import FixedWindow, SharedTable, TokenBucket
from tests.bindings import bound
from tests.stress.workers import ROUNDS, YEAR, rounds, run, table_of

WORKERS = 8
HOT = TokenBucket(200_000, YEAR)
MANY = TokenBucket(500, YEAR)
KEYS = 100


def hit_one_key(table: SharedTable, number: int) -> int:
    """Takes until 1,000 denials in a row: nobody can be allowed after that."""
    allowed = denied = 0
    while denied < 1_000:
        if table.take(HOT, f"hot {number}").allowed:
            allowed, denied = allowed + 1, 0
        else:
            denied += 1
    return allowed


def hit_new_keys(table: SharedTable, number: int) -> Counter[int]:
    """Takes new keys in the same order as everybody, so that they appear in all processes at once; then each until it
    is denied, in an order of its own.
    """
    allowed: Counter[int] = Counter()
    keys = list(range(KEYS))
    while keys:
        keys = [key for key in keys if table.take(MANY, f"key {key} of {number}").allowed]
        allowed.update(keys)
        random.shuffle(keys)
    return allowed


def hit(name: str, inherited: SharedTable | None, barrier: Any, results: Any) -> None:
    """What was allowed in each round, on one key and on many."""
    table = table_of(name, inherited)
    one = [hit_one_key(table, number) for number in rounds(table, barrier)]
    many = [hit_new_keys(table, number) for number in rounds(table, barrier)]
    results.put((one, many))


@pytest.fixture(params=[("fork", "builtin"), ("spawn", "ctypes")], ids=["fork", "spawn"])
def method(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the workers come by the table: inherited, or attached by name; and with it which way their `take` goes."""
    method, way = request.param
    with bound(way):
        yield method


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_one_key_and_many_new_ones_admit_exactly_their_limit(name: str, method: str, workers: int) -> None:
    """1 to 16 processes: 200,000 allowed on one key, then 500 on each of 100 that all meet at the same moment, not one
    more or less, with swaps lost on the way in both.
    """
    with SharedTable.create(name, 2 * KEYS * ROUNDS) as table:
        answers = run(hit, table, method, workers)
        stats, used = table.stats(), table.used()
    one, many = (list(zip(*part, strict=True)) for part in zip(*answers, strict=True))  # by rounds
    assert [sum(allowed) for allowed in one] == [HOT.limit] * len(one)
    for allowed in many:
        total: Counter[int] = sum(allowed, Counter())
        assert len(total) == KEYS
        assert set(total.values()) == {MANY.limit}
    assert stats["allowed"] == HOT.limit * len(one) + MANY.limit * KEYS * len(many)
    assert stats["full"] == stats["shared"] == 0
    assert used == len(one) + KEYS * len(many)
    assert max(len(one), len(many)) < ROUNDS, "no swap was lost: nothing was shown"
    assert stats["contended"] >= (2 if workers > 1 else 0)


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
        answers = run(hit_several, table, method, WORKERS)
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
