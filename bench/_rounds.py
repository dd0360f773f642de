"""What every script here shares: interleaved rounds, medians with spread, and a table with machine, versions and date.

A figure from a shared machine means little alone. So the contenders of a question take turns in short rounds, and what
is reported is their ratio within a round: what slows a round down slows all of them down.
"""

from __future__ import annotations

import datetime as dt
import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(os.environ.get("BENCH_RESULTS", Path(__file__).parent / "results"))


class Contender(NamedTuple):
    """`run(n)` does the thing n times, and returns nothing, or how many nanoseconds it took where it knows better."""

    name: str
    run: Callable[[int], int | None]


def interleave(contenders: list[Contender], *, rounds: int, n: int) -> dict[str, list[float]]:
    """Nanoseconds per operation of each contender, a figure a round; who goes first changes with the rounds."""
    for contender in contenders:
        contender.run(n)  # warm up
    figures: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    gc.disable()
    try:
        for number in range(rounds):
            turn = number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                begin = time.perf_counter_ns()
                took = contender.run(n)
                elapsed = time.perf_counter_ns() - begin
                figures[contender.name].append((elapsed if took is None else took) / n)
    finally:
        gc.enable()
    return figures


def spread(values: list[float], digits: int = 0) -> str:
    """Median and, in brackets, the middle half."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def ratios(figures: Mapping[str, list[float]], name: str, base: str) -> list[float]:
    """`name` ÷ `base`, round by round."""
    return [one / other for one, other in zip(figures[name], figures[base], strict=True)]


def machine(*packages: str) -> str:
    """A line that says where and with what a table was made."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = f"{len(models)} × {models[0]}" if models else cpu
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    return (
        f"{dt.datetime.now(tz=dt.timezone.utc).date().isoformat()}; {cpu}; {platform.system()} {platform.release()}; "
        f"CPython {platform.python_version()}; {versions}"
    )


def publish(file: str, text: str) -> None:
    """Prints a result and keeps it in `results/`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / file).write_text(text, encoding="utf-8")
    print(text)
