"""A sound store in few lines, in pieces that can be broken one at a time, and the register of those that are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from shmlimit import Decision, Policy, State, StoreError
from shmlimit.policies.base import check_cost
from shmlimit.policies.requests import Joint, Request, decide_all, join, key_bytes
from shmlimit.stores.base import BaseStore, check_now, check_policy, seen_from, wall_clock
from shmlimit.testing import StoreContract


class Sound(BaseStore):
    """Keeps every rule, in pieces that can be broken one at a time."""

    blocks = False

    def __init__(self) -> None:
        self.states: dict[Hashable, tuple[Policy, State]] = {}
        self.watermark_us = self.writes = 0
        self.closed = False
        self.lock: Any = threading.RLock()

    def take(self, policy: Policy, key: Any, cost: int = 1, *, now_us: int | None = None) -> Decision:
        return self.take_all([(policy, key, cost)], now_us=now_us)[0]

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        joint = self.joined(requests)
        with self.lock:
            asked_us = self.time(now_us)
            times: list[int] = []

            def load(policy: Policy, key: bytes) -> tuple[State | None, int]:
                state, at_us = self.load(policy, key, asked_us)
                times.append(at_us)
                return state, at_us

            decisions, states = decide_all(joint.requests, load)
            for (policy, key, cost), state in zip(joint.requests, states or (), strict=False):
                if cost:
                    self.save(policy, key, state)
                    self.forget(asked_us)
        seen = [self.told(one, at_us - asked_us) for one, at_us in zip(decisions, times, strict=True)]
        return joint.spread(seen)

    def peek(self, policy: Policy, key: Any, cost: int = 0, *, now_us: int | None = None) -> Decision:
        (policy, key, cost), *_ = self.joined([(policy, key, cost)]).requests
        with self.lock:
            asked_us = self.time(now_us)
            state, at_us = self.load(policy, key, asked_us)
            return self.told(policy.decide(state, at_us, cost)[0], at_us - asked_us)

    def reset(self, policy: Policy, key: Any) -> bool:
        identity = self.identity(check_policy(policy), self.bytes(key))
        with self.lock:
            now_us = self.time(None)
            _, state = self.states.pop(identity, (policy, None))
            return state is not None and policy.expires_at(state) > now_us

    def supports(self, policy: Policy) -> bool:
        return isinstance(policy, Policy)

    def close(self) -> None:
        self.closed = True

    # ---- the pieces --------------------------------------------------------------------------------------------------

    def joined(self, requests: Iterable[Request]) -> Joint:
        return join([(check_policy(policy), self.bytes(key), self.cost(cost)) for policy, key, cost in requests])

    def bytes(self, key: Any) -> bytes:
        return key_bytes(key)

    def cost(self, cost: int) -> int:
        return check_cost(cost)

    def identity(self, policy: Policy, key: bytes) -> Hashable:
        return policy, key

    def time(self, now_us: int | None) -> int:
        if self.closed:
            raise StoreError("this store is closed")
        given_us = check_now(now_us)
        return wall_clock() if given_us is None else given_us

    def load(self, policy: Policy, key: bytes, asked_us: int) -> tuple[State | None, int]:
        found = self.states.get(self.identity(policy, key))
        return (None, max(asked_us, self.watermark_us)) if found is None else (found[1], asked_us)

    def save(self, policy: Policy, key: bytes, state: State) -> None:
        self.states[self.identity(policy, key)] = policy, state
        self.writes += 1

    def forget(self, now_us: int) -> None:
        for identity, (policy, state) in list(self.states.items()):
            if (expires_us := policy.expires_at(state)) <= now_us:
                del self.states[identity]
                self.watermark_us = max(self.watermark_us, expires_us)

    def told(self, decision: Decision, lead_us: int) -> Decision:
        return seen_from(decision, lead_us)


class ForgetsByItself(Sound):
    """As a server does: a state is gone once its time is up by the server's clock, whatever `now_us` says."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_s: dict[Hashable, float] = {}
        self.now_us = 0

    def time(self, now_us: int | None) -> int:
        self.now_us = super().time(now_us)
        return self.now_us

    def load(self, policy: Policy, key: bytes, asked_us: int) -> tuple[State | None, int]:
        if self.ends_s.get(self.identity(policy, key), 0.0) <= time.monotonic():
            self.states.pop(self.identity(policy, key), None)
        return super().load(policy, key, asked_us)

    def save(self, policy: Policy, key: bytes, state: State) -> None:
        super().save(policy, key, state)
        self.ends_s[self.identity(policy, key)] = time.monotonic() + (policy.expires_at(state) - self.now_us) / 1e6

    def forget(self, now_us: int) -> None:
        """Not by the caller's time."""


class SoundContract(StoreContract):
    """What is said of all of them."""

    make_store: Callable[..., Any] = Sound
    patience_s = 20.0

    def kept(self, store: Sound) -> Any:
        return dict(store.states), store.watermark_us, store.writes

    def forgets(self, _policy: Policy) -> bool:
        return True


class SharedContract(SoundContract):
    """What is said of those that claim to be shared."""

    def opener(self, store: Any) -> Callable[[], Any]:
        return store.open


_Store = TypeVar("_Store", bound=type[Any])
BROKEN: dict[str, tuple[type[Any], str]] = {}


def found_by(test: str) -> Callable[[_Store], _Store]:
    """Notes a broken store, and the test that must find it."""

    def note(store: _Store) -> _Store:
        BROKEN[store.__name__] = store, test
        return store

    return note
