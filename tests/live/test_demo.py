"""The demo's routes with several limits, under real gunicorns: exact over four workers, table and file together."""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live.harness import Answer, Serve, Server

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc and /dev/shm")

ASGI = {"app": "shmlimit.demo:create_app(asgi=True)"}


def flood(server: Server, path: str, n: int, fields: dict[str, str] | None = None) -> list[Answer]:
    """`n` requests, 8 at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda _: server.get(path, fields), range(n)))


def left(answer: Answer, guard: str) -> int:
    """What `RateLimit` says is left of a guard."""
    found = re.search(rf'"{guard}";r=(\d+)', answer.fields["ratelimit"])
    assert found is not None
    return int(found[1])


def passed(answers: list[Answer]) -> list[Answer]:
    assert {answer.status for answer in answers} <= {200, 429}
    return [answer for answer in answers if answer.status == 200]


@pytest.mark.parametrize(
    ("options", "served"),
    [((), {}), (("--preload",), {}), (("-k", "asgi"), ASGI)],
    ids=["sync", "preload", "asgi"],
)
def test_reports_are_five_a_minute(
    serve: Serve, tmp_path: Path, options: tuple[str, ...], served: dict[str, Any]
) -> None:
    """Of 60 requests to /reports over four workers exactly 5 pass, also after a restart; `address` lost just those."""
    file = tmp_path / "limits.sqlite3"
    server = serve(*options, environ={"SHMLIMIT_DB": str(file)}, **served)
    answers = flood(server, "/reports", 60)
    assert len(passed(answers)) == 5
    assert file.exists()
    assert sorted(left(answer, "reports") for answer in passed(answers)) == [0, 1, 2, 3, 4]
    for answer in answers:
        assert answer.fields["ratelimit-policy"] == '"reports";q=5;w=60, "address";q=600;w=60'
        if answer.status == 429:
            assert 1 <= answer.retry_after <= 60
            # A tenth of a second refills one; what was refused took none, or 60 would be missing.
            assert left(answer, "address") >= 600 - 5
    assert len({answer.worker for answer in passed(answers)} - {None}) >= 1
    server.stop()
    again = serve(*options, port=server.port, environ={"SHMLIMIT_DB": str(file)}, **served)
    assert not passed(flood(again, "/reports", 8))
    other = again.get("/reports", {"X-Api-Key": "another"})
    assert (other.status, left(other, "reports")) == (200, 4)


def test_search_refused_by_burst_spends_nothing_of_the_hour(serve: Serve) -> None:
    """After floods that `burst` refused, `hourly` has lost exactly what passed, for each key for itself."""
    server = serve()
    began = time.monotonic()
    for key in ("one", "two"):
        fields = {"X-Api-Key": key}
        answers = flood(server, "/search", 60, fields)
        n = len(passed(answers))
        assert 5 <= n < 60
        assert answers[0].fields["ratelimit-policy"] == ('"burst";q=5;w=1, "hourly";q=100;w=3600, "address";q=600;w=60')
        lowest = min(left(answer, "hourly") for answer in answers)
        refilled = int((time.monotonic() - began) / 36) + 1
        assert 100 - n <= lowest <= 100 - n + refilled
    assert sum(answer.status == 429 for answer in answers) > 0
    for answer in answers:
        if answer.status == 429:
            assert left(answer, "burst") == 0


def test_healthz_is_not_limited(serve: Serve) -> None:
    """No fields, whatever else is spent."""
    server = serve()
    answers = flood(server, "/healthz", 40)
    assert {answer.status for answer in answers} == {200}
    assert not any("ratelimit" in answer.fields for answer in answers)


def test_unwritable_file_is_a_503(serve: Serve, tmp_path: Path) -> None:
    """Where the file can't be opened, what needs it is answered with 503 and Retry-After; the rest goes on."""
    server = serve(environ={"SHMLIMIT_DB": str(tmp_path / "missing" / "limits.sqlite3")})
    answer = server.get("/reports")
    assert (answer.status, "retry-after" in answer.fields) == (503, True)
    assert "missing/limits.sqlite3" in server.log
    assert server.get("/").status == 200
