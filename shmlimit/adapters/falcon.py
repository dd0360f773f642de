"""Falcon: one middleware class for `falcon.App` and `falcon.asgi.App`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import falcon

from shmlimit.adapters._gate import Gate
from shmlimit.guard import Guard, KeyFunction, Verdict
from shmlimit.stores.base import Store

if TYPE_CHECKING:
    from falcon import asgi


class RateLimited(falcon.HTTPTooManyRequests):
    """The refusal (429). Its `headers` are the fields; `Retry-After` is missing where waiting never helps."""


_ERRORS: dict[int, Callable[..., falcon.HTTPError]] = {
    403: falcon.HTTPForbidden,
    429: RateLimited,
    503: falcon.HTTPServiceUnavailable,
}


class RateLimitMiddleware:
    """Limits every request that reaches it, before routing: paths without a route and WebSocket handshakes too.

    `store=None` is the table of the gunicorn hook (`shmlimit.adapters.gunicorn.install`), `key=None` is
    `keys.client_ip()`. A refusal is raised as `RateLimited`, so the application's error handlers see it; a key that is
    `keys.DENY` as `falcon.HTTPForbidden`, and a store that can't answer as `falcon.HTTPServiceUnavailable`.

    The rate limit fields are set last, over those that the application set. With falcon's default
    `independent_middleware=True` the order beside `CORSMiddleware` doesn't matter and a refusal carries the CORS
    fields; a page's script sees the limits only if that middleware is told to `expose_headers` them.
    """

    def __init__(self, *guards: Guard, store: Store | None = None, key: KeyFunction | None = None) -> None:
        self._gate = Gate(guards, store, key)
        # NOTE: one name for each middleware, so that several in one application don't take each other's fields.
        self._slot = f"_shmlimit_fields_{id(self):x}"

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Limit the request (WSGI)."""
        verdict = self._gate.check(req.method, req.path, req)
        if verdict.status is None:
            setattr(req, self._slot, verdict.fields)
        else:
            _refuse(resp, verdict)

    async def process_request_async(self, req: asgi.Request, resp: asgi.Response) -> None:
        """Limit the request (ASGI)."""
        verdict = await self._gate.acheck(req.method, _path(req), req)
        if verdict.status is None:
            setattr(req, self._slot, verdict.fields)
        else:
            _refuse(resp, verdict)

    async def process_request_ws(self, req: asgi.Request, ws: asgi.WebSocket) -> None:  # noqa: ARG002
        """Limit a WebSocket handshake: a refused one is closed before it is accepted, and the client sees a 403."""
        verdict = await self._gate.acheck(req.method, _path(req), req)
        if verdict.status is not None:
            raise _error(verdict)

    def process_response(self, req: Any, resp: Any, resource: object, req_succeeded: bool) -> None:  # noqa: ARG002
        """Put the fields over what the application set."""
        fields = getattr(req, self._slot, None)
        if fields:
            resp.set_headers(fields)

    async def process_response_async(self, req: Any, resp: Any, resource: object, req_succeeded: bool) -> None:
        """Put the fields over what the application set."""
        self.process_response(req, resp, resource, req_succeeded)


def _refuse(resp: falcon.Response, verdict: Verdict) -> NoReturn:
    error = _error(verdict)
    # NOTE: set here as well, an error handler of the application that answers by itself needn't know of them.
    resp.set_headers(error.headers or ())
    raise error


def _error(verdict: Verdict) -> falcon.HTTPError:
    # NOTE: falcon writes the body, in the form in which this application answers all its errors.
    headers = [field for field in verdict.fields if field[0] != "Content-Type"]
    return _ERRORS[verdict.status or 503](headers=headers, description=verdict.body.decode().strip())


def _path(req: Any) -> str:
    """The path below the mount point, which ASGI leaves in the path and WSGI does not."""
    path: str = req.path
    root = req.root_path.rstrip("/")
    return (path[len(root) :] or "/") if root and f"{path}/".startswith(f"{root}/") else path
