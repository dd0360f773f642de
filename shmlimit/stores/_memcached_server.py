"""The server under `MemcachedStore`: its address, connections that no fork and no late answer can mix up, and what its
errors mean.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from shmlimit.errors import ConfigError, StoreError
from shmlimit.policies.base import US_PER_S
from shmlimit.stores._breaker import Breaker

Address: TypeAlias = "str | tuple[str, int]"
_T = TypeVar("_T")

DEFAULT_PORT = 11211
LONGEST_TIMEOUT_S = 60.0

RELATIVE_MAX_S = 30 * 86_400
"""memcached takes a longer expiry for a Unix time, and one in the past for "at once"."""
ABSOLUTE_MAX_S = 2**31 - 1
"""It keeps a time in 32 bits with a sign: a later one would have passed at once."""
MARGIN_S = 10
"""How much longer than its state an entry is kept: memcached counts whole seconds, and the clocks of hosts differ."""
ABSOLUTE_MARGIN_S = 86_400
"""The same beyond 30 days, where memcached's own wall clock decides."""

# What the cause says -> what to do about it.
_HINTS = {
    "refused": "see that it runs and listens there",
    "No such file": "see that it runs and listens there",
    "Permission denied": "this user must be able to write to the socket",
    "timed out": "it hangs, is overloaded or cut off; timeout= says how long to wait",
    "Name or service": "see that the name is right; an address needs no look-up",
    "closed": "it was stopped, or has an idle_timeout",
    "out of memory": "its memory is full, and it may not evict (-M); start it with more (-m)",
    "says ERROR": "see that memcached is what listens there, and that it may have more connections (-c)",
    "language": "see that memcached is what listens there",
}


class MemcachedServer:
    """One server, asked through a connection for each call that is under way; whoever is done leaves it for the next.

    Nothing is asked twice. A connection with a failure behind it is closed, so that an answer which comes late is never
    taken for another's; one that has something to read before anything was asked is closed, too (the server went away
    meanwhile). A process that was forked makes its own. `timeout` is for connecting and for each wait for an answer.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        try:
            from pymemcache.client.base import Client  # type: ignore[import-untyped]
            from pymemcache.exceptions import (  # type: ignore[import-untyped]
                MemcacheError,
                MemcacheUnexpectedCloseError,
                MemcacheUnknownCommandError,
                MemcacheUnknownError,
            )
        except ImportError:
            raise ConfigError("MemcachedStore needs pymemcache: pip install 'shmlimit[memcached]'") from None
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST_TIMEOUT_S:
            raise ConfigError(f"timeout must be above 0 and within {LONGEST_TIMEOUT_S:.0f} seconds, not {timeout!r}")
        self.address = parse_address(address)
        self.text = self.address if isinstance(self.address, str) else _text(*self.address)
        self._timeout = timeout
        self._client: Callable[..., Any] = Client
        self._gone: tuple[type[Exception], ...] = (OSError, MemcacheUnexpectedCloseError)
        self._no_command: type[Exception] = MemcacheUnknownCommandError
        self._strange: tuple[type[Exception], ...] = (MemcacheUnknownError, ValueError, KeyError)
        self._refused: tuple[type[Exception], ...] = (MemcacheError, *self._strange)
        self._clock = time.monotonic
        self._breaker = Breaker(clock=self._clock)
        self._closed = False
        self._idle: list[tuple[Any, select.poll]] = []
        _servers.add(self)

    def fetch(self, names: list[str]) -> dict[str, tuple[bytes, bytes]]:
        """Values, each with the number to swap it by; what isn't there is left out. One trip."""
        found: dict[str, tuple[bytes, bytes]] = self._ask(lambda client: client.gets_many(names))
        return found

    def put(self, name: str, value: bytes, unique: bytes | None, expire: int) -> bool:
        """Write a value where the one fetched still is (`unique`), or still none (`None`); whether that was so."""
        if unique is None:
            return bool(self._ask(lambda client: client.add(name, value, expire=expire, noreply=False)))
        return bool(self._ask(lambda client: client.cas(name, value, unique, expire=expire, noreply=False)))

    def delete(self, name: str) -> bool:
        """Remove a value; whether it was there."""
        return bool(self._ask(lambda client: client.delete(name, noreply=False)))

    def refuse(self) -> None:
        """A `StoreError` while the server is known to be down, else nothing; it costs nothing either way."""
        outage = self._breaker.outage
        if outage is not None and (wait_s := outage.probe_at - self._clock()) > 0:
            raise StoreError(f"{outage.cause}; tried again in {wait_s:.1f} s")

    def failure(self, cause: str) -> StoreError:
        """The error to raise: it names the server, the cause and what to do."""
        hint = next((f" ({hint})" for said, hint in _HINTS.items() if said in cause), "")
        return StoreError(f"memcached at {self.text} can't answer: {cause}{hint}")

    def close(self) -> None:
        """Close the connections; later calls raise `StoreError`."""
        self._closed = True
        self._hang_up()

    # ---- connections -------------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[[Any], _T]) -> _T:
        if self._closed:
            raise self.failure("the store was closed")
        outage = self._breaker.enter()
        pid, client = os.getpid(), None
        try:
            client, poll = self._connection()
            answer = call(client)
        except BaseException as error:
            # Also at a KeyboardInterrupt or a timeout of gevent's: its answer is yet to come.
            if client is not None:
                client.close()
            if isinstance(error, self._gone):
                failure = self.failure(_cause(error))
                self._breaker.failed(outage, str(failure))
                raise failure from error
            if isinstance(error, self._refused):
                self._breaker.succeeded(outage)
                said = "ERROR" if isinstance(error, self._no_command) else _said(error)
                strange = ", which isn't its language" if isinstance(error, self._strange) else ""
                raise self.failure(f"it says {said}{strange}") from error
            raise
        self._breaker.succeeded(outage)
        if pid == os.getpid():
            self._idle.append((client, poll))
        else:  # forked in the middle of a call: it is the parent's
            client.close()
        if self._closed:
            self._hang_up()
        return answer

    def _connection(self) -> tuple[Any, select.poll]:
        while True:
            try:
                client, poll = self._idle.pop()  # the one used last: others may be closed by the server for being idle
            except IndexError:
                return self._connect()
            if not poll.poll(0):
                return client, poll
            client.close()

    def _connect(self) -> tuple[Any, select.poll]:
        # By itself it would try the first address of a name only, and `localhost` may be ::1 first.
        client = self._client(self.address)
        client.sock = line = self._line()
        poll = select.poll()
        poll.register(line, select.POLLIN)
        return client, poll

    def _line(self) -> socket.socket:
        if isinstance(self.address, str):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                line.settimeout(self._timeout)
                line.connect(self.address)
            except BaseException:
                line.close()
                raise
            return line
        line = socket.create_connection(self.address, self._timeout)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return line

    def _hang_up(self) -> None:
        while self._idle:
            try:
                client, _ = self._idle.pop()
            except IndexError:
                return
            client.close()


# SAFETY: parent and child on one connection would read each other's answers. A child begins without any; it closes its
# copies only, which doesn't end the connection of its parent.
_servers: weakref.WeakSet[MemcachedServer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for server in list(_servers):
        server._hang_up()


os.register_at_fork(after_in_child=_after_fork_in_child)


def expiry(left_us: int) -> int:
    """What to tell memcached of a state that has `left_us` to live, never too short: seconds to 30 days, beyond that a
    Unix time, and 0, for never, beyond 2038.
    """
    left_s = max(0, -(-left_us // US_PER_S))
    if left_s + MARGIN_S <= RELATIVE_MAX_S:
        return left_s + MARGIN_S
    until_s = int(time.time()) + left_s + ABSOLUTE_MARGIN_S
    return until_s if until_s <= ABSOLUTE_MAX_S else 0


def parse_address(address: object) -> Address:
    """A (host, port), or the path of a Unix socket; a `ConfigError` for anything else."""
    if isinstance(address, list):
        raise ConfigError(
            f"MemcachedStore takes one server, not {address!r}: a client that goes on without one of several would "
            f"give its keys a fresh quota on the others. To spread the load give each policy a store of its own"
        )
    if isinstance(address, tuple) and len(address) == 2:
        host, port = address
    elif isinstance(address, str):
        text = address.removeprefix("memcached://").removeprefix("unix:")
        if text.startswith("/"):
            return text
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            host, port = text, DEFAULT_PORT
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""  # an IPv6 address without brackets: its last group may be a port or not
        if isinstance(port, str) and port.isascii() and port.isdecimal() and len(port) <= 5:
            port = int(port)
    else:
        host, port = "", 0
    sound = isinstance(host, str) and host.isprintable() and host and not set(host) & set(" /@?#")
    if not sound or isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ConfigError(
            f"server must be 'host:port', '[IPv6]:port', (host, port) or the path of a Unix socket, not {address!r}"
        )
    return host, port


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _cause(error: BaseException) -> str:
    if isinstance(error, OSError):
        return str(error) or type(error).__name__
    return "it closed the connection"


def _said(error: BaseException) -> str:
    said = error.args[0] if error.args else ""
    return repr(said.decode("ascii", "replace") if isinstance(said, bytes) else str(said))
