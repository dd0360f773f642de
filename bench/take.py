"""The cost of one decision in Python, beside limiters that count in this process's memory, and beside a bare call.

    make bench        or        python bench/take.py [rounds]

One process; one hot key, and 10,000 keys in turn; allowed, and denied on keys that are spent. Ours both ways: through
ctypes alone, and with `take` as a builtin over the same library. The others are the memory stores of `limits` (under
Flask-Limiter and slowapi) and `throttled-py`, each with the fixed window, the cheapest that it has, and of
`pyrate-limiter`, which has a sliding log: a bucket for each key, made beforehand. They count in this process only. The
bare call does nothing (`memcmp` of no bytes, three declared arguments): it is what anybody pays who calls C by ctypes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import cycle, islice
from typing import Any

import limits
import pyrate_limiter
import throttled
from _rounds import Contender, interleave, machine, publish, ratios, spread

from shmlimit import SharedTable, TokenBucket
from shmlimit.table import native

N = 20_000
HOT, MANY = ["ip:203.0.113.7"], [f"ip:10.0.{i >> 8}.{i & 255}" for i in range(10_000)]
OPEN, SPENT = 10**9, 1
DAY = 86_400
BUILTIN, CTYPES = "shmlimit, builtin", "shmlimit, ctypes alone"
LIMITS, THROTTLED, PYRATE = "limits", "throttled-py", "pyrate-limiter"
OTHERS = (LIMITS, THROTTLED, PYRATE)
BARE = "bare ctypes call"
FASTEST = "the fastest other"


def each(keys: list[str], take: Callable[[str], object]) -> Callable[[int], None]:
    """Runs over the keys in turn, on and on."""
    endless = cycle(keys)

    def run(n: int) -> None:
        for key in islice(endless, n):
            take(key)

    return run


def each_of(keys: list[str], take: Callable[[Any, str], object], what: object) -> Callable[[int], None]:
    """The same where the limit is the first argument: no call more than needed is measured."""
    endless = cycle(keys)

    def run(n: int) -> None:
        for key in islice(endless, n):
            take(what, key)

    return run


class Buckets(pyrate_limiter.BucketFactory):
    """pyrate-limiter's way to many keys."""

    def __init__(self, keys: list[str], rate: pyrate_limiter.Rate) -> None:
        self._buckets = {key: pyrate_limiter.InMemoryBucket([rate]) for key in keys}

    def wrap_item(self, name: str, weight: int = 1) -> pyrate_limiter.RateItem:
        return pyrate_limiter.RateItem(name, self._buckets[name].now(), weight=weight)

    def get(self, item: pyrate_limiter.RateItem) -> pyrate_limiter.InMemoryBucket:
        return self._buckets[item.name]


def contenders(tables: dict[str, SharedTable], keys: list[str], limit: int) -> Iterator[Contender]:
    policy = TokenBucket(limit, 10 * DAY)
    for name, table in tables.items():
        yield Contender(name, each_of(keys, table.take, policy))
    window = limits.strategies.FixedWindowRateLimiter(limits.storage.MemoryStorage())
    yield Contender(LIMITS, each_of(keys, window.hit, limits.RateLimitItemPerDay(limit)))
    other = throttled.Throttled(
        using=throttled.RateLimiterType.FIXED_WINDOW.value,
        quota=throttled.rate_limiter.per_duration(timedelta(days=1), limit, limit),
        store=throttled.MemoryStore(options={"MAX_SIZE": 2 * len(MANY)}),
    )
    yield Contender(THROTTLED, each(keys, other.limit))
    acquire = pyrate_limiter.Limiter(Buckets(keys, pyrate_limiter.Rate(limit, DAY * 1000))).try_acquire
    yield Contender(PYRATE, each(keys, lambda key: acquire(key, blocking=False)))
    bare = ctypes.PyDLL(None).memcmp
    bare.argtypes, bare.restype = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_int
    encoded = HOT[0].encode()

    def call(n: int) -> None:
        for _ in islice(endless, n):
            bare(encoded, encoded, 0)

    endless = cycle(keys)
    yield Contender(BARE, call)


def through_ctypes(name: str) -> SharedTable:
    """The table once more, without the builtin."""
    os.environ[native.REFUSE] = "0"
    native.builtins.cache_clear()
    return SharedTable.attach(name)


def rows(tables: dict[str, SharedTable], keys: list[str], limit: int, rounds: int) -> Iterator[str]:
    found = list(contenders(tables, keys, limit))
    for contender in found:  # every key is known, and spent where it is to be denied
        contender.run(2 * len(keys))
    figures = interleave(found, rounds=rounds, n=N)
    figures[FASTEST] = list(figures[min(OTHERS, key=lambda name: sorted(figures[name])[rounds // 2])])
    for contender in found:
        faster = spread(ratios(figures, FASTEST, contender.name), 1)
        against = spread(ratios(figures, contender.name, BARE), 2)
        yield f"| {contender.name} | {spread(figures[contender.name])} | {faster} | {against} |"


def main(rounds: int) -> None:
    name = f"shmlimit-bench-{os.getpid()}"
    lines = [
        "# One decision in Python",
        "",
        f"{machine('shmlimit', 'limits', 'throttled-py', 'pyrate-limiter')}; {rounds} interleaved rounds of {N:,}.",
        "Median (middle half); ratios within a round.",
        "",
        "Bars: ctypes alone 3.5 times as fast as the fastest other and 2.2 bare calls, the builtin 10 times and 0.7.",
    ]
    tables = {BUILTIN: SharedTable.create(name, 65536)}
    try:
        tables[CTYPES] = through_ctypes(name)
        if [table.binding for table in tables.values()] != ["builtin", "ctypes"]:
            raise SystemExit("both ways are to be measured, and the builtin wasn't built")
        for keys, place in ((HOT, "one hot key"), (MANY, f"{len(MANY):,} keys in turn")):
            for limit, outcome in ((OPEN, "allowed"), (SPENT, "denied")):
                lines += ["", f"## {outcome.capitalize()}, {place}", ""]
                lines += [f"| | ns per call | {FASTEST} ÷ this | this ÷ bare call |", "|---|---:|---:|---:|"]
                lines += rows(tables, keys, limit, rounds)
    finally:
        tables[BUILTIN].unlink()
    publish("take.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
