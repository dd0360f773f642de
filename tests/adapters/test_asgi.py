"""What only the ASGI wrapper has to keep: streams, lifespan, WebSockets, and messages that it doesn't know."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from shmlimit.adapters.asgi import RateLimit
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard
from shmlimit.keys import DENY
from shmlimit.stores.memory import MemoryStore
from shmlimit.testing import FailingStore

NOW_US = 1_750_000_000_250_000
HTTP = {"type": "http", "method": "GET", "path": "/", "headers": []}
WEBSOCKET = {"type": "websocket", "path": "/", "headers": []}
START = {"type": "http.response.start", "status": 200}
BODY = {"type": "http.response.body", "body": b"hello"}
FIELDS = [(b"ratelimit-policy", b'"a";q=1;w=60'), (b"ratelimit", b'"a";r=0;t=60')]


def limited(*messages: dict[str, Any], **options: Any) -> RateLimit:
    """Limits around an application that sends these messages."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    store = options.pop("store", None) or MemoryStore(clock=lambda: NOW_US)
    policy = options.pop("policy", "1/minute")
    return RateLimit(app, Guard("a", policy, **{"key": lambda _: "k", **options}), store=store)


def run(app: Any, scope: dict[str, Any], *received: str) -> list[dict[str, Any]]:
    """What the application sent; it may receive these types and nothing more."""
    sent: list[dict[str, Any]] = []
    waiting = list(received)

    async def receive() -> dict[str, Any]:
        return {"type": waiting.pop(0)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert waiting == []
    return sent


def test_a_refusal_is_text(ask: Callable[..., Any]) -> None:
    """A 429 says in a line what to do, with its length and without caching."""
    app = limited({**START, "headers": []}, BODY)
    assert ask(app).body == b"hello"
    answer = ask(app)
    assert (answer.status, answer.body) == (429, b"Too many requests. Try again in 60 seconds.\n")
    assert dict(answer.headers) == {
        "ratelimit-policy": '"a";q=1;w=60',
        "ratelimit": '"a";r=0;t=60',
        "retry-after": "60",
        "cache-control": "no-store",
        "content-type": "text/plain; charset=utf-8",
        "content-length": str(len(answer.body)),
    }


def test_only_the_start_is_changed() -> None:
    """A stream starts once, with the fields; its bodies, and messages that nobody knows yet, pass as they are."""
    rest = [{**BODY, "more_body": True}, {"type": "http.response.trailers", "headers": []}, {"type": "http.new"}, BODY]
    start = {**START, "headers": iter([[b"RateLimit-Remaining", b"1"], (b"x", b"y")]), "trailers": True}
    sent = run(limited(start, *rest), HTTP)
    assert sent[0] == {**START, "headers": [(b"x", b"y"), *FIELDS], "trailers": True}
    assert [after is before for after, before in zip(sent[1:], rest, strict=True)] == [True] * 4


def test_a_start_without_headers() -> None:
    """`headers` may be missing, and the application's own message isn't changed."""
    start = dict(START)
    assert run(limited(start, BODY), HTTP)[0] == {**START, "headers": FIELDS}
    assert start == START


@pytest.mark.parametrize("kind", ["lifespan", "something.new"])
def test_other_scopes_pass_through(kind: str) -> None:
    """What isn't a request is the application's, untouched and uncounted."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    store, scope, receive, send = MemoryStore(), {"type": kind}, object(), object()
    asyncio.run(RateLimit(app, Guard("a", "1/minute"), store=store)(scope, receive, send))  # type: ignore[arg-type]
    assert len(seen) == 1
    assert all(one is other for one, other in zip(seen[0], (scope, receive, send), strict=True))
    assert len(store) == 0


def test_a_websocket_that_passes() -> None:
    """The application accepts it; an answer that it gives instead has the fields."""
    accept = {"type": "websocket.accept", "headers": []}
    assert run(limited(accept), WEBSOCKET) == [accept]
    denial = {"type": "websocket.http.response.start", "status": 401, "headers": []}
    assert run(limited(denial), WEBSOCKET) == [{**denial, "headers": FIELDS}]


@pytest.mark.parametrize(
    ("options", "status"),
    [({}, 429), ({"key": lambda _: DENY}, 403), ({"store": "fails"}, 503)],
    ids=["refused", "denied", "failed"],
)
@pytest.mark.parametrize("extensions", [None, {}, {"websocket.http.response": {}}, "missing"])
def test_a_websocket_that_is_refused(options: dict[str, Any], status: int, extensions: Any) -> None:
    """Before it is accepted: with the whole response where the server can send one, else it is closed."""
    store = FailingStore(MemoryStore(clock=lambda: NOW_US), failing="store" in options)
    app = limited({"type": "websocket.accept"}, **{**options, "store": store})
    scope = WEBSOCKET if extensions == "missing" else {**WEBSOCKET, "extensions": extensions}
    if status == 429:
        run(app, scope)
    sent = run(app, scope, "websocket.connect")
    if not extensions or extensions == "missing":
        assert [message["type"] for message in sent] == ["websocket.close"]
        assert sent[0]["code"] == 3000 + status
        assert len(sent[0]["reason"]) <= 123  # what a close frame has room for
        return
    start, body = sent
    assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
    assert body["type"] == "websocket.http.response.body"
    headers = dict(start["headers"])
    assert headers[b"content-length"] == b"%d" % len(body["body"])
    assert headers.get(b"retry-after") == {429: b"60", 403: None, 503: b"1"}[status]


@pytest.mark.parametrize(("kind", "status"), [("accept", 101), ("close", 403)])
def test_a_websocket_is_charged_by_its_handshake(kind: str, status: int) -> None:
    """Accepted it is a 101, closed before that a 403: once, whatever is sent afterwards."""
    seen: list[int] = []
    messages = [{"type": f"websocket.{kind}"}, {"type": "websocket.close"}]
    app = limited(*messages, policy="2/minute", consume_on=lambda status: seen.append(status) or True)
    assert [run(app, WEBSOCKET) for _ in range(2)] == [messages] * 2
    assert [message["type"] for message in run(app, WEBSOCKET, "websocket.connect")] == ["websocket.close"]
    assert seen == [status] * 2


@pytest.mark.parametrize("extensions", [{}, {"websocket.http.response": {}}])
def test_a_websocket_that_cannot_be_charged(extensions: dict[str, Any]) -> None:
    """The store fails where it would be accepted: it is refused instead, and nothing else is sent."""
    store = FailingStore(MemoryStore(clock=lambda: NOW_US))

    def consume_on(_status: int) -> bool:
        store.failing = True
        return True

    app = limited({"type": "websocket.accept"}, {"type": "websocket.send"}, store=store, consume_on=consume_on)
    sent = run(app, {**WEBSOCKET, "extensions": extensions})
    if extensions:
        assert [message["type"].rpartition(".")[2] for message in sent] == ["start", "body"]
        assert sent[0]["status"] == 503
    else:
        assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 3503)]


@pytest.mark.parametrize("body", [None, b"\xff" * 100, "é".encode() * 62], ids=["problem", "bytes", "long"])
def test_the_reason_of_a_close_fits(body: bytes | None) -> None:
    """Whatever the body is, a frame has room for the reason."""
    app = limited({"type": "websocket.accept"}, problem=True)
    if body is not None:
        app._refuse = lambda _scope, verdict: verdict._replace(body=body)
    run(app, WEBSOCKET)
    (close,) = run(app, WEBSOCKET, "websocket.connect")
    assert close["reason"] == "Too Many Requests"


def test_a_websocket_that_has_gone() -> None:
    """Nothing is sent to a client that is no longer there."""
    app = limited({"type": "websocket.accept"})
    run(app, WEBSOCKET)
    assert run(app, WEBSOCKET, "websocket.disconnect") == []


def test_skipped_paths_are_below_the_mount_point(ask: Callable[..., Any]) -> None:
    """ASGI leaves the mount point in the path; a path that only begins like it isn't below it."""
    app = limited({**START, "headers": []}, BODY, skip_paths=["/free", "/"])
    skipped = [{**HTTP, "path": path, "root_path": "/api/"} for path in ("/api/free/x", "/api/", "/api", "/free")]
    for scope in skipped:
        assert run(app, scope)[0]["headers"] == [], scope["path"]
    assert run(app, {**HTTP, "path": "/api/freedom", "root_path": "/api"})[0]["headers"] == FIELDS


def test_the_scope_is_passed_on_as_it_came() -> None:
    """Server and application share the scope's `state`, so it isn't copied."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    scope = {**HTTP, "client": ("203.0.113.7", 1)}
    run(RateLimit(app, Guard("a", "1/minute"), store=MemoryStore()), scope)
    assert seen[0] is scope


def test_the_application_comes_first() -> None:
    """A forgotten application is told at once."""
    with pytest.raises(ConfigError, match="the application comes first"):
        RateLimit(Guard("a", "1/minute"), Guard("b", "1/minute"))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"consume_on": lambda status: status == 401}])
def test_send_is_a_coroutine_function(options: dict[str, Any]) -> None:
    """Libraries look: asgiref warns of another kind, and a task can be made of a coroutine alone."""
    seen: list[bool] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        seen.append(inspect.iscoroutinefunction(send))
        await asyncio.create_task(send(START))
        await send(BODY)

    limit = RateLimit(app, Guard("a", "1/minute", key=lambda _: "k", **options), store=MemoryStore())
    assert [message["type"] for message in run(limit, HTTP)] == ["http.response.start", "http.response.body"]
    assert seen == [True]
