"""The pure policies beside a store, and the histories that both are asked."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import HealthCheck, assume, reject, settings
from hypothesis import strategies as st

from shmlimit import ConfigError, Decision, FixedWindow, Gcra, Policy, SlidingCounter, SlidingLog, State, TokenBucket
from shmlimit.policies.base import PERIOD_MAX_US, US_PER_S
from shmlimit.policies.bucket import Bucket
from shmlimit.policies.requests import Request, decide_all, join

T0 = 1_767_225_600_000_000  # 2026-01-01, a whole minute and day
S = US_PER_S
YEAR = 366 * 86_400  # seconds in which nothing comes back while a test runs
KINDS: tuple[type[Any], ...] = (TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter)
TEN: tuple[Policy, ...] = tuple(kind(10, 60) for kind in KINDS)
ONCE = TokenBucket(1, YEAR)
MODEST = settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=25)

# Where numbers of machines end: milliseconds of 32 bits, microseconds of 53 (the integers of a double), of 32.
TURNS_US = (0, 2**32, 2**31 * S, 2**32 * 1_000, 2**32 * S, 2**53)


def same(answer: Any, wanted: Decision, *about: object) -> None:
    """All six fields, which are whole numbers: 9.0 is none."""
    assert isinstance(answer, Decision), about
    assert answer == wanted, about
    assert [type(field) for field in answer] == [type(field) for field in wanted], about


class Model:
    """What the pure policies say of many keys.

    It also knows what a store may have forgotten: a charge may remove whatever has expired by its time, so that nothing
    is judged as of a time before `floor_us` any more; and a store may forget by a clock of its own (see `lasts_us`).
    """

    def __init__(self, lasts_us: int | None = None) -> None:
        self.floor_us = 0
        self._states: dict[tuple[Policy, bytes], State] = {}
        self._lasts_us = lasts_us
        self._asked_s = 0.0
        self._losses: list[tuple[float, int]] = []

    def take(self, policy: Policy, key: str | bytes, cost: int, now_us: int) -> Decision:
        """The decision; charged where it allows."""
        return self.take_all([(policy, key, cost)], now_us)[0]

    def take_all(self, requests: list[Request], now_us: int) -> list[Decision]:
        """The decisions; charged where all allow."""
        self._asked_s = time.monotonic()
        joint = join(requests)
        decisions, states = decide_all(joint.requests, lambda policy, key: (self._states.get((policy, key)), now_us))
        for (policy, key, cost), state in zip(joint.requests, states or (), strict=False):
            if cost:
                self._states[policy, key] = state
                if self._lasts_us is not None:
                    kept_us = policy.expires_at(state) - now_us + self._lasts_us
                    self._losses.append((self._asked_s + kept_us / S, policy.expires_at(state)))
        if states is not None and any(cost for _, _, cost in joint.requests):
            self._forget(now_us)
        return joint.spread(decisions)

    def _forget(self, now_us: int) -> None:
        for (policy, key), state in list(self._states.items()):
            expires_us = policy.expires_at(state)
            if expires_us <= now_us:
                del self._states[policy, key]
                self.floor_us = max(self.floor_us, expires_us)

    def sure(self, now_us: int) -> bool:
        """Whether the store must still have had, at the time of its last answer, all that lives at `now_us`."""
        now_s = time.monotonic()
        return all(now_s < lost_s or expires_us <= now_us for lost_s, expires_us in self._losses)


def policy_of(kind: type[Policy], limit: int, period_us: int, burst: int | None = None) -> Policy | None:
    """The policy, or `None` where its numbers can't be."""
    period = (period_us // S) if period_us % S == 0 else period_us / S
    make: Any = kind
    try:
        return make(limit, period, burst) if issubclass(kind, Bucket) else make(limit, period)  # type: ignore[no-any-return]
    except ConfigError:
        return None


@st.composite
def policies(draw: st.DrawFn, kind: type[Policy]) -> Policy:
    """Small limits mostly, where histories reach all states; and the largest."""
    limit = draw(st.one_of(st.integers(1, 8), st.integers(1, 8), st.sampled_from([1_000, 10**9])))
    period_us = draw(st.sampled_from([1_000, 30_000, 700_000, S, 60 * S, 86_400 * S, PERIOD_MAX_US]))
    burst = draw(st.one_of(st.none(), st.integers(1, 12)))
    return policy_of(kind, limit, period_us, burst) or reject()


def starts(latest_us: int) -> st.SearchStrategy[int]:
    """Times to begin at: today, the ends of time, and where numbers of machines end."""
    ends = [turn_us for turn_us in (*TURNS_US, latest_us) if turn_us <= latest_us]
    return st.one_of(
        st.just(T0), st.builds(lambda end, back: max(0, end - back), st.sampled_from(ends), st.integers(0, 9))
    )


def histories(policy: Policy, low: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """(step of the clock, cost, which key); `low` intervals back at most."""
    interval = max(1, policy.period_us // policy.limit)
    step = st.one_of(
        st.just(0),
        st.integers(0, 3 * interval),
        st.integers(low * interval, 0),
        st.integers(0, 2 * policy.window_us),
        st.sampled_from([interval - 1, interval, interval + 1, policy.window_us]),
    )
    cost = st.one_of(st.just(1), st.integers(0, policy.quota + 1), st.sampled_from([policy.quota, 10**30]))
    return st.lists(st.tuples(step, cost, st.integers(0, 2)), min_size=1, max_size=25)


def waits(policy: Policy, start_us: int) -> list[tuple[int, int]]:
    """A history of (now_us, cost) that spends the quota and waits for 1 and for all of it: at once, one microsecond
    early, and in time. The last cost never fits.
    """
    history: list[tuple[int, int]] = []
    now_us = start_us
    for cost in (policy.quota, 1, policy.quota, policy.quota + 1):
        history.append((now_us, cost))
        retry_us = policy.simulate(history)[-1].retry_after_us
        if retry_us:
            history += [(now_us + retry_us - 1, cost), (now_us + retry_us, cost)]
            now_us += retry_us
    return history


def runs(hooks: Any, store: Any, policy: Policy) -> None:
    """Only policies that the store runs, by exactly their numbers."""
    assume(store.supports(policy) and hooks.exact(policy))
