"""What every adapter shares: the facts of a request in, a verdict out; and the store that this process was given."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from shmlimit import fields
from shmlimit.errors import ConfigError, StoreError
from shmlimit.guard import Guard, KeyFunction, Verdict
from shmlimit.keys import DENY, client_ip, needs_route
from shmlimit.limiter import check_policy, check_store
from shmlimit.policies.base import Decision, Policy
from shmlimit.stores.base import Store, coroutine_of

log = logging.getLogger("shmlimit")

PASS = Verdict(None, [])

UNBOUND = """\
this process shares no table, and a limit that each worker counts for itself is not the one that was asked for.
Under gunicorn, add to the configuration file, as its last line:

    from shmlimit.adapters.gunicorn import install
    install(globals())

Under other servers give it a table, store=SharedTable.open("a-name"), and for development, in one process,
store=MemoryStore() (from shmlimit.stores.memory)."""

NO_FILE = """\
The gunicorn hook keeps such policies in a SQLite file beside the table if it is given one: \
install(globals(), sqlite="limits.sqlite3")"""

FIRST: Final = 0
ROUTED: Final = 1
"""The two steps of a gate: before routing, and after it."""

T = TypeVar("T")
Trail: TypeAlias = "list[tuple[fields.Limit, Decision]]"
"""The guards that a request has passed, or been refused by, each with what its store decided."""

Asked: TypeAlias = "tuple[Guard, tuple[Policy, str | bytes, int]]"
"""A guard that applies, and what it charges: policy, key and cost."""

_bound: Store | None = None


def bind(store: Store) -> None:
    """Make `store` the one that adapters of this process, and of those forked from it, use by themselves."""
    global _bound  # noqa: PLW0603 - one for the process is what is meant
    _bound = store


def bound_store() -> Store | None:
    """What `bind` was given last, if anything."""
    return _bound


class Gate:
    """Guards, their keys and their store: `check` (or `acheck`) turns the facts of a request into a verdict.

    All guards that apply to a request are decided in one step, all or nothing. Where the adapter has a router
    (`routed=True`), those whose key needs the route are a second such step, `ROUTED`, after the first. A `trail`
    collects what was decided, and the fields of a verdict are those of all its guards, in their order here.

    Without a store of its own it takes the bound one at the first request that is limited, not before: with gunicorn's
    `--preload` the application is made before the table is.
    """

    __slots__ = ("_atake", "_atake_all", "_denied", "_failures", "_guards", "_places", "_steps", "_store", "routed")

    def __init__(
        self, guards: tuple[Guard, ...], store: Store | None, key: KeyFunction | None, *, routed: bool = False
    ) -> None:
        _check_guards(guards)
        if key is not None and not callable(key):
            raise ConfigError(f"key must be a callable of the request, such as keys.client_ip(), not {key!r}")
        key = key or client_ip()
        keyed = [(guard, guard.key or key) for guard in guards]
        later = [pair for pair in keyed if routed and needs_route(pair[1])]
        self._guards = guards
        self._places = {guard.name: place for place, guard in enumerate(guards)}
        self._denied = Verdict(*fields.denied(guards))
        self._steps = [pair for pair in keyed if pair not in later], later
        self.routed = bool(later)
        self._failures = 0
        self._store: Store | None = None
        self._atake: Callable[..., Awaitable[Decision]]
        self._atake_all: Callable[..., Awaitable[list[Decision]]]
        if store is not None:
            self._use(store)

    def check(self, method: str, path: str, request: Any, trail: Trail | None = None, step: int = FIRST) -> Verdict:
        """The verdict; `path` is decoded and without the mount point, `request` is what the key callables get."""
        asked = self._who(method, path, request, step)
        if isinstance(asked, Verdict):
            return asked
        store = self._use(_bound) if self._store is None else self._store
        try:
            if len(asked) == 1:
                decisions = [store.take(*asked[0][1])]
            else:
                decisions = store.take_all([charge for _, charge in asked])
        except StoreError as error:
            return self._failed(error, asked)
        return self._verdict(asked, decisions, trail, step)

    async def acheck(
        self, method: str, path: str, request: Any, trail: Trail | None = None, step: int = FIRST
    ) -> Verdict:
        """`check` for an event loop: through the store's coroutines, or in a thread where it has none."""
        asked = self._who(method, path, request, step)
        if isinstance(asked, Verdict):
            return asked
        if self._store is None:
            self._use(_bound)
        try:
            if len(asked) == 1:
                decisions = [await self._atake(*asked[0][1])]
            else:
                decisions = await self._atake_all([charge for _, charge in asked])
        except StoreError as error:
            return self._failed(error, asked)
        return self._verdict(asked, decisions, trail, step)

    def _who(self, method: str, path: str, request: Any, step: int) -> list[Asked] | Verdict:
        """The guards that apply, each with what it charges, or the verdict where no store is asked."""
        asked = []
        last = who = None
        for guard, key in self._steps[step]:
            if guard.exempt(method, path):
                continue
            if key is not last:  # PERF: guards side by side often share a key
                last, who = key, key(request)
            if who is not None:
                guard.check_key(who)
                if who is DENY:
                    return self._denied
                asked.append((guard, (guard.policy, who, guard.units(request))))
        return asked or PASS

    def _verdict(self, asked: list[Asked], decisions: list[Decision], trail: Trail | None, step: int) -> Verdict:
        if self._failures:
            self._recovered()
        entries: Trail
        if len(asked) == 1:  # PERF: nearly every request; what is below takes three times as long.
            guard, (_, key, _) = asked[0]
            limit = self._shown(guard, key) if guard.partition else guard
            entries, allowed = [(limit, decisions[0])], decisions[0].allowed
        else:
            limits = [self._shown(guard, key) for guard, (_, key, _) in asked]
            entries, allowed = list(zip(limits, decisions, strict=True)), all(decisions)
        if trail is not None:
            if trail and step == FIRST:  # what another limiter decided; those of this one go together
                fields.check_dialects(limit for limit, _ in (*trail, *entries))
            trail += entries
            if step == ROUTED:
                trail.sort(key=lambda entry: self._places[entry[0].name])
            entries = trail
        now_us = time.time_ns() // 1000
        if allowed:
            return Verdict(None, fields.response_fields(entries, now_us))
        return Verdict(*fields.too_many(entries, now_us))

    def _use(self, store: Store | None) -> Store:
        if store is None:
            raise ConfigError(UNBOUND)
        check_store(store)
        if max(map(len, self._steps)) > 1 and not callable(getattr(store, "take_all", None)):
            raise ConfigError(
                f"{type(store).__name__} has no take_all, so it can't decide {_names(self._guards)} all or nothing: "
                "give one guard, or a store that has it"
            )
        for guard in self._guards:
            guard.shown_to(b"", getattr(store, "secret", None))  # raises where there is none
            check_policy(store, guard.policy, repr(guard), NO_FILE if store is _bound else "Choose another one")
        self._atake = coroutine_of(store, "take")
        if callable(getattr(store, "take_all", None)):
            self._atake_all = coroutine_of(store, "take_all")
        self._store = store
        return store

    def _shown(self, guard: Guard, key: str | bytes) -> fields.Limit:
        return guard.shown_to(key, getattr(self._store, "secret", None))

    def _failed(self, error: StoreError, asked: list[Asked]) -> Verdict:
        """The verdict without a decision. Logged when failures begin and when they end, not once a request."""
        fail_open = all(guard.fail_open for guard, _ in asked)
        if not self._failures:
            meanwhile = "requests pass unlimited" if fail_open else "requests are answered with 503"
            log.error("%s: the store failed (%s); %s until it answers again", _names(self._guards), error, meanwhile)
        self._failures += 1
        return PASS if fail_open else Verdict(*fields.unavailable(guard for guard, _ in asked))

    def _recovered(self) -> None:
        log.warning("%s: the store answers again, after %d requests", _names(self._guards), self._failures)
        self._failures = 0


def _check_guards(guards: Sequence[Guard]) -> None:
    """Raise `ConfigError` for what isn't one guard or several, each with a name of its own."""
    names: set[str] = set()
    for guard in guards:
        if not isinstance(guard, Guard):
            raise ConfigError(f'expected a guard, such as Guard("per-ip", "10/minute"), not {guard!r}')
        if guard.name.lower() in names:
            raise ConfigError(
                f"two guards are named {guard.name!r} (letter case doesn't matter): clients tell them apart by it"
            )
        names.add(guard.name.lower())
    fields.check_dialects(guards)
    if not names:
        raise ConfigError('nothing is limited without a guard, such as Guard("per-ip", "10/minute")')


def families(fields: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """How the names (in lower case) of an application's headers begin that give way to these fields.

    All `RateLimit…` where there is one of them, so that a response has one generation; likewise `X-RateLimit…`.
    Everything else, `Retry-After` too, is the application's.
    """
    return tuple({"x-ratelimit" if name.startswith("X-") else "ratelimit" for name, _ in fields})


def wrapped(app: T) -> T:
    """The application that a wrapper was given; `ConfigError` if that came first which comes second."""
    if not callable(app):
        raise ConfigError(f"the application comes first: RateLimit(app, guard), not {app!r}")
    return app


def below_mount(path: str, root: str) -> str:
    """The path below the mount point, which ASGI leaves in the path and WSGI does not."""
    root = root.rstrip("/")
    return (path[len(root) :] or "/") if root and f"{path}/".startswith(f"{root}/") else path


def _names(guards: Sequence[Guard]) -> str:
    return ("guard " if len(guards) == 1 else "guards ") + ", ".join([repr(guard.name) for guard in guards])
