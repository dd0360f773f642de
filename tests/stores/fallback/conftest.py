"""Stores that fail when they are told to, and a look at the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shmlimit import TokenBucket
from shmlimit.stores.base import BaseStore
from shmlimit.stores.fallback import FallbackStore
from shmlimit.stores.memory import MemoryStore
from tests.stores.trouble import Clock

T0 = 1_767_225_600_000_000  # 2026-01-01
TEN = TokenBucket(10, 60)
MANY = TokenBucket(10**6, 366 * 86_400)
OTHER = TokenBucket(20, 60)


class Double(BaseStore):
    """A store that raises what it is told to, and counts how often it is asked."""

    blocks = False

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.error: Exception | None = None
        self.asked = 0
        self.in_between: Callable[[], None] | None = None
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        if name not in {"take", "take_all", "peek", "reset"}:
            raise AttributeError(name)

        def ask(*arguments: Any, **named: Any) -> Any:
            self.asked += 1
            error, act, self.in_between = self.error, self.in_between, None
            if act is not None:
                act()
            if error is not None:
                raise error
            return getattr(self.store, name)(*arguments, **named)

        return ask

    def supports(self, policy: Any) -> bool:
        return self.store.supports(policy)

    def close(self) -> None:
        self.closed = True


class Fast(Double):
    fails_fast = True


class Bare:
    """A store of somebody else's: no coroutines, no base class."""

    def __init__(self) -> None:
        store = MemoryStore()
        self.take, self.take_all, self.peek, self.reset = store.take, store.take_all, store.peek, store.reset
        self.supports, self.close = store.supports, store.close


@pytest.fixture
def first() -> Fast:
    return Fast()


@pytest.fixture
def second() -> Double:
    return Double()


@pytest.fixture
def store(first: Fast, second: Double) -> FallbackStore:
    return FallbackStore(first, second)


@pytest.fixture
def slow(second: Double) -> tuple[FallbackStore, Double, Clock]:
    """Over a first store that doesn't fail fast, with a breaker in the test's hands."""
    first, clock = Double(), Clock()
    store = FallbackStore(first, second)
    store._breaker._clock, store._breaker._chance = clock, lambda: 0.5
    return store, first, clock


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "shmlimit"]
