"""SharedTable: the same decisions as the pure policies, and a store that keeps the protocol's small print."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmlimit
from shmlimit import (
    ConfigError,
    Decision,
    FixedWindow,
    Gcra,
    LayoutError,
    Policy,
    SharedTable,
    SlidingCounter,
    SlidingLog,
    TokenBucket,
)
from shmlimit.table import layout
from shmlimit.table.prepared import interval_of
from shmlimit.table.table import NOW_MAX_US

MINUTE = TokenBucket(10, 60)
T0 = 1_767_225_600_000_000  # 2026-01-01


# ---- the same decisions as the pure policy ---------------------------------------------------------------------------


def shifted(steps: list[dict[str, Any]], policy: Policy) -> list[dict[str, Any]]:
    """The steps moved by whole periods into the times that a table knows, where they go beyond the year 2100."""
    latest = max(step["now_us"] for step in steps)
    excess = max(0, latest - NOW_MAX_US)
    delta = -(-excess // policy.period_us) * policy.period_us
    return [{**step, "now_us": step["now_us"] - delta} for step in steps]


def test_case_rows_agree(vectors: Callable[[str], list[dict[str, Any]]], table: SharedTable) -> None:
    """Every row that the table holds exactly gives the same decisions through it; of buckets under both names."""
    agreed, left_out = 0, []
    for row in vectors("policies.jsonl"):
        told = row["policy"]
        for kind in {told["kind"], "Gcra" if "burst" in told else told["kind"]}:
            burst = [told["burst"]] if "burst" in told else []
            policy = getattr(shmlimit, kind)(told["limit"], Fraction(told["period_us"], 10**6), *burst)
            denominator, interval = interval_of(policy.limit, policy.period_us)
            exact = not burst or interval * policy.limit == policy.period_us * denominator
            if not table.supports(policy) or not exact:
                left_out.append(row["id"])
                continue
            steps = shifted(row["steps"], policy)
            if min(step["now_us"] for step in steps) < 0:
                left_out.append(row["id"])
                continue
            for number, step in enumerate(steps):
                decision = table.take(policy, row["id"], step["cost"], now_us=step["now_us"])
                wanted = [step[f] for f in ("allowed", "limit", "remaining", "reset_us", "retry_after_us")]
                assert list(decision[:5]) == wanted, (row["id"], kind, number, row["why"])
            agreed += 1
    assert agreed + len(left_out) == 155 + 80
    assert agreed >= 180, sorted(set(left_out))


class Names:
    """A key that no example used before."""

    count = 0

    @classmethod
    def next(cls) -> str:
        cls.count += 1
        return f"key {cls.count}"


exact_buckets = st.builds(
    lambda limit, period_us, burst, kind: kind(limit, period_us / 10**6, burst),
    st.integers(1, 2048),
    st.integers(1_000, 86_400_000_000),
    st.integers(1, 3000),
    st.sampled_from([TokenBucket, Gcra]),
)
windows = st.one_of(
    st.builds(
        lambda limit, period_us: FixedWindow(limit, Fraction(period_us, 10**6)),
        st.integers(1, 2**19 - 1) | st.integers(1, 10),
        st.integers(1_000, 10_000_000) | st.integers(1_000, 366 * 86_400 * 10**6),
    ),
    st.builds(
        lambda limit, period_us: FixedWindow(limit, Fraction(period_us, 10**6)),
        st.integers(2**19, 10**9),
        st.integers(4_000_000, 366 * 86_400 * 10**6),
    ),
    st.builds(
        lambda limit, period_us: SlidingCounter(limit, Fraction(period_us, 10**6)),
        st.integers(1, 511) | st.integers(1, 10),
        st.integers(1_000, 10_000_000) | st.integers(1_000, 366 * 86_400 * 10**6),
    ),
    st.builds(
        lambda limit, period_us: SlidingCounter(limit, Fraction(period_us, 10**6)),
        st.integers(512, 16_383),
        st.integers(1_000_000, 366 * 86_400 * 10**6),
    ),
)
rounded_buckets = st.builds(
    lambda limit, period_us, burst: TokenBucket(limit, period_us / 10**6, burst),
    st.integers(2049, 10**9),
    st.integers(1_000_000, 86_400_000_000),
    st.integers(1, 10**6),
)


def histories(policy: Policy) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(step of the clock, cost): mostly forward by about an interval, at times far, at times back."""
    interval = max(1, policy.period_us // policy.limit)
    step = st.one_of(
        st.just(0),
        st.integers(0, 3 * interval),
        st.integers(-2 * interval, 0),
        st.integers(0, 2 * policy.window_us),
        st.sampled_from([interval - 1, interval, interval + 1]),
    )
    quota = policy.quota
    cost = st.one_of(st.just(1), st.integers(0, quota + 1), st.sampled_from([quota, quota + 1, 10**9, 2**40]))
    return st.lists(st.tuples(step, cost), min_size=1, max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(data=st.data(), policy=exact_buckets | windows, start=st.one_of(st.just(T0), st.integers(0, NOW_MAX_US)))
def test_every_decision_is_the_pure_one(table: SharedTable, data: st.DataObject, policy: Policy, start: int) -> None:
    """All six fields agree with the pure policy, on any history, with steps of the clock in both directions."""
    if not table.supports(policy):
        return
    # The watermark of other examples would raise the time of this one's first hit: a table that forgets nothing.
    key, state, now_us = Names.next(), None, start
    history = data.draw(histories(policy))
    table.slots[:] = 0
    for step, cost in history:
        now_us = min(max(now_us + step, 0), NOW_MAX_US)
        wanted, after = policy.decide(state, now_us, cost)
        assert table.peek(policy, key, cost, now_us=now_us) == wanted
        assert table.take(policy, key, cost, now_us=now_us) == wanted
        state = after if wanted.allowed and cost else state


def test_half_microseconds_are_kept(table: SharedTable) -> None:
    """The least denominator of an interval that isn't whole: 500.5 µs a token."""
    policy = TokenBucket(2, 0.001001)
    times = [T0 + i * 167 for i in range(60)]
    wanted = policy.simulate([(time, 1) for time in times])
    assert [table.take(policy, "half", now_us=time) for time in times] == wanted
    assert {decision.allowed for decision in wanted} == {True, False}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(data=st.data(), policy=rounded_buckets)
def test_rounded_interval_is_late_and_never_early(table: SharedTable, data: st.DataObject, policy: Policy) -> None:
    """Where the interval is rounded, what the table allows the pure policy allows too, given the same allowed hits;
    and a wait is longer by no more than the rounding of a whole quota, quota / 2048 µs.
    """
    if not table.supports(policy):
        return
    key, state, now_us = Names.next(), None, T0
    history = data.draw(histories(policy))
    table.slots[:] = 0
    for step, cost in history:
        now_us = max(now_us + step, 0)
        wanted, after = policy.decide(state, now_us, cost)
        got = table.take(policy, key, cost, now_us=now_us)
        if got.allowed:
            assert wanted.allowed
            state = after if cost else state
        if got.retry_after_us and wanted.retry_after_us is not None and cost <= policy.quota:
            assert 0 <= got.retry_after_us - wanted.retry_after_us <= len(history) * policy.quota // 2048 + 1


@pytest.mark.parametrize(
    "policy",
    [
        TokenBucket(1, 3653 * 86_400),
        TokenBucket(10**9, 86_400 * 3653),
        TokenBucket(2048, 1.000001, 2048),
        TokenBucket(1, 0.001),
        TokenBucket(100_000, 366 * 86_400),
        FixedWindow(2**19 - 1, 0.001),
        FixedWindow(2**19 - 1, 366 * 86_400),
        FixedWindow(10**9, 4),
        FixedWindow(10**9, 366 * 86_400),
        SlidingCounter(511, 0.001),
        SlidingCounter(511, 366 * 86_400),
        SlidingCounter(16_383, 1),
        SlidingCounter(16_383, 366 * 86_400),
    ],
    ids=str,
)
@pytest.mark.parametrize("now_us", [0, 1, T0, NOW_MAX_US - 1, NOW_MAX_US])
def test_bounds_of_a_state_word(table: SharedTable, policy: Policy, now_us: int) -> None:
    """The largest times, quotas and denominators that a word holds decide as the pure policy does."""
    assert table.supports(policy)
    state = None
    for cost in (policy.quota // 2, policy.quota - policy.quota // 2, 1, policy.quota, policy.quota + 1):
        wanted, after = policy.decide(state, now_us, cost)
        assert table.take(policy, "k", cost, now_us=now_us)[:3] == wanted[:3]
        state = after if wanted.allowed and cost else state
    back = max(0, now_us - policy.window_us)
    assert table.peek(policy, "k", 1, now_us=back).allowed == policy.decide(state, back, 1)[0].allowed


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        (TokenBucket(1, 10**9), "ten years"),
        (TokenBucket(1, 86_400, 10_000), "ten years"),
        (TokenBucket(10**9 - 1, 1), "1 %"),
        (TokenBucket(10**6 - 1, 0.01), "1 %"),
        (FixedWindow(2**19, 3.9), "524,287"),
        (FixedWindow(1, 367 * 86_400), "366 days"),
        (SlidingCounter(512, 0.9), "511"),
        (SlidingCounter(16_384, 60), "16,383"),
        (SlidingCounter(1, 367 * 86_400), "366 days"),
        (SlidingLog(1, 60), "not SlidingLog"),
    ],
    ids=str,
)
def test_policy_that_does_not_fit_is_refused(table: SharedTable, policy: Policy, bound: str) -> None:
    """An unsupported policy is a ConfigError that names the bound and the store to use."""
    assert not SharedTable.supports(policy)
    with pytest.raises(ConfigError, match=f"{bound}.*SqliteStore"):
        table.take(policy, "k")


# ---- the store's small print -----------------------------------------------------------------------------------------


def test_table_reads_its_own_clock(table: SharedTable) -> None:
    """Without `now_us` the quota goes down with each hit and the waits count down in real time."""
    decisions = [table.take(MINUTE, "k") for _ in range(11)]
    assert [d.allowed for d in decisions] == [True] * 10 + [False]
    assert [d.remaining for d in decisions] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0]
    assert 5_000_000 < decisions[-1].retry_after_us <= 6_000_000  # type: ignore[operator]
    assert isinstance(decisions[0], Decision)
    assert decisions[0].allowed is True


def test_peek_writes_nothing(table: SharedTable) -> None:
    """`peek` says what `take` would and leaves every byte of the segment as it was, also for a new key."""
    table.take(MINUTE, "k", 7)
    before = bytes(table._opened()[0].mapping)
    assert table.peek(MINUTE, "k").remaining == 3
    assert table.peek(MINUTE, "k", 2).remaining == 1
    assert not table.peek(MINUTE, "k", 4).allowed
    assert table.peek(MINUTE, "new", 4).remaining == 6
    assert table.peek(MINUTE, "new", 11).retry_after_us is None
    assert bytes(table._opened()[0].mapping) == before


def test_denial_writes_only_its_counter(table: SharedTable) -> None:
    """A refused request changes no slot and no shared word: only the line of its own process."""
    table.take(MINUTE, "k", 10)
    before = bytes(table._opened()[0].mapping)
    for _ in range(5):
        assert not table.take(MINUTE, "k").allowed
        assert not table.take(MINUTE, "k", 11).allowed
    after = bytes(table._opened()[0].mapping)
    changed = {i for i in range(len(before)) if before[i] != after[i]}
    lane_of = {(i - layout.LANES_AT) // layout.LANE_BYTES for i in changed}
    assert len(lane_of) == 1
    assert max(changed) < layout.HEADER_BYTES
    assert table.stats()["denied"] == 10


def test_reset_gives_the_quota_back(table: SharedTable) -> None:
    """`reset` forgets a live state once, and says whether there was one."""
    assert not table.reset(MINUTE, "k")
    table.take(MINUTE, "k", 10)
    assert table.reset(MINUTE, "k")
    assert not table.reset(MINUTE, "k")
    assert table.take(MINUTE, "k").remaining == 9
    assert table.used() == 1


def test_reset_of_an_expired_state_is_none(table: SharedTable) -> None:
    """What has expired is no state any more."""
    table.take(TokenBucket(1, 0.001), "k", now_us=T0)
    assert not table.reset(TokenBucket(1, 0.001), "k")


def test_used_counts_live_states(table: SharedTable) -> None:
    """Expired states and reservations aren't in use."""
    for i in range(100):
        table.take(TokenBucket(1, 3600), f"live {i}")
        table.take(TokenBucket(1, 3600), f"expired {i}", now_us=T0)
    assert table.used() == 100


class Units(enum.IntEnum):
    """An integer that isn't of the very class `int`."""

    TWO = 2


@pytest.mark.parametrize("cost", [-1, 1.0, "1", None, True, 2.5])
def test_bad_cost_is_refused(table: SharedTable, cost: Any) -> None:
    """A cost that is no integer of 0 or more is a ValueError, and nothing is charged."""
    table.take(MINUTE, "k")
    with pytest.raises(ValueError, match="cost must be"):
        table.take(MINUTE, "k", cost)
    assert table.peek(MINUTE, "k").remaining == 9


def test_cost_of_any_size_is_read_whole(table: SharedTable) -> None:
    """Costs beyond 32 and 64 bits are denied for good, and no bits are cut off."""
    assert table.take(MINUTE, "k", Units.TWO).remaining == 8
    for cost in (11, 2**31, 2**32 + 1, 2**64 + 1, 10**30):
        decision = table.take(MINUTE, "k", cost)
        assert (decision.allowed, decision.remaining, decision.retry_after_us) == (False, 8, None)


def test_cost_zero_reports(table: SharedTable) -> None:
    """Cost 0 changes nothing, for a new key as for a spent one."""
    assert table.take(MINUTE, "k", 0) == Decision(True, 10, 10, 0, 0, 0)
    assert table.used() == 0
    table.take(MINUTE, "k", 10)
    assert table.take(MINUTE, "k", 0).remaining == 0


@pytest.mark.parametrize("now_us", [-1, NOW_MAX_US + 1, 1.5, True, "0"])
def test_bad_time_is_refused(table: SharedTable, now_us: Any) -> None:
    """A time outside 1970 to 2100 is a ValueError."""
    with pytest.raises(ValueError, match="now_us must be"):
        table.take(MINUTE, "k", now_us=now_us)


@pytest.mark.parametrize("key", [None, 7, bytearray(b"k"), memoryview(b"k")])
def test_bad_key_is_refused(table: SharedTable, key: Any) -> None:
    """A key is text or bytes; ctypes would take a number for an address."""
    for call in (table.take, table.peek, table.reset):
        with pytest.raises(TypeError, match="str or bytes"):
            call(MINUTE, key)


def test_answers_of_threads_do_not_mix(table: SharedTable) -> None:
    """A spent key is never told "allowed" by another thread's answer."""
    spent = TokenBucket(1, 3600)
    table.take(spent, "spent")
    wrong: list[Decision] = []

    def look(key: str, allowed: bool) -> None:
        for _ in range(3000):
            decision = table.peek(spent, key, 1)
            if decision.allowed is not allowed:
                wrong.append(decision)

    threads = [threading.Thread(target=look, args=(key, key != "spent")) for key in ["spent", "new"] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_corrupt_state_is_an_error(table: SharedTable) -> None:
    """A word of another kind under a bucket's fingerprint is told, not counted on."""
    table.take(MINUTE, "k")
    slots = table.slots
    at = slots["fingerprint"].nonzero()[0][0]
    slots["state"][at] = 0b010 << 61 | 1 << 40
    with pytest.raises(LayoutError, match="corrupt"):
        table.take(MINUTE, "k")


def test_policies_made_anew_are_one_policy(table: SharedTable) -> None:
    """An application may make its policy for each request: the count goes on, and nothing piles up."""
    for number in range(3000):
        assert table.take(TokenBucket(5000, 3600), "k").remaining == 5000 - 1 - number
    assert len(table._by_id) <= 1024
    assert len(table._pools) + len(table._told) == 1


def test_call_under_way_is_not_disturbed(table: SharedTable) -> None:
    """A second call between another's decision and its answer (a signal handler, a thread) changes no answer: through
    ctypes, where that is two steps. A builtin is one.
    """
    once = TokenBucket(1, 3600)
    table.take(once, "spent")
    take, interruptions = table._take_one, []

    def interrupted(*arguments: Any) -> Any:
        status = take(*arguments)
        table._take_one = take
        interruptions.append(SharedTable.take(table, once, "other").allowed)
        return status

    table._take_one = interrupted
    assert not SharedTable.take(table, once, "spent").allowed
    assert interruptions == [True]


def test_policies_do_not_pile_up(table: SharedTable) -> None:
    """An application with a policy for each customer keeps no more prepared than a bound; counts go on."""
    for number in range(1, 3001):
        table.take(TokenBucket(number, 3600), "k")
    assert len(table._pools) <= 1024
    assert len(table._told) <= 1024
    assert table.peek(TokenBucket(7, 3600), "k").remaining == 6
