"""Processes on one table: how they are started, how they come by it, and a log that outlives a kill."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from mmap import mmap
from typing import Any

from shmlimit import SharedTable

YEAR = 366 * 86_400  # nothing refills meanwhile
# On two busy cores a round may happen to pass without a collision, and then proves little: there is another.
ROUNDS = 20


def table_of(name: str, inherited: SharedTable | None) -> SharedTable:
    """The table in a worker: inherited by fork, or attached by name."""
    return inherited if inherited is not None else SharedTable.attach(name)


def run(target: Any, table: SharedTable, method: str, workers: int) -> list[Any]:
    """The answers of `workers` processes that run `target(name, inherited table, barrier, results)`."""
    return together(target, (table.name, table if method == "fork" else None), method, workers)


def together(target: Any, arguments: tuple[Any, ...], method: str, workers: int) -> list[Any]:
    """The answers of `workers` processes that run `target(*arguments, barrier, results)`."""
    context = multiprocessing.get_context(method)
    barrier, results = context.Barrier(workers), context.Queue()
    processes = [context.Process(target=target, args=(*arguments, barrier, results)) for _ in range(workers)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * workers
    return answers


def rounds(table: SharedTable, barrier: Any) -> Iterator[int]:
    """In each worker: the numbers of rounds that all begin together, until one saw swaps lost: `ROUNDS` is too many."""
    before = table.stats()["contended"]  # nobody is at work before the barrier, and so all see the same
    for number in range(ROUNDS if barrier.parties > 1 else 1):
        barrier.wait()
        yield number
        barrier.wait()
        if table.stats()["contended"] > before:
            return


class Log:
    """Pairs of numbers that a forked worker writes into memory it shares with its parent: a SIGKILL takes none away."""

    def __init__(self, pairs: int) -> None:
        # A word is stored at once. (`struct.pack_into` clears its place first: a kill in between would lose the count.)
        self._words = memoryview(mmap(-1, 16 * (pairs + 1))).cast("Q")

    def __len__(self) -> int:
        return int(self._words[0])

    def append(self, what: int, value: int) -> None:
        """In the worker: the pair first, then its number, so that half a pair is never read."""
        number = self._words[0] + 1
        self._words[2 * number], self._words[2 * number + 1] = what, value
        self._words[0] = number

    def pairs(self) -> list[tuple[int, int]]:
        words = self._words[2 : 2 * len(self) + 2].tolist()
        return list(zip(words[::2], words[1::2], strict=True))
