"""The application that `make serve` runs: one route with a limit that all workers share, and one without.

    curl -i 127.0.0.1:8000/           10 a minute for each client address, whichever worker answers
    curl -i 127.0.0.1:8000/healthz    not limited

`create_app(asgi=True)` is the same for `gunicorn -k asgi "shmlimit.demo:create_app(asgi=True)"`.
"""

from __future__ import annotations

import os
from typing import Any

import falcon

from shmlimit.adapters.falcon import RateLimitMiddleware
from shmlimit.guard import Guard
from shmlimit.stores.base import Store


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
    """A `falcon.App` or a `falcon.asgi.App`; `store=None` takes the table of the gunicorn hook."""
    per_ip = Guard("per-ip", "10/minute", skip_paths=["/healthz"])
    middleware = [RateLimitMiddleware(per_ip, store=store)]
    app: Any
    worker = AsyncWorker() if asgi else Worker()
    if asgi:
        from falcon.asgi import App

        app = App(middleware=middleware)
    else:
        app = falcon.App(middleware=middleware)
    app.add_route("/", worker)
    app.add_route("/healthz", worker)
    return app


app = create_app()
