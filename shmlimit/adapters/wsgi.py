"""Any WSGI application, limited: `application = RateLimit(application, Guard("per-ip", "10/minute"))`."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from shmlimit.adapters._gate import Gate, families, wrapped
from shmlimit.guard import Guard, KeyFunction
from shmlimit.stores.base import Store

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication


class RateLimit:
    """The application `app`, with limits around it. Several guards are decided all or nothing.

    `store=None` is the table of the gunicorn hook (`shmlimit.adapters.gunicorn.install`), `key=None` is
    `keys.client_ip()`. Key callables get the environ. There is no router here: `keys.route` is method and path.

    A refusal (429; 403 for `keys.DENY`, 503 where the store can't answer) is a short text, and `app` isn't called.
    Otherwise the `RateLimit` fields go over those of `app`; its body, `close()` and `Retry-After` are left alone.
    """

    def __init__(
        self, app: WSGIApplication, *guards: Guard, store: Store | None = None, key: KeyFunction | None = None
    ) -> None:
        self._app = wrapped(app)
        self._gate = Gate(guards, store, key)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        method = environ["REQUEST_METHOD"]
        path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace") or "/"
        status, fields, body = self._gate.check(method, path, environ)
        if status is not None:
            length = ("Content-Length", str(len(body)))
            start_response(f"{status} {HTTPStatus(status).phrase}", [*fields, length])
            return [] if method == "HEAD" else [body]
        if not fields:
            return self._app(environ, start_response)

        ours = families(fields)

        # NOTE: an application may call it twice, the second time with the exception that came in between.
        def start(line: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
            kept = [header for header in headers if not header[0].lower().startswith(ours)]
            return start_response(line, kept + fields, *exc_info)

        return self._app(environ, start)
