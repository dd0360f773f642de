"""Giving a charge back: never too much, whatever others did meanwhile, and not less than need be."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shmlimit import FixedWindow, Gcra, Policy, SlidingCounter, SlidingLog, TokenBucket
from shmlimit.stores._give_back import without

T0 = 1_767_225_600_000_000  # 2026-01-01
S = 1_000_000
KINDS = [TokenBucket, Gcra, FixedWindow, SlidingCounter]
AMPLE = settings(deadline=None, max_examples=300)

policies = st.builds(
    lambda kind, limit, period_us: kind(limit, period_us / S),
    st.sampled_from(KINDS),
    st.integers(1, 12),
    st.sampled_from([1_000, 30_000, 700_000, 60 * S]),
)


def charge(policy: Policy, state: Any, now_us: int, cost: int) -> Any:
    decision, after = policy.decide(state, now_us, cost)
    return after if decision.allowed and cost else state


def charges(policy: Policy) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(step of the clock, cost)."""
    step = st.one_of(st.integers(0, 2 * policy.period_us // policy.limit), st.integers(0, 2 * policy.window_us))
    return st.lists(st.tuples(step, st.integers(1, policy.quota)), max_size=6)


@AMPLE
@given(data=st.data(), policy=policies)
def test_never_more_than_without_the_charge(data: st.DataObject, policy: Policy) -> None:
    """After any charges before and behind it, a key that one was given back to has at no time more than if that had
    never been; a window has just as much, and a bucket is full later by at most the time that giving back took.
    """
    now_us, state = T0, None
    for step, cost in data.draw(charges(policy)):
        now_us += step
        state = charge(policy, state, now_us, cost)
    cost = data.draw(st.integers(1, policy.quota))
    decision, charged = policy.decide(state, now_us, cost)
    assume(decision.allowed)
    charged_us, never, ours = now_us, state, charged
    for step, other in data.draw(charges(policy)):
        now_us += step
        if policy.decide(ours, now_us, other)[0].allowed:
            ours, never = charge(policy, ours, now_us, other), charge(policy, never, now_us, other)
    now_us += data.draw(st.integers(0, policy.window_us))
    given_back = without(policy, ours, charged, cost, now_us)
    given_back = ours if given_back is None else given_back
    for later_us in [*data.draw(st.lists(st.integers(0, 2 * policy.window_us), max_size=5)), 0]:
        wanted, got = (policy.decide(one, now_us + later_us, 0)[0] for one in (never, given_back))
        assert got.remaining <= wanted.remaining
        assert got.reset_us >= wanted.reset_us
        if isinstance(policy, FixedWindow | SlidingCounter):
            assert got == wanted
        else:
            assert got.reset_us <= wanted.reset_us + now_us - charged_us


def test_used_bucket_gets_all_of_it_back() -> None:
    """A bucket that was not full anyhow loses nothing, however long it took."""
    for kind in (TokenBucket, Gcra):
        policy = kind(10, 60)
        before = charge(policy, None, T0, 7)
        charged = charge(policy, before, T0, 2)
        both = charge(policy, charged, T0, 1)
        assert without(policy, charged, charged, 2, T0 + 40 * S) == before
        assert without(policy, both, charged, 2, T0 + 40 * S) == charge(policy, before, T0, 1)


def test_nothing_is_left_to_give_back() -> None:
    """A key that was forgotten, a window that is over, and a bucket that has made up for the charge: `None`."""
    for kind in KINDS:
        policy = kind(10, 60)
        charged = charge(policy, None, T0, 2)
        assert without(policy, None, charged, 2, T0) is None
        later = charge(policy, charged, T0 + 180 * S, 10)
        assert without(policy, later, charged, 2, T0 + 180 * S) is None


def test_reset_in_between_goes_to_the_bottom() -> None:
    """Where the key began anew meanwhile, with less than the charge in it, what is given back ends at nothing used."""
    for kind in (FixedWindow, SlidingCounter):
        policy = kind(10, 60)
        charged, anew = charge(policy, None, T0, 5), charge(policy, None, T0 + 1, 2)
        given_back = without(policy, anew, charged, 5, T0 + 1)
        assert policy.decide(given_back, T0 + 1, 0)[0].remaining == 10
    policy = TokenBucket(10, 60)
    charged, anew = charge(policy, None, T0, 5), charge(policy, None, T0, 2)
    assert without(policy, anew, charged, 5, T0) == {**anew, "level": 10 * 60 * S}


def test_bucket_that_was_charged_later_than_now() -> None:
    """Another host is ahead: its charge found the bucket full again, so nothing of the first one is left."""
    policy = TokenBucket(10, 60)
    charged = charge(policy, None, T0, 2)
    later = charge(policy, charged, T0 + 30 * S, 1)
    assert without(policy, later, charged, 2, T0) is None


def test_unknown_policies_keep_the_charge() -> None:
    """A policy that it doesn't know is left as it is."""
    policy = SlidingLog(10, 60)
    charged = charge(policy, None, T0, 2)
    assert without(policy, charged, charged, 2, T0) is None
