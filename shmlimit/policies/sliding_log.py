"""The sliding log: the time of every hit that still counts, and so no seam and no approximation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeGuard

from shmlimit.policies.base import Decision, State, check_cost
from shmlimit.policies.window import Window


@dataclass(frozen=True, init=False, repr=False, eq=False)
class SlidingLog(Window):
    """At most `limit` in *every* window of `period`, wherever it begins; memory grows with the limit.

    The state is `{"kind": "sliding-log", "hits": [[time_us, units], …]}`, the oldest first. A hit at t counts from t
    until just before t + period. A `now_us` before the newest hit is taken as its time. See `Window` for the arguments
    and their errors.

    >>> SlidingLog(5, 60)
    SlidingLog(limit=5, period=60)
    """

    kind: ClassVar[str] = "sliding-log"
    _fields: ClassVar[tuple[str, ...]] = ()

    def fresh(self, now_us: int) -> State:  # noqa: ARG002 - no hits, no time
        """No hits."""
        return self._state([])

    def decide(self, state: State | None, now_us: int, cost: int = 1) -> tuple[Decision, State]:
        """See `Policy.decide`."""
        check_cost(cost)
        own = self._own(state, now_us)
        at_us = max(now_us, own["hits"][-1][0]) if own["hits"] else now_us
        hits = [[time, units] for time, units in own["hits"] if time + self.period_us > at_us]
        used = sum(units for _, units in hits)
        allowed = used + cost <= self.limit
        retry_after_us = 0 if allowed else self._wait_us(hits, used + cost - self.limit, now_us, cost)
        if allowed and cost:
            used += cost
            if hits and hits[-1][0] == at_us:
                hits[-1][1] += cost
            else:
                hits.append([at_us, cost])
        decision = Decision(
            allowed=allowed,
            limit=self.limit,
            remaining=max(0, self.limit - used),
            reset_us=hits[-1][0] + self.period_us - now_us if hits else 0,
            retry_after_us=retry_after_us,
            next_us=hits[0][0] + self.period_us - now_us if hits else 0,
        )
        return decision, self._state(hits) if allowed and cost else own

    def expires_at(self, state: State) -> int:
        """When the newest hit leaves."""
        return state["hits"][-1][0] + self.period_us if self._is_own(state) and state["hits"] else 0

    def shift(self, state: State, delta_us: int) -> State:
        """Every hit moved by `delta_us`."""
        if not self._is_own(state):
            return state
        return self._state([[time + delta_us, units] for time, units in state["hits"]])

    def _wait_us(self, hits: list[list[int]], excess: int, now_us: int, cost: int) -> int | None:
        """Until `excess` units have left; `None` where `cost` never fits."""
        if cost > self.limit:
            return None
        for time, units in hits:
            excess -= units
            if excess <= 0:
                return int(time + self.period_us - now_us)
        return None

    def _is_own(self, state: object) -> TypeGuard[State]:
        if not super()._is_own(state) or not isinstance(hits := state.get("hits"), list):
            return False
        # PERF: one plain loop: a store written in Python asks twice a decision, for every hit.
        last = None
        for hit in hits:
            if not isinstance(hit, list) or len(hit) != 2:
                return False
            time, units = hit
            if type(time) is not int or type(units) is not int or (last is not None and time < last):
                return False
            last = time
        return True

    def _state(self, hits: list[list[int]]) -> State:
        return {"kind": self.kind, "hits": hits}
