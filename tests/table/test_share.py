"""Sharing where there is no room: 256 groups a policy, denied earlier and never allowed more."""

from __future__ import annotations

import logging

import pytest

from shmlimit import Decision, FixedWindow, Gcra, Policy, SharedTable, SlidingCounter, TokenBucket
from shmlimit.table import layout

T0 = 1_767_225_600_000_000  # 2026-01-01
DAY = TokenBucket(1, 86_400)
DAY_PLUS = [TokenBucket(1, 86_400 + i) for i in range(8)]
GROUPS = 256


def occupy(table: SharedTable, *, until_us: int = T0 + 86_400 * 10**6) -> None:
    """Fills all slots of keys with live states of nobody, that expire at `until_us`."""
    table.slots["fingerprint"] = range(1, len(table.slots) + 1)
    table.slots["state"] = 1 << 63 | until_us << 11


def group_words(table: SharedTable) -> int:
    """How many groups have a state."""
    import numpy as np

    at = layout.HEADER_BYTES + table.slots.nbytes
    groups = np.frombuffer(table._opened()[0].mapping, layout.slot_dtype(), layout.group_slots(len(table.slots)), at)
    return int((groups["state"] != 0).sum())


@pytest.mark.parametrize("policy", [TokenBucket(3, 60), Gcra(3, 60), FixedWindow(3, 60), SlidingCounter(3, 60)])
def test_key_without_room_gets_the_limit_of_its_group(name: str, policy: Policy) -> None:
    """A key that finds no slot is counted by its group, which is a state of the policy like any other."""
    with SharedTable.create(name, 24) as table:
        occupy(table)
        state: object = None
        for step in (0, 0, 5, 10, 20, 30, 61, 62, 90, 130):
            now_us = T0 + step * 10**6
            wanted, state = policy.decide(state, now_us)
            assert table.peek(policy, "k", 1, now_us=now_us).allowed == wanted.allowed
            assert table.take(policy, "k", now_us=now_us) == wanted
        assert table.stats()["shared"] == 10
        assert table.stats()["allowed"] + table.stats()["denied"] == 10
        assert group_words(table) == 1
        assert table.reset(policy, "k") is False


def test_groups_are_256_for_each_policy(name: str) -> None:
    """Thousands of keys without room get the limits of 256 groups together, and each policy has groups of its own."""
    with SharedTable.create(name, 24) as table:
        occupy(table)
        for policy in (DAY, FixedWindow(2, 86_400)):
            allowed = sum(table.take(policy, f"key {i}", now_us=T0).allowed for i in range(8000))
            assert allowed == GROUPS * policy.quota
        assert table.stats()["full"] == 0
        assert group_words(table) == 2 * GROUPS


def test_a_group_without_room_is_full(name: str) -> None:
    """Where not even the group finds a slot the key is denied until one of its own may be free: that is `full`."""
    with SharedTable.create(name, 24) as table:
        occupy(table, until_us=T0 + 3600 * 10**6)
        for i in range(1000):
            for policy in DAY_PLUS:
                table.take(policy, f"key {i}", now_us=T0)
        stats = table.stats()
        assert stats["full"] > 0
        assert stats["allowed"] <= layout.group_slots(24)
        # The groups that came last found no room.
        hour_us = 3600 * 10**6
        key = next(f"key {i}" for i in range(1000) if table.peek(DAY_PLUS[0], f"key {i}", 1, now_us=T0)[4] == hour_us)
        before = table.stats()
        free, never, full = (table.take(DAY_PLUS[0], key, cost, now_us=T0) for cost in (0, 2, 1))
        assert free == Decision(True, 1, 0, hour_us, 0, hour_us)
        assert never == Decision(False, 1, 0, hour_us, None, hour_us)
        assert full == Decision(False, 1, 0, hour_us, hour_us, hour_us)
        assert {name: n - before[name] for name, n in table.stats().items() if n != before[name]} == {
            "allowed": 1,
            "denied": 1,
            "full": 1,
        }


@pytest.mark.parametrize("policy", [TokenBucket(3, 60), FixedWindow(3, 60), SlidingCounter(3, 60)])
def test_slot_starts_from_the_state_of_the_group(name: str, policy: Policy) -> None:
    """A key that shared and then finds a slot has in it what it took before, and the group keeps what others took."""
    with SharedTable.create(name, 24) as table:
        occupy(table)
        assert table.take(policy, "k", now_us=T0).remaining == 2
        table.slots[:] = 0
        assert table.peek(policy, "k", now_us=T0).remaining == 2
        assert table.take(policy, "k", now_us=T0).remaining == 1
        assert (table.slots["fingerprint"] != 0).sum() == 1
        assert table.stats()["shared"] == 2
        assert table.take(policy, "k", now_us=T0).remaining == 0
        assert table.stats()["shared"] == 2
        occupy(table)
        assert table.take(policy, "k", now_us=T0).remaining == 1


def test_spent_group_denies_a_new_key_before_it_reserves(name: str) -> None:
    """While a group is spent its keys are denied without a write, also where slots are free again."""
    with SharedTable.create(name, 24) as table:
        occupy(table)
        assert table.take(DAY, "k", now_us=T0).allowed
        table.slots[:] = 0
        before = bytes(table._opened()[0].mapping[64:512]), table.slots.copy()
        assert not table.take(DAY, "k", now_us=T0).allowed
        assert bytes(table._opened()[0].mapping[64:512]) == before[0]
        assert (table.slots == before[1]).all()
        assert table.take(DAY, "k", now_us=T0 + 86_400 * 10**6).allowed


def test_denial_over_a_group_writes_nothing(name: str) -> None:
    """A flood of refused keys without a slot writes no slot, no group and no shared word of the header."""
    with SharedTable.create(name, 24) as table:
        occupy(table)
        for i in range(4000):
            table.take(DAY, f"key {i}", now_us=T0)
        mapping = table._opened()[0].mapping
        header, slots = bytes(mapping[: layout.LANES_AT]), bytes(mapping[layout.HEADER_BYTES :])
        for i in range(4000):
            assert not table.take(DAY, f"key {i}", now_us=T0).allowed
        assert bytes(mapping[: layout.LANES_AT]) == header
        assert bytes(mapping[layout.HEADER_BYTES :]) == slots


def test_joint_requests_give_a_group_back(name: str) -> None:
    """What is charged to a group and can't stand is given back to the group."""
    with SharedTable.create(name, 24) as table:
        charges = None
        occupy(table)
        wide = TokenBucket(5, 86_400)
        charges = table.charge_all([(wide, b"k", 2), (DAY, b"k", 1)], T0)
        assert charges.stands
        assert table.peek(wide, "k", now_us=T0).remaining == 3
        charges.give_back()
        assert table.peek(wide, "k", now_us=T0).remaining == 5
        assert table.peek(DAY, "k", now_us=T0).remaining == 1
        assert all(table.take_all([(wide, "k", 2), (DAY, "k", 1)], now_us=T0))
        assert not all(table.take_all([(wide, "k", 2), (DAY, "k", 1)], now_us=T0))
        assert table.peek(wide, "k", now_us=T0).remaining == 3
        stats = table.stats()
        assert (stats["allowed"], stats["denied"], stats["shared"], stats["full"]) == (2, 1, 3, 0)


def test_forgotten_key_shares_as_of_its_expiry(name: str) -> None:
    """A late worker can't have a group's quota as of a time at which the key was spent before it was forgotten."""
    once = TokenBucket(1, 60)
    with SharedTable.create(name, 24) as table:
        assert table.take(once, "k", now_us=T0).allowed
        later = T0 + 60 * 10**6
        for i in range(24 * 20):
            table.take(DAY, f"filler {i}", now_us=later)
        late = table.take(once, "k", now_us=T0 + 59 * 10**6)
        assert late.allowed
        assert late.reset_us == 61 * 10**6
        assert table.stats()["shared"] > 0


def test_first_shared_decision_is_told_in_the_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once a process: which table, and how many slots it should have."""
    with SharedTable.create(name, 24) as table, caplog.at_level(logging.WARNING, "shmlimit"):
        table.take(DAY, "before", now_us=T0)
        assert caplog.records == []
        occupy(table)
        for i in range(100):
            table.take(DAY, f"key {i}", now_us=T0)
        (record,) = caplog.records
        assert f"the table {name!r} is too small" in record.getMessage()
        assert "Give the table 48 slots" in record.getMessage()
