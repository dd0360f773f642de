"""The falcon middleware: one body of tests, run on WSGI and on ASGI."""

import asyncio
import io
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import falcon
import falcon.asgi
import falcon.testing
import pytest

from shmlimit import SharedTable, TokenBucket, keys
from shmlimit.adapters import _gate
from shmlimit.adapters.falcon import RateLimited, RateLimitMiddleware
from shmlimit.errors import ConfigError, ContentionError, StoreError
from shmlimit.guard import Guard
from shmlimit.policies.base import Decision
from shmlimit.testing import ToldStore

OK = Decision(True, 10, 9, 6_000_000, 0, 6_000_000)
NO = Decision(False, 10, 0, 60_000_000, 5_500_001, 5_500_001)
NEVER = Decision(False, 10, 10, 0, None, 0)
LIMITER_FIELDS = ("ratelimit", "x-ratelimit", "retry-after")


def default_responder(req: Any, resp: Any) -> None:
    resp.media = {"ok": True}


class Stack:
    """Makes an application and a client for one of the two interfaces, from the same synchronous parts."""

    def __init__(self, kind: str) -> None:
        self.asgi = kind == "asgi"
        self.errors = io.StringIO()

    def app(self, middleware: Any, responder: Callable[[Any, Any], None] = default_responder, **options: Any) -> Any:
        def on_get(self: Any, req: Any, resp: Any, **params: Any) -> None:
            responder(req, resp)

        async def on_get_async(self: Any, req: Any, resp: Any, **params: Any) -> None:
            responder(req, resp)

        app_type: Any = falcon.asgi.App if self.asgi else falcon.App
        app: Any = app_type(middleware=middleware, **options)
        page = type("Page", (), {"on_get": on_get_async if self.asgi else on_get})()
        app.add_route("/", page)
        app.add_route("/{page}", page)
        return app

    def client(self, *args: Any, **kwargs: Any) -> falcon.testing.TestClient:
        return falcon.testing.TestClient(self.app(*args, **kwargs))

    def handler(self, function: Callable[..., None]) -> Callable[..., Any]:
        if not self.asgi:
            return function

        async def handle(req: Any, resp: Any, ex: Any, params: Any) -> None:
            function(req, resp, ex, params)

        return handle

    def get(self, client: falcon.testing.TestClient, path: str = "/", **kwargs: Any) -> falcon.testing.Result:
        if not self.asgi:
            kwargs["wsgierrors"] = self.errors
        return client.simulate_get(path, **kwargs)


@pytest.fixture(params=["wsgi", "asgi"])
def stack(request: pytest.FixtureRequest) -> Stack:
    return Stack(request.param)


def limited(*answers: Decision | Exception, **options: Any) -> tuple[RateLimitMiddleware, ToldStore]:
    store = ToldStore(*answers)
    return RateLimitMiddleware(Guard("a", "10/minute", **{"key": lambda _: "k", **options}), store=store), store


def limiter_fields(result: falcon.testing.Result) -> dict[str, str]:
    return {name: value for name, value in result.headers.items() if name.startswith(LIMITER_FIELDS)}


def test_fields_of_an_allowed_response(stack: Stack) -> None:
    """A request that passes is answered by the application, with the limit's fields."""
    middleware, store = limited(OK)
    result = stack.get(stack.client(middleware))
    assert (result.status_code, result.json) == (200, {"ok": True})
    assert limiter_fields(result) == {"ratelimit-policy": '"a";q=10;w=60', "ratelimit": '"a";r=9;t=6'}
    assert store.asked == [("take", [(Guard("a", "10/minute").policy, "k", 1)])]


def test_a_refusal(stack: Stack) -> None:
    """A refusal is a 429 with all fields, in falcon's form, and the application isn't asked."""
    middleware, _ = limited(NO)

    def never(req: Any, resp: Any) -> None:
        raise AssertionError("the application was asked")

    result = stack.get(stack.client(middleware, never))
    assert result.status_code == 429
    assert limiter_fields(result) == {
        "ratelimit-policy": '"a";q=10;w=60',
        "ratelimit": '"a";r=0;t=6',
        "retry-after": "6",
    }
    assert result.headers["cache-control"] == "no-store"
    assert result.headers["content-type"] == "application/json"
    assert result.json == {
        "title": "429 Too Many Requests",
        "description": "Too many requests. Try again in 6 seconds.",
    }


def test_no_retry_after_for_never(stack: Stack) -> None:
    """A request that can never succeed is refused without Retry-After."""
    middleware, _ = limited(NEVER)
    result = stack.get(stack.client(middleware))
    assert result.status_code == 429
    assert limiter_fields(result) == {"ratelimit-policy": '"a";q=10;w=60', "ratelimit": '"a";r=10;t=0'}


def test_error_handlers_see_the_refusal(stack: Stack) -> None:
    """The refusal goes through the application's error handlers, and the fields are there whatever they do."""
    middleware, _ = limited(NO)
    app = stack.app(middleware)
    seen: list[Exception] = []

    def handle(req: Any, resp: Any, ex: Any, params: Any) -> None:
        seen.append(ex)
        resp.status = falcon.HTTP_429
        resp.text = "slow down"

    app.add_error_handler(falcon.HTTPTooManyRequests, stack.handler(handle))
    result = stack.get(falcon.testing.TestClient(app))
    assert [type(ex) for ex in seen] == [RateLimited]
    assert (result.status_code, result.text) == (429, "slow down")
    assert limiter_fields(result)["retry-after"] == "6"
    assert limiter_fields(result)["ratelimit"] == '"a";r=0;t=6'
    assert result.headers["cache-control"] == "no-store"


def test_an_error_serializer_writes_the_body(stack: Stack) -> None:
    """A refusal has the form of the application's other errors: nothing of ours names its media type."""
    app = stack.app(limited(NO)[0])
    app.set_error_serializer(lambda _, resp, ex: setattr(resp, "media", {"error": ex.title}))
    result = stack.get(falcon.testing.TestClient(app))
    assert (result.status_code, result.json) == (429, {"error": "429 Too Many Requests"})


def test_fields_of_a_failed_response(stack: Stack) -> None:
    """What the application answers with an error was counted, and says so."""
    middleware, _ = limited(OK)

    def fail(req: Any, resp: Any) -> None:
        raise falcon.HTTPServiceUnavailable(retry_after=120)

    result = stack.get(stack.client(middleware, fail))
    assert result.status_code == 503
    assert limiter_fields(result) == {
        "ratelimit-policy": '"a";q=10;w=60',
        "ratelimit": '"a";r=9;t=6',
        "retry-after": "120",
    }


@pytest.mark.parametrize("independent", [True, False])
def test_fields_replace_those_of_the_application(stack: Stack, independent: bool) -> None:
    """RateLimit fields of the application give way, one line of each; its Retry-After is left alone."""
    middleware, _ = limited(OK)

    def respond(req: Any, resp: Any) -> None:
        resp.append_header("RateLimit", '"inner";r=1;t=1')
        resp.set_header("ratelimit-policy", '"inner";q=1;w=1')
        resp.set_header("Retry-After", "120")

    result = stack.get(stack.client(middleware, respond, independent_middleware=independent))
    assert limiter_fields(result) == {
        "ratelimit-policy": '"a";q=10;w=60',
        "ratelimit": '"a";r=9;t=6',
        "retry-after": "120",
    }


def test_a_refusal_in_dependent_middleware(stack: Stack) -> None:
    """Where a raising middleware's response step doesn't run, the refusal has its fields all the same."""
    middleware, _ = limited(NO)
    result = stack.get(stack.client(middleware, independent_middleware=False))
    assert result.status_code == 429
    assert limiter_fields(result)["ratelimit"] == '"a";r=0;t=6'
    assert limiter_fields(result)["retry-after"] == "6"


def test_outer_limiter_wins(stack: Stack) -> None:
    """Of two limiters in one application the first has its fields on the response."""
    outer, _ = limited(OK)
    inner = RateLimitMiddleware(Guard("inner", "5/s", key=lambda _: "k"), store=ToldStore(OK))
    assert limiter_fields(stack.get(stack.client([outer, inner])))["ratelimit"] == '"a";r=9;t=6'


@pytest.mark.parametrize("order", [1, -1])
def test_cors(stack: Stack, order: int) -> None:
    """With independent middleware a refusal carries the CORS fields, in either order, and a preflight isn't limited."""
    middleware, store = limited(NO)
    cors: Any = falcon.CORSMiddleware(allow_origins="*", expose_headers=["RateLimit"])
    client = stack.client([cors, middleware][::order])
    origin = {"Origin": "https://example.com"}
    refused = stack.get(client, headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (429, "*")
    preflight = client.simulate_options("/", headers={**origin, "Access-Control-Request-Method": "GET"})
    assert preflight.status_code == 200
    assert limiter_fields(preflight) == {}
    assert len(store.asked) == 1


def test_what_is_not_limited(stack: Stack) -> None:
    """A skipped path, and a key of None, reach the application without a question and without fields."""
    middleware, store = limited(NO, skip_paths=["/healthz"], key=lambda req: None if req.get_header("X-Free") else "k")
    client = stack.client(middleware)
    for result in (stack.get(client, "/healthz"), stack.get(client, headers={"X-Free": "1"})):
        assert result.status_code == 200
        assert limiter_fields(result) == {}
    assert store.asked == []
    assert stack.get(client, "/healthzz").status_code == 429


def test_paths_without_the_mount_point(stack: Stack) -> None:
    """skip_paths are below the mount point, on WSGI and on ASGI."""
    middleware, store = limited(OK, skip_paths=["/healthz", "/apis"])
    client = stack.client(middleware)
    mount = "/api" if stack.asgi else ""
    for path, calls in (("/healthz", 0), ("/healthz/x", 0), ("/healthzz", 1), ("/", 2)):
        stack.get(client, mount + path, root_path="/api")
        assert len(store.asked) == calls, path
    stack.get(client, "/apis/x", root_path="/api")  # only begins like the mount point
    assert len(store.asked) == 2


def test_paths_without_a_route_are_limited(stack: Stack) -> None:
    """A 404 costs as much as a page."""
    middleware, store = limited(OK)
    result = stack.get(stack.client(middleware), "/no/such/page")
    assert result.status_code == 404
    assert limiter_fields(result)["ratelimit"] == '"a";r=9;t=6'
    assert len(store.asked) == 1


def test_the_guards_key_goes_over_the_adapters(stack: Stack) -> None:
    """A guard's key, else the adapter's, else the client's address."""
    store = ToldStore(OK)
    for guard_key, key in (
        (lambda _: "guard", lambda _: "adapter"),
        (None, lambda _: b"adapter"),
        (None, None),
    ):
        middleware = RateLimitMiddleware(Guard("a", "10/minute", key=guard_key), store=store, key=key)
        stack.get(stack.client(middleware), remote_addr="203.0.113.7")
    assert store.keys == ["guard", b"adapter", "ip:203.0.113.7"]


def test_cost_of_the_request(stack: Stack) -> None:
    """A callable cost sees the request."""
    middleware, store = limited(OK, cost=lambda req: int(req.get_header("X-Units")))
    stack.get(stack.client(middleware), headers={"X-Units": "3"})
    assert [cost for _, requests in store.asked for _, _, cost in requests] == [3]


def test_a_denied_key_is_a_403(stack: Stack) -> None:
    """keys.DENY is answered by falcon.HTTPForbidden, without the store."""
    middleware, store = limited(OK, key=lambda _: keys.DENY)
    result = stack.get(stack.client(middleware))
    assert (result.status_code, store.asked) == (403, [])
    assert result.json["title"] == "403 Forbidden"
    assert result.headers["cache-control"] == "no-store"
    assert limiter_fields(result) == {}


def test_an_empty_key_is_a_500(stack: Stack) -> None:
    """A key callable that gives "" is the application's mistake, never a request that passes."""
    middleware, store = limited(OK, key=lambda _: "")
    assert stack.get(stack.client(middleware)).status_code == 500
    assert store.asked == []


def test_a_store_that_fails_is_a_503(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """Without an answer: 503 with Retry-After, and one log line when failures begin and one when they end."""
    caplog.set_level(logging.WARNING, "shmlimit")
    middleware, _ = limited(StoreError("no space"), ContentionError("busy"), OK, OK)
    client = stack.client(middleware)
    for _ in range(2):
        result = stack.get(client)
        assert result.status_code == 503
        assert limiter_fields(result) == {"retry-after": "1"}
        assert result.headers["cache-control"] == "no-store"
    assert [stack.get(client).status_code for _ in range(2)] == [200, 200]
    begun, ended = [record.getMessage() for record in caplog.records if record.name == "shmlimit"]
    assert begun == "guard 'a': the store failed (no space); requests are answered with 503 until it answers again"
    assert ended == "guard 'a': the store answers again, after 2 requests"


def test_fail_open(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """With fail_open requests pass while the store fails, without fields, and the log says so."""
    caplog.set_level(logging.WARNING, "shmlimit")
    middleware, _ = limited(StoreError("gone"), fail_open=True)
    client = stack.client(middleware)
    for result in (stack.get(client), stack.get(client)):
        assert (result.status_code, limiter_fields(result)) == (200, {})
    assert [record.getMessage() for record in caplog.records if record.name == "shmlimit"] == [
        "guard 'a': the store failed (gone); requests pass unlimited until it answers again"
    ]


def test_fail_open_is_for_stores_only(stack: Stack) -> None:
    """An error that isn't the store's is never a request that passes."""
    middleware, _ = limited(RuntimeError("a bug"), fail_open=True)
    assert stack.get(stack.client(middleware)).status_code == 500


def test_without_a_store_the_first_limited_request_says_what_to_do(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing bound: a 500 whose log names the hook, line by line, and never a limit for each worker."""
    client = stack.client(RateLimitMiddleware(Guard("a", "10/minute", skip_paths=["/healthz"])))
    assert stack.get(client, "/healthz").status_code == 200
    assert stack.get(client).status_code == 500
    told = caplog.text + stack.errors.getvalue()
    assert "ConfigError" in told
    assert "from shmlimit.adapters.gunicorn import install\n" in told
    assert "install(globals())\n" in told
    assert 'store=SharedTable.open("a-name")' in told


def test_the_bound_store_is_taken_at_the_first_limited_request(stack: Stack) -> None:
    """The application may be made before the store is bound, as gunicorn does with --preload."""
    client = stack.client(RateLimitMiddleware(Guard("a", "10/minute", key=lambda _: "k")))
    store = ToldStore(NO)
    _gate.bind(store)
    assert stack.get(client).status_code == 429
    assert store.keys == ["k"]


def test_a_given_store_goes_over_the_bound_one(stack: Stack) -> None:
    """`store` is used whatever the hook made."""
    _gate.bind(ToldStore(NO))
    assert stack.get(stack.client(limited(OK)[0])).status_code == 200


def test_an_unsupported_policy(stack: Stack) -> None:
    """A policy that the store can't run is refused when the middleware is made, or at the first request."""
    with pytest.raises(ConfigError, match="ToldStore can't run the policy of Guard\\('a'"):
        RateLimitMiddleware(Guard("a", "10/minute"), store=ToldStore(OK, supported=False))
    _gate.bind(ToldStore(OK, supported=False))
    assert stack.get(stack.client(RateLimitMiddleware(Guard("a", "10/minute")))).status_code == 500


def test_an_unsupported_policy_of_the_table(table: SharedTable) -> None:
    """Where the table knows which bound it is, that is what the error says."""
    with pytest.raises(ConfigError, match="ten years"):
        RateLimitMiddleware(Guard("a", TokenBucket(1, 10**9)), store=table)


@pytest.mark.parametrize(
    ("guards", "options", "hint"),
    [
        ((), {}, "nothing is limited without a guard"),
        (("10/minute",), {}, 'Guard\\("per-ip", "10/minute"\\)'),
        ((Guard("a", "10/minute"), Guard("A", "5/s")), {}, "two guards are named 'A'"),
        ((Guard("a", "10/minute"),), {"store": "a-name"}, 'SharedTable.open\\("a-name"\\)'),
        ((Guard("a", "10/minute"),), {"key": "ip"}, "callable"),
    ],
)
def test_mistakes_are_config_errors(guards: Any, options: dict[str, Any], hint: str) -> None:
    """What can't work is refused when the middleware is made."""
    with pytest.raises(ConfigError, match=hint):
        RateLimitMiddleware(*guards, **options)


class WatchedStore(ToldStore):
    """Remembers the threads in which it was asked."""

    threads: frozenset[int] = frozenset()

    def take(self, *args: Any, **named: Any) -> Decision:
        self.threads |= {threading.get_ident()}
        return super().take(*args, **named)


@pytest.mark.parametrize("in_the_loop", [True, False])
def test_stores_on_asgi(in_the_loop: bool) -> None:
    """`atake` is awaited where there is one; a store that has none may block, and runs in a thread of its own."""
    told, stack = WatchedStore(NO), Stack("asgi")
    store: Any = told if in_the_loop else SimpleNamespace(take=told.take, supports=told.supports)
    middleware = RateLimitMiddleware(Guard("a", "10/minute", key=lambda _: "k"), store=store)
    assert stack.get(stack.client(middleware)).status_code == 429
    assert len(told.threads) == 1
    assert (threading.get_ident() in told.threads) == in_the_loop
    assert len(told.asked) == 1


@pytest.mark.parametrize(("answer", "code"), [(NO, 3429), (StoreError("gone"), 3503), (OK, None)])
def test_websockets(answer: Any, code: int | None) -> None:
    """A WebSocket handshake is limited as well: a refused one is closed before it is accepted."""
    middleware, store = limited(answer)
    opened: list[bool] = []

    class Socket:
        async def on_websocket(self, _req: Any, ws: Any) -> None:
            opened.append(True)
            await ws.accept()

    app: Any = falcon.asgi.App(middleware=middleware)
    app.add_route("/ws", Socket())

    async def connect() -> int | None:
        async with falcon.testing.ASGIConductor(app) as conductor:
            try:
                async with conductor.simulate_ws("/ws"):
                    pass
            except falcon.WebSocketDisconnected as error:
                return error.code
        return None

    assert asyncio.run(connect()) == code
    assert bool(opened) == (code is None)
    assert len(store.asked) == 1
