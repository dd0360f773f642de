"""FallbackStore: what a known failure costs, what is counted and said, and a real server that goes and comes back."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from _servers import Server

from shmlimit import SharedTable, StoreError, TokenBucket
from shmlimit.stores import fallback
from shmlimit.stores.fallback import FallbackStore
from shmlimit.stores.memcached import MemcachedStore
from shmlimit.stores.redis import RedisStore
from tests.stores.fallback.conftest import MANY, TEN, Clock, Double, Fast, said

# ---- a known failure costs nothing -----------------------------------------------------------------------------------


def test_first_that_fails_fast_is_asked_each_time(store: FallbackStore, first: Fast) -> None:
    """It sees to its probes itself."""
    first.error = StoreError("down")
    for _ in range(5):
        store.take(TEN, "k")
    assert first.asked == 5
    assert store._breaker is None


def test_any_other_is_asked_now_and_then(slow: tuple[FallbackStore, Double, Clock], second: Double) -> None:
    """After 1, 2, 4 … 32 s, once each; the answer of a probe takes it back, and the waits begin anew."""
    store, first, clock = slow
    first.error = StoreError("down")
    asked_at = []
    for tenth in range(1, 1000):
        clock.now_s = tenth / 10
        before = first.asked
        store.take(MANY, "k")
        if first.asked > before:
            asked_at.append(clock.now_s)
    waits = [later - earlier for earlier, later in pairwise(asked_at)]
    assert [round(wait) for wait in waits] == [1, 2, 4, 8, 16, 32, 32]
    assert store.stats()["secondary"] == second.asked == 999
    first.error = None
    clock.now_s += 40
    assert store.take(MANY, "k").remaining == 10**6 - 1
    assert store.take(MANY, "k").remaining == 10**6 - 2
    assert (store._breaker.outage, store.outage) == (None, None)


def test_coroutines_share_the_breaker(slow: tuple[FallbackStore, Double, Clock]) -> None:
    """What a method found out, a coroutine knows, and the other way round."""
    store, first, clock = slow
    first.error = StoreError("down")

    async def go() -> None:
        await store.atake(TEN, "k")
        await store.apeek(TEN, "k")
        await store.atake_all([(TEN, "k", 1)])

    asyncio.run(go())
    store.take(TEN, "k")
    assert first.asked == 1
    first.error, clock.now_s = None, 5.0
    assert asyncio.run(store.atake(TEN, "k")).remaining == 9
    assert store.outage is None


def test_failure_that_is_known_is_no_new_one(slow: tuple[FallbackStore, Double, Clock]) -> None:
    """A call that isn't let through doesn't begin another outage if the probe of another thread just ended this one."""
    store, first, _ = slow
    breaker = store._breaker
    first.error = StoreError("down")
    store.take(TEN, "k")
    enter = breaker.enter

    def refused() -> Any:
        try:
            return enter()
        finally:
            breaker._outage = None  # the probe of another thread is answered at this moment

    breaker.enter = refused
    store.take(TEN, "k")
    assert first.asked == 1
    assert breaker.outage is None


def test_failures_leave_nothing_behind(store: FallbackStore, first: Fast) -> None:
    """An error is gone with its call: thousands a second would otherwise be the garbage collector's."""
    errors = [StoreError("down")]

    def fail(*_arguments: Any, **_named: Any) -> None:
        raise errors.pop()

    first.take = first.reset = fail
    store.take(TEN, "k")  # it is in the log, which keeps it
    gc.collect()
    gc.disable()
    try:
        for ask in (lambda: store.take(TEN, "k"), lambda: store.reset(TEN, "k")):
            errors.append(StoreError("down"))
            error = weakref.ref(errors[0])
            ask()
            assert error() is None
    finally:
        gc.enable()


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_said_once_each_way(store: FallbackStore, first: Fast, caplog: pytest.LogCaptureFixture) -> None:
    """A warning with the cause when the second takes over, and one with how much it answered when the first is back."""
    store.take(TEN, "k")
    first.error = StoreError("Redis at h:1 can't answer: refused")
    for _ in range(7):
        store.take(TEN, "k")
    first.error = None
    for _ in range(3):
        store.take(TEN, "k")
    gone, back = said(caplog)
    assert gone.startswith(f"{store.secondary!r} answers in place of {first!r}: Redis at h:1 can't answer: refused")
    assert back.startswith(f"{first!r} answers again after ")
    assert back.endswith(f" s, in which {store.secondary!r} answered 7 calls")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


def test_once_each_way_with_8_threads(store: FallbackStore, first: Fast, caplog: pytest.LogCaptureFixture) -> None:
    """All counts add up, too."""

    def hit(times: int) -> None:
        barrier.wait()
        for _ in range(times):
            store.take(MANY, "k")

    for error in (None, StoreError("down"), None):
        first.error = error
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=hit, args=(50,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert store.stats() == {"primary": 800, "secondary": 400, "failures": 400, "outages": 1}
    gone, back = said(caplog)
    assert "in place of" in gone
    assert back.endswith("answered 400 calls")


def test_answer_from_before_the_outage(store: FallbackStore, first: Fast, caplog: pytest.LogCaptureFixture) -> None:
    """A call that was under way when the first went down and is answered late is no sign that it is back."""

    def fail_meanwhile() -> None:
        first.error = StoreError("down")
        store.take(TEN, "other")

    first.in_between = fail_meanwhile
    assert store.take(TEN, "k").remaining == 9
    assert store.outage == "down"
    store.take(TEN, "k")
    assert len(said(caplog)) == 1
    assert store.stats() == {"primary": 1, "secondary": 2, "failures": 2, "outages": 1}


def test_failure_from_before_the_recovery(store: FallbackStore, first: Fast, caplog: pytest.LogCaptureFixture) -> None:
    """A call that was under way in an outage and fails once that is over is answered by the second, and no new one."""
    first.error = StoreError("down")
    store.take(TEN, "k")

    def recover_meanwhile() -> None:
        first.error = None
        store.take(TEN, "other")

    first.in_between = recover_meanwhile
    assert store.take(TEN, "k").remaining == 8
    assert store.outage is None
    assert store.stats() == {"primary": 1, "secondary": 2, "failures": 2, "outages": 1}
    assert len(said(caplog)) == 2


def test_flapping_does_not_fill_the_log(store: FallbackStore, first: Fast, caplog: pytest.LogCaptureFixture) -> None:
    """A first store that fails every other call is told of some 20 times a minute, and counted each time."""
    for number in range(200):
        first.error = StoreError("down") if number % 2 else None
        store.take(MANY, "k")
    assert fallback.LINES.quota <= len(said(caplog)) <= fallback.LINES.quota + 10
    assert store.stats()["outages"] == 100


def test_fork_while_another_thread_counts(store: FallbackStore, first: Fast) -> None:
    """A lock that a thread of the parent holds isn't waited for by a child, neither to count nor to say."""
    first.error = StoreError("down")
    with store._lock, store._lines._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if store.take(TEN, "k").remaining == 9 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memcached", "valkey"])
def real(
    request: pytest.FixtureRequest, own_server: Callable[[str], Server], name: str
) -> Iterator[tuple[Server, FallbackStore, Clock]]:
    """A server's store first and the host's table second; the breaker's clock is the test's."""
    server, clock = own_server(request.param), Clock()
    first: Any
    if request.param == "memcached":
        first = MemcachedStore(server.url, timeout=5)  # a busy machine is no outage
        first._server._breaker._clock = first._server._clock = clock
    else:
        first = RedisStore(server.url, timeout=5)
        first._breaker._clock = clock
    with SharedTable.create(name, 1024) as table, FallbackStore(first, table) as store:
        assert store._breaker is None  # the first store's is enough
        yield server, store, clock


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition, for up to ten seconds."""
    done = threading.Event()
    for _ in range(1000):
        if condition():
            return
        done.wait(0.01)
    pytest.fail("it didn't come to that")


def test_killed_and_back_under_load_of_threads(real: Any, caplog: pytest.LogCaptureFixture) -> None:
    """8 threads go on while the server is killed and started again: every call is answered, within the limit of each
    store, and the change is told once each way.
    """
    server, store, clock = real
    limit = TokenBucket(200, 366 * 86_400)
    stop, done, allowed = threading.Event(), [], [0] * 8

    def hit(number: int) -> None:
        while not stop.is_set():
            allowed[number] += store.take(limit, "k").allowed
        done.append(number)

    threads = [threading.Thread(target=hit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: store.stats()["primary"] >= 100)
        server.kill()
        until(lambda: store.stats()["secondary"] >= 100)
        server.start()
        assert store.outage is not None
        until(lambda: clock.is_on(60) and store.outage is None)  # a busy machine may let a probe time out
        answered = store.stats()["primary"]
        until(lambda: store.stats()["primary"] >= answered + 100)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(done) == 8
    # A call that was under way as the server went away may fail only once it is back, and be told as another outage.
    outages = store.stats()["outages"]
    assert 1 <= outages <= 8
    lines = said(caplog)
    assert len(lines) == 2 * outages
    gone, back = lines[:2]
    assert any(said in gone for said in ("refused", "closed", "reset by peer", "Broken pipe"))
    assert "answers again" in back
    # At least 100 calls by each of the server's two lives and by the table, and no more than a quota of each.
    assert 300 <= sum(allowed) <= 3 * limit.quota


def test_killed_and_back_under_load_of_an_event_loop(real: Any, caplog: pytest.LogCaptureFixture) -> None:
    """So does an event loop, by whose side the table answers."""
    server, store, clock = real

    async def go() -> None:
        stop = False

        async def hit() -> None:
            while not stop:
                assert (await store.atake(MANY, "k")).allowed
                await asyncio.sleep(0)

        async def reached(condition: Callable[[], bool]) -> None:
            for _ in range(1000):
                if condition():
                    return
                await asyncio.sleep(0.01)
            pytest.fail("it didn't come to that")

        tasks = [asyncio.create_task(hit()) for _ in range(8)]
        await reached(lambda: store.stats()["primary"] >= 100)
        server.kill()
        await reached(lambda: store.stats()["secondary"] >= 100)
        server.start()
        await reached(lambda: clock.is_on(60) and store.outage is None)
        answered = store.stats()["primary"]
        await reached(lambda: store.stats()["primary"] >= answered + 100)
        stop = True
        await asyncio.gather(*tasks)

    asyncio.run(go())
    outages = store.stats()["outages"]  # see above
    assert 1 <= outages <= 8
    assert len(said(caplog)) == 2 * outages
