"""RedisStore's own promises: exact at every time, one round trip, exact under concurrency."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import Any

import pytest
import redis
from _servers import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmlimit import FixedWindow, Gcra, Policy, SlidingCounter, SlidingLog, StoreError, TokenBucket
from shmlimit.stores import _redis_scripts as scripts
from shmlimit.stores._redis_scripts import Plan
from shmlimit.stores.redis import RedisStore

T0 = 1_767_225_600_000_000  # 2026-01-01
S = 1_000_000
KINDS = [TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter]
TEN = [kind(10, 60) for kind in KINDS]
MODEST = settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=60)


@pytest.fixture
def client(redis_server: Server) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port) as client:
        yield client


# ---- exact -----------------------------------------------------------------------------------------------------------

starts = st.sampled_from([0, 1, T0, 2**53 - 2, 2**53 + 10**9, 10**17 + 1, 10**18 - 10**15, 10**18])
periods_us = st.sampled_from([1_000, 30_000, 700_001, S, 60 * S, 86_400 * S, 10**15 - 1, 10**15])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Small limits, that are reached, and ones with large numbers and awkward fractions."""
    kind, period_us = draw(st.sampled_from(KINDS)), draw(periods_us)
    limit = draw(st.one_of(st.integers(1, 8), st.sampled_from([999_999_937, 10**9])))
    period = period_us / S if period_us < 10**9 else period_us // S
    if kind in (TokenBucket, Gcra):
        return kind(limit, period, draw(st.integers(1, min(limit, 20))))
    return kind(limit, period)


def histories(policy: Policy) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(step of the clock, cost)."""
    interval = max(1, policy.period_us // policy.limit)
    step = st.one_of(
        st.just(0),
        st.sampled_from([1, interval - 1, interval, interval + 1, policy.window_us, 2 * policy.window_us]),
        st.integers(0, 2 * policy.window_us),
        st.integers(-2 * interval, 0),
        st.integers(-(10**18), 10**18),
    )
    some = st.integers(0, policy.quota + 1)
    cost = st.one_of(st.just(1), some, some, st.sampled_from([policy.quota, policy.quota // 2 + 1, 10**30]))
    return st.lists(st.tuples(step, cost), min_size=1, max_size=20)


@MODEST
@given(data=st.data(), policy=policies(), now_us=starts)
def test_every_decision_is_the_pure_one(
    redis_store: RedisStore, data: st.DataObject, policy: Policy, now_us: int
) -> None:
    """All six fields at every time up to 10**18 µs, far beyond a double's whole numbers, alone and all or nothing."""
    key, state = f"key {next(numbers)}", None
    for step, cost in data.draw(histories(policy)):
        now_us = min(max(0, now_us + step), 10**18)
        wanted, after = policy.decide(state, now_us, cost)
        assert redis_store.peek(policy, key, cost, now_us=now_us) == wanted
        if step % 3:
            assert redis_store.take(policy, key, cost, now_us=now_us) == wanted
        else:
            both = [(policy, key, cost), (TEN[step % 5], f"{key} beside", 0)]
            assert redis_store.take_all(both, now_us=now_us)[0] == wanted
        state = after if wanted.allowed and cost else state


numbers = count()


def awkward(draw: random.Random, kind: Any) -> Policy:
    """Numbers whose waits aren't whole microseconds."""
    limit, period_us = draw.choice([1, 2, 3, 7, 11, 999_983]), draw.choice([1_000, 1_001, 999_983, S, 60 * S + 1])
    period = Fraction(period_us, S)
    return kind(limit, period, draw.choice([1, 2, 3, 7])) if kind in (TokenBucket, Gcra) else kind(limit, period)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_promised_holds_to_the_microsecond(redis_store: RedisStore, kind: Any) -> None:
    """Histories that come back when a cost was said to fit, a microsecond earlier, a window later, and with times that
    go back over the seams of windows: the script decides as the policy does.
    """
    draw = random.Random(7)
    denied = 0
    for number in range(100):
        policy, state, last = awkward(draw, kind), None, None
        now_us = draw.choice([T0, T0 + 59 * S, 2**53 + 11])
        for _ in range(30):
            if last is None or last.retry_after_us is None or draw.random() < 0.3:
                window, back = policy.window_us, policy.period_us
                now_us += draw.choice(
                    [0, 1, -1, window // 3, window, -back, -back // 3, draw.randrange(-back, 2 * window)]
                )
            elif not last.allowed:
                now_us += last.retry_after_us - draw.choice([0, 1])
            else:
                now_us += draw.choice([0, last.next_us, max(0, last.next_us - 1), last.reset_us])
            cost = draw.choice([1, 1, 2, policy.quota, draw.randint(1, policy.quota)])
            last, after = policy.decide(state, now_us, cost)
            assert redis_store.take(policy, f"promise {number}", cost, now_us=now_us) == last
            state, denied = after if last.allowed else state, denied + (not last.allowed)
    assert denied > 500


def test_counter_weighs_beyond_the_whole_numbers_of_a_double(redis_store: RedisStore) -> None:
    """Products of 10**9 hits and 10**15 µs are compared exactly: denied 1 µs before a cost fits, then not."""
    policy, compared = SlidingCounter(10**9, 10**9), 0
    for spent in (10**9, 999_999_937, 618_033_989, 123_456_789):
        _, state = policy.decide(None, 0, spent)
        for cost in (10**9 - spent + 1, 10**9 - spent // 2, 10**9 - spent // 3, 10**9 - 2, 10**9 - 1):
            refused = policy.decide(state, 10**15, cost)[0]
            if refused.retry_after_us:
                opens_us, key = 10**15 + refused.retry_after_us, f"key {spent} {cost}"
                redis_store.take(policy, key, spent, now_us=0)
                assert redis_store.take(policy, key, cost, now_us=opens_us - 1).retry_after_us == 1
                assert redis_store.take(policy, key, cost, now_us=opens_us).allowed
                compared += 1
    assert compared >= 16


@pytest.mark.parametrize("kind", KINDS)
def test_script_and_policy_must_agree(kind: Any) -> None:
    """A script that has charged what the policy refuses, or the other way round, is an error and not a decision."""
    policy = kind(1, 3600)
    plan = Plan("p", policy)
    second, us = divmod(T0, S)
    spent = {
        "gcra": f"{second + 3600} 0 0",
        "fixed": f"{second // 3600} 1",
        "sliding-counter": f"{second // 3600} 0 1",
        "sliding-log": f"{second} 0 1 {second} 0 0",
    }[plan.engine.kind]
    fresh, full = f"{second} {us}", f"{second} {us} {spent}"
    assert scripts.taken(plan, 1, None, True, f"1 {fresh}".encode()).allowed
    assert not scripts.taken(plan, 1, None, True, f"0 {full}".encode()).allowed
    for reply in (f"0 {fresh}".encode(), f"1 {full}".encode()):
        with pytest.raises(StoreError, match="disagree"):
            scripts.taken(plan, 1, None, True, reply)
        with pytest.raises(StoreError, match="disagree"):
            scripts.all_taken([(plan, b"k", 1)], None, True, reply)


@pytest.mark.parametrize("reply", [b"", b"OK", b"QUEUED", b"1", b"1 5", b"1 x y", b"1 5 5 7", b"1 5 5;1"], ids=repr)
def test_answers_of_something_else(reply: bytes) -> None:
    """What isn't an answer to a script, from a proxy say, is a StoreError, whatever was asked."""
    for policy in TEN:
        plan = Plan("p", policy)
        entries = [(plan, b"k", 1), (plan, b"l", 1), (plan, b"m", 1)]
        for read in (
            lambda plan=plan: scripts.taken(plan, 1, None, True, reply),
            lambda plan=plan: scripts.was_live(plan, reply),
            lambda entries=entries: scripts.all_taken(entries, None, True, reply),
        ):
            with pytest.raises(StoreError, match="no answer to a script"):
                read()


# ---- one round trip --------------------------------------------------------------------------------------------------


def commands(client: redis.Redis) -> Counter[str]:
    return Counter({name[8:]: one["calls"] for name, one in client.info("commandstats").items()})


@pytest.mark.parametrize("given_us", [None, T0], ids=["server's time", "given time"])
def test_one_command_a_decision(
    redis_store: RedisStore, own_server: Any, redis_kind: str, given_us: int | None
) -> None:
    """A decision is one EVALSHA, alone or over several keys, allowed or denied, and nothing else is sent."""
    server = own_server(redis_kind)
    with RedisStore(server.url, timeout=10) as store, redis.Redis(port=server.port) as client:
        policies = [kind(2, 3600) for kind in KINDS]
        for policy in policies:
            store.take(policy, "load", now_us=given_us)
            store.reset(policy, "load")
        store.take_all([(policy, "load", 1) for policy in policies], now_us=given_us)
        client.config_resetstat()
        for policy in policies:
            assert [store.take(policy, "k", now_us=given_us).allowed for _ in range(3)] == [True, True, False]
            store.peek(policy, "k", now_us=given_us)
            store.reset(policy, "k")
        store.take_all([(policy, "k", 1) for policy in policies], now_us=given_us)
        seen = commands(client)
    # What the scripts call inside is counted by the server as well.
    inside = {"time", "get", "set", "lindex", "llen", "rpush", "lset", "ltrim", "pexpire", "pttl", "exists", "del"}
    assert seen["evalsha"] == 26
    assert not set(seen) - inside - {"evalsha", "config|resetstat", "info", "client|setinfo", "hello"}


def test_scripts_are_loaded_again(redis_store: RedisStore, client: redis.Redis) -> None:
    """After SCRIPT FLUSH (and so after a restart) the next decision brings its script along, and counts once."""
    for policy in TEN:
        assert redis_store.take(policy, "k").remaining == 9
        client.script_flush()
        assert redis_store.take(policy, "k").remaining == 8
        client.script_flush()
        assert redis_store.take_all([(policy, "k", 1)])[0].remaining == 7
        client.script_flush()
        assert redis_store.reset(policy, "k")


# ---- the sliding log -------------------------------------------------------------------------------------------------


def test_log_keeps_what_counts(redis_store: RedisStore, client: redis.Redis) -> None:
    """The list has no more hits than the limit, hits of one time are one, and what has left is cut off at a charge."""
    policy = SlidingLog(100, 60)
    for i in range(300):
        redis_store.take(policy, "k", now_us=T0 + i * 500_000)
    (key,) = client.scan_iter(f"{redis_store._plan(policy).head.decode()}=k")
    assert client.llen(key) == 100
    redis_store.take(policy, "k", 7, now_us=T0 + 210 * S)
    assert client.llen(key) == 1
    redis_store.take(policy, "k", 2, now_us=T0 + 210 * S)
    assert client.llen(key) == 1
    assert redis_store.peek(policy, "k", now_us=T0 + 210 * S).remaining == 91


def test_log_of_many_hits_is_exact(redis_store: RedisStore) -> None:
    """Waits far into a long log, with many hits that have left and nobody has cut off."""
    policy, state = SlidingLog(1000, 60), None
    for i in range(400):
        now_us, cost = T0 + i * i * 300, 1 + i % 4
        wanted, state = policy.decide(state, now_us, cost)
        assert redis_store.take(policy, "k", cost, now_us=now_us) == wanted
    for later in (0, 1, 59 * S, 60 * S, 75 * S, 90 * S, 107 * S, 107_760_299, 107_760_300, 108 * S):
        for cost in (0, 1, 3, 250, 600, 997, 1000):
            wanted = policy.decide(state, T0 + later, cost)[0]
            assert redis_store.peek(policy, "k", cost, now_us=T0 + later) == wanted


def test_log_counts_beyond_its_turn(redis_store: RedisStore, client: redis.Redis) -> None:
    """The running count of a log starts again at 2**40, and nobody gains or loses by it."""
    policy = SlidingLog(10**9, 60)
    redis_store.take(policy, "k", 10**8, now_us=T0)
    (key,) = client.scan_iter(f"{redis_store._plan(policy).head.decode()}=k")
    client.lset(key, 0, f"{T0 // S} 0 {2**40 - 10**8 - 3} {10**8}")
    wanted, state = policy.decide(None, T0, 10**8)
    for i, cost in enumerate([2, 5, 10**8, 7 * 10**8, 10**8, 1, 99_999_992]):
        now_us = T0 + i + 1
        wanted, state = policy.decide(state, now_us, cost)
        assert redis_store.take(policy, "k", cost, now_us=now_us) == wanted
    assert wanted.remaining == 0
    for cost in (1, 10**8, 10**8 + 1, 10**8 + 3, 10**8 + 8, 3 * 10**8, 10**9):
        assert redis_store.peek(policy, "k", cost, now_us=T0 + 9) == policy.decide(state, T0 + 9, cost)[0]
    assert all(0 <= int(hit.split()[2]) < 2**40 for hit in client.lrange(key, 0, -1))


# ---- exact under concurrency -----------------------------------------------------------------------------------------


def hit(url: str, prefix: str, barrier: Any, results: Any) -> None:
    counts = []
    with RedisStore(url, prefix=prefix, timeout=10) as store:
        barrier.wait()
        for kind in KINDS:
            policy, other = kind(200, 10**6), kind(150, 10**6)
            alone = sum(store.take(policy, "hot").allowed for _ in range(120))
            joint = sum(all(store.take_all([(policy, "both", 1), (other, "both", 1)])) for _ in range(80))
            counts.append((alone, joint))
    results.put(counts)


def test_four_processes_get_exactly_the_limit(redis_server: Server, redis_store: RedisStore) -> None:
    """4 processes, 480 hits on a key of 200: 200 pass, for every policy; all or nothing over two keys, 150 of 320."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    arguments = (redis_server.url, redis_store.prefix, barrier, results)
    workers = [context.Process(target=hit, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    counts = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    for i, kind in enumerate(KINDS):
        assert sum(one[i][0] for one in counts) == 200
        assert sum(one[i][1] for one in counts) == 150
        assert redis_store.peek(kind(200, 10**6), "hot").remaining == 0
        assert redis_store.peek(kind(200, 10**6), "both").remaining == 50


def test_flushed_under_load(own_server: Any, redis_kind: str) -> None:
    """FLUSHALL and SCRIPT FLUSH while threads decide: no errors, and at most one more quota for each time."""
    server = own_server(redis_kind)
    policy, flushes = TokenBucket(50, 10**6), 5
    allowed: list[bool] = []
    errors: list[StoreError] = []
    with RedisStore(server.url, timeout=10) as store, redis.Redis(port=server.port) as client:

        def decide() -> None:
            try:
                while len(allowed) < 4_000:
                    allowed.append(store.take(policy, "k").allowed)
            except StoreError as error:
                errors.append(error)

        threads = [threading.Thread(target=decide) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(flushes):
            while len(allowed) < 600 * (number + 1) and not errors:
                pass
            client.flushall()
            client.script_flush()
        for thread in threads:
            thread.join()
    assert errors == []
    assert sum(allowed) == 50 * (flushes + 1)
