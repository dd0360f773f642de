"""The sliding-window counter: two counts stand in for a log, the older one weighted by how much of it still overlaps.

The approximation that Cloudflare described ("How we built rate limiting capable of scaling to millions of domains",
2017): with the previous window's count p and this one's c, at a fraction f of this window, p * (1 - f) + c stands for
the hits of the last period. It is right where the previous hits came evenly. Here the weighted part is rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shmlimit.policies.base import Decision, State, check_cost
from shmlimit.policies.window import Window


@dataclass(frozen=True, init=False, repr=False, eq=False)
class SlidingCounter(Window):
    """At most `limit` in about every window of `period`, from two counts.

    "Rounded up" means that a hit weighs at least 1 until the end of the window after its own: a spent `1/minute` is
    whole again only after up to two minutes, and a wait can be nearly two windows long.

    The state is `{"kind": "sliding-counter", "start_us": int, "previous": int, "current": int}`. A `now_us` before the
    state's window is taken as its start. See `Window` for the arguments and their errors.

    >>> SlidingCounter(60, 60)
    SlidingCounter(limit=60, period=60)
    """

    kind: ClassVar[str] = "sliding-counter"
    _fields: ClassVar[tuple[str, ...]] = ("start_us", "previous", "current")

    def fresh(self, now_us: int) -> State:
        """Two empty windows, at the epoch: a key that was never charged has no time."""
        return self._state(min(0, self._floor(now_us)), 0, 0)

    def decide(self, state: State | None, now_us: int, cost: int = 1) -> tuple[Decision, State]:
        """See `Policy.decide`."""
        check_cost(cost)
        own = self._own(state, now_us)
        start_us, previous, current = self._at(own, now_us)
        end_us, at_us = start_us + self.period_us, max(start_us, now_us)
        allowed = self._weight(previous, end_us - at_us) + current + cost <= self.limit
        retry_after_us = 0 if allowed else self._wait_us(end_us, previous, current, cost, now_us)
        current += cost if allowed else 0
        used = self._weight(previous, end_us - at_us) + current
        remaining = max(0, self.limit - used)
        decision = Decision(
            allowed=allowed,
            limit=self.limit,
            remaining=remaining,
            reset_us=self._reset_at(start_us, previous, current) - now_us if used else 0,
            retry_after_us=retry_after_us,
            next_us=self._wait_us(end_us, previous, current, remaining + 1, now_us) or 0 if used else 0,
        )
        return decision, self._state(start_us, previous, current) if allowed and cost else own

    def expires_at(self, state: State) -> int:
        """The end of the window after the last one with hits."""
        if not self._is_own(state):
            return 0
        return self._reset_at(state["start_us"], state["previous"], state["current"])

    def shift(self, state: State, delta_us: int) -> State:
        """The windows moved by `delta_us`, and on to a multiple of the period."""
        if not self._is_own(state):
            return state
        return self._state(self._ceil(state["start_us"] + delta_us), state["previous"], state["current"])

    def _at(self, state: State, now_us: int) -> tuple[int, int, int]:
        """Start and counts as of `now_us`."""
        start_us, previous, current = state["start_us"], state["previous"], state["current"]
        now_start_us = self._floor(now_us)
        if not previous and not current:
            return now_start_us, 0, 0
        if start_us >= now_start_us:
            return start_us, previous, current
        return now_start_us, current if start_us + self.period_us == now_start_us else 0, 0

    def _weight(self, previous: int, left_us: int) -> int:
        """What the previous window's hits weigh while `left_us` of this one are left."""
        return -(-previous * left_us // self.period_us)

    def _wait_us(self, end_us: int, previous: int, current: int, cost: int, now_us: int) -> int | None:
        """Until `cost` fits; `None` for never.

        The weight w of a count falls to a room r when r * period / w of its last window is left. Where this window's
        own hits leave no room, they are the ones to wait for, in the next.
        """
        if cost > self.limit:
            return None
        room = self.limit - current - cost
        if room < 0:
            end_us, previous, room = end_us + self.period_us, current, self.limit - cost
        return end_us - room * self.period_us // previous - now_us

    def _reset_at(self, start_us: int, previous: int, current: int) -> int:
        return start_us + self.period_us * (2 if current else 1 if previous else 0)

    def _state(self, start_us: int, previous: int, current: int) -> State:
        return {"kind": self.kind, "start_us": start_us, "previous": previous, "current": current}
