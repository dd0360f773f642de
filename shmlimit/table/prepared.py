"""Which policies fit the table, and the numbers that the C helper needs of one.

GCRA runs in units of 1/d µs. With d = limit / gcd(limit, period_us) the emission interval is a whole number of them and
every decision is exact. The state word has 11 bits for the fraction, so d is at most 2048; beyond that the interval is
rounded up to 1/2048 µs, which only ever denies later.

Windows are exact. Their words have a short form, with times in milliseconds, and a long one with coarser times and
larger counts; the period must be at least the unit of time.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from shmlimit.errors import ConfigError
from shmlimit.policies import FixedWindow, Gcra, SlidingCounter, TokenBucket
from shmlimit.policies.base import US_PER_S, Policy

FRACTION_MAX = 2048
DAY_US = 86_400 * US_PER_S
REFILL_MAX_US = 3653 * DAY_US  # ten years with their leap days
WINDOW_MAX_US = 366 * DAY_US

# Kinds of state words, as _policies.h numbers them: (kind, largest count, shortest period in µs), the short form first.
GCRA = 0
FORMS: dict[type[Policy], tuple[tuple[int, int, int], ...]] = {
    FixedWindow: ((1, 2**19 - 1, 1_000), (2, 2**31 - 1, 4 * US_PER_S)),
    SlidingCounter: ((3, 2**9 - 1, 1_000), (4, 2**14 - 1, US_PER_S)),
}


class Numbers(NamedTuple):
    """What `struct policy` has of a policy's own: the emission interval is in 1/`denominator` µs."""

    kind: int
    quota: int
    period_us: int
    denominator: int = 1
    interval: int = 1
    tolerance: int = 1


def numbers(policy: Policy) -> Numbers:
    """The numbers of a policy that fits."""
    if isinstance(policy, TokenBucket | Gcra):
        denominator, interval = interval_of(policy.limit, policy.period_us)
        return Numbers(GCRA, policy.quota, policy.period_us, denominator, interval, policy.quota * interval)
    kind = next(kind for kind, limit, period_us in FORMS[type(policy)] if _fits(policy, limit, period_us))
    return Numbers(kind, policy.quota, policy.period_us)


def interval_of(limit: int, period_us: int) -> tuple[int, int]:
    """Denominator and emission interval in which a bucket of `limit` per `period_us` is counted."""
    common = gcd(limit, period_us)
    if limit // common <= FRACTION_MAX:
        return limit // common, period_us // common
    return FRACTION_MAX, -(-period_us * FRACTION_MAX // limit)


@lru_cache(maxsize=1024)  # stores ask it for each request
def misfit(policy: Policy) -> str | None:
    """Why the table can't keep `policy`, as a text that names the bound; `None` when it can."""
    if not isinstance(policy, Policy):
        raise ConfigError(f'a store takes policies, such as shmlimit.parse("10/minute"), not {policy!r}')
    if type(policy) in {TokenBucket, Gcra}:
        return _bucket_misfit(policy)
    forms = FORMS.get(type(policy))
    if forms is None:
        return f"it keeps TokenBucket, Gcra, FixedWindow and SlidingCounter, not {type(policy).__name__}"
    if policy.period_us > WINDOW_MAX_US:
        return f"a window is at most 366 days long, not {policy.period_us / DAY_US:.0f}"
    if not any(_fits(policy, limit, period_us) for _, limit, period_us in forms):
        (_, small, _), (_, large, period_us) = forms
        return (
            f"a {policy.kind} limit is at most {small:,}, or {min(large, 10**9):,} with a period of "
            f"{period_us // US_PER_S} s or more, not {policy.limit:,}"
        )
    return None


def check_fit(policy: Policy) -> None:
    """A `ConfigError` that names the bound and the store to use, where the table can't keep `policy`."""
    reason = misfit(policy)
    if reason is not None:
        raise ConfigError(
            f"{policy} doesn't fit the shared table: {reason}. Keep it in SQLite: shmlimit.stores.sqlite.SqliteStore"
        )


def identity(policy: Policy) -> bytes:
    """What tells one policy from another: kind and numbers, unambiguous."""
    burst = getattr(policy, "burst", "")
    return f"{type(policy).__name__}:{policy.limit}:{policy.period_us}:{burst}".encode("ascii")


def _fits(policy: Policy, limit: int, period_us: int) -> bool:
    return policy.limit <= limit and policy.period_us >= period_us


def _bucket_misfit(policy: Policy) -> str | None:
    if policy.window_us > REFILL_MAX_US:
        return f"a bucket must refill within ten years, not {policy.window_us / DAY_US:.0f} days"
    denominator, interval = interval_of(policy.limit, policy.period_us)
    exact = policy.period_us * denominator  # of interval * limit
    if (interval * policy.limit - exact) * 100 >= exact:
        return (
            f"an interval of {policy.period_us / policy.limit:.3g} µs a unit would be changed by 1 % or more when "
            f"it is rounded up to 1/{FRACTION_MAX} µs"
        )
    return None
