"""A check of what a table allowed that needs no clock, no order and no oracle.

An allowed decision tells what it wrote: the time that was asked for plus `reset_us` is the new arrival time of a
bucket, and the end of a window. Whatever was forgotten, killed or late: two allowed hits of a key never wrote arrival
times less than an interval apart, and no window was given more than its limit.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TypeAlias

from shmlimit import FixedWindow, Policy, SlidingCounter
from shmlimit.policies.base import Decision
from shmlimit.policies.bucket import Bucket

Key: TypeAlias = tuple[int, int]
"""Which policy of a list, which key."""


def what_was_written(now_us: int, decision: Decision) -> int:
    """What an allowed hit of one unit, asked for as of `now_us`, wrote."""
    assert decision.allowed
    return now_us + decision.reset_us


def too_many(policies: list[Policy], hits: list[tuple[Key, int]]) -> set[Key]:
    """The keys that were allowed more than their policy allows."""
    written: defaultdict[Key, list[int]] = defaultdict(list)
    for key, value in hits:
        written[key].append(value)
    return {key for key, values in written.items() if not _is_sound(policies[key[0]], values)}


def _is_sound(policy: Policy, values: list[int]) -> bool:
    if isinstance(policy, Bucket):
        interval_us, rest = divmod(policy.period_us, policy.limit)
        assert rest == 0, "arrival times must be whole microseconds"
        values = sorted(values)
        return all(b - a >= interval_us for a, b in itertools.pairwise(values))
    assert isinstance(policy, FixedWindow | SlidingCounter)
    return max(Counter(values).values()) <= policy.limit
