"""The time of one take when many processes want the same key at once: percentiles, and swaps that were lost.

    python bench/contention.py [calls]

8 forked processes call `take` in a loop and record the time of every call. It contains what the machine adds: with more
processes than cores a call may be interrupted for a whole time slice of the others. So there are two rows to compare
with: the same with a key for each process, where nothing is contended, and a loop that only reads the clock.

How many swaps a single call lost is counted in runs of their own, by the process's own counter before and after it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from _inside import CONTENDED, own_lane, passing_table
from _rounds import machine, publish

import shmlimit.table
from shmlimit import SharedTable, TokenBucket

WORKERS, CALLS, PATIENCE_S = 8, 100_000, 300
OPEN, SPENT = TokenBucket(10**9, 10**6), TokenBucket(1, 10**6)
HOT = "ip:203.0.113.7"
PERCENTILES = (50, 90, 99, 99.9, 99.99, 100)
WORK: dict[str, tuple[TokenBucket | None, bool]] = {
    "one key, allowed: each call swaps": (OPEN, True),
    "one key, denied: no call writes it": (SPENT, True),
    "a key for each process, allowed": (OPEN, False),
    "no call, only the clock": (None, False),
}
Measure = Callable[..., None]


def tries() -> int:
    """The bound on lost swaps, as the C source has it."""
    sources = Path(shmlimit.table.__file__).parent.glob("*.[ch]")
    found = [int(n) for source in sources for n in re.findall(r"\bTRIES = (\d+)", source.read_text(encoding="utf-8"))]
    (bound,) = found
    return bound


def time_calls(table: SharedTable, policy: TokenBucket | None, key: str, into: Any) -> None:
    """Nanoseconds of each call."""
    take = table.take
    for i in range(len(into)):
        begin = perf_counter_ns()
        if policy is not None:
            take(policy, key)
        into[i] = perf_counter_ns() - begin


def count_losses(table: SharedTable, policy: TokenBucket, key: str, into: Any) -> None:
    """Swaps that each call lost."""
    take, lane = table.take, own_lane(table)
    for i in range(len(into)):
        before = lane[CONTENDED]
        take(policy, key)
        into[i] = lane[CONTENDED] - before


def work(measure: Measure, barrier: Any, *arguments: Any) -> None:
    barrier.wait(PATIENCE_S)
    measure(*arguments)


def together(measure: Measure, policy: TokenBucket | None, *, one_key: bool, calls: int) -> tuple[np.ndarray, int]:
    """What each call of all processes had to say, and the table's count of lost swaps."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(WORKERS)
    arrays = [RawArray("q", calls) for _ in range(WORKERS)]
    with passing_table(1024) as table:
        table.take(SPENT, HOT)
        workers = [
            context.Process(
                target=work,
                args=(measure, barrier, table, policy, HOT if one_key else f"{HOT} {i}", array),
                daemon=True,  # none outlives this script, whatever happens to it
            )
            for i, array in enumerate(arrays)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(PATIENCE_S)
        if any(worker.exitcode for worker in workers):
            sys.exit("a process failed: see above")
        lost = table.stats()["contended"]
    return np.concatenate([np.frombuffer(array, np.int64) for array in arrays]), lost


def main(calls: int) -> None:
    bound = tries()
    lines = [
        "# One key, many processes",
        "",
        f"{machine('shmlimit')}; {WORKERS} processes on {os.cpu_count()} cores, {calls:,} calls each.",
        "",
        f"| µs per call | {' | '.join(f'{p} %' for p in PERCENTILES[:-1])} | longest |",
        f"|---|{'---:|' * len(PERCENTILES)}",
    ]
    for name, (policy, one_key) in WORK.items():
        times, _ = together(time_calls, policy, one_key=one_key, calls=calls)
        values = np.percentile(times, PERCENTILES, method="higher") / 1000
        lines.append(f"| {name} | {' | '.join(f'{value:,.1f}' for value in values)} |")
    losses, lost = together(count_losses, OPEN, one_key=True, calls=calls)
    # Where processes outnumber the counter lines two share one, and a call is blamed for the other's: never here.
    assert int(losses.sum()) == lost
    told = (
        f"Lost swaps, in a run of its own: {lost:,} in {losses.size:,} calls on one key, at most **{losses.max():,}** "
        f"in one call. The bound is {bound:,} in one call; past it the caller gets a `ContentionError` (a "
        "`StoreError`) and nothing was charged."
    )
    lines += [
        "",
        f"{WORKERS} processes take turns on {os.cpu_count()} cores: the longest calls were interrupted.",
        "",
        told,
        "",
        "| swaps lost by a call | calls |",
        "|---:|---:|",
        *(f"| {n:,} | {count:,} |" for n, count in sorted(Counter(losses.tolist()).items())),
    ]
    publish("contention.md", "\n".join(lines) + "\n")
    if losses.max() * 10 > bound:
        sys.exit("a call came near the bound: that has never been seen, and is a bug")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else CALLS)
