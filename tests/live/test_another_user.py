"""Real gunicorns that root starts, with workers of another user."""

from __future__ import annotations

import grp
import importlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.harness import Count, Serve, Server, app_with, segment

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc and /dev/shm")


@pytest.fixture
def open_place() -> Iterator[tuple[Path, str]]:
    """A directory in which the user nobody can import all that a worker needs, and a Python that nobody can run.

    Home directories and pytest's own are closed to others, and the repository, the virtual environment and its Python
    often lie in one: then the packages are taken from a copy, and the Python is one of the system's.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can start workers of another user")
    with tempfile.TemporaryDirectory(prefix="shmlimit-live-") as text:
        directory = Path(text)
        for package in ("falcon", "gunicorn", "packaging", "shmlimit"):
            source = Path(importlib.import_module(package).__path__[0])
            shutil.copytree(source, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (directory, *directory.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        python = python_for_nobody(directory)
        if python is None:
            message = f"the user nobody can run no Python >= 3.10 here (tried {', '.join(pythons())})"
            pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
        yield directory, python


def pythons() -> list[str]:
    versioned = f"python3.{sys.version_info.minor}"
    places = [Path(place, name) for name in (versioned, "python3") for place in ("/usr/local/bin", "/usr/bin")]
    return [sys.executable, *(str(path) for path in places if path.exists())]


def python_for_nobody(directory: Path) -> str | None:
    code = (
        "import sys, gunicorn.app.wsgiapp, gunicorn.workers.sync, shmlimit.demo; sys.exit(sys.version_info < (3, 10))"
    )
    user = pwd.getpwnam("nobody")
    for python in pythons():
        try:
            done = subprocess.run(
                [python, "-c", code],
                cwd=directory,
                env={"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
                user=user.pw_uid,
                group=user.pw_gid,
                extra_groups=[],
                capture_output=True,
                timeout=60,
                check=False,
            )
        except PermissionError:
            continue
        if done.returncode == 0:
            return python
    return None


def owners(pid: int) -> set[tuple[int, ...]]:
    """The real, effective, saved and file system ids of user and group."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {tuple(map(int, line.split()[1:])) for line in lines if line.startswith(("Uid:", "Gid:"))}


def test_workers_of_another_user(open_place: tuple[Path, str], serve: Serve, name: str) -> None:
    """Workers that gave up root for nobody count exactly, after HUP and a restart too, in a table that is root's."""
    directory, python = open_place
    nobody = pwd.getpwnam("nobody")
    group = grp.getgrgid(nobody.pw_gid).gr_name
    count = Count(60)
    code = app_with(60)

    def start(**options: Any) -> Server:
        server = serve(
            *("--user", "nobody", "--group", group),
            code=code,
            workers=2,
            directory=directory,
            launcher=(python, "-m", "gunicorn"),
            environ={"PYTHONPATH": str(directory)},
            **options,
        )
        for worker in server.workers():
            assert owners(worker) == {(nobody.pw_uid,) * 4, (nobody.pw_gid,) * 4}
        (master,) = server.masters()
        assert owners(master) == {(0, 0, 0, 0)}
        count.everybody(server)
        return server

    server = start()
    old = server.workers()
    server.signal(signal.SIGHUP)
    server.wait_ready(2, without=old)
    count.everybody(server)
    server.stop()
    before = segment(name).stat()
    assert (before.st_uid, before.st_mode & 0o7777) == (0, 0o600)
    server = start(port=server.port)
    assert os.path.samestat(segment(name).stat(), before)
    count.the_rest(server)


def test_reports_for_workers_of_another_user(open_place: tuple[Path, str], serve: Serve) -> None:
    """As root with workers of nobody, the file is theirs: 5 of 20 requests to /reports pass, over two workers."""
    directory, python = open_place
    nobody = pwd.getpwnam("nobody")
    place = directory / "data"
    place.mkdir()
    os.chown(place, nobody.pw_uid, nobody.pw_gid)
    server = serve(
        *("--user", "nobody", "--group", grp.getgrgid(nobody.pw_gid).gr_name),
        workers=2,
        directory=directory,
        launcher=(python, "-m", "gunicorn"),
        environ={"PYTHONPATH": str(directory), "SHMLIMIT_DB": str(place / "limits.sqlite3")},
    )
    statuses = [server.ask(worker, "/reports").status for worker in server.workers() * 10]
    assert sorted(statuses) == [200] * 5 + [429] * 15
    assert (place / "limits.sqlite3").stat().st_uid == nobody.pw_uid
