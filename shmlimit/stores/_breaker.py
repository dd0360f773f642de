"""What a store remembers of a server that doesn't answer, so that a known failure costs nobody anything."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from shmlimit.errors import StoreError

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 32.0
JITTER = 0.2
"""A wait is this part shorter or longer, at random, so that a fleet doesn't come back in one moment."""


class Outage(NamedTuple):
    """A server that is down: why, how many tries in a row failed, and when (by the breaker's clock) to try again."""

    cause: str
    failures: int
    probe_at: float


class Breaker:
    """Lets calls through while the server answers. After a failure they raise `StoreError` at once, but for one now and
    then, the probe: after 1, 2, 4 … 32 s. A success ends the outage.

        outage = breaker.enter()    # raises StoreError while the server is known to be down
        try:
            answer = ask()
        except Trouble as error:
            breaker.failed(outage, f"Redis at … can't answer: {error}")
            raise StoreError(…) from error
        breaker.succeeded(outage)

    One for a server and process, shared by its threads and event loops. It has no lock: a state is replaced whole, and
    what can come of a race is a probe too many. `clock` gives seconds, `chance` a number in [0, 1).
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._outage: Outage | None = None

    @property
    def outage(self) -> Outage | None:
        """The outage under way, if there is one."""
        return self._outage

    def enter(self) -> Outage | None:
        """What `failed` wants to be given; a `StoreError` unless the server answers or it is time for a probe."""
        outage = self._outage
        if outage is None:
            return None
        now = self._clock()
        if now < outage.probe_at:
            raise StoreError(f"{outage.cause}; tried again in {outage.probe_at - now:.1f} s")
        # This call is the probe. Others go on failing at once meanwhile, also if it never comes back.
        probe = self._outage = outage._replace(probe_at=now + self._wait_s(outage.failures))
        return probe

    def failed(self, outage: Outage | None, cause: str) -> None:
        """Count a failure. Calls that were under way together fail together, and that is one."""
        if self._outage is outage:
            failures = 1 if outage is None else outage.failures + 1
            self._outage = Outage(cause, failures, self._clock() + self._wait_s(failures - 1))

    def succeeded(self, outage: Outage | None) -> None:
        """A probe that is answered ends the outage. A call from before it is no sign that it is over."""
        if outage is not None:
            self._outage = None

    def _wait_s(self, failures: int) -> float:
        # HAZARD: after nine hours of failures the power alone would be beyond a float.
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures, 10))
        return wait_s * (1 - JITTER + 2 * JITTER * self._chance())
