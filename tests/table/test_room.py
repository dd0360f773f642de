"""A table that is full or forgets: no room, the watermark, reservations of the dead."""

from __future__ import annotations

import time
from typing import Any

from shmlimit import SharedTable, TokenBucket
from shmlimit.table import layout

MINUTE = TokenBucket(10, 60)
T0 = 1_767_225_600_000_000  # 2026-01-01


def test_live_states_are_never_evicted(name: str) -> None:
    """In a full table nobody loses a slot, however many new keys come."""
    policy = TokenBucket(2, 7200)
    with SharedTable.create(name, 64) as table:
        for i in range(3000):
            table.take(policy, f"key {i}", now_us=T0)
        before = table.slots.copy()
        assert (before["state"] != 0).all()
        for i in range(3000):
            table.take(policy, f"another {i}", now_us=T0)
        assert (table.slots == before).all()
        assert table.stats()["reclaimed"] == 0


def test_flood_never_refreshes_a_spent_key(name: str) -> None:
    """However many made-up keys come, a spent key is denied until its time."""
    spent = TokenBucket(1, 3600)
    with SharedTable.create(name, 256) as table:
        assert table.take(spent, "victim", now_us=T0).allowed
        for i in range(5000):
            table.take(TokenBucket(10, 60), f"flood {i}", now_us=T0 + i * 700_000)
            assert not table.take(spent, "victim", now_us=T0 + i * 700_000).allowed
        assert table.stats()["reclaimed"] > 100
        assert table.take(spent, "victim", now_us=T0 + 3600 * 10**6).allowed


def test_watermark_keeps_a_late_worker_from_granting_twice(name: str) -> None:
    """A worker that comes back with an old clock reading can't judge a forgotten key as of then."""
    once = TokenBucket(1, 60)
    with SharedTable.create(name, 24) as table:
        assert table.take(once, "key", now_us=T0).allowed
        later = T0 + 61 * 10**6
        for i in range(24):
            table.take(once, f"other {i}", now_us=later)
        assert table.take(once, "key", now_us=later + 60 * 10**6).allowed
        # All the slots were given away, so the key's first hit is forgotten; as of T0 + 1 s it was spent.
        assert int(layout_header(table)["watermark_us"]) >= T0 + 60 * 10**6
        late = table.take(once, "another", now_us=T0 + 10**6)
        assert late.reset_us >= 60 * 10**6


def layout_header(table: SharedTable) -> Any:
    """The header, read through the dtype."""
    import numpy as np

    return np.frombuffer(table._opened()[0].mapping, layout.header_dtype(), 1)[0]


def test_forgotten_key_is_judged_as_of_its_expiry(name: str) -> None:
    """After a key's state was reclaimed, an earlier time gives it no second quota."""
    once, other = TokenBucket(1, 60), TokenBucket(1, 0.001)
    with SharedTable.create(name, 24) as table:
        assert table.take(once, "key", now_us=T0).allowed
        slots = table.slots
        mine = int(slots["fingerprint"].max())
        i = 0
        while mine in slots["fingerprint"]:
            table.take(other, f"filler {i}", now_us=T0 + 60 * 10**6)
            i += 1
        slots[:] = 0
        # The key was forgotten as of T0 + 60 s. Asked as of T0 + 59 s, it is judged as of T0 + 60 s, where it is fresh.
        decision = table.take(once, "key", now_us=T0 + 59 * 10**6)
        assert decision.allowed
        assert decision.reset_us == 61 * 10**6
        assert not table.take(once, "key", now_us=T0 + 119 * 10**6 + 999_999).allowed
        assert table.take(once, "key", now_us=T0 + 120 * 10**6).allowed


def test_reservation_of_a_dead_worker_is_completed_or_given_away(table: SharedTable) -> None:
    """A reservation is a fresh state to its own key, and free for others after a second."""
    table.take(MINUTE, "k", 10)
    slots = table.slots
    at = slots["fingerprint"].nonzero()[0][0]
    slots["state"][at] = reservation_ms(1)  # made in 1970: its maker is gone
    assert table.used() == 0
    assert table.peek(MINUTE, "k").remaining == 10
    assert table.take(MINUTE, "k").remaining == 9
    assert (slots["fingerprint"] != 0).sum() == 1


def reservation_ms(ms: int, nonce: int = 5) -> int:
    """The word of a reservation that was made at `ms` of the table's clock."""
    return ms << 19 | nonce


def test_reservations_of_others_hold_for_a_second(name: str) -> None:
    """A slot that another key has just reserved is in use; one whose maker must be dead is not."""
    with SharedTable.create(name, 24) as table:
        slots = table.slots
        now_ms = time.time_ns() // 10**6
        slots["fingerprint"] = range(1, 25)
        slots["state"] = reservation_ms(now_ms)
        assert table.take(MINUTE, "k").allowed
        assert table.stats()["shared"] == 1
        assert table.used() == 0
        for dead_ms in (now_ms - 1_100, now_ms + 5_000):  # the future: garbage, or the word of another clock
            slots["state"] = reservation_ms(dead_ms)
            assert table.take(MINUTE, f"k{dead_ms}").allowed
        assert table.stats()["reclaimed"] == 0


def test_state_is_live_for_others_until_its_fraction_has_passed(name: str) -> None:
    """Where a bucket is full again between two microseconds, its slot is free from the second on."""
    thirds = TokenBucket(3, 0.001, burst=1)  # an interval of 333 1/3 µs
    with SharedTable.create(name, 24) as table:
        for i in range(24):
            assert table.take(thirds, f"key {i}", now_us=T0).allowed
        before = table.slots.copy()
        table.take(thirds, "new", now_us=T0 + 333)
        assert (table.slots == before).all()
        table.take(thirds, "newer", now_us=T0 + 334)
        assert (table.slots != before).sum() == 1


def test_load_is_spread_over_the_candidates(name: str) -> None:
    """A new key goes to the emptiest of its three buckets: a table takes keys to 75 % of its slots without a miss."""
    with SharedTable.create(name, 8192) as table:
        for i in range(6144):
            table.take(TokenBucket(1, 3600), f"key {i}")
        assert table.stats()["shared"] == 0
        assert table.used() == 6144


def test_spare_reservations_are_cleared(table: SharedTable) -> None:
    """Of several reservations of one key one is kept."""
    table.take(MINUTE, "k")
    slots = table.slots
    at = int(slots["fingerprint"].nonzero()[0][0])
    bucket = at // 8 * 8
    for other in range(bucket, bucket + 8):
        slots[other] = (slots["fingerprint"][at], reservation_ms(1, other))
    assert table.take(MINUTE, "k").remaining == 9
    assert (slots["fingerprint"] != 0).sum() == 1
