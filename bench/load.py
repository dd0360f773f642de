"""Full tables: who gets less than his limit, at which load, and what a flood of made-up keys does.

    python bench/load.py [slots]

Everything here happens in simulated time, on one real table for each row, so the figures don't depend on the machine.
How keys come and go is told in `_population.py`, the floods in `_flood.py`. What must never happen ends the script with
an error: a decision that allows more than the pure policy, or one on a key with a slot that isn't exactly the policy's.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from typing import NamedTuple

from _flood import Flood, Run, times
from _inside import passing_table
from _population import Phase, Steady, lives, steady
from _rounds import machine, publish

from shmlimit import FixedWindow, Policy, SlidingCounter, TokenBucket

SLOTS = 65_536
LOADS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0, 4.0)
LOADS_OF_MANY = (0.6, 0.7, 0.75, 0.8, 1.0)
FLOODS = (0.5, 0.75, 0.9, 1.0, 4.0)
MANY = tuple(TokenBucket(limit, 60) for limit in range(10, 18))
"""Eight of them: the region of groups is small, and each policy has groups of its own."""
ONE_NAME, MANY_NAME = "`10/minute`", "`10/minute` … `17/minute`"
POPULATIONS = {ONE_NAME: MANY[:1], MANY_NAME: MANY}
FLOODED: tuple[Policy, ...] = (TokenBucket(10, 60), FixedWindow(10, 60), SlidingCounter(10, 60))
CLIENTS = 200
BAR, BAR_LOADS = 0.01, (0.6, 0.7)
OVERFULL, RECOVERIES = 1.0, (0.5, 0.6, 0.7)


STEADY_COLUMNS = (
    "policies",
    "load",
    "slots live",
    "new keys without a count of their own",
    "new keys refused",
    "decisions shared",
    "decisions refused as full",
    "new keys that start lower",
    "keys that got less than their limit",
    "allowed more",
)
FLOOD_COLUMNS = (
    "policy",
    "flood",
    "spent keys allowed before their time",
    "other than the policy's, of keys with slots",
    "newcomers let in at once",
    "their wait: median, 99 %",
    "not in when it ended",
    "newcomers refused after it",
    "… until",
    "not served as fresh, later (from)",
)


class KeysOf(NamedTuple):
    """A row of the first table."""

    name: str
    load: float
    slots: int
    before: float | None = None
    """The load that came before: does the table recover?"""

    def run(self) -> Steady:
        lifetimes = 0.5 if self.load > 1 else 2  # of four times the slots a part is plenty
        phases = [Phase(self.load, lifetimes)] * 2
        if self.before is not None:
            phases.insert(0, Phase(self.before, lifetimes))
        with passing_table(self.slots) as table:
            return steady(table, lives(POPULATIONS[self.name], 4000, seed=1), phases, seed=2)


class FloodOf(NamedTuple):
    """A row of the second."""

    policy: Policy
    load: float
    slots: int

    def run(self) -> Flood:
        with passing_table(self.slots) as table:
            return Run(table, self.policy, seed=3).flood(self.load, CLIENTS)


def run(row: KeysOf | FloodOf) -> Steady | Flood:
    logging.getLogger("shmlimit").setLevel(logging.ERROR)  # each of these tables is too small: that is the question
    return row.run()


def percent(part: float, whole: float = 1) -> str:
    """A share; "0" is only said of none at all."""
    share = 100 * part / whole
    return (
        "0" if not part else f"{share:.3f} %" if share < 0.1 else f"{share:.2f} %" if share < 10 else f"{share:.0f} %"
    )


def heading(columns: tuple[str, ...]) -> tuple[str, str]:
    return f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"


def steady_row(row: KeysOf, seen: Steady) -> str:
    cells = (
        row.name,
        f"{row.load:.0%}" + ("" if row.before is None else f", after {row.before:.0%}"),
        percent(seen.live),
        percent(seen.crowded, seen.new),
        percent(seen.refused, seen.new),
        percent(seen.shared, seen.decisions),
        percent(seen.full, seen.decisions),
        percent(seen.lowered, seen.new),
        f"**{percent(seen.less, seen.keys)}**",
        f"{seen.more}",
    )
    return f"| {' | '.join(cells)} |"


def flood_row(row: FloodOf, seen: Flood) -> str:
    waits = sorted(seen.waits_us) or [0]
    median, tail = (waits[int(len(waits) * part)] / 1e6 for part in (0.5, 0.99))
    settled_s = (times(row.policy).settled_us - times(row.policy).end_us) // 10**6
    cells = (
        f"`{row.policy}`",
        f"{row.load:.0%}",
        f"{seen.more} of {seen.early:,}",
        f"{seen.differing} of {seen.held:,}",
        percent(seen.at_once, seen.during),
        f"{median:.1f} s, {tail:.0f} s",
        percent(seen.shut_out, seen.during),
        percent(seen.after_refused, seen.after),
        f"{seen.refused_until_us / 1e6:.0f} s",
        f"{seen.unsettled} of {seen.settled} ({settled_s} s)",
    )
    return f"| {' | '.join(cells)} |"


def recommended(rows: list[KeysOf], seen: list[Steady]) -> float:
    """The highest load that was measured, up to which in no population more than 1 key of 1,000 got less."""
    good = 0.0
    for load in LOADS:
        if any(
            one.less > one.keys / 1000
            for row, one in zip(rows, seen, strict=True)
            if row.load == load and row.before is None
        ):
            break
        good = load
    return good


def main(slots: int) -> None:
    populations = [KeysOf(ONE_NAME, load, slots) for load in LOADS]
    populations += [KeysOf(MANY_NAME, load, slots) for load in LOADS_OF_MANY]
    populations += [KeysOf(ONE_NAME, load, slots, before=OVERFULL) for load in RECOVERIES]
    floods = [FloodOf(policy, load, slots) for policy in FLOODED for load in FLOODS]
    # The longest first, and each in a process of its own: the rows have nothing to do with each other.
    order = sorted([*populations, *floods], key=lambda row: row.load, reverse=True)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        seen = dict(zip(order, pool.map(run, order, chunksize=1), strict=True))
    steadies = [seen[row] for row in populations]
    lines = [
        "# Full tables",
        "",
        f"{machine('shmlimit')}; simulated time; {slots:,} slots.",
        "",
        "## Keys that come and go",
        "",
        "Load: keys that are live at any time, of the slots. A quarter of the keys want more than their limit.",
        "",
        *heading(STEADY_COLUMNS),
        *map(steady_row, populations, steadies),
        "",
        f"Recommended: at most {recommended(populations, steadies):.0%} of the slots live at the busiest time.",
        "Up to there no more than 1 key of 1,000 got less than its limit, in a table that had not been overfull.",
        "",
        "## Floods of made-up keys",
        "",
        f"Flood: made-up keys that are live at any time, of the slots. Beside them {CLIENTS} keys that were spent",
        f"before it began, {CLIENTS} that ask all the time, and {3 * CLIENTS} newcomers during the flood and after it.",
        "",
        *heading(FLOOD_COLUMNS),
        *(flood_row(row, seen[row]) for row in floods),
    ]
    publish("load.md", "\n".join(lines) + "\n")
    broken = [row for row in populations if seen[row].more]
    broken += [row for row in populations if row.load in BAR_LOADS and seen[row].less > BAR * seen[row].keys]
    broken += [row for row in floods if seen[row].more or seen[row].differing or seen[row].unsettled]
    if broken:
        sys.exit(f"promises were broken: {broken}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SLOTS)
