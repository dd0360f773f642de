"""Taking a charge back out of a state that others may have built on since: never more than it still makes. Pure.

A window counts, so what is taken out is the number. A bucket refills, and a charge that has been made up for meanwhile
is no longer there to be given back. Say the charge moved the time at which the bucket is full from c to c + cost * T.
Without it the bucket is full at c at the earliest; from then on until now, later charges may have found it full, and
have begun anew from their own time. So the time since c, if c is past, is what giving back costs.
"""

from __future__ import annotations

from shmlimit.policies.base import Policy, State
from shmlimit.policies.fixed_window import FixedWindow
from shmlimit.policies.gcra import Gcra
from shmlimit.policies.sliding_counter import SlidingCounter
from shmlimit.policies.token_bucket import TokenBucket


def without(policy: Policy, state: State | None, charged: State, cost: int, now_us: int) -> State | None:
    """`state` without the charge of `cost` that made `charged`; `None` where nothing of it is left.

    No later charge may have been made after `now_us`.
    """
    if state is None:
        return None
    if isinstance(policy, FixedWindow):
        return _of_window(state, charged, cost)
    if isinstance(policy, SlidingCounter):
        return _of_counter(policy, state, charged, cost)
    if isinstance(policy, Gcra):
        units = _units(policy, charged["tat"], cost, now_us)
        return {**state, "tat": state["tat"] - units} if units else None
    if isinstance(policy, TokenBucket):
        full = policy.burst * policy.period_us
        full_at = charged["at_us"] * policy.limit + full - charged["level"]
        units = _units(policy, full_at, cost, max(now_us, state["at_us"]))
        return {**state, "level": min(full, state["level"] + units)} if units else None
    return None


def _of_window(state: State, charged: State, cost: int) -> State | None:
    if state["start_us"] != charged["start_us"]:
        return None
    return {**state, "count": max(0, state["count"] - cost)}


def _of_counter(policy: SlidingCounter, state: State, charged: State, cost: int) -> State | None:
    windows_later = (state["start_us"] - charged["start_us"]) // policy.period_us
    which = {0: "current", 1: "previous"}.get(windows_later)
    return {**state, which: max(0, state[which] - cost)} if which else None


def _units(policy: Gcra | TokenBucket, full_at: int, cost: int, now_us: int) -> int:
    """How far to move the bucket towards full, where the charge made it full at `full_at`."""
    units = cost * policy.period_us
    return max(0, units - max(0, now_us * policy.limit - (full_at - units)))
