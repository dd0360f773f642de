"""The helper alone, in C: a decision beside what it is made of at least.

    python bench/helper.py [rounds]

`helper.c` is compiled with the helper's own sources and the flags of setup.py. Its floor is one 16-byte
compare-and-swap that nobody contends for, the SipHash of a key of 16 bytes, and `clock_gettime`; a decision also finds
the key among its 24 slots, does the arithmetic of six fields, and counts itself. Where valgrind is installed, its
instructions are counted.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _rounds import machine, publish, ratios, spread

HERE = Path(__file__).parent
SOURCES = HERE.parent / "shmlimit" / "table"
N = 20_000
CASES = ("swap, hash and clock alone", "a decision, allowed", "a decision, denied")
KEYS = {1: "one hot key", 10_000: "10,000 keys in turn"}


def build(directory: Path) -> Path:
    program = directory / "helper"
    cx16 = ["-mcx16"] if platform.machine() in {"x86_64", "AMD64"} else []
    flags = ["-O2", "-std=c11", *cx16, f"-I{SOURCES}"]
    subprocess.run(["cc", *flags, "-o", program, HERE / "helper.c"], check=True)
    return program


def measured(program: Path, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Nanoseconds a call: by the number of keys and the case, a figure a round."""
    figures: dict[int, dict[str, list[float]]] = {keys: {case: [] for case in CASES} for keys in KEYS}
    lines = subprocess.check_output([program, str(rounds), str(N)], text=True).splitlines()
    for line in lines:
        keys, case, ns = line.split()
        figures[int(keys)][CASES[int(case)]].append(float(ns))
    return figures


def instructions(program: Path, case: int) -> str:
    """Instructions a call on one key, counted by callgrind as the difference of two runs; a dash without it."""
    if shutil.which("valgrind") is None:
        return "–"
    counted = []
    for n in (N, 2 * N):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, str(case), str(n), "1"]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        counted.append(int(re.findall(r"Collected : (\d+)", told)[0]))
    return str(round((counted[1] - counted[0]) / N))


def rows(program: Path, rounds: int) -> Iterator[str]:
    counted = [instructions(program, case) for case in range(len(CASES))]
    for keys, figures in measured(program, rounds).items():
        yield from ("", f"## {KEYS[keys].capitalize()}", "")
        yield from ("| | ns per call | ÷ swap, hash and clock | instructions |", "|---|---:|---:|---:|")
        for number, case in enumerate(CASES):
            against = spread(ratios(figures, case, CASES[0]), 2)
            yield f"| {case} | {spread(figures[case], 1)} | {against} | {counted[number]} |"


def main(rounds: int) -> None:
    compiler = subprocess.check_output(["cc", "--version"], text=True).splitlines()[0]
    with tempfile.TemporaryDirectory() as directory:
        program = build(Path(directory))
        lines = [
            "# The helper alone, in C",
            "",
            f"{machine('shmlimit')}; {compiler}; {rounds} interleaved rounds of {N:,}. Median",
            "(middle half). Instructions are counted on one key. The bar: a decision is at most 2 times the floor.",
            *rows(program, rounds),
        ]
    publish("helper.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
