"""Clocks that step, in a table that forgets: never more, and of what has a slot exactly what the pure policy says."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmlimit import Decision, FixedWindow, Gcra, Policy, SharedTable, SlidingCounter, TokenBucket
from shmlimit.table import layout, native
from shmlimit.table.table import NOW_MAX_US
from tests.written import Key, too_many, what_was_written

T0 = 1_767_225_600_000_000  # 2026-01-01
YEAR = 366 * 86_400
S = 10**6
DENIED = ("full", "shared")
# Whole microseconds for an interval, and lives of 1 ms to a minute.
POLICIES: list[Policy] = [
    TokenBucket(2, 0.001),
    Gcra(3, 60, burst=2),
    FixedWindow(2, 1),
    SlidingCounter(2, 1),
    SlidingCounter(600, 2),
]
KEYS = 12  # of each policy, so 60 states for 24 slots
SPARE = TokenBucket(1, 1)
Step = tuple[int, int, int]
"""How far the clock steps, which policy, which key; of the number after the last policy, an empty slot is made."""


def forget_all(table: SharedTable) -> None:
    """A table as it was made, but for its counters."""
    mapping = table._opened()[0].mapping
    mapping[layout.HEADER_BYTES :] = bytes(len(mapping) - layout.HEADER_BYTES)
    for field in ("watermark_us", "spare_until_us"):
        at = layout.header_dtype().fields[field][1]
        mapping[at : at + 8] = bytes(8)


def header(table: SharedTable) -> Any:
    import numpy as np

    return np.frombuffer(table._opened()[0].mapping, layout.header_dtype(), 1)[0]


def has_slot(table: SharedTable, policy: Policy, key: bytes) -> bool:
    pool, call = table._borrow(policy)
    pool.append(call)
    subkey: ctypes.Array[ctypes.c_uint64] = call[2].keep.key
    return native.helper().siphash(subkey, key, len(key)) in table.slots["fingerprint"]


def as_of(decision: Decision, late_us: int) -> Decision:
    """The decision of a time that lies `late_us` ahead of the one that was asked for: its waits are longer by that."""
    allowed, limit, remaining, reset_us, retry_after_us, next_us = decision
    more = (wait and wait + late_us for wait in (reset_us, retry_after_us, next_us))
    return Decision(allowed, limit, remaining, *more)


def play(table: SharedTable, steps: list[Step], start_us: int) -> Counter[str]:
    """Takes a unit at each step and checks it; what happened."""
    forget_all(table)
    began = table.stats()
    states: dict[Key, Any] = {}
    unknown: set[Key] = set()  # where a state may have begun with that of its spare slot: only too_many can tell
    hits: list[tuple[Key, int]] = []
    happened: Counter[str] = Counter()
    now_us = latest_us = start_us
    for step, number, key_number in steps:
        now_us = min(max(now_us + step, 0), NOW_MAX_US)
        happened["back"] += now_us < latest_us
        latest_us = max(latest_us, now_us)
        if number == len(POLICIES):  # by the table's clock, and so perhaps with a slot that another key has for longer
            table.take(SPARE, "spare")
            table.reset(SPARE, "spare")
            continue
        key, policy, name = (number, key_number), POLICIES[number], b"key %d" % key_number
        kept = has_slot(table, policy, name)
        stats = table.stats()
        decision = table.take(policy, name, now_us=now_us)
        if decision.allowed:
            hits.append((key, what_was_written(now_us, decision)))
        if any(table.stats()[count] > stats[count] for count in DENIED):
            happened["no room"] += 1
            unknown.add(key)
            continue
        if kept:
            happened["kept"] += 1
            if key in unknown:
                continue
            wanted, state = policy.decide(states[key], now_us)
        else:
            happened["came back"] += key in states
            states[key] = None
            unknown.discard(key)
            if table.stats()["shared"] > began["shared"]:
                unknown.add(key)
                continue
            # Also where this very call has forgotten another state, and so raised the watermark.
            raised_us = max(now_us, min(int(header(table)["watermark_us"]), NOW_MAX_US))
            wanted, state = policy.decide(None, raised_us)
            wanted = as_of(wanted, raised_us - now_us)
            happened["raised"] += raised_us > now_us
        assert decision == wanted, (policy, now_us)
        states[key] = state if decision.allowed else states[key]
    assert not too_many(POLICIES, hits)
    return happened


def steps_of(size: st.SearchStrategy[int]) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.tuples(size, st.integers(0, len(POLICIES)), st.integers(0, KEYS - 1)), min_size=1, max_size=80)


sizes = st.one_of(
    st.just(0),
    st.integers(-1_000, 1_000),
    st.integers(-3 * S, 3 * S),
    st.integers(-120 * S, 120 * S),
    st.sampled_from([-YEAR * S, YEAR * S, NOW_MAX_US, -NOW_MAX_US]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(steps=steps_of(sizes), start_us=st.sampled_from([0, T0, NOW_MAX_US]))
def test_steps_of_the_clock_allow_nothing_more(name: str, steps: list[Step], start_us: int) -> None:
    """However the clock steps, by microseconds or years: a key with a slot gets what the pure policy says, one that was
    forgotten what it says as of the watermark, and none gets more than its policy allows.
    """
    with SharedTable.open(name, 24) as table:
        play(table, steps, start_us)


def test_keys_are_forgotten_and_come_back_on_the_way(name: str) -> None:
    """The same over long random histories, in which everything that matters does happen."""
    chance = random.Random(24)
    happened: Counter[str] = Counter()
    with SharedTable.create(name, 24) as table:
        for _ in range(30):
            steps = []
            for _ in range(200):
                size = chance.choice([0, 500, 100_000, 3 * S])
                steps.append(
                    (chance.randint(-size, 2 * size), chance.randint(0, len(POLICIES)), chance.randrange(KEYS))
                )
            happened += play(table, steps, T0)
    assert min(happened[what] for what in ("back", "kept", "no room", "raised", "came back")) > 20, happened


BOUNDS: list[Policy] = [
    TokenBucket(1, 3653 * 86_400),
    TokenBucket(2047, 1.000001),
    TokenBucket(2048, 1.000001),  # d = 2048
    TokenBucket(1, 0.001),
    Gcra(10**9, 10**6, 10**9),
    Gcra(1, 1, 10**8),
    FixedWindow(2**19 - 1, 0.001),
    FixedWindow(2**19 - 1, YEAR),
    FixedWindow(2**19, 4),
    FixedWindow(10**9, YEAR),
    SlidingCounter(511, 0.001),
    SlidingCounter(511, YEAR),
    SlidingCounter(512, 1),
    SlidingCounter(16_383, 1),
    SlidingCounter(16_383, YEAR),
]


@pytest.mark.parametrize("policy", BOUNDS, ids=str)
@pytest.mark.parametrize("now_us", [0, T0, NOW_MAX_US - 4 * S, NOW_MAX_US])
def test_last_unit_at_every_bound(table: SharedTable, policy: Policy, now_us: int) -> None:
    """At the largest counts, denominators and times of each kind of word all fields are the pure policy's: for the
    last unit, for the denial after it, and at the very moment that this one was told, where that is before 2101.
    """
    state = None
    for cost in (policy.quota - 1, 1, 1, 0):
        wanted, after = policy.decide(state, now_us, cost)
        assert table.take(policy, "k", cost, now_us=now_us) == wanted
        state = after if wanted.allowed and cost else state
    denied = table.take(policy, "k", now_us=now_us)
    assert not denied.allowed
    assert denied.retry_after_us is not None
    for at_us in (now_us + denied.retry_after_us - 1, now_us + denied.retry_after_us):
        if at_us <= NOW_MAX_US:
            wanted, _ = policy.decide(state, at_us, 1)
            assert table.peek(policy, "k", 1, now_us=at_us) == wanted
            assert wanted.allowed is (at_us == now_us + denied.retry_after_us)
