"""MemoryStore: its clock, and what it forgets."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from shmlimit import ConfigError, FixedWindow, SlidingLog, TokenBucket, parse
from shmlimit.stores.memory import MemoryStore, steady_clock
from shmlimit.testing import FakeClock

T0 = 1_767_225_600_000_000
S = 1_000_000
SECOND = TokenBucket(1, 1)


def test_setting_the_wall_clock_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's clock starts at the time of day and doesn't step with it afterwards."""
    store = MemoryStore()
    assert abs(steady_clock()() - time.time_ns() // 1000) < S
    hour = TokenBucket(2, 3600)
    store.take(hour, "k", 2)
    read = time.clock_gettime_ns
    for step_ns in (-86_400 * 10**9, 86_400 * 10**9):
        stepped = {time.CLOCK_REALTIME: step_ns}
        monkeypatch.setattr(time, "time_ns", lambda step_ns=step_ns: read(time.CLOCK_REALTIME) + step_ns)
        monkeypatch.setattr(
            time, "clock_gettime_ns", lambda source, stepped=stepped: read(source) + stepped.get(source, 0)
        )
        assert 1790 * S < store.take(hour, "k").retry_after_us <= 1800 * S


def test_a_given_clock_is_read() -> None:
    """`clock` stands in for the store's own, and a wait by it is exact."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    assert store.take(SECOND, "k").allowed
    clock.now_us += S - 1
    assert store.take(SECOND, "k").retry_after_us == 1
    clock.now_us += 1
    assert store.take(SECOND, "k").allowed


def test_expired_entries_are_gone_with_one_hit() -> None:
    """Memory grew with keys long gone (limits#332, PyrateLimiter#136); here one hit clears 100,000 of them."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    for i in range(100_000):
        store.take(SECOND, f"key {i}")
    full = sys.getsizeof(store._entries)
    clock.now_us += 10 * S
    store.take(SECOND, "last")
    assert len(store) == 1
    assert len(store._dues) == 1
    assert sys.getsizeof(store._entries) * 1000 < full


def test_live_entries_stay() -> None:
    """Only what has expired goes: an entry that was hit again meanwhile is kept, and so is its count."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    ten = TokenBucket(10, 10)
    store.take(ten, "hit again")
    store.take(ten, "not")
    clock.now_us += S // 2
    store.take(ten, "hit again", 5)
    clock.now_us += S // 2
    store.take(SECOND, "other")
    assert len(store) == 2
    assert store.peek(ten, "hit again").remaining == 5


def test_denials_and_reports_forget_nothing() -> None:
    """What only reads leaves expired entries where they are: they are no less right."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    store.take(SECOND, "k")
    clock.now_us += 10 * S
    store.take(SECOND, "k", 2)
    store.take(SECOND, "k", 0)
    store.take_all([(SECOND, "k", 0), (SECOND, "l", 0)])
    store.peek(SECOND, "k")
    assert len(store) == 1


def test_resets_leave_no_places_behind() -> None:
    """Keys that are charged and reset over and over take bounded memory."""
    store = MemoryStore(clock=FakeClock())
    day = TokenBucket(1, 86_400)
    for key in ["k", "l"] * 5_000:
        store.reset(day, key)
        assert store.take(day, key).allowed
    assert len(store) == 2
    assert len(store._dues) <= 1_004
    assert not store.take(day, "k").allowed


def test_place_of_a_reset_entry_does_not_take_the_next_one_along() -> None:
    """A key that comes back after a reset lives by its new state."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    log = SlidingLog(2, 10)
    store.take(log, "k")
    store.reset(log, "k")
    clock.now_us += 5 * S
    store.take(log, "k", 2)
    clock.now_us += 5 * S
    store.take(SECOND, "other")
    assert len(store._dues) == len(store) == 2
    assert not store.take(log, "k").allowed


def test_sweep_under_threads() -> None:
    """The sweep dropped live entries, or raised while keys were added (limits#277, #267); here neither, while threads
    add keys that expire at once.
    """
    store = MemoryStore()
    brief, limit = TokenBucket(1, 0.001), FixedWindow(200, 10**6)
    failures: list[BaseException] = []
    allowed: list[bool] = []

    def hit(number: int) -> None:
        try:
            for i in range(300):
                store.take(brief, f"{number} {i}")
                allowed.append(store.take(limit, "k").allowed)
        except BaseException as error:  # noqa: BLE001 - the test fails with it
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=hit, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures
    assert sum(allowed) == 200
    assert len(store) < 2_400


def test_what_is_no_policy_is_refused() -> None:
    """Notation is the guard's business: a store says what it takes."""
    store = MemoryStore()
    assert not store.supports("10/minute")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="parse"):
        store.take("10/minute", "k")  # type: ignore[arg-type]


def test_empty_store_is_a_store() -> None:
    """`store or default` doesn't replace a store that has no entries yet."""
    with MemoryStore() as store:
        assert store
        assert len(store) == 0
        store.take(parse("sliding-log 5/minute"), "k")
        assert len(store) == 1
