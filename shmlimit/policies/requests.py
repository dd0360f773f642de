"""Several limits for one request, and what stores agree on about keys. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from shmlimit.policies.base import Decision, Policy, State, check_cost

Request: TypeAlias = tuple[Policy, "str | bytes", int]
"""(policy, key, cost)."""


class Joint(NamedTuple):
    """Requests with each *(policy, key)* once and its costs added up; `places[i]` is where the i-th request went."""

    requests: list[tuple[Policy, bytes, int]]
    places: list[int]

    def spread(self, decisions: list[Decision]) -> list[Decision]:
        """The decisions on `requests`, one for each of the requests as they came."""
        return [decisions[place] for place in self.places]


def join(requests: Iterable[Request]) -> Joint:
    """The same policy and key twice adds the costs up and gets the joint answer.

    Raises `ValueError` for a bad cost and `TypeError` for a key that is neither `str` nor `bytes`.
    """
    joint = Joint([], [])
    at: dict[tuple[Policy, bytes], int] = {}
    for policy, key, cost in requests:
        identity = policy, key_bytes(key)
        place = at.setdefault(identity, len(joint.requests))
        if place == len(joint.requests):
            joint.requests.append((*identity, check_cost(cost)))
        else:
            joint.requests[place] = (*identity, joint.requests[place][2] + check_cost(cost))
        joint.places.append(place)
    return joint


def decide_all(
    requests: list[tuple[Policy, bytes, int]], load: Callable[[Policy, bytes], tuple[State | None, int]]
) -> tuple[list[Decision], list[State] | None]:
    """All or nothing over states that nobody else changes meanwhile: the decisions, and the new states if all allow.

    `load` gives the state of a policy and key and the time to judge it at. If one denies, the others report what they
    would with nothing taken.
    """
    loaded = [load(policy, key) for policy, key, _ in requests]
    decided = [
        policy.decide(state, now_us, cost) for (policy, _, cost), (state, now_us) in zip(requests, loaded, strict=True)
    ]
    if all(decision.allowed for decision, _ in decided):
        return [decision for decision, _ in decided], [state for _, state in decided]
    return [
        policy.decide(state, now_us, 0)[0] if decision.allowed else decision
        for (policy, _, _), (state, now_us), (decision, _) in zip(requests, loaded, decided, strict=True)
    ], None


def key_bytes(key: str | bytes) -> bytes:
    """The key's bytes: a `str` is its UTF-8, so `"a"` and `b"a"` are one key."""
    if isinstance(key, str):
        # Half of a surrogate pair has no UTF-8, but a key that a client made up must not raise.
        return key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return bytes(key)
    raise TypeError(f"a key is str or bytes, not {type(key).__name__}")
