"""What another process does to a shared store. It loads neither pytest nor the store's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from shmlimit.errors import ContentionError
from shmlimit.policies.base import Policy

_T = TypeVar("_T")


class Work(NamedTuple):
    """`times` hits on one key of the store that `opener` opens; the others are waited for up to `patience_s`."""

    opener: Callable[[], Any]
    policy: Policy
    times: int
    patience_s: float


def persistently(call: Callable[[], _T]) -> _T:
    """What a call says in the end: one that lost too many races has charged nothing, and is made again."""
    while True:
        with contextlib.suppress(ContentionError):
            return call()


def hit_often(work: Work, barrier: Any, results: Any) -> None:
    """Puts into `results` how many of the hits were allowed, or the text of an error."""
    try:
        store = work.opener()
        try:
            store.peek(work.policy, "k")  # what is made at the first call is made
            barrier.wait(work.patience_s)
            hits = (persistently(lambda: store.take(work.policy, "k")).allowed for _ in range(work.times))
            results.put(sum(hits))
        finally:
            store.close()
    except Exception as error:  # noqa: BLE001 - told in the test's own process
        barrier.abort()  # the others needn't wait for this one
        results.put(f"{type(error).__name__}: {error}")
