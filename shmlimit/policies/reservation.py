"""Reservations: costs that act later, the model of `Limiter.ReserveN` in golang.org/x/time/rate.

The state of a bucket keeps the reservations that haven't acted yet, and its level falls when they do. What may be taken
now is the level after the last of them, read back along the line: negative in a debt. To cancel one is to take it out
of the list, and then the level follows.

x/time/rate keeps one number instead and gives back the cost less what was reserved later; several cancels can add up to
more than the rate. Giving all back at once would, too: the tokens of a reservation in the middle may overflow the
bucket before the later ones act, and then nobody can have them.
"""

from __future__ import annotations

from abc import abstractmethod
from fractions import Fraction
from typing import NamedTuple

from shmlimit.policies.base import State, check_cost
from shmlimit.policies.bucket import Bucket


class Reservation(NamedTuple):
    """Tokens taken ahead: wait `delay_us`, then act, at `act_at_us`. True when granted.

    A refused one (`ok` is false) has taken nothing: `delay_us` is the wait it would have taken (`None`: never), and
    `act_at_us` is `None`.
    """

    ok: bool
    cost: int
    delay_us: int | None
    act_at_us: int | None

    def __bool__(self) -> bool:
        """Whether it was granted: a tuple is otherwise always true."""
        return self.ok


class Reserving(Bucket):
    """A bucket that reserves. A state of `None`, or of another shape, is a fresh one throughout."""

    def tokens(self, state: State | None, now_us: int) -> Fraction:
        """What may be taken at `now_us`, exactly; negative in a debt."""
        return self.burst - Fraction(self._used(self._own(state, now_us), now_us), self.period_us)

    def wait_us(self, state: State | None, now_us: int, cost: int) -> int | None:
        """Until `cost` could be taken if nothing else comes, rounded up: 0 now, `None` never.

        Raises `ValueError` for a cost that is negative or not an integer, as the others here do.
        """
        return self._wait_us(self._used(self._own(state, now_us), now_us), check_cost(cost))

    def reserve(self, state: State | None, now_us: int, cost: int, max_wait_us: int) -> tuple[Reservation, State]:
        """Take `cost` tokens ahead, into debt, if they will be there within `max_wait_us`; else the state as it was.

        Over any history, what acts within w microseconds is below burst + (w + 1) * limit / period_us tokens: the times
        are rounded up, which can bring two of them closer by less than a microsecond.
        """
        own = self._own(state, now_us)
        delay_us = self.wait_us(own, now_us, cost)
        if delay_us is None or delay_us > max_wait_us:
            return Reservation(False, cost, delay_us, None), own
        reservation = Reservation(True, cost, delay_us, now_us + delay_us)
        if not cost:
            return reservation, own
        short = self._used(own, now_us) + (cost - self.burst) * self.period_us
        return reservation, self._take(own, now_us, now_us * self.limit + max(0, short), cost)

    def cancel(self, state: State | None, reservation: Reservation, now_us: int) -> State:
        """Give back a reservation that hasn't acted yet, up to full; later ones keep their times.

        Up to full at every moment to come: what would overflow before the last of the others acts is not given.
        From `act_at_us` on it has acted, by the clock of `now_us` or of the state, whichever is ahead, and the state is
        returned as it was. So it is for one that was refused, had no delay, or was cancelled before.
        """
        own = self._own(state, now_us)
        act_at_us = reservation.act_at_us
        if act_at_us is None or act_at_us <= now_us:
            return own
        pending = list(own.get("pending", ()))
        for index in reversed(range(len(pending))):
            due, cost = pending[index]
            if cost == reservation.cost and self._up(due) == act_at_us:
                del pending[index]
                return self._settle(own, now_us, pending)
        return own

    @abstractmethod
    def _take(self, state: State, now_us: int, due: int, cost: int) -> State:
        """The state after `cost` was taken ahead at `now_us`, to act at `due` (in 1/limit of a microsecond)."""

    @abstractmethod
    def _settle(self, state: State, now_us: int, pending: list[list[int]]) -> State:
        """The state at `now_us` with these costs to come instead of its own: those that have acted are taken off."""
