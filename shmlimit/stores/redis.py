"""RedisStore: limits in Redis or Valkey, exact over all hosts that use it; one atomic round trip a decision.

A decision is a script, which runs alone on the server: it reads the server's clock and the key's state, judges, and
writes if that allows. What it found comes back, and the pure policy makes the decision of it (_redis_scripts.py). The
Lua files in `lua` have the format of the states; _redis_lines.py has connections and errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from functools import partial

from shmlimit.errors import ConfigError
from shmlimit.policies.base import Decision, Policy, check_cost
from shmlimit.policies.requests import Joint, Request, join, key_bytes
from shmlimit.stores import _redis_scripts as scripts
from shmlimit.stores._breaker import Breaker
from shmlimit.stores._redis_lines import Lines, LoopLines
from shmlimit.stores._redis_scripts import LETTERS, Call, Plan
from shmlimit.stores._redis_server import Settings, closed
from shmlimit.stores.base import BaseStore, check_now, check_policy

_PREFIX = re.compile(r"[!-z|~]{1,64}", re.ASCII)
_MOST_PLANS = 4_096  # of policies that are made anew for each request


class RedisStore(BaseStore):
    """Rate limits in Redis (5 or later; tested with 7.0) or Valkey (tested with 9.1): all policies, exact over every
    process and host that uses the same server and `prefix`.

    `server` is an URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`) or a client of `redis` or
    `valkey`, plain or asyncio, of which address, database, credentials and TLS are taken. Its connections, timeouts,
    retries and decoding are not used: the store has connections of its own, one for each call under way (an event loop
    has at most 32). None is carried over a fork, so a server's master may construct the store, and use it.

    Connecting and each wait for an answer, or for more of it, may take `timeout` seconds (for an event loop all of an
    answer). Nothing is tried twice. When the server can't be reached, or says something that holds for every key (it
    loads its data, is a replica, is out of memory, wants a password), calls raise `StoreError` at once from then on,
    but for a probe after 1, 2, 4 … 32 s. Trouble with a single key doesn't do that. A call that timed out may have been
    charged all the same; nobody gets more by it.

    The time is the server's, unless `now_us` is given. Every key expires by itself once its state has. A key takes 130
    to 200 bytes of the server, and in a sliding log each hit that counts 26 more. What the server evicts (a
    `maxmemory-policy` other than `noeviction`), what is flushed, and what a primary hadn't told the replica that took
    over is forgotten: such a key begins afresh. If the server's clock is set back, a key that has a state opens when it
    would have by the old clock, and one that had been forgotten begins afresh.

    With a given `now_us` the server still forgets by its own clock, a minute late. It remembers as of which given time
    it forgot, for 30 days after the last such charge of a policy: a key that isn't there is not judged as of an
    earlier one.

    All keys of a store have one hash tag, `{prefix}`, so that a cluster takes several of them in one step: a store
    lives on one node, whose address you give. To spread over nodes, use stores with several prefixes.

    Raises `ConfigError` for an URL, a client, a prefix (1 to 64 printable ASCII characters, no braces or blanks) or a
    timeout that can't work, and without redis-py (`pip install 'shmlimit[redis]'`).
    """

    fails_fast = True

    def __init__(self, server: object, *, prefix: str = "shmlimit", timeout: float = 0.25) -> None:
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"prefix must be 1 to 64 printable ASCII characters without braces, not {prefix!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0.001 <= timeout <= 3600:
            raise ConfigError(f"timeout must be within 0.001 and 3600 seconds, not {timeout!r}")
        self.prefix = prefix
        self._settings = Settings(server, timeout)
        self._breaker = Breaker()
        self._lines = Lines(self._settings, self._breaker)
        self._loops: dict[asyncio.AbstractEventLoop, LoopLines] = {}
        self._plans: dict[Policy, Plan] = {}
        self._closing: set[object] = set()

    def __repr__(self) -> str:
        return f"<RedisStore {self._settings.name}, prefix {self.prefix!r}>"

    # ---- the store's protocol ----------------------------------------------------------------------------------------

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """Charge `cost` units to the key if they are there; see `Store.take`.

        Raises `ValueError` for a bad cost or time, `TypeError` for a key that is neither `str` nor `bytes`.
        """
        call, answer = self._take(policy, key, cost, now_us, charges=True)
        return answer(self._lines.ask(call))

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """Charge all of them or none, in one round trip; see `Store.take_all`."""
        joint, call, answer = self._take_all(requests, now_us)
        return joint.spread(answer(self._lines.ask(call))) if joint.requests else []

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """What `take` would say, taking nothing."""
        call, answer = self._take(policy, key, cost, now_us, charges=False)
        return answer(self._lines.ask(call))

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """Forget the key, so that its whole quota is there again; whether it had a live state."""
        plan = self._plan(policy)
        return scripts.was_live(plan, self._lines.ask(scripts.reset(plan, key_bytes(key))))

    def supports(self, policy: Policy) -> bool:
        """Whether it is one of the five policies: this store runs them all."""
        return type(policy) in LETTERS

    def close(self) -> None:
        """Close the connections; later calls raise `StoreError`. The states stay where they are.

        Those of event loops that still run are closed there, a moment later: `aclose` waits for that.
        """
        self._lines.close()
        for loop, lines in list(self._loops.items()):
            lines.closed = True
            if loop.is_running():
                with contextlib.suppress(RuntimeError):  # it has just ended, and so have they
                    loop.call_soon_threadsafe(self._close_in, loop, lines)

    # ---- for event loops: the same, over the loop's own connections --------------------------------------------------

    async def atake(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """`take`, for an event loop."""
        call, answer = self._take(policy, key, cost, now_us, charges=True)
        return answer(await (await self._loop_lines()).ask(call))

    async def atake_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """`take_all`, for an event loop."""
        joint, call, answer = self._take_all(requests, now_us)
        return joint.spread(answer(await (await self._loop_lines()).ask(call))) if joint.requests else []

    async def apeek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """`peek`, for an event loop."""
        call, answer = self._take(policy, key, cost, now_us, charges=False)
        return answer(await (await self._loop_lines()).ask(call))

    async def areset(self, policy: Policy, key: str | bytes) -> bool:
        """`reset`, for an event loop."""
        plan = self._plan(policy)
        return scripts.was_live(plan, await (await self._loop_lines()).ask(scripts.reset(plan, key_bytes(key))))

    async def aclose(self) -> None:
        """`close`, and wait until the connections of this event loop are closed."""
        self._lines.close()
        lines = self._loops.get(asyncio.get_running_loop())
        if lines is not None:
            await lines.close()
        self.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _plan(self, policy: Policy) -> Plan:
        plan = self._plans.get(check_policy(policy))
        if plan is None:
            if not self.supports(policy):
                raise ConfigError(f"RedisStore runs shmlimit's own policies, not {policy!r}")
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[policy] = Plan(self.prefix, policy)
        return plan

    def _take(
        self, policy: Policy, key: str | bytes, cost: int, now_us: int | None, *, charges: bool
    ) -> tuple[Call, Callable[[bytes], Decision]]:
        plan = self._plan(policy)
        charges = 0 < check_cost(cost) <= policy.quota and charges
        call = scripts.take(plan, key_bytes(key), cost, check_now(now_us), charges=charges)
        return call, partial(scripts.taken, plan, cost, now_us, charges)

    def _take_all(
        self, requests: Iterable[Request], now_us: int | None
    ) -> tuple[Joint, Call, Callable[[bytes], list[Decision]]]:
        joint = join((check_policy(policy), key, cost) for policy, key, cost in requests)
        entries = [(self._plan(policy), key, cost) for policy, key, cost in joint.requests]
        charges = all(cost <= policy.quota for policy, _, cost in joint.requests)
        call = scripts.take_all(entries, check_now(now_us), charges=charges)
        return joint, call, partial(scripts.all_taken, entries, now_us, charges)

    def _close_in(self, loop: asyncio.AbstractEventLoop, lines: LoopLines) -> None:
        self._closing.add(loop.create_task(lines.close()))  # a loop has weak references to tasks only

    async def _loop_lines(self) -> LoopLines:
        loop = asyncio.get_running_loop()
        lines = self._loops.get(loop)
        if lines is None:
            if self._lines.closed:
                raise closed(self._settings)
            if self._settings.not_for_loops:
                raise ConfigError(
                    f"the asyncio connections of {self._settings.name} can't do {self._settings.not_for_loops}"
                )
            for other in list(self._loops):  # HAZARD: loops of other threads come and go meanwhile
                if other.is_closed():
                    self._loops.pop(other, None)
            lines = self._loops[loop] = LoopLines(self._settings, self._breaker)
            lines.closed = self._lines.closed  # by another thread, just now
            await lines.open()
        return lines
