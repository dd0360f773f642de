"""A real gunicorn for a test: started, asked, signalled, and gone afterwards, with every process that it made.

Nothing here waits for a time: `until` polls a condition. Which worker answers isn't left to chance either: `Server.ask`
stops the others (SIGSTOP) for as long as one worker accepts a connection.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias, TypeVar

import pytest

from tests.live.connection import PATIENCE_S, Answer, Connection, Fields

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str, patience_s: float = PATIENCE_S) -> Found:
    """The first true value of `condition`; an `AssertionError` that says `what` was waited for in vain."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.02)
    return found


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to clients: it stays free over a restart."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def app_with(limit: int, key: str = "client_ip()") -> str:
    """An application that allows `limit` requests and then no more for days, so that every answer is foreseeable."""
    return f"""\
import os

import falcon

from shmlimit import Guard, TokenBucket
from shmlimit.adapters.falcon import RateLimitMiddleware
from shmlimit.keys import client_ip


class Worker:
    def on_get(self, req, resp):
        resp.media = {{"worker": os.getpid()}}


guard = Guard("test", TokenBucket({limit}, 366 * 86_400), key={key}, skip_paths=["/healthz"])
app = falcon.App(middleware=[RateLimitMiddleware(guard)])
app.add_route("/", Worker())
app.add_route("/healthz", Worker())
"""


def segment(name: str) -> Path:
    return SHM / name


# -- Processes, from /proc --------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """What `/proc/<pid>/stat` tells; `state` is `Z` for one that has ended, where it isn't known any more too."""

    state: str
    session: int


def processes() -> list[int]:
    """The pids of all."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def process(pid: int) -> Process:
    """One process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return Process("Z", 0)
    return Process(fields[0], int(fields[3]))


def kill(pid: int, number: int) -> None:
    """Sends a signal, to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def has_accepted(pid: int, server_port: int, client_port: int) -> bool:
    """Whether this process has the server's end of a connection; `ProcessLookupError` if there is no such process."""
    ends = (f":{server_port:04X}", f":{client_port:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines():
        fields = line.split()
        if fields[1][-5:] == ends[0] and fields[2][-5:] == ends[1] and fields[9] != "0":  # 0 until it is accepted
            break
    else:
        return False
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        raise ProcessLookupError(pid) from None
    for link in links:
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()) == f"socket:[{fields[9]}]":
                return True
    return False


def mapped_segments(pid: int) -> set[tuple[str, int]]:
    """Name and inode of what a process has mapped of `/dev/shm`; nothing where that can't be seen."""
    try:
        lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {
        (line[5].removeprefix(f"{SHM}/"), int(line[4]))
        for line in lines
        if len(line) == 6 and line[5].startswith(f"{SHM}/")
    }


# -- Requests ---------------------------------------------------------------------------------------------------------


class Burst(NamedTuple):
    """What many requests at once got: a list of answers for each connection, in order, and how long it took."""

    lines: list[list[Answer]]
    elapsed_s: float

    @property
    def answers(self) -> list[Answer]:
        """All of them."""
        return [answer for line in self.lines for answer in line]

    @property
    def allowed(self) -> list[Answer]:
        """Those with status 200."""
        return [answer for answer in self.answers if answer.status == 200]

    @property
    def denied(self) -> list[Answer]:
        """Those with status 429."""
        return [answer for answer in self.answers if answer.status == 429]

    def counts_down(self, quota: int) -> bool:
        """Whether those that were allowed say what was left, from `quota` - 1 to 0.

        A worker that read the clock before another one and swaps after it sees a bucket that is a hair less full, and
        says one less: the level at its own, earlier time.
        """
        left = sorted(answer.remaining for answer in self.allowed if answer.remaining is not None)
        told = all(count in {place - 1, place} for place, count in enumerate(left))
        return told and len(left) == quota and (left[0], left[-1]) == (0, quota - 1)


# -- The server -------------------------------------------------------------------------------------------------------


class Server:
    """A gunicorn that listens on `port` of 127.0.0.1. It leads a session of its own, by which its processes are known.

    `directory` is where it works and keeps its files. What `environ` has goes over this process's environment. Port and
    number of workers are given in GUNICORN_CMD_ARGS, which goes over the configuration file; `arguments` go over both.
    `binds` are more places where it listens.
    """

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        *,
        port: int,
        workers: int,
        environ: Mapping[str, str],
        binds: Sequence[str] = (),
        launcher: Sequence[str] = (sys.executable, "-m", "gunicorn"),
    ) -> None:
        self.port = port
        stem = f"gunicorn-{random.randrange(16**8):08x}"
        self._log = directory / f"{stem}.log"
        self._pidfile = directory / f"{stem}.pid"
        own = ["--bind", f"127.0.0.1:{port}", "--workers", str(workers), "--pid", str(self._pidfile)]
        own += [option for bind in binds for option in ("--bind", bind)]
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("GUNICORN_", "SHMLIMIT_"))}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        # A worker that is just booting can miss a TERM; gunicorn kills it after the graceful timeout, 30 s by default.
        own += ["--no-control-socket", "--graceful-timeout", "5"]
        kept |= {"PYTHONPATH": path, "GUNICORN_CMD_ARGS": shlex.join(own)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*launcher, *arguments],
                cwd=directory,
                env={**kept, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._masters = {self.process.pid}

    @property
    def log(self) -> str:
        """What all its processes have written so far."""
        return self._log.read_text(errors="replace")

    # -- its processes

    def members(self) -> list[int]:
        """All its processes that run."""
        self.process.poll()  # a master that has ended isn't to stay as a zombie
        found = {pid: process(pid) for pid in processes()}
        return [pid for pid, (state, session) in found.items() if session == self.process.pid and state not in "ZX"]

    def masters(self) -> list[int]:
        """The masters that run: a second one after USR2, until one of them ends."""
        for path in self._pidfile.parent.glob(f"{self._pidfile.name}*"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._masters.add(int(path.read_text()))
        return sorted(self._masters.intersection(self.members()))

    def workers(self) -> list[int]:
        """Every other process."""
        return sorted(set(self.members()).difference(self.masters()))

    def signal(self, number: int) -> None:
        """Sends a signal to the one master."""
        (master,) = self.masters()
        kill(master, number)

    def wait_ready(self, workers: int, without: Sequence[int] = ()) -> list[int]:
        """Waits until there are so many workers, none of them of `without`, and each of them answers; their pids."""

        def settled() -> list[int]:
            assert self.masters(), "the server has ended"
            found = self.workers()
            return found if len(found) == workers and not set(found).intersection(without) else []

        def listening() -> bool:
            assert self.masters(), "the server has ended"
            return self.listens()

        until(listening, "somebody listens on the port")
        while True:
            found = until(settled, f"there are {workers} workers")
            try:
                for worker in found:
                    self.ask(worker, "/healthz")
            except ProcessLookupError:  # one of them was about to end
                continue
            return found

    def wait_gone(self, pids: Sequence[int]) -> None:
        """Waits until none of `pids` runs."""
        until(lambda: not set(pids).intersection(self.members()), f"the processes {pids} have ended")

    def wait_exit(self) -> int:
        """Waits until nothing of it is left; the first master's exit status."""
        until(lambda: not self.members(), "all its processes have ended")
        return self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        """Ends it as an operator would, with TERM, and waits."""
        for master in self.masters():
            kill(master, signal.SIGTERM)
        self.wait_exit()

    def kill_all(self) -> None:
        """Ends every process of it with KILL, and waits."""

        def killed() -> bool:
            members = self.members()
            for pid in members:
                kill(pid, signal.SIGKILL)
            return not members

        until(killed, "all its processes are killed")  # again and again: a master may be forking a worker
        self.process.wait(PATIENCE_S)

    def clean_up(self) -> None:
        """For the end of a test: leaves nothing of it, and writes its log, which pytest shows if the test failed."""
        self.kill_all()
        sys.stdout.write(f"---- {self._log.name}\n{self.log}")

    # -- requests

    def listens(self) -> bool:
        """Whether somebody accepts connections on the port."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @contextlib.contextmanager
    def only(self, worker: int) -> Iterator[None]:
        """Stops all other workers meanwhile, so that whoever connects is accepted by this one."""
        others = [pid for pid in self.workers() if pid != worker]
        try:
            for pid in others:
                kill(pid, signal.SIGSTOP)
            until(lambda: all(process(pid).state in "TtZX" for pid in others), f"the processes {others} are stopped")
            yield
        finally:
            for pid in others:
                kill(pid, signal.SIGCONT)

    def get(self, path: str = "/", fields: Fields | None = None, source: str | None = None) -> Answer:
        """A request to whoever accepts it."""
        with contextlib.closing(Connection(self.port, source=source)) as connection:
            connection.begin(path, fields)
            return connection.finish()

    def ask(self, worker: int, path: str = "/", fields: Fields | None = None, source: str | None = None) -> Answer:
        """A request that this worker answers; `ProcessLookupError` if it ends before it has accepted it."""
        with contextlib.closing(Connection(self.port, source=source)) as connection:
            with self.only(worker):
                self._deal(connection, worker, path, fields)
            answer = connection.finish()
        assert answer.worker in {worker, None}
        return answer

    def burst(self, n: int = 40, connections: int = 8, source: str | None = None) -> Burst:
        """`n` requests at once over `connections` connections.

        Every worker has accepted a connection before the first request is complete, and all connections have got their
        first answer before the second request: each worker answers at least one of the first `connections` requests.
        """
        lines = [Connection(self.port, source=source) for _ in range(connections)]
        barrier = threading.Barrier(connections)
        times: list[float] = []

        def send(line: Connection) -> list[Answer]:
            try:
                barrier.wait(PATIENCE_S)
                times.append(time.monotonic())
                answers = [line.finish()]
                barrier.wait(PATIENCE_S)
                for _ in range(n // connections - 1):
                    line.begin()
                    answers.append(line.finish())
                times.append(time.monotonic())
            except BaseException:
                barrier.abort()
                raise
            return answers

        with contextlib.ExitStack() as stack:
            workers = self.workers()
            for i, line in enumerate(lines):
                stack.callback(line.close)
                if i < len(workers):
                    with self.only(workers[i]):
                        self._deal(line, workers[i], "/", None)
                else:
                    line.begin()
            with ThreadPoolExecutor(connections) as pool:
                answers = list(pool.map(send, lines))
        return Burst(answers, max(times) - min(times))

    def _deal(self, connection: Connection, worker: int, path: str, fields: Fields | None) -> None:
        def accepted() -> bool:
            if process(worker).state in "ZX":
                raise ProcessLookupError(worker)
            return has_accepted(worker, self.port, connection.own_port)

        connection.begin(path, fields)
        until(accepted, f"the worker {worker} has accepted the connection")


class Count:
    """A limit that never refills, as somebody who counts on must see it: from one server to the next."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def take(self, answer: Answer) -> None:
        """The next answer: allowed with one less remaining, or denied because nothing remains."""
        if self.left:
            self.left -= 1
            assert (answer.status, answer.remaining) == (200, self.left)
        else:
            assert (answer.status, answer.remaining) == (429, 0)

    def everybody(self, server: Server) -> None:
        """Every worker answers a request."""
        for worker in server.workers():
            self.take(server.ask(worker))

    def the_rest(self, server: Server) -> None:
        """Uses up what is left; then every worker refuses. So exactly the limit was allowed, over all servers."""
        assert self.left > 0, "a limit that is used up too early shows nothing"
        while self.left:
            self.take(server.get())
        self.everybody(server)


Serve: TypeAlias = Callable[..., Server]
"""What the fixture `serve` gives: see conftest.py."""


def missing(message: str) -> NoReturn:
    """Ends a test for which something isn't there: skipped, but a failure in CI."""
    pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@contextlib.contextmanager
def serving(name: str, directory: Path) -> Iterator[Serve]:
    """What `serve` gives, for a table `name` and servers that work in `directory`."""
    with contextlib.ExitStack() as stack:
        yield functools.partial(_start, stack, name, home=directory)


def _start(
    stack: contextlib.ExitStack,
    name: str,
    *arguments: str,
    home: Path,
    app: str = "shmlimit.demo:app",
    code: str | None = None,
    config: str | None = None,
    workers: int = 4,
    port: int | None = None,
    binds: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (sys.executable, "-m", "gunicorn"),
    directory: Path | None = None,
    ready: bool = True,
) -> Server:
    directory = directory or home
    config_path = ROOT / "gunicorn_conf.py"
    if config is not None:
        config_path = directory / "conf.py"
        config_path.write_text(config)
    if code is not None:
        app = "live_app:app"
        (directory / "live_app.py").write_text(code)
    server = Server(
        directory,
        ["-c", str(config_path), *arguments, app],
        port=free_port() if port is None else port,
        workers=workers,
        environ={"SHMLIMIT_NAME": name, **(environ or {})},
        binds=binds,
        launcher=launcher,
    )
    stack.callback(server.clean_up)
    if ready:
        server.wait_ready(workers)
    return server
