"""Starlette: ten requests a minute for each client address, as middleware. Streams stay streams."""

import os

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from shmlimit import Guard
from shmlimit.adapters.asgi import RateLimit
from shmlimit.stores.memory import MemoryStore

PER_IP = Guard("per-ip", "10/minute", skip_paths=["/healthz"])


async def worker(_request):
    """Says which process answered."""
    return JSONResponse({"worker": os.getpid()})


async def count(_request):
    """A response of three parts."""

    async def parts():
        for number in range(3):
            yield f"{number}\n"

    return StreamingResponse(parts(), media_type="text/plain")


def create_app(store=None):
    """The application; `store=None` is the table of gunicorn_conf.py."""
    return Starlette(
        routes=[
            Route("/", worker),
            Route("/healthz", worker),
            Route("/count", count),
            Mount("/admin", routes=[Route("/users", worker)]),
        ],
        middleware=[Middleware(RateLimit, PER_IP, store=store)],
    )


def development():
    """The application for one process: it counts for itself."""
    return create_app(MemoryStore())


app = create_app()
