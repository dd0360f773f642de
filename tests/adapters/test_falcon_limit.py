"""The decorator `limit` for falcon's responders and resources: one body of tests, run on WSGI and on ASGI."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import falcon
import falcon.asgi
import falcon.testing
import pytest

from shmlimit import keys, parse
from shmlimit.adapters import _gate
from shmlimit.adapters.falcon import RateLimitMiddleware, limit
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard
from shmlimit.stores.memory import MemoryStore
from shmlimit.testing import FailingStore

NOW_US = 1_750_000_000_250_000


class Stack:
    """Turns synchronous responders into those of the stack, and makes applications."""

    def __init__(self, kind: str) -> None:
        self.asgi = kind == "asgi"

    def responder(self, function: Callable[..., None]) -> Any:
        if not self.asgi:
            return function

        @functools.wraps(function)
        async def responder(*args: Any, **kwargs: Any) -> None:
            function(*args, **kwargs)

        return responder

    def resource(self, name: str, *names: str, bases: tuple[type, ...] = (), **others: Any) -> Any:
        """A class with responders that answer with their own names."""

        def named(text: str) -> Any:
            def answer(self: Any, req: Any, resp: Any, **params: Any) -> None:
                resp.text = text

            answer.__name__, answer.__qualname__ = text, f"{name}.{text}"
            return self.responder(answer)

        return type(name, bases, {**{text: named(text) for text in names}, **others})

    def app(self, **routes: Any) -> Any:
        middleware = routes.pop("middleware", [])
        app: Any = (falcon.asgi.App if self.asgi else falcon.App)(middleware=middleware)
        for path, resource in routes.items():
            app.add_route(f"/{path}", resource)
            app.add_route(f"/{path}/{{item}}", resource)
        return app


@pytest.fixture(params=["wsgi", "asgi"])
def stack(request: pytest.FixtureRequest) -> Stack:
    return Stack(request.param)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(clock=lambda: NOW_US)


def test_a_responder(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """Notation limits one responder by address, under its own name, and leaves the others alone."""
    resource = stack.resource("Items", "on_get", "on_head")
    resource.on_get = limit("2/minute", store=store)(resource.on_get)
    app = stack.app(items=resource())
    answers = [ask(app, "/items") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[0].body == b"on_get"
    assert answers[0].limits == {"ratelimit-policy": '"Items.on_get";q=2;w=60', "ratelimit": '"Items.on_get";r=1;t=30'}
    assert answers[2].limits["retry-after"] == "30"
    assert b"429 Too Many Requests" in answers[2].body
    assert ask(app, "/items", peer="203.0.113.8").status == 200
    assert ask(app, "/items", method="HEAD").limits == {}


def test_several_limits_are_all_or_nothing(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """Guards and notation in one step, in their order; several notations have their policies in their names."""
    guard = Guard("own", "1/minute", key=keys.header("x-api-key", missing="skip"))
    resource = stack.resource("Items", "on_get")
    resource.on_get = limit("5/hour", guard, "100/day", store=store)(resource.on_get)
    app = stack.app(items=resource())
    answers = [ask(app, "/items", headers={"X-Api-Key": "x"}) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 429, 429]
    names = ['"Items.on_get 5/hour"', '"own"', '"Items.on_get 100/day"']
    assert [item.split(";")[0] for item in answers[0].limits["ratelimit-policy"].split(", ")] == names
    assert '"Items.on_get 5/hour";r=4;' in answers[2].limits["ratelimit"]


def test_a_class(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """A class covers its responders, inherited ones and those with a suffix too, each under its own name."""
    base = stack.resource("Base", "on_post")
    resource: Any = stack.resource("Items", "on_get", "on_get_all", bases=(base,), on_sale=lambda _self: "unchanged")
    assert limit("100/minute", store=store)(resource) is resource
    app = stack.app(items=resource())
    app.add_route("/all", resource(), suffix="all")
    for path, method, name in (
        ("/items", "GET", "on_get"),
        ("/all", "GET", "on_get_all"),
        ("/items/7", "POST", "on_post"),
    ):
        answer = ask(app, path, method=method)
        assert (answer.status, answer.body) == (200, name.encode())
        assert answer.limits["ratelimit-policy"] == f'"Items.{name}";q=100;w=60'
    assert resource().on_sale() == "unchanged"
    assert ask(stack.app(base=base()), "/base", method="POST").limits == {}


def test_default_responders_are_covered(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """`on_request`, falcon's responder for all other methods, isn't left open."""
    resource = limit("1/minute", store=store)(stack.resource("Items", "on_get", "on_request"))
    app = stack.app()
    app.router_options.default_to_on_request = True
    app.add_route("/items", resource())
    assert [ask(app, "/items", method=method).status for method in ("GET", "PUT")] == [200, 429]


def test_a_methods_own_limit_goes_over_that_of_its_class(
    stack: Stack, store: MemoryStore, ask: Callable[..., Any]
) -> None:
    """A responder with a `limit` of its own isn't limited by its class, also where falcon's hooks lie between."""
    hook = stack.responder(lambda _req, _resp, _resource, _params: None)
    resource = stack.resource("Items", "on_get", "on_post", "on_put")
    resource.on_get = limit("50/minute", store=store)(resource.on_get)
    resource.on_put = falcon.before(hook)(limit("50/minute", store=store)(resource.on_put))
    limited = limit("7/hour", store=store)(resource)
    app = stack.app(items=limited())
    policies = [ask(app, "/items", method=method).limits["ratelimit-policy"] for method in ("GET", "POST", "PUT")]
    assert policies == ['"Items.on_get";q=50;w=60', '"Items.on_post";q=7;w=3600', '"Items.on_put";q=50;w=60']


def test_decorators_add_up(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """Two on one responder both apply, the outer first, and so do those of a class and of its base."""
    resource = stack.resource("Items", "on_get", "on_post")
    resource.on_get = limit(Guard("inner", "1/minute"), store=store)(resource.on_get)
    resource.on_get = limit(Guard("outer", "5/hour"), store=store)(resource.on_get)
    limit(Guard("base", "6/hour"), store=store)(resource)
    child: Any = limit(Guard("child", "7/hour"), store=store)(type("Child", (resource,), {}))
    app = stack.app(items=child())
    first, second = ask(app, "/items"), ask(app, "/items")
    assert first.limits["ratelimit"] == '"outer";r=4;t=720, "inner";r=0;t=60'
    assert (second.status, second.limits["ratelimit"]) == (429, '"outer";r=3;t=720, "inner";r=0;t=60')
    posted = ask(app, "/items", method="POST")
    assert posted.limits["ratelimit-policy"] == '"child";q=7;w=3600, "base";q=6;w=3600'


def test_beside_a_middleware(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """After the middleware's guards, which stay charged; all are listed, those of the middleware first."""
    middleware = RateLimitMiddleware(
        Guard("route", "60/minute", key=keys.route), Guard("ip", "5/hour", skip_paths=["/items/free"]), store=store
    )
    resource = stack.resource("Items", "on_get")
    resource.on_get = limit("1/minute", store=store)(resource.on_get)
    app = stack.app(items=resource(), middleware=[middleware])
    first, second, free = ask(app, "/items"), ask(app, "/items"), ask(app, "/items/free")
    assert [first.status, second.status, free.status] == [200, 429, 429]
    assert first.limits["ratelimit"] == '"route";r=59;t=1, "ip";r=4;t=720, "Items.on_get";r=0;t=60'
    assert second.limits["ratelimit"] == '"route";r=58;t=1, "ip";r=3;t=720, "Items.on_get";r=0;t=60'
    assert second.limits["retry-after"] == "60"
    assert free.limits["ratelimit"] == '"route";r=59;t=1, "Items.on_get";r=0;t=60'
    assert store.peek(parse("5/hour"), "ip:203.0.113.7").remaining == 3


def test_a_limit_that_does_not_apply_beside_a_middleware(
    stack: Stack, store: MemoryStore, ask: Callable[..., Any]
) -> None:
    """The middleware's fields are on the response all the same."""
    resource = limit("1/minute", store=store, key=lambda _: None)(stack.resource("Items", "on_get"))
    app = stack.app(items=resource(), middleware=[RateLimitMiddleware(Guard("ip", "5/hour"), store=store)])
    assert ask(app, "/items").limits == {"ratelimit-policy": '"ip";q=5;w=3600', "ratelimit": '"ip";r=4;t=720'}


def test_one_count_for_equal_policies(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """Responders with equal policies share one count of a client; with the route in the key each has its own."""
    for key, status in ((None, 429), (keys.compose(keys.route, keys.client_ip()), 200)):
        resource = limit("1/minute", store=store, key=key)(stack.resource("Items", "on_get", "on_post"))
        app = stack.app(items=resource())
        assert [ask(app, "/items/1", method=method).status for method in ("GET", "POST")] == [200, status]
        assert ask(app, "/items/2").status == 429


def test_fields_go_over_those_of_the_responder(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """Its RateLimit fields give way, its Retry-After stays, and what it raises was counted and says so."""

    def on_get(self: Any, req: Any, resp: Any) -> None:
        resp.set_header("RateLimit", '"own";r=1;t=1')
        raise falcon.HTTPServiceUnavailable(retry_after=120)

    resource = type("Items", (), {"on_get": limit(Guard("a", "2/minute"), store=store)(stack.responder(on_get))})
    app: Any = (falcon.asgi.App if stack.asgi else falcon.App)()
    app.add_route("/", resource())
    answer = ask(app)
    assert answer.status == 503
    assert answer.limits == {
        "ratelimit-policy": '"a";q=2;w=60',
        "ratelimit": '"a";r=1;t=30',
        "retry-after": "120",
    }


def test_what_is_not_limited(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """Options of a guard hold here as well: skipped paths, below the mount point; DENY is a 403."""
    guard = Guard("a", "1/minute", skip_paths=["/items/free"])
    resource = limit(guard, store=store)(stack.resource("Items", "on_get"))
    app = stack.app(items=resource())
    app.add_route("/api/items/free", resource())  # falcon's router sees the mount point on ASGI
    assert [ask(app, "/items/free", mount="/api").limits for _ in range(2)] == [{}, {}]
    app.add_route("/api/api/items/free", resource())
    assert ask(app, "/api/items/free", mount="/api").limits != {}  # the mount point is taken off once
    store.reset(guard.policy, "ip:203.0.113.7")
    denied = limit("1/minute", store=store, key=lambda _: keys.DENY)(stack.resource("Items", "on_get"))
    assert ask(stack.app(items=denied()), "/items").status == 403
    assert len(store) == 0


def test_a_store_that_fails(stack: Stack, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """503, and the limits of a middleware that did answer are still there."""
    broken = FailingStore(store, failing=True)
    resource = limit("1/minute", store=broken)(stack.resource("Items", "on_get"))
    app = stack.app(items=resource(), middleware=[RateLimitMiddleware(Guard("ip", "5/hour"), store=store)])
    answer = ask(app, "/items")
    assert answer.status == 503
    assert answer.limits == {"ratelimit-policy": '"ip";q=5;w=3600', "ratelimit": '"ip";r=4;t=720', "retry-after": "1"}


def test_the_bound_store_is_taken_at_the_first_request(
    stack: Stack, store: MemoryStore, ask: Callable[..., Any]
) -> None:
    """Decorators run when modules are imported, long before the hook binds a store."""
    app = stack.app(items=limit("1/minute")(stack.resource("Items", "on_get"))())
    _gate.bind(store)
    assert [ask(app, "/items").status for _ in range(2)] == [200, 429]


def test_a_name_says_class_and_method_wherever_they_stand(store: MemoryStore, ask: Callable[..., Any]) -> None:
    """A class inside a function is named like any other, by itself or by its method."""

    class Items:
        @limit("1/minute", store=store)
        def on_get(self, req: Any, resp: Any) -> None:
            """Read."""

    @limit("2/minute", store=store)
    class Others(Items):
        def on_post(self, req: Any, resp: Any) -> None:
            """Write."""

    app = falcon.App()
    app.add_route("/", Others())
    assert ask(app).limits["ratelimit-policy"] == '"Items.on_get";q=1;w=60'
    assert ask(app, method="POST").limits["ratelimit-policy"] == '"Others.on_post";q=2;w=60'


def test_coroutines_stay_coroutines(store: MemoryStore) -> None:
    """The kind, name and docstring of a responder are kept."""

    async def on_get(self: Any, req: Any, resp: Any) -> None:
        """Read."""

    def on_post(self: Any, req: Any, resp: Any) -> None:
        """Write."""

    limited = [limit("1/minute", store=store)(responder) for responder in (on_get, on_post)]
    assert [inspect.iscoroutinefunction(responder) for responder in limited] == [True, False]
    assert [(one.__name__, one.__doc__) for one in limited] == [("on_get", "Read."), ("on_post", "Write.")]


def test_a_store_that_blocks_runs_in_a_thread(ask: Callable[..., Any]) -> None:
    """On ASGI a store without coroutines doesn't stop the loop."""
    threads: list[int] = []

    class Blocking:
        def supports(self, _policy: Any) -> bool:
            return True

        def take(self, policy: Any, _key: Any, cost: int = 1) -> Any:
            threads.append(threading.get_ident())
            return policy.decide(None, NOW_US, cost)[0]

    stack, store = Stack("asgi"), Blocking()
    resource = limit("1/minute", store=store)(stack.resource("Items", "on_get"))  # type: ignore[arg-type]
    assert ask(stack.app(items=resource()), "/items").status == 200
    assert threads[0] != threading.get_ident()


def test_websockets(store: MemoryStore) -> None:
    """`on_websocket` is limited before it is accepted, by a decorator and by the second step of a middleware."""

    class Socket:
        async def on_websocket(self, _req: Any, ws: Any, **_params: Any) -> None:
            await ws.accept()

    limited = limit("1/minute", store=store)(type("Limited", (Socket,), {}))
    middleware = RateLimitMiddleware(Guard("route", "1/hour", key=keys.route, skip_paths=["/a"]), store=store)
    app: Any = falcon.asgi.App(middleware=[middleware])
    app.add_route("/a", limited())
    app.add_route("/b/{item}", Socket())

    async def connect(path: str) -> int | None:
        async with falcon.testing.ASGIConductor(app) as conductor:
            try:
                async with conductor.simulate_ws(path):
                    pass
            except falcon.WebSocketDisconnected as error:
                return error.code
        return None

    assert [asyncio.run(connect(path)) for path in ("/a", "/a", "/b/1", "/b/2")] == [None, 3429, None, 3429]


class Empty:
    """No responder here."""

    def on_sale(self) -> None:
        """Not one either."""


class Static:
    @staticmethod
    def on_get(req: Any, resp: Any) -> None:
        """A responder without an instance."""


@pytest.mark.parametrize(
    ("arguments", "target", "hint"),
    [
        ((), Static.on_get, "nothing is limited without a guard"),
        (("often",), Static.on_get, "often"),
        ((Static.on_get,), Static.on_get, 'limit\\("10/minute"\\)'),
        (("1/minute", "1/minute"), Static.on_get, "two guards are named"),
        (("1/minute",), Empty, "Empty has no responder"),
        (("1/minute",), Empty(), "decorates a responder or a resource class"),
        (("1/minute",), Static, "Static.on_get must be an ordinary method"),
        (("1/minute",), Static.__dict__["on_get"], "decorates a responder or a resource class"),
    ],
    ids=str,
)
def test_mistakes_are_config_errors(arguments: Any, target: Any, hint: str) -> None:
    """What can't work is refused when the module is imported."""
    with pytest.raises(ConfigError, match=hint):
        limit(*arguments)(target)


def test_what_an_application_calls_scope_is_left_alone(store: MemoryStore, ask: Callable[..., Any]) -> None:
    """OAuth knows scopes, too: on WSGI the path is below the mount point already, whatever a request has."""

    class OAuth:
        def process_request(self, req: Any, _resp: Any) -> None:
            req.scope = {"read": True}

    stack = Stack("wsgi")
    guard = Guard("items", "1/minute", paths=["/api/items"])
    resource = stack.resource("Items", "on_get")
    resource.on_get = limit(guard, store=store)(resource.on_get)
    app = falcon.App(middleware=[OAuth()])
    app.add_route("/api/items", resource())
    assert [ask(app, "/api/items", mount="/api").status for _ in range(2)] == [200, 429]
