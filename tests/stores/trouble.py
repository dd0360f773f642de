"""What the tests of a store in trouble share."""

from __future__ import annotations

from shmlimit import StoreError, TokenBucket
from shmlimit.stores.sqlite import SqliteStore

TEN = TokenBucket(10, 10**9)  # nothing refills meanwhile


def answer(store: SqliteStore, key: str, policy: TokenBucket = TEN) -> int | str:
    """What is left, -1 for a denial; or what the StoreError says."""
    try:
        decision = store.take(policy, key)
    except StoreError as error:
        return str(error)
    return decision.remaining if decision.allowed else -1
