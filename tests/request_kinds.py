"""One request as each kind that a key takes: what the tests of keys share."""

from __future__ import annotations

from typing import Any

import falcon
import falcon.asgi
import falcon.testing
import pytest

Headers = list[tuple[str, str]]


def environ(peer: str | None, headers: Headers) -> dict[str, Any]:
    """A WSGI environ as gunicorn makes it: lines joined with commas."""
    made = falcon.testing.create_environ()
    made["REMOTE_ADDR"] = peer
    for name, value in headers:
        variable = "HTTP_" + name.upper().replace("-", "_")
        made[variable] = f"{made[variable]},{value}" if variable in made else value
    return made


def scope(peer: str | None, headers: Headers) -> dict[str, Any]:
    """An ASGI scope as gunicorn makes it."""
    made = falcon.testing.create_scope()
    made["client"] = (peer, 1234) if peer else None
    made["headers"] = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return made


async def receive() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def falcon_wsgi(peer: str | None, headers: Headers) -> falcon.Request:
    return falcon.Request(environ(peer, headers))


def falcon_asgi(peer: str | None, headers: Headers) -> falcon.asgi.Request:
    return falcon.asgi.Request(scope(peer, headers), receive)


KINDS = [environ, scope, falcon_wsgi, falcon_asgi]
each_kind = pytest.mark.parametrize("request_of", KINDS, ids=lambda kind: kind.__name__)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "shmlimit"]
