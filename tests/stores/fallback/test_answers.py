"""FallbackStore: who answers, and how, by methods and by coroutines."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from shmlimit import ConfigError, ContentionError, SharedTable, SlidingLog, StoreError
from shmlimit.stores.fallback import FallbackStore
from shmlimit.stores.memory import MemoryStore
from tests.stores.fallback.conftest import MANY, OTHER, T0, TEN, Bare, Clock, Double, Fast, said

# ---- who answers -----------------------------------------------------------------------------------------------------


def test_secret_is_the_same_in_an_outage(store: FallbackStore, first: Fast) -> None:
    """The second store's, if it has one: clients see one `pk` whichever of the two answers."""
    assert store.secret is None
    one, other = MemoryStore(), MemoryStore()
    assert FallbackStore(first, one).secret == FallbackStore(one, first).secret == one.secret
    assert FallbackStore(other, one).secret == one.secret


def test_first_answers_while_it_can(store: FallbackStore, first: Fast, second: Double) -> None:
    """The second isn't asked, but to forget a key."""
    assert store.take(TEN, "k", 3, now_us=T0) == TEN.simulate([(T0, 3)])[0]
    assert store.peek(TEN, "k", now_us=T0).remaining == 7
    assert [one.remaining for one in store.take_all([(TEN, "k", 2), (OTHER, "k", 1)], now_us=T0)] == [5, 19]
    assert second.asked == 0
    assert store.stats() == {"primary": 3, "secondary": 0, "failures": 0, "outages": 0}
    assert store.outage is None


def test_second_answers_while_the_first_cannot(store: FallbackStore, first: Fast, second: Double) -> None:
    """With the arguments as they were given, and then the first again, each with its own count."""
    store.take(TEN, "k", 4, now_us=T0)
    first.error = StoreError("down")
    assert store.take(TEN, "k", 3, now_us=T0) == TEN.simulate([(T0, 3)])[0]
    assert store.peek(TEN, "k", 1, now_us=T0).remaining == 6
    assert [one.remaining for one in store.take_all(iter([(TEN, "k", 2), (OTHER, "k", 1)]), now_us=T0)] == [5, 19]
    assert store.outage == "down"
    assert store.stats() == {"primary": 1, "secondary": 3, "failures": 3, "outages": 1}
    first.error = None
    assert store.take(TEN, "k", now_us=T0).remaining == 5
    assert store.outage is None
    assert store.stats() == {"primary": 2, "secondary": 3, "failures": 3, "outages": 1}


def test_denial_is_an_answer(store: FallbackStore, second: Double) -> None:
    """What the first refuses isn't asked of the second."""
    assert [store.take(TEN, "k", 10).allowed, store.take(TEN, "k").allowed] == [True, False]
    assert not all(store.take_all([(TEN, "k", 1)]))
    assert second.asked == 0


@pytest.mark.parametrize(
    "error",
    [ContentionError("lost"), ConfigError("bad"), ValueError("bad"), TypeError("bad"), KeyError("bug")],
    ids=repr,
)
def test_what_is_no_outage_is_raised(
    slow: tuple[FallbackStore, Double, Clock], second: Double, error: Exception
) -> None:
    """A lost swap charged nothing and a second store would grant a second quota; mistakes are the caller's: all raised
    as they are, by methods and coroutines, and the first is asked again.
    """
    store, first, _ = slow
    first.error = error
    for call in (
        store.take,
        store.peek,
        lambda *_: store.take_all([(TEN, "k", 1)]),
        lambda *_: asyncio.run(store.atake(TEN, "k")),
    ):
        with pytest.raises(type(error)) as caught:
            call(TEN, "k")
        assert caught.value is error
    assert second.asked == 0
    first.error = None
    assert store.take(TEN, "k").remaining == 9
    assert store.stats() == {"primary": 1, "secondary": 0, "failures": 0, "outages": 0}


def test_both_fail(store: FallbackStore, first: Fast, second: Double) -> None:
    """The second's error, from the first's; it counts for no answer."""
    first.error, second.error = StoreError("one"), StoreError("two")
    for call in (
        store.take,
        store.reset,
        lambda *_: asyncio.run(store.atake(TEN, "k")),
        lambda *_: asyncio.run(store.areset(TEN, "k")),
    ):
        with pytest.raises(StoreError, match="two") as caught:
            call(TEN, "k")
        assert caught.value.__cause__ is first.error
    assert store.stats() == {"primary": 0, "secondary": 0, "failures": 4, "outages": 1}


def test_contention_in_the_second_stays_one(store: FallbackStore, first: Fast, second: Double) -> None:
    """Whoever tries again after a ContentionError does so here, too."""
    first.error, second.error = StoreError("one"), ContentionError("two")
    with pytest.raises(ContentionError, match="two"):
        store.take(TEN, "k")


def test_contention_is_a_sign_of_life(store: FallbackStore, first: Fast) -> None:
    """A server whose swaps are lost answers: the outage is over."""
    first.error = StoreError("down")
    store.take(TEN, "k")
    first.error = ContentionError("lost")
    with pytest.raises(ContentionError):
        store.take(TEN, "k")
    assert store.outage is None
    assert store.stats()["primary"] == 0


# ---- reset, supports, close ------------------------------------------------------------------------------------------


def test_reset_goes_to_both(store: FallbackStore, first: Fast, second: Double) -> None:
    """Whichever had the key; a key doesn't stay denied in the other. By method and by coroutine."""

    def areset(*arguments: Any) -> bool:
        return asyncio.run(store.areset(*arguments))

    for reset in (store.reset, areset):
        for holders in ((), (first,), (second,), (first, second)):
            for holder in holders:
                holder.store.take(TEN, "k", 10)
            assert reset(TEN, "k") is bool(holders)
            assert first.store.peek(TEN, "k").remaining == second.store.peek(TEN, "k").remaining == 10


def test_reset_while_one_is_down(
    store: FallbackStore, first: Fast, second: Double, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one's answer; that the second couldn't is in the log."""
    for holder in (first, second):
        holder.store.take(TEN, "k", 10)
    first.error = StoreError("down")
    assert store.reset(TEN, "k")
    assert first.store.peek(TEN, "k").remaining == 0
    assert second.store.peek(TEN, "k").remaining == 10
    first.error, second.error = None, StoreError("off")
    caplog.clear()
    assert store.reset(TEN, "k")
    assert not asyncio.run(store.areset(TEN, "k"))
    assert first.store.peek(TEN, "k").remaining == 10
    lines = [line for line in said(caplog) if "couldn't reset a key: off" in line]
    assert len(lines) == 2


def test_policies_are_those_of_both(name: str) -> None:
    """A policy that one of them doesn't run is refused at once, and not only in an outage."""
    with SharedTable.create(name, 64) as table:
        log = SlidingLog(10, 60)
        for store in (FallbackStore(MemoryStore(), table), FallbackStore(table, MemoryStore())):
            assert store.supports(TEN)
            assert not store.supports(log)
            for call in (
                store.take,
                store.peek,
                store.reset,
                lambda *_, store=store: store.take_all([(TEN, "k", 1), (log, "k", 1)]),
            ):
                with pytest.raises(ConfigError, match=r"'sliding-log 10/minute' is nothing for .*SharedTable"):
                    call(log, "k")
            with pytest.raises(ConfigError, match="takes policies"):
                store.take("10/minute", "k")
            assert store.peek(TEN, "k").remaining == 10


def test_close_closes_both(store: FallbackStore, first: Fast, second: Double, caplog: pytest.LogCaptureFixture) -> None:
    """Also where closing the first fails; later calls say so, and that is no outage."""

    def fail() -> None:
        raise StoreError("can't close")

    first.close = fail  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="can't close"), store:
        pass
    assert second.closed
    for call in (store.take, store.peek, store.reset, lambda *_: store.take_all([(TEN, "k", 1)])):
        with pytest.raises(StoreError, match="this FallbackStore was closed"):
            call(TEN, "k")
    assert first.asked == second.asked == 0
    assert said(caplog) == []


@pytest.mark.parametrize(
    "pair",
    [(MemoryStore(), None), ("redis://h", MemoryStore()), (MemoryStore, MemoryStore()), (MemoryStore(), MemoryStore)],
)
def test_two_stores_are_needed(pair: Any) -> None:
    """Something that is no store, or a class, is a ConfigError that shows it."""
    with pytest.raises(ConfigError, match=r"takes two stores, and .* is none"):
        FallbackStore(*pair)


def test_one_store_twice_is_none() -> None:
    """A store is no help to itself."""
    store = MemoryStore()
    with pytest.raises(ConfigError, match="not one twice"):
        FallbackStore(store, store)


def test_repr(first: Fast) -> None:
    """It shows both."""
    table = MemoryStore()
    assert repr(FallbackStore(first, table)) == f"FallbackStore({first!r}, {table!r})"


# ---- event loops -----------------------------------------------------------------------------------------------------


def test_coroutines_answer_alike(store: FallbackStore, first: Fast) -> None:
    """By the first, by the second, and by the first again."""

    async def all_of_them() -> list[Any]:
        taken = await store.atake(MANY, "k", 2)
        peeked = await store.apeek(MANY, "k", 1)
        both = await store.atake_all(iter([(MANY, "k", 1), (MANY, "l", 1)]))
        left = [10**6 - one.remaining for one in (taken, peeked, *both)]
        return [*left, await store.areset(MANY, "k"), await store.areset(MANY, "l")]

    for error in (None, StoreError("down"), None):
        first.error = error
        assert asyncio.run(all_of_them()) == [2, 3, 3, 1, True, True]
    assert store.stats() == {"primary": 10, "secondary": 5, "failures": 5, "outages": 1}
    earlier = asyncio.run(store.apeek(TEN, "k", 3, now_us=T0)), asyncio.run(store.atake(TEN, "k", 3, now_us=T0))
    assert earlier == (TEN.simulate([(T0, 3)])[0],) * 2


def threads_of_take(store: Any) -> list[str]:
    """The names of the threads in which `take` is called from now on."""
    threads: list[str] = []
    take = store.take

    def take_here(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        return take(*arguments, **named)

    store.take = take_here
    return threads


def test_stores_without_coroutines_are_called_in_a_thread() -> None:
    """Whether they are the first or the second."""
    for pair in ((Bare(), MemoryStore()), (Fast(), Bare())):
        if isinstance(pair[0], Fast):
            pair[0].error = StoreError("down")
        threads = threads_of_take(next(one for one in pair if isinstance(one, Bare)))
        assert asyncio.run(FallbackStore(*pair).atake(TEN, "k")).remaining == 9
        assert [thread.startswith("shmlimit") for thread in threads] == [True]


def test_table_answers_on_the_loop(first: Fast, name: str) -> None:
    """As the second store, too: it takes a microsecond and never waits."""
    first.error = StoreError("down")
    with SharedTable.create(name, 64) as table:
        threads = threads_of_take(table)
        assert asyncio.run(FallbackStore(first, table).atake(TEN, "k")).remaining == 9
    assert threads == [threading.current_thread().name]


def test_cancelled_call_changes_nothing(second: Double) -> None:
    """A coroutine that is cancelled is neither a failure nor an answer."""

    class Waiting(Fast):
        async def atake(self, *_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

    store = FallbackStore(Waiting(), second)

    async def go() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(store.atake(TEN, "k"), 0.01)

    asyncio.run(go())
    assert store.stats() == {"primary": 0, "secondary": 0, "failures": 0, "outages": 0}
    assert second.asked == 0
