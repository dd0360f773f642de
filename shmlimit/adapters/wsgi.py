"""Any WSGI application, limited: `application = RateLimit(application, Guard("per-ip", "10/minute"))`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from shmlimit.adapters._gate import Gate, Refuse, checked_refuse, families, phrase, with_length, wrapped
from shmlimit.adapters._outcome import Outcome
from shmlimit.adapters._wsgi import Settling
from shmlimit.guard import Guard, KeyFunction, Verdict
from shmlimit.stores.base import Store

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication


OUTCOME = "shmlimit.ratelimit"
"""Where the application finds what was decided, in the environ: a mapping of the guards' names to decisions."""


class RateLimit:
    """The application `app`, with limits around it. Several guards are decided all or nothing.

    `store=None` is the table of the gunicorn hook (`shmlimit.adapters.gunicorn.install`), `key=None` is
    `keys.client_ip()`. Key callables get the environ. There is no router here: `keys.route` is method and path.

    A refusal (429; 403 for `keys.DENY`, 503 where the store can't answer) is a short text, and `app` isn't called.
    `refuse` makes another answer of it: a callable of the environ and the `Verdict` that gives one, `Verdict(status,
    fields, body)`. Otherwise the `RateLimit` fields go over those of `app`; its body, `close()` and `Retry-After` are
    left alone, and it finds the decisions as `environ["shmlimit.ratelimit"]`.
    """

    def __init__(
        self,
        app: WSGIApplication,
        *guards: Guard,
        store: Store | None = None,
        key: KeyFunction | None = None,
        refuse: Refuse | None = None,
    ) -> None:
        self._app = wrapped(app)
        self._gate = Gate(guards, store, key)
        self._refuse = checked_refuse(refuse)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        gate, path = self._gate, ""
        if gate.by_path:
            path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace") or "/"
        environ[OUTCOME] = outcome = Outcome()
        verdict = gate.check(environ["REQUEST_METHOD"], path, environ, outcome)
        if verdict.status is not None:
            return self._answer(environ, start_response, verdict)
        if outcome.pending:
            answer = partial(self._answer, environ, start_response)
            return Settling(gate, answer, start_response, outcome, verdict.fields).run(self._app, environ)
        if not verdict.fields:
            return self._app(environ, start_response)

        fields, ours = verdict.fields, families(verdict.fields)

        # NOTE: an application may call it twice, the second time with the exception that came in between.
        def start(line: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
            kept = [header for header in headers if not header[0].lower().startswith(ours)]
            return start_response(line, kept + fields, *exc_info)

        return self._app(environ, start)

    def _answer(self, environ: dict[str, Any], start_response: StartResponse, verdict: Verdict) -> Iterable[bytes]:
        if self._refuse is not None:
            verdict = self._refuse(environ, verdict)
        assert verdict.status is not None
        start_response(f"{verdict.status} {phrase(verdict.status)}", with_length(verdict))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [verdict.body]
