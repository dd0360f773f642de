"""What falcon's decorator makes of the rules: costs, exemptions, charging by the response."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import falcon
import falcon.asgi
import falcon.testing
import pytest

from shmlimit import keys, parse
from shmlimit.adapters.falcon import RateLimited, RateLimitMiddleware, exempt, limit
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard
from shmlimit.testing import FailingStore
from tests.adapters.adapter import fixed_clock
from tests.adapters.test_falcon_limit import Stack

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=["wsgi", "asgi"])
def stack(request: pytest.FixtureRequest) -> Stack:
    return Stack(request.param)


UNSERVED = {"Accept": "text/html"}  # falcon gives an error no body where the client wants none of its types


def one(_request: Any) -> str:
    return "k"


def test_cost_of_notation(stack: Stack, ask: Callable[..., Any]) -> None:
    """`cost` is what the guard that notation makes charges, as a number or from the request."""
    store = fixed_clock()
    resource = stack.resource("Items", "on_get", "on_post")
    resource.on_get = limit("5/hour", store=store, key=one, cost=2)(resource.on_get)
    resource.on_post = limit("7/hour", store=store, key=one, cost=lambda req: len(req.path))(resource.on_post)
    app = stack.app(items=resource())
    assert [ask(app, "/items").status for _ in range(3)] == [200, 200, 429]
    assert ask(app, "/items", method="POST").limits["ratelimit"].startswith('"Items.on_post";r=1;')
    with pytest.raises(ConfigError, match="a Guard has one of its own"):
        limit(Guard("a", "1/s"), cost=2)
    with pytest.raises(ConfigError, match="0 or more"):
        limit("1/s", cost=-1)(resource.on_get)


def test_exempt_responder(stack: Stack, ask: Callable[..., Any]) -> None:
    """A class's limit leaves an exempt responder alone."""
    resource = stack.resource("Items", "on_get", "on_post")
    resource.on_post = exempt(resource.on_post)
    limit("1/hour", store=fixed_clock(), key=one)(resource)
    app = stack.app(items=resource())
    assert [ask(app, "/items", method=method).status for method in ("GET", "GET", "POST", "POST")] == [
        200,
        429,
        200,
        200,
    ]
    with pytest.raises(ConfigError, match="exempt decorates a responder or a resource class"):
        exempt(7)


def test_exempt_resource(stack: Stack, ask: Callable[..., Any]) -> None:
    """A whole resource is left out by a middleware's guards that need the route, and only by those."""
    store = fixed_clock()
    per_route = Guard("route", "1/hour", key=keys.compose(keys.route, one))
    middleware = [RateLimitMiddleware(per_route, Guard("all", "5/hour", key=one), store=store)]
    free = exempt(stack.resource("Free", "on_get"))
    app = stack.app(items=stack.resource("Items", "on_get")(), free=free(), middleware=middleware)
    assert [ask(app, path).status for path in ("/items", "/items", "/free", "/free")] == [200, 429, 200, 200]
    assert ask(app, "/free").limits["ratelimit"].startswith('"all";r=0;')


def test_who_is_exempt(stack: Stack, ask: Callable[..., Any]) -> None:
    """What inherits from an exempt resource is; one that answers to every name isn't."""
    free = type("Child", (exempt(stack.resource("Free", "on_get")),), {})
    proxy = stack.resource("Proxy", "on_get", __getattr__=lambda _self, _name: object())
    middleware = [RateLimitMiddleware(Guard("route", "1/hour", key=keys.route), store=fixed_clock())]
    app = stack.app(free=free(), middleware=middleware)
    app.add_route("/proxy", proxy())
    assert [ask(app, "/free").status for _ in range(2)] == [200, 200]
    assert [ask(app, "/proxy").status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(
    "error", [None, falcon.HTTPUnauthorized(), falcon.HTTPStatus(401), RuntimeError("broken")], ids=repr
)
def test_charged_by_the_response(stack: Stack, ask: Callable[..., Any], error: Exception | None) -> None:
    """What a responder sets or raises is the status that decides; what isn't falcon's is a 500."""
    statuses: list[int] = []

    def on_get(_self: Any, _req: Any, resp: Any) -> None:
        resp.status = 401
        if error is not None:
            raise error

    store = fixed_clock()
    guard = Guard("logins", "2/hour", key=one, consume_on=lambda status: statuses.append(status) or status >= 400)
    resource = type("Login", (), {"on_get": limit(guard, store=store)(stack.responder(on_get))})
    app = stack.app(login=resource())
    app.add_error_handler(RuntimeError, stack.responder(lambda _req, resp, _ex, _params: setattr(resp, "status", 418)))
    answers = [ask(app, "/login") for _ in range(3)]
    wanted = 401 if not isinstance(error, RuntimeError) else 418
    assert [answer.status for answer in answers] == [wanted, wanted, 429]
    assert statuses == [500 if isinstance(error, RuntimeError) else 401] * 2
    assert [answer.limits["ratelimit"] for answer in answers[:2]] == [f'"logins";r={r};t=1800' for r in (1, 0)]


def test_a_store_that_fails_after_the_response(stack: Stack, ask: Callable[..., Any]) -> None:
    """The application's answer becomes a 503: it wasn't sent yet."""
    store = FailingStore(fixed_clock())

    def on_get(_self: Any, _req: Any, resp: Any) -> None:
        store.failing = True
        resp.media = {"logged": "in"}

    guard = Guard("logins", "2/hour", key=one, consume_on=lambda _status: True)
    resource = type("Login", (), {"on_get": limit(guard, store=store)(stack.responder(on_get))})
    answer = ask(stack.app(login=resource()), "/login")
    assert answer.status == 503
    assert answer.limits["retry-after"] == "1"
    assert b"logged" not in answer.body


@pytest.mark.parametrize("place", ["middleware", "decorator"])
@pytest.mark.parametrize(
    ("kind", "body"), [("wsgi", "data"), ("wsgi", "stream"), ("asgi", "data"), ("asgi", "stream"), ("asgi", "sse")]
)
def test_nothing_of_a_replaced_response_is_left(ask: Callable[..., Any], place: str, kind: str, body: str) -> None:
    """However the application gave its body, a 503 instead of it has one of its own, and isn't told to be encoded."""
    stack = Stack(kind)
    store = FailingStore(fixed_clock())

    async def events() -> AsyncIterator[Any]:
        yield falcon.asgi.SSEvent(data=b"secret")

    async def parts() -> AsyncIterator[bytes]:
        yield b"secret"

    def on_get(_self: Any, _req: Any, resp: Any) -> None:
        store.failing = True
        resp.set_header("Content-Encoding", "gzip")
        if body == "data":
            resp.data = b"secret"
        elif body == "sse":
            resp.sse = events()
        else:
            resp.set_stream(parts() if stack.asgi else io.BytesIO(b"secret"), 6)

    guard = Guard("logins", "2/hour", key=one, consume_on=lambda _status: True)
    resource = type("Login", (), {"on_get": stack.responder(on_get)})
    middleware = [RateLimitMiddleware(guard, store=store)] if place == "middleware" else []
    if place == "decorator":
        limit(guard, store=store)(resource)
    answer = ask(stack.app(login=resource(), middleware=middleware), "/login")
    assert answer.status == 503
    assert b"can't answer" in answer.body
    headers = dict(answer.headers)
    assert "content-encoding" not in headers
    assert headers["content-length"] == str(len(answer.body))
    store.failing = False
    assert b"secret" not in ask(stack.app(login=resource(), middleware=middleware), "/login", headers=UNSERVED).body


@pytest.mark.parametrize("where", ["decorator", "second step"])
def test_a_limiters_own_refusal_is_not_charged(stack: Stack, ask: Callable[..., Any], where: str) -> None:
    """What the middleware would charge by the response isn't charged where a later step refuses: there was none."""
    store = fixed_clock()
    statuses: list[int] = []
    outer = Guard("outer", "5/hour", key=one, consume_on=lambda status: statuses.append(status) or True)
    resource = stack.resource("Items", "on_get")
    guards = [outer]
    if where == "decorator":
        resource.on_get = limit("1/hour", store=store, key=one)(resource.on_get)
    else:
        guards.append(Guard("route", "1/hour", key=keys.route))
    app = stack.app(items=resource(), middleware=[RateLimitMiddleware(*guards, store=store)])
    assert [ask(app, "/items").status for _ in range(3)] == [200, 429, 429]
    assert statuses == [200]
    assert store.peek(parse("5/hour"), "k").remaining == 4


def test_a_websocket_that_cannot_be_charged() -> None:
    """The store fails when its responder has ended: the close says so, whatever a refusal looks like."""
    store = FailingStore(fixed_clock())

    class Socket:
        async def on_websocket(self, _req: Any, ws: Any) -> None:
            await ws.accept()
            store.failing = True

    guard = Guard("a", "2/hour", key=one, problem=True, consume_on=lambda status: status == 101)
    app: Any = falcon.asgi.App()
    app.add_route("/", limit(guard, store=store)(Socket)())

    async def connect() -> int:
        async with falcon.testing.ASGIConductor(app) as conductor, conductor.simulate_ws("/") as ws:
            with pytest.raises(falcon.WebSocketDisconnected) as ended:
                await ws.receive_text()
        return int(ended.value.code)

    assert asyncio.run(connect()) == 3503


def test_both_may_have_something_pending(stack: Stack, ask: Callable[..., Any]) -> None:
    """A guard of the middleware and one of the decorator, each with a store of its own, are each charged once there."""
    stores = fixed_clock(), fixed_clock()
    outer = Guard("outer", "5/hour", key=one, consume_on=lambda status: status == 200)
    inner = Guard("inner", "3/hour", key=one, consume_on=lambda status: status == 200)
    resource = stack.resource("Items", "on_get")
    resource.on_get = limit(inner, store=stores[1])(resource.on_get)
    app = stack.app(items=resource(), middleware=[RateLimitMiddleware(outer, store=stores[0])])
    answer = ask(app, "/items")
    assert answer.limits["ratelimit"] == '"outer";r=4;t=720, "inner";r=2;t=1200'
    assert [len(store) for store in stores] == [1, 1]
    assert stores[0].peek(parse("5/hour"), "k").remaining == 4


def test_both_steps_of_a_middleware_may_have_something_pending(stack: Stack, ask: Callable[..., Any]) -> None:
    """A guard before routing and one after it are each charged by the response."""
    store = fixed_clock()
    guards = [
        Guard("first", "5/hour", key=one, consume_on=lambda status: status == 200),
        Guard("routed", "3/hour", key=keys.route, consume_on=lambda status: status == 200),
    ]
    app = stack.app(items=stack.resource("Items", "on_get")(), middleware=[RateLimitMiddleware(*guards, store=store)])
    assert ask(app, "/items").limits["ratelimit"] == '"first";r=4;t=720, "routed";r=2;t=1200'
    assert ask(app, "/items").limits["ratelimit"] == '"first";r=3;t=720, "routed";r=1;t=1200'


def test_the_middlewares_own_key_may_need_the_route(stack: Stack, ask: Callable[..., Any]) -> None:
    """A guard without a key of its own is decided after routing as well."""
    middleware = RateLimitMiddleware(Guard("a", "1/hour"), store=fixed_clock(), key=keys.route)
    app = stack.app(items=stack.resource("Items", "on_get")(), middleware=[middleware])
    assert [ask(app, path).status for path in ("/items/1", "/items/2", "/items", "/none", "/none")] == [
        200,
        429,
        200,
        404,
        404,
    ]


def test_a_shadow_after_routing(stack: Stack, ask: Callable[..., Any]) -> None:
    """The fields of what was decided before routing stay."""
    guards = [Guard("first", "5/hour", key=one), Guard("routed", "1/hour", key=keys.route, shadow=True)]
    app = stack.app(
        items=stack.resource("Items", "on_get")(), middleware=[RateLimitMiddleware(*guards, store=fixed_clock())]
    )
    assert [ask(app, "/items").limits["ratelimit"] for _ in range(2)] == ['"first";r=4;t=720', '"first";r=3;t=720']


def test_one_guard_a_step_needs_no_take_all(stack: Stack, ask: Callable[..., Any]) -> None:
    """A store that can only take will do where no step has to decide several guards."""
    whole = fixed_clock()

    class Least:
        take, supports = whole.take, whole.supports

    guards = [Guard("first", "5/hour", key=one), Guard("routed", "1/hour", key=keys.route)]
    middleware: Any = RateLimitMiddleware(*guards, store=Least())  # type: ignore[arg-type]
    app = stack.app(items=stack.resource("Items", "on_get")(), middleware=[middleware])
    assert [ask(app, "/items").status for _ in range(2)] == [200, 429]
    with pytest.raises(ConfigError, match="has no take_all"):
        RateLimitMiddleware(guards[0], Guard("second", "5/hour"), store=Least())  # type: ignore[arg-type]


def test_dialects_of_several_limiters(stack: Stack, ask: Callable[..., Any]) -> None:
    """What can't stand in one response is a mistake also between a middleware and a decorator: a 500 that says so."""
    resource = stack.resource("Items", "on_get")
    resource.on_get = limit(Guard("inner", "3/hour", key=one, headers="draft-7"), store=fixed_clock())(resource.on_get)
    outer = RateLimitMiddleware(Guard("outer", "5/hour", key=one), store=fixed_clock())
    found: list[str] = []

    def told(_req: Any, resp: Any, error: Exception, _params: Any) -> None:
        found.append(str(error))
        resp.status = 500

    app = stack.app(items=resource(), middleware=[outer])
    app.add_error_handler(ConfigError, stack.responder(told))
    assert ask(app, "/items").status == 500
    assert "guards 'outer' and 'inner' write different generations" in found[0]


@pytest.mark.parametrize("problem", [False, True])
def test_the_handler_of_refusals_is_falcons(stack: Stack, ask: Callable[..., Any], problem: bool) -> None:
    """An error handler for `RateLimited` makes its own answer, of its own type; the fields stay."""

    def refused(_req: Any, resp: Any, error: RateLimited, _params: Any) -> None:
        resp.status = error.status
        resp.text = "slow down"
        resp.content_type = falcon.MEDIA_TEXT

    middleware = [RateLimitMiddleware(Guard("a", "1/hour", key=one, problem=problem), store=fixed_clock())]
    app = stack.app(items=stack.resource("Items", "on_get")(), middleware=middleware)
    app.add_error_handler(RateLimited, stack.responder(refused))
    assert ask(app, "/items").status == 200
    answer = ask(app, "/items")
    assert (answer.status, answer.body) == (429, b"slow down")
    assert dict(answer.headers)["content-type"] == falcon.MEDIA_TEXT
    assert answer.limits == {"ratelimit-policy": '"a";q=1;w=3600', "ratelimit": '"a";r=0;t=3600', "retry-after": "3600"}


def test_context_of_another_type(ask: Callable[..., Any]) -> None:
    """An application whose context is a dict finds the decisions there."""

    class Request(falcon.Request):
        context_type = dict

    found: dict[str, Any] = {}

    class Page:
        def on_get(self, req: Any, _resp: Any) -> None:
            found.update(req.context["ratelimit"])

    app = falcon.App(
        middleware=[RateLimitMiddleware(Guard("a", "5/hour", key=one), store=fixed_clock())], request_type=Request
    )
    app.add_route("/", Page())
    ask(app)
    assert found["a"].remaining == 4
