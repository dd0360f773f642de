"""The stand-ins that users' tests take."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from fractions import Fraction

import pytest

from shmlimit import Decision, StoreError, TokenBucket
from shmlimit.stores.memory import MemoryStore
from shmlimit.testing import FailingStore, FakeClock, ToldStore

MINUTE = TokenBucket(1, 60)
OK = Decision(True, 10, 9, 6_000_000, 0, 6_000_000)
NO = Decision(False, 10, 0, 60_000_000, 5_500_001, 5_500_001)


def test_clock_stands_until_it_is_moved() -> None:
    """It begins at 2026-01-01 UTC, and goes to the microsecond where it is sent, backwards too."""
    clock = FakeClock()
    assert clock() == clock() == 1_767_225_600_000_000
    clock.advance(1.5)
    clock.advance(Fraction(1, 3))
    clock.advance_us(-1)
    assert clock() - 1_767_225_600_000_000 == 1_833_332
    clock.advance(-2)
    assert clock.now_us - 1_767_225_600_000_000 == -166_668
    clock.now_us = 0
    clock.advance(1.001)  # times a million that is 1000999.9999999999
    assert clock() == 1_001_000
    assert repr(FakeClock(7)) == "FakeClock(7)"


def test_clock_drives_a_store() -> None:
    """A minute's wait takes no time."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    assert store.take(MINUTE, "k").allowed
    clock.advance(59.999_999)
    assert store.take(MINUTE, "k").retry_after_us == 1
    clock.advance_us(1)
    assert store.take(MINUTE, "k").allowed


def test_failing_store_fails_when_told_to() -> None:
    """Each call is a StoreError with the message, counted, and charges nothing; then it goes on where it was."""
    store = FailingStore(MemoryStore(clock=FakeClock()), failing=True, message="gone")
    for call in (
        lambda: store.take(MINUTE, "k"),
        lambda: store.peek(MINUTE, "k"),
        lambda: store.reset(MINUTE, "k"),
        lambda: store.take_all([(MINUTE, "k", 1)]),
        lambda: asyncio.run(store.atake(MINUTE, "k")),
    ):
        with pytest.raises(StoreError, match=r"^gone$"):
            call()
    assert store.calls == {"take": 2, "peek": 1, "reset": 1, "take_all": 1}
    assert store.supports(MINUTE)
    store.failing = False
    assert store.take(MINUTE, "k").allowed
    assert not store.take(MINUTE, "k").allowed
    assert store.calls["take"] == 4


def test_failing_store_counts_all_threads() -> None:
    """No call is missed when many come at once."""

    class Slow(Counter[str]):
        def __getitem__(self, name: str) -> int:
            number = super().__getitem__(name)
            time.sleep(0)  # whoever likes may go on now
            return number

    store = FailingStore(MemoryStore(), failing=True)
    store.calls = Slow()

    def ask() -> None:
        for _ in range(500):
            with pytest.raises(StoreError):
                store.take(MINUTE, "k")

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.calls["take"] == 2_000


def test_told_store_says_what_it_was_told() -> None:
    """Answers in turn, the last for ever; exceptions are raised; what was to be charged is remembered."""
    store = ToldStore(OK, StoreError("gone"), NO)
    assert store.peek(MINUTE, "k") == OK
    assert store.take(MINUTE, "a", 2) == OK
    with pytest.raises(StoreError, match="gone"):
        store.take(MINUTE, "b")
    assert store.take_all([(MINUTE, "c", 1), (MINUTE, b"d", 3)]) == [NO, NO]
    assert asyncio.run(store.atake(MINUTE, "e")) == NO
    assert store.asked[0] == ("take", [(MINUTE, "a", 2)])
    assert store.asked[2] == ("take_all", [(MINUTE, "c", 1), (MINUTE, b"d", 3)])
    assert store.keys == ["a", "b", "c", b"d", "e"]
    assert store.reset(MINUTE, "a")
    store.close()


def test_told_store_supports_what_it_was_told() -> None:
    """All policies or none, and it must have something to say."""
    assert ToldStore(OK).supports(MINUTE)
    assert not ToldStore(OK, supported=False).supports(MINUTE)
    with pytest.raises(ValueError, match="one answer at least"):
        ToldStore()
