"""What every adapter shares: the facts of a request in, a verdict out; and the store that this process was given."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from shmlimit import fields
from shmlimit.errors import ConfigError, StoreError
from shmlimit.guard import Guard, KeyFunction, Verdict
from shmlimit.keys import DENY, client_ip
from shmlimit.policies.base import Decision
from shmlimit.stores.base import Store

log = logging.getLogger("shmlimit")

PASS = Verdict(None, [])
DENIED = Verdict(403, [*fields.PLAIN_ANSWER], b"This request says too little about who sends it.\n")
UNAVAILABLE = Verdict(503, [("Retry-After", "1"), *fields.PLAIN_ANSWER], b"The rate limiter can't answer.\n")

UNBOUND = """\
this process shares no table, and a limit that each worker counts for itself is not the one that was asked for.
Under gunicorn, add to the configuration file, as its last line:

    from shmlimit.adapters.gunicorn import install
    install(globals())

For development and other servers, give the middleware a table: store=SharedTable.open("a-name")."""

_bound: Store | None = None


def bind(store: Store) -> None:
    """Make `store` the one that adapters of this process, and of those forked from it, use by themselves."""
    global _bound  # noqa: PLW0603 - one for the process is what is meant
    _bound = store


def bound_store() -> Store | None:
    """What `bind` was given last, if anything."""
    return _bound


class Gate:
    """One guard, its key and its store: `check` (or `acheck`) turns the facts of a request into a verdict.

    Without a store of its own it takes the bound one at the first request that is limited, not before: with gunicorn's
    `--preload` the application is made before the table is.
    """

    __slots__ = ("_atake", "_failures", "_guard", "_key", "_store")

    def __init__(self, guards: tuple[Guard, ...], store: Store | None, key: KeyFunction | None) -> None:
        for guard in guards:
            if not isinstance(guard, Guard):
                raise ConfigError(f'expected a guard, such as Guard("per-ip", "10/minute"), not {guard!r}')
        if not guards:
            raise ConfigError('nothing is limited without a guard: give one, such as Guard("per-ip", "10/minute")')
        if len(guards) > 1:
            raise ConfigError(
                f"one guard, not {len(guards)}: several limits for one request must be charged all or nothing, or a "
                "request that one of them refuses still uses up the others, and this version can't do that yet"
            )
        if key is not None and not callable(key):
            raise ConfigError(f"key must be a callable of the request, such as keys.client_ip(), not {key!r}")
        self._guard = guards[0]
        self._key: KeyFunction = self._guard.key or key or client_ip()
        self._failures = 0
        self._store: Store | None = None
        self._atake: Callable[..., Awaitable[Decision]] | None = None
        if store is not None:
            self._use(store)

    def check(self, method: str, path: str, request: Any) -> Verdict:
        """The verdict; `path` is decoded and without the mount point, `request` is what the key callable gets."""
        key = self._who(method, path, request)
        if key is None:
            return PASS
        if key is DENY:
            return DENIED
        store = self._use(_bound) if self._store is None else self._store
        try:
            decision = store.take(self._guard.policy, key, self._guard.units(request))
        except StoreError as error:
            return self._failed(error)
        if self._failures:
            self._recovered()
        return self._guard.enforce(decision, time.time_ns() // 1000)

    async def acheck(self, method: str, path: str, request: Any) -> Verdict:
        """`check` for an event loop: through the store's `atake`, or in a thread where it has none."""
        key = self._who(method, path, request)
        if key is None:
            return PASS
        if key is DENY:
            return DENIED
        store = self._use(_bound) if self._store is None else self._store
        units = self._guard.units(request)
        try:
            if self._atake is not None:
                decision = await self._atake(self._guard.policy, key, units)
            else:
                decision = await asyncio.to_thread(store.take, self._guard.policy, key, units)
        except StoreError as error:
            return self._failed(error)
        if self._failures:
            self._recovered()
        return self._guard.enforce(decision, time.time_ns() // 1000)

    def _who(self, method: str, path: str, request: Any) -> Any:
        """The key, `DENY`, or `None` for a request that isn't limited."""
        guard = self._guard
        if guard.exempt(method, path):
            return None
        key = self._key(request)
        if key is not None:
            guard.check_key(key)
        return key

    def _use(self, store: Store | None) -> Store:
        if store is None:
            raise ConfigError(UNBOUND)
        if not callable(getattr(store, "take", None)):
            raise ConfigError(f'store must be a store, such as SharedTable.open("a-name"), not {store!r}')
        if not store.supports(self._guard.policy):
            store.peek(self._guard.policy, "")  # a store's own error says which bound it is
            raise ConfigError(f"{type(store).__name__} can't run the policy of {self._guard!r}: choose another one")
        self._atake = getattr(store, "atake", None)
        self._store = store
        return store

    def _failed(self, error: StoreError) -> Verdict:
        """The verdict without a decision. Logged when failures begin and when they end, not once a request."""
        if not self._failures:
            meanwhile = "requests pass unlimited" if self._guard.fail_open else "requests are answered with 503"
            log.error("guard %r: the store failed (%s); %s until it answers again", self._guard.name, error, meanwhile)
        self._failures += 1
        return PASS if self._guard.fail_open else UNAVAILABLE

    def _recovered(self) -> None:
        log.warning("guard %r: the store answers again, after %d requests", self._guard.name, self._failures)
        self._failures = 0
