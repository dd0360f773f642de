"""FallbackStore: a second store answers while the first is down."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from shmlimit.errors import ConfigError, ContentionError, StoreError
from shmlimit.policies.base import Decision, Policy
from shmlimit.policies.requests import Request
from shmlimit.policies.token_bucket import TokenBucket
from shmlimit.stores._breaker import Breaker, Outage
from shmlimit.stores.base import BaseStore, Store, check_policy, coroutine_of
from shmlimit.stores.memory import MemoryStore

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("shmlimit")
_T = TypeVar("_T")

LINES = TokenBucket(20, 60)
"""Lines in the log, at most: a first store that answers every other call would otherwise write two for each."""

_METHODS = ("take", "peek", "reset", "supports", "close")


class _Down(NamedTuple):
    """Since when (by a steady clock) the second store answers, and how many calls it had answered until then."""

    cause: str
    since: float
    answered: int


class FallbackStore(BaseStore):
    """The first store's answers, and the second's while the first can't answer (`StoreError`).

        store = FallbackStore(RedisStore("redis://…"), SharedTable.open("my-limits"))

    A failure that is known costs nothing: stores with `fails_fast` (Redis, memcached) see to that themselves, and any
    other isn't asked after a failure, but for one call after 1, 2, 4 … 32 s, the probe. The first answer of the first
    store takes it back. A `ContentionError` is no outage and is raised as it is (nothing was charged, and a second
    store would grant a second quota), and so are mistakes in the call. If both fail, the second's error is raised, from
    the first's.

    The two count for themselves. So with each change a client may find its quota whole in the other store: at an outage
    it gets up to one more of them (one for each host, where the second is a host's own), and counts that the first has
    lost meanwhile begin anew. A charge whose answer got lost may stand in the first. `supports` is what both do.
    `reset` goes to both, so that no key stays denied in the other; what the one that is down keeps, it keeps.

    When the second takes over, and when the first is back, there is one warning in the log "shmlimit" (and at most 20
    lines a minute); `outage` says whether it is so now, and `stats` counts. Raises `ConfigError` for what is no store.
    """

    def __init__(self, primary: Store, secondary: Store) -> None:
        for store in (primary, secondary):
            if isinstance(store, type) or not all(callable(getattr(store, name, None)) for name in _METHODS):
                raise ConfigError(f"FallbackStore(primary, secondary) takes two stores, and {store!r} is none")
        if primary is secondary:
            raise ConfigError("FallbackStore(primary, secondary) takes two stores, not one twice")
        self.primary = primary
        self.secondary = secondary
        self._breaker = None if getattr(primary, "fails_fast", False) else Breaker()
        self._lines = MemoryStore()
        self._closed = False
        self._lock = threading.Lock()
        self._down: _Down | None = None
        self._counts = dict.fromkeys(("primary", "secondary", "failures", "outages"), 0)
        _stores.add(self)

    def __repr__(self) -> str:
        return f"FallbackStore({self.primary!r}, {self.secondary!r})"

    @property
    def secret(self) -> bytes | None:
        """The second store's, or else the first's: the same whichever answers."""
        return getattr(self.secondary, "secret", None) or getattr(self.primary, "secret", None)

    @property
    def outage(self) -> str | None:
        """Why the second store answers at present; `None` while the first does."""
        down = self._down
        return None if down is None else down.cause

    def stats(self) -> dict[str, int]:
        """Of this process: calls that `primary` and `secondary` answered, `failures` (calls that found the first down,
        known failures among them), and `outages` (how often the second took over).
        """
        with self._lock:
            return dict(self._counts)

    # ---- the store's protocol ----------------------------------------------------------------------------------------

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """See `Store.take`."""
        self._check(policy)
        return self._call(self.primary.take, self.secondary.take, policy, key, cost, now_us=now_us)

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """See `Store.take_all`; all of it by one of the two."""
        requests = self._checked(requests)
        return self._call(self.primary.take_all, self.secondary.take_all, requests, now_us=now_us)

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """See `Store.peek`."""
        self._check(policy)
        return self._call(self.primary.peek, self.secondary.peek, policy, key, cost, now_us=now_us)

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """Forget the key in both; whether either had it. One that can't answer is left out, if the other does."""
        self._check(policy)
        with _Attempt(self) as attempt:
            attempt.enter()
            found = self.primary.reset(policy, key)
            with self._spare():
                found |= self.secondary.reset(policy, key)
            return found
        with attempt.instead():
            return self.secondary.reset(policy, key)

    async def atake(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """`take`, by the coroutines of the two."""
        self._check(policy)
        return cast("Decision", await self._acall("take", policy, key, cost, now_us=now_us))

    async def atake_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """`take_all`, by the coroutines of the two."""
        return cast("list[Decision]", await self._acall("take_all", self._checked(requests), now_us=now_us))

    async def apeek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """`peek`, by the coroutines of the two."""
        self._check(policy)
        return cast("Decision", await self._acall("peek", policy, key, cost, now_us=now_us))

    async def areset(self, policy: Policy, key: str | bytes) -> bool:
        """`reset`, by the coroutines of the two."""
        self._check(policy)
        with _Attempt(self) as attempt:
            attempt.enter()
            found = bool(await coroutine_of(self.primary, "reset")(policy, key))
            with self._spare():
                found |= bool(await coroutine_of(self.secondary, "reset")(policy, key))
            return found
        with attempt.instead():
            return bool(await coroutine_of(self.secondary, "reset")(policy, key))

    def supports(self, policy: Policy) -> bool:
        """Whether both do."""
        return self.primary.supports(policy) and self.secondary.supports(policy)

    def close(self) -> None:
        """Close both; later calls raise `StoreError`."""
        self._closed = True
        try:
            self.primary.close()
        finally:
            self.secondary.close()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _call(self, first: Callable[..., _T], second: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        with _Attempt(self) as attempt:
            attempt.enter()
            return first(*arguments, **named)
        with attempt.instead():
            return second(*arguments, **named)

    async def _acall(self, name: str, *arguments: Any, **named: Any) -> Any:
        with _Attempt(self) as attempt:
            attempt.enter()
            return await coroutine_of(self.primary, name)(*arguments, **named)
        with attempt.instead():
            return await coroutine_of(self.secondary, name)(*arguments, **named)

    def _check(self, policy: Policy) -> None:
        """At once, and not only when the other store is needed."""
        if self._closed:
            raise StoreError("this FallbackStore was closed")
        if not self.supports(check_policy(policy)):
            without = self.secondary if self.primary.supports(policy) else self.primary
            raise ConfigError(f"FallbackStore runs what both its stores do, and '{policy}' is nothing for {without!r}")

    def _checked(self, requests: Iterable[Request]) -> list[Request]:
        requests = list(requests)
        for policy, _, _ in requests:
            self._check(policy)
        return requests

    @contextlib.contextmanager
    def _spare(self) -> Iterator[None]:
        """A failure of the second store while the first answers: it is in the log, and nobody has to wait for it."""
        try:
            yield
        except StoreError as error:
            self._say("%r, which stands in for %r, couldn't reset a key: %s", self.secondary, self.primary, error)

    def _say(self, text: str, *arguments: object) -> None:
        if self._lines.take(LINES, ""):
            log.warning(text, *arguments)


class _Attempt:
    """A call, first at the first store. Its block ends with that one's answer, or goes on behind it if there is none.

    Calls that were under way before the state changed don't change it back: an answer from before the outage is no sign
    that it is over.
    """

    __slots__ = ("_began", "_breaker", "_error", "_outage", "_store")

    def __init__(self, store: FallbackStore) -> None:
        self._store = store
        self._began = store._down
        self._breaker: Breaker | None = None  # to be told how it went: not by those whom it doesn't let through
        self._outage: Outage | None = None
        self._error: StoreError

    def enter(self) -> None:
        """A `StoreError` if the first store is known to be down."""
        breaker = self._store._breaker
        if breaker is not None:
            self._outage = breaker.enter()
            self._breaker = breaker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: TracebackType | None) -> bool:
        if error is None:
            self._answered()
        elif isinstance(error, ContentionError):
            self._answered(counts=False)
        elif isinstance(error, StoreError):
            self._failed(error)
            return True
        return False

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        """For the second store's answer."""
        try:
            yield
        except StoreError as error:
            raise error from self._error
        finally:
            del self._error  # it has the call's frame, and so this attempt: a circle that each failure would leave
        with self._store._lock:
            self._store._counts["secondary"] += 1

    def _answered(self, *, counts: bool = True) -> None:
        store = self._store
        if self._breaker is not None:
            self._breaker.succeeded(self._outage)
        with store._lock:
            store._counts["primary"] += counts
            down = store._down
            if down is None or down is not self._began:
                return
            store._down = None
            answered = store._counts["secondary"] - down.answered
        store._say(
            "%r answers again after %.1f s, in which %r answered %d calls",
            store.primary,
            time.monotonic() - down.since,
            store.secondary,
            answered,
        )

    def _failed(self, error: StoreError) -> None:
        self._error, store = error, self._store
        if self._breaker is not None:
            self._breaker.failed(self._outage, str(error))
        with store._lock:
            store._counts["failures"] += 1
            if store._down is not None or self._began is not None:
                return
            store._counts["outages"] += 1
            store._down = _Down(str(error), time.monotonic(), store._counts["secondary"])
        store._say("%r answers in place of %r: %s", store.secondary, store.primary, error)


_stores: weakref.WeakSet[FallbackStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._lock = threading.Lock()  # a thread that the child doesn't have may hold it
        store._lines = MemoryStore()


os.register_at_fork(after_in_child=_after_fork_in_child)
