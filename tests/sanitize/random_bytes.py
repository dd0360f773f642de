"""Anything done to a table whose memory holds anything: an error or a sound decision, never a crash or an endless loop.

    python -m tests.sanitize.random_bytes NAME SEED ROUNDS

Prints what happened as JSON. Run as a process of its own, which may crash; `SHMLIMIT_TEST_HELPER` chooses the build.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable

from shmlimit import ContentionError, FixedWindow, Gcra, LayoutError, Policy, SharedTable, SlidingCounter, TokenBucket
from shmlimit.policies.base import Decision
from shmlimit.table import layout
from shmlimit.table.table import NOW_MAX_US
from tests.instrumented import pytest_configure as choose_helper

SLOTS = 64
YEAR = 366 * 86_400
POLICIES: list[Policy] = [
    TokenBucket(10, 60),
    TokenBucket(2048, 1.000001, 2048),
    TokenBucket(10**9, 3653 * 86_400),
    TokenBucket(1, 3653 * 86_400),
    Gcra(1, 0.001),
    FixedWindow(2**19 - 1, 0.001),
    FixedWindow(1, YEAR),
    FixedWindow(10**9, YEAR),
    FixedWindow(10**9, 4),
    SlidingCounter(511, 0.001),
    SlidingCounter(1, YEAR),
    SlidingCounter(16_383, YEAR),
    SlidingCounter(16_383, 1),
]
KEYS = [bytes([65 + number]) * number for number in range(18)]
PREFIXES = ["1", "010", "011", "0010", "0011", "000"]  # layout.py
WATERMARK, SHARED_UNTIL = 64, 128
CLOCK_OFFSET = slice(48, 56)

chance = random.Random()


def any_word() -> int:
    """Any 64 bits; often with a prefix of its own choice, and all ones, all zeros or anything after it."""
    prefix = chance.choice([*PREFIXES, ""])
    bits = 64 - len(prefix)
    rest = chance.choice([0, 2**bits - 1, chance.getrandbits(bits), chance.getrandbits(chance.randint(1, bits))])
    return int(prefix or "0", 2) << bits | rest


def put(table: SharedTable, at: int, word: int) -> None:
    table._opened()[0].mapping[at : at + 8] = word.to_bytes(8, "little")


def go_to_extremes(table: SharedTable) -> None:
    """The smallest and the largest word of each kind, at the first and the last time and by clocks beyond them."""
    clean = bytes(table._opened()[0].mapping)
    words = [int(prefix + digit * (64 - len(prefix)), 2) for prefix in PREFIXES for digit in "01"]
    offsets = [0, 2**63 - 1, 2**63, 2**64 - 1]
    for policy in POLICIES:
        for word in words:
            for now_us in (0, 1, NOW_MAX_US, *(None for _ in offsets)):
                for cost in (0, 1, policy.quota):
                    table._opened()[0].mapping[:] = clean
                    assert table.take(policy, "k", now_us=NOW_MAX_US // 2).allowed
                    (at,) = table.slots["fingerprint"].nonzero()[0]
                    put(table, layout.HEADER_BYTES + layout.SLOT_BYTES * int(at) + 8, word)
                    if now_us is None:
                        put(table, CLOCK_OFFSET.start, chance.choice(offsets))
                    with contextlib.suppress(LayoutError):
                        check(table.take(policy, "k", cost, now_us=now_us), policy, cost)
    table._opened()[0].mapping[:] = clean


def any_time() -> int | None:
    return chance.choice([None, 0, 1, NOW_MAX_US, chance.randint(0, NOW_MAX_US), 1_767_225_600_000_000])


def spoil(table: SharedTable) -> None:
    """Writes anything into states (so that keys find it), whole slots and the words of the header."""
    mapping = table._opened()[0].mapping
    end = layout.segment_bytes(SLOTS)
    for at in range(layout.HEADER_BYTES, end, layout.SLOT_BYTES):
        used = mapping[at : at + 8] != b"\0" * 8
        if used and chance.random() < 0.7:
            put(table, at + 8, any_word())
        elif chance.random() < (0.02 if used else 0.002):
            put(table, at, any_word())
            put(table, at + 8, any_word())
    for at in (WATERMARK, SHARED_UNTIL):
        if chance.random() < 0.3:
            put(table, at, chance.choice([0, 2**64 - 1, any_word()]))
    if chance.random() < 0.2:
        lanes = range(layout.LANES_AT, layout.HEADER_BYTES)
        mapping[lanes.start : lanes.stop] = chance.randbytes(len(lanes))
    if chance.random() < 0.2:
        mapping[CLOCK_OFFSET] = chance.randbytes(8)
    if chance.random() < 0.05:  # what nobody reads again once the table is open
        mapping[0:48] = chance.randbytes(48)


def check(decision: Decision, policy: Policy, cost: int) -> None:
    """What holds of every decision, whatever it was made of."""
    assert decision.limit == policy.quota
    assert 0 <= decision.remaining <= policy.quota, decision
    assert decision.reset_us >= 0, decision
    assert decision.next_us >= 0, decision
    if decision.allowed:
        assert decision.retry_after_us == 0
        assert cost <= policy.quota
    elif cost <= policy.quota:
        assert decision.retry_after_us is not None
        assert decision.retry_after_us > 0, decision
    else:
        assert decision.retry_after_us is None


def any_cost(policy: Policy) -> int:
    return chance.choice([0, 1, 1, 1, policy.quota, policy.quota + 1, 2**40])


def take(table: SharedTable) -> str:
    policy, cost = chance.choice(POLICIES), 0
    cost = any_cost(policy)
    function = chance.choice([table.take, table.take, table.peek])
    decision = function(policy, chance.choice(KEYS), cost, now_us=any_time())
    check(decision, policy, cost)
    return "allowed" if decision.allowed else "denied"


def take_all(table: SharedTable) -> str:
    policies = chance.sample(POLICIES, 3)
    requests = [(policy, chance.choice(KEYS), any_cost(policy)) for policy in policies]
    decisions = table.take_all(requests, now_us=any_time())
    for decision, (policy, _, _) in zip(decisions, requests, strict=True):
        assert decision.limit == policy.quota
        assert 0 <= decision.remaining <= policy.quota
    return "all" if all(decisions) else "not all"


def give_back(table: SharedTable) -> str:
    policy = chance.choice(POLICIES)
    charges = table.charge_all([(policy, chance.choice(KEYS), 1)], any_time())
    if not charges.stands:
        return "refused"
    if chance.random() < 0.5:
        spoil(table)
    charges.give_back()
    return "given back"


def reset(table: SharedTable) -> str:
    return "reset" if table.reset(chance.choice(POLICIES), chance.choice(KEYS)) else "nothing to reset"


def look(table: SharedTable) -> str:
    assert 0 <= table.used() <= SLOTS
    stats = table.stats()
    assert set(stats) == set(layout.COUNTERS)
    return "looked"


def attach(table: SharedTable) -> str:
    SharedTable.attach(table.name).close()
    return "attached"


OPERATIONS: list[Callable[[SharedTable], str]] = [take] * 8 + [take_all, give_back, reset, look, attach]


def main(name: str, seed: int, rounds: int) -> None:
    choose_helper()
    chance.seed(seed)
    happened: Counter[str] = Counter()
    with SharedTable.create(name, SLOTS) as table:
        go_to_extremes(table)
        mapping = table._opened()[0].mapping
        header = mapping[: layout.HEADER_BYTES]
        for round_ in range(rounds):
            if round_ % 20 == 0:  # a table that is all right, for its keys to have slots; full by and by
                mapping[:] = header + bytes(len(mapping) - len(header))
                for _ in range(chance.randint(0, 80)):
                    table.take(chance.choice(POLICIES), chance.choice(KEYS), now_us=1_767_225_600_000_000)
            spoil(table)
            for _ in range(10):
                operation = chance.choice(OPERATIONS)
                try:
                    happened[operation(table)] += 1
                except (LayoutError, ContentionError) as error:
                    happened[f"{type(error).__name__} of {operation.__name__}"] += 1
        table.unlink()
    sys.stdout.write(json.dumps(happened))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
