"""SqliteStore: the wall clock set back and forth, and purging."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmlimit import FixedWindow, Gcra, Policy, SlidingCounter, SlidingLog, TokenBucket
from shmlimit.stores.sqlite import PURGE_ROWS, SqliteStore
from tests.stores.conftest import DAY, KINDS, SECOND, T0, TEN, Clock, S, rows

# ---- the wall clock --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back_us", [1, 30 * S, 3600 * S, 400 * DAY], ids=str)
def test_clock_set_back(store: SqliteStore, clock: Clock, kind: type[Policy], back_us: int) -> None:
    """A spent key stays spent, and opens no later than it would have: the state moves with the clock, for windows on to
    the next start of one.
    """
    policy = kind(10, 60)
    assert store.take(policy, "k", 10).allowed
    wait_us = store.take(policy, "k").retry_after_us
    clock.now_us -= back_us
    denied = store.take(policy, "k")
    assert not denied.allowed
    late_us = 0 if kind in {TokenBucket, Gcra, SlidingLog} else 60 * S - 1
    assert wait_us <= denied.retry_after_us <= wait_us + late_us
    clock.now_us += denied.retry_after_us - 1
    assert not store.take(policy, "k").allowed
    clock.now_us += 1
    assert store.take(policy, "k").allowed


@pytest.mark.parametrize("kind", KINDS)
def test_clock_that_jumps_forth_and_back_for_everybody(path: Path, clock: Clock, kind: type[Policy]) -> None:
    """A clock an hour ahead for a while, and several users of the file: whoever looks first after the step back, no key
    that was spent meanwhile is granted again, nor is one shut for longer than three periods (a counter's two, and the
    way to the start of one). Two of the keys were forgotten in the hour that wasn't.
    """
    policy = kind(10, 60)
    with SqliteStore(path, clock=clock) as one, SqliteStore(path, clock=clock) as other:
        keys = [f"key {number}" for number in range(6)]
        assert all(one.take(policy, key, 10).allowed for key in keys)
        clock.now_us += 3600 * S
        assert all(other.take(policy, key, 10).allowed for key in keys[:4])
        one.purge()
        assert one.count() == 4
        clock.now_us -= 3600 * S - S
        for number, key in enumerate(keys[:4]):
            first, second = (one, other) if number % 2 else (other, one)
            assert not first.take(policy, key).allowed
            assert not second.take(policy, key).allowed
        clock.now_us += 180 * S
        assert all(one.take(policy, key, 10).allowed for key in keys)


def test_row_that_moved_back_expires_with_its_state(store: SqliteStore, clock: Clock) -> None:
    """A state that was moved is purged when it has expired, not when the clock is where it was."""
    store.take(TEN, "k", 10)
    clock.now_us -= DAY
    store.take(TEN, "k")
    clock.now_us += 60 * S
    assert store.purge() == 1


def test_denials_do_not_hold_the_clock(store: SqliteStore, clock: Clock) -> None:
    """After a step back the waits of a refused key count down, whether it is asked by `take`, cost 0 or `peek`."""
    store.take(TEN, "k", 10)
    clock.now_us -= DAY
    waits = []
    for ask in (lambda: store.peek(TEN, "k", 1), lambda: store.take(TEN, "k"), lambda: store.peek(TEN, "k", 1)):
        waits.append(ask().retry_after_us)
        clock.now_us += S
    assert waits == [6 * S, 5 * S, 4 * S]
    store.take(TEN, "k", 0)
    clock.now_us += 3 * S
    assert store.take(TEN, "k").allowed


@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_steps_of_the_clock_grant_nothing(tmp_path: Path, data: st.DataObject, kind: type[Policy]) -> None:
    """However often the clock is set back, buckets and logs decide as on a clock that goes on, and a window's quota
    comes at most twice in a period, as across a seam. Purges in between change nothing.
    """
    clock, true_us = Clock(), T0
    policy = kind(3, 10)
    exact = kind in {TokenBucket, Gcra, SlidingLog}
    state, passed = None, []
    with SqliteStore(tmp_path / f"{time.monotonic_ns()}.sqlite3", clock=clock) as store:
        for forward_us, back_us, purges in data.draw(
            st.lists(st.tuples(st.integers(0, 8 * S), st.sampled_from([0, 0, 0, S, 7 * S, DAY]), st.booleans()))
        ):
            clock.now_us += forward_us
            true_us += forward_us
            if purges:
                store.purge()
            # Looked at before each step, so that the step is known to the microsecond.
            store.take(policy, "k", 0)
            if back_us and store.count():
                with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
                    connection.execute("UPDATE ratelimit SET written_us = max(written_us, ?)", (clock.now_us,))
            clock.now_us -= back_us
            wanted, after = policy.decide(state, true_us)
            got = store.take(policy, "k")
            if exact:
                assert got == wanted
                state = after
            passed += [true_us] * got.allowed
    assert all(sum(at_us <= other < at_us + 10 * S for other in passed) <= 6 for at_us in passed)


@pytest.mark.parametrize("kind", [FixedWindow, SlidingCounter])
def test_window_that_was_forgotten_does_not_come_again(store: SqliteStore, clock: Clock, kind: type[Policy]) -> None:
    """A spent window was purged, then the clock is set back into it: a hit counts in the next one, so no third quota
    comes within two windows.
    """
    policy = kind(10, 60)
    clock.now_us = T0 + 59 * S
    store.take(policy, "k", 10)
    clock.now_us = T0 + 121 * S
    assert store.purge() == 1
    clock.now_us -= 90 * S if kind is FixedWindow else 30 * S
    again_us = clock.now_us
    assert store.take(policy, "k", 10).allowed
    end_us = again_us - again_us % (60 * S) + 60 * S
    clock.now_us = end_us
    assert not store.take(policy, "k").allowed
    assert store.take(policy, "k").retry_after_us > 0


@pytest.mark.parametrize("kind", KINDS)
def test_new_keys_after_a_step_back(store: SqliteStore, clock: Clock, kind: type[Policy]) -> None:
    """Purged rows and a clock that was set back by a day shut nobody out: a window later all is as ever."""
    policy = kind(2, 60)
    clock.now_us += DAY
    store.take(SECOND, "gone")
    clock.now_us += 10 * S
    assert store.purge() == 1
    clock.now_us -= DAY
    assert clock.now_us % (60 * S) == 10 * S
    assert store.take(policy, "first").allowed
    clock.now_us += 60 * S
    state = None
    for _ in range(5):
        wanted, state = policy.decide(state, clock.now_us)
        assert store.take(policy, "second") == wanted
        clock.now_us += 7 * S


def test_clock_set_forward(store: SqliteStore, clock: Clock) -> None:
    """Time that the clock skips has passed, as for everything else on the host."""
    store.take(TEN, "k", 10)
    clock.now_us += 6 * S
    assert [store.take(TEN, "k").allowed for _ in range(2)] == [True, False]


def test_given_time_never_shifts(store: SqliteStore, clock: Clock) -> None:
    """With `now_us` a state is read on its own line, and the clock may be anywhere."""
    store.take(TEN, "k", 10)
    wanted = TEN.simulate([(T0, 10), (T0 - 3 * S, 1)])[1]
    before = rows(store)
    assert store.take(TEN, "k", now_us=T0 - 3 * S) == wanted
    clock.now_us -= DAY
    assert store.take(TEN, "k", now_us=T0 - 3 * S) == wanted
    assert rows(store) == before


def test_time_ahead_is_not_a_clock_set_back(store: SqliteStore, clock: Clock) -> None:
    """A state that a caller's `now_us` wrote ahead of the clock stays where it is."""
    store.take(TEN, "k", 10, now_us=T0 + 3600 * S)
    clock.now_us += S
    assert store.take(TEN, "k").retry_after_us == 3600 * S - S + 6 * S


def test_own_clock_is_the_wall_clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `clock` it is the time of day, read anew for each decision."""
    with SqliteStore(path) as store:
        store.take(TEN, "k", 10)
        later_ns = time.time_ns() + 6 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: later_ns)
        assert store.take(TEN, "k").allowed


# ---- forgetting ------------------------------------------------------------------------------------------------------


def test_decisions_purge(store: SqliteStore, clock: Clock) -> None:
    """A charge removes expired rows, a bounded number of them; denials don't."""
    for i in range(PURGE_ROWS + 50):
        store.take(SECOND, f"key {i}")
    store.take(TEN, "live", 10)
    clock.now_us += 2 * S
    assert not store.take(TEN, "live").allowed
    assert store.count() == PURGE_ROWS + 51
    store.take(SECOND, "one more")
    assert store.count() == 52
    store.take(SECOND, "two more")
    assert store.count() == 3


def test_rows_of_others_are_purged_too(path: Path, clock: Clock) -> None:
    """Another process's rows go as well, after some charges at the latest."""
    with SqliteStore(path, clock=clock) as one, SqliteStore(path, clock=clock) as other:
        other.take(TEN, "first")
        for i in range(30):
            one.take(SECOND, f"key {i}")
        clock.now_us += 2 * S
        for _ in range(64):
            other.take(TokenBucket(1000, 60), "k")
        assert other.count() == 2


def test_purge_and_count(store: SqliteStore, clock: Clock) -> None:
    """`purge` removes what has expired by its time and nothing else, and says how many."""
    for i in range(2500):
        store.take(SECOND, f"key {i}", now_us=T0)
    store.take(TEN, "live", 10, now_us=T0)
    assert store.count() == 2501
    assert store.purge(now_us=T0 + S - 1) == 0
    assert store.purge(now_us=T0 + S) == 2500
    assert store.count() == 1
    assert store.purge() == 0
    clock.now_us += 60 * S
    assert store.purge() == 1
    assert store.count() == 0


def test_row_that_was_hit_again_is_put_off(store: SqliteStore, clock: Clock) -> None:
    """The index has when to look at a row; one whose state lives longer by then stays."""
    store.take(TEN, "k")
    clock.now_us += S
    store.take(TEN, "k", 9)
    clock.now_us += 5 * S
    assert store.purge() == 0
    assert not store.take(TEN, "k", 9).allowed
    clock.now_us += 54 * S
    assert store.purge() == 1


def test_watermark_is_in_the_file(path: Path) -> None:
    """A key that one store forgot isn't judged as of an earlier time by another one, nor after a restart."""
    with SqliteStore(path) as store:
        store.take(TEN, "k", 10, now_us=T0)
        assert store.purge(now_us=T0 + 3600 * S) == 1
    with SqliteStore(path) as store:
        decision = store.take(TEN, "k", now_us=T0)
        assert decision.allowed
        assert decision.reset_us == 66 * S


def test_time_far_ahead_does_not_refill_again_and_again(store: SqliteStore) -> None:
    """A caller whose `now_us` is ahead forgets live rows; their keys get on in its time and not in the clock's, or each
    such call would grant a whole quota.
    """
    allowed = 0
    for _ in range(20):
        allowed += sum(store.take(TEN, "k").allowed for _ in range(11))
        store.purge(now_us=T0 + 120 * S)
    assert allowed <= 30


def test_given_time_does_not_hide_that_the_clock_was_set_back(store: SqliteStore, clock: Clock) -> None:
    """A charge with a given time leaves the row's own time as late as it was: the next one by the clock sees the step,
    and nobody is shut out for it.
    """
    store.take(TEN, "k", 10)
    clock.advance(-3600)
    assert store.take(TEN, "k", now_us=T0 + 6 * S).allowed
    assert store.take(TEN, "k").retry_after_us == 12 * S


def test_brief_states_are_forgotten_in_time(store: SqliteStore, clock: Clock) -> None:
    """A state that expires before all that the store knew of is looked for when it does."""
    store.take(TokenBucket(1, 10**6), "long")
    store.take(SECOND, "brief")
    clock.advance(2)
    store.take(TokenBucket(1, 10**6), "other")
    assert store.count() == 2
