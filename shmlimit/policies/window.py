"""What the three windows share: the quota is the limit, and windows lie on multiples of the period since the epoch."""

from __future__ import annotations

from dataclasses import dataclass

from shmlimit.policies.base import Policy


@dataclass(frozen=True, init=False, repr=False)
class Window(Policy):
    """At most `limit` in a window of `period` (seconds, or a `timedelta`).

    Raises `ConfigError` for a `limit` outside 1…10**9, and a `period` outside 1 ms…10**9 s or not whole
    in microseconds.
    """

    limit: int
    period_us: int

    __hash__ = Policy.__hash__  # or the dataclass would put one of its own, which is made anew at each call

    @property
    def quota(self) -> int:
        """The limit."""
        return self.limit

    @property
    def window_us(self) -> int:
        """The period."""
        return self.period_us

    def _floor(self, time_us: int) -> int:
        """The start of the window that a time lies in."""
        return time_us // self.period_us * self.period_us

    def _ceil(self, time_us: int) -> int:
        """The next start of a window."""
        return -(-time_us // self.period_us) * self.period_us
