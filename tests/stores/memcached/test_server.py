"""MemcachedStore: addresses, and servers that are killed, paused, full, or gone for a while."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _servers import Server

from shmlimit import ConfigError, StoreError, TokenBucket
from shmlimit.stores._memcached_server import parse_address
from shmlimit.stores.memcached import MemcachedStore
from tests.stores.memcached.conftest import HUNDRED, TEN, YEAR, before_write
from tests.stores.trouble import Clock, answering


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("127.0.0.1:11212", ("127.0.0.1", 11212)),
        ("cache.example", ("cache.example", 11211)),
        ("memcached://cache.example:1", ("cache.example", 1)),
        ("[::1]:11212", ("::1", 11212)),
        ("[::1]", ("::1", 11211)),
        (("::1", 65535), ("::1", 65535)),
        ("/run/memcached.sock", "/run/memcached.sock"),
        ("unix:/run/memcached.sock", "/run/memcached.sock"),
    ],
)
def test_addresses(address: Any, wanted: Any) -> None:
    """Host and port, with the usual port, a URL, IPv6 in brackets, a Unix socket."""
    assert parse_address(address) == wanted


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":1",
        "h:0",
        "h:65536",
        "h:x",
        "h:",
        "h:-1",
        "h:\u0661",
        "::1",
        "::1:11211",
        "redis://h:1",
        "h h",
        "h\n",
        "h/x",
        ("h",),
        ("h", "1"),
        ("h", True),
        ("", 1),
        (None, 1),
        None,
        7,
        b"h:1",
    ],
    ids=ascii,
)
def test_bad_addresses(address: Any) -> None:
    """Anything else is a ConfigError that shows it."""
    with pytest.raises(ConfigError, match="server must be"):
        MemcachedStore(address)


def test_one_server_only() -> None:
    """A list is a ConfigError that says why."""
    with pytest.raises(ConfigError, match=r"takes one server.*fresh quota"):
        MemcachedStore(["a:1", "b:1"])  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["", "a b", "ä", "a\n", "\x7f", "x" * 201, b"x", None])
def test_bad_prefixes(prefix: Any) -> None:
    """A prefix that memcached wouldn't take, or that leaves no room, is a ConfigError."""
    with pytest.raises(ConfigError, match="prefix must be 1 to 200"):
        MemcachedStore("h", prefix=prefix)


@pytest.mark.parametrize("timeout", [0, -1, 61, True, "1", None, float("nan")])
def test_bad_timeouts(timeout: Any) -> None:
    """So is a timeout that is none."""
    with pytest.raises(ConfigError, match="timeout must be above 0 and within 60 seconds"):
        MemcachedStore("h", timeout=timeout)


def test_without_pymemcache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module can be imported; making a store says what to install."""
    monkeypatch.setitem(sys.modules, "pymemcache.client.base", None)
    with pytest.raises(ConfigError, match=r"pip install 'shmlimit\[memcached\]'"):
        MemcachedStore("127.0.0.1")


def test_prefixes_are_apart(make: Callable[..., MemcachedStore]) -> None:
    """Stores with different prefixes count for themselves, those with the same share."""
    one, two, other = make(), make(), make(prefix=secrets.token_hex(4))
    assert [store.take(TEN, "k").remaining for store in (one, two, other)] == [9, 8, 9]


def test_repr_says_where(store: MemcachedStore, server: Server) -> None:
    """The server and the prefix."""
    assert repr(store) == f"<MemcachedStore 127.0.0.1:{server.port}, prefix {store.prefix!r}>"


# ---- trouble ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(own_server: Callable[[str], Server]) -> Server:
    """A memcached for this test alone."""
    return own_server("memcached")


@pytest.fixture
def lone(own: Server) -> Iterator[MemcachedStore]:
    """A store on it, whose breaker goes by a clock of the test's."""
    with MemcachedStore(own.url) as store:
        store._server._breaker._clock = store._server._clock = Clock()
        yield store


def probe(store: MemcachedStore) -> None:
    """Makes the next call a probe."""
    store._server._clock.now_s += 60


def test_killed_and_started_again(own: Server, lone: MemcachedStore) -> None:
    """A dead server is a StoreError that names it, the cause and what to do; known from then on, without asking, until
    the probe; and what it kept is forgotten.
    """
    assert lone.take(TEN, "k").remaining == 9
    own.kill()
    with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{own.port} can't answer: .*refused.*see that it runs"):
        lone.take(TEN, "k")
    own.start()
    for call in (lone.take, lone.peek, lone.reset, lambda *_: lone.take_all([(TEN, "k", 1)])):
        with pytest.raises(StoreError, match=r"refused.*tried again in \d\.\d s"):
            call(TEN, "k")
    probe(lone)
    assert lone.take(TEN, "k").remaining == 9
    assert lone.take(TEN, "k").remaining == 8


def test_refusal_ends_an_outage(own: Server, lone: MemcachedStore) -> None:
    """A server that is back but can't do what it is asked does answer: denials do, and so the outage is over."""
    own.kill()
    with pytest.raises(StoreError, match="refused"):
        lone.take(TEN, "k")
    probe(lone)
    with answering(b"SERVER_ERROR busy\r\n") as port:
        lone._server.address = "127.0.0.1", port
        with pytest.raises(StoreError, match="it says 'busy'"):
            lone.take(TEN, "k")
    assert lone._server._breaker.outage is None


def test_nothing_waits_to_be_sent(own: Server, lone: MemcachedStore) -> None:
    """A command goes out at once, and not when the last one has been acknowledged (Nagle's algorithm)."""
    lone.take(TEN, "k")
    ((client, _),) = lone._server._idle
    assert client.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_server_that_was_replaced_meanwhile(own: Server, lone: MemcachedStore) -> None:
    """A restart between two calls is no failure: the connection is seen to be at its end before anything is asked."""
    assert lone.take(TEN, "k").remaining == 9
    own.restart()
    assert lone.take(TEN, "k").remaining == 9


def test_connections_are_kept(own: Server, lone: MemcachedStore) -> None:
    """One connection serves one call after the other."""

    def connected() -> int:
        return int(dict(lone._server._ask(lambda client: client.stats()))[b"total_connections"])

    before = connected()
    for _ in range(20):
        lone.take(TEN, "k")
    assert connected() == before


def test_paused_server_answers_nobody_else(own: Server, lone: MemcachedStore) -> None:
    """Calls of a server that hangs time out, and their late answers are never another key's: after it goes on, each key
    has its own count. A charge whose answer got lost may stand, and nobody got more.
    """
    policies = {f"key {number}": TokenBucket(100 + number, YEAR) for number in range(8)}
    for key, policy in policies.items():
        lone.take(policy, key)
    own.pause()
    for key, policy in policies.items():
        with pytest.raises(StoreError, match=r"timed out \(it hangs, is overloaded or cut off; timeout="):
            lone.take(policy, key)
        probe(lone)
    own.resume()
    for key, policy in policies.items():
        assert lone.take(policy, key)[:3] == (True, policy.quota, policy.quota - 2)


def test_lost_answer_of_a_write(own: Server, lone: MemcachedStore) -> None:
    """The server hangs between reading and writing: a StoreError, and the charge stands once it goes on, or not; the
    connection is not used again.
    """
    lone.take(HUNDRED, "k")
    before_write(lone, lambda _: own.pause())
    with pytest.raises(StoreError, match="timed out"):
        lone.take(HUNDRED, "k")
    own.resume()
    probe(lone)
    assert lone._server._idle == []
    assert lone.peek(HUNDRED, "k").remaining in (98, 99)


def test_interrupted_call_leaves_no_answer_behind(own: Server, lone: MemcachedStore) -> None:
    """An exception that isn't an Exception (KeyboardInterrupt, a timeout of gevent's) in the middle of a call: its
    connection is closed, and the answer that comes is nobody's.
    """
    lone.take(TEN, "spent", 10)
    before = signal.getsignal(signal.SIGALRM)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    own.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            lone.peek(TEN, "spent")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        own.resume()
    assert lone._server._idle == []
    assert [lone.peek(HUNDRED, "other")[1:3], lone.peek(TEN, "spent").remaining] == [(100, 100), 0]


def test_stray_answer_is_not_taken(own: Server, lone: MemcachedStore) -> None:
    """A connection in which something lies unread is not used."""
    lone.take(TEN, "k")
    [(client, _)] = lone._server._idle
    client.sock.sendall(b"version\r\n")
    lone._server._idle[0][1].poll(5_000)
    assert lone.take(TEN, "k").remaining == 8
    assert client.sock is None


def test_known_failure_is_not_worth_a_thread(own: Server, lone: MemcachedStore) -> None:
    """While the server is known to be down, coroutines say so on the loop."""
    own.kill()

    async def go() -> list[str]:
        said = []
        for call in (lone.atake, lone.apeek, lone.areset, lambda *_: lone.atake_all([(TEN, "k", 1)])):
            with pytest.raises(StoreError) as caught:
                await call(TEN, "k")
            said.append(str(caught.value))
            lone.take = lone.peek = lone.reset = lone.take_all = None  # type: ignore[method-assign, assignment]
        return said

    first, *later = asyncio.run(go())
    assert "tried again" not in first
    assert all("refused" in said and "tried again in" in said for said in later)


def test_probe_by_a_coroutine(own: Server, lone: MemcachedStore) -> None:
    """The call that is the probe does ask the server."""
    own.kill()
    with pytest.raises(StoreError):
        lone.take(TEN, "k")
    own.start()
    probe(lone)
    assert asyncio.run(lone.atake(TEN, "k")).remaining == 9


def test_closed_store_says_so(server: Server, own: Server) -> None:
    """Each call of a closed store is a StoreError, and its connections are closed, also one that was under way."""
    store = MemcachedStore(own.url)
    before_write(store, lambda _: store.close())
    with pytest.raises(StoreError, match="was closed"):
        store.take(TEN, "k")
    store._server._closed = False
    store._server._ask(lambda client: [client.version(), store.close()])
    assert store._server._idle == []
    for call in (store.take, store.peek, store.reset, lambda *_: store.take_all([(TEN, "k", 1)])):
        with pytest.raises(StoreError, match="was closed"):
            call(TEN, "k")


def test_unix_socket(tmp_path: Any) -> None:
    """A path that nobody listens at is named, too."""
    with (
        MemcachedStore(f"{tmp_path}/socket") as store,
        pytest.raises(StoreError, match=r"/socket can't.*see that it runs"),
    ):
        store.take(TEN, "k")


def test_name_with_two_addresses(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may be ::1 first, where memcached doesn't listen by default: the next address is tried."""
    import socket

    look_up = socket.getaddrinfo
    both = [
        *look_up("::1", own.port, type=socket.SOCK_STREAM),
        *look_up("127.0.0.1", own.port, type=socket.SOCK_STREAM),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with MemcachedStore(f"localhost:{own.port}") as store:
        assert store.take(TEN, "k").remaining == 9


class Full(Server):
    """A memcached that may use two megabytes, and not evict."""

    def _command(self, port: int) -> list[str]:
        return [*super()._command(port), "-m", "2", "-M"]


@pytest.mark.usefixtures("server")  # or it is skipped
def test_full_memory_is_an_error_and_no_pass() -> None:
    """With -M a server that is full refuses to store: a StoreError that says so, for a new key and for one that is
    there, while what it keeps is still answered; and it isn't taken for an outage.
    """
    full = Full("memcached")
    full.start()
    try:
        with MemcachedStore(full.url) as store:
            store.take(TEN, "spent", 10)
            numbers = itertools.count()
            with pytest.raises(StoreError, match=r"out of memory storing object.*\(-M\); start it with more \(-m\)"):
                any(not store.take(TEN, str(number)).allowed for number in numbers)
            assert next(numbers) > 100
            with pytest.raises(StoreError, match="out of memory"):
                store.take(TEN, "new")
            assert not store.take(TEN, "spent").allowed
            assert store.peek(TEN, "0").remaining == 9
            assert store._server._breaker.outage is None
    finally:
        full.kill()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"ERROR\r\n", r"ERROR \(see that memcached is what listens there"),
        (b"ERROR Too many open connections\r\n", r"more connections \(-c\)"),
        (b"SERVER_ERROR busy\r\n", "it says 'busy'"),
        (b"CLIENT_ERROR no\r\n", "it says 'no'"),
        (
            b"-ERR unknown command 'gets'\r\n",
            r"it says \"-ERR unknown.*isn't its language \(see that memcached is what listens there",
        ),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it says 'HTTP/1.1 400"),
        (b"VALUE other 0 1 7\r\nx\r\nEND\r\n", "it says 'other'"),
        (b"VALUE broken\r\n", "it says 'not enough values"),
        (b"VALUE other 0 9 7\r\nx", "closed the connection"),
        (b"", "closed the connection"),
    ],
)
def test_answers_that_are_none(answer: bytes, said: str) -> None:
    """Whatever else comes back, another key's value too, is a StoreError that says what it was."""
    with answering(answer) as port, MemcachedStore(("127.0.0.1", port)) as store:
        with pytest.raises(StoreError, match=rf"127\.0\.0\.1:{port} can't answer: .*{said}"):
            store.take(TEN, "k")
        assert store._server._idle == []
        assert (store._server._breaker.outage is not None) == ("closed" in said)


# ---- threads and forks -----------------------------------------------------------------------------------------------


def test_threads_get_their_own_answers(make: Callable[..., MemcachedStore]) -> None:
    """8 threads, each on a key and a limit of its own: each reads only its own count, over at most 8 connections."""
    store, wrong = make(), []

    def hit(number: int) -> None:
        policy = TokenBucket(1000 + number, YEAR)
        for count in range(1, 41):
            decision = store.take(policy, f"key {number}")
            if decision[:3] != (True, policy.quota, policy.quota - count):
                wrong.append(decision)

    threads = [threading.Thread(target=hit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 <= len(store._server._idle) <= 8


def hit_own(store: MemcachedStore, number: int, barrier: Any, results: Any) -> None:
    policy = TokenBucket(1000 + number, YEAR)
    barrier.wait()
    results.put([store.take(policy, "k")[:3] for _ in range(100)])
    store.close()


def test_fork_makes_connections_of_its_own(make: Callable[..., MemcachedStore]) -> None:
    """A store that was used before the fork: parent and children would read each other's answers over its connection;
    each reads only its own, and the parent's goes on.
    """
    store = make()
    store.take(TEN, "before")
    [(client, _)] = store._server._idle
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    children = [context.Process(target=hit_own, args=(store, number, barrier, results)) for number in range(3)]
    for child in children:
        child.start()
    barrier.wait()
    remaining = [store.take(HUNDRED, "parent").remaining for _ in range(100)]
    answers = sorted(results.get(timeout=30) for _ in children)
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 3
    assert remaining == list(range(99, -1, -1))
    for number, answer in enumerate(answers):
        quota = 1000 + number
        assert answer == [(True, quota, quota - count) for count in range(1, 101)]
    assert store._server._idle[0][0] is client
    assert client.sock is not None


def test_fork_in_the_middle_of_a_call(make: Callable[..., MemcachedStore]) -> None:
    """A child that was forked within a call leaves the connection to its parent."""
    import os

    store = make()

    def fork(client: Any) -> int:
        client.version()
        return os.fork()

    child = store._server._ask(fork)
    if child == 0:
        os._exit(0 if store._server._idle == [] and store.take(HUNDRED, "child").remaining == 99 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(store._server._idle) == 1
    assert store.take(HUNDRED, "parent").remaining == 99
