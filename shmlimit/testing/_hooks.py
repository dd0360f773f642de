"""What a store's class says about it (the hooks of `StoreContract`), and what all tests use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from shmlimit.errors import ConfigError
from shmlimit.policies.base import Policy
from shmlimit.stores.base import NOW_MAX_US


class Hooks:
    """See `StoreContract`, which tells them."""

    make_store: Callable[..., Any]
    latest_us: ClassVar[int] = NOW_MAX_US
    lasts_us: ClassVar[int | None] = None
    patience_s: ClassVar[float] = 60.0

    def discard(self, store: Any) -> None:
        """Be done with a store: close it, and remove what it leaves."""
        store.close()

    def kept(self, store: Any) -> Any:  # noqa: ARG002
        """All that it keeps, to be compared; `None` where that can't be looked at."""
        return None

    def forgets(self, policy: Policy) -> bool:  # noqa: ARG002
        """Whether a charge forgets all states of `policy` that have expired by its `now_us`."""
        return False

    def exact(self, policy: Policy) -> bool:  # noqa: ARG002
        """Whether it decides by exactly the policy's numbers."""
        return True

    def opener(self, store: Any) -> Callable[[], Any] | None:  # noqa: ARG002
        """What opens the same store in another process: can be pickled. `None` where it is this process's own."""
        return None

    @contextlib.contextmanager
    def new_store(self) -> Iterator[Any]:
        """A new, empty store for a block."""
        if not hasattr(self, "make_store"):
            raise ConfigError(f"{type(self).__name__} needs make_store: what makes a new, empty store when called")
        store = self.make_store()
        try:
            yield store
        finally:
            self.discard(store)

    @pytest.fixture
    def store(self) -> Iterator[Any]:
        """A new, empty store."""
        with self.new_store() as store:
            yield store

    def need(self, store: Any, *policies: Policy, method: str = "take") -> None:
        """Leave out what a store says it doesn't do."""
        for policy in policies:
            if not store.supports(policy):
                pytest.skip(f"{type(store).__name__} doesn't run {policy}")
        if not hasattr(store, method):
            pytest.skip(f"{type(store).__name__} has no {method}")
