"""Which policies fit the table, and the numbers that the C helper needs of one.

GCRA runs in units of 1/d µs. With d = limit / gcd(limit, period_us) the emission interval is a whole number of them and
every decision is exact. The state word has 11 bits for the fraction, so d is at most 2048; beyond that the interval is
rounded up to 1/2048 µs, which only ever denies later.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from shmlimit.errors import ConfigError
from shmlimit.policies import Gcra, TokenBucket
from shmlimit.policies.base import Policy

FRACTION_MAX = 2048
WINDOW_MAX_US = 3653 * 86_400 * 1_000_000  # ten years with their leap days


class Numbers(NamedTuple):
    """Emission interval in 1/`denominator` µs."""

    denominator: int
    interval: int


def gcra_numbers(limit: int, period_us: int) -> Numbers:
    """The units in which a bucket of `limit` per `period_us` is counted."""
    common = gcd(limit, period_us)
    if limit // common <= FRACTION_MAX:
        return Numbers(limit // common, period_us // common)
    return Numbers(FRACTION_MAX, -(-period_us * FRACTION_MAX // limit))


def misfit(policy: Policy) -> str | None:
    """Why the table can't keep `policy`, as a text that names the bound; `None` when it can."""
    if type(policy) not in {TokenBucket, Gcra}:
        return f"it keeps TokenBucket and Gcra, not {type(policy).__name__}"
    if policy.window_us > WINDOW_MAX_US:
        return f"a bucket must refill within ten years, not {policy.window_us / 86_400e6:.0f} days"
    denominator, interval = gcra_numbers(policy.limit, policy.period_us)
    exact = policy.period_us * denominator  # of interval * limit
    if (interval * policy.limit - exact) * 100 >= exact:
        return (
            f"an interval of {policy.period_us / policy.limit:.3g} µs a unit would be changed by 1 % or more when "
            f"it is rounded up to 1/{FRACTION_MAX} µs"
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
