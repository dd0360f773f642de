"""A real nginx for benches and tests, on the loopback. All that it writes lies in one directory; it is gone after."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from _servers import PATIENCE_S, MissingServerError

# One process for the connections is enough, and headers of 8 KiB have to get through. The paths are below the prefix.
_CONFIG = """\
daemon off;
pid nginx.pid;
error_log stderr;
{user}
worker_processes 1;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    large_client_header_buffers 4 64k;
{http}
}}
"""


def program() -> str | None:
    """Where nginx is; Debian puts it where a user's PATH doesn't lead."""
    return shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin")))


@contextlib.contextmanager
def running(directory: Path, http: str, ports: Sequence[int]) -> Iterator[int]:
    """The pid of an nginx that serves `http`, the text inside of that block, and listens on all of `ports`."""
    command = program()
    if command is None:
        raise MissingServerError("nginx isn't installed: apt-get install nginx")
    # As root its workers would be nobody, who can't reach a socket in the directory of a test.
    user = f"user {pwd.getpwuid(0).pw_name};" if os.geteuid() == 0 else ""
    config = directory / "nginx.conf"
    config.write_text(_CONFIG.format(user=user, http=http))
    log = directory / "nginx.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [command, "-p", str(directory), "-c", str(config), "-e", "stderr"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )

    try:
        deadline = time.monotonic() + PATIENCE_S
        while not all(_accepts(port) for port in ports):
            assert process.poll() is None, f"nginx has ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, "nginx doesn't listen"
            time.sleep(0.02)
        yield process.pid
    finally:
        process.terminate()  # its workers end with it
        process.wait(PATIENCE_S)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def version() -> str:
    """Its name and version."""
    command = program()
    assert command is not None
    told = subprocess.run([command, "-v"], capture_output=True, text=True, check=True).stderr
    return told.rpartition(": ")[2].strip().replace("/", " ")
