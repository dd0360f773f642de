"""`keys.client_ip` where there is no address, or a proxy that nobody told it of: its key, and what it logs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shmlimit import keys
from tests.request_kinds import each_kind, environ, falcon_asgi, falcon_wsgi, logged

BEHIND_PROXY = 'client_ip(trusted="private", header="x-forwarded-for")'

# -- A request without an address ------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("peer", [None, ""])
def test_unknown_is_one_explicit_thing(request_of: Any, peer: str | None) -> None:
    """A peer without an address is the one shared key, a refusal or not limited, as was chosen."""
    request = request_of(peer, [])
    assert keys.client_ip()(request) == "unknown"
    assert keys.client_ip(unknown="shared")(request) == "unknown"
    assert keys.client_ip(unknown="deny")(request) is keys.DENY
    assert keys.client_ip(unknown="skip")(request) is None


@each_kind
def test_unknown_is_logged_once(request_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The shared key for requests without an address is logged once per key object, the other choices never."""
    request = request_of(None, [])
    first, second = keys.client_ip(), keys.client_ip()
    for _ in range(3):
        first(request)
    assert len(logged(caplog)) == 1
    assert '"unknown"' in logged(caplog)[0]
    second(request)
    assert len(logged(caplog)) == 2
    for unknown in ("deny", "skip"):
        keys.client_ip(unknown=unknown)(request)
    assert len(logged(caplog)) == 2


@each_kind
@pytest.mark.parametrize("forwarded", ["10.1.1.1", "192.168.1.5, 10.0.0.1", "garbage", ""])
def test_clients_among_the_proxies_are_told_once(
    request_of: Any, forwarded: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients in the trusted networks share `unknown`; the log says so, and what it advises tells them apart."""
    headers = [("X-Forwarded-For", forwarded)] if forwarded else []
    key = keys.client_ip(trusted="private", header="x-forwarded-for")
    for _ in range(3):
        assert key(request_of("10.0.0.7", headers)) == "unknown"
    assert len(logged(caplog)) == 1
    assert "trust the proxies alone" in logged(caplog)[0]
    assert "unix" not in logged(caplog)[0]
    if forwarded[:1] == "1":
        advised = keys.client_ip(trusted=["10.0.0.7"], header="x-forwarded-for")
        assert advised(request_of("10.0.0.7", headers)) == f"ip:{forwarded.rsplit(', ', maxsplit=1)[-1]}"


def test_an_environ_without_an_address_is_unknown() -> None:
    """`REMOTE_ADDR` and `client` may be missing altogether."""
    assert keys.client_ip()({"wsgi.version": (1, 0)}) == "unknown"
    for client in (None, (), []):
        assert keys.client_ip()({"type": "http", "client": client}) == "unknown"
    assert keys.client_ip()({"type": "http"}) == "unknown"


def test_odd_client_behind_a_header_is_no_error() -> None:
    """A server that says where a request comes from in a list of its own is no trusted proxy."""
    key = keys.client_ip(header="x-forwarded-for", hops=1)
    assert key({"type": "http", "client": [["a"], 1], "headers": [(b"x-forwarded-for", b"203.0.113.9")]}) == (
        "ip:203.0.113.9"
    )


def test_falcons_own_address_is_not_believed() -> None:
    """Where falcon says 127.0.0.1 for a unix socket, and reads the route from any peer, the key is `unknown`."""
    request = falcon_asgi(None, [("X-Forwarded-For", "6.6.6.6")])
    assert request.remote_addr == "127.0.0.1"
    assert request.access_route[0] == "6.6.6.6"
    assert keys.client_ip()(request) == "unknown"


@pytest.mark.parametrize("scope", ["read write", {"read": True}, {"type": "Bearer", "path": "/x"}, {}, None, ["read"]])
def test_what_an_application_calls_scope_is_left_alone(scope: Any) -> None:
    """OAuth knows scopes, too: on WSGI a request's is none of a server's."""
    request = falcon_wsgi("203.0.113.7", [("X-Api-Key", "k1")])
    request.scope = scope
    assert keys.client_ip()(request) == "ip:203.0.113.7"
    assert keys.header("x-api-key")(request) == "k1"
    assert keys.path(request) == keys.path(falcon_wsgi("203.0.113.7", []))


# -- A proxy in front, and a key that doesn't know of it -------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1", "::1", "::ffff:192.168.1.1", "fd00::1"])
def test_a_proxy_is_told_once(request_of: Any, peer: str, caplog: pytest.LogCaptureFixture) -> None:
    """A loopback or private peer with X-Forwarded-For is warned of once per key object, with the line that helps."""
    key = keys.client_ip()
    for client in ("203.0.113.7", "203.0.113.8", "203.0.113.9"):
        assert str(key(request_of(peer, [("X-Forwarded-For", client)]))).startswith(("ip:", "net:"))
    assert len(logged(caplog)) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert BEHIND_PROXY in logged(caplog)[0]
    assert "share one bucket" in logged(caplog)[0]


@each_kind
def test_a_proxy_is_told_of_a_peer_that_came_before(request_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What is remembered of a peer doesn't hide that it begins to forward: one of its next requests is looked at."""
    key = keys.client_ip()
    for _ in range(100):
        assert key(request_of("10.0.0.1", [])) == "ip:10.0.0.1"
    assert not logged(caplog)
    for _ in range(70):
        assert key(request_of("10.0.0.1", [("X-Forwarded-For", "203.0.113.7")])) == "ip:10.0.0.1"
    assert len(logged(caplog)) == 1
    assert BEHIND_PROXY in logged(caplog)[0]


def test_new_peers_do_not_hide_a_proxy(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does a peer that comes before each of a proxy's requests."""
    key = keys.client_ip()
    key(environ("10.0.0.1", []))
    for number in range(100):
        key(environ(f"198.18.0.{number}", []))
        for _ in range(10):
            key(environ("10.0.0.1", [("X-Forwarded-For", "203.0.113.7")]))
    assert len(logged(caplog)) == 1


@pytest.mark.parametrize("period", [2, 64, 65, 66, 130])
def test_regular_health_checks_do_not_hide_a_proxy(period: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also where one in so many requests, as are looked at, is a health check."""
    key = keys.client_ip()
    for number in range(period * 200):
        headers = [] if number % period == 0 else [("X-Forwarded-For", "203.0.113.7")]
        key(environ("10.0.0.1", headers))
    assert len(logged(caplog)) == 1


@each_kind
def test_any_number_of_peers(request_of: Any) -> None:
    """Each has its key the first time and every other one, and only so many are remembered."""
    key = keys.client_ip()
    peers = [f"198.18.{number >> 8}.{number & 255}" for number in range(2_500)]
    for _ in range(2):
        for peer in peers:
            assert key(request_of(peer, [])) == f"ip:{peer}"
        assert len(key._known) <= 1_024


@each_kind
def test_nothing_is_told_without_a_reason(request_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    """No warning for a public peer, for a private one without the header, or where the key reads a header."""
    keys.client_ip()(request_of("203.0.113.7", [("X-Forwarded-For", "6.6.6.6")]))
    keys.client_ip()(request_of("10.0.0.1", [("X-Real-IP", "6.6.6.6")]))
    told = keys.client_ip(trusted="private", header="x-forwarded-for")
    assert told(request_of("10.0.0.1", [("X-Forwarded-For", "6.6.6.6")])) == "ip:6.6.6.6"
    told = keys.client_ip(trusted=["10.0.0.1"], header="x-forwarded-for")
    assert told(request_of("10.0.0.2", [("X-Forwarded-For", "6.6.6.6")])) == "ip:10.0.0.2"
    assert logged(caplog) == []


def test_the_line_that_is_printed_works() -> None:
    """The advice in the warning is code that gives the client's key."""
    key = eval(BEHIND_PROXY, {"client_ip": keys.client_ip})
    assert key(environ("127.0.0.1", [("X-Forwarded-For", "203.0.113.7")])) == "ip:203.0.113.7"
