"""The cost of a decision in a SQLite file, beside bare SQL that does as much, and beside pyrate-limiter's.

    python bench/sqlite.py [rounds]

A hundred keys in turn, WAL and synchronous=NORMAL for everybody. The bare loops are `BEGIN IMMEDIATE; SELECT; UPSERT;
COMMIT` over prepared statements and decide nothing: one over the row that the contract asks for (policy, key, JSON
state, an indexed expiry), one over the least row that could count at all (key and state). What a decision adds to
the first is the policy's arithmetic, JSON both ways and purging. Where each key is new and expires within a
millisecond, it takes a row to make, one to remove and the watermark.

The second table is beside pyrate-limiter (`SQLiteBucket`, through `Limiter.try_acquire`): a sliding log here and there,
over the same hundred keys. There a key is a bucket with a table of its own, and a hit is a row. It is measured with the
connection that it makes by itself (a rollback journal, synchronous=FULL: each commit waits for the disk), and over one
with WAL and synchronous=NORMAL, which is what it sets with `use_file_lock`; the lock file that it needs there for more
than one process is left out, in its favour.

The third table has 8 processes that do nothing but decide on one file, each on keys of its own: how long may one
have to wait for its turn?
"""

from __future__ import annotations

import multiprocessing
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyrate_limiter
from _rounds import Contender, interleave, machine, publish, ratios, spread

from shmlimit import SlidingLog, TokenBucket
from shmlimit.stores.sqlite import SqliteStore

N = 400
KEYS = [f"ip:203.0.113.{i}" for i in range(100)]
OPEN, SPENT, BRIEF = TokenBucket(10**6, 10**7), TokenBucket(1, 10**6), TokenBucket(1, 0.001)
TAKEN, DENIED, PEEKED, NEW = "`take`, allowed", "`take`, denied", "`peek`", "`take`, a new key, another one expired"
ROW, LEAST = "bare SQL, the same row", "bare SQL, key and state"
POLICY = "token-bucket 1000000 10000000000000 1000000"
WORKERS, SECONDS = 8, 4.0
OPEN_LOG, SPENT_LOG = SlidingLog(1000, 60), SlidingLog(1, 10**6)
LOG_TAKEN, LOG_DENIED = "a sliding log, allowed", "a sliding log, denied"
N_LOG = len(KEYS)
PYRATE = {"WAL and NORMAL": ("WAL", "NORMAL", N_LOG), "as it comes": ("DELETE", "FULL", 20)}
PYRATE_TEXT = """\
Beside pyrate-limiter, a sliding log of 1000 a minute over the same keys, in one process. What differs: here a decision
is one transaction that has the write lock from its begin, so it is exact over processes; a commit is in the page cache
(WAL, synchronous=NORMAL), and survives a kill, not a power cut. There it is a count and an insert, which only a lock
around them makes one: a lock of the process's, or with `use_file_lock` a lock file (left out here). As it comes, its
commits wait for the disk (a rollback journal, synchronous=FULL); with `use_file_lock` it sets WAL and NORMAL. Its
denial is a count; here the state is read, for the waits that a response has to tell."""

ROW_TABLE = (
    "CREATE TABLE t (policy TEXT, key BLOB, state TEXT, expires_us INTEGER, PRIMARY KEY (policy, key))",
    "CREATE INDEX due ON t (expires_us)",
)
ROW_UPSERT = (
    "INSERT INTO t VALUES (?, ?, ?, ?) ON CONFLICT (policy, key) "
    "DO UPDATE SET state = excluded.state, expires_us = excluded.expires_us"
)
LEAST_UPSERT = "INSERT INTO t VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET state = excluded.state"


def opened(path: Path, *statements: str) -> Callable[..., sqlite3.Cursor]:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL", *statements):
        connection.execute(statement)
    return connection.execute


def state(now_us: int) -> str:
    # Another text each time: SQLite doesn't write a row that is as it was.
    return f'{{"kind":"token-bucket","level":3599999990000000,"at_us":{now_us}}}'


def contenders(store: SqliteStore, directory: Path) -> list[Contender]:
    row = opened(directory / "row", *ROW_TABLE)
    least = opened(directory / "least", "CREATE TABLE t (key TEXT PRIMARY KEY, state TEXT)")
    for key in KEYS:
        store.take(SPENT, key)

    def keys(n: int) -> list[str]:
        return (KEYS * (n // len(KEYS) + 1))[:n]

    def taken(n: int) -> None:
        for key in keys(n):
            store.take(OPEN, key)

    def denied(n: int) -> None:
        for key in keys(n):
            store.take(SPENT, key)

    def peeked(n: int) -> None:
        for key in keys(n):
            store.peek(OPEN, key)

    def new(n: int) -> None:
        for number in range(n):
            store.take(BRIEF, str(number))

    def bare_row(n: int) -> None:
        for key in keys(n):
            blob, now_us = key.encode(), time.time_ns() // 1000
            row("BEGIN IMMEDIATE")
            row("SELECT state, expires_us FROM t WHERE policy = ? AND key = ?", (POLICY, blob)).fetchone()
            row(ROW_UPSERT, (POLICY, blob, state(now_us), now_us))
            row("COMMIT")

    def bare_least(n: int) -> None:
        for key in keys(n):
            least("BEGIN IMMEDIATE")
            least("SELECT state FROM t WHERE key = ?", (key,)).fetchone()
            least(LEAST_UPSERT, (key, state(time.time_ns() // 1000)))
            least("COMMIT")

    return [
        Contender(TAKEN, taken),
        Contender(DENIED, denied),
        Contender(PEEKED, peeked),
        Contender(NEW, new),
        Contender(ROW, bare_row),
        Contender(LEAST, bare_least),
    ]


class Buckets(pyrate_limiter.BucketFactory):
    """pyrate-limiter's way to many keys: a bucket for each, here with a table for each in one file."""

    def __init__(self, connection: sqlite3.Connection, rate: pyrate_limiter.Rate) -> None:
        self._buckets = {}
        for number, key in enumerate(KEYS):
            connection.execute(
                pyrate_limiter.buckets.sqlite_bucket.Queries.CREATE_BUCKET_TABLE.format(table=f"t{number}")
            )
            connection.execute(f"CREATE INDEX i{number} ON t{number} (item_timestamp)")
            self._buckets[key] = pyrate_limiter.SQLiteBucket([rate], connection, f"t{number}")
        connection.commit()

    def wrap_item(self, name: str, weight: int = 1) -> pyrate_limiter.RateItem:
        return pyrate_limiter.RateItem(name, self._buckets[name].now(), weight=weight)

    def get(self, item: pyrate_limiter.RateItem) -> pyrate_limiter.SQLiteBucket:
        return self._buckets[item.name]


def beside_pyrate(how: str, store: SqliteStore, directory: Path) -> list[Contender]:
    journal, synchronous, n = PYRATE[how]

    def limiter(what: str, limit: int, milliseconds: int) -> pyrate_limiter.Limiter:
        connection = sqlite3.connect(directory / f"{how} {what}", isolation_level="DEFERRED", check_same_thread=False)
        connection.execute(f"PRAGMA journal_mode={journal}")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        return pyrate_limiter.Limiter(Buckets(connection, pyrate_limiter.Rate(limit, milliseconds)))

    opened, spent = limiter("open", 1000, 60_000), limiter("spent", 1, 10**9)

    def here(policy: SlidingLog, wanted: bool) -> Callable[[int], None]:
        def run(n: int) -> None:
            for key in KEYS[:n]:
                assert store.take(policy, key).allowed is wanted

        return run

    def there(limiter: pyrate_limiter.Limiter, wanted: bool) -> Callable[[int], None]:
        def run(n: int) -> None:
            for key in KEYS[:n]:
                assert limiter.try_acquire(key, blocking=False) is wanted

        return run

    for key in KEYS[:n]:
        store.take(SPENT_LOG, key)
        spent.try_acquire(key, blocking=False)
    return [
        Contender(LOG_TAKEN, here(OPEN_LOG, True)),
        Contender(LOG_DENIED, here(SPENT_LOG, False)),
        Contender(f"pyrate-limiter, {how}, allowed", there(opened, True)),
        Contender(f"pyrate-limiter, {how}, denied", there(spent, False)),
    ]


def pyrate_table(rounds: int, directory: Path) -> list[str]:
    lines = ["| | µs per call | shmlimit ÷ it |", "|---|---:|---:|"]
    for how, (_, _, n) in PYRATE.items():
        with SqliteStore(directory / f"beside {how}") as store:
            figures = interleave(beside_pyrate(how, store, directory), rounds=rounds, n=n)
        for name, values in figures.items():
            if n == N_LOG or name.startswith("pyrate"):
                against = ratios(figures, LOG_TAKEN if name.endswith("allowed") else LOG_DENIED, name)
                lines.append(f"| {name} | {spread([value / 1000 for value in values], 1)} | {spread(against, 2)} |")
    return lines


def decide(path: Path, number: int, barrier: Any, results: Any) -> None:
    waits = []
    with SqliteStore(path) as store:
        barrier.wait()
        until = time.perf_counter() + SECONDS
        while (begin := time.perf_counter()) < until:
            store.take(OPEN, f"{number} {len(waits) % 100}")
            waits.append(time.perf_counter() - begin)
    results.put(waits)


def together(path: Path) -> list[float]:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(WORKERS), context.Queue()
    workers = [context.Process(target=decide, args=(path, i, barrier, results)) for i in range(WORKERS)]
    for worker in workers:
        worker.start()
    waits = [wait for _ in workers for wait in results.get()]
    for worker in workers:
        worker.join()
    return sorted(waits)


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        with SqliteStore(Path(name) / "store") as store:
            figures = interleave(contenders(store, Path(name)), rounds=rounds, n=N)
        beside = pyrate_table(rounds, Path(name))
        waits = together(Path(name) / "together")
    where = f"{machine('shmlimit', 'pyrate-limiter')}, SQLite {sqlite3.sqlite_version}"
    lines = [
        "# One decision in a SQLite file",
        "",
        f"{where}; {rounds} rounds. Median (middle half).",
        "",
        "| | µs per call | ÷ the same row | ÷ key and state |",
        "|---|---:|---:|---:|",
    ]
    for contender, values in figures.items():
        against = [spread(ratios(figures, contender, base), 2) for base in (ROW, LEAST)]
        lines.append(f"| {contender} | {spread([value / 1000 for value in values], 1)} | {against[0]} | {against[1]} |")
    median, tail, longest = (waits[int(len(waits) * part)] for part in (0.5, 0.99, 1 - 1e-12))
    lines += [
        "",
        PYRATE_TEXT,
        "",
        *beside,
        "",
        f"{WORKERS} processes that do nothing but decide on one file, for {SECONDS:.0f} s:",
        "",
        "| decisions a second | median | 99 % | the longest wait |",
        "|---:|---:|---:|---:|",
        f"| {len(waits) / SECONDS:,.0f} | {median * 1e6:,.0f} µs | {tail * 1e3:,.1f} ms | {longest * 1e3:,.0f} ms |",
    ]
    publish("sqlite.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
