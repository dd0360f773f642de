"""A table in its steady state, in simulated time: keys come, make their requests, fall idle, expire, and new ones come.

The load is that of the keys, not of the table: as many keys as `load` × slots are live at any time by the pure policy,
and one that expires makes way for a new one at once. What each key should be told is worked out beforehand by the pure
policy, for a few thousand lives that keys are then given: a bucket's decisions depend on differences of time only, so
a life can begin at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from random import Random
from typing import NamedTuple, TypeAlias

from _inside import FULL, SHARED, live_slots, own_lane

from shmlimit import SharedTable, TokenBucket

T0 = 1_767_225_600_000_000  # 2026-01-01


class Life(NamedTuple):
    """A key's requests (µs since its first, one unit each), what the pure policy says to each, and when it expires."""

    policy: TokenBucket
    at_us: list[int]
    allowed: list[bool]
    expires_us: int


class Phase(NamedTuple):
    """A load, held until the population has expired that many times."""

    load: float
    lifetimes: float


Asker: TypeAlias = tuple[int, int, Life, int, bool]
"""A key's next request: when (µs), its number, its life and how far it is, and whether it got less so far."""


class Steady(NamedTuple):
    """What was counted in the last phase. `less` is of the `keys` that expired meanwhile, `lowered` of the `new`."""

    decisions: int
    new: int
    crowded: int  # new keys whose first request was shared, or refused as full
    refused: int  # new keys whose first request was refused
    lowered: int  # new keys whose first answer wasn't a fresh key's
    keys: int
    less: int  # keys that were refused what the pure policy allows after all that they were allowed
    more: int  # decisions that allowed what it denies
    full: int
    shared: int
    live: float  # slots that were live, of all


def lives(policies: Sequence[TokenBucket], number: int, seed: int) -> list[Life]:
    """A quarter of the keys ask once, a quarter want half as much again as their burst at once, the others a few."""
    rng = Random(seed)
    return [_life(policies[i % len(policies)], i // len(policies) % 4, rng) for i in range(number)]


def _life(policy: TokenBucket, sort: int, rng: Random) -> Life:
    interval_us = policy.period_us / policy.limit
    if sort == 0:
        requests, gap_us = 1, interval_us
    elif sort == 1:
        requests, gap_us = policy.quota * 3 // 2, interval_us / 8
    else:
        requests, gap_us = rng.randint(2, policy.quota // 2), interval_us / 2
    at_us, allowed, now_us, state = [], [], 0, None
    for _ in range(requests):
        decision, state = policy.decide(state, now_us)
        at_us.append(now_us)
        allowed.append(decision.allowed)
        now_us += int(rng.expovariate(1 / gap_us)) + 1
        if now_us >= policy.expires_at(state):
            break  # it would come back as a new key
    return Life(policy, at_us, allowed, policy.expires_at(state or {}))


def steady(table: SharedTable, given: Sequence[Life], phases: Sequence[Phase], seed: int) -> Steady:
    """Runs one phase after the other and counts in the last: the others warm the table up, or overfill it before."""
    population = Population(table, given, round(phases[0].load * table._slots), seed)
    for load, lifetimes in phases:
        size = round(load * table._slots)
        counts = population.run(size, round(lifetimes * size))
    return counts


class Population:
    """The keys that live on a table, `size` of them at the beginning."""

    def __init__(self, table: SharedTable, given: Sequence[Life], size: int, seed: int) -> None:
        self.table, self.given, self.rng = table, given, Random(seed)
        self.born = size
        mean_us = sum(life.expires_us for life in given) // len(given)
        self.queue: list[Asker] = [
            (T0 + self.rng.randrange(mean_us), key, self.rng.choice(given), 0, False) for key in range(size)
        ]
        heapify(self.queue)

    def run(self, size: int, wanted: int) -> Steady:
        """Shrinks to `size` if it is larger, and goes on until `wanted` more keys have expired."""
        given, queue, born, choose = self.given, self.queue, self.born, self.rng.choice
        table, take, lane = self.table, self.table.take, own_lane(self.table)
        decisions = new = crowded = refused = lowered = keys = less_keys = more = 0
        live: list[int] = []
        look, before = max(1, wanted // 16), table.stats()
        while keys < wanted:
            now_us, key, life, step, less = queue[0]
            unserved = lane[FULL] + lane[SHARED]
            allowed, limit, remaining, *_ = take(life.policy, b"%d" % key, now_us=now_us)
            decisions += 1
            if step == 0:
                new += 1
                crowded += lane[FULL] + lane[SHARED] != unserved
                refused += not allowed
                lowered += remaining != limit - 1
            if allowed != life.allowed[step] and not less:  # from then on the two histories differ
                less = not allowed
                more += allowed
            begin_us = now_us - life.at_us[step]
            step += 1
            if step < len(life.at_us):
                heapreplace(queue, (begin_us + life.at_us[step], key, life, step, less))
                continue
            if len(queue) > size:
                heappop(queue)
                continue
            heapreplace(queue, (begin_us + life.expires_us, born, choose(given), 0, False))
            born += 1
            keys += 1
            less_keys += less
            if keys % look == 0:
                live.append(live_slots(table, now_us))
        self.born = born
        after = table.stats()
        full, shared = (after[name] - before[name] for name in ("full", "shared"))
        share = sum(live) / len(live) / table._slots
        return Steady(decisions, new, crowded, refused, lowered, keys, less_keys, more, full, shared, share)
