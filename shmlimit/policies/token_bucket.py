"""The token bucket: a level that rises on a straight line to `burst` and falls by the cost of what passes.

The model is golang.org/x/time/rate, in integers: levels count 1/period_us of a token and times inside count 1/limit of
a microsecond, so a level rises by one a tick (bucket.py has the why, reservation.py the reservations).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeGuard

from shmlimit.policies.base import State
from shmlimit.policies.gcra import Gcra
from shmlimit.policies.reservation import Reserving


@dataclass(frozen=True, init=False, repr=False, eq=False)
class TokenBucket(Reserving):
    """`limit` tokens per `period`, at most `burst` (default `limit`), refilled continuously; exact in integers.

    The state is `{"kind": "token-bucket", "level": int, "at_us": int}`: the level at a time, in 1/period_us of a token.
    While reservations wait it also has `"pending"`: a list of `[due, cost]` in the order of `due`, which counts 1/limit
    of a microsecond since the epoch. See `Bucket` for the arguments and their errors.

    >>> TokenBucket(10, 60)
    TokenBucket(limit=10, period=60, burst=10)
    """

    kind: ClassVar[str] = "token-bucket"
    _fields: ClassVar[tuple[str, ...]] = ("level", "at_us")

    def as_gcra(self) -> Gcra:
        """The same numbers, and so the same decisions, with one arrival time as the state."""
        return Gcra(**self._arguments())

    def fresh(self, now_us: int) -> State:
        """A full bucket, since the epoch: a key that was never charged has no line that a clock could go back on."""
        return {"kind": self.kind, "level": self.burst * self.period_us, "at_us": min(0, now_us)}

    def expires_at(self, state: State) -> int:
        """When the bucket is full and nothing is pending, rounded up."""
        if not self._is_own(state):
            return 0
        level, time = self._after(state, state.get("pending", ()))
        return self._up(time + self.burst * self.period_us - level)

    def shift(self, state: State, delta_us: int) -> State:
        """The state's times moved by `delta_us`; reservations already handed out keep theirs and can't be cancelled."""
        if not self._is_own(state):
            return state
        pending = [[due + delta_us * self.limit, cost] for due, cost in state.get("pending", ())]
        return self._state(state["level"], state["at_us"] + delta_us, pending)

    def _is_own(self, state: object) -> TypeGuard[State]:
        if not super()._is_own(state):
            return False
        if "pending" not in state:
            return True
        pending = state["pending"]
        return isinstance(pending, list) and all(
            isinstance(entry, list) and [type(number) for number in entry] == [int, int] for entry in pending
        )

    def _used(self, state: State, now_us: int) -> int:
        level, time = self._after(state, state.get("pending", ()))
        return max(0, self.burst * self.period_us - level - (now_us * self.limit - time))

    def _spend(self, state: State, now_us: int, cost: int) -> State:
        return self._take(state, now_us, now_us * self.limit, cost)

    def _take(self, state: State, now_us: int, due: int, cost: int) -> State:
        return self._settle(state, now_us, sorted([*state.get("pending", ()), [due, cost]]))

    def _settle(self, state: State, now_us: int, pending: list[list[int]]) -> State:
        # A clock that went back leaves the state at its own, later time: the level there is on the same line.
        at_us = max(now_us, state["at_us"])
        time = at_us * self.limit
        level, last = self._after(state, [entry for entry in pending if entry[0] <= time])
        level = min(self.burst * self.period_us, level + time - last)
        return self._state(level, at_us, [entry for entry in pending if entry[0] > time])

    def _after(self, state: State, pending: Iterable[list[int]]) -> tuple[int, int]:
        """The level once the last of `pending` has acted, and the time of that."""
        level, time = state["level"], state["at_us"] * self.limit
        for due, cost in pending:
            level = min(self.burst * self.period_us, level + due - time) - cost * self.period_us
            time = due
        return level, time

    def _state(self, level: int, at_us: int, pending: list[list[int]]) -> State:
        state: dict[str, object] = {"kind": self.kind, "level": level, "at_us": at_us}
        return state | {"pending": pending} if pending else state


def per_second(n: int, burst: int | None = None) -> TokenBucket:
    """`n` tokens a second, at most `burst` (default `n`) at once."""
    return TokenBucket(n, 1, burst)


def per_minute(n: int, burst: int | None = None) -> TokenBucket:
    """`n` tokens a minute, at most `burst` (default `n`) at once."""
    return TokenBucket(n, 60, burst)


def per_hour(n: int, burst: int | None = None) -> TokenBucket:
    """`n` tokens an hour, at most `burst` (default `n`) at once."""
    return TokenBucket(n, 3_600, burst)


def per_day(n: int, burst: int | None = None) -> TokenBucket:
    """`n` tokens a day, at most `burst` (default `n`) at once."""
    return TokenBucket(n, 86_400, burst)
