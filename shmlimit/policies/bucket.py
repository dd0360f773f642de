"""What `TokenBucket` and `Gcra` share: their numbers, and how an exact level becomes an answer.

Both know how far a key is from full. That distance is a whole number of one unit, which is why nothing is ever rounded
on the way: with `limit` tokens per `period_us`, a microsecond brings `limit / period_us` tokens, so

    1/period_us of a token  =  what 1/limit of a microsecond brings

and a level counted in the first unit and a wait counted in the second are the same integer. A token is `period_us`
units, a microsecond is `limit` units, a full bucket is `burst * period_us` units.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from shmlimit.errors import ConfigError
from shmlimit.policies.base import (
    LIMIT_MAX,
    WINDOW_MAX_US,
    Decision,
    Period,
    Policy,
    State,
    check_cost,
    check_int,
    period_to_us,
)


@dataclass(frozen=True, init=False, repr=False)
class Bucket(Policy):
    """`limit` tokens per `period` (seconds, or a `timedelta`), at most `burst` (default `limit`) at once.

    Raises `ConfigError` for `limit` or `burst` outside 1…10**9, a `period` outside 1 ms…10**9 s or not whole in
    microseconds, and numbers that would take more than 10**9 s to refill.
    """

    limit: int
    period_us: int
    burst: int

    __hash__ = Policy.__hash__  # or the dataclass would put one of its own, which is made anew at each call

    def __init__(self, limit: int, period: Period, burst: int | None = None) -> None:
        limit = check_int("limit", limit, 1, LIMIT_MAX)
        burst = limit if burst is None else check_int("burst", burst, 1, LIMIT_MAX)
        self._set(limit=limit, period_us=period_to_us(period), burst=burst)
        if self.window_us > WINDOW_MAX_US:
            raise ConfigError(
                f"burst * period / limit (window_us, the time to refill from empty) must be at most 10**9 seconds, "
                f"not {self.window_us} microseconds: lower burst or period, or raise limit"
            )

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"burst": self.burst}

    def __str__(self) -> str:
        return super().__str__() + ("" if self.burst == self.limit else f" burst {self.burst}")

    @property
    def quota(self) -> int:
        """The burst."""
        return self.burst

    @property
    def window_us(self) -> int:
        """The refill time from empty, rounded up."""
        return self._up(self.burst * self.period_us)

    def decide(self, state: State | None, now_us: int, cost: int = 1) -> tuple[Decision, State]:
        """See `Policy.decide`. Cost 0 in a debt (see `TokenBucket.reserve`) is denied until the debt is paid."""
        check_cost(cost)
        own = self._own(state, now_us)
        decision = self._answer(self._used(own, now_us), cost)
        return decision, self._spend(own, now_us, cost) if decision.allowed and cost else own

    def _answer(self, used: int, cost: int) -> Decision:
        """The decision for a key that is `used` units away from full."""
        token, full = self.period_us, self.burst * self.period_us
        retry_after_us = self._wait_us(used, cost)
        if retry_after_us == 0:
            used += cost * token
        remaining = max(0, (full - used) // token)
        return Decision(
            allowed=retry_after_us == 0,
            limit=self.burst,
            remaining=remaining,
            reset_us=self._up(used),
            retry_after_us=retry_after_us,
            next_us=self._up(used + (remaining + 1) * token - full) if used else 0,
        )

    def _wait_us(self, used: int, cost: int) -> int | None:
        """Until `cost` tokens are there: 0 when they are, `None` when they never fit."""
        return None if cost > self.burst else max(0, self._up(used + (cost - self.burst) * self.period_us))

    def _up(self, units: int) -> int:
        """Units as microseconds, rounded up."""
        return -(-units // self.limit)

    @abstractmethod
    def _used(self, state: State, now_us: int) -> int:
        """How many units the key is away from full at `now_us`, also before the state's own time."""

    @abstractmethod
    def _spend(self, state: State, now_us: int, cost: int) -> State:
        """The state after `cost` tokens were taken at `now_us`."""
