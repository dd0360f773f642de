"""MemoryStore: a dict in this process, for tests and for servers that are one process."""

from __future__ import annotations

import heapq
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple, TypeAlias

from shmlimit.errors import StoreError
from shmlimit.policies.base import Decision, Policy, State, check_cost
from shmlimit.policies.requests import Request, decide_all, join, key_bytes
from shmlimit.stores.base import BaseStore, check_now, check_policy, seen_from

_Identity: TypeAlias = tuple[Policy, bytes]
_SPARE_DUES = 1_000


class _Entry(NamedTuple):
    state: State
    expires_us: int
    serial: int  # of its one place in the heap


def steady_clock() -> Callable[[], int]:
    """A clock of microseconds since 1970 that never steps: set by the wall clock here, and monotonic from then on.

    Where there is `CLOCK_BOOTTIME` it goes on while the machine sleeps, too.
    """
    source = getattr(time, "CLOCK_BOOTTIME", None) or time.CLOCK_MONOTONIC
    offset_ns = time.time_ns() - time.clock_gettime_ns(source)
    return lambda: (time.clock_gettime_ns(source) + offset_ns) // 1000


class MemoryStore(BaseStore):
    """All policies, exact over the threads of one process. Other processes count for themselves: a server with several
    workers needs `SharedTable` or `SqliteStore`.

    Its clock never steps; `clock` (a callable that gives microseconds since 1970) stands in for it in tests. A charge
    also removes every entry that has expired by its time, each in O(log n) and once: memory stays with the keys that
    are live, and it takes no thread to see to that. A `now_us` far ahead expires entries like any other, and moves the
    time of the keys that were forgotten so. After `close` every call raises `StoreError`.
    """

    blocks = False

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        self._clock = steady_clock() if clock is None else clock
        self.secret = secrets.token_bytes(32)  # for `Guard(…, partition=True)`
        self._lock = threading.Lock()
        self._closed = False
        self._entries: dict[_Identity, _Entry] = {}
        # One place for each entry, at the expiry that it had when it got there. Expiries mostly grow with each hit: an
        # entry that is not due yet when its place is gets another, so a hit needn't touch the heap.
        self._dues: list[tuple[int, int, _Identity]] = []
        self._serials = count()
        self._watermark_us = 0  # the latest expiry of anything that was forgotten

    def __len__(self) -> int:
        """Entries that are kept, expired ones among them."""
        return len(self._entries)

    def __bool__(self) -> bool:
        """A store, also while it is empty."""
        return True

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """Charge `cost` units to the key if they are there; see `Store.take`.

        Raises `ValueError` for a bad cost or time, `TypeError` for a key that is neither `str` nor `bytes`.
        """
        identity = check_policy(policy), key_bytes(key)
        check_cost(cost)
        check_now(now_us)
        with self._lock:
            asked_us = self._now_us(now_us)
            before, at_us = self._load(identity, asked_us)
            decision, state = policy.decide(before, at_us, cost)
            if decision.allowed and cost:
                self._keep(identity, state)
                self._purge(asked_us)
        return seen_from(decision, at_us - asked_us)

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """Charge all of them or none; see `Store.take_all`."""
        joint = join((check_policy(policy), key, cost) for policy, key, cost in requests)
        check_now(now_us)
        times: list[int] = []
        with self._lock:
            asked_us = self._now_us(now_us)

            def load(policy: Policy, key: bytes) -> tuple[State | None, int]:
                state, at_us = self._load((policy, key), asked_us)
                times.append(at_us)
                return state, at_us

            decisions, states = decide_all(joint.requests, load)
            for (policy, key, cost), state in zip(joint.requests, states or (), strict=False):
                if cost:
                    self._keep((policy, key), state)
                    self._purge(asked_us)
        return joint.spread([seen_from(one, at_us - asked_us) for one, at_us in zip(decisions, times, strict=True)])

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """What `take` would say, taking nothing."""
        identity = check_policy(policy), key_bytes(key)
        check_cost(cost)
        check_now(now_us)
        with self._lock:
            asked_us = self._now_us(now_us)
            state, at_us = self._load(identity, asked_us)
            return seen_from(policy.decide(state, at_us, cost)[0], at_us - asked_us)

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """Forget the key, so that its whole quota is there again; whether it had a live state."""
        identity = check_policy(policy), key_bytes(key)
        with self._lock:
            now_us = self._now_us(None)
            entry = self._entries.pop(identity, None)
            if len(self._dues) > 2 * len(self._entries) + _SPARE_DUES:  # places of what was reset
                self._dues = [due for due in self._dues if self._is_current(due)]
                heapq.heapify(self._dues)
            return entry is not None and entry.expires_us > now_us

    def supports(self, policy: Policy) -> bool:
        """Whether it is a policy: this store runs them all."""
        return isinstance(policy, Policy)

    def close(self) -> None:
        """Forget everything; later calls raise `StoreError`."""
        with self._lock:
            self._closed = True
            self._entries, self._dues = {}, []

    # ---- inside, under the lock --------------------------------------------------------------------------------------

    def _now_us(self, now_us: int | None) -> int:
        if self._closed:
            raise StoreError("this MemoryStore is closed")
        return self._clock() if now_us is None else now_us

    def _load(self, identity: _Identity, asked_us: int) -> tuple[State | None, int]:
        """The state, and the time to judge it at: a key without an entry may be one that was forgotten, and is not
        judged as of a time before that.
        """
        entry = self._entries.get(identity)
        return (None, max(asked_us, self._watermark_us)) if entry is None else (entry.state, asked_us)

    def _keep(self, identity: _Identity, state: State) -> None:
        expires_us, before = identity[0].expires_at(state), self._entries.get(identity)
        serial = next(self._serials) if before is None else before.serial
        self._entries[identity] = _Entry(state, expires_us, serial)
        if before is None:
            heapq.heappush(self._dues, (expires_us, serial, identity))

    def _is_current(self, due: tuple[int, int, _Identity]) -> bool:
        entry = self._entries.get(due[2])
        return entry is not None and entry.serial == due[1]

    def _purge(self, now_us: int) -> None:
        """Remove every entry that has expired."""
        removed = 0
        while self._dues and self._dues[0][0] <= now_us:
            due = heapq.heappop(self._dues)
            if not self._is_current(due):
                continue
            _, serial, identity = due
            expires_us = self._entries[identity].expires_us
            if expires_us > now_us:
                heapq.heappush(self._dues, (expires_us, serial, identity))
                continue
            del self._entries[identity]
            self._watermark_us = max(self._watermark_us, expires_us)
            removed += 1
        if removed > len(self._entries):
            self._entries = dict(self._entries)  # a dict gives memory back only when it is built anew
