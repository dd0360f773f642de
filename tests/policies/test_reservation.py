"""TokenBucket.reserve, cancel, tokens and wait_us."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmlimit.policies import Reservation, TokenBucket

T0 = 1_767_225_600_000_000
TENTH = 100_000
FOREVER = 10**15
settings.register_profile("reservations", deadline=None, max_examples=200)
PROFILE = settings.get_profile("reservations")


def reserve_all(policy, requests, state=None):
    """Reserve (now, cost) each, all times in tenths of a second from T0; the delays' ends and the state."""
    made = []
    for now, cost in requests:
        reservation, state = policy.reserve(state, T0 + now * TENTH, cost, FOREVER)
        made.append(reservation)
    return made, state


def ends(reservations):
    return [None if made.act_at_us is None else (made.act_at_us - T0) // TENTH for made in reservations]


def test_simple_reserve():
    """Ten a second, burst 2: the first two at once, the next in 0.2 s, and those asked for at 0.3 s at 0.4 s."""
    made, _ = reserve_all(TokenBucket(10, 1, 2), [(0, 2), (0, 2), (3, 2)])
    assert ends(made) == [0, 2, 4]
    assert made[0] == Reservation(True, 2, 0, T0)
    assert made[1] == Reservation(True, 2, 200_000, T0 + 200_000)
    assert all(made)


def test_mix():
    """Takes and reservations share one level: no take passes in a debt."""
    policy = TokenBucket(10, 1, 2)
    refused, state = policy.reserve(None, T0, 3, FOREVER)
    assert refused == Reservation(False, 3, None, None)
    assert not refused
    _, state = policy.reserve(state, T0, 2, FOREVER)
    assert not policy.decide(state, T0 + TENTH, 2)[0]
    made, state = policy.reserve(state, T0 + TENTH, 2, FOREVER)
    assert ends([made]) == [2]
    assert not policy.decide(state, T0 + TENTH, 1)[0]
    assert policy.decide(state, T0 + 3 * TENTH, 1)[0]


def test_max_wait():
    """A reservation is granted up to exactly the longest wait; a refused one tells its wait and takes nothing."""
    policy = TokenBucket(10, 1, 2)
    _, state = policy.reserve(None, T0, 2, 0)
    refused, same = policy.reserve(state, T0, 1, TENTH - 1)
    assert refused == Reservation(False, 1, TENTH, None)
    assert same is state
    granted, after = policy.reserve(state, T0, 1, TENTH)
    assert granted == Reservation(True, 1, TENTH, T0 + TENTH)
    assert policy.tokens(after, T0) == -1
    assert policy.cancel(after, refused, T0) is after


def test_tokens_and_wait():
    """`tokens` is the exact level, negative in a debt; `wait_us` is rounded up, 0 now and None never."""
    policy = TokenBucket(3, 1, 5)
    assert policy.tokens(None, T0) == 5
    _, state = policy.decide(None, T0, 5)
    assert policy.tokens(state, T0 + 1) == Fraction(3, 10**6)
    assert policy.tokens(state, T0 - 1) == Fraction(-3, 10**6)
    assert [policy.wait_us(state, T0, cost) for cost in (0, 1, 2, 5, 6)] == [0, 333_334, 666_667, 1_666_667, None]
    assert policy.wait_us(None, T0, 5) == 0
    _, state = policy.reserve(state, T0, 4, FOREVER)
    assert policy.tokens(state, T0) == -4
    assert policy.wait_us(state, T0, 0) == 1_333_334
    for bad in (-1, 1.0, True, None):
        with pytest.raises(ValueError, match="cost"):
            policy.wait_us(state, T0, bad)
        with pytest.raises(ValueError, match="cost"):
            policy.reserve(state, T0, bad, FOREVER)


def test_reserved_delays_are_exact_thirds():
    """A third of a second is never rounded on the way: the third reservation of three a second is due after 2/3 s."""
    policy, state, delays = TokenBucket(3, 1, 1), None, []
    for _ in range(5):
        made, state = policy.reserve(state, T0, 1, FOREVER)
        delays.append(made.delay_us)
    assert delays == [0, 333_334, 666_667, 1_000_000, 1_333_334]


def test_cost_0_changes_nothing():
    """A reservation of nothing waits for a debt to end, and leaves the state as it is."""
    policy = TokenBucket(10, 1, 2)
    _, state = reserve_all(policy, [(0, 2), (0, 1)])
    made, same = policy.reserve(state, T0, 0, FOREVER)
    assert made == Reservation(True, 0, TENTH, T0 + TENTH)
    assert same is state
    assert policy.cancel(state, made, T0) is state
    decision, same = policy.decide(state, T0, 0)
    assert (decision.allowed, decision.remaining, decision.retry_after_us) == (False, 0, TENTH)
    assert same is state
    assert decision.reset_us == 3 * TENTH
    assert decision.next_us == 2 * TENTH


def test_cancel_the_last():
    """A cancelled reservation is as if it had never been."""
    policy = TokenBucket(10, 1, 2)
    made, state = reserve_all(policy, [(0, 2), (0, 2)])
    state = policy.cancel(state, made[1], T0 + TENTH)
    assert policy.tokens(state, T0 + TENTH) == 1
    assert "pending" not in state
    again, _ = reserve_all(policy, [(1, 2)], state)
    assert ends(again) == [2]


def test_cancel_too_late():
    """One microsecond before `act_at_us` it can be cancelled; from then on it has acted."""
    policy = TokenBucket(10, 1, 2)
    made, state = reserve_all(policy, [(0, 2), (0, 2)])
    at_us = made[1].act_at_us
    assert policy.tokens(policy.cancel(state, made[1], at_us - 1), at_us) == 2
    for now_us in (at_us, at_us + 1):
        assert policy.cancel(state, made[1], now_us) is state
    assert policy.tokens(state, at_us) == 0


def test_what_had_no_delay_has_acted():
    """A reservation that could act at once can't be cancelled, not even by a clock that went back."""
    policy = TokenBucket(10, 1, 2)
    made, state = reserve_all(policy, [(0, 2)])
    for now_us in (T0 - 1, T0, T0 + 1):
        assert policy.cancel(state, made[0], now_us) is state


def test_cancel_by_a_clock_that_went_back():
    """Once the state has seen the acting time, a clock that goes back doesn't make it cancellable again."""
    policy = TokenBucket(10, 1, 2)
    made, state = reserve_all(policy, [(0, 2), (0, 1)])
    _, state = policy.decide(state, T0 + 2 * TENTH)
    assert policy.cancel(state, made[1], T0) is state


def test_reserve_by_a_clock_that_went_back():
    """What is reserved for a time that the state has seen already has acted."""
    policy = TokenBucket(10, 1, 2)
    _, state = reserve_all(policy, [(10, 2)])
    made, state = policy.reserve(state, T0, 1, FOREVER)
    assert ends([made]) == [11]
    assert policy.tokens(policy.cancel(state, made, T0), T0 + 10 * TENTH) == 0
    _, state = reserve_all(policy, [(10, 1)])
    made, state = policy.reserve(state, T0 + 8 * TENTH, 1, FOREVER)
    assert ends([made]) == [10]
    assert policy.cancel(state, made, T0 + 8 * TENTH) is state


def test_cancel_twice_gives_back_once():
    """The second cancel of one reservation finds nothing to give back."""
    policy = TokenBucket(10, 1, 4)
    made, state = reserve_all(policy, [(0, 4), (0, 2), (0, 3)])
    once = policy.cancel(state, made[1], T0)
    assert policy.cancel(once, made[1], T0) is once


def test_cancel_of_a_forgotten_state():
    """Where the state is gone or another's there is nothing to give back: the answer is a fresh state."""
    policy = TokenBucket(10, 1, 2)
    made, _ = reserve_all(policy, [(0, 2), (0, 2)])
    for state in (None, {"kind": "gcra", "tat": 0}):
        assert policy.cancel(state, made[1], T0) == policy.fresh(T0)


def test_cancel_in_the_middle():
    """What fits the bucket by the time the later ones act is given back, and they keep their times."""
    policy = TokenBucket(10, 1, 4)
    made, state = reserve_all(policy, [(0, 4), (0, 3), (0, 1), (0, 1)])
    assert ends(made) == [0, 3, 4, 5]
    state = policy.cancel(state, made[3], T0 + TENTH)
    state = policy.cancel(state, made[1], T0 + TENTH)
    assert policy.tokens(state, T0 + TENTH) == 0
    made, state = reserve_all(policy, [(1, 3)], state)
    assert ends(made) == [4]


def test_cancel_grants_no_more_than_fits():
    """Burst 5: a cancelled 5 before a later 5 gives nothing back, or 10 would act at one moment."""
    policy = TokenBucket(10, 1, 5)
    made, state = reserve_all(policy, [(0, 5), (0, 5), (0, 5)])
    assert ends(made) == [0, 5, 10]
    state = policy.cancel(state, made[1], T0)
    assert policy.tokens(state, T0) == -10
    made, _ = reserve_all(policy, [(0, 5)], state)
    assert ends(made) == [15]


def test_a_reservation_before_a_waiting_one():
    """After a cancel the next may act before one that waits, and may take what would have overflowed until then."""
    policy = TokenBucket(10, 1, 4)
    made, state = reserve_all(policy, [(0, 4), (0, 4), (0, 1)])
    assert ends(made) == [0, 4, 5]
    state = policy.cancel(state, made[1], T0)
    assert policy.tokens(state, T0) == -2
    made, state = reserve_all(policy, [(0, 1)], state)
    assert ends(made) == [3]
    assert policy.tokens(state, T0) == -2
    assert state["pending"] == sorted(state["pending"])


def test_a_full_bucket_takes_no_more():
    """Giving back ends at full."""
    policy = TokenBucket(10, 1, 2)
    made, state = reserve_all(policy, [(0, 2), (0, 1), (0, 2)])
    state = policy.cancel(state, made[1], T0)
    state = policy.cancel(state, made[2], T0 + 2 * TENTH)
    assert policy.tokens(state, T0 + 2 * TENTH) == 2
    assert policy.expires_at(state) == T0 + 2 * TENTH
    made, state = reserve_all(policy, [(10, 2), (10, 1), (10, 2)])
    state = policy.cancel(state, made[1], T0 + 10 * TENTH)
    state = policy.cancel(state, made[2], T0 + 13 * TENTH - 1)
    assert policy.tokens(state, T0 + 13 * TENTH - 1) == 2
    assert policy.tokens(state, T0 + 12 * TENTH - 1) == 1


def test_shift_moves_what_waits():
    """A shifted state answers as before at shifted times, also while reservations wait."""
    policy = TokenBucket(10, 1, 2)
    _, state = reserve_all(policy, [(0, 2), (0, 1), (0, 2)])
    shifted = policy.shift(state, -TENTH)
    assert policy.expires_at(state) == T0 + 5 * TENTH
    assert policy.expires_at(shifted) == T0 + 4 * TENTH
    for now_us in range(T0, T0 + 6 * TENTH, TENTH // 2):
        assert policy.decide(shifted, now_us - TENTH)[0] == policy.decide(state, now_us)[0]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "reserve", "reserve", "reserve", "cancel"]),
        st.sampled_from([0, 0, 0, 1, 2, 3, 300, 1_000, 5_000, 40_000]),
        st.integers(0, 99),
    ),
    min_size=3,
    max_size=30,
)


@given(st.sampled_from([(1, 1), (2, 1), (3, 1), (7, 5), (7, 2), (1, 60)]), st.integers(1, 9), STEPS)
@PROFILE
def test_never_more_over_any_history(rate, burst, steps):
    """With takes, reservations and cancels mixed, what acts in any window is within burst and rate.

    The window is given the microsecond that rounding the times up can take from it. Also for every step: waits are
    exact, JSON keeps the state, and a cancel gives something back or nothing, up to full.
    """
    limit, milliseconds = rate
    policy = TokenBucket(limit, Fraction(milliseconds, 1000), burst)
    now_us, state, acts = T0, None, []
    for what, later_us, number in steps:
        now_us += later_us
        cost = 1 + number % burst
        waiting = [made for made in acts if made.delay_us and made.act_at_us > now_us]
        if what == "take":
            decision, state = policy.decide(state, now_us, cost)
            if decision:
                acts.append(Reservation(True, cost, 0, now_us))
        elif what == "reserve":
            wait_us = policy.wait_us(state, now_us, cost)
            made, state = policy.reserve(state, now_us, cost, (0, 20_000, FOREVER)[number % 3])
            assert made.delay_us == wait_us
            if made:
                acts.append(made)
        elif waiting:
            made = waiting[number % len(waiting)]
            before = policy.tokens(state, now_us)
            state = policy.cancel(state, made, now_us)
            assert before <= policy.tokens(state, now_us) <= burst
            acts.remove(made)
        if state is not None:
            assert json.loads(json.dumps(state)) == state
            assert policy.decide(state, policy.expires_at(state), burst)[0]
            if wait_us := policy.wait_us(state, now_us, cost):
                assert policy.decide(state, now_us + wait_us, cost)[0]
                assert not policy.decide(state, now_us + wait_us - 1, cost)[0]
    acts.sort(key=lambda made: made.act_at_us)
    for first in range(len(acts)):
        total = 0
        for made in acts[first:]:
            total += made.cost
            window_us = made.act_at_us - acts[first].act_at_us
            assert total * policy.period_us < burst * policy.period_us + (window_us + 1) * limit


@given(st.integers(1, 9), STEPS)
@PROFILE
def test_without_cancels_a_reservation_is_a_take_to_come(burst, steps):
    """Reserving follows x/time/rate: one level that goes negative, and the time at which it is back at zero."""
    policy = TokenBucket(7, Fraction(1, 200), burst)
    now_us, state, level, at_us = T0, None, Fraction(burst), T0
    for what, later_us, number in steps:
        now_us += later_us
        cost = number % (burst + 1)
        level, at_us = min(Fraction(burst), level + (now_us - at_us) * Fraction(7, 5_000)), now_us
        assert policy.tokens(state, now_us) == level
        if what == "take":
            decision, state = policy.decide(state, now_us, cost)
            assert decision.allowed == (cost <= level)
            level -= cost if decision else 0
        else:
            made, state = policy.reserve(state, now_us, cost, FOREVER)
            level -= cost
            assert made.delay_us == max(0, -(level / Fraction(7, 5_000) // 1))
        assert policy.expires_at(state) >= now_us or level == burst
