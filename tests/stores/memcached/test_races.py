"""MemcachedStore: lost swaps, and all or nothing, with others that win just before a write."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _servers import Server

from shmlimit import ContentionError, FixedWindow, StoreError, TokenBucket
from shmlimit.stores import memcached
from shmlimit.stores.memcached import MemcachedStore
from tests.stores.memcached.conftest import HUNDRED, KINDS, TEN, YEAR, before_write, name_of

# ---- others win ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [False, True], ids=["add", "cas"])
def test_swap_that_is_lost_begins_anew(make: Callable[..., MemcachedStore], there: bool) -> None:
    """Another that wins before the write is counted, and so is the loser, once, with the answer for the new state."""
    store, other = make(), make()
    if there:
        other.take(HUNDRED, "k", 10)
    before_write(store, lambda number: None if number >= 3 else [other.take(HUNDRED, "k", 5)][0])
    assert store.take(HUNDRED, "k", 2).remaining == 100 - 10 * there - 3 * 5 - 2
    assert other.peek(HUNDRED, "k").remaining == 100 - 10 * there - 3 * 5 - 2


def test_loser_is_denied_if_nothing_is_left(make: Callable[..., MemcachedStore]) -> None:
    """What had been allowed is decided again after a lost swap: of the last unit one gets it."""
    store, other = make(), make()
    before_write(store, lambda _: [other.take(HUNDRED, "k", 100)][0])
    assert not store.take(HUNDRED, "k").allowed
    assert other.peek(HUNDRED, "k").remaining == 0


def test_entry_that_went_meanwhile(make: Callable[..., MemcachedStore]) -> None:
    """A key that was reset (or evicted) between reading and writing is charged as a new one, once."""
    store, other = make(), make()
    other.take(HUNDRED, "k", 40)
    before_write(store, lambda number: None if number else [other.reset(HUNDRED, "k")][0])
    assert store.take(HUNDRED, "k").remaining == 99
    assert other.peek(HUNDRED, "k").remaining == 99


def test_reset_that_another_won(make: Callable[..., MemcachedStore]) -> None:
    """Of two that reset a key one is told that there was something to forget."""
    store, other = make(), make()
    store.take(HUNDRED, "k")
    delete, answers = store._server.delete, []
    store._server.delete = lambda name: [answers.append(other.reset(HUNDRED, "k")), delete(name)][1]  # type: ignore[method-assign]
    assert [store.reset(HUNDRED, "k"), *answers] == [False, True]


def test_bounded_tries(make: Callable[..., MemcachedStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who loses each time gets a ContentionError that says so, and is charged nothing; what others took counts."""
    monkeypatch.setattr(memcached, "PAUSE_S", 0.0)
    store, other = make(), make()
    policy = TokenBucket(10**6, 10**9)
    lost = []
    before_write(store, lambda _: lost.append(other.take(policy, "k").allowed))
    with pytest.raises(ContentionError, match=r"256 times in a row: nothing was charged"):
        store.take(policy, "k", 1000)
    assert lost == [True] * memcached.TRIES
    assert other.peek(policy, "k").remaining == 10**6 - memcached.TRIES


def test_losers_stand_back_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """At random up to two milliseconds, after each of the first four losses and never after that."""
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    assert sum(1 for _ in memcached._tries()) == memcached.TRIES
    assert len(naps) == memcached.PAUSES
    assert all(0 <= nap <= memcached.PAUSE_S for nap in naps)
    assert len(set(naps)) > 1


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_exactly_the_limit(store: MemcachedStore, kind: Any) -> None:
    """8 threads of one store get 100 of 200 together, on one key and all or nothing over two, and nothing is left."""
    policy = kind(100, YEAR)
    barrier, allowed = threading.Barrier(8), []

    def hit() -> None:
        barrier.wait()
        for i in range(25):
            answer = store.take_all([(policy, "k", 1), (policy, "l", 1)]) if i % 2 else [store.take(policy, "k")]
            allowed.append((i % 2, all(answer)))

    with switching_often():
        threads = [threading.Thread(target=hit) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(allowed) == 200
    assert sum(one for _, one in allowed) == 100
    assert store.peek(policy, "k").remaining == 0
    assert store.peek(policy, "l").remaining == 100 - allowed.count((1, True))


# ---- all or nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_charge_is_given_back(make: Callable[..., MemcachedStore], kind: Any) -> None:
    """A limit that others use up after it was read: the ones charged before it are given back to the unit, also where
    others have built on them meanwhile, and the answer says which one denies.
    """
    store, other = make(), make()
    small, large = kind(10, YEAR), kind(100, YEAR)
    other.take(large, "k", 91)

    def act(number: int) -> None:
        if number == 1:  # the scarcer one, of which 9 are left, is charged
            other.take(large, "k", 2)
            other.take(small, "k", 10)

    before_write(store, act)
    answer = store.take_all([(small, "k", 1), (large, "k", 3)])
    assert [one.allowed for one in answer] == [False, True]
    assert [one.remaining for one in answer] == [0, 7]
    assert other.peek(large, "k").remaining == 7
    assert other.peek(small, "k").remaining == 0


def test_scarcest_is_charged_first(store: MemcachedStore) -> None:
    """The order of the writes is that of what is left; the answers come as they were asked."""
    names: list[str] = []
    put = store._server.put
    store._server.put = lambda name, *rest: [names.append(name), put(name, *rest)][1]  # type: ignore[method-assign]
    policies = [TokenBucket(limit, YEAR) for limit in (50, 5, 500)]
    assert [one.remaining for one in store.take_all([(policy, "k", 1) for policy in policies])] == [49, 4, 499]
    assert names == [name_of(store, policies[place], "k") for place in (1, 0, 2)]


def test_joint_request_is_read_in_one_trip(store: MemcachedStore) -> None:
    """All states of a joint request come in one answer, and a refusal is the end of it."""
    trips: list[int] = []
    fetch = store._server.fetch
    store._server.fetch = lambda names: [trips.append(len(names)), fetch(names)][1]  # type: ignore[method-assign]
    assert all(store.take_all([(TEN, str(i), 10) for i in range(5)]))
    assert not all(store.take_all([(TEN, str(i), i + 5) for i in range(6)]))
    assert trips == [5, 6]


def test_limit_that_is_used_up_each_time(make: Callable[..., MemcachedStore]) -> None:
    """Bounded, too: where others use a limit up and free it again each time, it is a ContentionError with nothing
    charged.
    """
    store, other = make(), make()
    small, large = FixedWindow(10, YEAR), FixedWindow(5, YEAR)
    laps = 0

    def act(number: int) -> None:
        nonlocal laps
        if number % 3 == 1:  # of each lap: charge one, lose the other, give the first back
            laps += 1
            other.take(small, "k", 10)
        elif number % 3 == 2:
            other.reset(small, "k")

    before_write(store, act)
    with pytest.raises(ContentionError, match=r"used up by others 8 times .*: nothing was charged"):
        store.take_all([(small, "k", 1), (large, "k", 1)])
    assert laps == memcached.LAPS
    assert [other.peek(small, "k").remaining, other.peek(large, "k").remaining] == [10, 5]


def test_failure_in_between_is_given_back(make: Callable[..., MemcachedStore]) -> None:
    """A write that fails while the server goes on answering: what was charged before is given back, and the failure
    raised.
    """
    store, other = make(), make()
    small, large = TokenBucket(10, YEAR), TokenBucket(100, YEAR)

    def act(number: int) -> None:
        if number == 1:
            raise store._server.failure("no luck")

    before_write(store, act)
    other.take(small, "k")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:\d+ can't answer: no luck"):
        store.take_all([(small, "k", 1), (large, "k", 1)])
    assert [other.peek(small, "k").remaining, other.peek(large, "k").remaining] == [9, 100]


def test_interrupt_in_between_is_given_back(make: Callable[..., MemcachedStore]) -> None:
    """Also at a KeyboardInterrupt, which stays what it is even if giving back fails."""
    store, other = make(), make()
    small, large = TokenBucket(10, YEAR), TokenBucket(100, YEAR)
    failing = False

    def act(number: int) -> None:
        if number == 1 + 3 * failing:
            raise KeyboardInterrupt
        if failing and number > 4:
            raise store._server.failure("no luck")

    before_write(store, act)
    for failing in (False, True):
        with pytest.raises(KeyboardInterrupt):
            store.take_all([(small, "k", 1), (large, "k", 1)])
        assert [other.peek(small, "k").remaining, other.peek(large, "k").remaining] == [10 - failing, 100]


def test_what_cannot_be_given_back_is_told(own_server: Callable[[str], Server]) -> None:
    """The server is gone between two charges: the StoreError says that one stays charged."""
    server = own_server("memcached")
    with MemcachedStore(server.url) as store:
        before_write(store, lambda number: server.kill() if number == 2 else None)
        with pytest.raises(StoreError, match=r"^2 of the limits of a joint request .* stay charged.*can't answer"):
            store.take_all([(TokenBucket(limit, YEAR), "k", 1) for limit in (5, 50, 500)])
