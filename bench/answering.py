"""What the HTTP side adds to a decision: whose request it is, and what the response says.

    python bench/answering.py [rounds]

The address: one trusted proxy, which wrote X-Forwarded-For, from a WSGI environ and from an ASGI scope of ten headers.
Beside it what uvicorn's and werkzeug's middlewares do for the same request (they take over text as it stands, and
werkzeug's reads other headers as well). The fields: both of the draft for one guard and for two, beside a
structured-field library that writes the same values.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from itertools import repeat
from typing import Any

import http_sf
from _rounds import Contender, interleave, machine, publish, spread
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix

from shmlimit import Guard, fields, keys
from shmlimit.policies.base import Decision

N = 20_000
PROXY, CLIENT, CLIENT6 = "127.0.0.1", "203.0.113.7", "2001:db8:85a3:1::7"
ENVIRON = {"REQUEST_METHOD": "GET", "REMOTE_ADDR": PROXY, "HTTP_HOST": "example.com", "HTTP_X_FORWARDED_FOR": CLIENT}
HEADERS = [(b"x-header-%d" % number, b"value") for number in range(9)] + [(b"x-forwarded-for", CLIENT.encode())]
SCOPE = {"type": "http", "client": (PROXY, 50_000), "headers": HEADERS}

OK = Decision(True, 100, 42, 34_800_000, 0, 600_000)


def repeated(function: Callable[..., Any], *arguments: Any) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in repeat(None, n):
            function(*arguments)

    return run


def of_uvicorn(n: int) -> None:
    async def app(*_: object) -> None: ...

    middleware = ProxyHeadersMiddleware(app, [PROXY])

    async def run() -> None:
        for _ in repeat(None, n):
            await middleware(dict(SCOPE), None, None)  # it writes into the scope

    asyncio.run(run())


def of_werkzeug(n: int) -> None:
    fix = ProxyFix(lambda *_: (), x_for=1)
    for _ in repeat(None, n):
        fix(dict(ENVIRON), None)


def of_library() -> None:
    http_sf.ser([("per-ip", {"q": 100, "w": 60})])
    http_sf.ser([("per-ip", {"r": 42, "t": 1})])


def contenders() -> list[Contender]:
    key = keys.client_ip(trusted=[PROXY], header="x-forwarded-for")
    guards = Guard("per-ip", "100/minute"), Guard("hourly", "1000/hour")
    return [
        Contender("`client_ip`, WSGI", repeated(key, ENVIRON)),
        Contender("`client_ip`, WSGI, an IPv6 client", repeated(key, {**ENVIRON, "HTTP_X_FORWARDED_FOR": CLIENT6})),
        Contender("`client_ip`, ASGI", repeated(key, SCOPE)),
        Contender("`client_ip()`, no proxy, WSGI", repeated(keys.client_ip(), {**ENVIRON, "REMOTE_ADDR": CLIENT})),
        Contender("uvicorn's middleware, ASGI", of_uvicorn),
        Contender("werkzeug's middleware, WSGI", of_werkzeug),
        Contender("both draft fields, one guard", repeated(fields.response_fields, [(guards[0], OK)], 0)),
        Contender("both draft fields, two guards", repeated(fields.response_fields, [(g, OK) for g in guards], 0)),
        Contender("`http-sf`, the same two values, one guard", repeated(of_library)),
    ]


def main(rounds: int) -> None:
    figures = interleave(contenders(), rounds=rounds, n=N)
    lines = [
        "# The client's address, and the fields",
        "",
        f"{machine('shmlimit', 'uvicorn', 'werkzeug', 'http-sf')}; {rounds} interleaved rounds of {N:,}.",
        "Median (middle half).",
        "",
        "| | µs |",
        "|---|---:|",
    ]
    lines += [f"| {name} | {spread([value / 1000 for value in values], 2)} |" for name, values in figures.items()]
    publish("answering.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
