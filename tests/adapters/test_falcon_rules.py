"""What falcon's decorator makes of the rules: costs, exemptions, charging by the response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import falcon
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


@pytest.mark.parametrize("error", [None, falcon.HTTPUnauthorized(), RuntimeError("broken")], ids=repr)
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


def test_the_handler_of_refusals_is_falcons(stack: Stack, ask: Callable[..., Any]) -> None:
    """An error handler for `RateLimited` makes its own answer; the fields stay."""

    def refused(_req: Any, resp: Any, error: RateLimited, _params: Any) -> None:
        resp.status = error.status
        resp.text = "slow down"

    middleware = [RateLimitMiddleware(Guard("a", "1/hour", key=one), store=fixed_clock())]
    app = stack.app(items=stack.resource("Items", "on_get")(), middleware=middleware)
    app.add_error_handler(RateLimited, stack.responder(refused))
    assert ask(app, "/items").status == 200
    answer = ask(app, "/items")
    assert (answer.status, answer.body) == (429, b"slow down")
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
