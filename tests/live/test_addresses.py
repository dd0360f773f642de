"""Whose request is it? Real gunicorns reached in every way, also through a real nginx, by clients that forge.

A cell is a row (worker class and adapter) and a way to the server (`WAYS`). In each of them clients send what they can
make up (`FORGERIES`), and the key has to be the same for all of it: that of the address from which they come, or
`OTHERWISE` says why it isn't. `pytest -s` prints what was measured.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import _nginx
import pytest

from shmlimit.keys import address_key
from tests.live.harness import Answer, Connection, Fields, Serve, Server, free_port, missing, serving
from tests.live.key_app import ADAPTERS, QUOTA, path
from tests.live.ways import FORGERIES, OTHERWISE, OUTSIDE, VICTIM, WAYS, WORKERS, Client, Worker

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc and /dev/shm")

# The options of each worker class, and its application.
SERVED: dict[Worker, tuple[str, ...]] = {
    "sync": ("tests.live.key_app:wsgi",),
    "gthread": ("-k", "gthread", "--threads", "4", "--keep-alive", "30", "tests.live.key_app:wsgi"),
    "asgi": ("-k", "asgi", "--keep-alive", "30", "tests.live.key_app:asgi"),
}


def test_no_cell_is_left_out() -> None:
    """Each way is asked by each row, and each cell that doesn't give the client's own address has its reason."""
    cells = {(worker, way): WAYS[way].want(worker) for worker in WORKERS for way in WAYS}
    assert len(cells) == 3 * 44
    assert all(list(way.wanted) == list(WORKERS) for way in WAYS.values() if isinstance(way.wanted, dict))
    others = set()
    for (worker, way), wanted in cells.items():
        addresses = [client.address for client in WAYS[way].clients]
        if not all(addresses) or wanted != tuple(map(address_key, addresses)):
            others.add((worker, way))
    assert set(OTHERWISE) == others
    assert len(others) == 37


# -- The servers -------------------------------------------------------------------------------------------------------


class Rig(NamedTuple):
    """The servers of one worker class; `doors` says where to connect."""

    worker: Worker
    plain: Server
    doors: Mapping[str, int | str | tuple[str, int]]


# name: where it leads, and what it writes
SITES = {
    "append": ("tcp", "X-Forwarded-For $proxy_add_x_forwarded_for"),
    "forwarded": ("tcp", "Forwarded $live_forwarded"),
    "anew": ("tcp", "Forwarded $live_node"),
    "real-ip": ("tcp", "X-Real-IP $remote_addr"),
    "lines": (  # as HAProxy does it: behind what came in, which isn't sent where it is empty
        *("tcp", "X-Forwarded-For $http_x_forwarded_for", "X-Forwarded-For $remote_addr"),
        *("Forwarded $http_forwarded", "Forwarded $live_node", "X-Real-IP $http_x_real_ip", "X-Real-IP $remote_addr"),
    ),
    "pass": ("tcp", "X-Nothing nothing"),
    "unix": ("unix", "X-Forwarded-For $proxy_add_x_forwarded_for", "Forwarded $live_forwarded"),
    "any-4": ("any_4", "X-Forwarded-For $proxy_add_x_forwarded_for"),
    "any-6": ("any_6", "X-Forwarded-For $proxy_add_x_forwarded_for"),
    "front": ("append", "X-Forwarded-For $proxy_add_x_forwarded_for"),
    "front-forwarded": ("forwarded", "Forwarded $live_forwarded"),
}

# The element of RFC 7239 that stands for the client: an IPv6 address has brackets, and so it needs quotes.
MAPS = r"""
    map $remote_addr $live_node {
        "~:" 'for="[$remote_addr]"';
        default "for=$remote_addr";
    }
    map $http_forwarded $live_forwarded {
        "" $live_node;
        default "$http_forwarded, $live_node";
    }
"""


@functools.cache
def has_ipv6() -> bool:
    """Whether the loopback has its IPv6 address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def free_ports() -> Iterator[int]:
    """Free ports, each of them once."""
    given: set[int] = set()
    while True:
        port = free_port()
        if port not in given:
            given.add(port)
            yield port


def sites(upstreams: Mapping[str, str], ports: Mapping[str, tuple[int, int]]) -> str:
    """The configuration of nginx. Of a site's two ports the second expects a PROXY line, and believes it."""
    text = [MAPS]
    for name, server in upstreams.items():
        text.append(f"    upstream {name} {{ server {server}; keepalive 4; }}")
    for name, (upstream, *fields) in SITES.items():
        if upstream not in upstreams:
            continue
        plain, proxied = ports[name]
        lines = [f"listen 127.0.0.1:{plain};", f"listen 127.0.0.1:{proxied} proxy_protocol;"]
        lines += [f"listen [::1]:{plain};"] if has_ipv6() else []
        lines += ["set_real_ip_from 127.0.0.1;", "real_ip_header proxy_protocol;"]
        lines += ["proxy_bind 127.0.0.2;"] if name.startswith("front") else []
        lines += [f"proxy_set_header {field};" for field in ("Host $host", 'Connection ""', *fields)]
        text.append(f"    server {{ {' '.join(lines)} proxy_http_version 1.1;")
        text.append(f"        location / {{ proxy_pass http://{upstream}; }} }}")
    return "\n".join(text)


@pytest.fixture(scope="module", params=WORKERS)
def rig(request: pytest.FixtureRequest, new_name: Callable[[], str]) -> Iterator[Rig]:
    """A gunicorn that listens in three places, one that takes PROXY lines, and an nginx in front of the first."""
    if _nginx.program() is None:
        missing("nginx isn't installed: apt-get install nginx")
    with contextlib.ExitStack() as stack:
        # Not below pytest's directory: the path of a socket has room for 107 characters.
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shmlimit-")))
        serve = stack.enter_context(serving(new_name(), place))
        yield _rig(stack, serve, request.param, place)


def _rig(stack: contextlib.ExitStack, serve: Serve, worker: Worker, place: Path) -> Rig:
    *options, app = SERVED[worker]
    free = free_ports()
    unix, unix_proxied, any_port, any_proxied = str(place / "a.sock"), str(place / "b.sock"), next(free), next(free)
    binds = [f"unix:{unix}", *([f"[::]:{any_port}"] if has_ipv6() else [])]
    # So that the padding gets as far as the limiter: by default gunicorn refuses a line of more than 8,190 bytes.
    options += ["--limit-request-field_size", "65536"]
    plain = serve(*options, app=app, workers=2, port=next(free), binds=binds)
    options += ["--proxy-protocol", "v1", "--proxy-allow-from", "127.0.0.1"]
    # What the hook asks for; see test_gthread_forgets_the_proxy_protocol.
    options += ["--keep-alive", "0"] if worker == "gthread" else []
    binds = [f"unix:{unix_proxied}", *([f"[::]:{any_proxied}"] if has_ipv6() else [])]
    proxied = serve(*options, app=app, workers=2, port=next(free), binds=binds)

    ports = {site: (next(free), next(free)) for site in SITES}
    upstreams = {"tcp": f"127.0.0.1:{plain.port}", "unix": f"unix:{unix}"}
    upstreams |= {site: f"127.0.0.1:{ports[site][0]}" for site in ("append", "forwarded")}
    if has_ipv6():
        upstreams |= {"any_4": f"127.0.0.1:{any_port}", "any_6": f"[::1]:{any_port}"}
    served = [site for site in SITES if SITES[site][0] in upstreams]
    listened = [port for site in served for port in ports[site]]
    stack.enter_context(_nginx.running(place, sites(upstreams, ports), listened))

    doors: dict[str, int | str | tuple[str, int]] = {"tcp": plain.port, "unix": unix}
    doors |= {"[::] 4": any_port, "[::] 6": ("::1", any_port), "PROXY": proxied.port, "PROXY unix": unix_proxied}
    doors |= {"PROXY [::]": any_proxied}
    for site, (port, port_proxied) in ports.items():
        doors |= {f"nginx {site}": port, f"nginx {site} PROXY": port_proxied, f"nginx {site} 6": ("::1", port)}
    return Rig(worker, plain, doors)


# -- The matrix --------------------------------------------------------------------------------------------------------

NEEDS_IPV6 = {way for way in WAYS if "[::]" in way} | {"nginx, X-Forwarded-For, over IPv6"}
MEASURED: dict[tuple[str, str, str], str] = {}


@pytest.fixture(scope="module", autouse=True)
def _told() -> Iterator[None]:
    """Prints the matrix as it was measured."""
    yield
    rows = [(worker, adapter) for worker in WORKERS for adapter in ADAPTERS]
    sys.stdout.write(f"\n| way | {' | '.join(map(' '.join, rows))} |\n|---|{'---|' * len(rows)}\n")
    for way in WAYS:
        found = [MEASURED.get((*row, way), "not measured") for row in rows]
        sys.stdout.write(f"| {way} | {' | '.join(found)} |\n")


def ask(rig: Rig, adapter: str, way: str, client: Client, forgeries: Mapping[str, Fields]) -> list[Answer]:
    """A request with each forgery, over one connection where the server keeps it."""
    connection = Connection(rig.doors[WAYS[way].door], source=client.source, preamble=client.line)
    with contextlib.closing(connection):
        answers = []
        for fields in forgeries.values():
            answers.append(connection.request(path(adapter, way), fields))
            if answers[-1].status not in {200, 429}:
                connection.close()
    return answers


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("way", WAYS)
def test_the_key_is_the_clients(rig: Rig, adapter: str, way: str) -> None:
    """Whatever it forges, a client has one key and one quota, and another one has its own, or `OTHERWISE` says why."""
    if way in NEEDS_IPV6 and not has_ipv6():
        missing("the loopback has no IPv6 address here")
    wanted = WAYS[way].want(rig.worker)
    one, other = WAYS[way].clients
    # A server that refuses the first line needn't read all that follows, and resets the connection if it doesn't.
    refused = isinstance(wanted, int)
    forgeries = {name: fields for name, fields in FORGERIES.items() if not refused or not name.startswith("padding")}
    answers = ask(rig, adapter, way, one, forgeries)
    imposter = {"nothing": FORGERIES["nothing"], "the first": [
        ("X-Forwarded-For", one.address), ("Forwarded", f"for={one.address}"), ("X-Real-IP", one.address),
    ]}  # fmt: skip
    others = ask(rig, adapter, way, other, imposter)
    keys = {answer.fields.get("x-key", "") for answer in answers}
    other_keys = {answer.fields.get("x-key", "") for answer in others}
    statuses = [answer.status for answer in answers]
    told = ["forged"] if f"ip:{VICTIM}" in keys else sorted(keys - {""})
    told += [str(status) for status in sorted({*statuses} - {200, 429})]
    MEASURED[rig.worker, adapter, way] = " ".join(told)

    if isinstance(wanted, int):
        assert {answer.status for answer in [*answers, *others]} == {wanted}
        assert keys == other_keys == {"deny" if "deny" in way else ""}
    elif wanted == "forged":
        assert (answers[0].fields["x-key"], f"ip:{VICTIM}" in keys) == ("unknown", True)
    else:
        assert (keys, other_keys) == ({wanted[0]}, {wanted[1]})
        assert statuses == [200] * QUOTA + [429] * (len(FORGERIES) - QUOTA)
        assert [answer.status for answer in others] == [200 if wanted[0] != wanted[1] else 429] * 2


def test_what_is_shared_is_told(rig: Rig) -> None:
    """Where all clients have one key, the log says so, and how to put it right; falcon's own address isn't believed."""
    for adapter in ADAPTERS:
        for way, advice in [
            ("unix", 'client_ip(trusted=["unix"], header="x-forwarded-for")'),
            ("nginx, no header", 'client_ip(trusted="private", header="x-forwarded-for")'),
        ]:
            answers = ask(rig, adapter, way, WAYS[way].clients[0], {"a line": FORGERIES["a line"]})
            assert advice in rig.plain.log
            if (adapter, way) == ("falcon", "unix"):
                # Any local program could come from there, and `trusted` would take it for the proxy.
                assert answers[0].fields["x-framework"] == ("127.0.0.1" if rig.worker == "asgi" else "")
                assert answers[0].fields["x-key"] == "unknown"


@pytest.mark.parametrize("worker", WORKERS)
def test_a_balancer_seen_as_a_mapped_address(serve: Serve, worker: Worker) -> None:
    """Bound to `[::]`, gunicorn believes a balancer's PROXY lines if the mapped form of its address is allowed."""
    if not has_ipv6():
        missing("the loopback has no IPv6 address here")
    *options, app = SERVED[worker]
    options += ["--proxy-protocol", "v1", "--proxy-allow-from", "::ffff:127.0.0.1", "--keep-alive", "0"]
    port = free_port()
    serve(*options, app=app, workers=1, binds=[f"[::]:{port}"])
    for client, key in zip(OUTSIDE, WAYS["PROXY TCP4"].want(worker), strict=True):
        with contextlib.closing(Connection(port, source=client.source, preamble=client.line)) as connection:
            assert connection.request(path("wrapper", "PROXY TCP4")).fields["x-key"] == key


# -- Refused at the start ----------------------------------------------------------------------------------------------


LIMITED = """\
from shmlimit import Guard
from shmlimit.adapters.wsgi import RateLimit
from shmlimit.keys import client_ip
from tests.live.key_app import wsgi

app = RateLimit(wsgi, Guard("test", "10/minute"), key=client_ip({}))
"""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ('header="x-forwarded-for"', "header 'x-forwarded-for' would never be read: add trusted=\"private\""),
        ('header="forwarded"', "header 'forwarded' would never be read: add trusted=\"private\""),
        ('header="x-real-ip"', "header 'x-real-ip' needs trusted: the proxies that set it"),
        ('trusted=["unix"]', 'trusted and hops need a header to read: add header="x-forwarded-for"'),
        ("hops=1", 'trusted and hops need a header to read: add header="x-forwarded-for"'),
        ('trusted=["10.0.0.0/33"], header="forwarded"', "network '10.0.0.0/33' can't be read: give a text like"),
    ],
)
def test_what_can_not_be_right_does_not_start(serve: Serve, options: str, told: str) -> None:
    """A gunicorn whose key could never be right ends before it serves anybody, and says what to do."""
    # With --preload the master makes the application, and nobody listens before that is done.
    server = serve("--preload", code=LIMITED.format(options), workers=1, ready=False)
    assert server.wait_exit() != 0
    assert f"shmlimit.errors.ConfigError: {told}" in server.log
    assert "Listening at" not in server.log


@pytest.mark.parametrize("worker", WORKERS)
def test_without_preload_it_ends_as_well(serve: Serve, worker: Worker) -> None:
    """Where the workers make the application none of them boots, and the server ends with the same advice."""
    server = serve("-k", worker, code=LIMITED.format('header="forwarded"'), workers=1, ready=False)
    assert server.wait_exit() == 3  # gunicorn's status for a worker that can't boot
    assert "shmlimit.errors.ConfigError: header 'forwarded' would never be read: add trusted=" in server.log


GTHREAD_PROXY = ("-k", "gthread", "--proxy-protocol", "v1")
SAYS_REMOTE_ADDR = """\
def app(environ, start_response):
    body = environ["REMOTE_ADDR"].encode()
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
"""


def test_gthread_forgets_the_proxy_protocol(serve: Serve) -> None:
    """Why the hook refuses it: from a connection's second request on, gthread workers tell the proxy's address."""
    server = serve(*GTHREAD_PROXY, config="", code=SAYS_REMOTE_ADDR, workers=1)
    client = OUTSIDE[0]
    with contextlib.closing(Connection(server.port, source=client.source, preamble=client.line)) as connection:
        told = [connection.request().body.decode() for _ in range(3)]
    # NOTE: three times the client's means that gunicorn has mended it; then `_wrong_addresses` of the hook can go.
    assert told == ["203.0.113.7", "127.0.0.1", "127.0.0.1"]


def test_gthread_with_the_proxy_protocol_does_not_start(serve: Serve) -> None:
    """With the hook such a server ends at its start, and says which setting to change."""
    server = serve(*GTHREAD_PROXY, workers=1, ready=False)
    assert server.wait_exit() == 1
    assert "shmlimit: with gthread workers the address in a PROXY protocol line holds for the first" in server.log
    assert "Booting worker" not in server.log
