"""The fixed window: a count that starts again at each multiple of the period since the epoch.

The cheapest limit there is, and what people mean by "1000 a day". Its price is the seam: `limit` at the end of one
window and `limit` at the beginning of the next are twice the limit in a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shmlimit.policies.base import Decision, State, check_cost
from shmlimit.policies.window import Window


@dataclass(frozen=True, init=False, repr=False, eq=False)
class FixedWindow(Window):
    """At most `limit` in each window [k * period, (k + 1) * period) since the epoch; up to twice that across a seam.

    The state is `{"kind": "fixed", "start_us": int, "count": int}`. A `now_us` before the state's window counts in that
    window. See `Window` for the arguments and their errors.

    >>> FixedWindow(1000, 86400)
    FixedWindow(limit=1000, period=86400)
    """

    kind: ClassVar[str] = "fixed"
    _fields: ClassVar[tuple[str, ...]] = ("start_us", "count")

    def fresh(self, now_us: int) -> State:
        """An empty window, the first since the epoch: a key that was never charged has no time."""
        return self._state(min(0, self._floor(now_us)), 0)

    def decide(self, state: State | None, now_us: int, cost: int = 1) -> tuple[Decision, State]:
        """See `Policy.decide`."""
        check_cost(cost)
        own = self._own(state, now_us)
        start_us, count = self._at(own, now_us)
        wait_us = start_us + self.period_us - now_us
        allowed = count + cost <= self.limit
        count += cost if allowed else 0
        decision = Decision(
            allowed=allowed,
            limit=self.limit,
            remaining=max(0, self.limit - count),
            reset_us=wait_us if count else 0,
            retry_after_us=0 if allowed else wait_us if cost <= self.limit else None,
            next_us=wait_us if count else 0,
        )
        return decision, self._state(start_us, count) if allowed and cost else own

    def expires_at(self, state: State) -> int:
        """The end of the window."""
        return state["start_us"] + self.period_us if self._is_own(state) and state["count"] else 0

    def shift(self, state: State, delta_us: int) -> State:
        """The window moved by `delta_us`, and on to a multiple of the period."""
        if not self._is_own(state):
            return state
        return self._state(self._ceil(state["start_us"] + delta_us), state["count"])

    def _at(self, state: State, now_us: int) -> tuple[int, int]:
        """Start and count of the window that a hit at `now_us` falls into."""
        start_us = self._floor(now_us)
        if state["count"] and state["start_us"] >= start_us:
            return state["start_us"], state["count"]
        return start_us, 0

    def _state(self, start_us: int, count: int) -> State:
        return {"kind": self.kind, "start_us": start_us, "count": count}
