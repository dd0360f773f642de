"""Any ASGI application, limited: `app = RateLimit(app, Guard("per-ip", "10/minute"))`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from functools import lru_cache
from typing import Any, TypeAlias

from shmlimit.adapters._gate import Gate, Refuse, below_mount, checked_refuse, families, phrase, with_length, wrapped
from shmlimit.adapters._outcome import Outcome
from shmlimit.fields import Fields
from shmlimit.guard import Guard, KeyFunction, Verdict
from shmlimit.stores.base import Store

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_STARTS = {"http.response.start", "websocket.http.response.start"}
_HANDSHAKES = {"websocket.accept": 101, "websocket.close": 403}  # the statuses that they are on the wire

_REASON_MAX = 123  # bytes of a reason in a close frame

OUTCOME = "shmlimit.ratelimit"
"""Where the application finds what was decided, in the scope: a mapping of the guards' names to decisions."""


class RateLimit:
    """The application `app`, with limits around it. Several guards are decided all or nothing.

    `store=None` is the table of the gunicorn hook (`shmlimit.adapters.gunicorn.install`), `key=None` is
    `keys.client_ip()`. Key callables get the scope. There is no router here: `keys.route` is method and path.

    A refusal (429; 403 for `keys.DENY`, 503 where the store can't answer) is a short text, and `app` isn't called. A
    WebSocket is refused before it is accepted: with that response where the server can send one, else it is closed, and
    the client sees a 403. `refuse` makes another answer of a refusal: a callable of the scope and the `Verdict` that
    gives one. Otherwise the `RateLimit` fields go over those of `app`; its body and `Retry-After` are left alone, and
    it finds the decisions as `scope["shmlimit.ratelimit"]`. What is neither HTTP nor a WebSocket (`lifespan`) passes
    through.
    """

    def __init__(
        self,
        app: Application,
        *guards: Guard,
        store: Store | None = None,
        key: KeyFunction | None = None,
        refuse: Refuse | None = None,
    ) -> None:
        self._app = wrapped(app)
        self._gate = Gate(guards, store, key)
        self._refuse = checked_refuse(refuse)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        gate, method = self._gate, scope.get("method", "GET")
        path = below_mount(scope["path"], scope.get("root_path") or "") if gate.by_path else ""
        scope[OUTCOME] = outcome = Outcome()
        if gate.inline:  # PERF: a coroutine less, 0.15 µs
            verdict = gate.check(method, path, scope, outcome)
        else:
            verdict = await gate.acheck(method, path, scope, outcome)
        if verdict.status is not None:
            # A WebSocket is refused after its "connect", if that is what comes.
            if scope["type"] == "http" or (await receive())["type"] != "websocket.disconnect":
                await _refuse(self._answer(scope, verdict), scope, send)
            return
        if not outcome.pending:
            await self._app(scope, receive, _with_fields(send, verdict.fields) if verdict.fields else send)
            return
        try:
            await self._app(scope, receive, self._settling(scope, send, outcome, verdict.fields))
        except Exception:
            if outcome.pending:  # it started nothing; the server makes a 500 of that
                await gate.asettle(outcome, 500)
            raise

    def _settling(self, scope: Message, send: Send, outcome: Outcome, fields: Fields) -> Send:
        """`send` for a response that may be charged: before it is started."""
        replaced = False

        async def settling(message: Message) -> None:
            nonlocal fields, replaced
            if replaced:  # by a refusal; nobody waits for the rest
                return
            kind = message["type"]
            if outcome.pending and (kind in _STARTS or kind in _HANDSHAKES):
                verdict = await self._gate.asettle(outcome, _HANDSHAKES.get(kind) or message["status"])
                if verdict.status is not None:
                    replaced = True
                    await _refuse(self._answer(scope, verdict), scope, send)
                    return
                fields = verdict.fields or fields
            await _with_fields(send, fields)(message)

        return settling

    def _answer(self, scope: Message, verdict: Verdict) -> Verdict:
        return verdict if self._refuse is None else self._refuse(scope, verdict)


def _with_fields(send: Send, fields: Fields) -> Send:
    """`send` that puts the fields over those of the application."""
    ours = _wire_families(families(fields))

    # NOTE: a coroutine function, though one that returned what `send` does would be 70 ns less: libraries look.
    async def with_fields(message: Message) -> None:
        if message["type"] in _STARTS:
            headers = [
                header for header in map(tuple, message.get("headers") or ()) if not header[0].lower().startswith(ours)
            ]
            message = {**message, "headers": headers + _encoded(fields)}
        await send(message)

    return with_fields


async def _refuse(verdict: Verdict, scope: Message, send: Send) -> None:
    """Answer an HTTP request, or a WebSocket that isn't accepted."""
    assert verdict.status is not None
    kind = "http.response"
    if scope["type"] == "websocket":
        kind = "websocket.http.response"
        if kind not in (scope.get("extensions") or ()):
            reason = verdict.body.decode("utf-8", "replace").strip()
            if len(reason.encode()) > _REASON_MAX:
                reason = phrase(verdict.status)
            await send({"type": "websocket.close", "code": 3000 + verdict.status, "reason": reason})
            return
    await send({"type": f"{kind}.start", "status": verdict.status, "headers": _encoded(with_length(verdict))})
    await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else verdict.body})


def _encoded(fields: Fields) -> list[tuple[bytes, bytes]]:
    return [(_wire(name), value.encode("latin-1")) for name, value in fields]


# PERF: the same few names in every response; to write them anew takes 1 µs of 7.
@lru_cache(64)
def _wire(name: str) -> bytes:
    return name.lower().encode()


@lru_cache(4)
def _wire_families(names: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(name.encode() for name in names)
