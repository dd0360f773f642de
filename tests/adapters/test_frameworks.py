"""The wrappers round real frameworks, in process: whatever a framework calls a route, it is limited."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from shmlimit.adapters import asgi, wsgi
from shmlimit.guard import Guard
from shmlimit.stores.memory import MemoryStore

NOW_US = 1_750_000_000_000_000
PATHS = ["/", "/included/1", "/mounted/2", "/nothing"]


def of_starlette(*limited: Any, **options: Any) -> Any:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route, Router

    async def hello(_request: Any) -> Any:
        return PlainTextResponse("hello")

    included = Router([Route("/{number}", hello)])
    mounted = Starlette(routes=[Route("/{number}", hello)])
    return Starlette(
        routes=[Route("/", hello), Mount("/included", included), Mount("/mounted", mounted)],
        middleware=[Middleware(asgi.RateLimit, *limited, **options)],
    )


def of_fastapi(*limited: Any, **options: Any) -> Any:
    from fastapi import APIRouter, FastAPI

    app, mounted, included = FastAPI(), FastAPI(), APIRouter(prefix="/included")

    async def hello(number: int = 0) -> dict[str, int]:
        return {"number": number}

    app.get("/")(hello)
    included.get("/{number}")(hello)
    mounted.get("/{number}")(hello)
    app.include_router(included)
    app.mount("/mounted", mounted)
    app.add_middleware(asgi.RateLimit, *limited, **options)
    return app


def of_flask(*limited: Any, **options: Any) -> Any:
    from flask import Blueprint, Flask
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

    app, mounted, included = Flask("app"), Flask("mounted"), Blueprint("included", "included", url_prefix="/included")

    def hello(number: int = 0) -> dict[str, int]:
        return {"number": number}

    app.get("/")(hello)
    included.get("/<int:number>")(hello)
    mounted.get("/<int:number>")(hello)
    app.register_blueprint(included)
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/mounted": mounted})  # type: ignore[method-assign]
    app.wsgi_app = wsgi.RateLimit(app.wsgi_app, *limited, **options)  # type: ignore[method-assign]
    return app


@pytest.mark.parametrize("first", list(itertools.permutations(PATHS, 2)), ids=" ".join)
@pytest.mark.parametrize("make", [of_starlette, of_fastapi, of_flask])
def test_s53_routers_and_mounts_are_limited(make: Any, first: tuple[str, str], ask: Callable[..., Any]) -> None:
    """Whichever two come first, the third request is refused wherever it goes, and says so in the fields."""
    app = make(Guard("per-ip", "2/minute"), store=MemoryStore(clock=lambda: NOW_US))
    expected = {path: 404 if path == "/nothing" else 200 for path in PATHS}
    for left, path in zip((1, 0), first, strict=True):
        answer = ask(app, path)
        assert answer.status == expected[path]
        assert f";r={left};" in answer.limits["ratelimit"]
    for path in PATHS:
        answer = ask(app, path)
        assert (answer.status, answer.limits["retry-after"]) == (429, "30")


@pytest.mark.parametrize("make", [of_starlette, of_fastapi, of_flask])
def test_a_guard_for_some_paths_is_for_them_in_a_mount_too(make: Any, ask: Callable[..., Any]) -> None:
    """The wrapper stands before the routers, so `paths` are whole paths."""
    guard = Guard("some", "1/minute", paths=["/mounted"])
    app = make(guard, store=MemoryStore(clock=lambda: NOW_US))
    assert [ask(app, path).status for path in ("/mounted/2", "/mounted/3", "/included/1", "/")] == [200, 429, 200, 200]
