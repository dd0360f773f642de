"""RedisStore's coroutines: the same decisions over connections of the loop, one loop after the other, and cancelled."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import redis
from _servers import Server

from shmlimit import FixedWindow, Gcra, SlidingCounter, SlidingLog, StoreError, TokenBucket
from shmlimit.stores import _redis_lines
from shmlimit.stores._redis_lines import AT_ONCE, LoopLines
from shmlimit.stores.redis import RedisStore

T0 = 1_767_225_600_000_000
KINDS = [TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter]
TEN = TokenBucket(10, 3600)


def status_of(child: int) -> int:
    return os.waitpid(child, 0)[1]


def lines_of(store: RedisStore) -> LoopLines:
    return store._loops[asyncio.get_running_loop()]


def test_coroutines_decide_alike(redis_store: RedisStore) -> None:
    """`atake`, `apeek`, `atake_all` and `areset` give what the plain methods would, and both see one count."""

    async def all_of_them(policy: Any) -> list[Any]:
        taken = await redis_store.atake(policy, "k", 2, now_us=T0)
        plain = redis_store.take(policy, "k", now_us=T0)
        peeked = await redis_store.apeek(policy, "k", 1, now_us=T0)
        both = await redis_store.atake_all([(policy, "k", 1), (policy, "l", 1)], now_us=T0)
        own = [await redis_store.atake(policy, "own"), await redis_store.areset(policy, "own")]
        return [taken, plain, peeked, *both, *own, await redis_store.atake_all([])]

    for kind in KINDS:
        policy = kind(10, 3600)
        *decisions, was_there, none = asyncio.run(all_of_them(policy))
        assert decisions[:5] == [
            *policy.simulate([(T0, 2), (T0, 1), (T0, 1)]),
            *policy.simulate([(T0, 3), (T0, 1)])[1:],
            *policy.simulate([(T0, 1)]),
        ]
        assert (decisions[5].remaining, was_there, none) == (9, True, [])


def test_one_loop_after_the_other(redis_store: RedisStore) -> None:
    """Connections belong to a loop and end with it: the next one makes its own, and nothing is left open."""

    async def decide() -> list[int]:
        answers = await asyncio.gather(*(redis_store.atake(TokenBucket(100, 3600), "k") for _ in range(10)))
        return [one.remaining for one in answers]

    assert sorted(asyncio.run(decide())) == list(range(90, 100))
    assert sorted(asyncio.run(decide())) == list(range(80, 90))
    (lines,) = redis_store._loops.values()
    assert not lines._idle
    gc.collect()  # an open connection would be a ResourceWarning, and here an error


def test_loops_in_threads(redis_store: RedisStore) -> None:
    """Several loops at once, each in a thread, and plain calls beside: exactly the limit passes."""
    policy = FixedWindow(100, 10**9)
    allowed: list[bool] = []

    async def decide() -> None:
        for _ in range(20):
            answers = await asyncio.gather(*(redis_store.atake(policy, "k") for _ in range(4)))
            allowed.extend(one.allowed for one in answers)

    threads = [threading.Thread(target=asyncio.run, args=(decide(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    allowed += [redis_store.take(policy, "k").allowed for _ in range(50)]
    for thread in threads:
        thread.join()
    assert len(allowed) == 290
    assert sum(allowed) == 100


def test_many_calls_at_once_have_a_few_connections(redis_store: RedisStore, redis_server: Server) -> None:
    """500 calls at once are answered over at most `AT_ONCE` connections, each with its own answer."""

    async def decide() -> None:
        answers = await asyncio.gather(*(redis_store.atake(TEN, f"key {i}", i % 10 + 1) for i in range(500)))
        assert [one.remaining for one in answers] == [9 - i % 10 for i in range(500)]
        assert 1 <= len(lines_of(redis_store)._idle) <= AT_ONCE

    asyncio.run(decide())


def test_cancelled_calls_leave_no_answer_behind(own_server: Callable[[str], Server], redis_kind: str) -> None:
    """A call that is cancelled while its answer is under way takes its connection with it: no later call gets that."""
    server = own_server(redis_kind)

    async def cancel() -> None:
        await store.atake(TEN, "warm")
        for number in range(30):
            server.pause()
            task = asyncio.create_task(store.atake(TokenBucket(10**6, 3600), "cancelled", 1000 + number))
            for _ in range(3 + number % 3):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.resume()
            assert (await store.atake(TokenBucket(100, 3600), f"key {number}")).remaining == 99
        assert store._breaker.outage is None

    with RedisStore(server.url, timeout=5) as store:
        asyncio.run(cancel())


def test_paused_server_holds_nobody_up(own_server: Callable[[str], Server], redis_kind: str) -> None:
    """100 calls to a server that is stopped fail within a few timeouts all together, the loop goes on, and afterwards
    every answer is for the one who asked.
    """
    server = own_server(redis_kind)
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    async def decide() -> None:
        heart = asyncio.create_task(beat())
        assert (await store.atake(TEN, "k", 3)).remaining == 7
        server.pause()
        errors = await asyncio.gather(*(store.atake(TEN, "k") for _ in range(100)), return_exceptions=True)
        assert {type(error) for error in errors} == {StoreError}
        assert sum("tried again" in str(error) for error in errors) >= 100 - AT_ONCE
        assert beats > 100
        server.resume()
        store._breaker._outage = None
        answers = await asyncio.gather(*(store.atake(TEN, f"other {i}", i % 10 + 1) for i in range(50)))
        assert [one.remaining for one in answers] == [9 - i % 10 for i in range(50)]
        heart.cancel()

    with RedisStore(server.url, timeout=1) as store:
        asyncio.run(decide())


def test_killed_and_started_again(own_server: Callable[[str], Server], redis_kind: str) -> None:
    """The same outage for coroutines and plain calls: one finds it, the other is told at once; a restart is found."""
    server = own_server(redis_kind)

    async def decide() -> None:
        await store.atake(TEN, "k")
        server.kill()
        with pytest.raises(StoreError, match="can't answer"):
            await store.atake(TEN, "k")
        with pytest.raises(StoreError, match="tried again"):
            store.take(TEN, "k")
        server.start()
        with pytest.raises(StoreError, match="tried again"):
            await store.atake(TEN, "k")
        store._breaker._outage = None
        assert (await store.atake(TEN, "k")).remaining == 9
        with redis.Redis(port=server.port) as client:
            client.script_flush()
        assert (await store.atake(TEN, "k")).remaining == 8
        server.restart()
        await asyncio.sleep(0.06)  # idle for longer than what is looked at anyway
        assert (await store.atake(TEN, "k")).remaining == 9

    with RedisStore(server.url, timeout=10) as store:
        asyncio.run(decide())


def test_trouble_with_one_key_is_no_outage(redis_store: RedisStore, redis_server: Server) -> None:
    """A key that another program wrote is an error each time, and other keys go on."""

    async def decide() -> None:
        with redis.Redis(port=redis_server.port) as client:
            client.sadd(redis_store._plan(TEN).key(b"k"), "x")
            for _ in range(2):
                with pytest.raises(StoreError, match="WRONGTYPE"):
                    await redis_store.atake(TEN, "k")
                assert (await redis_store.apeek(TEN, "other")).remaining == 10

    asyncio.run(decide())


def test_large_requests(redis_store: RedisStore) -> None:
    """A request that doesn't fit what is written without waiting is charged like any other."""

    async def decide() -> list[Any]:
        requests = [(TEN, f"{i} {'x' * 50}", 1) for i in range(1_000)]
        return [*await redis_store.atake_all(requests), *redis_store.take_all(requests)]

    assert [one.remaining for one in asyncio.run(decide())] == [9] * 1000 + [8] * 1000


def test_closed_in_a_loop(redis_server: Server) -> None:
    """`aclose` closes the loop's connections; then every call raises, also of loops to come."""

    async def close(store: RedisStore) -> None:
        await store.atake(TEN, "k")
        lines = lines_of(store)
        assert lines._idle
        await store.aclose()
        assert not lines._idle
        for call in (store.atake, store.apeek, store.areset):
            with pytest.raises(StoreError, match="is closed"):
                await call(TEN, "k")
        await store.aclose()

    async def too_late(store: RedisStore) -> None:
        with pytest.raises(StoreError, match="is closed"):
            await store.atake_all([(TEN, "k", 1)])

    store = RedisStore(redis_server.url, prefix=f"t{secrets.token_hex(6)}")
    asyncio.run(close(store))
    asyncio.run(too_late(store))
    gc.collect()


def test_closed_from_another_thread(redis_server: Server) -> None:
    """`close` of a store that a running loop uses has that loop close its connections."""
    started, closing = threading.Event(), threading.Event()
    left: list[int] = []

    async def wait() -> None:
        await store.atake(TEN, "k")
        lines = lines_of(store)
        started.set()
        await asyncio.to_thread(closing.wait, 10)
        left.append(len(lines._idle))
        await asyncio.gather(*store._closing)  # scheduled before this task was woken up
        left.append(len(lines._idle))

    store = RedisStore(redis_server.url, prefix=f"t{secrets.token_hex(6)}")
    thread = threading.Thread(target=asyncio.run, args=(wait(),))
    thread.start()
    assert started.wait(10)
    store.close()
    closing.set()
    thread.join()
    assert left[-1:] == [0]


# ---- loops of several threads that begin and end while others do -----------------------------------------------------


def test_loops_that_end_while_another_begins(redis_store: RedisStore) -> None:
    """A loop that begins clears away those that have ended, though other threads do so, too, and add their own."""

    class Ended:
        def is_closed(self) -> bool:
            redis_store._loops.pop(self, None)  # what another thread does at this moment
            if len(redis_store._loops) < 3:
                redis_store._loops[Running()] = LoopLines(redis_store._settings, redis_store._breaker)
            return True

    class Running(Ended):
        def is_closed(self) -> bool:
            return False

        def is_running(self) -> bool:
            return False

    for _ in range(2):
        redis_store._loops[Ended()] = LoopLines(redis_store._settings, redis_store._breaker)
    assert asyncio.run(redis_store.atake(TEN, "k")).remaining == 9
    assert not [loop for loop in redis_store._loops if type(loop) is Ended]


def test_closed_while_a_loop_begins(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that another thread closes just as a loop makes its connections is closed for that loop, too."""

    def closed_meanwhile(*arguments: Any) -> LoopLines:
        redis_store.close()
        return LoopLines(*arguments)

    monkeypatch.setattr("shmlimit.stores.redis.LoopLines", closed_meanwhile)
    with pytest.raises(StoreError, match="is closed"):
        asyncio.run(redis_store.atake(TEN, "k"))


def test_loop_that_ends_while_the_store_is_closed(redis_store: RedisStore) -> None:
    """`close` doesn't mind a loop that ended after it was looked at."""

    class Ending:
        def is_running(self) -> bool:
            return True

        def call_soon_threadsafe(self, *_arguments: Any) -> None:
            raise RuntimeError("Event loop is closed")

    lines = redis_store._loops[Ending()] = LoopLines(redis_store._settings, redis_store._breaker)
    redis_store.close()
    assert lines.closed


# ---- connections that nobody would close -----------------------------------------------------------------------------


def test_closed_while_a_call_is_under_way(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ends after `close` or `aclose` closes its connection, since nobody else will."""
    exchange, checked = LoopLines._exchange, _redis_lines._checked

    def closed_meanwhile(*arguments: Any) -> bytes:
        redis_store._lines.close()
        return checked(*arguments)

    async def aclosed_meanwhile(lines: LoopLines, *arguments: Any) -> bytes:
        reply = await exchange(lines, *arguments)
        await redis_store.aclose()
        return reply

    async def decide() -> None:
        assert (await redis_store.atake(TEN, "k")).remaining == 9
        assert not lines_of(redis_store)._idle

    monkeypatch.setattr(LoopLines, "_exchange", aclosed_meanwhile)
    asyncio.run(decide())
    monkeypatch.undo()
    redis_store._lines.closed = False
    monkeypatch.setattr(_redis_lines, "_checked", closed_meanwhile)
    assert redis_store.take(TEN, "k").remaining == 8
    assert not redis_store._lines._idle


def test_failure_of_one_connection_ends_the_loops_idle_ones(own_server: Callable[[str], Server]) -> None:
    """As for threads: the others are to the same server, and one failure is enough to know of it."""
    server = own_server("valkey")

    async def decide() -> None:
        await asyncio.gather(*(store.atake(TEN, f"key {number}") for number in range(5)))
        lines = lines_of(store)
        assert len(lines._idle) > 1
        lines._idle[-1][0]._writer.transport.abort()
        lines._idle[-1] = (lines._idle[-1][0], time.monotonic() + 60)  # it isn't looked at
        with pytest.raises(StoreError, match="can't answer"):
            await store.atake(TEN, "k")
        assert not lines._idle

    with RedisStore(server.url, timeout=10) as store:
        asyncio.run(decide())


def test_connection_that_fails_at_once_is_closed(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a loop's call is cancelled while it connects."""
    hung_up = []

    async def never(connection: Any) -> None:
        monkeypatch.setattr(connection, "disconnect", noted)
        await asyncio.sleep(3600)

    async def noted(**_named: Any) -> None:
        hung_up.append(True)

    async def decide() -> None:
        task = asyncio.create_task(redis_store.atake(TEN, "k"))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(redis_store._settings.twin, "connect", never)
    asyncio.run(decide())
    assert hung_up == [True]


def test_long_commands_are_written_within_the_timeout(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops reading in the middle of a long command isn't waited for longer than for an answer."""
    kind = redis_store._settings.twin
    send, timeouts = kind.send_packed_command, []

    async def sent(connection: Any, command: Any, **named: Any) -> None:
        timeouts.append(connection.socket_timeout)
        await send(connection, command, **named)

    async def decide() -> None:
        for number in (1, 1_000, 1):
            answers = await redis_store.atake_all([(TEN, f"key {one}", 1) for one in range(number)])
            assert all(answers)

    monkeypatch.setattr(kind, "send_packed_command", sent)
    asyncio.run(decide())
    assert redis_store._settings.timeout in timeouts
    assert timeouts[0] is timeouts[-1] is None


def test_two_threads_that_close_idle_connections(redis_store: RedisStore) -> None:
    """Each closes what it gets, and who finds that the other was quicker is done."""

    class Emptied(deque[Any]):
        def __bool__(self) -> bool:
            return True  # there was one a moment ago

    redis_store._lines._idle = Emptied()
    redis_store._lines.drop()
    assert redis_store.take(TEN, "k").remaining == 9
    (connection,) = [one for one, _ in redis_store._lines._idle]
    redis_store._lines.drop()
    assert connection._sock is None


def test_child_lets_a_loops_connections_be(redis_store: RedisStore) -> None:
    """What a child does away with of its parent's loop is left open there: closing it would deafen the parent."""

    async def decide() -> None:
        await redis_store.atake(TEN, "k")
        child = os.fork()
        if child == 0:
            redis_store._loops.clear()
            gc.collect()
            os._exit(0)
        assert status_of(child) == 0
        assert (await redis_store.atake(TEN, "k")).remaining == 8
        assert len(lines_of(redis_store)._idle) == 1

    asyncio.run(decide())
