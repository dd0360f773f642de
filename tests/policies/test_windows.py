"""The three windows: what they promise on any history, and what was reported of other limiters' windows."""

from __future__ import annotations

import copy
import json
import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlimit.errors import ConfigError
from shmlimit.notation import parse
from shmlimit.policies import FixedWindow, SlidingCounter, SlidingLog

S = 1_000_000
T0 = 1_767_225_600 * S
KINDS = [FixedWindow, SlidingLog, SlidingCounter]
every_kind = pytest.mark.parametrize("kind", KINDS)


def at(policy, *requests):
    """The decisions for (seconds, cost) or seconds, from T0, exact to the microsecond."""
    pairs = [request if isinstance(request, tuple) else (request, 1) for request in requests]
    return policy.simulate([(T0 + round(seconds * S), cost) for seconds, cost in pairs])


def allowed(decisions):
    return [decision.allowed for decision in decisions]


policies = st.builds(
    lambda kind, limit, period_us: kind(limit, Fraction(period_us, S)),
    st.sampled_from(KINDS),
    st.integers(1, 12),
    st.sampled_from([1_000, 1_001, 7_777, 13 * S]),
)


@st.composite
def histories(draw, *, back=False):
    """A policy, and (now_us, cost) on one key."""
    policy = draw(policies)
    period_us = policy.period_us
    step = st.one_of(st.integers(0, period_us // 2), st.integers(0, 3 * period_us), st.just(0))
    if back:
        step |= st.integers(-period_us, 0)
    costs = st.integers(0, policy.limit + 1)
    now_us, history = T0 + draw(st.integers(0, period_us)), []
    for moved, cost in draw(st.lists(st.tuples(step, costs), max_size=30)):
        now_us += moved
        history.append((now_us, cost))
    return policy, history


@given(histories(back=True))
def test_waits_are_exact(policy_and_history):
    """After the wait the same cost passes, one microsecond earlier it doesn't; `next_us` frees one more unit."""
    policy, history = policy_and_history
    state = None
    for now_us, cost in history:
        decision, state = policy.decide(state, now_us, cost)
        assert 0 <= decision.remaining <= policy.limit
        if decision.retry_after_us:
            assert policy.decide(state, now_us + decision.retry_after_us, cost)[0].allowed
            assert not policy.decide(state, now_us + decision.retry_after_us - 1, cost)[0].allowed
        if decision.next_us:
            later = policy.decide(state, now_us + decision.next_us, 0)[0]
            assert later.remaining > decision.remaining
            assert policy.decide(state, now_us + decision.next_us - 1, 0)[0].remaining <= decision.remaining
        else:
            assert decision.remaining == policy.limit
        whole = policy.decide(state, now_us + decision.reset_us, 0)[0]
        assert (whole.remaining, whole.reset_us) == (policy.limit, 0)


@given(histories())
def test_never_more_than_the_limit(policy_and_history):
    """A log admits at most `limit` in every window of a period; the others in each window from the epoch."""
    policy, history = policy_and_history
    hits = [
        (now_us, cost)
        for (now_us, cost), decision in zip(history, policy.simulate(history), strict=True)
        if decision.allowed and cost
    ]
    for start_us, _ in hits:
        begin_us = start_us if isinstance(policy, SlidingLog) else start_us // policy.period_us * policy.period_us
        assert sum(cost for now_us, cost in hits if begin_us <= now_us < begin_us + policy.period_us) <= policy.limit


@given(histories())
def test_counter_is_never_laxer_than_its_definition(policy_and_history):
    """The weighted sum, exact and not rounded, never exceeds the limit after a hit that passed."""
    policy, history = policy_and_history
    counter = SlidingCounter(policy.limit, Fraction(policy.period_us, S))
    counts: dict[int, int] = {}
    for (now_us, cost), decision in zip(history, counter.simulate(history), strict=True):
        window = now_us // policy.period_us
        if decision.allowed and cost:
            counts[window] = counts.get(window, 0) + cost
            left = Fraction((window + 1) * policy.period_us - now_us, policy.period_us)
            assert counts.get(window - 1, 0) * left + counts[window] <= policy.limit


@given(histories(back=True))
def test_steps_back_grant_no_extra(policy_and_history):
    """What passes with steps back would, too, if the clock had stood still at the latest hit."""
    policy, history = policy_and_history
    state, latest_us, stood = None, 0, []
    for now_us, cost in history:
        decision, state = policy.decide(state, now_us, cost)
        if decision.allowed and cost:
            latest_us = max(latest_us, now_us)
            stood.append((latest_us, cost))
    if not isinstance(policy, SlidingCounter):  # it may pass a little less, and then has more room later
        assert all(policy.simulate(stood))


@given(histories(back=True))
def test_states(policy_and_history):
    """JSON and back is an equal state; a denial and cost 0 return the state itself; at `expires_at` it is fresh."""
    policy, history = policy_and_history
    state = None
    for now_us, cost in history:
        decision, after = policy.decide(state, now_us, cost)
        assert json.loads(json.dumps(after)) == after
        if state is not None and not (decision.allowed and cost):
            assert after is state
        state = after
        expires_us = policy.expires_at(state)
        if expires_us:
            assert policy.decide(state, expires_us, 1) == policy.decide(None, expires_us, 1)
            if decision.allowed and cost:
                assert policy.decide(state, expires_us - 1, 0)[0].remaining < policy.limit


@given(histories(), st.integers(-(10**9), 10**9))
def test_shift(policy_and_history, delta_us):
    """A shifted state answers no earlier than the state would have; by whole periods exactly alike."""
    policy, history = policy_and_history
    state = None
    for now_us, cost in history:
        _, state = policy.decide(state, now_us, cost)
    state = state or policy.fresh(T0)
    now_us = history[-1][0] if history else T0
    whole_us = delta_us // policy.period_us * policy.period_us
    assert policy.decide(policy.shift(state, whole_us), now_us + whole_us, 1)[0] == policy.decide(state, now_us, 1)[0]
    moved = policy.decide(policy.shift(state, delta_us), now_us + delta_us, policy.limit)[0]
    was = policy.decide(state, now_us, policy.limit)[0]
    assert moved.retry_after_us >= was.retry_after_us
    assert moved.retry_after_us < was.retry_after_us + policy.period_us or was.retry_after_us == 0


@every_kind
@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        [],
        "fixed",
        {"kind": "gcra", "tat": 5},
        {"kind": "fixed", "start_us": True, "count": 1},
        {"kind": "fixed", "start_us": 1.0, "count": 1},
        {"kind": "fixed", "count": 1},
        {"kind": "sliding-log"},
        {"kind": "sliding-log", "hits": [[1, 2, 3]]},
        {"kind": "sliding-log", "hits": [[2, 1], [1, 1]]},
        {"kind": "sliding-log", "hits": [["1", 1]]},
        {"kind": "sliding-counter", "start_us": 0, "previous": 1},
    ],
    ids=str,
)
def test_a_state_of_another_shape_is_fresh(kind, state):
    """It counts as none, expires at once, and a shift leaves it alone."""
    policy = kind(5, 60)
    assert policy.decide(state, T0, 2)[0] == policy.decide(None, T0, 2)[0]
    if state is not None:
        assert policy.expires_at(state) == 0
        assert policy.shift(state, S) is state


@every_kind
def test_values(kind):
    """Windows are values: equal by class and numbers, hashable, and copies and pickles are equal."""
    policy = kind(10, 60)
    assert policy == kind(10, 60.0)
    assert hash(policy) == hash(kind(10, 60))
    assert policy not in {kind(10, 61), kind(11, 60), *(other(10, 60) for other in KINDS if other is not kind)}
    assert pickle.loads(pickle.dumps(policy)) == copy.copy(policy) == copy.deepcopy(policy) == policy
    assert eval(repr(policy), {kind.__name__: kind}) == policy
    assert parse(str(policy)) == policy
    assert (policy.quota, policy.window_us) == (10, 60 * S)
    with pytest.raises(AttributeError):
        policy.limit = 11


@every_kind
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0, 60), "limit"),
        ((10**9 + 1, 60), "limit"),
        ((True, 60), "limit"),
        ((1, 0), "period"),
        ((1, 10**10), "period"),
    ],
)
def test_bad_numbers(kind, arguments, field):
    """Numbers that can't work are a ConfigError that names the field."""
    with pytest.raises(ConfigError, match=field):
        kind(*arguments)


# ---- what was reported of others -------------------------------------------------------------------------------------


def test_cost_above_the_limit_in_a_log():
    """In limits#151, #152: a cost above the limit got through a sliding log."""
    first, second, third = at(parse("sliding-log 10/minute"), (0, 5), (0, 100), (0, 5))
    assert (first.allowed, third.allowed) == (True, True)
    assert (second.allowed, second.retry_after_us) == (False, None)


def test_refused_cost_takes_nothing():
    """In limits 5.8, django-ratelimit#215: a refused cost was counted all the same."""
    decisions = at(parse("fixed 10/minute"), (0, 8), (0, 5), (0, 1))
    assert [(d.allowed, d.remaining) for d in decisions] == [(True, 2), (False, 2), (True, 1)]


@every_kind
@pytest.mark.parametrize("cost", [-5, 1.5, "1", True, None], ids=repr)
def test_bad_costs(kind, cost):
    """In limits 5.8: a negative cost filled the quota beyond the limit. Here it is a ValueError."""
    with pytest.raises(ValueError, match="cost"):
        kind(10, 60).decide(None, T0, cost)


def test_wait_is_measured_from_the_oldest_hit():
    """In limits#200: the wait was measured from the newest hit."""
    assert at(SlidingLog(2, 60), 0, 10, 20)[-1].retry_after == 40.0


def test_seam():
    """slowapi#2: nobody told them that a fixed window lets two windows through at a seam."""
    requests = [(0, 1), *[(59, 1)] * 20, *[(60.01, 1)] * 20]
    for policy, groups in ((FixedWindow(10, 60), [1, 9, 10]), (SlidingLog(10, 60), [1, 9, 1])):
        passed = allowed(at(policy, *requests))
        assert [sum(passed[:1]), sum(passed[1:21]), sum(passed[21:])] == groups


def test_last_tick_of_a_window():
    """asgi-ratelimit 0.10: in the last tick of a window the wait was 0, which reads as allowed."""
    *_, last, next_ = at(FixedWindow(2, 60), 0, 1, 59.999999, 60)
    assert (last.allowed, last.retry_after_us) == (False, 1)
    assert next_.allowed


def test_wait_is_what_is_left_of_the_window():
    """asgi-ratelimit#27, httprate#47, fastify-rate-limit#301: the whole window was given as the wait."""
    assert at(FixedWindow(2, 60), 0, 0, 55)[-1].retry_after == 5.0
    assert at(FixedWindow(5, 60), *[0] * 5, 55)[-1].retry_after == 5.0


def test_window_of_a_year():
    """express-rate-limit#546: long windows overflowed 2**31 ms and passed at once."""
    year = FixedWindow(5, 31_536_000)
    *first, sixth = at(year, *range(0, 60, 10))
    assert allowed(first) == [True] * 5
    assert not sixth.allowed
    assert T0 + 50 * S + sixth.retry_after_us == (T0 // year.period_us + 1) * year.period_us


@every_kind
@pytest.mark.parametrize("turn_us", [2**32 * 1000, 2**53])
def test_round_numbers_of_the_clock(kind, turn_us):
    """In haproxy times across 2**32 ms never expired."""
    policy = kind(1, 60)
    _, state = policy.decide(None, turn_us - 1)
    denied, _ = policy.decide(state, turn_us)
    if not denied.allowed:
        assert policy.decide(state, turn_us + denied.retry_after_us)[0].allowed


def test_counter_that_was_idle():
    """In haproxy 5705a6e3b: a window counter that was idle for long reported a huge excess."""
    assert at(SlidingCounter(10, 1), *[0] * 10, 10)[-1].remaining == 9


def test_weight_is_not_cut_to_0():
    """xFW#79: the weighed part was truncated to 0."""
    assert allowed(at(SlidingCounter(1, 1), 0.9, 1.1)) == [True, False]


def test_spent_counter_of_1():
    """A spent `sliding-counter 1/minute` is whole again only at the end of the next window, as its docstring says."""
    first, second, third = at(SlidingCounter(1, 60), 0, 1, 120)
    assert (first.allowed, third.allowed) == (True, True)
    assert second.retry_after == 119.0


@every_kind
def test_threshold_and_first(kind):
    """graph_attack#46, lua-resty-limit-traffic#17: of 6 at once exactly 5 pass, and the first leaves 4."""
    decisions = at(kind(5, 60), *[0] * 6)
    assert allowed(decisions) == [True] * 5 + [False]
    assert [d.remaining for d in decisions] == [4, 3, 2, 1, 0, 0]
