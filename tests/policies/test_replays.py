"""What users reported about other limiters, and the right answer here: the part that buckets give."""

from __future__ import annotations

import random

import pytest

from shmlimit.errors import ConfigError
from shmlimit.policies import Gcra, TokenBucket

pytestmark = pytest.mark.parametrize("kind", [TokenBucket, Gcra])

S = 1_000_000
T0 = 1_767_225_600 * S


def at(policy, *requests):
    """The decisions for (seconds, cost) or seconds, from T0, exact to the microsecond."""
    pairs = [request if isinstance(request, tuple) else (request, 1) for request in requests]
    return policy.simulate([(T0 + round(seconds * S), cost) for seconds, cost in pairs])


def allowed(decisions):
    return [decision.allowed for decision in decisions]


@pytest.mark.parametrize("cost", [-5, 1.5, "1", True], ids=repr)
def test_negative_cost(kind, cost):
    """In limits 5.8 a negative cost filled the quota up; here it is a ValueError and the state is as before."""
    policy = kind(5, 1)
    _, state = policy.decide(None, T0, 3)
    with pytest.raises(ValueError, match="cost"):
        policy.decide(state, T0, cost)
    assert policy.decide(state, T0, 0)[0].remaining == 2


def test_impossible_cost(kind):
    """throttled-py 3.5, redis#15113: an impossible cost got a short wait; here it is never, and nothing is written."""
    (denied,) = at(kind(5, 1), (0, 6))
    assert (denied.allowed, denied.retry_after_us, denied.remaining) == (False, None, 5)
    _, state = kind(5, 1).decide(None, T0, 2)
    assert kind(5, 1).decide(state, T0, 6)[1] is state


def test_limit_0(kind):
    """express-rate-limit v7, golang/go#39984: limit 0 let the first through; here it can't be constructed."""
    with pytest.raises(ConfigError, match="limit"):
        kind(0, 60)


def test_waiting_exactly(kind):
    """PyrateLimiter#289: after the reported wait it was refused again; here it passes, and not a microsecond before."""
    chance = random.Random(289)
    for _ in range(300):
        policy, state, now_us = kind(chance.randint(1, 9), chance.choice([1, 7, 13]), chance.randint(1, 9)), None, T0
        for _ in range(20):
            now_us += chance.randint(0, S)
            cost = chance.randint(1, policy.burst)
            decision, state = policy.decide(state, now_us, cost)
            if not decision.allowed:
                assert not policy.decide(state, now_us + decision.retry_after_us - 1, cost)[0].allowed
                assert policy.decide(state, now_us + decision.retry_after_us, cost)[0].allowed


def test_one_a_day(kind):
    """throttled-py PR#42: a day's quota had another span; here it comes back after 86,400 s."""
    assert allowed(at(kind(1, 86_400), 0, 86_399.999999, 86_400)) == [True, False, True]


def test_no_free_unit_after_idling(kind):
    """governor#249, #107: a free unit after each idle time; here a full burst and not one more."""
    assert allowed(at(kind(5, 1), *[0] * 6, *[2] * 6)) == ([True] * 5 + [False]) * 2


def test_remaining_comes_back(kind):
    """governor#102: remaining stayed 0 for good; here it follows the level."""
    decisions = at(kind(5, 60), (0, 4), 0, 0, 12, 72)
    assert [decision.remaining for decision in decisions] == [1, 0, 0, 0, 4]
    assert allowed(decisions) == [True, True, False, True, True]
    assert decisions[2].retry_after_us == 12 * S


def test_cost_above_the_burst(kind):
    """governor#11, bucket4j#20: it was answered with "later", or passed; here it is denied for good."""
    for policy, cost in ((kind(1, 1), 5), (kind(5, 1), 6)):
        decision, state = policy.decide(None, T0, cost)
        assert (decision.allowed, decision.retry_after_us) == (False, None)
        assert state == policy.fresh(T0)


def test_fast_refill_is_not_forgotten(kind):
    """redis-cell#50: a short-lived state was forgotten and all passed; here burst and rate of one second."""
    decisions = kind(6_000, 1, 6_001).simulate([(T0 + number * 50, 1) for number in range(20_000)])
    assert sum(allowed(decisions)) <= 12_001
    assert sum(allowed(decisions)) == 6_001 + 6_000 * 19_999 * 50 // S


def test_half_a_millisecond(kind):
    """redis-cell#80: 2,000 a second without burst was refused; here its interval is 500 µs."""
    decisions = at(kind(2_000, 1, 1), 0, 0.000499, 0.0005)
    assert allowed(decisions) == [True, False, True]
    assert decisions[1].retry_after_us == 1


def test_cost_of_the_whole_capacity(kind):
    """redis#14826: a cost equal to the capacity got a wait of -1; here the time until the bucket is full."""
    decisions = at(kind(6, 1), (0, 3), (0, 6))
    assert allowed(decisions) == [True, False]
    assert decisions[1].retry_after_us == S // 2


def test_exactly_one_token(kind):
    """golang/go#34861: 0.9999999999997 tokens weren't one; here thirteen tenths of a second bring exactly one."""
    assert allowed(at(kind(10, 13, 1), 0, 1.3)) == [True, True]
    assert allowed(at(kind(10, 13, 1), 0, 1.299999)) == [True, False]


def test_a_slow_bucket(kind):
    """golang/go#46579: a bucket that was idle for long lacked a hair; here an hour brings one token."""
    decisions = at(kind(1, 3_600), 0, 3_599.999999, 3_600)
    assert allowed(decisions) == [True, False, True]
    assert decisions[1].retry_after_us == 1


def test_a_tiny_rate(kind):
    """golang/go#71154: a tiny rate overflowed to "no wait"; here it is out of range, or a long wait."""
    with pytest.raises(ConfigError, match="period"):
        kind(1, 10**10)
    decisions = at(kind(1, 10**9), 0, 0)
    assert allowed(decisions) == [True, False]
    assert decisions[1].retry_after_us == 10**15


def test_an_older_clock_gains_nothing(kind):
    """golang/go#56287, #71360: a caller with an older clock gained; here two of the three pass."""
    assert sum(allowed(at(kind(1, 1, 2), 10, 9, 10))) == 2


def test_a_stale_time(kind):
    """In nginx a stale time credited or debited the difference; here it is as if all three had come at once."""
    decisions = at(kind(1_000, 1, 10), 1.000, 0.995, 1.000)
    assert allowed(decisions) == [True] * 3
    assert decisions[2].remaining == 7


def test_one_a_minute(kind):
    """In nginx 1r/m was stored as 16/1000 a second; here the second one passes after 60 s, and the third not yet."""
    assert allowed(at(kind(1, 60), 0, 60, 60.001)) == [True, True, False]


def test_a_third_of_a_millisecond(kind):
    """openresty#553: a millisecond clock passed a third of 3,000 a second; here all at 334 µs, each second at 333."""
    policy = kind(3_000, 1, 1)
    assert all(allowed(policy.simulate([(T0 + number * 334, 1) for number in range(2_994)])))
    assert allowed(policy.simulate([(T0 + number * 333, 1) for number in range(3_000)])) == [True, False] * 1_500


def test_a_denial_restarts_nothing(kind):
    """bucket4j#88: a denial restarted the wait; here what is left of it."""
    decisions = at(kind(1, 1), 0, 0.2)
    assert allowed(decisions) == [True, False]
    assert decisions[1].retry_after_us == 800_000


def test_the_remainder_of_a_refill(kind):
    """bucket4j dropped the remainder of a refill; here 97 ms bring nine and 0.7 of a token that is kept."""
    decisions = at(kind(10, 0.1), (0, 10), (0.097, 9), 0.097, 0.100, 0.100)
    assert allowed(decisions) == [True, True, False, True, False]


def test_refill_between_hits(kind):
    """gubernator#77, firecracker#3370: each hit cut the refill to 0; here the thirds of a token add up."""
    decisions = at(kind(10, 30), *range(11))
    assert all(allowed(decisions))
    assert [decision.remaining for decision in decisions] == [9, 8, 7, 7, 6, 5, 5, 4, 3, 3, 2]


def test_no_refill_at_once(kind):
    """gubernator#118: it refilled to the full once a second; here one token each third of a second."""
    decisions = at(kind(3, 1), *[number / 10 for number in range(20)])
    passed = [number / 10 for number, decision in enumerate(decisions) if decision.allowed]
    assert passed == [0, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4, 1.7]


@pytest.mark.parametrize("turn_us", [2**32 * 1_000, 2**53])
def test_round_numbers_of_the_clock(kind, turn_us):
    """haproxy: across 2^32 ms entries never expired; here the wait works there as anywhere."""
    policy = kind(1, 60)
    _, state = policy.decide(None, turn_us - 1)
    assert policy.decide(state, turn_us)[0].retry_after_us == 60 * S - 1
    assert not policy.decide(state, turn_us + 60 * S - 2)[0].allowed
    assert policy.decide(state, turn_us + 60 * S - 1)[0].allowed


def test_the_first_request_counts(kind):
    """lua-resty-limit-traffic#17, #86: was the first one free? Here four of five are left."""
    (decision,) = at(kind(5, 60), 0)
    assert (decision.allowed, decision.remaining) == (True, 4)


def test_threshold(kind):
    """graph_attack#46: a threshold of N let N - 1 through; here exactly five of six."""
    assert allowed(at(kind(5, 60), *[0] * 6)) == [True] * 5 + [False]


def test_remaining_is_never_negative(kind):
    """koa/ratelimit#48: remaining went below 0; here it stays within 0 and the quota."""
    chance = random.Random(48)
    decisions = at(kind(5, 60, 20), *[(0, chance.randint(0, 25)) for _ in range(20)])
    assert all(0 <= decision.remaining <= 20 for decision in decisions)


def test_a_clock_eleven_seconds_back(kind):
    """MediaWiki-MCP-Server#557: shut out, then a free refill; here never more than 30, and open again by the old clock.

    Three tokens were missing at T. Eleven seconds before that the same line is far below 0, until it is back at 1.
    """
    policy, state = kind(30, 1), None
    for _ in range(3):
        _, state = policy.decide(state, T0)
    denied, state = policy.decide(state, T0 - 11 * S)
    assert not denied.allowed
    assert policy.decide(state, T0 - 11 * S + denied.retry_after_us)[0].allowed
    assert sum(allowed(at(policy, *[0] * 3, *[-11] * 40, *[0] * 40))) == 30


def test_before_or_after_the_step(kind):
    """rwz/redis-gcra#8: it was one interval too strict; here three at once and the fourth after exactly one second."""
    assert allowed(at(kind(1, 1, 3), 0, 0, 0, 1)) == [True] * 4
    assert allowed(at(kind(1, 1, 3), 0, 0, 0, 0.999999)) == [True] * 3 + [False]
