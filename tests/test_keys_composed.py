"""Keys of method, path and route, and keys of several parts."""

from __future__ import annotations

from typing import Any

import falcon
import falcon.asgi
import falcon.testing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmlimit import keys
from shmlimit.errors import ConfigError

unhurried = settings(deadline=None)  # a busy machine is no failure


def environ(path: str = "/", mount: str = "", method: str = "GET", headers: Any = ()) -> dict[str, Any]:
    """A WSGI environ for a path below a mount point."""
    made = falcon.testing.create_environ(headers=dict(headers), remote_addr="203.0.113.7")
    return made | {"SCRIPT_NAME": mount, "PATH_INFO": path.encode().decode("latin-1"), "REQUEST_METHOD": method}


def scope(path: str = "/", mount: str = "", method: str = "GET", headers: Any = ()) -> dict[str, Any]:
    """An ASGI scope, whose path has the mount point in it."""
    made = falcon.testing.create_scope(headers=dict(headers), remote_addr="203.0.113.7")
    return made | {"path": mount + path, "root_path": mount, "method": method}


async def receive() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def falcon_wsgi(*args: Any, **kwargs: Any) -> falcon.Request:
    return falcon.Request(environ(*args, **kwargs))


def falcon_asgi(*args: Any, **kwargs: Any) -> falcon.asgi.Request:
    return falcon.asgi.Request(scope(*args, **kwargs), receive)


each_kind = pytest.mark.parametrize(
    "request_of", [environ, scope, falcon_wsgi, falcon_asgi], ids=lambda kind: kind.__name__
)


# -- Method, path and route ------------------------------------------------------------------------------------------


@each_kind
def test_path_is_method_and_path(request_of: Any) -> None:
    """One key on every kind of request: decoded, with the mount point, and apart by method."""
    assert keys.path(request_of("/items")) == "3:GET6:/items"
    assert keys.path(request_of("/items", "/api", "POST")) == "4:POST10:/api/items"
    assert keys.path(request_of("/état")) == "3:GET6:/état"


def test_the_path_of_an_environ() -> None:
    """An empty path is `/`, and bytes that are no UTF-8 are no exception."""
    made = {"REQUEST_METHOD": "GET", "wsgi.version": (1, 0)}
    assert keys.path(made) == "3:GET1:/"
    assert keys.path(made | {"PATH_INFO": "/\xff"}) == "3:GET4:/\ufffd"


@each_kind
def test_route_is_the_template_where_there_is_one(request_of: Any) -> None:
    """A falcon request has its template, or one fixed part; an environ or a scope has the path instead."""
    request = request_of("/items/7")
    if request_of in (environ, scope):
        assert keys.route(request) == keys.path(request) == "3:GET8:/items/7"
        return
    assert keys.route(request) == keys.route(request_of("/made/up")) == "3:GET-"
    request.uri_template = "/items/{item}"
    assert keys.route(request) == "3:GET13:/items/{item}"
    request.method = "POST"
    assert keys.route(request) == "4:POST13:/items/{item}"


def test_a_websocket_has_a_path() -> None:
    """The scope of a handshake has no method: it is a GET."""
    made = scope("/ws") | {"type": "websocket"}
    made.pop("method", None)
    assert keys.path(made) == keys.route(made) == "3:GET3:/ws"


def test_which_keys_need_the_route() -> None:
    """`route`, what is composed of it or falls back to it, and a callable that says so."""

    def own(_request: Any) -> str:
        return "k"

    assert not any(map(keys.needs_route, [own, keys.path, keys.client_ip(), keys.header("x"), keys.compose("a")]))
    own.needs_route = True  # type: ignore[attr-defined]
    composed = keys.compose("a", keys.compose(keys.client_ip(), keys.route))
    assert all(map(keys.needs_route, [own, keys.route, composed, keys.header("x", missing=keys.route)]))


# -- Several in one --------------------------------------------------------------------------------------------------


def test_s44_parts_do_not_meet() -> None:
    """S44: ("a/b", "c") and ("a", "b/c") are two keys."""
    assert keys.join("a/b", "c") == "3:a/b1:c"
    assert keys.join("a", "b/c") == "1:a3:b/c"
    request = environ()
    assert keys.compose("a/b", "c")(request) != keys.compose("a", "b/c")(request)


def test_s45_address_and_path_do_not_meet() -> None:
    """S45: `1.1.1.1` with `1/x` is not `1.1.1.11` with `/x`."""
    assert keys.join("1.1.1.1", "1/x") != keys.join("1.1.1.11", "/x")
    key = keys.compose(keys.client_ip(), lambda request: request["PATH_INFO"])
    made = [environ(path) | {"REMOTE_ADDR": peer} for peer, path in (("1.1.1.1", "1/x"), ("1.1.1.11", "/x"))]
    assert key(made[0]) == "10:ip:1.1.1.13:1/x"
    assert key(made[1]) == "11:ip:1.1.1.112:/x"


part = st.one_of(st.none(), st.text(st.characters(exclude_categories=[])), st.binary(max_size=5))


@unhurried
@given(st.lists(part, max_size=4), st.lists(part, max_size=4))
def test_join_keeps_texts_apart(one: list[Any], other: list[Any]) -> None:
    """Two joins are one key exactly when their texts are, `str` is its UTF-8 and a missing one is no empty one."""

    def raw(value: str | bytes | None) -> bytes | None:
        return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value

    same = [raw(text) for text in one] == [raw(text) for text in other]
    assert (raw(keys.join(*one)) == raw(keys.join(*other))) == same


def test_join_says_what_it_is_of() -> None:
    """Lengths are of bytes, a missing part is a dash, and the result is `bytes` if one of the parts is."""
    assert keys.join("é", None, "") == "2:é-0:"
    assert keys.join("é", None, b"\xff") == b"2:\xc3\xa9-1:\xff"
    assert keys.join() == ""
    with pytest.raises(TypeError, match="str or bytes"):
        keys.join(7)  # type: ignore[call-overload]


@each_kind
def test_compose_keeps_a_missing_part(request_of: Any) -> None:
    """What a part skips is kept as missing, and a part that denies denies the whole."""
    request = request_of()
    key = keys.compose("login", keys.header("x-user", missing="skip"), keys.client_ip())
    assert key(request) == "5:login-14:ip:203.0.113.7"
    assert key(request_of(headers={"X-User": "-"})) == "5:login8:header:-14:ip:203.0.113.7"
    assert keys.compose("login", keys.header("x-user", missing="deny"))(request) is keys.DENY
    assert keys.compose(lambda _: b"\xff", "a")(request) == b"1:\xff1:a"
    assert keys.compose(keys.path)(request) == "8:3:GET1:/"


@pytest.mark.parametrize("parts", [(), (None,), (7,), ("a", keys.DENY)], ids=str)
def test_compose_takes_keys_and_texts(parts: Any) -> None:
    """Anything else is told at once."""
    with pytest.raises(ConfigError, match="compose"):
        keys.compose(*parts)


@pytest.mark.parametrize("value", ["5:login14:ip:203.0.113.7", "-14:ip:203.0.113.7", "-", "--", "3:GET6:/items"])
def test_a_header_never_forges_a_joined_key(value: str) -> None:
    """Nobody spends the quota of a composed key, or of a path, by sending it."""
    assert keys.header("x-api-key")({"HTTP_X_API_KEY": value}) == "header:" + value


@pytest.mark.parametrize("value", ["-token", "a:b", "12", "--x", "-1", ":", "1.2:3"])
def test_other_values_of_a_header_are_kept(value: str) -> None:
    """Only what looks like a key of this module gets something in front."""
    assert keys.header("x-api-key")({"HTTP_X_API_KEY": value}) == value
