"""Real gunicorns: the count is exact over all workers, and goes on through all that happens to a server."""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmlimit.table import layout
from tests.live.harness import (
    ROOT,
    SHM,
    Answer,
    Count,
    Serve,
    app_with,
    kill,
    mapped_segments,
    processes,
    segment,
    until,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc and /dev/shm")

PER_TOKEN_S = 6  # the demo allows 10 a minute
ASGI = {"app": "shmlimit.demo:create_app(asgi=True)"}
TABLE = "from shmlimit.adapters.gunicorn import install\n\ninstall(globals(), name={!r}, slots={})\n"


def segments() -> set[str]:
    return {path.name for path in SHM.iterdir()}


def remove(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shmlimit", "rm", name]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# -- Exact over all workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ((), {}),
        (("--preload",), {}),
        (("-k", "gthread", "--threads", "4", "--keep-alive", "30"), {}),
        (("-k", "asgi", "--keep-alive", "30"), ASGI),
    ],
    ids=["sync", "preload", "gthread", "asgi"],
)
def test_forty_requests_at_once(serve: Serve, options: tuple[str, ...], served: dict[str, Any]) -> None:
    """Of 40 requests at once to 4 workers 10 are allowed, by all four, from r=9 to r=0; the others are told to wait."""
    server = serve(*options, **served)
    burst = server.burst(40, connections=8)
    assert len(burst.allowed) + len(burst.denied) == 40
    refilled = int(burst.elapsed_s / PER_TOKEN_S)  # 0, unless the machine is overloaded
    assert 10 <= len(burst.allowed) <= 10 + refilled
    assert {answer.worker for answer in burst.allowed} == set(server.workers())
    assert len(server.workers()) == 4
    if not refilled:
        assert burst.counts_down(10)
        for line in burst.lines:
            assert [left(answer) for answer in line] == sorted((left(answer) for answer in line), reverse=True)
    for answer in burst.answers:
        assert answer.fields["ratelimit-policy"] == '"per-ip";q=10;w=60'
    for answer in burst.denied:
        assert left(answer) == 0
        assert 1 <= answer.retry_after <= PER_TOKEN_S
        assert answer.fields["cache-control"] == "no-store"


def left(answer: Answer) -> int:
    assert answer.remaining is not None
    return answer.remaining


def test_retry_after_keeps_its_promise(serve: Serve) -> None:
    """Who waits for Retry-After is served: of 8 that come then, at once, exactly one."""
    server = serve()
    started = time.monotonic()
    first = server.burst(40, connections=8)
    last = until(lambda: (answer := server.get()).status == 429 and answer, "the quota is spent")
    time.sleep(last.retry_after)
    second = server.burst(8, connections=8)
    passed = int((time.monotonic() - started) / PER_TOKEN_S)  # 1, unless the machine is overloaded
    assert second.allowed
    assert len(first.allowed) + len(second.allowed) <= 10 + passed
    assert len(second.allowed) + len(second.denied) == 8


# -- The count survives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--preload",)], ids=["sync", "preload"])
def test_the_count_outlives_workers(serve: Serve, options: tuple[str, ...]) -> None:
    """Workers that are killed, reloaded, added and taken away share one count: 60 of 60 are allowed, in order."""
    count = Count(60)
    server = serve(*options, code=app_with(60), workers=3)
    count.everybody(server)
    for worker in server.workers():
        kill(worker, signal.SIGKILL)
        server.wait_ready(3, without=[worker])
        count.everybody(server)
    old = server.workers()
    server.signal(signal.SIGHUP)
    for _ in range(5):  # some of them while the old workers give way to the new
        count.take(server.get())
    server.wait_ready(3, without=old)
    count.everybody(server)
    server.signal(signal.SIGTTIN)
    server.wait_ready(4)
    count.everybody(server)
    server.signal(signal.SIGTTOU)
    server.wait_ready(3)
    count.everybody(server)
    count.the_rest(server)


def test_the_count_outlives_servers(serve: Serve, name: str) -> None:
    """A master that is killed, workers that are recycled, a stop and a new start: one count, 60 of 60, in order."""
    count = Count(60)
    code = app_with(60)

    server = serve(code=code, workers=2)
    count.everybody(server)
    kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    count.take(server.get())  # from an orphan: they serve until they see that the master is gone
    server.kill_all()
    assert segment(name).exists()

    server = serve("--max-requests", "3", code=code, workers=2, port=server.port)
    answers = [server.get() for _ in range(12)]
    for answer in answers:
        count.take(answer)
    assert len({answer.worker for answer in answers}) >= 4
    server.stop()
    assert segment(name).exists()

    server = serve(code=code, workers=2, port=server.port)
    count.everybody(server)
    count.the_rest(server)


def test_the_count_outlives_an_upgrade(serve: Serve, tmp_path: Path) -> None:
    """USR2: the workers of both masters share one count, and so do the new ones when the old master has gone."""
    # NOTE: `python -m gunicorn` can't do this (27.0): it executes gunicorn/__main__.py, and the http/ beside that hides
    # Python's own (gunicorn issue 3281). This is the script that pip installs.
    script = tmp_path / "script.py"
    script.write_text("import sys\n\nfrom gunicorn.app.wsgiapp import run\n\nsys.exit(run())\n")
    count = Count(60)
    server = serve(code=app_with(60), workers=2, launcher=(sys.executable, str(script)))
    count.everybody(server)
    old = [*server.masters(), *server.workers()]
    server.signal(signal.SIGUSR2)
    until(lambda: len(server.masters()) == 2, "there is a second master")
    server.wait_ready(4)
    count.everybody(server)
    kill(old[0], signal.SIGTERM)
    server.wait_gone(old)
    workers = server.wait_ready(2)
    count.everybody(server)
    server.signal(signal.SIGHUP)
    server.wait_ready(2, without=workers)
    count.everybody(server)
    count.the_rest(server)


def test_a_second_server_by_mistake(serve: Serve, name: str) -> None:
    """A server that finds the port taken ends without touching the table, and the first one never notices."""
    count = Count(60)
    code = app_with(60)
    server = serve(code=code, workers=2)
    count.everybody(server)
    before = segment(name).stat()
    second = serve(code=code, workers=2, port=server.port, ready=False)
    until(lambda: "in use" in second.log or second.process.poll() is not None, "the second server finds the port taken")
    count.everybody(server)
    assert second.wait_exit() == 1
    assert "Booting worker" not in second.log
    assert os.path.samestat(segment(name).stat(), before)
    old = server.workers()
    server.signal(signal.SIGHUP)
    server.wait_ready(2, without=old)
    count.everybody(server)
    count.the_rest(server)


@pytest.fixture
def other_name(name: str) -> Iterator[str]:
    yield f"{name}-b"
    segment(f"{name}-b").unlink(missing_ok=True)


def test_a_change_of_the_table_at_a_reload(serve: Serve, name: str, other_name: str, tmp_path: Path) -> None:
    """HUP with another size, then with another name, changes nothing but the log, and the count goes on."""
    count = Count(60)
    server = serve(code=app_with(60), config=TABLE.format(name, 1024), workers=2)
    count.everybody(server)
    before = segment(name).stat()
    for new_name, slots in [(name, 2048), (other_name, 1024)]:
        old = server.workers()
        (tmp_path / "conf.py").write_text(TABLE.format(new_name, slots))
        server.signal(signal.SIGHUP)
        server.wait_ready(2, without=old)
        count.everybody(server)
        told = f"the table stays {name!r} with 1024 slots; restart the server to use {new_name!r} with {slots} slots"
        assert server.log.count(told) == 1
    assert not segment(other_name).exists()
    after = segment(name).stat()
    assert os.path.samestat(after, before)
    assert after.st_size == before.st_size
    count.the_rest(server)


# -- One segment ---------------------------------------------------------------------------------------------------


def test_one_segment_for_all(serve: Serve, name: str) -> None:
    """A server is one segment, which all its processes have mapped; it stays when the server ends, until `rm`."""
    before = segments()

    def new() -> set[str]:
        others = set(processes()).difference(server.members())
        theirs = {segment for pid in others for segment, _ in mapped_segments(pid)}
        return segments() - before - theirs

    server = serve()
    # Polled, since other programs come and go: what this server made beside its table would stay.
    until(lambda: new() == {name}, "the server's one segment")
    pids = server.members()
    assert len(pids) == 5
    assert {frozenset(mapped_segments(pid)) for pid in pids} == {frozenset({(name, segment(name).stat().st_ino)})}
    server.stop()
    until(lambda: new() == {name}, "the segment alone is still there")
    done = remove(name)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"removed {name}\n", "")
    until(lambda: not new(), "nothing is left")


# -- What can't work is told ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "served"),
    [
        ("", (), {}),
        ("", ("-k", "asgi"), ASGI),
        (TABLE + "\ndef when_ready(server):\n    pass\n", (), {}),
    ],
    ids=["no hook", "no hook, asgi", "hook replaced"],
)
def test_without_the_hook_nobody_is_served(
    serve: Serve, name: str, config: str, options: tuple[str, ...], served: dict[str, Any]
) -> None:
    """Workers that share no table answer 500 and log the line to add; none of them limits for itself."""
    server = serve(*options, config=config.format(name, 1024), workers=2, **served)
    for worker in server.workers() * 2:
        answer = server.ask(worker)
        assert (answer.status, answer.remaining) == (500, None)
        assert "retry-after" not in answer.fields
    assert "from shmlimit.adapters.gunicorn import install" in server.log
    assert "install(globals())" in server.log
    assert not segment(name).exists()


@pytest.mark.parametrize("squatter", ["mode", "owner"])
def test_a_table_that_is_not_to_be_trusted(serve: Serve, name: str, squatter: str) -> None:
    """A server that finds its table's name taken by a segment that others may write ends at its start and says so."""
    path = segment(name)
    path.write_bytes(bytes(8192))
    try:
        if squatter == "mode":
            path.chmod(0o666)
            found = "mode 0666"
        elif os.geteuid() == 0:
            path.chmod(0o600)
            os.chown(path, pwd.getpwnam("nobody").pw_uid, 0)
            found = f"a segment of user {pwd.getpwnam('nobody').pw_uid}"
        else:
            pytest.skip("only root can make a segment of another user")
        server = serve(ready=False)
        assert server.wait_exit() == 1
        assert f"shmlimit: can't open the table {name!r}: shared memory {name!r} is not to be trusted" in server.log
        assert found in server.log
        assert "Booting worker" not in server.log
        assert not server.listens()
        assert path.read_bytes() == bytes(8192)
    finally:
        path.unlink()


PROXY_HINT = 'client_ip(trusted="private", header="x-forwarded-for")'


def test_behind_a_proxy_that_nobody_told_of(serve: Serve) -> None:
    """Where all clients seem to be the proxy, each worker says so once, with the line that puts it right."""
    server = serve(workers=2)
    for worker in server.workers() * 3:
        server.ask(worker, fields={"X-Forwarded-For": "203.0.113.7"})
    assert server.log.count(PROXY_HINT) == 2


def test_behind_a_proxy(serve: Serve) -> None:
    """With that line each client has a count of its own, whatever it writes in front of what the proxy adds."""
    server = serve(code=app_with(3, key=PROXY_HINT), workers=2)

    def get(forwarded: str) -> tuple[int, int | None]:
        answer = server.get(fields={"X-Forwarded-For": forwarded})
        return answer.status, answer.remaining

    assert [get("203.0.113.7") for _ in range(4)] == [(200, 2), (200, 1), (200, 0), (429, 0)]
    assert get("203.0.113.8") == (200, 2)
    for forged in ("198.51.100.1", "203.0.113.8", '"', "127.0.0.1", "unknown"):
        assert get(f"{forged}, 203.0.113.7") == (429, 0)
    assert get("203.0.113.8") == (200, 1)
    assert PROXY_HINT not in server.log


# -- The configuration ---------------------------------------------------------------------------------------------


def test_a_hook_of_the_user_runs_too(serve: Serve, name: str) -> None:
    """A when_ready above the call of install runs when the table is there; checking the file makes no table."""
    config = (
        "import os\n\n"
        "def when_ready(server):\n"
        f"    server.log.info('the table is there: %s', os.path.exists('/dev/shm/{name}'))\n\n"
        + TABLE.format(name, 1024)
    )
    code = app_with(60)
    checked = serve("--check-config", config=config, code=code, ready=False)
    assert checked.wait_exit() == 0
    assert checked.log == ""
    assert not segment(name).exists()
    server = serve(config=config, code=code, workers=2)
    assert server.log.count("the table is there: True") == 1
    assert segment(name).stat().st_size == layout.segment_bytes(1024)
    Count(60).everybody(server)


def test_variables_of_the_demo(serve: Serve, name: str) -> None:
    """GUNICORN_CMD_ARGS goes over the repository's configuration, SHMLIMIT_NAME and SHMLIMIT_SLOTS make the table."""
    server = serve(workers=3, environ={"SHMLIMIT_SLOTS": "4096"})  # the harness gives port and workers in that variable
    assert len(server.workers()) == 3
    assert f"Listening at: http://127.0.0.1:{server.port} " in server.log
    assert {server.ask(worker).status for worker in server.workers()} == {200}
    assert segment(name).stat().st_size == layout.segment_bytes(4096)


@pytest.mark.parametrize(
    ("slots", "told"), [("many", "SHMLIMIT_SLOTS must be a number of slots"), ("0", "slots must be")]
)
def test_a_bad_size_of_the_demo(serve: Serve, name: str, slots: str, told: str) -> None:
    """A size that can't be ends the server at its start, with a line that says why and no traceback."""
    server = serve(environ={"SHMLIMIT_SLOTS": slots}, ready=False)
    assert server.wait_exit() == 1
    assert told in server.log
    assert "Traceback" not in server.log
    assert "Booting worker" not in server.log
    assert not segment(name).exists()


# -- The README ----------------------------------------------------------------------------------------------------


def test_service_of_the_readme(serve: Serve, name: str) -> None:
    """The two files of "Use it in your service" make a service that limits: ten pass, whichever worker answers."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```", readme, re.DOTALL))
    config = files["gunicorn_conf.py"].replace("install(globals())", f"install(globals(), name={name!r})")
    server = serve(config=config, code=files["service.py"], ready=False)
    until(server.listens, "the service listens")
    until(lambda: len(server.workers()) == 4, "four workers")
    statuses = [server.get("/").status for _ in range(12)]
    assert statuses == [200] * 10 + [429] * 2
    assert segments() >= {name}
