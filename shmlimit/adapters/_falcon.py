"""What falcon's middleware and decorator share: the refusal, and what the limiters of one request have seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import falcon

from shmlimit.adapters._gate import below_mount, families
from shmlimit.adapters._outcome import Outcome
from shmlimit.fields import PROBLEM, Fields
from shmlimit.guard import Verdict
from shmlimit.keys import scope_of

_ATTRIBUTE = "_shmlimit_seen"


class _Refusal(falcon.HTTPError):
    """What the limiter raises: answered like all errors of the application, or where a guard wants it so as a problem.

    Clients that prefer XML, and what the application registered, get those. With the decorator alone, and with
    `independent_middleware=False`, a problem's media type is `application/json`, as falcon's serializer has it: only a
    middleware's last step comes after that.
    """

    problem: bytes | None = None

    def to_json(self, handler: Any = None) -> bytes:
        """The problem, or what falcon makes of the error."""
        return super().to_json(handler) if self.problem is None else self.problem


class RateLimited(_Refusal, falcon.HTTPTooManyRequests):
    """The refusal (429). Its `headers` are the fields; `Retry-After` is missing where waiting never helps."""


class _Forbidden(_Refusal, falcon.HTTPForbidden):
    pass


class _Unavailable(_Refusal, falcon.HTTPServiceUnavailable):
    pass


_ERRORS: dict[int, Callable[..., _Refusal]] = {403: _Forbidden, 429: RateLimited, 503: _Unavailable}


class Seen(Outcome):
    """The outcome of a request, which its handlers find as `req.context.ratelimit`; `fields` is what its response says
    of it.
    """

    __slots__ = ("fields", "problem")

    def __init__(self) -> None:
        self.entries, self.shadows, self.pending = [], (), {}  # PERF: Outcome's, without a call
        self.fields: Fields | tuple[()] = ()
        self.problem: bytes | None = None

    @classmethod
    def of(cls, req: Any, slot: str | None = None) -> Seen:
        """That of the request, which the first limiter begins; with a `slot` that of a middleware, always a new one."""
        seen: Seen | None = getattr(req, _ATTRIBUTE, None)
        if seen is None:
            seen = req._shmlimit_seen = cls()
            try:
                req.context.ratelimit = seen
            except AttributeError:  # an application may have chosen a dict
                req.context["ratelimit"] = seen
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
        self.pending.clear()  # what others wait to charge by a response: this isn't the application's
        if isinstance(resp, falcon.Response):
            _drop(resp)
            # NOTE: set here as well, an error handler of the application that answers by itself needn't know of them.
            resp.set_headers(headers)
        self.problem = verdict.body if ("Content-Type", PROBLEM) in verdict.fields else None
        raise self._error(verdict, headers)

    def _error(self, verdict: Verdict, headers: Fields) -> _Refusal:
        assert verdict.status is not None
        says = json.loads(self.problem)["detail"] if self.problem else verdict.body.decode().strip()
        error = _ERRORS[verdict.status](headers=headers, description=says)
        error.problem = self.problem
        return error

    def settled(self, resp: Any, verdict: Verdict) -> None:
        """After what the response consumes was charged. Where that failed, the answer is a 503 instead: nothing has
        been sent yet.
        """
        if verdict.status is None:
            self.fields = verdict.fields or self.fields
            return
        _drop(resp)
        resp.status = verdict.status
        resp.data, resp.text = None, verdict.body.decode()
        resp.set_headers(verdict.fields)
        self.fields = ()

    def write(self, resp: Any) -> None:
        """Put the fields over what the application set."""
        if self.fields and isinstance(resp, falcon.Response):
            for name in resp.headers:
                # PERF: the families are asked for only where the application has set such a field.
                if "ratelimit" in name and name.startswith(families(self.fields)):
                    resp.delete_header(name)
            resp.set_headers(self.fields)
        # NOTE: the serializer of errors names its JSON after it has asked for it. Another body is the application's.
        if self.problem is not None and isinstance(resp, falcon.Response) and resp.data is self.problem:
            resp.content_type = PROBLEM


def _drop(resp: Any) -> None:
    """Take back what the application made for a body, and what says how that is encoded."""
    resp.stream = resp.media = None
    if hasattr(resp, "sse"):  # ASGI: events come before every other body
        resp.sse = None
    for name in ("Content-Encoding", "Content-Length"):
        resp.delete_header(name)


def status_of(resp: Any, error: Exception | None = None) -> int:
    """The status of a response as the responder left it; 500 for an exception that only a handler of errors knows."""
    if error is not None:
        return error.status_code if isinstance(error, falcon.HTTPError | falcon.HTTPStatus) else 500
    return resp.status_code if isinstance(resp, falcon.Response) else 101  # a WebSocket has had its handshake


def path_of(req: Any) -> str:
    """The path without the mount point, on WSGI and ASGI."""
    path: str = req.path
    return below_mount(path, req.root_path) if scope_of(req) is not None else path
