"""The connections under `RedisStore`: redis-py's own, one for each call under way, used without its clients.

PERF: a command through redis-py's client takes three times as long as over its connection.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from shmlimit.stores._breaker import Breaker
from shmlimit.stores._redis_scripts import Call
from shmlimit.stores._redis_server import Settings, closed, failure

AT_ONCE = 32
"""Connections of an event loop, at most. More calls at once wait for one of them."""

_LOOK_S = 0.05  # unused for this long, a connection may be one to a server that has been restarted meanwhile
_OLD_S = 30.0  # and for this long, one that some firewall between here and there has dropped without a word
_LONG_BYTES = 32_768  # what is shorter is written without waiting


class Lines:
    """Asks the server, for threads: each call has a connection for itself and leaves it for the next one.

    There are as many as ever were under way together. None of them crosses a fork, and none with an answer that nobody
    read is used again.
    """

    def __init__(self, settings: Settings, breaker: Breaker) -> None:
        self._settings = settings
        self._breaker = breaker
        self._idle: deque[tuple[Any, float]] = deque()
        self.closed = False
        _lines.add(self)

    def ask(self, call: Call) -> bytes:
        """The answer to a call. Where the server doesn't have the script, it is sent along: the one second try, since
        nothing has been done then.
        """
        if self.closed:
            raise closed(self._settings)
        outage = self._breaker.enter()
        connection: Any = None
        try:
            connection = self._connection()
            try:
                reply = _exchange(connection, call.short(), self._settings)
            except self._settings.unknown_script:
                reply = _exchange(connection, call.long(), self._settings)
        except self._settings.refused as error:
            _hang_up(connection)
            raise failure(self._settings, self._breaker, outage, error) from error
        except self._settings.lost as error:
            self.drop()  # the others are to the same server
            _hang_up(connection)
            raise failure(self._settings, self._breaker, outage, error) from error
        except BaseException:
            _hang_up(connection)
            raise
        self._breaker.succeeded(outage)
        self._idle.append((connection, time.monotonic()))
        if self.closed:
            self.drop()
        return reply

    def drop(self) -> None:
        """Close every connection that isn't in use."""
        while self._idle:
            try:
                connection, _ = self._idle.pop()
            except IndexError:  # another thread was quicker
                return
            connection.disconnect()

    def close(self) -> None:
        """No calls any more."""
        self.closed = True
        self.drop()

    def _connection(self) -> Any:
        try:
            connection, since = self._idle.pop()
        except IndexError:
            connection = _without_greeting(self._settings.kind(**self._settings.wanted))
            connection.connect()
            return connection
        unused_s = time.monotonic() - since
        if unused_s > _LOOK_S and (unused_s > _OLD_S or _is_stale(connection, self._settings)):
            connection.disconnect()
            connection.connect()
        return connection


class LoopLines:
    """Asks the server, for an event loop: what `Lines` is for threads, with at most `AT_ONCE` connections."""

    def __init__(self, settings: Settings, breaker: Breaker) -> None:
        self._settings = settings
        self._breaker = breaker
        self._idle: deque[tuple[Any, float]] = deque()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._until = self._until_the_loop_ends()
        self.closed = False
        _loop_lines.add(self)

    async def open(self) -> None:
        """Has the loop close the connections when it ends (`asyncio.run` does that for what it knows)."""
        await self._until.__anext__()

    async def ask(self, call: Call) -> bytes:
        """See `Lines.ask`. A call that is cancelled takes its connection with it."""
        async with self._room:
            if self.closed:
                raise closed(self._settings)
            outage = self._breaker.enter()
            connection: Any = None
            try:
                connection = await self._connection()
                try:
                    reply = await self._exchange(connection, call.short())
                except self._settings.unknown_script:
                    reply = await self._exchange(connection, call.long())
            except self._settings.refused as error:
                await _ahang_up(connection)
                raise failure(self._settings, self._breaker, outage, error) from error
            except self._settings.lost as error:
                await self.drop()
                await _ahang_up(connection)
                raise failure(self._settings, self._breaker, outage, error) from error
            except BaseException:
                await _ahang_up(connection)
                raise
            self._breaker.succeeded(outage)
            self._idle.append((connection, time.monotonic()))
            if self.closed:
                await self.drop()
            return reply

    async def drop(self) -> None:
        """Close every connection that isn't in use."""
        while self._idle:
            connection, _ = self._idle.pop()
            await _ahang_up(connection)

    async def close(self) -> None:
        """No calls any more."""
        self.closed = True
        await self._until.aclose()
        await self.drop()

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.closed = True
            await self.drop()

    async def _connection(self) -> Any:
        if self._idle:
            connection, since = self._idle.pop()
            unused_s = time.monotonic() - since
            if unused_s <= _LOOK_S or (unused_s <= _OLD_S and not await _ais_stale(connection, self._settings)):
                return connection
            await _ahang_up(connection)
        connection = _without_greeting(self._settings.twin(**self._settings.wanted))
        try:
            await connection.connect()
        except BaseException:
            await _ahang_up(connection)
            raise
        # PERF: with a timeout redis-py makes a task for each write. What is short is written at once anyway.
        connection.socket_timeout = None
        return connection

    async def _exchange(self, connection: Any, command: bytes) -> bytes:
        timeout = self._settings.timeout
        if len(command) < _LONG_BYTES:
            await connection.send_packed_command([command], check_health=False)
        else:
            connection.socket_timeout = timeout
            await connection.send_packed_command([command], check_health=False)
            connection.socket_timeout = None
        reply = await connection.read_response(disable_decoding=True, timeout=timeout)
        if reply is None:  # what redis-py says of a timeout that was given to the call
            raise self._settings.timed_out(f"no answer within {timeout} s")
        return _checked(reply, self._settings)


def _exchange(connection: Any, command: bytes, settings: Settings) -> bytes:
    connection.send_packed_command([command], check_health=False)
    return _checked(connection.read_response(disable_decoding=True), settings)


def _checked(reply: object, settings: Settings) -> bytes:
    if not isinstance(reply, bytes):
        raise settings.strange(f"{reply!r} instead of a script's answer")
    return reply


def _without_greeting(connection: Any) -> Any:
    # The names that redis-py sends of itself are two round trips more before the first answer.
    connection.driver_info = None
    connection.lib_name = connection.lib_version = None
    return connection


def _is_stale(connection: Any, settings: Settings) -> bool:
    """Whether something is there to be read where nothing should be: the end of the connection, mostly."""
    try:
        return bool(connection.can_read(timeout=0))
    except settings.lost:
        return True


async def _ais_stale(connection: Any, settings: Settings) -> bool:
    can_read = getattr(connection, "can_read", None) or connection.can_read_destructive
    try:
        return bool(await can_read())
    except settings.lost:
        return True


def _hang_up(connection: Any) -> None:
    if connection is not None:
        connection.disconnect()


async def _ahang_up(connection: Any) -> None:
    if connection is not None:
        await connection.disconnect(nowait=True)


# SAFETY: two processes on one connection would read each other's answers. A child begins without any; it closes its
# copies only, which doesn't end the connection of its parent. Those of an event loop are never closed there: that would
# take them out of the parent's epoll, too.
_lines: weakref.WeakSet[Lines] = weakref.WeakSet()
_loop_lines: weakref.WeakSet[LoopLines] = weakref.WeakSet()
_carried: list[LoopLines] = []


def _after_fork_in_child() -> None:
    for lines in list(_lines):
        lines.drop()
    _carried.extend(_loop_lines)


os.register_at_fork(after_in_child=_after_fork_in_child)
