"""Requests that take more than one question: shadow guards, and guards that are charged by the response.

The steps are written once, as generators that yield what to ask a store (the name of a method and its arguments) and
are sent the answer, or have its error thrown at them: `run` asks a store, `arun` through its coroutines.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from shmlimit.adapters._outcome import Asked
from shmlimit.errors import StoreError
from shmlimit.policies.base import Decision

Question: TypeAlias = "tuple[str, tuple[Any, ...]]"
Steps: TypeAlias = "Generator[Question, Any, Answers]"


class Answers(NamedTuple):
    """Decisions on what was asked, in its order; shadows may be fewer, where the store failed (`error`)."""

    firm: list[tuple[Asked, Decision]]
    shadows: list[tuple[Asked, Decision]]
    pending: list[Asked]
    error: StoreError | None = None


def run(steps: Steps, method: Callable[[str], Callable[..., Any]]) -> Answers:
    """Go through the steps; `method` gives a store's method of a name."""
    go_on = partial(steps.send, None)
    while not isinstance(question := _next(go_on), Answers):
        name, arguments = question
        try:
            go_on = partial(steps.send, method(name)(*arguments))
        except StoreError as error:
            go_on = partial(steps.throw, error)
    return question


async def arun(steps: Steps, method: Callable[[str], Callable[..., Coroutine[Any, Any, Any]]]) -> Answers:
    """`run` with a store's coroutines."""
    go_on = partial(steps.send, None)
    while not isinstance(question := _next(go_on), Answers):
        name, arguments = question
        try:
            go_on = partial(steps.send, await method(name)(*arguments))
        except StoreError as error:
            go_on = partial(steps.throw, error)
    return question


def _next(go_on: Callable[[], Question]) -> Question | Answers:
    """The next question, or what all of them came to."""
    try:
        return go_on()
    except StopIteration as end:
        answers: Answers = end.value
        return answers


def before(asked: list[Asked]) -> Steps:
    """Before the response: the guards that charge at once are decided in one step, unless one that is charged later is
    spent. Shadows come last, each by itself, and only where the others let the request pass.
    """
    at_once = [one for one in asked if not one[0].shadow and one[0].consume_on is None]
    later = [one for one in asked if one[0].consume_on is not None]
    decided: dict[str, Decision] = {}
    for guard, (policy, key, cost) in later:
        decision = yield "peek", (policy, key, 0)
        if decision.remaining < cost:
            decision = yield "peek", (policy, key, cost)
        decided[guard.name] = decision
    if not all(decided.values()):
        for guard, (policy, key, _) in at_once:
            decided[guard.name] = yield "peek", (policy, key, 0)
    elif len(at_once) == 1:
        ((guard, charge),) = at_once
        decided[guard.name] = yield "take", charge
    elif at_once:
        answers = yield "take_all", ([charge for _, charge in at_once],)
        decided |= {guard.name: decision for (guard, _), decision in zip(at_once, answers, strict=True)}
    firm = [(one, decided[one[0].name]) for one in asked if not one[0].shadow]
    passes = all(decision.allowed for _, decision in firm)
    shadows: list[tuple[Asked, Decision]] = []
    failed: StoreError | None = None
    for one in asked if passes else ():
        if one[0].shadow:
            try:
                decision = yield "take", one[1]
            except StoreError as error:  # a shadow stands in nobody's way
                failed = error
                continue
            shadows.append((one, decision))
    return Answers(firm, shadows, later if passes else [], failed)


def after(pending: list[Asked], status: int) -> Steps:
    """By the response: charge those that consume on this status."""
    firm: list[tuple[Asked, Decision]] = []
    for one in pending:
        consume_on = one[0].consume_on
        assert consume_on is not None
        if consume_on(status):
            decision = yield "take", one[1]
            firm.append((one, decision))
    return Answers(firm, [], [])
