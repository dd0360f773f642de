"""Another worker comes in between: at each access to shared memory in turn, all of what it does at once.

The helper is built with a hook before each access. What two calls answer must be what they answer one after the other,
in one order or the other: nothing in between may be seen, granted twice or lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shmlimit import FixedWindow, Policy, SharedTable, SlidingCounter, TokenBucket
from tests.between import LATER, T0, Between, clear, fill, left, reserve

Act = Callable[[SharedTable, Policy], Any]


# ---- what there is, and what is done ---------------------------------------------------------------------------------


def taken(table: SharedTable, policy: Policy, cost: int) -> None:
    table.take(policy, "k", cost, now_us=LATER)


def crowded(table: SharedTable, policy: Policy, cost: int) -> None:
    taken(table, policy, cost)
    fill(table, LATER, 23)


SITUATIONS: dict[str, Act] = {
    "empty": lambda *_: None,
    "one left": lambda table, policy: taken(table, policy, 1),
    "spent": lambda table, policy: taken(table, policy, 2),
    "expired": lambda table, policy: table.take(policy, "k", 2, now_us=T0),
    "all expired": lambda table, _: fill(table, T0),
    "one expired": lambda table, policy: (table.take(policy, "other", now_us=T0), fill(table, LATER, 23)),
    "full": lambda table, _: fill(table, LATER),
    "spent in a full table": lambda table, policy: crowded(table, policy, 2),
    "reserved": lambda table, policy: (taken(table, policy, 1), reserve(table, 1)),
    "reserved three times": lambda table, policy: (taken(table, policy, 1), reserve(table, 3)),
}

CALLS: dict[str, Act] = {
    "take": lambda table, policy: table.take(policy, "k", now_us=LATER),
    "take both": lambda table, policy: table.take(policy, "k", 2, now_us=LATER),
    "peek": lambda table, policy: table.peek(policy, "k", 1, now_us=LATER),
    "take another": lambda table, policy: table.take(policy, "another", now_us=LATER),
    "take later": lambda table, policy: table.take(policy, "k", now_us=LATER + 10**6),
    "never": lambda table, policy: table.take(policy, "k", 3, now_us=LATER),
    "clear": lambda table, _: clear(table),
}
INNER = {"clear", "give away"}  # what isn't made of accesses


def give_away(table: SharedTable, states: Any) -> None:
    """Every key is forgotten, and its slot has another's state, which is to the bit what this one was at first."""
    slots = table.slots
    committed = slots["state"] >> 61 != 0
    slots["fingerprint"][committed] ^= 1
    slots["state"][committed] = states[committed]


TIGHT = {
    "all expired",
    "one expired",
    "full",
    "spent in a full table",
}  # which slot is taken may differ, and how long to wait
KINDS = [(TokenBucket(2, 60), situation) for situation in SITUATIONS] + [
    (policy, situation)
    for policy in (FixedWindow(2, 60), SlidingCounter(2, 60))
    for situation in ("one left", "spent", "expired")
]


def told(decision: Any, situation: str) -> Any:
    """What is compared of an answer."""
    return decision[:3] if decision is not None and situation in TIGHT else decision


@pytest.mark.parametrize(("policy", "situation"), KINDS, ids=str)
def test_two_calls_are_one_after_the_other(small: SharedTable, hooked: Between, policy: Policy, situation: str) -> None:
    """Any call within any other, at each access in turn: the answers, and what is left, are those of an order."""
    mapping = small._opened()[0].mapping
    for call in CALLS.values():  # whatever is prepared for a policy is made
        call(small, policy)
    small.slots[:] = 0
    SITUATIONS[situation](small, policy)
    before, states = bytes(mapping), small.slots["state"].copy()
    calls = CALLS | {"give away": lambda table, _: give_away(table, states)}

    def do(name: str) -> Any:
        return told(calls[name](small, policy), situation)

    def rest() -> Any:
        decision, pairs = left(small, policy)
        return told(decision, situation), None if situation in TIGHT else pairs

    for outer in set(calls) - INNER:
        mapping[:] = before
        hooked.run(lambda outer=outer: do(outer))
        accesses = hooked.accesses
        for inner in set(calls) - {"never"}:
            mapping[:] = before
            outer_first = do(outer), do(inner), rest()
            mapping[:] = before
            inner_first = (do(inner), do(outer), rest())
            for at in range(accesses):
                mapping[:] = before
                inside: list[Any] = []
                answer = hooked.run(
                    lambda outer=outer: do(outer), lambda inner=inner, to=inside: to.append(do(inner)), at
                )
                got = answer, inside[0], rest()
                if small.stats()["shared"] == 0:
                    assert got in (outer_first, (inner_first[1], inner_first[0], inner_first[2])), (outer, inner, at)
                elif inner not in INNER:  # over a spare slot: what it was told is another's turn, never more
                    assert units(outer, answer) + units(inner, inside[0]) <= policy.quota, (outer, inner, at)


def units(name: str, answer: Any) -> int:
    """How much of the key's quota a call was allowed."""
    return {"take": 1, "take both": 2, "take later": 1}.get(name, 0) * bool(answer[0])
