"""The generic cell rate algorithm: a key is one number, the time at which it will be full again.

That time is the theoretical arrival time `tat` of ITU-T I.371 (and of redis-cell): with the emission interval
T = period / limit, a request of `cost` at `now` moves it to t = max(tat, now) + cost * T and passes iff
t - burst * T <= now. Here all of it is counted in 1/limit of a microsecond, where T is the integer `period_us`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shmlimit.policies.base import State
from shmlimit.policies.bucket import Bucket


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Gcra(Bucket):
    """`limit` tokens per `period`, at most `burst` (default `limit`): the decisions of `TokenBucket`, on every input.

    The state is `{"kind": "gcra", "tat": int}`, where `tat` counts 1/limit of a microsecond since the epoch. See
    `Bucket` for the arguments and their errors.

    >>> Gcra(5, 1, burst=10)
    Gcra(limit=5, period=1, burst=10)
    """

    kind: ClassVar[str] = "gcra"
    _fields: ClassVar[tuple[str, ...]] = ("tat",)

    def fresh(self, now_us: int) -> State:
        """A full bucket, since the epoch: a key that was never charged has no line that a clock could go back on."""
        return {"kind": self.kind, "tat": min(0, now_us) * self.limit}

    def expires_at(self, state: State) -> int:
        """The arrival time, rounded up."""
        return self._up(state["tat"]) if self._is_own(state) else 0

    def shift(self, state: State, delta_us: int) -> State:
        """The arrival time moved by `delta_us`."""
        if not self._is_own(state):
            return state
        return {"kind": self.kind, "tat": state["tat"] + delta_us * self.limit}

    def _used(self, state: State, now_us: int) -> int:
        tat: int = state["tat"]
        return max(0, tat - now_us * self.limit)

    def _spend(self, state: State, now_us: int, cost: int) -> State:
        return {"kind": self.kind, "tat": max(state["tat"], now_us * self.limit) + cost * self.period_us}
