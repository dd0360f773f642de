"""Streams through real servers: the first part has arrived before the second one is made, and the response starts once.

The application makes its second part when another request asks for it, which the client sends after it has read the
first one. Whoever holds the stream back waits for ever, and the client gives up.
"""

from __future__ import annotations

import re
import socket
import sys
from typing import Any

import pytest

from tests.live.harness import Serve, Server

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc and /dev/shm")

GIVE_UP_S = 10.0  # of the client; the application waits longer

GUARDS = """\
from shmlimit import Guard

GUARDS = [
    Guard("plain", "10/hour", paths=["/plain"]),
    Guard("charged", "20/hour", paths=["/charged"], consume_on=lambda status: status == 200),
]
"""

WSGI = f"""\
import threading
from shmlimit.adapters.wsgi import RateLimit
{GUARDS}
asked_for = {{"/plain": threading.Event(), "/charged": threading.Event()}}


def inner(environ, start_response):
    path = environ["PATH_INFO"]
    start_response("200 OK", [("Content-Type", "text/plain")])
    if path in asked_for:
        return parts(asked_for[path])
    if path.startswith("/more"):
        asked_for[path.removeprefix("/more")].set()
    return [b"done"]


def parts(more):
    yield b"first"
    more.wait(60)
    yield b"second"


app = RateLimit(inner, *GUARDS)
"""

FALCON = f"""\
import threading
import falcon
from shmlimit.adapters.falcon import RateLimitMiddleware
{GUARDS}
asked_for = {{"/plain": threading.Event(), "/charged": threading.Event()}}


def parts(more):
    yield b"first"
    more.wait(60)
    yield b"second"


def respond(req, resp):
    resp.content_type = "text/plain"
    if req.path in asked_for:
        resp.stream = parts(asked_for[req.path])
    elif req.path.startswith("/more"):
        asked_for[req.path.removeprefix("/more")].set()


app = falcon.App(middleware=[RateLimitMiddleware(*GUARDS)])
app.add_sink(respond)
"""

STARLETTE = f"""\
import asyncio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from shmlimit.adapters.asgi import RateLimit
{GUARDS}
asked_for = {{"/plain": asyncio.Event(), "/charged": asyncio.Event()}}


async def parts(more):
    yield b"first"
    await asyncio.wait_for(more.wait(), 60)
    yield b"second"


async def stream(request):
    return StreamingResponse(parts(asked_for[request.url.path]))


async def other(request):
    if request.url.path.startswith("/more"):
        asked_for[request.url.path.removeprefix("/more")].set()
    return PlainTextResponse("done")


routes = [Route(path, stream) for path in asked_for] + [Route("/{{path:path}}", other)]
app = Starlette(routes=routes, middleware=[Middleware(RateLimit, *GUARDS)])
"""

THREADS = ("-k", "gthread", "--threads", "4")


@pytest.mark.parametrize(
    ("code", "options"),
    [(WSGI, THREADS), (FALCON, THREADS), (STARLETTE, ("-k", "asgi"))],
    ids=["wsgi", "falcon", "starlette"],
)
def test_a_stream_is_not_held_back(serve: Serve, code: str, options: Any) -> None:
    """With a guard that charges at once, and with one that waits for the status."""
    server = serve(*options, code=code, workers=1)
    for path, says in (("/plain", b'"plain";r=9;t=360'), ("/charged", b'"charged";r=19;t=180')):
        head, body = stream(server, path)
        assert head.count(b"HTTP/1.1 200") == 1
        assert (body.count(b"first"), body.count(b"second"), b"HTTP" in body) == (1, 1, False)
        assert re.findall(rb"(?im)^ratelimit: (.+?)\r?$", head) == [says]
        assert body.index(b"first") < body.index(b"second")


def stream(server: Server, path: str) -> tuple[bytes, bytes]:
    """The head and the body, with what marks its parts; the second part was asked for when the first had come."""
    with socket.create_connection(("127.0.0.1", server.port), GIVE_UP_S) as line:
        line.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        got = b""
        while b"first" not in got:
            more = line.recv(4096)
            assert more, got
            got += more
        assert b"second" not in got
        assert server.get(f"/more{path}").status == 200
        while more := line.recv(4096):
            got += more
    head, _, body = got.partition(b"\r\n\r\n")
    return head, body
