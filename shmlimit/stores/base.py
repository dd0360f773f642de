"""The `Store` protocol: what keeps states and applies policies to them, one atomic decision at a time.

Beside it stands what stores written in Python share: the async half of the protocol, and how times are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

from shmlimit.errors import ConfigError
from shmlimit.policies.base import Decision, Policy
from shmlimit.policies.requests import Request
from shmlimit.stores._threads import threads_of

if TYPE_CHECKING:
    from typing_extensions import Self

NOW_MAX_US = 10**18  # with the longest window on top it still is a 64-bit integer
_T = TypeVar("_T")


class Store(Protocol):
    """Any object with these methods will do; nothing has to inherit from here.

    The identity of a state is *(policy, key)*: equal policies with the same key share a count. A `str` key is its UTF-8
    bytes, so `"a"` and `b"a"` are one key. A store reads its own clock unless `now_us` (microseconds) is given. A store
    that can't answer raises `StoreError`; a denial is a value. What a store has forgotten as of a time is never again
    judged as of an earlier one, whoever gives that.

    A store may also have `atake`, `apeek`, `areset` and `atake_all`, coroutines with the same parameters (`BaseStore`
    makes them). Async servers call the plain methods of one without them in threads (`coroutine_of`), so that a store
    that blocks stops no other request; those of one whose class says `blocks = False` they call as they are.

    And it may have a `secret`: 16 to 64 bytes that all its processes share, for `Guard(…, partition=True)`.
    """

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """Charge `cost` units to the key if they are there, and say whether they were."""

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """Charge every `(policy, key, cost)`, or none: one decision for each, in the order given.

        If one denies, none is charged: the denying ones say so, and the others report what `peek` would. The same
        policy and key twice adds the costs up and gets the joint answer.
        """

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """What `take` would say, taking nothing."""

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """Forget the key; whether there was anything to forget."""

    def supports(self, policy: Policy) -> bool:
        """Whether this store can run `policy`; the same answer for the life of the store."""

    def close(self) -> None:
        """Let go of what the store holds in this process; the states stay where they are."""


class BaseStore:
    """A store's coroutines, made of its public methods. And `with store:` closes it.

    - `blocks`: whether those wait for something, so that an event loop must call them in a thread.
    - `fails_fast`: whether a failure that the store knows of costs nothing, because it asks its server only now and
      then until that answers again. (`FallbackStore` does that for the others.)
    """

    blocks: ClassVar[bool] = True
    fails_fast: ClassVar[bool] = False

    take: Callable[..., Decision]
    take_all: Callable[..., list[Decision]]
    peek: Callable[..., Decision]
    reset: Callable[..., bool]
    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, _error: object, _traceback: object) -> None:
        self.close()

    async def atake(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """`take`, for an event loop."""
        return await self._off_loop(self.take, policy, key, cost, now_us=now_us)

    async def atake_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """`take_all`, for an event loop."""
        return await self._off_loop(self.take_all, requests, now_us=now_us)

    async def apeek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """`peek`, for an event loop."""
        return await self._off_loop(self.peek, policy, key, cost, now_us=now_us)

    async def areset(self, policy: Policy, key: str | bytes) -> bool:
        """`reset`, for an event loop."""
        return await self._off_loop(self.reset, policy, key)

    async def _off_loop(self, method: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        if not self.blocks:
            return method(*arguments, **named)
        return await threads_of(self).run(method, *arguments, **named)


def coroutine_of(store: object, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The store's coroutine `a<name>`, or else its method of that name, called in a thread."""
    coroutine = getattr(store, f"a{name}", None)
    if coroutine is None:
        coroutine = partial(threads_of(store).run, getattr(store, name))
    return cast("Callable[..., Coroutine[Any, Any, Any]]", coroutine)


def never_waits(store: object, policy: Policy | None) -> bool:
    """Whether an event loop may ask the store itself for `policy` (`None`: for any).

    Its own class must say so: what inherits from it may have coroutines of its own. A store of several (`LocalStore`)
    is as the one that decides, which its `part_for` gives.
    """
    if policy is not None and "part_for" in vars(type(store)):
        store = cast("Any", store).part_for(policy)
    return vars(type(store)).get("blocks") is False


def check_policy(policy: object) -> Policy:
    """`policy` itself, or a `ConfigError`: notation is the guard's business."""
    if not isinstance(policy, Policy):
        raise ConfigError(f"a store takes policies, such as shmlimit.parse('10/minute'), not {policy!r}")
    return policy


def check_now(now_us: object) -> int | None:
    """`now_us` as an integer of microseconds since 1970 or `None`, or a `ValueError`."""
    if now_us is None:
        return None
    if isinstance(now_us, bool) or not isinstance(now_us, int):
        raise ValueError(f"now_us must be an integer of microseconds, not {now_us!r}")
    if not 0 <= now_us <= NOW_MAX_US:
        raise ValueError(f"now_us must be within 0 and 10**18, not {now_us}")
    return int(now_us)


def policy_text(policy: Policy) -> str:
    """What tells one policy from another, for stores outside of Python: its kind and its numbers."""
    return f"{policy.kind} {policy.limit} {policy.period_us} {getattr(policy, 'burst', '')}"


def wall_clock() -> int:
    """Microseconds since 1970, by a clock that may be set back."""
    return time.time_ns() // 1000


def seen_from(decision: Decision, lead_us: int) -> Decision:
    """A decision as of a time that a watermark has raised by `lead_us`, with its waits counted from the one asked for.

    What needn't be waited for (0) stays so.
    """
    if lead_us <= 0:
        return decision
    return decision._replace(
        reset_us=decision.reset_us and decision.reset_us + lead_us,
        retry_after_us=decision.retry_after_us and decision.retry_after_us + lead_us,
        next_us=decision.next_us and decision.next_us + lead_us,
    )
