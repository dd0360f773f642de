"""A client for any WSGI or ASGI application, written by hand: what the adapters' tests share."""

from __future__ import annotations

import asyncio
import inspect
import io
import sys
import wsgiref.validate
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from shmlimit.adapters import _gate


@pytest.fixture(autouse=True)
def _event_loop() -> Iterator[None]:
    """On Python 3.10 falcon's test client takes the thread's event loop, which an `asyncio.run` before has unset."""
    if sys.version_info >= (3, 11):
        yield
        return
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


class Answer(NamedTuple):
    """What an application answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def limits(self) -> dict[str, str]:
        """The limiter's fields, each of which must be there once."""
        found = [field for field in self.headers if field[0].startswith(("ratelimit", "x-ratelimit", "retry-after"))]
        assert len(dict(found)) == len(found)
        return dict(found)


def ask_wsgi(app: Any, path: str, *, method: str, headers: dict[str, str], peer: str, mount: str) -> Answer:
    """One request to a WSGI application, held to PEP 3333 by wsgiref."""
    started: list[tuple[str, list[tuple[str, str]]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        assert exc_info or not started
        started.append((status, headers))
        return lambda _data: None

    environ = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": mount,
        "PATH_INFO": path.encode().decode("latin-1"),
        "QUERY_STRING": "",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": peer,
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": False,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
    }
    environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    chunks = wsgiref.validate.validator(app)(environ, start_response)
    try:
        body = b"".join(chunks)
    finally:
        chunks.close()
    status, fields = started[-1]
    return Answer(int(status[:3]), [(name.lower(), value) for name, value in fields], body)


def ask_asgi(app: Any, path: str, *, method: str, headers: dict[str, str], peer: str, mount: str) -> Answer:
    """One request to an ASGI application, which must start its response once."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": mount + path,
        "raw_path": (mount + path).encode(),
        "query_string": b"",
        "root_path": mount,
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": (peer, 1234),
        "server": ("localhost", 80),
    }
    asyncio.run(app(scope, receive, send))
    start, *rest = sent
    assert start["type"] == "http.response.start"
    assert {message["type"] for message in rest} == {"http.response.body"}
    assert all(name == name.lower() for name, _ in start["headers"])
    fields = [(name.decode(), value.decode("latin-1")) for name, value in start["headers"]]
    return Answer(start["status"], fields, b"".join(message.get("body", b"") for message in rest))


@pytest.fixture
def ask() -> Callable[..., Answer]:
    """`ask(app, path, method=…, headers=…, peer=…, mount=…)` on either interface."""

    def ask(
        app: Any,
        path: str = "/",
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        peer: str = "203.0.113.7",
        mount: str = "",
    ) -> Answer:
        asgi = inspect.iscoroutinefunction(app) or inspect.iscoroutinefunction(type(app).__call__)
        client = ask_asgi if asgi else ask_wsgi
        return client(app, path, method=method, headers=headers or {}, peer=peer, mount=mount)

    return ask


@pytest.fixture(autouse=True)
def _unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test takes a store that another one bound."""
    monkeypatch.setattr(_gate, "_bound", None)
