"""TokenBucket and Gcra: constructors, values, states, and what holds for every history."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from datetime import timedelta
from fractions import Fraction
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmlimit.errors import ConfigError
from shmlimit.policies import Decision, Gcra, Policy, TokenBucket, per_day, per_hour, per_minute, per_second

KINDS = pytest.mark.parametrize("kind", [TokenBucket, Gcra])
T0 = 1_767_225_600_000_000
settings.register_profile("policies", deadline=None, max_examples=100)
PROFILE = settings.get_profile("policies")

# Numbers that leave remainders, the smallest and the largest, and plain ones; small bursts so that denials happen.
NUMBERS = st.tuples(
    st.one_of(st.integers(1, 12), st.integers(1, 10**9)),
    st.one_of(st.integers(1_000, 10_000), st.sampled_from([10**6, 60 * 10**6]), st.integers(1_000, 10**12)),
    st.one_of(st.integers(1, 8), st.integers(1, 1000)),
).filter(lambda numbers: numbers[2] * numbers[1] <= numbers[0] * 10**15)


def made(kind, numbers):
    limit, period_us, burst = numbers
    return kind(limit, Fraction(period_us, 10**6), burst)


@st.composite
def histories(draw, *, backwards):
    """Numbers and requests (now_us, cost), in steps of about one emission interval."""
    numbers = draw(NUMBERS)
    interval = max(1, -(-numbers[1] // numbers[0]))
    low = -2 * interval if backwards else 0
    now, requests = T0, []
    for _ in range(draw(st.integers(1, 25))):
        now += draw(st.one_of(st.integers(low, 2 * interval), st.sampled_from([0, 0, 1, interval, 50 * interval])))
        requests.append((now, draw(st.one_of(st.integers(0, 3), st.integers(0, numbers[2] + 1)))))
    return numbers, requests


class Model:
    """A bucket in plain fractions of tokens and microseconds, written for reading only."""

    def __init__(self, numbers):
        limit, period_us, self.burst = numbers
        self.rate = Fraction(limit, period_us)
        self.level, self.at = None, None

    def decide(self, now, cost):
        level = Fraction(self.burst)
        if self.at is not None:
            level = min(level, self.level + (now - self.at) * self.rate)
        allowed = cost <= level
        retry = 0 if allowed else None if cost > self.burst else math.ceil((cost - level) / self.rate)
        if allowed:
            level -= cost
            if cost:
                self.level, self.at = level, now
        remaining = max(0, math.floor(level))
        return Decision(
            allowed=allowed,
            limit=self.burst,
            remaining=remaining,
            reset_us=math.ceil((self.burst - level) / self.rate),
            retry_after_us=retry,
            next_us=0 if level == self.burst else math.ceil((remaining + 1 - level) / self.rate),
        )


@given(histories(backwards=True))
@PROFILE
def test_bucket_and_gcra_answer_alike(history):
    """Token bucket, GCRA and a model in fractions agree in all fields on every history, also when clocks go back."""
    numbers, requests = history
    model = Model(numbers)
    expected = [model.decide(now_us, cost) for now_us, cost in requests]
    assert made(TokenBucket, numbers).simulate(requests) == expected
    assert made(Gcra, numbers).simulate(requests) == expected
    assert made(TokenBucket, numbers).as_gcra() == made(Gcra, numbers)


@KINDS
@given(histories(backwards=True))
@PROFILE
def test_waits_are_exact(kind, history):
    """After the wait the same cost passes and one microsecond earlier it doesn't; so does one more than `remaining`."""
    numbers, requests = history
    policy, state = made(kind, numbers), None
    for now_us, cost in requests:
        decision, state = policy.decide(state, now_us, cost)
        if wait := decision.retry_after_us:
            assert policy.decide(state, now_us + wait, cost)[0].allowed
            assert not policy.decide(state, now_us + wait - 1, cost)[0].allowed
        assert (decision.retry_after_us == 0) == decision.allowed
        assert 0 <= decision.remaining <= decision.limit == policy.quota
        more = decision.remaining + 1
        if wait := decision.next_us:
            assert policy.decide(state, now_us + wait, more)[0].allowed
            assert not policy.decide(state, now_us + wait - 1, more)[0].allowed
        else:
            assert decision.remaining == policy.quota
            assert decision.reset_us == 0
        if wait := decision.reset_us:
            assert policy.decide(state, now_us + wait, policy.quota)[0].allowed
            assert not policy.decide(state, now_us + wait - 1, policy.quota)[0].allowed


@KINDS
@given(histories(backwards=False))
@PROFILE
def test_never_more_than_burst_and_rate(kind, history):
    """Under a clock that goes forward, no window lets through more than the burst and what came in meanwhile."""
    (limit, period_us, burst), requests = history
    decisions = made(kind, history[0]).simulate(requests)
    taken = [request for request, decision in zip(requests, decisions, strict=True) if decision.allowed]
    for first in range(len(taken)):
        total = 0
        for now_us, cost in taken[first:]:
            total += cost
            assert total * period_us <= burst * period_us + (now_us - taken[first][0]) * limit


@KINDS
@given(histories(backwards=True))
@PROFILE
def test_steps_back_grant_no_extra(kind, history):
    """Whatever the clock does, what is taken is within the burst and the time since the first of it."""
    (limit, period_us, burst), requests = history
    decisions = made(kind, history[0]).simulate(requests)
    taken = [request for request, decision in zip(requests, decisions, strict=True) if decision.allowed and request[1]]
    if taken:
        span_us = max(now_us for now_us, _ in taken) - taken[0][0]
        assert sum(cost for _, cost in taken) * period_us <= burst * period_us + span_us * limit


@KINDS
@given(histories(backwards=True))
@PROFILE
def test_states(kind, history):
    """States survive JSON, denials and cost 0 return the given object, and `expires_at` is exact."""
    numbers, requests = history
    policy, state = made(kind, numbers), None
    for now_us, cost in requests:
        before = copy.deepcopy(state)
        decision, after = policy.decide(state, now_us, cost)
        assert state == before
        if not (decision.allowed and cost):
            assert after is state if state is not None else after == policy.fresh(now_us)
        assert json.loads(json.dumps(after)) == after
        assert policy.decide(MappingProxyType(dict(after)), now_us, 0) == policy.decide(after, now_us, 0)
        full_at = policy.expires_at(after)
        assert full_at == now_us + decision.reset_us or decision.reset_us == 0
        for at_us in (full_at, full_at + 1, full_at + 10**9):
            assert policy.decide(after, at_us, policy.quota) == policy.decide(None, at_us, policy.quota)
        if after != policy.fresh(now_us):
            assert policy.decide(after, full_at - 1, 0)[0] != policy.decide(None, full_at - 1, 0)[0]
        state = after


@KINDS
@given(histories(backwards=True), st.integers(-(10**12), 10**12))
@PROFILE
def test_shift(kind, history, delta_us):
    """A shifted state answers at shifted times as the state did before."""
    numbers, requests = history
    policy, state = made(kind, numbers), None
    for now_us, cost in requests:
        _, state = policy.decide(state, now_us, cost)
        shifted = policy.shift(state, delta_us)
        assert policy.expires_at(shifted) == policy.expires_at(state) + delta_us
        for later_us in (now_us, now_us + 1, now_us + 10**6):
            decision, after = policy.decide(state, later_us, cost)
            assert policy.decide(shifted, later_us + delta_us, cost) == (decision, policy.shift(after, delta_us))


@KINDS
def test_a_fresh_state_has_no_time(kind):
    """What a refusal or a report leaves of a fresh key is fresh at every time, also before it was made."""
    policy = kind(1, 1)
    for cost in (0, 2):
        _, state = policy.decide(None, T0, cost)
        for now_us in (0, T0 - 10**9, T0 - 1, T0, T0 + 1):
            assert policy.decide(state, now_us) == policy.decide(None, now_us)
        assert policy.expires_at(state) <= T0
    assert policy.decide(policy.fresh(-7), -7)[0].allowed


FOREIGN = [
    None,
    {},
    [],
    "token-bucket",
    7,
    {"kind": "fixed", "start_us": 0, "count": 3},
    {"kind": "token-bucket"},
    {"kind": "token-bucket", "level": 0},
    {"kind": "token-bucket", "level": 0.0, "at_us": T0},
    {"kind": "token-bucket", "level": False, "at_us": T0},
    {"kind": "token-bucket", "level": 0, "at_us": "0"},
    {"kind": "token-bucket", "level": 0, "at_us": None},
    {"kind": "token-bucket", "level": 0, "at_us": T0, "pending": None},
    {"kind": "token-bucket", "level": 0, "at_us": T0, "pending": [[1]]},
    {"kind": "token-bucket", "level": 0, "at_us": T0, "pending": [[1, True]]},
    {"kind": "token-bucket", "level": 0, "at_us": T0, "pending": [3]},
    {"kind": "gcra"},
    {"kind": "gcra", "tat": 1e18},
    {"kind": "gcra", "tat": True},
    {"kind": ["gcra"], "tat": T0},
    {"tat": 10**18, "level": 0, "at_us": T0},
]


@KINDS
@pytest.mark.parametrize("state", FOREIGN, ids=repr)
def test_a_state_of_another_shape_is_fresh(kind, state):
    """What isn't a state of this kind counts as none: for decisions, expiry and shifts."""
    policy = kind(5, 1)
    assert policy.decide(state, T0) == policy.decide(None, T0)
    assert policy.decide(state, T0, 6) == (Decision(False, 5, 5, 0, None, 0), policy.fresh(T0))
    assert policy.expires_at(state) == 0
    assert policy.shift(state, 5) is state


def test_the_states_of_the_two_are_foreign_to_each_other():
    """A spent state of one kind is a fresh one to the other."""
    for one, other in ((TokenBucket(1, 1), Gcra(1, 1)), (Gcra(1, 1), TokenBucket(1, 1))):
        _, spent = one.decide(None, T0)
        assert not one.decide(spent, T0)[0]
        assert other.decide(spent, T0)[0]


@KINDS
@pytest.mark.parametrize("cost", [-5, -1, 1.5, 1.0, "1", True, False, None, Fraction(1)], ids=repr)
def test_bad_costs(kind, cost):
    """A cost that is negative or not an integer is a ValueError, with the state as before."""
    policy = kind(5, 1)
    _, state = policy.decide(None, T0, 2)
    before = dict(state)
    with pytest.raises(ValueError, match="cost"):
        policy.decide(state, T0, cost)
    assert state == before


@KINDS
@pytest.mark.parametrize(
    ("arguments", "field", "bound"),
    [
        ((0, 60), "limit", "1 and 1000000000"),
        ((-1, 60), "limit", "1 and 1000000000"),
        ((10**9 + 1, 60), "limit", "1 and 1000000000"),
        ((10**5000, 60), "limit", "1 and 1000000000"),
        ((True, 60), "limit", "integer"),
        ((10.0, 60), "limit", "integer"),
        (("10", 60), "limit", "integer"),
        ((None, 60), "limit", "integer"),
        ((10, 60, 0), "burst", "1 and 1000000000"),
        ((10, 60, 10**9 + 1), "burst", "1 and 1000000000"),
        ((10, 60, True), "burst", "integer"),
        ((10, 60, 1.5), "burst", "integer"),
        ((10, 0), "period", "1 ms and 10**9 seconds"),
        ((10, -1), "period", "1 ms and 10**9 seconds"),
        ((10, 0.0005), "period", "1 ms and 10**9 seconds"),
        ((10, Fraction(999, 10**6)), "period", "1 ms and 10**9 seconds"),
        ((10, 10**9 + 1), "period", "1 ms and 10**9 seconds"),
        ((10, 10**10), "period", "1 ms and 10**9 seconds"),
        ((10, 10**5000), "period", "1 ms and 10**9 seconds"),
        ((10, 1e300), "period", "1 ms and 10**9 seconds"),
        ((10, timedelta(days=40_000)), "period", "1 ms and 10**9 seconds"),
        ((10, timedelta(microseconds=999)), "period", "1 ms and 10**9 seconds"),
        ((10, 0.0010001), "period", "whole number of microseconds"),
        ((10, 0.1 + 0.2), "period", "whole number of microseconds"),
        ((10, 1 / 3), "period", "whole number of microseconds"),
        ((10, Fraction(1, 3)), "period", "whole number of microseconds"),
        ((10, math.nan), "period", "finite"),
        ((10, math.inf), "period", "finite"),
        ((10, -math.inf), "period", "finite"),
        ((10, True), "period", "seconds"),
        ((10, "60"), "period", "seconds"),
        ((10, None), "period", "seconds"),
        ((1, 10**9, 2), "burst", "10**9 seconds"),
        ((999_999_999, 1.0, 10**9), None, None),
        ((1, 2, 5 * 10**8 + 1), "window_us", "10**9 seconds"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_constructor_errors(kind, arguments, field, bound):
    """Numbers that can't work are a ConfigError, also a ValueError, that names the field and the bound."""
    if field is None:
        assert kind(*arguments).window_us == 1_000_001
        return
    with pytest.raises(ConfigError) as caught:
        kind(*arguments)
    assert field in str(caught.value)
    assert bound in str(caught.value)
    assert isinstance(caught.value, ValueError)


@KINDS
@pytest.mark.parametrize(
    ("period", "period_us"),
    [
        (60, 60_000_000),
        (0.1, 100_000),
        (0.001, 1_000),
        (1.000001, 1_000_001),
        (1e9, 10**15),
        (10**9, 10**15),
        (0.3, 300_000),
        (Fraction(1, 8), 125_000),
        (Fraction(7, 10**3), 7_000),
        (timedelta(milliseconds=1), 1_000),
        (timedelta(days=1, microseconds=1), 86_400_000_001),
    ],
    ids=repr,
)
def test_periods(kind, period, period_us):
    """Seconds as int, float (its shortest decimal text), Fraction, or a timedelta, become whole microseconds."""
    assert kind(1, period).period_us == period_us


@KINDS
def test_a_period_of_numpy(kind):
    """A subclass of float that writes its repr in its own way is read by its number."""
    float64 = pytest.importorskip("numpy").float64
    assert kind(10, float64(0.1)) == kind(10, Fraction(1, 10))


@KINDS
def test_values(kind):
    """Policies are equal by class and numbers, hash as their numbers, and can't be changed."""
    policy = kind(10, 60)
    assert policy == kind(limit=10, period=60.0, burst=10) == kind(10, timedelta(minutes=1))
    assert hash(policy) == hash((10, 60_000_000, 10)) == hash(kind(10, 60, burst=10))
    assert kind.__hash__ is Policy.__hash__, "made once, at construction"
    assert policy not in (kind(10, 61), kind(11, 60, 10), kind(10, 60, 11))
    assert TokenBucket(10, 60) != Gcra(10, 60)
    assert policy != (10, 60_000_000, 10)
    assert {policy: 1}[kind(10, 60)] == 1
    assert [field.name for field in dataclasses.fields(policy)] == ["limit", "period_us", "burst"]
    for name in ("limit", "period_us", "burst", "other", "_hash"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, name, 1)


@KINDS
@given(NUMBERS)
@PROFILE
def test_copies(kind, numbers):
    """Pickles, copies and what the repr evaluates to are equal, with an equal hash."""
    policy = made(kind, numbers)
    copies = [pickle.loads(pickle.dumps(policy, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    copies += [copy.copy(policy), copy.deepcopy(policy)]
    copies.append(eval(repr(policy), {kind.__name__: kind, "Fraction": Fraction}))
    for same in copies:
        assert same == policy
        assert hash(same) == hash(policy)
        assert type(same) is kind


def test_repr():
    """The repr is the call that makes it: seconds where they are whole, else a fraction."""
    assert repr(TokenBucket(10, 60)) == "TokenBucket(limit=10, period=60, burst=10)"
    assert repr(Gcra(5, 1.5, burst=2)) == "Gcra(limit=5, period=Fraction(3, 2), burst=2)"


@KINDS
def test_quota_and_window(kind):
    """The quota is the burst, and the window the time to refill it, rounded up."""
    assert kind(10, 60).quota == 10
    assert kind(10, 60).window_us == 60_000_000
    assert kind(3, 1, 1).window_us == 333_334
    assert kind(1, 10**9).window_us == 10**15
    assert kind(10**9, 10**9, 10**9).window_us == 10**15


def test_shorthands():
    """`per_second` and its like are token buckets of that period."""
    assert per_second(5) == TokenBucket(5, 1)
    assert per_minute(5, burst=2) == TokenBucket(5, 60, 2)
    assert per_hour(5, 7) == TokenBucket(5, 3600, 7)
    assert per_day(5) == TokenBucket(5, 86_400)
    with pytest.raises(ConfigError, match="limit"):
        per_second(0)


def test_decision_in_seconds():
    """Decisions tell seconds as well, and are true when they allow."""
    denied, _ = TokenBucket(2, 3, 1).decide(TokenBucket(2, 3, 1).decide(None, T0)[1], T0)
    assert (denied.retry_after, denied.reset_after, bool(denied)) == (1.5, 1.5, False)
    never, _ = TokenBucket(2, 3, 1).decide(None, T0, 2)
    assert (never.retry_after, never.reset_after, bool(never)) == (None, 0.0, False)
    allowed, _ = TokenBucket(2, 3, 1).decide(None, T0)
    assert (allowed.retry_after, bool(allowed)) == (0.0, True)
