"""What a limit adds to a request, in process: falcon's middleware and the wrappers, beside Flask-Limiter and slowapi.

    python bench/middleware.py [rounds]

Each application is called directly with an environ or a scope, and answers five bytes (Flask and FastAPI: from a view).
It runs bare and limited, by turns; what a limit costs is the difference within a round. Ours is one guard by client
address with the fields of the draft, in a shared table. Flask-Limiter (`default_limits`) and slowapi (its decorator, as
its documentation begins, and its ASGI middleware) count in a dict of this process, by client address, without fields
as they come and with `headers_enabled=True`. Nobody is refused.

Each has a process of its own, as it would have in service: CPython fits code that runs often to the types that it has
seen, and one process with all of them would show none of them as it is. What is counted is its processor time, so that
others on the machine matter less. The rounds are spread over several starts of Python: hashes and memory fall
differently in each, which is half a microsecond either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import falcon
import falcon.asgi
import flask_limiter
import flask_limiter.util
import slowapi
import slowapi.middleware
import slowapi.util
from _hello import BODY, PLENTY, AsyncHello, Hello, of_falcon
from _rounds import Contender, interleave, machine, publish, ratios, spread
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from flask import Flask
from werkzeug.test import create_environ

from shmlimit import Guard, SharedTable
from shmlimit.adapters import asgi, wsgi
from shmlimit.adapters.falcon import RateLimitMiddleware

N = 1_000
STARTS = 6
BAR_US, BAR_RATIO = 6.0, 0.2

ENVIRON = create_environ("/", "http://localhost:8000", environ_overrides={"REMOTE_ADDR": "203.0.113.7"})
HEADERS = [(b"host", b"localhost:8000"), (b"user-agent", b"bench"), (b"accept", b"*/*")]
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.4"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "headers": HEADERS,
    "client": ("203.0.113.7", 50_000),
    "server": ("localhost", 8000),
}


def over_wsgi(app: Any) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in repeat(None, n):
            body = app(dict(ENVIRON), _start_response)
            for _part in body:
                pass
            if hasattr(body, "close"):
                body.close()

    _check(run, _statuses)
    return run


def over_asgi(app: Any) -> Callable[[int], None]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            _statuses[0] = message["status"]

    async def requests(n: int) -> None:
        for _ in repeat(None, n):
            await app(dict(SCOPE), receive, send)

    def run(n: int) -> None:
        asyncio.run(requests(n))

    _check(run, _statuses)
    return run


_statuses = [0]


def _start_response(line: str, _headers: list[tuple[str, str]], _exc_info: object = None) -> None:
    _statuses[0] = int(line[:3])


def _check(run: Callable[[int], None], statuses: list[int]) -> None:
    run(1)
    if statuses[0] != 200:
        raise RuntimeError(f"an application answered {statuses[0]}")


# -- The applications ------------------------------------------------------------------------------------------------


def bare_wsgi(_environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"hello"]


async def bare_asgi(_scope: Any, _receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


def of_flask() -> Flask:
    app = Flask("bench")
    app.add_url_rule("/", "hello", lambda: BODY)
    return app


def with_flask_limiter(**options: Any) -> Flask:
    app = of_flask()
    flask_limiter.Limiter(
        flask_limiter.util.get_remote_address,
        app=app,
        default_limits=["1000000000 per second"],
        storage_uri="memory://",
        **options,
    )
    return app


def of_fastapi(limiter: slowapi.Limiter | None = None) -> FastAPI:
    async def hello(request: Request) -> PlainTextResponse:  # noqa: ARG001 - slowapi looks for it
        return PlainTextResponse(BODY)

    app = FastAPI()
    app.get("/")(hello if limiter is None else limiter.limit("1000000000/second")(hello))
    app.state.limiter = limiter
    return app


def with_slowapi_middleware(**options: Any) -> FastAPI:
    app = of_fastapi()
    app.state.limiter = slowapi.Limiter(
        slowapi.util.get_remote_address, default_limits=["1000000000/second"], **options
    )
    app.add_middleware(slowapi.middleware.SlowAPIASGIMiddleware)
    return app


def with_slowapi_decorator(**options: Any) -> FastAPI:
    return of_fastapi(slowapi.Limiter(slowapi.util.get_remote_address, **options))


# -- The rounds ------------------------------------------------------------------------------------------------------

FALCON, OF_FLASK, OF_FASTAPI = "falcon, `RateLimitMiddleware`", "Flask, `wsgi.RateLimit`", "FastAPI, `asgi.RateLimit`"
THEIRS = {
    "Flask, Flask-Limiter": "Flask",
    "Flask, Flask-Limiter with fields": "Flask",
    "FastAPI, slowapi, decorator": "FastAPI",
    "FastAPI, slowapi, decorator with fields": "FastAPI",
    "FastAPI, slowapi, ASGI middleware": "FastAPI",
    "FastAPI, slowapi, ASGI middleware with fields": "FastAPI",
}
OURS = {
    FALCON: "falcon",
    "falcon ASGI, `RateLimitMiddleware`": "falcon ASGI",
    "WSGI application, `wsgi.RateLimit`": "WSGI application",
    "ASGI application, `asgi.RateLimit`": "ASGI application",
    OF_FLASK: "Flask",
    OF_FASTAPI: "FastAPI",
}


def applications(table: SharedTable) -> dict[str, Callable[[], Callable[[int], None]]]:
    """What makes each of them: in the process where it is to run."""
    guard = Guard("per-ip", PLENTY)

    def middleware() -> RateLimitMiddleware:
        return RateLimitMiddleware(guard, store=table)

    def wrapped_flask() -> Flask:
        app = of_flask()
        app.wsgi_app = wsgi.RateLimit(app.wsgi_app, guard, store=table)  # type: ignore[method-assign]
        return app

    def wrapped_fastapi() -> FastAPI:
        app = of_fastapi()
        app.add_middleware(asgi.RateLimit, guard, store=table)
        return app

    theirs = (
        lambda: over_wsgi(with_flask_limiter()),
        lambda: over_wsgi(with_flask_limiter(headers_enabled=True)),
        lambda: over_asgi(with_slowapi_decorator()),
        lambda: over_asgi(with_slowapi_decorator(headers_enabled=True)),
        lambda: over_asgi(with_slowapi_middleware()),
        lambda: over_asgi(with_slowapi_middleware(headers_enabled=True)),
    )
    ours = (
        lambda: over_wsgi(of_falcon(falcon.App, Hello(), middleware())),
        lambda: over_asgi(of_falcon(falcon.asgi.App, AsyncHello(), middleware())),
        lambda: over_wsgi(wsgi.RateLimit(bare_wsgi, guard, store=table)),
        lambda: over_asgi(asgi.RateLimit(bare_asgi, guard, store=table)),
        lambda: over_wsgi(wrapped_flask()),
        lambda: over_asgi(wrapped_fastapi()),
    )
    bare = {
        "falcon": lambda: over_wsgi(of_falcon(falcon.App, Hello())),
        "falcon ASGI": lambda: over_asgi(of_falcon(falcon.asgi.App, AsyncHello())),
        "WSGI application": lambda: over_wsgi(bare_wsgi),
        "ASGI application": lambda: over_asgi(bare_asgi),
        "Flask": lambda: over_wsgi(of_flask()),
        "FastAPI": lambda: over_asgi(of_fastapi()),
    }
    return {**bare, **dict(zip(OURS, ours, strict=True)), **dict(zip(THEIRS, theirs, strict=True))}


@contextlib.contextmanager
def apart(make: Callable[[], Callable[[int], None]]) -> Iterator[Callable[[int], int]]:
    """What `make` gives, in a forked process; it says how many nanoseconds of the processor a run took."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def serve() -> None:
        run = make()
        gc.disable()
        there.send(None)
        while n := there.recv():
            begin = time.process_time_ns()
            run(n)
            there.send(time.process_time_ns() - begin)

    process = context.Process(target=serve, daemon=True)
    process.start()
    there.close()  # so that a process that has failed is the end of the file here
    here.recv()

    def run(n: int) -> int:
        here.send(n)
        took: int = here.recv()
        return took

    try:
        yield run
    finally:
        here.send(0)
        process.join()


def start(rounds: int) -> None:
    """Some of the rounds, in this process: prints their figures."""
    with SharedTable.create(f"shmlimit-bench-{os.getpid()}") as table, contextlib.ExitStack() as stack:
        stack.callback(table.unlink)
        contenders = [Contender(name, stack.enter_context(apart(make))) for name, make in applications(table).items()]
        json.dump(interleave(contenders, rounds=rounds, n=N), sys.stdout)


def main(rounds: int) -> None:
    figures: dict[str, list[float]] = {}
    for _ in range(STARTS):
        command = [sys.executable, __file__, "start", str(-(-rounds // STARTS))]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        for name, values in json.loads(done.stdout).items():
            figures.setdefault(name, []).extend(values)
    taken = len(figures["falcon"])
    added = {
        name: [(limited - bare) / 1000 for limited, bare in zip(figures[name], figures[base], strict=True)]
        for name, base in {**OURS, **THEIRS}.items()
    }
    packages = ("shmlimit", "falcon", "flask", "flask-limiter", "fastapi", "slowapi", "limits")
    lines = [
        "# What a limit adds to a request",
        "",
        f"{machine(*packages)}; {taken} interleaved rounds of {N:,} in {STARTS} starts.",
        "µs of processor time a request, in process: median (middle half). Added is limited less bare, within a round.",
        "",
        "| | bare | added |",
        "|---|---:|---:|",
    ]
    for name, base in {**OURS, **THEIRS}.items():
        lines.append(f"| {name} | {_us(figures[base])} | {spread(added[name], 2)} |")
    lines += [
        "",
        f"The bar for falcon's middleware is {BAR_US:.0f} µs added.",
        "",
        "Ours ÷ theirs, of what is added, round by round; the bar is a fifth.",
        "",
        "| theirs | falcon's middleware | the wrapper round the same framework |",
        "|---|---:|---:|",
    ]
    for theirs, base in THEIRS.items():
        same = OF_FLASK if base == "Flask" else OF_FASTAPI
        shares = [spread(ratios(added, ours, theirs), 2) for ours in (FALCON, same)]
        lines.append(f"| {theirs} | {shares[0]} | {shares[1]} |")
    publish("middleware.md", "\n".join(lines) + "\n")
    print(f"falcon: {statistics.median(added[FALCON]):.2f} µs added, bar {BAR_US:.0f}")


def _us(values: list[float]) -> str:
    return spread([value / 1000 for value in values], 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        start(int(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
