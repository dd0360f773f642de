"""One application behind each of the adapters, for tests that hold for all of them."""

from __future__ import annotations

from typing import Any

import falcon
import falcon.asgi

from shmlimit.adapters import asgi, wsgi
from shmlimit.adapters.falcon import RateLimitMiddleware
from shmlimit.errors import StoreError
from shmlimit.guard import Guard
from shmlimit.stores.memory import MemoryStore

NOW_US = 1_750_000_000_250_000
ADAPTERS = ["falcon wsgi", "falcon asgi", "wsgi", "asgi"]


def fixed_clock(now_us: int = NOW_US) -> MemoryStore:
    return MemoryStore(clock=lambda: now_us)


class Flaky(MemoryStore):
    """Fails in the methods that it is told."""

    failing: tuple[str, ...] = ()

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "failing"):

            def fail(*_: Any, **__: Any) -> Any:
                raise StoreError("gone")

            return fail
        return super().__getattribute__(name)


class Adapter:
    """Puts guards around an application that answers every path with `status` and `headers`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.falcon = kind.startswith("falcon")
        self.calls = 0
        self.status = 200
        self.outcome: Any = None  # what the application found

    def make(self, *guards: Guard, headers: Any = (), **options: Any) -> Any:
        return getattr(self, "_" + self.kind.replace(" ", "_"))(guards, [*map(tuple, headers)], options)

    def _wsgi(self, guards: Any, headers: Any, options: Any) -> Any:
        def app(environ: Any, start_response: Any) -> list[bytes]:
            self.calls += 1
            self.outcome = environ.get(wsgi.OUTCOME)
            start_response(f"{self.status} Whatever", [("Content-Type", "text/plain"), *headers])
            return [b"hello"]

        return wsgi.RateLimit(app, *guards, **options)

    def _asgi(self, guards: Any, headers: Any, options: Any) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.calls += 1
            self.outcome = scope.get(asgi.OUTCOME)
            lines = [(name.lower().encode(), value.encode()) for name, value in headers]
            await send({"type": "http.response.start", "status": self.status, "headers": lines})
            await send({"type": "http.response.body", "body": b"hello"})

        return asgi.RateLimit(app, *guards, **options)

    def _falcon_wsgi(self, guards: Any, headers: Any, options: Any) -> Any:
        def on_get(_self: Any, req: Any, resp: Any, **_params: Any) -> None:
            self.calls += 1
            self.outcome = req.context.ratelimit
            resp.status = self.status
            resp.text = "hello"
            for name, value in headers:
                resp.set_header(name, value)

        return self._routes(falcon.App(middleware=RateLimitMiddleware(*guards, **options)), on_get)

    def _falcon_asgi(self, guards: Any, headers: Any, options: Any) -> Any:
        async def on_get(_self: Any, req: Any, resp: Any, **_params: Any) -> None:
            self.calls += 1
            self.outcome = req.context.ratelimit
            resp.status = self.status
            resp.text = "hello"
            for name, value in headers:
                resp.set_header(name, value)

        return self._routes(falcon.asgi.App(middleware=RateLimitMiddleware(*guards, **options)), on_get)

    def _routes(self, app: Any, on_get: Any) -> Any:
        page = type("Page", (), {"on_get": on_get, "on_head": on_get, "on_options": on_get})()
        for template in ("/", "/{page}", "/items/{item}"):
            app.add_route(template, page)
        return app


def a(**options: Any) -> Guard:
    return Guard(**{"name": "a", "policy": "5/hour", "key": lambda _: "k", **options})


def b(**options: Any) -> Guard:
    return Guard(**{"name": "b", "policy": "1/minute", "key": lambda _: "k", **options})


def failed_logins(**options: Any) -> Guard:
    consume_on = {"consume_on": lambda status: status == 401}
    return Guard(**{"name": "logins", "policy": "3/hour", "key": lambda _: "k", **consume_on, **options})


def header_of(request: Any, name: str) -> str:
    """A header of a falcon request, an environ or a scope."""
    if not isinstance(request, dict):
        return request.get_header(name) or ""
    if "headers" in request:
        return dict(request["headers"]).get(name.encode(), b"").decode()
    return request.get(f"HTTP_{name.upper().replace('-', '_')}", "")
