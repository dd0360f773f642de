"""Where a key finds no room: spare slots, in which it is counted as exactly, and `full`."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shmlimit import Decision, FixedWindow, Gcra, Policy, SharedTable, SlidingCounter, TokenBucket
from shmlimit.errors import LayoutError
from shmlimit.table import layout

T0 = 1_767_225_600_000_000  # 2026-01-01
DAY = TokenBucket(1, 86_400)


def occupy(table: SharedTable, *, until_us: int = T0 + 86_400 * 10**6) -> None:
    """Fills all slots of keys with live states of nobody, that expire at `until_us`."""
    table.slots["fingerprint"] = range(1, len(table.slots) + 1)
    table.slots["state"] = 1 << 63 | until_us << 11


def spare_slots(table: SharedTable) -> Any:
    """A view of them."""
    import numpy as np

    at = layout.HEADER_BYTES + table.slots.nbytes
    return np.frombuffer(table._opened()[0].mapping, layout.slot_dtype(), layout.spare_slots(len(table.slots)), at)


def spare_words(table: SharedTable) -> int:
    """How many spare slots have a state."""
    return int((spare_slots(table)["state"] != 0).sum())


@pytest.mark.parametrize("policy", [TokenBucket(3, 60), Gcra(3, 60), FixedWindow(3, 60), SlidingCounter(3, 60)])
def test_keys_without_room_are_served_exactly(name: str, policy: Policy) -> None:
    """Keys that find no slot are each decided as the pure policy does, and peeks say so before."""
    with SharedTable.create(name, 24) as table:
        occupy(table)
        for key in range(300):
            state: object = None
            for step in (0, 0, 5, 10, 20, 30, 61, 62, 90, 130):
                now_us = T0 + step * 10**6
                wanted, state = policy.decide(state, now_us)
                assert table.peek(policy, f"key {key}", 1, now_us=now_us).allowed == wanted.allowed
                assert table.take(policy, f"key {key}", now_us=now_us) == wanted
        assert table.stats()["shared"] == 3000
        assert table.stats()["allowed"] + table.stats()["denied"] == 3000
        assert spare_words(table) == 300
        assert table.reset(policy, "key 0") is False


def test_without_a_spare_slot_it_is_full(name: str) -> None:
    """Where there isn't even a spare slot the key is denied until a slot may be free, and counted as `full`."""
    with SharedTable.create(name, 24) as table:
        occupy(table, until_us=T0 + 3600 * 10**6)
        allowed = [i for i in range(2000) if table.take(DAY, f"key {i}", now_us=T0)]
        assert len(allowed) == spare_words(table) == layout.spare_slots(24)
        assert table.stats()["full"] == 2000 - len(allowed)
        key, hour_us = next(f"key {i}" for i in range(2000) if i not in allowed), 3600 * 10**6
        before = table.stats()
        free, never, full = (table.take(DAY, key, cost, now_us=T0) for cost in (0, 2, 1))
        assert free == Decision(True, 1, 0, hour_us, 0, hour_us)
        assert never == Decision(False, 1, 0, hour_us, None, hour_us)
        assert full == Decision(False, 1, 0, hour_us, hour_us, hour_us)
        assert {name: n - before[name] for name, n in table.stats().items() if n != before[name]} == {
            "allowed": 1,
            "denied": 1,
            "full": 1,
        }


def test_reset_waits_for_the_spare_slot(name: str) -> None:
    """While a key's state in a spare slot lives it can't be reset, also where it has moved to a slot since: `False`."""
    wide = TokenBucket(5, 86_400)
    with SharedTable.create(name, 24) as table:
        occupy(table, until_us=2 * T0)  # by the table's own clock, since `reset` has no other
        assert table.take(wide, "k", 2).remaining == 3
        assert table.reset(wide, "k") is False
        table.slots[:] = 0
        assert table.take(wide, "k").remaining == 2
        assert table.reset(wide, "k") is False
        assert table.peek(wide, "k").remaining == 2
        assert table.take(wide, "other").allowed
        assert table.reset(wide, "other") is True


def test_reset_after_the_spare_slot_has_expired(name: str) -> None:
    """What has expired there is no hindrance, and there is nothing to begin with."""
    short = TokenBucket(1, 0.001)
    with SharedTable.create(name, 24) as table:
        occupy(table)
        assert table.take(short, "k", now_us=T0).allowed
        table.slots[:] = 0
        memoryview(table._opened()[0].mapping)[128:136] = (2 * T0).to_bytes(8, "little")  # others are in use
        assert table.reset(short, "k") is False
        assert table.take(short, "k").allowed


def test_spoilt_spare_slot_is_an_error(name: str) -> None:
    """A state of another kind where the key's spare one was: nobody is let in on it."""
    with SharedTable.create(name, 24) as table:
        occupy(table, until_us=2 * T0)
        assert table.take(DAY, "k").allowed
        table.slots[:] = 0
        states = spare_slots(table)["state"]
        states[states != 0] = 0b010 << 61 | 1 << 40
        for call in (table.take, table.peek, table.reset):
            with pytest.raises(LayoutError, match="corrupt"):
                call(DAY, "k")


@pytest.mark.parametrize("policy", [TokenBucket(3, 60), FixedWindow(3, 60), SlidingCounter(3, 60)])
def test_slot_starts_from_the_state_of_the_spare_one(name: str, policy: Policy) -> None:
    """A key that finds a slot again has in it what it took before."""
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


def test_spent_spare_slot_denies_before_the_key_reserves(name: str) -> None:
    """A key that is spent in a spare slot is denied without a write, also where slots are free again."""
    with SharedTable.create(name, 24) as table:
        occupy(table)
        assert table.take(DAY, "k", now_us=T0).allowed
        table.slots[:] = 0
        before = bytes(table._opened()[0].mapping[64:512]), table.slots.copy()
        assert not table.take(DAY, "k", now_us=T0).allowed
        assert bytes(table._opened()[0].mapping[64:512]) == before[0]
        assert (table.slots == before[1]).all()
        assert table.take(DAY, "k", now_us=T0 + 86_400 * 10**6).allowed


def test_denial_in_a_spare_slot_writes_nothing(name: str) -> None:
    """A flood of refused keys without a slot writes no slot, no spare one and no shared word of the header."""
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


def test_joint_requests_give_back_in_spare_slots(name: str) -> None:
    """What is charged in a spare slot and can't stand is given back there."""
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


def test_forgotten_key_takes_a_spare_slot_as_of_its_expiry(name: str) -> None:
    """A late worker can't have a fresh quota as of a time at which the key was spent before it was forgotten."""
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


def test_first_key_without_room_is_told_in_the_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
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
