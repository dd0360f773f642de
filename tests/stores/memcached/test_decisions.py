"""MemcachedStore: the pure decisions, and what memcached is told."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmlimit import ConfigError, FixedWindow, Gcra, SlidingLog, StoreError, TokenBucket
from shmlimit.stores._memcached_server import ABSOLUTE_MARGIN_S, ABSOLUTE_MAX_S, MARGIN_S, RELATIVE_MAX_S, expiry
from shmlimit.stores.memcached import MemcachedStore
from tests.stores.memcached.conftest import DAY, KINDS, T0, TEN, YEAR, S, name_of, seconds_left

HUGE = "x" * 100_000
MODEST = settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=40)


# ---- decisions -------------------------------------------------------------------------------------------------------


@MODEST
@given(data=st.data())
def test_every_decision_is_the_pure_one(store: MemcachedStore, data: st.DataObject) -> None:
    """All six fields agree with the pure policy on any history of a key, with times that go back, for take and peek."""
    kind = data.draw(st.sampled_from(KINDS))
    policy = kind(data.draw(st.integers(1, 8)), data.draw(st.sampled_from([0.001, 0.7, 1, 60, DAY, 10**9 // 8])))
    interval = policy.period_us // policy.limit
    steps = st.one_of(st.integers(-2 * interval, 3 * interval), st.just(interval), st.just(policy.window_us))
    costs = st.one_of(st.just(1), st.integers(0, policy.quota + 1), st.just(10**30))
    key, state, now_us = secrets.token_bytes(8), None, T0
    for step, cost in data.draw(st.lists(st.tuples(steps, costs), min_size=1, max_size=20)):
        now_us += step
        wanted, after = policy.decide(state, now_us, cost)
        assert store.peek(policy, key, cost, now_us=now_us) == wanted
        assert store.take(policy, key, cost, now_us=now_us) == wanted
        state = after if wanted.allowed and cost else state


@pytest.mark.parametrize("policy", [kind(10, 60) for kind in KINDS], ids=str)
def test_denial_peek_and_cost_0_write_nothing(store: MemcachedStore, policy: Any) -> None:
    """The number that memcached gives each write stays as it was, and a key that wasn't there still isn't."""
    store.take(policy, "k", 10, now_us=T0)
    fetched = store._server.fetch([name_of(store, policy, "k")])
    assert not store.take(policy, "k", now_us=T0).allowed
    assert store.take(policy, "k", 11, now_us=T0).retry_after_us is None
    assert store.take(policy, "k", 0, now_us=T0).remaining == 0
    assert store.take(policy, "new", 11, now_us=T0).retry_after_us is None
    assert store.take(policy, "new", 0, now_us=T0).remaining == 10
    assert store.peek(policy, "new", 1, now_us=T0).remaining == 9
    assert not all(store.take_all([(policy, "new", 1), (policy, "k", 1)], now_us=T0))
    assert all(store.take_all([(policy, "new", 0), (policy, "k", 0)], now_us=T0))
    assert store._server.fetch([name_of(store, policy, "k"), name_of(store, policy, "new")]) == fetched


def test_clock_is_the_hosts(make: Callable[..., MemcachedStore]) -> None:
    """It is read anew for each decision; set back, it grants nothing."""
    times = [T0, T0 + 6 * S, T0 - 3600 * S, T0 + 7 * S]
    store = make(clock=lambda: times.pop(0))
    assert [store.take(Gcra(1, 6), "k").allowed for _ in range(4)] == [True, True, False, False]
    assert times == []


def test_sliding_logs_are_for_others(store: MemcachedStore) -> None:
    """A policy that it doesn't run is a ConfigError that names the stores which do, for each method."""
    policy = SlidingLog(10, 60)
    assert not store.supports(policy)
    assert not store.supports("10/minute")  # type: ignore[arg-type]
    for call in (store.take, store.peek, store.reset, lambda *_: store.take_all([(TEN, "k", 1), (policy, "k", 1)])):
        with pytest.raises(ConfigError, match=r"'sliding-log 10/minute'; RedisStore and SqliteStore do"):
            call(policy, "k")
    assert store.peek(TEN, "k").remaining == 10


# ---- what memcached is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    ["", " ", "a b", "a\r\nset x 0 0 1\r\n", "\0", "ä", "x" * 251, HUGE, b"\xff\xfe", "\ud800"],
    ids=lambda k: ascii(k)[:20],
)
def test_names_are_fit_for_memcached(make: Callable[..., MemcachedStore], key: str | bytes) -> None:
    """Any key becomes at most 250 printable characters under the prefix, also the longest one, and is counted."""
    store = make(prefix=secrets.token_hex(100))
    raw = key if isinstance(key, bytes) else key.encode("utf-8", "surrogatepass")
    name = store._name(TEN, raw)
    assert name.startswith(f"{store.prefix}:")
    assert len(name) <= 250
    assert all("!" <= char <= "~" for char in name)
    assert [store.take(TEN, key).remaining, store.take(TEN, raw).remaining] == [9, 8]


def test_policy_and_key_do_not_run_together(store: MemcachedStore) -> None:
    """What ends a policy's text and begins a key is unambiguous."""
    names = {
        name_of(store, policy, key)
        for policy in (FixedWindow(1, 1), Gcra(1, 1), Gcra(1, 1, 11))
        for key in ("", "1", "\0", " 1")
    }
    assert len(names) == 12


@pytest.mark.parametrize("period_s", [0.001, 1, 60, 29 * DAY])
def test_entry_outlives_its_state_a_little(store: MemcachedStore, period_s: float) -> None:
    """An entry is kept for its state's time rounded up, and ten seconds more."""
    policy = TokenBucket(1, period_s)
    store.take(policy, "k", now_us=T0)
    left = seconds_left(store, policy, "k")
    wanted = -(-policy.period_us // S) + MARGIN_S
    assert left in (wanted, wanted - 1)


@pytest.mark.parametrize("days", [30, 31, 60, 366])
def test_entry_beyond_30_days(store: MemcachedStore, days: int) -> None:
    """An expiry that memcached would take for a Unix time is given as one, with a day for clocks that differ."""
    policy = TokenBucket(1, days * DAY)
    store.take(policy, "k", now_us=T0)
    left = seconds_left(store, policy, "k")
    assert left is not None
    assert abs(left - days * DAY - ABSOLUTE_MARGIN_S) <= 2


def test_entry_beyond_2038(store: MemcachedStore) -> None:
    """Times are kept in 32 bits there, and a later one would have passed: such an entry stays."""
    policy = TokenBucket(1, 10**9)
    store.take(policy, "k", now_us=T0)
    assert seconds_left(store, policy, "k") is None
    assert not store.take(policy, "k", now_us=T0 + 10**15 - 1).allowed
    assert store.take(policy, "k", now_us=T0 + 10**15).allowed


@pytest.mark.parametrize("now_us", [0, 4_102_444_800 * S, 10**18], ids=["1970", "2100", "far"])
def test_expiry_is_relative_to_the_callers_time(store: MemcachedStore, now_us: int) -> None:
    """Whatever time a caller gives, an entry lives for as long as its state does from there."""
    store.take(TEN, "k", 10, now_us=now_us)
    assert seconds_left(store, TEN, "k") in (69, 70)
    assert not store.take(TEN, "k", now_us=now_us).allowed


def test_expiry_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never 0 for a state that has passed, never a second short, a Unix time from the first second past 30 days on, and
    0 from the first past 2038 on, also when that is in the past.
    """
    now_s = 1_800_000_000
    monkeypatch.setattr(time, "time", lambda: now_s + 0.9)
    assert [expiry(left) for left in (-(10**15), 0, 1, S, S + 1)] == [10, 10, 11, 11, 12]
    last_s = RELATIVE_MAX_S - MARGIN_S
    assert expiry(last_s * S) == RELATIVE_MAX_S
    assert expiry(last_s * S + 1) == now_s + last_s + 1 + ABSOLUTE_MARGIN_S
    last_s = ABSOLUTE_MAX_S - ABSOLUTE_MARGIN_S - now_s
    assert [expiry(last_s * S), expiry(last_s * S + 1)] == [ABSOLUTE_MAX_S, 0]
    now_s = ABSOLUTE_MAX_S + 5
    assert [expiry(60 * S), expiry(31 * DAY * S)] == [70, 0]


def test_value_is_the_state_as_json(store: MemcachedStore) -> None:
    """What lies in memcached is the policy's state, compact."""
    store.take(Gcra(10, 60), "k", now_us=T0)
    [(value, _)] = store._server.fetch([name_of(store, Gcra(10, 60), "k")]).values()
    assert json.loads(value) == Gcra(10, 60).decide(None, T0)[1]
    assert b" " not in value


@pytest.mark.parametrize(
    "value",
    [
        "",
        "1",
        "null",
        "{}",
        '{"kind":"fixed","start_us":0,"count":0}',
        '{"kind":"token-bucket","level":1.5,"at_us":0}',
        "[" * 9_999,
        "\x80",
    ],
)
def test_foreign_value_is_an_error(store: MemcachedStore, value: str) -> None:
    """A value that is no state of the policy is a StoreError that says so, and no fresh quota; `reset` repairs it."""
    name = name_of(store, TEN, "k")
    store._server.put(name, value.encode("latin-1"), None, 60)
    before = store._server.fetch([name])
    for call in (store.take, store.peek, lambda *_: store.take_all([(TEN, "k", 1), (TEN, "l", 1)])):
        with pytest.raises(StoreError, match=r"isn't a state of '10/minute' but .*; reset the key"):
            call(TEN, "k")
    assert store._server.fetch([name]) == before
    assert store.peek(TEN, "other").remaining == 10
    assert store.reset(TEN, "k")
    assert store.take(TEN, "k").remaining == 9


def test_reset_says_whether_there_was_a_live_state(store: MemcachedStore) -> None:
    """True once for a live state, False for none and for one that has expired while memcached still has it."""
    assert not store.reset(TEN, "k")
    store.take(TEN, "k", 10)
    assert [store.reset(TEN, "k"), store.reset(TEN, "k")] == [True, False]
    assert store.take(TEN, "k", 10).allowed
    store.take(TEN, "old", 10, now_us=T0 - YEAR * S)
    assert not store.reset(TEN, "old")
    assert store._server.fetch([name_of(store, TEN, "old")]) == {}
