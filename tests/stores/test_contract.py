"""What every store promises: one body of tests, run over all of them.

A store that can't run a policy, or has no `take_all`, is left out of the tests that need it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmlimit import (
    Decision,
    FixedWindow,
    Gcra,
    Policy,
    SharedTable,
    SlidingCounter,
    SlidingLog,
    StoreError,
    TokenBucket,
    parse,
)
from shmlimit.stores.local import LocalStore
from shmlimit.stores.memory import MemoryStore
from shmlimit.stores.sqlite import SqliteStore
from shmlimit.table.segment import remove

T0 = 1_767_225_600_000_000  # 2026-01-01
S = 1_000_000
YEAR = 366 * 86_400
KINDS = [TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter]
TEN = [kind(10, 60) for kind in KINDS]
ONCE = TokenBucket(1, YEAR)
MODEST = settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=40)


@pytest.fixture(params=["memory", "sqlite", "table", "local"])
def make(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> Iterator[Callable[[], Any]]:
    """Makes a new, empty store each time it is called."""
    number = count()
    with ExitStack() as stack:

        def table() -> SharedTable:
            unique = f"{name[:-3]}{next(number):03x}"
            stack.callback(remove, unique)
            return stack.enter_context(SharedTable.create(unique, 64))

        def sqlite() -> SqliteStore:
            return stack.enter_context(SqliteStore(tmp_path / f"{next(number)}.sqlite3"))

        def local() -> LocalStore:
            return LocalStore(table(), sqlite())

        def memory() -> MemoryStore:
            return stack.enter_context(MemoryStore())

        yield {"memory": memory, "sqlite": sqlite, "table": table, "local": local}[request.param]


@pytest.fixture
def store(make: Callable[[], Any]) -> Any:
    return make()


def need(store: Any, *policies: Policy, method: str = "take") -> None:
    """Skips what a store doesn't do."""
    for policy in policies:
        if not store.supports(policy):
            pytest.skip(f"{type(store).__name__} doesn't run {policy}")
    if not hasattr(store, method):
        pytest.skip(f"{type(store).__name__} has no {method}")


def kept(store: Any) -> Any:
    """All that a store keeps."""
    if isinstance(store, MemoryStore):
        return dict(store._entries), store._watermark_us
    if isinstance(store, LocalStore):
        return kept(store.table), kept(store.sqlite) if Path(store.sqlite.path).exists() else None
    if isinstance(store, SqliteStore):
        connection = sqlite3.connect(store.path)
        tables = [f'"{store.table}"', f'"{store.table}:forgotten"']
        rows = [connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables]
        connection.close()
        return rows
    return store.slots.tobytes()


# ---- the same decisions as the pure policy ---------------------------------------------------------------------------

policies = st.builds(
    lambda kind, limit, period_us: kind(limit, period_us / S),
    st.sampled_from(KINDS),
    st.integers(1, 8),
    st.sampled_from([1_000, 30_000, 700_000, S, 60 * S, 86_400 * S]),
)


def histories(policy: Policy, low: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """(step of the clock, cost, which key)."""
    interval = max(1, policy.period_us // policy.limit)
    step = st.one_of(
        st.just(0),
        st.integers(0, 3 * interval),
        st.integers(low * interval, 0),
        st.integers(0, 2 * policy.window_us),
        st.sampled_from([interval - 1, interval, interval + 1, policy.window_us]),
    )
    cost = st.one_of(st.just(1), st.integers(0, policy.quota + 1), st.sampled_from([policy.quota, 10**30]))
    return st.lists(st.tuples(step, cost, st.integers(0, 2)), min_size=1, max_size=25)


@MODEST
@given(data=st.data(), policy=policies)
def test_every_decision_is_the_pure_one(make: Callable[[], Any], data: st.DataObject, policy: Policy) -> None:
    """All six fields agree with the pure policy on any history of a key, with times that go back, for take and peek."""
    store = make()
    if not store.supports(policy):
        return
    state, now_us = None, T0
    for step, cost, _ in data.draw(histories(policy, -2)):
        now_us += step
        wanted, after = policy.decide(state, now_us, cost)
        assert store.peek(policy, "k", cost, now_us=now_us) == wanted
        assert store.take(policy, "k", cost, now_us=now_us) == wanted
        state = after if wanted.allowed and cost else state
    store.close()


@MODEST
@given(data=st.data(), policy=policies)
def test_forgetting_is_not_seen(make: Callable[[], Any], data: st.DataObject, policy: Policy) -> None:
    """While time goes forward, several keys get the pure policy's decisions, whatever was purged meanwhile."""
    store = make()
    if not store.supports(policy):
        return
    states: dict[int, Any] = {}
    now_us = T0
    for step, cost, key in data.draw(histories(policy, 0)):
        now_us += step
        wanted, after = policy.decide(states.get(key), now_us, cost)
        assert store.take(policy, f"key {key}", cost, now_us=now_us) == wanted
        if wanted.allowed and cost:
            states[key] = after
    store.close()


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_own_clock(store: Any, policy: Policy) -> None:
    """Without `now_us` a store reads a clock of its own, near to the time of day, and the quota goes down."""
    need(store, policy)
    decisions = [store.take(policy, "k") for _ in range(3)]
    assert [decision.remaining for decision in decisions] == [9, 8, 7]
    assert isinstance(decisions[0], Decision)
    assert all(0 < decision.reset_us <= 2 * 60 * S for decision in decisions)


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_what_was_forgotten_is_not_judged_earlier(store: Any, policy: Policy) -> None:
    """A spent key that was forgotten and comes back with an earlier time gets one more quota, as of the time at which
    it was forgotten, and waits from the time that it gave.
    """
    need(store, policy)
    if isinstance(store, SharedTable | LocalStore) and SharedTable.supports(policy):
        pytest.skip("forgets only where it needs the slot")
    assert store.take(policy, "k", 10, now_us=T0).allowed
    assert not store.take(policy, "k", now_us=T0).allowed
    store.take(policy, "other", now_us=T0 + 3600 * S)
    expiry_us = policy.expires_at(policy.decide(None, T0, 10)[1])
    peeked, taken = store.peek(policy, "k", 1, now_us=T0), store.take(policy, "k", 1, now_us=T0)
    wanted = policy.decide(None, expiry_us, 1)[0]
    lead_us = expiry_us - T0
    assert peeked == taken
    assert taken == wanted._replace(reset_us=wanted.reset_us + lead_us, next_us=wanted.next_us + lead_us)
    allowed = [store.take(policy, "k", now_us=T0).allowed for _ in range(20)]
    assert sum(allowed) <= 9
    assert not store.take(policy, "k", 9, now_us=T0).allowed
    never = store.take(policy, "new", 11, now_us=T0)
    assert (never.retry_after_us, never.reset_us, never.next_us, never.remaining) == (None, 0, 0, 10)


# ---- nothing is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_peek_writes_nothing(store: Any, policy: Policy) -> None:
    """`peek` says what `take` would and changes nothing, for a key that is there and one that isn't."""
    need(store, policy)
    store.take(policy, "k", 7, now_us=T0)
    before = kept(store)
    assert store.peek(policy, "k", now_us=T0).remaining == 3
    assert store.peek(policy, "k", 2, now_us=T0).remaining == 1
    assert not store.peek(policy, "k", 4, now_us=T0).allowed
    assert store.peek(policy, "new", 4, now_us=T0).remaining == 6
    assert store.peek(policy, "k", 1, now_us=T0 + 3600 * S).remaining == 9
    assert kept(store) == before


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_denial_and_cost_0_store_nothing(store: Any, policy: Policy) -> None:
    """A refused request, one that only reports and one that never fits leave everything as it was."""
    need(store, policy)
    store.take(policy, "k", 10, now_us=T0)
    before = kept(store)
    assert not store.take(policy, "k", now_us=T0).allowed
    assert store.take(policy, "k", 11, now_us=T0).retry_after_us is None
    assert store.take(policy, "new", 11, now_us=T0 + 3600 * S).retry_after_us is None
    assert store.take(policy, "new", 0, now_us=T0) == Decision(True, 10, 10, 0, 0, 0)
    assert store.take(policy, "k", 0, now_us=T0).remaining == 0
    if hasattr(store, "take_all"):
        assert all(store.take_all([(policy, "k", 0), (policy, "new", 0)], now_us=T0))
        assert not all(store.take_all([(policy, "k", 1), (policy, "new", 1)], now_us=T0))
    assert kept(store) == before


# ---- keys, policies, arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        (b"AB\0CD", b"AB\0EF"),
        ("AB", b"AB\0"),
        ("", "\0"),
        ("a b", "a\nb"),
        ("x" * 100_000, "x" * 99_999 + "y"),
        (b"\xff", b"\xfe"),
        ("\ud800", "\ud801"),
        ("a", "A"),
        ("1", "1.0"),
        ("'; DROP TABLE ratelimit; --", '"; DROP TABLE ratelimit; --'),
    ],
    ids=lambda keys: ascii(keys)[:30],
)
def test_keys_of_any_bytes_are_told_apart(store: Any, keys: tuple[str | bytes, str | bytes]) -> None:
    """NUL, blanks, letter case, length and bytes beyond UTF-8 all count."""
    assert [store.take(ONCE, key).allowed for key in (*keys, *keys)] == [True, True, False, False]


def test_text_and_bytes_are_one_key(store: Any) -> None:
    """A `str` key is its UTF-8 bytes."""
    assert store.take(TEN[0], "ä").remaining == 9
    assert store.take(TEN[0], "ä".encode()).remaining == 8
    assert store.reset(TEN[0], "ä".encode())


def test_equal_policies_share_and_others_do_not(store: Any) -> None:
    """The identity of a state is policy and key: the kind and every number."""
    others = [Gcra(10, 60), *TEN[2:], TokenBucket(10, 61), TokenBucket(10, 60, burst=11), TokenBucket(11, 60, burst=10)]
    assert store.take(TokenBucket(10, 60), "k").remaining == 9
    assert store.take(TokenBucket(10, 60, burst=10), "k").remaining == 8
    for policy in others:
        if store.supports(policy):
            assert store.take(policy, "k").remaining == policy.quota - 1
    assert store.peek(TokenBucket(10, 60), "k").remaining == 8


def test_raised_and_lowered_limits(store: Any) -> None:
    """redis-cell#54, Metron#629: a changed limit met the old state; here it is a policy of its own."""
    for _ in range(2):
        store.take(parse("10/20s burst 16"), "k", now_us=T0)
    assert store.take(parse("1000/20s burst 16"), "k", now_us=T0).remaining == 15
    high, low = parse("sliding-log 100/minute"), parse("sliding-log 10/minute")
    if store.supports(high):
        store.take(high, "k", 50, now_us=T0)
        assert store.take(low, "k", now_us=T0).remaining == 9


def test_windows_of_two_keys_are_apart(store: Any) -> None:
    """ulule/limiter#230: one key's window reset another's; here the hourly count goes down without a jump."""
    hourly, often = parse("fixed 30/hour"), parse("fixed 10/s")
    need(store, hourly, often)
    remaining = []
    for i in range(10):
        remaining.append(store.take(hourly, "A", now_us=T0 + i * 400_000).remaining)
        store.take(often, "B", now_us=T0 + i * 400_000)
    assert remaining == list(range(29, 19, -1))


@pytest.mark.parametrize("cost", [-1, -5, 1.0, 1.5, "1", None, True], ids=repr)
def test_bad_cost_is_refused(store: Any, cost: Any) -> None:
    """A cost that is no integer of 0 or more is a ValueError, and nothing is charged."""
    store.take(TEN[0], "k")
    with pytest.raises(ValueError, match="cost must be"):
        store.take(TEN[0], "k", cost)
    with pytest.raises(ValueError, match="cost must be"):
        store.peek(TEN[0], "k", cost)
    assert store.peek(TEN[0], "k").remaining == 9


@pytest.mark.parametrize("now_us", [-1, 10**18 + 1, 1.5, True, "0"], ids=repr)
def test_bad_time_is_refused(store: Any, now_us: Any) -> None:
    """A time that is no integer of microseconds since 1970 is a ValueError."""
    for call in (store.take, store.peek):
        with pytest.raises(ValueError, match="now_us must be"):
            call(TEN[0], "k", now_us=now_us)


@pytest.mark.parametrize("key", [None, 7, bytearray(b"k"), memoryview(b"k")], ids=lambda key: type(key).__name__)
def test_bad_key_is_refused(store: Any, key: Any) -> None:
    """A key is text or bytes."""
    for call in (store.take, store.peek, store.reset):
        with pytest.raises(TypeError, match="str or bytes"):
            call(TEN[0], key)


# ---- reset, close ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_reset_gives_the_quota_back(store: Any, kind: type[Policy]) -> None:
    """`reset` forgets a live state once, says whether there was one, and touches no other key and no other policy."""
    policy, other = kind(10, 3600), kind(10, 7200)
    need(store, policy)
    assert not store.reset(policy, "k")
    for one, key in [(policy, "k"), (policy, "other"), (other, "k")]:
        store.take(one, key, 10)
    assert store.reset(policy, "k")
    assert not store.reset(policy, "k")
    assert store.take(policy, "k").remaining == 9
    assert not store.take(policy, "other").allowed
    assert not store.take(other, "k").allowed


def test_reset_of_an_expired_state_is_none(store: Any) -> None:
    """What has expired is no state any more."""
    store.take(TokenBucket(1, 0.001), "k", now_us=T0)
    assert not store.reset(TokenBucket(1, 0.001), "k")


def test_closed_store_says_so(store: Any) -> None:
    """Every call after `close` is a StoreError; closing twice is no mistake."""
    store.take(ONCE, "k")
    store.close()
    for call in (store.take, store.peek, store.reset):
        with pytest.raises(StoreError, match="closed"):
            call(ONCE, "k")
    store.close()


# ---- all or nothing --------------------------------------------------------------------------------------------------


def test_all_or_nothing(store: Any) -> None:
    """The first limit was charged although the second refused (limits, falcon-limiter); here none is charged, the
    denying one says so and the other reports what `peek` would.
    """
    need(store, method="take_all")
    hourly, minute = parse("5/hour"), parse("1/minute")
    both = [(hourly, "k", 1), (minute, "k", 1)]
    answers = [store.take_all(both, now_us=T0) for _ in range(3)]
    assert [[one.allowed for one in answer] for answer in answers] == [[True, True], [True, False], [True, False]]
    assert [answer[0].remaining for answer in answers] == [4, 4, 4]
    assert answers[1] == [store.peek(hourly, "k", now_us=T0), store.peek(minute, "k", 1, now_us=T0)]


def test_refused_hits_do_not_use_up_the_larger_limit(store: Any) -> None:
    """graphql-rate-limit#129: 10 of 31 within the minute, and the larger limit has 20 left."""
    minute, half_hour = parse("fixed 10/minute"), parse("fixed 30/1800s")
    need(store, minute, half_hour, method="take_all")
    answers = [store.take_all([(minute, "k", 1), (half_hour, "k", 1)], now_us=T0 + i) for i in range(31)]
    assert sum(all(answer) for answer in answers) == 10
    assert store.peek(half_hour, "k", now_us=T0).remaining == 20


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_same_key_twice_gets_the_joint_answer(store: Any, policy: Policy) -> None:
    """The same policy and key twice adds the costs up, also as text and bytes; denied together, nothing is charged."""
    need(store, policy, method="take_all")
    answer = store.take_all([(policy, "k", 2), (policy, "other", 1), (policy, b"k", 3)], now_us=T0)
    assert [one.remaining for one in answer] == [5, 9, 5]
    denied = store.take_all([(policy, "k", 3), (policy, "other", 1), (policy, "k", 3)], now_us=T0)
    assert [one.allowed for one in denied] == [False, True, False]
    assert denied[0] == denied[2] == policy.simulate([(T0, 5), (T0, 6)])[1]
    assert store.peek(policy, "k", now_us=T0).remaining == 5
    assert store.peek(policy, "other", now_us=T0).remaining == 9


def test_take_all_of_one_is_take(store: Any) -> None:
    """One request is `take`, and none at all is an empty answer."""
    need(store, method="take_all")
    assert store.take_all([], now_us=T0) == []
    assert store.take_all([(TEN[0], "k", 4)], now_us=T0) == TEN[0].simulate([(T0, 4)])
    assert store.take_all(iter([(TEN[0], "k", 0)]), now_us=T0)[0].remaining == 6


@pytest.mark.parametrize("bad", [("k", -1, ValueError), (7, 1, TypeError)], ids=["cost", "key"])
def test_mistake_in_one_charges_none(store: Any, bad: Any) -> None:
    """A bad cost or key anywhere in the list is raised before anything is charged."""
    need(store, method="take_all")
    key, cost, error = bad
    with pytest.raises(error):
        store.take_all([(TEN[0], "first", 1), (TEN[0], key, cost)], now_us=T0)
    assert store.peek(TEN[0], "first", now_us=T0).remaining == 10


# ---- threads and event loops -----------------------------------------------------------------------------------------


@pytest.fixture
def _often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_exactly_the_limit(store: Any, kind: type[Policy]) -> None:
    """In limits 5.8, 8 threads with 50 hits each got 126 of 100; here 100, on one key and all or nothing over two."""
    policy = kind(100, YEAR)
    need(store, policy, method="take_all")
    barrier, allowed = threading.Barrier(8), []

    def hit() -> None:
        barrier.wait()
        for i in range(50):
            answer = store.take_all([(policy, "k", 1), (policy, "l", 1)]) if i % 2 else [store.take(policy, "k")]
            allowed.append(all(answer))

    threads = [threading.Thread(target=hit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(allowed) == 400
    assert sum(allowed) == 100
    assert store.peek(policy, "k").remaining == 0


def test_coroutines_answer_alike(store: Any) -> None:
    """`atake`, `apeek`, `areset` and `atake_all` give what the plain methods do."""
    need(store, method="atake_all")

    async def all_of_them() -> list[Any]:
        taken = await store.atake(TEN[0], "k", 2, now_us=T0)
        peeked = await store.apeek(TEN[0], "k", 1, now_us=T0)
        both = await store.atake_all([(TEN[0], "k", 1), (TEN[0], "l", 1)], now_us=T0)
        many = await asyncio.gather(*(store.atake(ONCE, "once") for _ in range(5)))
        return [taken, peeked, *both, sum(one.allowed for one in many), await store.areset(ONCE, "once")]

    one, two, three, four, five, six = asyncio.run(all_of_them())
    assert [one.remaining, two.remaining, three.remaining, four.remaining, five, six] == [8, 7, 7, 9, 1, True]
