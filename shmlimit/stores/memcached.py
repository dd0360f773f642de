"""MemcachedStore: limits in memcached, exact over the hosts that share it, as long as memcached keeps them.

memcached can compare and swap, and nothing else that helps here. So a decision is

    gets -> read the clock -> the policy decides -> allowed: cas (add where there was none) -> lost: from the beginning

A swap is lost only when another request's went through, so together they get on, and each tries a bounded number of
times. What is refused is refused after the `gets`, and writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, TypeVar

from shmlimit.errors import ConfigError, ContentionError, StoreError
from shmlimit.policies.base import Decision, Policy, State, check_cost
from shmlimit.policies.fixed_window import FixedWindow
from shmlimit.policies.gcra import Gcra
from shmlimit.policies.requests import Request, decide_all, join, key_bytes
from shmlimit.policies.sliding_counter import SlidingCounter
from shmlimit.policies.token_bucket import TokenBucket
from shmlimit.stores._give_back import without
from shmlimit.stores._memcached_server import Address, MemcachedServer, expiry
from shmlimit.stores.base import BaseStore, check_now, check_policy, policy_text, wall_clock

_T = TypeVar("_T")

TRIES = 256
"""Swaps that a charge may lose before it is a `ContentionError`; bench/memcached.py has how many are lost."""

PAUSES = 4
PAUSE_S = 0.002
"""After its first losses a request stands back, for up to so long: two that go in step would take turns for ever, and
those that have lost more often go first.
"""

LAPS = 8
"""How often `take_all` begins anew after a limit that had allowed was used up before it could be charged."""

PREFIX_MAX = 200
_DIGEST_BYTES = 24  # nobody finds two keys with one hash of so many
_KINDS = (TokenBucket, Gcra, FixedWindow, SlidingCounter)
_encode = json.JSONEncoder(separators=(",", ":")).encode


class _Found(NamedTuple):
    """The state of a key and the number to swap it by: `None` twice where there is none."""

    state: State | None
    unique: bytes | None


class _Charge(NamedTuple):
    policy: Policy
    name: str
    cost: int
    state: State


class MemcachedStore(BaseStore):
    """Rate limits in one memcached: all policies but the sliding log, shared by the hosts that use it.

    `server` is `"host:port"`, `(host, port)` or the path of a Unix socket. `timeout` is how many seconds connecting and
    each wait for an answer may take (the look-up of a name is the system's, and has no bound: give an address where
    that matters). A failure is a `StoreError`; from then on calls raise it at once, but for a probe after 1, 2, 4 …
    32 s. Nothing is tried again behind the caller's back, so a charge whose answer got lost may stand: nobody gets more
    by that. `prefix` begins every name in memcached; the rest is a hash of policy and key.

    What memcached can't promise:

    - **It forgets.** A restart or `flush_all` forgets all counts, and a full memory the ones not used for longest, and
      with a count its limit begins anew. See that `evictions` in `stats` stays 0 (a key takes some 200 bytes), and
      don't share the server with a cache that fills it. Started with `-M` it refuses instead: a `StoreError`.
    - **Time is the hosts' own wall clock**, since memcached has none to ask: keep them in step (NTP). A host that is
      ahead by a second sees a second's refill early. A clock that is set back grants nothing; a spent key then opens
      when it would have by the clock that wrote it, or when memcached forgets it. With a `now_us` of the caller's,
      memcached still forgets by its own clock, and remembers nothing of what it forgot.
    - **All or nothing** (`take_all`) is the best that single swaps allow. All are read in one trip, and a refusal there
      has charged nothing, which is nearly all of them. Then they are charged one after the other, scarcest first; when
      one is used up in between, those before it are given back, which for a bucket that was full costs the time that it
      took. If the server fails in between, they stay charged, and the `StoreError` says so. Never is more let
      through than a limit says.

    `clock` (a callable that gives microseconds since 1970) stands in for the wall clock in tests. Raises `ConfigError`
    for an address, a prefix or a timeout that can't work, and where pymemcache is missing. It may be made before a
    fork; connections are made as they are needed, one for each call that is under way.
    """

    fails_fast: ClassVar[bool] = True

    def __init__(
        self,
        server: Address,
        *,
        prefix: str = "shmlimit",
        timeout: float = 0.25,
        clock: Callable[[], int] | None = None,
    ) -> None:
        if (
            not isinstance(prefix, str)
            or not 1 <= len(prefix) <= PREFIX_MAX
            or not all("!" <= char <= "~" for char in prefix)
        ):
            raise ConfigError(f"prefix must be 1 to {PREFIX_MAX} printable ASCII characters, not {prefix!r}")
        self.prefix = prefix
        self._server = MemcachedServer(server, timeout)
        self._clock = wall_clock if clock is None else clock

    def __repr__(self) -> str:
        return f"<MemcachedStore {self._server.text}, prefix {self.prefix!r}>"

    # ---- the store's protocol ----------------------------------------------------------------------------------------

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """Charge `cost` units to the key if they are there; see `Store.take`.

        Raises `ValueError` for a bad cost or time, `TypeError` for a key that is neither `str` nor `bytes`, and
        `ContentionError`, with nothing charged, after `TRIES` swaps that others won.
        """
        name = self._name(policy, key_bytes(key))
        check_cost(cost)
        check_now(now_us)
        return self._take(policy, name, cost, now_us)[0]

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """Charge all of them or none, as well as memcached can; see `Store.take_all` and above."""
        joint = join((self._check(policy), key, cost) for policy, key, cost in requests)
        check_now(now_us)
        names = [self._name(policy, key) for policy, key, _ in joint.requests]
        for _ in range(LAPS if names else 0):
            values = self._server.fetch(names)
            found = [
                self._read(request[0], values.get(name)) for request, name in zip(joint.requests, names, strict=True)
            ]
            at_us, each = self._now_us(now_us), iter(found)
            decisions, states = decide_all(joint.requests, lambda *_: (next(each).state, at_us))  # noqa: B023
            if states is None or self._charge_all(joint.requests, names, found, decisions, now_us):
                return joint.spread(decisions)
        if not names:
            return []
        raise ContentionError(
            f"a joint request at memcached at {self._server.text} had one of its limits used up by others {LAPS} times "
            f"while it was charged: nothing was charged, try again"
        )

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """What `take` would say, taking nothing."""
        name = self._name(policy, key_bytes(key))
        check_cost(cost)
        check_now(now_us)
        found = self._find(policy, name)
        return policy.decide(found.state, self._now_us(now_us), cost)[0]

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """Forget the key, so that its whole quota is there again; whether it had a live state (or a broken one)."""
        name = self._name(policy, key_bytes(key))
        value = self._server.fetch([name]).get(name)
        if value is None:
            return False
        state = _decode(policy, value[0])
        live = state is None or policy.expires_at(state) > self._clock()
        return self._server.delete(name) and live

    def supports(self, policy: Policy) -> bool:
        """All but the sliding log, whose state grows with its limit: each hit would send all of it twice."""
        return isinstance(policy, _KINDS)

    def close(self) -> None:
        """Close the connections; later calls raise `StoreError`. The states stay in memcached."""
        self._server.close()

    async def _off_loop(self, method: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        self._server.refuse()  # a known failure isn't worth the way to a thread
        return await super()._off_loop(method, *arguments, **named)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _take(
        self, policy: Policy, name: str, cost: int, now_us: int | None, found: _Found | None = None
    ) -> tuple[Decision, State | None]:
        """The decision, and the state that was written, if one was. `found` is what a first try may go by."""
        for _ in _tries():
            state, unique = self._find(policy, name) if found is None else found
            at_us = self._now_us(now_us)
            decision, state = policy.decide(state, at_us, cost)
            if not decision.allowed or not cost:
                return decision, None
            if self._keep(policy, name, state, unique, at_us):
                return decision, state
            found = None
        raise ContentionError(
            f"memcached at {self._server.text} let others change the key first {TRIES} times in a row: nothing was "
            f"charged, try again; a key as hot as that is better kept in a SharedTable or in Redis"
        )

    def _charge_all(
        self,
        requests: list[tuple[Policy, bytes, int]],
        names: list[str],
        found: list[_Found],
        decisions: list[Decision],
        now_us: int | None,
    ) -> bool:
        """Charge them one after the other, scarcest first, and put in the decisions; `False` if nothing is charged."""
        charges: list[_Charge] = []
        places = [place for place, (_, _, cost) in enumerate(requests) if cost]
        try:
            for place in sorted(places, key=lambda place: decisions[place].remaining):
                policy, _, cost = requests[place]
                decisions[place], state = self._take(policy, names[place], cost, now_us, found[place])
                if state is None:
                    break
                charges.append(_Charge(policy, names[place], cost, state))
            else:
                return True
        except StoreError as error:
            self._give_back(charges, now_us, error)
            raise
        except BaseException:
            with contextlib.suppress(StoreError):
                self._give_back(charges, now_us, None)
            raise
        self._give_back(charges, now_us, None)
        return False

    def _give_back(self, charges: list[_Charge], now_us: int | None, because: BaseException | None) -> None:
        failures = [failure for charge in reversed(charges) if (failure := self._give_one_back(charge, now_us))]
        if failures:
            raise StoreError(
                f"{len(failures)} of the limits of a joint request that was not let through may stay charged, since "
                f"giving back failed: {failures[0]}"
            ) from because or failures[0]

    def _give_one_back(self, charge: _Charge, now_us: int | None) -> StoreError | None:
        try:
            for _ in _tries():
                found = self._find(charge.policy, charge.name)
                at_us = self._now_us(now_us)
                state = without(charge.policy, found.state, charge.state, charge.cost, at_us)
                if state is None or self._keep(charge.policy, charge.name, state, found.unique, at_us):
                    return None
        except StoreError as error:
            return error
        return StoreError(f"memcached at {self._server.text} let others change the key first {TRIES} times in a row")

    def _now_us(self, now_us: int | None) -> int:
        return self._clock() if now_us is None else now_us

    def _check(self, policy: Policy) -> Policy:
        if not self.supports(check_policy(policy)):
            raise ConfigError(f"MemcachedStore doesn't run '{policy}'; RedisStore and SqliteStore do")
        return policy

    def _name(self, policy: Policy, key: bytes) -> str:
        """What memcached knows the key by: whatever its bytes are, at most 250 printable characters."""
        identity = f"{policy_text(self._check(policy))}\0".encode() + key
        return f"{self.prefix}:{blake2b(identity, digest_size=_DIGEST_BYTES).hexdigest()}"

    def _find(self, policy: Policy, name: str) -> _Found:
        return self._read(policy, self._server.fetch([name]).get(name))

    def _read(self, policy: Policy, value: tuple[bytes, bytes] | None) -> _Found:
        if value is None:
            return _Found(None, None)
        state = _decode(policy, value[0])
        if state is None:
            raise self._server.failure(
                f"a value under the prefix {self.prefix!r} isn't a state of '{policy}' but {value[0][:40]!r}; reset "
                f"the key, and see who else writes there"
            )
        return _Found(state, value[1])

    def _keep(self, policy: Policy, name: str, state: State, unique: bytes | None, at_us: int) -> bool:
        expire = expiry(policy.expires_at(state) - at_us)
        return self._server.put(name, _encode(state).encode(), unique, expire)


def _tries() -> Iterator[None]:
    for number in range(TRIES):
        if 1 <= number <= PAUSES:
            time.sleep(PAUSE_S * random.random())  # noqa: S311 - no secret
        yield


def _decode(policy: Policy, value: bytes) -> State | None:
    """The state, or `None` for what is no state of this policy."""
    try:
        state = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return state if policy._is_own(state) else None
