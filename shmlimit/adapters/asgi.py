"""Any ASGI application, limited: `app = RateLimit(app, Guard("per-ip", "10/minute"))`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from shmlimit.adapters._gate import Gate, below_mount, families, wrapped
from shmlimit.fields import Fields
from shmlimit.guard import Guard, KeyFunction, Verdict
from shmlimit.stores.base import Store

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_STARTS = {"http.response.start", "websocket.http.response.start"}


class RateLimit:
    """The application `app`, with limits around it. Several guards are decided all or nothing.

    `store=None` is the table of the gunicorn hook (`shmlimit.adapters.gunicorn.install`), `key=None` is
    `keys.client_ip()`. Key callables get the scope. There is no router here: `keys.route` is method and path.

    A refusal (429; 403 for `keys.DENY`, 503 where the store can't answer) is a short text, and `app` isn't called. A
    WebSocket is refused before it is accepted: with that response where the server can send one, else it is closed, and
    the client sees a 403. Otherwise the `RateLimit` fields go over those of `app`; its body and `Retry-After` are left
    alone. What is neither HTTP nor a WebSocket (`lifespan`) passes through.
    """

    def __init__(
        self, app: Application, *guards: Guard, store: Store | None = None, key: KeyFunction | None = None
    ) -> None:
        self._app = wrapped(app)
        self._gate = Gate(guards, store, key)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        path = below_mount(scope["path"], scope.get("root_path") or "")
        verdict = await self._gate.acheck(scope.get("method", "GET"), path, scope)
        if verdict.status is not None:
            await _refuse(verdict, scope, receive, send)
            return
        fields = _encoded(verdict.fields)
        ours = tuple(family.encode() for family in families(verdict.fields))

        async def send_with_fields(message: Message) -> None:
            if message["type"] in _STARTS:
                kept = [
                    header
                    for header in map(tuple, message.get("headers") or ())
                    if not header[0].lower().startswith(ours)
                ]
                message = {**message, "headers": kept + fields}
            await send(message)

        await self._app(scope, receive, send_with_fields if fields else send)


async def _refuse(verdict: Verdict, scope: Message, receive: Receive, send: Send) -> None:
    kind = "http.response"
    if scope["type"] == "websocket":
        if (await receive())["type"] == "websocket.disconnect":
            return
        kind = "websocket.http.response"
        if kind not in (scope.get("extensions") or ()):
            await send(
                {
                    "type": "websocket.close",
                    "code": 3000 + (verdict.status or 0),
                    "reason": verdict.body.decode().strip(),
                }
            )
            return
    length = (b"content-length", b"%d" % len(verdict.body))
    await send({"type": f"{kind}.start", "status": verdict.status, "headers": [*_encoded(verdict.fields), length]})
    await send({"type": f"{kind}.body", "body": b"" if scope.get("method") == "HEAD" else verdict.body})


def _encoded(fields: Fields) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]
