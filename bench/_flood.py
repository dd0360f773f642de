"""A flood of made-up keys, in simulated time, and what keys that mean well meet in it.

`load` × slots of the flood's keys would be live at any time. Each asks once and never again. Meanwhile every answer to
the others is compared with the pure policy's on all that the key was allowed so far:

- *spent* keys had used up all they may before the flood began, and ask for all of it again and again, also in the last
  microsecond in which it isn't there and in the first in which it is;
- *regulars* ask for one unit at a time, faster than their limit allows, so their states never expire;
- *newcomers* ask for the first time during the flood or after it, and come again when they were told to.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from _inside import FULL, SHARED, own_lane

from shmlimit import Policy, SharedTable
from shmlimit.policies.base import State

T0 = 1_767_225_600_000_000  # 2026-01-01, where windows begin


@dataclass
class Client:
    """A key that means well. `state` is the pure policy's, after what the table allowed."""

    key: str
    cost: int = 1
    gap_us: int | None = None  # None: it asks until it gets in
    born_us: int = 0
    state: State | None = None
    alone: bool = False  # it has a slot that began as a fresh one, as long as its state is live


@dataclass
class Flood:
    """What was counted. Times are microseconds; waits and refusals are of newcomers."""

    flooded: int = 0  # made-up keys
    unserved: int = 0  # decisions without a slot: refused as `full`, or shared
    early: int = 0  # questions that the pure policy denies, by all keys but the flood's …
    more: int = 0  # … and those of them that were allowed
    held: int = 0  # decisions on keys with slots …
    differing: int = 0  # … and those that weren't exactly the pure policy's
    during: int = 0  # newcomers in the flood, …
    at_once: int = 0  # … those that were let in at their first request, …
    shut_out: int = 0  # … and those that had not got in when it ended
    waits_us: list[int] = field(default_factory=list)
    after: int = 0  # newcomers after the flood, …
    after_refused: int = 0  # … those whose first request was refused, …
    refused_until_us: int = 0  # … and until when after its end
    settled: int = 0  # newcomers after every state that the flood left had expired …
    unsettled: int = 0  # … and those that weren't served as a fresh key


class Times(NamedTuple):
    """When things happen, from what a hit and a whole quota take to expire."""

    begin_us: int
    hit_us: int
    spent_us: int

    @property
    def end_us(self) -> int:
        """Spent keys come back within the flood, and lose their slots to it."""
        return self.begin_us + self.spent_us * 5 // 4

    @property
    def settled_us(self) -> int:
        """A slot of the flood may have begun with as much as is spent; until it is free a group may be charged."""
        return self.end_us + 2 * self.spent_us

    @property
    def last_us(self) -> int:
        return self.settled_us + self.spent_us // 4


def times(policy: Policy) -> Times:
    """The times of a flood on `policy`."""
    hit, quota = (policy.expires_at(policy.decide(None, T0, cost)[1]) - T0 for cost in (1, policy.quota))
    return Times(T0, hit, quota)


class Run:
    """One flood on one table."""

    def __init__(self, table: SharedTable, policy: Policy, seed: int) -> None:
        self.table, self.policy, self.rng = table, policy, random.Random(seed)
        self.lane, self.times, self.counts = own_lane(table), times(policy), Flood()
        self.queue: list[tuple[int, int, Client]] = []
        self.serial = 0

    def flood(self, load: float, clients: int) -> Flood:
        """`clients` of each sort."""
        when, step_us = self.times, self.times.spent_us // 16
        for i in range(clients):
            spent = Client(f"spent {i}", self.policy.quota, step_us)
            regular = Client(f"regular {i}", 1, self.policy.period_us // self.policy.limit // 2)
            for client in (spent, regular):
                self.ask(client, when.begin_us)
        spans = ((when.begin_us, when.end_us), (when.end_us, when.settled_us), (when.settled_us, when.last_us))
        for i in range(3 * clients):
            born_us = self.rng.randrange(*spans[i % 3])
            self.later(born_us, Client(f"newcomer {i}", born_us=born_us))
        policy, take, counts, queue = self.policy, self.table.take, self.counts, self.queue
        number = round(load * self.table._slots * (when.end_us - when.begin_us) / when.hit_us)
        for i in range(number):
            now_us = when.begin_us + (when.end_us - when.begin_us) * i // number
            if queue[0][0] < now_us:
                self.catch_up(now_us)
            take(policy, b"made up %d" % i, now_us=now_us)
        counts.flooded, stats = number, self.table.stats()
        counts.unserved = stats["full"] + stats["shared"]
        self.catch_up(when.end_us)
        counts.shut_out = counts.during - len(counts.waits_us)
        self.catch_up(when.last_us)
        return counts

    def later(self, at_us: int, client: Client) -> None:
        self.serial += 1
        heappush(self.queue, (at_us, self.serial, client))

    def catch_up(self, now_us: int) -> None:
        """Everything that the clients do before `now_us`."""
        queue = self.queue
        while queue and queue[0][0] < now_us:
            at_us, _, client = heappop(queue)
            self.ask(client, at_us)

    def ask(self, client: Client, now_us: int) -> None:
        policy, counts, lane = self.policy, self.counts, self.lane
        unserved = lane[FULL] + lane[SHARED]
        decision = self.table.take(policy, client.key, client.cost, now_us=now_us)
        by_group = lane[FULL] + lane[SHARED] != unserved
        pure, state = policy.decide(client.state, now_us, client.cost)
        fresh = client.state is None or policy.expires_at(client.state) <= now_us
        counts.early += not pure.allowed
        counts.more += decision.allowed and not pure.allowed
        if client.alone and not fresh:
            counts.held += 1
            counts.differing += decision != pure
        else:
            client.alone = fresh and decision == pure and not by_group
        if decision.allowed:
            client.state = state
        if client.gap_us is not None:
            self.later(self.next_us(client, now_us), client)
        else:
            self.newcomer(client, now_us, decision.allowed, decision == pure)
            if not decision.allowed:
                self.later(now_us + max(1, decision.retry_after_us or 0), client)

    def next_us(self, client: Client, now_us: int) -> int:
        """When a spent key or a regular asks next: no edge of its state's time is passed over."""
        then_us = now_us + self.rng.randrange(1, 2 * (client.gap_us or 1))
        if client.state is not None:
            expires_us = self.policy.expires_at(client.state)
            for edge_us in (expires_us - 1, expires_us):
                if now_us < edge_us < then_us:
                    return edge_us
        return then_us

    def newcomer(self, client: Client, now_us: int, allowed: bool, as_fresh: bool) -> None:
        counts, when = self.counts, self.times
        first = now_us == client.born_us
        if client.born_us < when.end_us:
            counts.during += first
            counts.at_once += first and allowed
            if allowed and now_us < when.end_us:
                counts.waits_us.append(now_us - client.born_us)
            return
        counts.after += first
        if first and not allowed:
            counts.after_refused += 1
            counts.refused_until_us = now_us - when.end_us
        if first and client.born_us >= when.settled_us:
            counts.settled += 1
            counts.unsettled += not as_fresh
