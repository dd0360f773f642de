"""Stand-ins for tests: a clock that the test moves, a store that fails when told to, a store that says what it is told.

Needs no test framework.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

from shmlimit.errors import StoreError
from shmlimit.policies.base import US_PER_S, Decision, Policy
from shmlimit.policies.requests import Request
from shmlimit.stores.base import BaseStore, Store


class FakeClock:
    """A clock that stands until it is moved: give it to a store as `clock`.

    `now_us` is its time, in microseconds since 1970 (default: 2026-01-01, 00:00 UTC), and may be set.

    >>> clock = FakeClock(now_us=0)
    >>> clock.advance(1.5)
    >>> clock()
    1500000
    """

    def __init__(self, now_us: int = 1_767_225_600_000_000) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us

    def __repr__(self) -> str:
        return f"FakeClock({self.now_us})"

    def advance(self, seconds: float | Fraction) -> None:
        """On by so many seconds, to the nearest microsecond; back by a negative number."""
        self.now_us += round(seconds * US_PER_S)

    def advance_us(self, microseconds: int) -> None:
        """On by so many microseconds; back by a negative number."""
        self.now_us += microseconds


class FailingStore(BaseStore):
    """A store in front of another one, whose calls are `StoreError`s while `failing` is true.

    `calls` counts by name (`take`, `peek`, `reset`, `take_all`) how often it was asked, also in vain. The store behind
    it isn't asked meanwhile, and so charges nothing. `message` is what the errors say.
    """

    def __init__(self, store: Store, *, failing: bool = False, message: str = "this store was told to fail") -> None:
        self.store = store
        self.failing = failing
        self.message = message
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """See `Store.take`."""
        self._answer_or_fail("take")
        return self.store.take(policy, key, cost, now_us=now_us)

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """See `Store.take_all`."""
        self._answer_or_fail("take_all")
        return self.store.take_all(requests, now_us=now_us)

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """See `Store.peek`."""
        self._answer_or_fail("peek")
        return self.store.peek(policy, key, cost, now_us=now_us)

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """See `Store.reset`."""
        self._answer_or_fail("reset")
        return self.store.reset(policy, key)

    def supports(self, policy: Policy) -> bool:
        """Whether the store behind it can run `policy`, also while it fails."""
        return self.store.supports(policy)

    def close(self) -> None:
        """Close the store behind it."""
        self.store.close()

    def _answer_or_fail(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1
        if self.failing:
            raise StoreError(self.message)


class ToldStore(BaseStore):
    """A store that decides nothing: it gives the answers that it was made with, and remembers what it was asked.

    Each request of a `take` or `take_all` uses one of `answers` up, but for the last, which is given for ever. An
    exception among them is raised. `peek` gives the next one and leaves it; `reset` says `True`. `asked` has what was
    to be charged: `("take", [(policy, key, cost)])`, or `take_all` and its requests. `supports` says `supported`.
    """

    blocks = False

    def __init__(self, *answers: Decision | Exception, supported: bool = True) -> None:
        if not answers:
            raise ValueError("ToldStore(*answers) needs one answer at least")
        self.answers = list(answers)
        self.supported = supported
        self.asked: list[tuple[str, list[Request]]] = []

    @property
    def keys(self) -> list[str | bytes]:
        """The keys that were to be charged, as they came."""
        return [key for _, requests in self.asked for _, key, _ in requests]

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:  # noqa: ARG002
        """The next answer."""
        self.asked.append(("take", [(policy, key, cost)]))
        return self._next()

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:  # noqa: ARG002
        """The next answers, one for each."""
        requests = list(requests)
        self.asked.append(("take_all", requests))
        return [self._next() for _ in requests]

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:  # noqa: ARG002
        """The answer that comes next."""
        return _given(self.answers[0])

    def reset(self, policy: Policy, key: str | bytes) -> bool:  # noqa: ARG002
        """True."""
        return True

    def supports(self, policy: Policy) -> bool:  # noqa: ARG002
        """What it was told."""
        return self.supported

    def close(self) -> None:
        """Nothing to do."""

    def _next(self) -> Decision:
        return _given(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


def _given(answer: Decision | Exception) -> Decision:
    if isinstance(answer, Exception):
        raise answer
    return answer
