"""RedisStore when its server is killed, paused, started again, full, a replica: errors that cost nothing, no mixed-up
answers, and back by itself.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from _servers import Server

from shmlimit import ConfigError, FixedWindow, Gcra, SlidingCounter, SlidingLog, StoreError, TokenBucket
from shmlimit.stores._breaker import Breaker
from shmlimit.stores.redis import RedisStore
from tests.stores.trouble import Clock, answering

KINDS = [TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter]
TEN = TokenBucket(10, 3600)


@pytest.fixture
def server(own_server: Callable[[str], Server], redis_kind: str) -> Server:
    return own_server(redis_kind)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(server: Server, clock: Clock) -> Iterator[RedisStore]:
    with RedisStore(server.url, timeout=10) as store:
        store._breaker = store._lines._breaker = Breaker(clock=clock, chance=lambda: 0.5)
        yield store


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def fails(store: RedisStore, match: str = "can't answer") -> str:
    with pytest.raises(StoreError, match=match) as caught:
        store.take(TEN, "k")
    return str(caught.value)


# ---- down, and back --------------------------------------------------------------------------------------------------


def test_killed_and_started_again(server: Server, store: RedisStore, clock: Clock) -> None:
    """The first failure asks the server, later ones don't until the probe; a probe that succeeds ends it; nothing is
    kept by a server that keeps nothing, and the scripts are loaded again.
    """
    assert store.take(TEN, "k", 7).remaining == 3
    server.kill()
    text = fails(store)
    assert f"127.0.0.1:{server.port} can't answer" in text
    assert "see whether it runs" in text
    assert "tried again in 1.0 s" in fails(store)
    clock.now_s = 0.6
    server.start()
    assert "tried again in 0.4 s" in fails(store)  # the server is back, but nobody asks it before the probe
    clock.now_s = 1.0
    assert store.take(TEN, "k").remaining == 9
    assert store._breaker.outage is None


def test_waits_double_while_it_is_down(server: Server, clock: Clock) -> None:
    """Probes after 1, 2, 4 … s, each a try to connect, and no more than that."""
    server.kill()
    tries = []
    with socket.socket() as line, RedisStore(server.url, timeout=0.02) as store:
        store._breaker = store._lines._breaker = Breaker(clock=clock, chance=lambda: 0.5)
        # Who listens here sees what the store does.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        line.bind(("127.0.0.1", server.port))
        line.listen()
        line.setblocking(False)
        for second in range(16):
            clock.now_s = float(second)
            fails(store)
            try:
                line.accept()[0].close()
                tries.append(second)
            except BlockingIOError:
                pass
    assert tries == [0, 1, 3, 7, 15]


def test_restart_between_two_calls_is_not_noticed(server: Server, store: RedisStore, monkeypatch: Any) -> None:
    """A connection that was idle while the server was restarted, or closed it, is replaced before anything is sent."""
    monkeypatch.setattr("shmlimit.stores._redis_lines._LOOK_S", 0.0)
    for policy in [kind(10, 3600) for kind in KINDS]:
        assert store.take(policy, "k").remaining == 9
        server.restart()
        assert store.take(policy, "k").remaining == 9
        with redis.Redis(port=server.port) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        assert store.take(policy, "k").remaining == 8


def test_failure_of_one_connection_ends_the_idle_ones(
    server: Server, store: RedisStore, clock: Clock, monkeypatch: Any
) -> None:
    """Several connections, and the server was restarted a moment ago: one call fails and not one for each of them."""
    monkeypatch.setattr("shmlimit.stores._redis_lines._LOOK_S", 10.0)
    some = [store._lines._connection() for _ in range(3)]
    store._lines._idle.extend((connection, time.monotonic()) for connection in some)
    server.restart()
    fails(store)
    assert not store._lines._idle
    clock.now_s = 1.0
    assert store.take(TEN, "k").remaining == 9


def test_old_connections_are_replaced(server: Server, store: RedisStore, monkeypatch: Any) -> None:
    """One that was idle for long may have been dropped by something in between, which can't be seen from here."""
    store.take(TEN, "k")
    (before,) = [one for one, _ in store._lines._idle]
    port = before._sock.getsockname()
    store.take(TEN, "k")
    assert before._sock.getsockname() == port
    monkeypatch.setattr("shmlimit.stores._redis_lines._LOOK_S", 0.0)
    monkeypatch.setattr("shmlimit.stores._redis_lines._OLD_S", 0.0)
    assert store.take(TEN, "k").remaining == 7
    assert before._sock.getsockname() != port


def test_paused_server(server: Server, clock: Clock) -> None:
    """A server that is stopped is a timeout and then costs nothing; when it goes on, a charge that it still did counts,
    and no call gets the answer of another.
    """
    with RedisStore(server.url) as store:
        store._breaker = store._lines._breaker = Breaker(clock=clock, chance=lambda: 0.5)
        assert store.take(TEN, "k", 3).remaining == 7
        server.pause()
        assert "imeout" in fails(store)
        assert "tried again" in fails(store)
        clock.now_s = 1.0
        assert "imeout" in fails(store)  # a new connection, which the kernel accepts and nobody answers
        server.resume()
        clock.now_s = 4.0
        # The late answers say that 6 are left, or 5. Whoever read one would say so of another key.
        assert [store.take(TokenBucket(100, 3600), f"other {i}").remaining for i in range(5)] == [99] * 5
        assert 4 <= store.take(TEN, "k").remaining <= 6


def test_threads_never_get_the_answers_of_others(server: Server) -> None:
    """8 threads on keys of their own while the server is stopped again and again: each sees its own count, which errors
    may have charged but nobody else.
    """
    policy, errors, wrong, stop = FixedWindow(10**6, 10**9), [], [], threading.Event()

    with RedisStore(server.url, timeout=0.02) as store:
        breaker = store._breaker

        def decide(number: int) -> None:
            sent = answered = 0
            while not stop.is_set():
                sent += 1
                try:
                    # Each thread has costs of its own: what is left tells whose answer it is.
                    left = 10**6 - store.take(policy, f"key {number}", number).remaining
                except StoreError as error:
                    errors.append(error)
                    breaker._outage = None  # the probe at once
                    continue
                answered += 1
                if left % number or not answered * number <= left <= sent * number:
                    wrong.append((number, left))

        threads = [threading.Thread(target=decide, args=(number,)) for number in (7, 11, 13, 17, 19, 23, 29, 31)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            before = len(errors)
            server.pause()
            wait_until(lambda before=before: len(errors) >= before + 8)
            server.resume()
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(errors) >= 64


@pytest.mark.parametrize("kind", KINDS)
def test_killed_under_load(server: Server, kind: Any) -> None:
    """Threads decide while the server dies and comes back: errors in between, then decisions; and with the server's
    memory gone, one quota before and one after.
    """
    policy, stop = kind(100, 10**9), threading.Event()
    allowed: list[bool] = []
    errors: list[StoreError] = []
    with RedisStore(server.url, timeout=10) as store:
        breaker = store._breaker

        def decide() -> None:
            while not stop.is_set():
                try:
                    allowed.append(store.take(policy, "k").allowed)
                except StoreError as error:  # noqa: PERF203 - goes on
                    errors.append(error)
                    breaker._outage = None

        threads = [threading.Thread(target=decide) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(allowed) >= 100)
        server.kill()
        wait_until(lambda: len(errors) > 0)
        assert sum(allowed) == 100
        server.start()
        wait_until(lambda: sum(allowed) >= 200)
        stop.set()
        for thread in threads:
            thread.join()
        assert not store.take(policy, "k").allowed
    assert sum(allowed) == 200


def test_interrupt_takes_the_connection_along(server: Server, store: RedisStore, monkeypatch: Any) -> None:
    """A KeyboardInterrupt (or gunicorn's timeout) between question and answer leaves no answer behind."""
    store.take(TEN, "k")
    (connection,) = [one for one, _ in store._lines._idle]

    def interrupt(**_named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(connection, "read_response", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.take(TEN, "k")
    assert store.take(TokenBucket(100, 3600), "other").remaining == 99
    assert connection not in [one for one, _ in store._lines._idle]


# ---- what a server refuses -------------------------------------------------------------------------------------------


def test_replica_refuses(server: Server, store: RedisStore, clock: Clock) -> None:
    """A primary that became a replica is an outage, which says so; made a primary again, it is found by the probe."""
    store.take(TEN, "k")
    with redis.Redis(port=server.port) as client:
        client.replicaof("127.0.0.1", 1)
        assert "it is a replica" in fails(store, "READONLY")
        fails(store, "tried again")
        client.replicaof("NO", "ONE")
        clock.now_s = 1.0
        assert store.take(TEN, "k").remaining == 8


def test_server_without_memory(server: Server, store: RedisStore, clock: Clock) -> None:
    """Out of memory is an outage that says what to do, and nothing of a joint request is charged."""
    with redis.Redis(port=server.port) as client:
        store.take(TEN, "k")
        client.config_set("maxmemory", 1)
        for number, ask in enumerate(
            (lambda: store.take(TEN, "k"), lambda: store.take_all([(TEN, "k", 1), (TEN, "l", 1)]))
        ):
            clock.now_s = 100.0 * number
            with pytest.raises(StoreError, match=r"OOM .*raise maxmemory"):
                ask()
        fails(store, "tried again")
        client.config_set("maxmemory", 0)
        clock.now_s = 300.0
        assert [store.peek(TEN, key).remaining for key in ("k", "l")] == [9, 10]


def test_password(server: Server, store: RedisStore, clock: Clock) -> None:
    """Without the password it is an outage that says so, and with it, in the URL or a client, all is well."""
    with redis.Redis(port=server.port) as client:
        client.config_set("requirepass", "s3cret/@")
    assert "into the URL" in fails(store, "unauthenticated|NOAUTH")
    url = f"redis://:s3cret%2F%40@127.0.0.1:{server.port}"
    with RedisStore(url) as other:
        assert other.take(TEN, "k").remaining == 9
        assert "s3cret" not in repr(other)
    with RedisStore(url.replace("s3cret", "wrong")) as other:
        text = fails(other, "WRONGPASS|NOAUTH|invalid")
        assert "wrong" not in text
    with redis.Redis.from_url(url) as client, RedisStore(client) as other:
        assert other.take(TEN, "k").remaining == 8


def test_user_without_rights(server: Server, clock: Clock) -> None:
    """A user that may not run scripts is told so."""
    with redis.Redis(port=server.port) as client:
        client.acl_setuser("low", enabled=True, passwords="+pw", commands=["+ping"], keys="*")
    with RedisStore(f"redis://low:pw@127.0.0.1:{server.port}") as store:
        fails(store, "NOPERM.*EVALSHA")
        fails(store, "tried again")


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n", b"$-1\r\n", b"*1\r\n:1\r\n", b"+OK\r\n", b"?\r\n", b""],
    ids=repr,
)
def test_server_that_speaks_something_else(reply: bytes) -> None:
    """Another protocol at that port, or other answers, are a StoreError for plain calls and coroutines."""
    with answering(reply) as port:
        url = f"redis://127.0.0.1:{port}"
        with RedisStore(url) as store, RedisStore(url) as other:
            fails(store, "answer")
            with pytest.raises(StoreError, match="answer"):
                asyncio.run(other.atake(TEN, "k"))


def test_name_that_nobody_has() -> None:
    """A host that can't be found is an outage like any other."""
    with RedisStore("redis://nobody.invalid:1") as store:
        fails(store, "nobody.invalid:1 can't answer")
        fails(store, "tried again")


# ---- forks, closing, settings ----------------------------------------------------------------------------------------


def child(store: RedisStore, number: int, results: Any) -> None:
    policy = TokenBucket(1000, 3600)
    carried = len(store._lines._idle)
    results.put((carried, [store.take(policy, f"child {number}").remaining for _ in range(200)]))


def test_forks_have_connections_of_their_own(server: Server, store: RedisStore) -> None:
    """A master that has used the store forks workers: each gets its own answers, and so does the master."""
    policy = TokenBucket(1000, 3600)
    store.take(policy, "parent")
    (before,) = [one for one, _ in store._lines._idle]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=child, args=(store, number, results)) for number in range(3)]
    for process in children:
        process.start()
    mine = [store.take(policy, "parent").remaining for _ in range(200)]
    theirs = [results.get(timeout=30) for _ in children]
    for process in children:
        process.join()
    wanted = list(range(999, 799, -1))
    assert mine == [one - 1 for one in wanted]
    assert theirs == [(0, wanted)] * 3
    assert [one for one, _ in store._lines._idle] == [before]  # a child's end didn't cut the parent's connection


def test_closed_store_says_so(server: Server) -> None:
    """After `close` every call raises, closing twice is fine, and the counts stay on the server."""
    store = RedisStore(server.url)
    store.take(TEN, "k")
    store.close()
    store.close()
    for call in (store.take, store.peek, store.reset):
        with pytest.raises(StoreError, match="is closed"):
            call(TEN, "k")
    with pytest.raises(StoreError, match="is closed"):
        store.take_all([(TEN, "k", 1)])
    with RedisStore(server.url) as other:
        assert other.take(TEN, "k").remaining == 8


@pytest.mark.parametrize(
    "source",
    [
        *("http://localhost", "localhost:6379", "", "redis+cluster://localhost", "redis://localhost?db=x"),
        *("redis://localhost/abc", "redis://localhost/1/2", "redis://user:s3cret/pass@localhost"),
        *(None, 6379, object(), ["redis://localhost"]),
    ],
    ids=repr,
)
def test_bad_server_is_refused(source: Any) -> None:
    """What is neither an URL that works nor a client is a ConfigError, before anything connects."""
    with pytest.raises(ConfigError, match="RedisStore") as raised:
        RedisStore(source)
    assert "s3cret" not in str(raised.value)  # nothing of a password gets into a log


def test_sentinels_connections_are_refused() -> None:
    """Connections that find their server in another way can't be made from here."""
    from redis.sentinel import Sentinel

    client = Sentinel([("localhost", 1)]).master_for("primary")
    with pytest.raises(ConfigError, match="give an URL"):
        RedisStore(client)


def test_without_redis_py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the store says how to install it; importing the module is fine."""
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'shmlimit\[redis\]'"):
        RedisStore("redis://localhost")


def test_clients_of_every_kind(server: Server) -> None:
    """Address and database are taken of plain and asyncio clients of redis and valkey; decoding, retries and timeouts
    of theirs aren't, and the client goes on as it was.
    """
    import valkey

    address = {"host": "127.0.0.1", "port": server.port, "db": 3}
    clients: list[Any] = [
        redis.Redis(**address, decode_responses=True, socket_timeout=60, protocol=3),
        redis.asyncio.Redis(**address, protocol=3),
        redis.Redis(connection_pool=redis.BlockingConnectionPool(**address)),
        valkey.Valkey(**address, decode_responses=True),
        valkey.asyncio.Valkey(**address),
    ]
    url = f"127.0.0.1:{server.port}/3"
    stores = [RedisStore(one) for one in (*clients, f"redis://{url}", f"valkey://{url}")]
    assert [store.take(TEN, "k").remaining for store in stores] == [9, 8, 7, 6, 5, 4, 3]
    assert [asyncio.run(store.atake(FixedWindow(10, 10**9), "k")).remaining for store in stores] == [
        9,
        8,
        7,
        6,
        5,
        4,
        3,
    ]
    assert {store._settings.timeout for store in stores} == {0.25}
    assert "Valkey at 127.0.0.1" in repr(stores[3])
    for store in stores:
        (connection,) = [one for one, _ in store._lines._idle]
        assert connection.retry.get_retries() == 0 if hasattr(connection.retry, "get_retries") else True
        assert connection._sock.gettimeout() == 0.25
        store.close()
    assert clients[0].dbsize() == 2
    clients[0].close()


def test_tls_settings_are_taken_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client says of TLS goes to plain and asyncio connections; what asyncio ones can't do is an error there and
    not left out.
    """
    import ssl

    given = {
        "host": "localhost",
        "port": 1,
        "ssl": True,
        "ssl_ca_certs": "/ca",
        "ssl_min_version": ssl.TLSVersion.TLSv1_3,
    }
    clients = [redis.Redis(**given), redis.asyncio.Redis(**given)]
    for store in map(RedisStore, clients):
        for kind in (store._settings.kind, store._settings.twin):
            connection = kind(**store._settings.wanted)
            assert isinstance(connection, redis.SSLConnection | redis.asyncio.SSLConnection)
        assert store._settings.wanted["ssl_ca_certs"] == "/ca"
        assert store._settings.wanted["ssl_check_hostname"] is True
        assert store._settings.not_for_loops == []
    with RedisStore(redis.Redis(**given, ssl_validate_ocsp=True)) as store:
        assert store._settings.wanted["ssl_validate_ocsp"] is True
        with pytest.raises(ConfigError, match="ssl_validate_ocsp"):
            asyncio.run(store.atake(TEN, "k"))


def test_unix_socket(server: Server, tmp_path: Path, own_server: Any, redis_kind: str, monkeypatch: Any) -> None:
    """A socket in the file system, and its path in the message when it is gone."""
    path = tmp_path / "s"
    command = Server._command
    monkeypatch.setattr(Server, "_command", lambda self, port: [*command(self, port), "--unixsocket", str(path)])
    local = own_server(redis_kind)
    with RedisStore(f"unix://{path}") as store:
        assert store.take(TEN, "k").remaining == 9
        local.kill()
        path.unlink(missing_ok=True)
        assert str(path) in fails(store)
