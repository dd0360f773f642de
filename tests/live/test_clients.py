"""Clients that people use obey what a refusal says: urllib3's `Retry` and curl's `--retry`, against a real gunicorn.

They wait for `Retry-After` themselves, which is what is under test. All wait at the same time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import urllib3

from tests.live.harness import Serve, Server, missing, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc and /dev/shm")

# One in two seconds for each X-Client: whoever has had it waits for two.
APP = """\
from shmlimit import Guard
from shmlimit.adapters.wsgi import RateLimit
from shmlimit.keys import header
from shmlimit.stores.sqlite import SqliteStore


def inner(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "6")])
    return [b"passed"]


key = header("x-client")
file = SqliteStore("missing/limits.sqlite3")
limited = {
    "/draft": RateLimit(inner, Guard("test", "1/2s"), key=key),
    "/draft-6": RateLimit(inner, Guard("test", "1/2s", headers="draft-6"), key=key),
    "/legacy": RateLimit(inner, Guard("test", "1/2s", headers="legacy"), key=key),
    "/problem": RateLimit(inner, Guard("test", "1/2s", problem=True), key=key),
    "/file": RateLimit(inner, Guard("test", "1/2s"), key=key, store=file),
    "/file-problem": RateLimit(inner, Guard("test", "1/2s", problem=True), key=key, store=file),
    "/healthz": inner,
}


def app(environ, start_response):
    return limited[environ["PATH_INFO"]](environ, start_response)
"""

Ask = Callable[[Server, str, str], list[int]]


def by_urllib3(server: Server, path: str, client: str) -> list[int]:
    """The statuses that urllib3 saw on its way to the last response."""
    retry = urllib3.Retry(total=3, status_forcelist=[429, 503], respect_retry_after_header=True)
    with urllib3.PoolManager(retries=retry) as pool:
        response = pool.request("GET", f"http://127.0.0.1:{server.port}{path}", headers={"X-Client": client})
    assert response.retries is not None
    return [one.status for one in response.retries.history if one.status is not None] + [response.status]


def by_curl(server: Server, path: str, client: str) -> list[int]:
    """The statuses that curl saw."""
    program = shutil.which("curl") or missing("curl isn't installed: apt-get install curl")
    command = [program, "--retry", "3", "--include", "--no-progress-meter", "-H", f"X-Client: {client}"]
    url = f"http://127.0.0.1:{server.port}{path}"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=60, check=True)
    return [int(status) for status in re.findall(r"HTTP/1\.1 (\d{3})", done.stdout)]


CLIENTS: dict[str, Ask] = {"urllib3": by_urllib3, "curl": by_curl}


def everybody(server: Server, paths: list[str]) -> dict[tuple[str, str], list[int]]:
    """What each client sees at each path, all at once."""
    cases = [(client, path) for client in CLIENTS for path in paths]
    with ThreadPoolExecutor(len(cases)) as pool:
        statuses = pool.map(lambda case: CLIENTS[case[0]](server, case[1], " ".join(case)), cases)
        return dict(zip(cases, statuses, strict=True))


def test_a_client_that_waits_is_served(serve: Serve) -> None:
    """Whoever waits for the Retry-After of a 429 gets its 200 at the first retry, whatever the dialect."""
    paths = ["/draft", "/draft-6", "/legacy", "/problem"]
    server = serve(code=APP, workers=2)
    for path in paths:
        for client in CLIENTS:
            assert server.get(path, {"X-Client": f"{client} {path}"}).status == 200
    seen = everybody(server, paths)
    assert seen == {case: [429, 200] for case in seen}
    assert len(seen) == 8


def test_a_client_waits_for_the_store(serve: Serve, tmp_path: Path) -> None:
    """A store that can't answer is a 503 with Retry-After, which clients obey too: they pass when it is back."""
    paths = ["/file", "/file-problem"]
    server = serve("--access-logfile", "-", "--access-logformat", "%(m)s %(U)s %(s)s", code=APP, workers=1)

    def refused() -> bool:
        return sum(server.log.count(f"GET {path} 503") for path in paths) >= len(paths) * len(CLIENTS)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(everybody, server, paths)
        until(refused, "every client was refused")
        (tmp_path / "missing").mkdir()
        seen: dict[Any, list[int]] = asked.result()
    assert len(seen) == 4
    for statuses in seen.values():
        assert (set(statuses[:-1]), statuses[-1]) == ({503}, 200)
    assert "the store failed" in server.log
    assert "the store answers again" in server.log
