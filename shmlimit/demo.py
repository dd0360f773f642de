"""The application that `make serve` runs: routes with limits that all workers share, and one without.

    curl -i 127.0.0.1:8000/           10 a minute for each client address, whichever worker answers
    curl -i 127.0.0.1:8000/search     5 a second and 100 an hour for each X-Api-Key, 600 a minute for each address
    curl -i 127.0.0.1:8000/reports    5 in any minute for each X-Api-Key (kept in the file), 600 for each address
    curl -i 127.0.0.1:8000/healthz    not limited

`create_app(asgi=True)` is the same for `gunicorn -k asgi "shmlimit.demo:create_app(asgi=True)"`.
"""

from __future__ import annotations

import os
from typing import Any

import falcon

from shmlimit import keys
from shmlimit.adapters.falcon import RateLimitMiddleware, limit
from shmlimit.guard import Guard
from shmlimit.stores.base import Store

PER_IP = Guard("per-ip", "10/minute", skip_paths=["/healthz", "/search", "/reports"])

# Nobody verified the header, and whoever makes up keys gets a fresh quota with each: so by address as well.
BY_KEY = keys.header("x-api-key", missing=keys.client_ip())
ADDRESS = Guard("address", "600/minute", key=keys.client_ip())
SEARCH = (Guard("burst", "5/second", key=BY_KEY), Guard("hourly", "100/hour", key=BY_KEY), ADDRESS)
REPORTS = (Guard("reports", "sliding-log 5/minute", key=BY_KEY), ADDRESS)


class Worker:
    """Says which process answered."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """The process id, as JSON."""
        resp.media = {"worker": os.getpid()}


class AsyncWorker(Worker):
    """The same as a coroutine."""

    async def on_get(self, req: Any, resp: Any) -> None:  # type: ignore[override]
        """The process id, as JSON."""
        super().on_get(req, resp)


def create_app(*, asgi: bool = False, store: Store | None = None) -> Any:
    """A `falcon.App` or a `falcon.asgi.App`; `store=None` takes what the gunicorn hook made."""
    middleware = [RateLimitMiddleware(PER_IP, store=store)]
    worker = AsyncWorker if asgi else Worker
    app: Any
    if asgi:
        from falcon.asgi import App

        app = App(middleware=middleware)
    else:
        app = falcon.App(middleware=middleware)
    app.add_route("/", worker())
    app.add_route("/healthz", worker())
    for path, guards in (("/search", SEARCH), ("/reports", REPORTS)):
        # As @limit(...) above a class would, but with the store that was given here.
        limited = limit(*guards, store=store)(type("Limited", (worker,), {}))
        app.add_route(path, limited())
    return app


app = create_app()
