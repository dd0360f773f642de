"""`Limiter`: a store and a policy bound together, for code outside HTTP. And the check that the two go together."""

from __future__ import annotations

from typing import Any

from shmlimit.errors import ConfigError
from shmlimit.notation import parse
from shmlimit.policies.base import Decision, Policy
from shmlimit.stores.base import Store, coroutine_of


class Limiter:
    """One limit in one store: `Limiter(store, "100/minute").take("user 42")`.

    `policy` is a policy or its notation. The methods are the store's, without the policy: `cost` is an integer >= 0,
    `now_us` microseconds for those who bring their own clock, and they raise what the store raises (`StoreError` where
    it can't answer, `ValueError` for a bad cost). Two limiters with equal policies in one store share their counts.

    Raises `ConfigError` for something that is no store, and for a policy that the store can't run.
    """

    __slots__ = ("policy", "store")

    def __init__(self, store: Store, policy: Policy | str) -> None:
        if isinstance(policy, str):
            policy = parse(policy)
        elif not isinstance(policy, Policy):
            raise ConfigError(f'policy must be a policy or its notation such as "10/minute", not {policy!r}')
        check_store(store)
        check_policy(store, policy, repr(str(policy)))
        self.store = store
        self.policy = policy

    def __repr__(self) -> str:
        return f"Limiter({self.store!r}, {str(self.policy)!r})"

    def take(self, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """Charge `cost` units to the key if they are there, and say whether they were."""
        return self.store.take(self.policy, key, cost, now_us=now_us)

    def peek(self, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """What `take` would say, taking nothing."""
        return self.store.peek(self.policy, key, cost, now_us=now_us)

    def reset(self, key: str | bytes) -> bool:
        """Forget the key; whether there was anything to forget."""
        return self.store.reset(self.policy, key)

    async def atake(self, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """`take` for an event loop: a store without a coroutine of its own is called in a thread."""
        decision: Decision = await self._call("take", key, cost, now_us=now_us)
        return decision

    async def apeek(self, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """`peek` for an event loop."""
        decision: Decision = await self._call("peek", key, cost, now_us=now_us)
        return decision

    async def areset(self, key: str | bytes) -> bool:
        """`reset` for an event loop."""
        found: bool = await self._call("reset", key)
        return found

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return await coroutine_of(self.store, name)(self.policy, *args, **kwargs)


def check_store(store: object) -> None:
    """Raise `ConfigError` for an object that is no store."""
    if isinstance(store, type) or not all(callable(getattr(store, name, None)) for name in ("take", "supports")):
        raise ConfigError(f'store must be a store, such as SharedTable.open("a-name"), not {store!r}')


def check_policy(store: Store, policy: Policy, whose: str, advice: str = "Choose another one") -> None:
    """Raise `ConfigError` for a policy that the store can't run: its own, where that says which bound it is."""
    if store.supports(policy):
        return
    reason = f"{type(store).__name__} can't run the policy of {whose}"
    try:
        store.peek(policy, "")
    except ConfigError as error:
        reason = f"{reason}: {error}"
    raise ConfigError(f"{reason}. {advice}")
