"""Workers that are killed or stopped at random moments, on a table that is too small for its keys: never more than the
policy allows, and never less by more than what a kill interrupted.

100 kills; `SHMLIMIT_KILLS=1000` for more of them.

A worker reads the table's time itself and passes it on, for what it was allowed to be checked as `written.py` says.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from shmlimit import FixedWindow, Policy, SharedTable, SlidingCounter, TokenBucket
from shmlimit.policies.base import Decision
from shmlimit.table import native
from tests.stress.workers import YEAR, Log
from tests.written import too_many, what_was_written

KILLS = int(os.environ.get("SHMLIMIT_KILLS", "100"))
WORKERS = 4
SLOTS = 24
KEYS = [f"key {number}" for number in range(8)]
LIMIT = 20
# Of each key a state of each, which expires within a millisecond or two: 24 states in 21 slots, and those that pass.
SHORT: list[Policy] = [TokenBucket(10, 0.001, burst=2), FixedWindow(LIMIT, 0.001), SlidingCounter(LIMIT, 0.001)]
PASSING = TokenBucket(1, 0.005)  # takes up room, and where it is reset leaves an empty slot
LASTING: list[Policy] = [FixedWindow(10**9, YEAR), SlidingCounter(16_383, YEAR), TokenBucket(10**5, 9 * YEAR)]
ROOM = 500_000  # allowed hits that a worker may note


class Worker(NamedTuple):
    """A process and what it notes: (policy and key, what was written)."""

    process: multiprocessing.process.BaseProcess
    log: Log


@pytest.fixture(autouse=True)
def _nobody_works_on() -> Iterator[None]:
    """Also after a test that failed."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


def note(log: Log, policy: int, key: int, now_us: int, decision: Decision) -> None:
    log.append(policy << 8 | key, what_was_written(now_us, decision))


def work(table: SharedTable, log: Log, seed: int) -> None:
    """Takes, joint takes, charges that are given back, and resets, on and on."""
    chance = random.Random(seed)
    helper, place = native.helper(), table._opened()[1]
    while len(log) < ROOM - len(LASTING):
        key = chance.randrange(len(KEYS))
        first, second = chance.sample(range(len(SHORT)), 2)
        what = chance.random()
        now_us = helper.now_us(place)
        if what < 0.4:
            decision = table.take(SHORT[first], KEYS[key], now_us=now_us)
            if decision.allowed:
                note(log, first, key, now_us, decision)
        elif what < 0.5:
            requests = [(SHORT[number], KEYS[key], 1) for number in (first, second)]
            decisions = table.take_all(requests, now_us=now_us)
            if all(decisions):
                note(log, first, key, now_us, decisions[0])
                note(log, second, key, now_us, decisions[1])
        elif what < 0.65:
            charges = table.charge_all([(SHORT[first], KEYS[key].encode(), 1)], now_us)
            if charges.stands:
                charges.give_back()
        elif what < 0.75:
            table.take(PASSING, KEYS[key])
            if what < 0.7:
                table.reset(PASSING, KEYS[key])
        else:
            for number in range(len(LASTING)):
                if table.take(LASTING[number], "lasting").allowed:
                    log.append(len(SHORT) + number << 8, 0)


def begin(table: SharedTable, seed: int) -> Worker:
    log = Log(ROOM)
    process = multiprocessing.get_context("fork").Process(target=work, args=(table, log, seed))
    process.start()
    return Worker(process, log)


def wait_for(workers: list[Worker], more: int) -> None:
    """Until each of them has noted that much more: they are at work, and nobody holds them up."""
    wanted = [len(worker.log) + more for worker in workers]
    deadline = time.monotonic() + 60
    while any(len(worker.log) < number for worker, number in zip(workers, wanted, strict=True)):
        assert all(worker.process.is_alive() for worker in workers)
        assert time.monotonic() < deadline, "a worker doesn't get on"
        time.sleep(0.001)


def end(worker: Worker) -> None:
    os.kill(worker.process.pid or 0, signal.SIGKILL)
    worker.process.join()
    assert worker.process.exitcode == -signal.SIGKILL


def check(table: SharedTable, logs: list[Log], kills: int) -> None:
    """What all of them noted is what the policies allow."""
    hits = [((what >> 8, what & 255), value) for log in logs for what, value in log.pairs()]
    lasting = Counter(key for key, _ in hits if key[0] >= len(SHORT))
    short = [hit for hit in hits if hit[0][0] < len(SHORT)]
    assert {key for key, _ in short} == {(policy, key) for policy in range(len(SHORT)) for key in range(len(KEYS))}
    assert not too_many(SHORT, short)
    for number, policy in enumerate(LASTING):
        noted = 1 + lasting[len(SHORT) + number, 0]
        spent = policy.quota - table.peek(policy, "lasting").remaining
        # A kill may come between a hit and its note.
        assert noted <= spent <= noted + kills, policy
        if policy.quota < 10**9:
            rest = sum(table.take(policy, "lasting").allowed for _ in range(policy.quota - spent + 100))
            assert spent + rest == policy.quota


def check_that_they_met(table: SharedTable) -> None:
    """Keys were forgotten and found no room, and swaps were lost: something was shown."""
    stats = table.stats()
    assert stats["reclaimed"] > 1_000
    assert stats["full"] + stats["shared"] > 0
    assert stats["contended"] > 0


def small_table(name: str) -> SharedTable:
    """A table in which the lasting keys have their slots."""
    table = SharedTable.create(name, SLOTS)
    for policy in LASTING:
        assert table.take(policy, "lasting").allowed
    return table


def test_killed_at_any_moment(name: str) -> None:
    """One of four workers after the other is killed amid claims, hits, givings-back and keys that are forgotten."""
    chance = random.Random(KILLS)
    with small_table(name) as table:
        workers = [begin(table, seed) for seed in range(WORKERS)]
        logs = [worker.log for worker in workers]
        wait_for(workers, 10)
        for kill in range(KILLS):
            time.sleep(chance.uniform(0, 0.01))
            victim = workers.pop(chance.randrange(WORKERS))
            end(victim)
            wait_for(workers, 10)
            workers.append(begin(table, WORKERS + kill))
            logs.append(workers[-1].log)
            wait_for(workers[-1:], 10)
        for worker in workers:
            end(worker)
        check(table, logs, KILLS + WORKERS)
        check_that_they_met(table)


def test_stopped_at_any_moment(name: str) -> None:
    """A worker is stopped for two seconds, and for moments, while others go on: what it does when it wakes, with an old
    time in its hands, is never one too much; and nobody waits for it meanwhile.
    """
    chance = random.Random(7)
    with small_table(name) as table:
        workers = [begin(table, seed) for seed in range(WORKERS)]
        wait_for(workers, 10)
        for stop in range(40):
            time.sleep(chance.uniform(0, 0.01))
            pid = workers[0].process.pid or 0
            os.kill(pid, signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
            noted, began = len(workers[0].log), time.monotonic()
            wait_for(workers[1:], 100)  # many times as long as a state lasts
            while stop == 0 and time.monotonic() < began + 2:
                wait_for(workers[1:], 100)
            assert len(workers[0].log) == noted
            os.kill(pid, signal.SIGCONT)
            wait_for(workers[:1], 10)
        for worker in workers:
            end(worker)
        check(table, [worker.log for worker in workers], WORKERS)
        check_that_they_met(table)


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_check_would_find_one_too_many(name: str, spoilt: int) -> None:
    """The check itself: a hit that no policy allows, added to a sound log, is found."""
    with small_table(name) as table:
        worker = begin(table, 1)
        other = begin(table, 2)
        wait_for([worker, other], 8_000)
        end(worker)
        end(other)
        check(table, [worker.log, other.log], 2)
        what, value = next(pair for pair in worker.log.pairs() if pair[0] >> 8 == spoilt)
        for _ in range(1 if spoilt == 0 else LIMIT):
            other.log.append(what, value)
        with pytest.raises(AssertionError, match="too_many"):
            check(table, [worker.log, other.log], 2)
