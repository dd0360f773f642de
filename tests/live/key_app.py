"""Two applications, `wsgi` and `asgi`, that tell in every answer by which key they limited the request.

`/wrapper/<way>` is limited by the wrapper, `/falcon/<way>` by falcon's middleware, with the options that ways.py has
for each way, and with a count of its own. `X-Key` is the key, `X-Framework` the address that falcon would have told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import falcon
import falcon.asgi

from shmlimit import Guard, TokenBucket
from shmlimit.adapters.asgi import RateLimit as AsgiRateLimit
from shmlimit.adapters.falcon import RateLimitMiddleware
from shmlimit.adapters.wsgi import RateLimit as WsgiRateLimit
from shmlimit.keys import DENY, client_ip
from tests.live.ways import WAYS

QUOTA = 3
ADAPTERS = ("wrapper", "falcon")

_KEY = "live.key"
_FRAMEWORK = "live.framework"
_BODY = b"passed"


class _Told:
    """The key of a request, which is also noted in its environ or scope."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._key = client_ip(**options)

    def __call__(self, request: Any) -> Any:
        key = self._key(request)
        carrier = request if isinstance(request, dict) else getattr(request, "env", None) or request.scope
        carrier[_KEY] = "deny" if key is DENY else str(key)
        carrier[_FRAMEWORK] = "" if carrier is request else request.remote_addr
        return key


def path(adapter: str, way: str) -> str:
    """Where a way is answered."""
    return f"/{adapter}/{list(WAYS).index(way)}"


def _guards() -> Iterable[tuple[str, Guard]]:
    """One for each path. It never refills, and its period makes its policy, and so its count, another one for each."""
    for place, (adapter, way) in enumerate((adapter, way) for adapter in ADAPTERS for way in WAYS):
        yield path(adapter, way), Guard("test", TokenBucket(QUOTA, 366 * 86_400 + place), key=_Told(WAYS[way].options))


def _inner_wsgi(_environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(_BODY)))])
    return [_BODY]


async def _inner_asgi(_scope: Any, _receive: Any, send: Callable[..., Any]) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(_BODY))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _BODY})


def _sink(_req: Any, resp: Any) -> None:
    resp.content_type, resp.data = "text/plain", _BODY


async def _sink_async(req: Any, resp: Any) -> None:
    _sink(req, resp)


def _limited(*, asgi: bool) -> dict[str, Any]:
    apps: dict[str, Any] = {"/healthz": _inner_asgi if asgi else _inner_wsgi}
    for place, guard in _guards():
        if place.startswith("/wrapper/"):
            apps[place] = AsgiRateLimit(_inner_asgi, guard) if asgi else WsgiRateLimit(_inner_wsgi, guard)
        else:
            framework = falcon.asgi.App if asgi else falcon.App
            apps[place] = framework(middleware=[RateLimitMiddleware(guard)])
            apps[place].add_sink(_sink_async if asgi else _sink)
    return apps


_WSGI = _limited(asgi=False)
_ASGI = _limited(asgi=True)


def wsgi(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
    """The WSGI application."""

    def start(status: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
        told = [("X-Key", environ.get(_KEY, "")), ("X-Framework", environ.get(_FRAMEWORK, ""))]
        return start_response(status, [*headers, *told], *exc_info)

    return _WSGI[environ["PATH_INFO"]](environ, start)


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """The ASGI application; it needs no lifespan."""
    assert scope["type"] == "http"

    async def send_told(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            told = [(b"x-key", scope.get(_KEY, "")), (b"x-framework", scope.get(_FRAMEWORK, ""))]
            headers = [*message["headers"], *((name, value.encode()) for name, value in told)]
            message = {**message, "headers": headers}
        await send(message)

    await _ASGI[scope["path"]](scope, receive, send_told)
