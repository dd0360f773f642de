"""The cost of one decision in Python, beside a limiter that counts in a dict, and beside a bare ctypes call.

    make bench        or        python bench/take.py [rounds]

One key, one process. `limits` is the library under Flask-Limiter and slowapi; its memory store counts in this process
only and is the cheapest that it has. The bare call does nothing (`memcmp` of no bytes, three declared arguments): it is
the floor for anything that goes through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from itertools import repeat

import limits
from _rounds import Contender, interleave, machine, publish, ratios, spread

from shmlimit import SharedTable, TokenBucket

N = 20_000
KEY = "ip:203.0.113.7"
SHARED, DENIED, LIMITS, BARE = (
    "shmlimit, allowed",
    "shmlimit, denied",
    "limits memory, fixed window",
    "bare ctypes call",
)


def contenders(table: SharedTable) -> list[Contender]:
    open_policy, spent_policy = TokenBucket(10**9, 10**6), TokenBucket(1, 10**6)
    table.take(spent_policy, KEY)
    storage = limits.storage.MemoryStorage()
    window = limits.strategies.FixedWindowRateLimiter(storage)
    item = limits.RateLimitItemPerHour(10**9)
    bare = ctypes.PyDLL(None).memcmp
    bare.argtypes, bare.restype = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_int

    def allowed(n: int) -> None:
        take = table.take
        for _ in repeat(None, n):
            take(open_policy, KEY)

    def denied(n: int) -> None:
        take = table.take
        for _ in repeat(None, n):
            take(spent_policy, KEY)

    def memory(n: int) -> None:
        hit = window.hit
        for _ in repeat(None, n):
            hit(item, KEY)

    def call(n: int) -> None:
        key = KEY.encode()
        for _ in repeat(None, n):
            bare(key, key, 0)

    return [Contender(SHARED, allowed), Contender(DENIED, denied), Contender(LIMITS, memory), Contender(BARE, call)]


def main(rounds: int) -> None:
    name = f"shmlimit-bench-{os.getpid()}"
    with SharedTable.create(name, 65536) as table:
        try:
            figures = interleave(contenders(table), rounds=rounds, n=N)
        finally:
            table.unlink()
    lines = [
        "# One decision in Python",
        "",
        f"{machine('shmlimit', 'limits')}; {rounds} interleaved rounds of {N:,}. Median (middle half).",
        "",
        "| | ns per call | ÷ limits | ÷ bare call |",
        "|---|---:|---:|---:|",
    ]
    for contender, values in figures.items():
        against = [spread(ratios(figures, contender, base), 2) for base in (LIMITS, BARE)]
        lines.append(f"| {contender} | {spread(values)} | {against[0]} | {against[1]} |")
    publish("take.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
