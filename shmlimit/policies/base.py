"""THE RULES that every policy keeps. Read this page first; each policy is then one short file.

1. **Pure.** A policy is a frozen value, and what it does is a function of its arguments: no clock, no I/O, no floats,
   no randomness. The same history gives the same decisions everywhere, so a store only has to swap states atomically.
2. **Time** is an integer count of microseconds (`_us`) since the Unix epoch and always a parameter.
3. **Exact, rounded only in answers.** Levels and waits are kept as exact fractions (integers over a fixed
   denominator). `remaining` is rounded down; `reset_us`, `retry_after_us` and `next_us` are rounded up.
4. **A denial changes nothing**: it returns the state that it was given (a fresh one where there was none). So a store
   never writes for a refused request.
5. **Cost** is an integer >= 0. Cost 0 reports and changes nothing. A cost above the quota can never succeed: it is
   denied, `retry_after_us` is `None`, and nothing is written.
6. **A wait works.** After `retry_after_us` the same cost succeeds if nothing else comes; one microsecond earlier it
   is still denied.
7. **A clock that goes backwards never grants extra.** A state is read on its own time line: a key opens when it would
   have opened by the clock that wrote the state. Waits are measured from the `now_us` that was given. A fresh state
   has no line yet: it stays fresh at earlier times, too.
8. **State** is plain data with its kind in it; what JSON makes of it and back is an equally good state. A state of
   another shape counts as fresh, and `None` is a fresh one throughout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeGuard

from shmlimit.errors import ConfigError

State: TypeAlias = Mapping[str, Any]
"""What a policy keeps for one key: a JSON object, e.g. `{"kind": "gcra", "tat": 17672256000000000}`."""

Period: TypeAlias = "int | float | Fraction | timedelta"
"""Seconds (a `float` means its shortest decimal text, so 0.1 is a tenth), or a `timedelta`."""

LIMIT_MAX = 10**9
PERIOD_MIN_US = 1_000
PERIOD_MAX_US = 10**15
WINDOW_MAX_US = 10**15
US_PER_S = 1_000_000

DEFAULT_KIND = "token-bucket"
"""The algorithm that notation means when it names none."""

UNITS = (
    (604_800 * US_PER_S, "week", "w"),
    (86_400 * US_PER_S, "day", "d"),
    (3_600 * US_PER_S, "hour", "h"),
    (60 * US_PER_S, "minute", "min"),
    (US_PER_S, "second", "s"),
    (1_000, "ms", "ms"),
    (1, "us", "us"),
)
"""Microseconds, name for one of it, suffix for several: what `str(policy)` writes, the largest that divides first."""


class Decision(NamedTuple):
    """The answer for one request.

    `limit` is the quota (what a key may take at once), `remaining` what is left after this request, `reset_us` the time
    until the quota is whole again, `retry_after_us` 0 when allowed, else the exact wait after which the same cost
    succeeds (`None`: never), `next_us` the wait after which more than `remaining` can be used (0 when the quota is
    whole). All waits are microseconds from the time that was asked for. A decision is true when it allows.
    """

    allowed: bool
    limit: int
    remaining: int
    reset_us: int
    retry_after_us: int | None
    next_us: int

    def __bool__(self) -> bool:
        """Whether the request may pass: a tuple is otherwise always true, and `if decision:` would let everyone in."""
        return self.allowed

    @property
    def reset_after(self) -> float:
        """Seconds until the quota is whole again."""
        return self.reset_us / US_PER_S

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before the same cost succeeds: 0.0 when allowed, `None` for never."""
        return None if self.retry_after_us is None else self.retry_after_us / US_PER_S


class Policy(ABC):
    """The algorithm and its numbers: a frozen, hashable value.

    Subclasses are frozen dataclasses (`init=False, repr=False`) with the integer fields `limit`, `period_us` and, for
    buckets, `burst`. Equal policies share their states, so two guards with equal policies and the same key share a
    count. `kind` is the algorithm's word, in states and in notation.

    Raises `ConfigError` that names the field and the bound for numbers that can't work.
    """

    kind: ClassVar[str]
    _fields: ClassVar[tuple[str, ...]]
    limit: int
    period_us: int
    _hash: int

    def __init__(self, limit: int, period: Period) -> None:
        self._set(limit=check_int("limit", limit, 1, LIMIT_MAX), period_us=period_to_us(period))

    def _set(self, **numbers: int) -> None:
        """Fill a frozen instance. PERF: policies are keys of dicts for each request, so the hash is made here, once."""
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        object.__setattr__(self, "_hash", hash(tuple(numbers.values())))

    def __hash__(self) -> int:
        return self._hash

    def _arguments(self) -> dict[str, Any]:
        """What the constructor takes to make an equal policy."""
        seconds = Fraction(self.period_us, US_PER_S)
        return {"limit": self.limit, "period": int(seconds) if seconds.denominator == 1 else seconds}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._arguments().items())})"

    def __str__(self) -> str:
        """Notation that parses back to an equal policy, e.g. `gcra 5/30s`."""
        algorithm = "" if self.kind == DEFAULT_KIND else f"{self.kind} "
        return f"{algorithm}{self.limit}/{period_text(self.period_us)}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle through the constructor: the checks run again, and no hash is carried along."""
        return type(self), tuple(self._arguments().values())

    @property
    @abstractmethod
    def quota(self) -> int:
        """What a key may take at once: a bucket's burst, a window's limit."""

    @property
    @abstractmethod
    def window_us(self) -> int:
        """The time in which the whole quota is granted; for buckets the refill time from empty, rounded up."""

    @abstractmethod
    def fresh(self, now_us: int) -> State:
        """The state of a key that was never seen, as of `now_us`."""

    @abstractmethod
    def decide(self, state: State | None, now_us: int, cost: int = 1) -> tuple[Decision, State]:
        """The decision for a request of `cost` units at `now_us`, and the state after it.

        Raises `ValueError` for a cost that is negative or not an integer.
        """

    @abstractmethod
    def expires_at(self, state: State) -> int:
        """The first microsecond from which on `state` equals a fresh one: 0 for a state of another shape."""

    @abstractmethod
    def shift(self, state: State, delta_us: int) -> State:
        """`state` with all its times moved by `delta_us`, for a store whose clock was set back.

        A state of another shape is returned as it is: it counts as fresh at any time.
        """

    def _own(self, state: object, now_us: int) -> State:
        """`state` itself, or a fresh one for `None` and for a state of another shape."""
        return state if self._is_own(state) else self.fresh(now_us)

    def _is_own(self, state: object) -> TypeGuard[State]:
        """Whether `state` is of this kind, with an integer in each of `_fields`; a `bool` or a `float` is none."""
        # PERF: plain, since stores written in Python come here twice a decision.
        if not (type(state) is dict or isinstance(state, Mapping)) or state.get("kind") != self.kind:
            return False
        for name in self._fields:  # noqa: SIM110
            if type(state.get(name)) is not int:
                return False
        return True

    def simulate(self, requests: Iterable[tuple[int, int]]) -> list[Decision]:
        """The decisions for a history of `(now_us, cost)` on one key that starts fresh."""
        decisions: list[Decision] = []
        state: State | None = None
        for now_us, cost in requests:
            decision, state = self.decide(state, now_us, cost)
            decisions.append(decision)
        return decisions


def check_int(field: str, value: object, low: int, high: int) -> int:
    """`value` as an integer within `low`…`high`, or a `ConfigError` that names `field` and the bound."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{field} must be an integer, not {value!r}")
    if not low <= value <= high:
        # HAZARD: the decimal text of an integer with thousands of digits is a ValueError of its own.
        shown = str(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"
        raise ConfigError(f"{field} must be within {low} and {high}, not {shown}")
    return int(value)


def check_cost(cost: object) -> int:
    """`cost` as an integer >= 0, or a `ValueError`."""
    if isinstance(cost, bool) or not isinstance(cost, int):
        raise ValueError(f"cost must be an integer, not {cost!r}")
    if cost < 0:
        raise ValueError(f"cost must be 0 or more, not {cost}; a negative cost would fill the quota up")
    return cost


def period_to_us(period: Period) -> int:
    """A period in whole microseconds, or a `ConfigError`: it must be exact and within 1 ms … 10**9 s."""
    if isinstance(period, timedelta):
        period_us = Fraction(period // timedelta(microseconds=1))
    elif isinstance(period, bool) or not isinstance(period, int | float | Fraction):
        raise ConfigError(f"period must be seconds (int, float, Fraction) or a timedelta, not {period!r}")
    elif isinstance(period, float):
        # The text of the number itself: a subclass (numpy's float64) may write its repr in another way.
        decimal = Decimal(float.__repr__(period))
        if not decimal.is_finite():
            raise ConfigError(f"period must be a finite number of seconds, not {period!r}")
        period_us = Fraction(decimal) * US_PER_S
    else:
        period_us = Fraction(period) * US_PER_S
    if period_us.denominator != 1:
        raise ConfigError(f"period must be a whole number of microseconds, not {period!r} seconds")
    if not PERIOD_MIN_US <= period_us <= PERIOD_MAX_US:
        shown = repr(period) if period_us.numerator.bit_length() <= 256 else "a number far outside"
        raise ConfigError(f"period must be within 1 ms and 10**9 seconds, not {shown}")
    return int(period_us)


def period_text(period_us: int) -> str:
    """A period as notation writes it, exact to the microsecond: `minute`, `30s`, `1500ms`."""
    size, one, suffix = next(unit for unit in UNITS if period_us % unit[0] == 0)
    count = period_us // size
    return one if count == 1 else f"{count}{suffix}"
