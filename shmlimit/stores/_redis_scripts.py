"""What `RedisStore` says to a server, and what the answers mean: scripts, their arguments, states. It asks nobody.

A script decides and writes; it answers with the time that it judged at and the state that it found, and the pure policy
makes the decision of those. So no answer is worked out in Lua, and both must agree on whether it was allowed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

from shmlimit.errors import StoreError
from shmlimit.policies import FixedWindow, Gcra, SlidingCounter, SlidingLog, TokenBucket
from shmlimit.policies.base import US_PER_S, Decision, Policy, State
from shmlimit.policies.requests import decide_all
from shmlimit.stores.base import seen_from

KEY_BYTES = 64
"""Longer keys are hashed."""


class Script(NamedTuple):
    """The start of a command after its `*count`: by digest, and with the whole source."""

    by_digest: bytes
    by_source: bytes


class Call(NamedTuple):
    """A script and what follows it in the command: in all it has so many `parts`; `rest` is packed."""

    script: Script
    parts: int
    rest: bytes

    def short(self) -> bytes:
        """The command, for a server that has the script."""
        return b"*%d\r\n%b%b" % (self.parts, self.script.by_digest, self.rest)

    def long(self) -> bytes:
        """The same with the script itself."""
        return b"*%d\r\n%b%b" % (self.parts, self.script.by_source, self.rest)


class _Kind(NamedTuple):
    """How a kind of policy is told to its script, and its state read. `numbers` are those of one policy and cost."""

    file: str
    base_us: Callable[[Any], int]
    numbers: Callable[[Any, int], tuple[int, ...]]
    state: Callable[[Any, list[int]], State]


def _second(_policy: Policy) -> int:
    return US_PER_S


def _period(policy: Policy) -> int:
    return policy.period_us


def _gcra_numbers(policy: Gcra, cost: int) -> tuple[int, ...]:
    room, moves = (policy.burst - cost) * policy.period_us, cost * policy.period_us
    return (*divmod(room, policy.limit), *divmod(moves, policy.limit))


def _gcra_state(policy: Gcra, numbers: list[int]) -> State:
    seconds, us, numerator = numbers
    return {"kind": "gcra", "tat": (seconds * US_PER_S + us) * policy.limit + numerator}


def _fixed_state(policy: FixedWindow, numbers: list[int]) -> State:
    window, count = numbers
    return {"kind": "fixed", "start_us": window * policy.period_us, "count": count}


def _counter_state(policy: SlidingCounter, numbers: list[int]) -> State:
    window, previous, current = numbers
    start_us = window * policy.period_us
    return {"kind": "sliding-counter", "start_us": start_us, "previous": previous, "current": current}


def _log_state(_policy: SlidingLog, numbers: list[int]) -> State:
    hits = [[numbers[i] * US_PER_S + numbers[i + 1], numbers[i + 2]] for i in range(0, len(numbers), 3)]
    return {"kind": "sliding-log", "hits": hits}


KINDS: dict[type[Policy], _Kind] = {
    Gcra: _Kind("gcra", _second, _gcra_numbers, _gcra_state),
    FixedWindow: _Kind("fixed", _period, lambda _policy, _cost: (), _fixed_state),
    SlidingCounter: _Kind("sliding_counter", _period, lambda _policy, _cost: (), _counter_state),
    SlidingLog: _Kind("sliding_log", _second, lambda policy, _cost: (policy.period_us,), _log_state),
}
LETTERS: dict[type[Policy], str] = {TokenBucket: "t", Gcra: "g", FixedWindow: "f", SlidingCounter: "c", SlidingLog: "l"}
FILES = tuple(kind.file for kind in KINDS.values())
SERVER, GIVEN = "clock_server", "clock_given"


class Plan:
    """What a store needs of a policy, worked out once. A token bucket is kept and judged as its `as_gcra`: the same
    decisions on every input; its keys are its own.
    """

    __slots__ = ("base_us", "engine", "files", "head", "kind", "mark", "size", "usual")

    def __init__(self, prefix: str, policy: Policy) -> None:
        self.engine: Policy = policy.as_gcra() if isinstance(policy, TokenBucket) else policy
        self.kind = KINDS[type(self.engine)]
        self.base_us = self.kind.base_us(self.engine)
        burst = f":{policy.burst}" if isinstance(policy, TokenBucket | Gcra) else ""
        self.head = f"{{{prefix}}}:{LETTERS[type(policy)]}:{policy.limit}:{policy.period_us}{burst}".encode()
        self.mark = _bulk(self.head + b"!")
        self.files = (self.kind.file,)
        self.size = 6 + len(self.kind.numbers(self.engine, 0))
        self.usual = _bulk(b"1") + self.block(1, None)

    def key(self, key: bytes) -> bytes:
        """Where a key's state is: no two keys share one, short ones can be read, and all have one hash tag."""
        if len(key) <= KEY_BYTES:
            return b"%b=%b" % (self.head, key)
        return b"%b#%b" % (self.head, hashlib.blake2b(key, digest_size=20).hexdigest().encode())

    def block(self, cost: int, now_us: int | None) -> bytes:
        """A key's arguments. A cost that never fits is asked about as one of 0, and judged in Python alone."""
        engine, cost = self.engine, cost if cost <= self.engine.quota else 0
        given = (b"", b"") if now_us is None else divmod(now_us, self.base_us)
        return _packed(engine.kind.encode(), self.base_us, *given, cost, engine.limit, *self.kind.numbers(engine, cost))

    def found(self, words: Sequence[bytes], now_us: int | None) -> tuple[State | None, int]:
        """The state that a script found, and the time that it judged it at."""
        try:
            high, low, *numbers = [int(word) for word in words]
            state = self.kind.state(self.engine, numbers) if numbers else None
        except (ValueError, IndexError):
            raise _strange(b" ".join(words)) from None
        return state, high * (US_PER_S if now_us is None else self.base_us) + low


Entry: TypeAlias = tuple[Plan, bytes, int]
"""A plan, a key and its cost; each plan and key once."""


# ---- one key ---------------------------------------------------------------------------------------------------------


def take(plan: Plan, key: bytes, cost: int, now_us: int | None, *, charges: bool) -> Call:
    """What asks for a decision on a key, and charges the cost if it `charges`."""
    place = plan.key(key)
    if charges and cost == 1 and now_us is None:  # PERF: what is asked nearly always is packed already
        arguments = plan.usual
    else:
        arguments = _bulk(b"1" if charges else b"0") + plan.block(cost, now_us)
    if now_us is None:
        rest = b"$1\r\n1\r\n$%d\r\n%b\r\n%b" % (len(place), place, arguments)
        return Call(script(SERVER, plan.files, "take"), 5 + plan.size, rest)
    rest = b"$1\r\n2\r\n$%d\r\n%b\r\n%b%b" % (len(place), place, plan.mark, arguments)
    return Call(script(GIVEN, plan.files, "take"), 6 + plan.size, rest)


def taken(plan: Plan, cost: int, now_us: int | None, charges: bool, reply: bytes) -> Decision:
    """The decision that a reply to `take` stands for."""
    words = reply.split()
    state, at_us = plan.found(words[1:], now_us)
    decision, _ = plan.engine.decide(state, at_us, cost)
    if charges and decision.allowed != (words[0] == b"1"):
        raise _disagreement(plan.engine, reply)
    return decision if now_us is None else seen_from(decision, at_us - now_us)


def reset(plan: Plan, key: bytes) -> Call:
    """What forgets a key."""
    rest = _packed(1, plan.key(key), 0) + plan.block(0, None)
    return Call(script(SERVER, plan.files, "reset"), 5 + plan.size, rest)


def was_live(plan: Plan, reply: bytes) -> bool:
    """Whether there was a live state to forget."""
    state, at_us = plan.found(reply.split()[1:], None)
    return state is not None and plan.engine.expires_at(state) > at_us


# ---- several keys ----------------------------------------------------------------------------------------------------


def take_all(entries: list[Entry], now_us: int | None, *, charges: bool) -> Call:
    """What charges every entry or, unless it `charges`, looks at them."""
    keys, blocks = [], []
    for plan, key, cost in entries:
        keys.append(_bulk(plan.key(key)) + (b"" if now_us is None else plan.mark))
        blocks.append(plan.block(cost, now_us))
    count = len(entries) * (1 if now_us is None else 2)
    rest = b"".join((_packed(count), *keys, _packed(int(charges)), *blocks))
    size = 4 + count + sum(plan.size for plan, _, _ in entries)
    return Call(script(SERVER if now_us is None else GIVEN, FILES, "take_all"), size, rest)


def all_taken(entries: list[Entry], now_us: int | None, charges: bool, reply: bytes) -> list[Decision]:
    """The decisions that a reply to `take_all` stands for, an entry each."""
    texts = reply[2:].split(b";")
    if len(texts) != len(entries):
        raise _strange(reply)
    found = [plan.found(text.split(), now_us) for (plan, _, _), text in zip(entries, texts, strict=True)]
    places = iter(found)
    requests = [(plan.engine, key, cost) for plan, key, cost in entries]
    decisions, states = decide_all(requests, lambda _policy, _key: next(places))
    if charges and (states is not None) != reply.startswith(b"1"):
        raise _disagreement(entries[0][0].engine, reply)
    if now_us is None:
        return decisions
    return [seen_from(one, at_us - now_us) for one, (_, at_us) in zip(decisions, found, strict=True)]


def _strange(reply: bytes) -> StoreError:
    return StoreError(f"{reply!r} is no answer to a script; see what stands between here and the server")


def _disagreement(policy: Policy, reply: bytes) -> StoreError:
    """Two computations of one thing that differ: nobody is let in on that."""
    return StoreError(f"the script and {policy} disagree on {reply!r}; please report this")


# ---- scripts and packing ---------------------------------------------------------------------------------------------


@lru_cache
def script(clock: str, kinds: tuple[str, ...], what: str) -> Script:
    """One of the scripts, put together of the files in `lua`."""
    folder = resources.files("shmlimit.stores") / "lua"
    parts = [(folder / f"{name}.lua").read_bytes() for name in (clock, "head", *kinds, what)]
    source = b"\n".join(parts)
    digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()  # the name that a server gives it
    return Script(_packed(b"EVALSHA", digest), _packed(b"EVAL", source))


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _packed(*arguments: bytes | int) -> bytes:
    """Arguments as the protocol has them."""
    return b"".join([_bulk(one if isinstance(one, bytes) else b"%d" % one) for one in arguments])
