"""Tables of 10³ to 10⁷ slots, filled: nanoseconds a decision, keys without room, bytes a key, and how long one opens.

    python bench/growth.py [rounds [largest]]

A table is filled with keys that stay live. At each load it is measured, from one process in real time, what the last
keys took that came to reach it (new keys), and then what decisions on keys take that are there, in no order (existing
keys). Each figure is of at least 20,000 decisions where the table has as many, and of several small tables otherwise.
10⁷ slots are 155 MiB in /dev/shm. `load.py` asks another question: what keys that come and go are told.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

from _inside import passing_table
from _plots import curve, plot
from _rounds import machine, publish, spread
from load import percent

from shmlimit import SharedTable, TokenBucket

SIZES = tuple(10**exponent for exponent in range(3, 8))
LOADS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RECOMMENDED = 0.7
BAND = 0.02  # of the slots: the new keys that a figure is of
ENOUGH = 20_000
POLICY = TokenBucket(100, 10**6)  # one hit is live for 10⁴ s
OPENINGS = 5
BAR_BYTES, BAR_OPEN_S = 24, 1.0
OTHERS = """\
| nginx, `limit_req_zone` | 128 |
| HAProxy, a stick table with one rate | about 62 |

nginx's figure is its documentation's for 64-bit platforms; of HAProxy's 50 are for the entry and 12 for the rate, and a
key that is a string comes on top. Neither needs room to spare, as a table does that is at most 70 % full."""


class Seen(NamedTuple):
    """What was measured at one load of one size, in one round."""

    new_ns: float
    existing_ns: float
    new_shared: float  # of the new keys, those that were counted in a spare slot …
    new_refused: float  # … and those that found not even one of these
    shared: float  # of the decisions on existing keys, those over a spare slot, or refused for want of one


def key(number: int) -> bytes:
    return b"ip:%d" % number


def timed(table: SharedTable, keys: Sequence[bytes]) -> int:
    """Nanoseconds of a decision on each."""
    take, policy = table.take, POLICY
    begin = perf_counter_ns()
    for one in keys:
        take(policy, one)
    return perf_counter_ns() - begin


def without_room(table: SharedTable) -> tuple[int, int]:
    stats = table.stats()
    return stats["shared"], stats["full"]


def fill(slots: int, rng: random.Random) -> Iterator[tuple[float, tuple[int, ...]]]:
    """One table, load by load: the load, the number of decisions of each sort, and what is counted of them."""
    with passing_table(slots) as table:
        there = 0
        for load in LOADS:
            wanted = round(load * table._slots)
            band = max(1, round(BAND * table._slots))
            while there < wanted - band:
                upto = min(there + ENOUGH, wanted - band)
                timed(table, [key(number) for number in range(there, upto)])
                there = upto
            before = without_room(table)
            new_ns = timed(table, [key(number) for number in range(there, wanted)])
            between = without_room(table)
            there = wanted
            some = [key(rng.randrange(there)) for _ in range(band)]
            existing_ns = timed(table, some)
            after = without_room(table)
            crowded = between[0] - before[0], between[1] - before[1]
            yield load, (band, new_ns, existing_ns, *crowded, sum(after) - sum(between))


def measure(slots: int, rng: random.Random) -> dict[float, Seen]:
    """What is seen at each load: of so many tables that a figure is of enough decisions."""
    totals = {load: [0] * 6 for load in LOADS}
    for _ in repeat(None, max(1, round(ENOUGH / (BAND * slots)))):
        for load, figures in fill(slots, rng):
            totals[load] = [one + other for one, other in zip(totals[load], figures, strict=True)]
    return {load: Seen(*(figure / total[0] for figure in total[1:])) for load, total in totals.items()}


class Opened(NamedTuple):
    """Milliseconds."""

    create: float
    attach: float
    first: float


def opening(slots: int) -> Opened:
    """A new table, the same once more, and the first decision on it."""
    begin = perf_counter_ns()
    with passing_table(slots) as table:
        made = perf_counter_ns()
        with SharedTable.attach(table.name) as again:
            attached = perf_counter_ns()
            again.take(POLICY, "first")
            done = perf_counter_ns()
    return Opened(*((b - a) / 1e6 for a, b in ((begin, made), (made, attached), (attached, done))))


def bytes_a_key(keys: int) -> float:
    """Of /dev/shm, as the system tells it, for each of `keys` that are live in a table with the recommended load."""
    with passing_table(math.ceil(keys / RECOMMENDED)) as table:
        timed(table, [key(number) for number in range(keys)])
        stats, live = table.stats(), table.used()
        assert live == keys - stats["shared"], "a key has no state"
        assert not stats["full"], "a key was refused"
        status = Path(f"/dev/shm/{table.name}").stat()
        return status.st_blocks * 512 / keys


def table_of(name: str, sizes: Sequence[int], cell: Callable[[int, float], str]) -> list[str]:
    return [
        f"| {name} | {' | '.join(f'{slots:,} slots' for slots in sizes)} |",
        f"|---|{'---:|' * len(sizes)}",
        *(f"| {load:.0%} | {' | '.join(cell(slots, load) for slots in sizes)} |" for load in LOADS),
        "",
    ]


def main(rounds: int, largest: int = max(SIZES)) -> None:
    logging.getLogger("shmlimit").setLevel(logging.ERROR)  # each of these tables gets too small: that is the question
    sizes = [slots for slots in SIZES if slots <= largest]
    seen: dict[int, list[dict[float, Seen]]] = {slots: [] for slots in sizes}
    openings: dict[int, list[Opened]] = {slots: [] for slots in sizes}
    rng = random.Random(1)
    gc.disable()
    for _ in range(rounds):
        for slots in sizes:
            seen[slots].append(measure(slots, rng))
            openings[slots] += [opening(slots) for _ in range(OPENINGS)]
    gc.enable()

    def of(slots: int, load: float, field: str) -> list[float]:
        return [getattr(figures[load], field) for figures in seen[slots]]

    def middle(slots: int, load: float, field: str) -> float:
        return statistics.median(of(slots, load, field))

    def time_cell(field: str) -> Callable[[int, float], str]:
        return lambda slots, load: f"{middle(slots, load, field):,.0f} ({_range(of(slots, load, field))})"

    lines = [
        "# How tables grow",
        "",
        f"{machine('shmlimit')}; {rounds} interleaved rounds, one process. Median (least–most).",
        "",
        "## Nanoseconds a decision",
        "",
        *table_of("existing keys, at a load of", sizes, time_cell("existing_ns")),
        *table_of("new keys, up to a load of", sizes, time_cell("new_ns")),
        "![nanoseconds a decision by load](growth.svg)",
        "",
        "A decision looks at three buckets, and of a large table few are in the processor's caches.",
        "",
        "## Keys without a slot of their own",
        "",
        "New keys that were counted in a spare slot (and those that were refused, since there was none):",
        "",
        *table_of(
            "up to a load of",
            sizes,
            lambda slots, load: (
                f"{percent(middle(slots, load, 'new_shared'))} ({percent(middle(slots, load, 'new_refused'))})"
            ),
        ),
        "Decisions on existing keys that were shared, or refused for want of a slot:",
        "",
        *table_of("at a load of", sizes, lambda slots, load: percent(middle(slots, load, "shared"))),
        "Spare slots are 1/64 of a table and at least 1,024: a table of 1,000 slots has more of them than of slots.",
        "",
        "## Opening",
        "",
        f"Milliseconds. The bar is {BAR_OPEN_S * 1000:,.0f} for 10,000,000 slots, which all are allocated then.",
        "",
        "| slots | made | attached to | first decision |",
        "|---:|---:|---:|---:|",
    ]
    for slots in sizes:
        cells = [spread(list(values), 2) for values in zip(*openings[slots], strict=True)]
        lines.append(f"| {slots:,} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Bytes for each live key",
        "",
        f"At {RECOMMENDED:.0%} load, all that the segment takes: slots, spare slots, header. The bar is {BAR_BYTES}.",
        "",
        "| | bytes |",
        "|---|---:|",
        *(
            f"| {keys:,} live keys | {bytes_a_key(keys):.1f} |"
            for keys in (round(slots * RECOMMENDED) for slots in sizes)
        ),
        OTHERS,
    ]
    publish("growth.md", "\n".join(lines) + "\n")

    def times(field: str, title: str) -> Callable[[Any], None]:
        def one(axes: Any) -> None:
            for slots in sizes:
                curve(
                    axes, f"{slots:,} slots", [100 * load for load in LOADS], [middle(slots, x, field) for x in LOADS]
                )
            axes.set(xlabel="load, %", ylabel=f"ns a decision, {title}", ylim=(0, None))
            axes.legend(fontsize="x-small")

        return one

    def crowded(axes: Any) -> None:
        for slots in sizes:
            shares = [100 * (middle(slots, x, "new_shared") + middle(slots, x, "new_refused")) for x in LOADS]
            curve(axes, f"{slots:,} slots", [100 * load for load in LOADS], shares)
        axes.set(xlabel="load, %", ylabel="new keys without a slot, %")
        axes.legend(fontsize="x-small")

    plot("growth.svg", times("existing_ns", "existing keys"), times("new_ns", "new keys"), crowded)


def _range(values: Sequence[float]) -> str:
    return f"{min(values):,.0f}–{max(values):,.0f}"


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:3] or ["3"]))
