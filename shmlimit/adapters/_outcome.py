"""What was decided about one request, for its handler and its fields; and the log of who is being refused."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from shmlimit import fields
from shmlimit.guard import Guard
from shmlimit.policies.base import Decision, Policy
from shmlimit.policies.requests import key_bytes

log = logging.getLogger("shmlimit")

Charge: TypeAlias = "tuple[Policy, str | bytes, int]"
"""What a store is asked for: policy, key and cost."""

Asked: TypeAlias = "tuple[Guard, Charge]"
"""A guard that applies, and what it charges."""


class Outcome(Mapping[str, Decision]):
    """What the limiter decided about a request: the name of a guard -> its decision, in order, shadow guards last.

    Guards that didn't apply aren't in it. One with `consume_on` has what a look at it said.
    """

    __slots__ = ("entries", "pending", "shadows")

    def __init__(self) -> None:
        self.entries: list[tuple[fields.Limit, Decision]] = []
        self.shadows: Sequence[tuple[fields.Limit, Decision]] = ()
        self.pending: dict[object, list[Asked]] = {}  # by gate: what is charged by the response

    def __getitem__(self, name: str) -> Decision:
        for limit, decision in (*self.entries, *self.shadows):
            if limit.name == name:
                return decision
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([limit.name for limit, _ in (*self.entries, *self.shadows)])

    def __len__(self) -> int:
        return len(self.entries) + len(self.shadows)

    def __repr__(self) -> str:
        return f"Outcome({dict(self)!r})"

    def replace(self, name: str, decision: Decision) -> None:
        """Put a later decision in the place of a guard's."""
        self.entries = [(limit, decision if limit.name == name else before) for limit, before in self.entries]


class _Refused:
    __slots__ = ("since_us", "times")

    def __init__(self, since_us: int) -> None:
        self.since_us, self.times = since_us, 0


class Refusals:
    """Says in the log when a key begins to be refused and when it is allowed again: two lines, never one a request.

    It remembers the last `MOST` refused keys of this process; of one that is forgotten for another, that is said. The
    lines are of level INFO, `refused …` and `allowed again …`, with `name=value` in them and the same as the record's
    attribute `shmlimit`, a dict.
    """

    MOST = 1_024

    __slots__ = ("_secret", "followed")

    def __init__(self) -> None:
        # While there is anybody, there is an end to be told.
        self.followed: OrderedDict[tuple[str, bool, str | bytes], _Refused] = OrderedDict()
        self._secret = secrets.token_bytes(32)

    def refused(self, guard: Guard, charge: Charge, decision: Decision, secret: bytes | None) -> None:
        """A guard refused, or as a shadow would have."""
        policy, key, cost = charge
        place = guard.name, guard.shadow, key
        found = self.followed.get(place)
        if found is None:
            if len(self.followed) >= self.MOST:
                gone, what = self.followed.popitem(last=False)
                self._tell("no longer followed", {"guard": gone[0], "refusals": what.times})
            found = self.followed[place] = _Refused(time.time_ns() // 1000)
            word = "would be refused" if guard.shadow else "refused"
            told = {"guard": guard.name, "key": self._shown(guard, key, secret), "policy": str(policy), "cost": cost}
            self._tell(word, told | {"retry_after": decision.retry_after})
        found.times += 1

    def allowed(self, guard: Guard, charge: Charge, secret: bytes | None) -> None:
        """A guard allowed: tells the end of what it refused before, if it did."""
        _, key, cost = charge
        found = self.followed.pop((guard.name, guard.shadow, key), None) if cost else None
        if found is not None:
            lasted_s = round((time.time_ns() // 1000 - found.since_us) / 1e6, 3)
            told = {"guard": guard.name, "key": self._shown(guard, key, secret), "refusals": found.times}
            self._tell("allowed again", told | {"seconds": lasted_s})

    def _shown(self, guard: Guard, key: str | bytes, secret: bytes | None) -> str | bytes:
        if guard.log_keys == "plain":
            return key
        own = guard.partition if isinstance(guard.partition, bytes) else secret or self._secret
        return fields.partition_key(key_bytes(key), own)

    def _tell(self, what: str, told: dict[str, object]) -> None:
        text = " ".join(f"{name}={value!r}" for name, value in told.items())
        log.info("%s: %s", what, text, extra={"shmlimit": {"event": what, **told}})
