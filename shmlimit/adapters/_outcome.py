"""What was decided about one request, for its handler and its fields; and the log of who is being refused."""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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
    __slots__ = ("last_us", "since_us", "times")

    def __init__(self, since_us: int) -> None:
        self.since_us, self.times = since_us, 0
        self.last_us = since_us


class Refusals:
    """Says in the log when a key begins to be refused and when it is allowed again: two lines, never one a request.

    A key that always asks for more than its limit is allowed and refused by turns. So the end is told when it is
    allowed and `QUIET_US` have passed since it was last refused; `seconds` lie between its first and last refusal.

    It remembers `MOST` refused keys of this process. The longest quiet one is forgotten for another, and that is said.
    While none is quiet others aren't followed, which is said once: whoever makes up keys can't fill the log.

    The lines are of level INFO, `refused …` and `allowed again …`, with `name=value` in them and the same as the
    record's attribute `shmlimit`, a dict.
    """

    MOST = 1_024
    QUIET_US = 60_000_000

    __slots__ = ("_overfull", "_secret", "followed")

    def __init__(self) -> None:
        # The last refused is last. While there is anybody, there is an end to be told.
        self.followed: OrderedDict[tuple[str, bool, str | bytes], _Refused] = OrderedDict()
        self._overfull = False
        self._secret = secrets.token_bytes(32)

    def refused(self, guard: Guard, charge: Charge, decision: Decision, secret: bytes | None) -> None:
        """A guard refused, or as a shadow would have."""
        policy, key, cost = charge
        place = guard.name, guard.shadow, key
        now_us = time.monotonic_ns() // 1000
        found = self.followed.get(place)
        if found is None:
            if len(self.followed) >= self.MOST and not self._room(guard, now_us):
                return
            found = self.followed[place] = _Refused(now_us)
            word = "would be refused" if guard.shadow else "refused"
            told = {"guard": guard.name, "key": self._shown(guard, key, secret), "policy": str(policy), "cost": cost}
            self._tell(word, told | {"retry_after": decision.retry_after})
        found.times += 1
        found.last_us = now_us
        with suppress(KeyError):  # another thread may just have told its end
            self.followed.move_to_end(place)

    def allowed(self, guard: Guard, charge: Charge, secret: bytes | None) -> None:
        """A guard allowed: tells the end of what it refused before, if it did."""
        _, key, cost = charge
        place = guard.name, guard.shadow, key
        found = self.followed.get(place) if cost else None
        if found is None or time.monotonic_ns() // 1000 - found.last_us < self.QUIET_US:
            return
        if self.followed.pop(place, None) is not None:  # of several threads one finds it
            lasted_s = round((found.last_us - found.since_us) / 1e6, 3)
            told = {"guard": guard.name, "key": self._shown(guard, key, secret), "refusals": found.times}
            self._tell("allowed again", told | {"seconds": lasted_s})

    def _room(self, guard: Guard, now_us: int) -> bool:
        """Forget a key that is quiet, for one of this guard; `False` if there is none."""
        gone, found = self.followed.popitem(last=False)
        if now_us - found.last_us >= self.QUIET_US:
            self._overfull = False
            self._tell("no longer followed", {"guard": gone[0], "refusals": found.times})
            return True
        self.followed[gone] = found
        self.followed.move_to_end(gone, last=False)
        if not self._overfull:
            self._overfull = True
            self._tell("too many to follow", {"guard": guard.name, "keys": self.MOST})
        return False

    def _shown(self, guard: Guard, key: str | bytes, secret: bytes | None) -> str | bytes:
        if guard.log_keys == "plain":
            return key
        own = guard.partition if isinstance(guard.partition, bytes) else secret or self._secret
        return fields.partition_key(key_bytes(key), own)

    def _tell(self, what: str, told: dict[str, object]) -> None:
        text = " ".join(f"{name}={value!r}" for name, value in told.items())
        log.info("%s: %s", what, text, extra={"shmlimit": {"event": what, **told}})
