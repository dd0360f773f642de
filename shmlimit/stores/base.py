"""The `Store` protocol: what keeps states and applies policies to them, one atomic decision at a time."""

from __future__ import annotations

from typing import Protocol

from shmlimit.policies.base import Decision, Policy


class Store(Protocol):
    """Any object with these methods will do; nothing has to inherit from here.

    The identity of a state is *(policy, key)*: equal policies with the same key share a count. A `str` key is its UTF-8
    bytes, so `"a"` and `b"a"` are one key. A store reads its own clock unless `now_us` (microseconds) is given. A store
    that can't answer raises `StoreError`; a denial is a value.

    A store may also have `atake`, `apeek` and `areset`, coroutines with the same parameters. Async servers call the
    plain methods of one without them in a thread, so that a store that blocks stops no other request.
    """

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """Charge `cost` units to the key if they are there, and say whether they were."""

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """What `take` would say, taking nothing."""

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """Forget the key; whether there was anything to forget."""

    def supports(self, policy: Policy) -> bool:
        """Whether this store can run `policy`; the same answer for the life of the store."""

    def close(self) -> None:
        """Let go of what the store holds in this process; the states stay where they are."""
