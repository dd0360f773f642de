"""Many processes on one key in memcached: exactly the limit, alone and all or nothing."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from _servers import Server

from shmlimit import FixedWindow, Gcra, SlidingCounter, TokenBucket
from shmlimit.stores.memcached import MemcachedStore
from tests.stress.workers import together

WORKERS = 4
HITS = 200
YEAR = 366 * 86_400  # nothing refills meanwhile


def hit(store: MemcachedStore, policy: Any, barrier: Any, results: Any) -> None:
    """Hits on a key that all share, alone and together with another key, whose limit is reached first."""
    scarce = type(policy)(60, YEAR)
    lost, put = 0, store._server.put

    def put_and_count(*arguments: Any) -> bool:
        nonlocal lost
        won = put(*arguments)
        lost += not won
        return won

    store._server.put = put_and_count  # type: ignore[method-assign]
    barrier.wait()
    allowed: Counter[str] = Counter()
    for _ in range(HITS):
        allowed["one"] += store.take(policy, "one").allowed
        both = store.take_all([(policy, "two", 1), (scarce, "two", 1)])
        allowed["both"] += all(both)
    results.put((allowed, lost))
    store.close()


@pytest.mark.parametrize("kind", [TokenBucket, Gcra, FixedWindow, SlidingCounter])
def test_exactly_the_limit(server_of: Callable[[str], Server], kind: Any) -> None:
    """4 processes get 400 of 800 together on one key, and 60 where the scarcer of two limits allows that; the other one
    has then lost 60, so all that was given back is there. Swaps were lost meanwhile.
    """
    policy = kind(400, YEAR)
    with MemcachedStore(server_of("memcached").url, prefix=f"stress-{secrets.token_hex(6)}") as store:
        store.peek(policy, "parent")  # a connection from before the fork
        answers = together(hit, (store, policy), "fork", WORKERS)
        assert sum((allowed for allowed, _ in answers), Counter()) == {"one": 400, "both": 60}
        assert sum(lost for _, lost in answers) > 0
        assert store.peek(policy, "one").remaining == 0
        assert store.peek(policy, "two").remaining == 340
