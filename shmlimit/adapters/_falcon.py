"""What falcon's middleware and decorator share: the refusal, and what the limiters of one request have seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import falcon

from shmlimit.adapters._gate import below_mount
from shmlimit.fields import Fields
from shmlimit.guard import Guard, Verdict
from shmlimit.policies.base import Decision

_ATTRIBUTE = "_shmlimit_seen"


class RateLimited(falcon.HTTPTooManyRequests):
    """The refusal (429). Its `headers` are the fields; `Retry-After` is missing where waiting never helps."""


_ERRORS: dict[int, Callable[..., falcon.HTTPError]] = {
    403: falcon.HTTPForbidden,
    429: RateLimited,
    503: falcon.HTTPServiceUnavailable,
}


class Seen(list[tuple[Guard, Decision]]):
    """The trail of a request; `fields` is what its response says of it."""

    fields: Fields | tuple[()] = ()

    @classmethod
    def of(cls, req: Any, slot: str | None = None) -> Seen:
        """That of the request, which the first limiter begins; with a `slot` that of a middleware, always a new one."""
        seen: Seen | None = getattr(req, _ATTRIBUTE, None)
        if seen is None:
            seen = cls()
            setattr(req, _ATTRIBUTE, seen)
        elif slot:
            seen = cls()
        if slot:
            setattr(req, slot, seen)
        return seen

    def go_on(self, resp: Any, verdict: Verdict) -> None:
        """Return if the request passes, else raise the refusal. `resp` is `None` or a WebSocket for a handshake."""
        if verdict.status is None:
            self.fields = verdict.fields or self.fields
            return
        # NOTE: falcon writes the body, in the form in which this application answers all its errors.
        headers = [field for field in verdict.fields if field[0] != "Content-Type"]
        self.fields = [field for field in headers if "RateLimit" in field[0]] or self.fields
        if isinstance(resp, falcon.Response):
            # NOTE: set here as well, an error handler of the application that answers by itself needn't know of them.
            resp.set_headers(headers)
        raise _ERRORS[verdict.status](headers=headers, description=verdict.body.decode().strip())

    def write(self, resp: Any) -> None:
        """Put the fields over what the application set."""
        if self.fields and isinstance(resp, falcon.Response):
            resp.set_headers(self.fields)


def path_of(req: Any) -> str:
    """The path without the mount point, on WSGI and ASGI."""
    path: str = req.path
    return below_mount(path, req.root_path) if hasattr(req, "scope") else path
