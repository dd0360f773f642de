"""Falcon's smallest application, bare and limited, for what asks in process and for what asks a server.

gunicorn makes one by `_hello:served("wsgi", "shmlimit")`.
"""

from __future__ import annotations

from typing import Any

import falcon
import falcon.asgi

from shmlimit import Guard
from shmlimit.adapters.falcon import RateLimitMiddleware

BODY = "hello"
PLENTY = "1000000000/second"


class Hello:
    """Five bytes."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.text = BODY


class AsyncHello:
    """The same as a coroutine."""

    async def on_get(self, _req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        resp.text = BODY


class LimitsOnRedis:
    """A middleware of the least that `limits` can be: one hit a request, by client address, and no fields."""

    def __init__(self, url: str) -> None:
        import limits

        self.item = limits.RateLimitItemPerSecond(10**9)
        self.strategy = limits.strategies.FixedWindowRateLimiter(limits.storage.RedisStorage(url))
        storage = limits.aio.storage.RedisStorage(f"async+{url}", implementation="redispy")
        self.awaited = limits.aio.strategies.FixedWindowRateLimiter(storage)

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        if not self.strategy.hit(self.item, req.remote_addr):
            raise falcon.HTTPTooManyRequests

    async def process_request_async(self, req: falcon.asgi.Request, _resp: falcon.asgi.Response) -> None:
        if not await self.awaited.hit(self.item, req.remote_addr):
            raise falcon.HTTPTooManyRequests


class Fields:
    """Limits nothing: the two fields of the draft as fixed text, to tell what a server takes for sending them."""

    def process_response(
        self, _req: falcon.Request, resp: falcon.Response, _resource: object, _succeeded: bool
    ) -> None:
        resp.set_header("ratelimit-policy", '"per-ip";q=1000000000;w=1')
        resp.set_header("ratelimit", '"per-ip";r=999999999;t=1')

    async def process_response_async(
        self, req: falcon.asgi.Request, resp: falcon.asgi.Response, resource: object, succeeded: bool
    ) -> None:
        self.process_response(req, resp, resource, succeeded)


def of_falcon(kind: Any, resource: object, *middleware: Any) -> Any:
    """An application of falcon's that answers at `/`."""
    app = kind(middleware=list(middleware))
    app.add_route("/", resource)
    return app


def served(interface: str, limit: str = "", url: str = "") -> Any:
    """The application for a server: bare, limited by `shmlimit` (gunicorn's hook has the store) or by `limits`, or not
    limited and with `fields` all the same.
    """
    middleware: tuple[Any, ...] = ()
    if limit == "shmlimit":
        middleware = (RateLimitMiddleware(Guard("per-ip", PLENTY)),)
    elif limit == "limits":
        middleware = (LimitsOnRedis(url),)
    elif limit == "fields":
        middleware = (Fields(),)
    if interface == "asgi":
        return of_falcon(falcon.asgi.App, AsyncHello(), *middleware)
    return of_falcon(falcon.App, Hello(), *middleware)
