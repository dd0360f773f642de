"""`Limiter`: one policy in one store, outside HTTP."""

import asyncio
import threading
from typing import Any

import pytest

from shmlimit import Limiter, SharedTable, parse
from shmlimit.errors import ConfigError, StoreError
from shmlimit.stores.memory import MemoryStore

NOW_US = 1_750_000_000_250_000


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(clock=lambda: NOW_US)


class Plain:
    """A store without coroutines, which says in which thread it was asked."""

    def __init__(self) -> None:
        self.inner = MemoryStore(clock=lambda: NOW_US)
        self.threads: list[int] = []

    def supports(self, policy: Any) -> bool:
        return policy.kind != "sliding-log"

    def __getattr__(self, name: str) -> Any:
        if name not in {"take", "peek", "reset"}:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.threads.append(threading.get_ident())
            return getattr(self.inner, name)(*args, **kwargs)

        return call


def test_take_peek_reset(store: MemoryStore) -> None:
    """The store's methods without the policy, which may be notation."""
    limiter = Limiter(store, "3/minute")
    assert limiter.take("k").remaining == 2
    assert not limiter.take("k", cost=3)
    assert limiter.take("k", 2).remaining == 0
    assert limiter.peek("k").allowed
    assert not limiter.peek("k", cost=1)
    assert limiter.take("other")
    assert [limiter.reset("k"), limiter.reset("k")] == [True, False]
    assert limiter.take("k").remaining == 2


def test_equal_policies_share_their_counts(store: MemoryStore) -> None:
    """The identity of a count is policy and key, whoever asks."""
    one, other = Limiter(store, "3/minute"), Limiter(store, parse("3 per minute"))
    one.take("k")
    assert other.take(b"k").remaining == 1
    assert one.policy == other.policy
    assert repr(one).endswith("'3/minute')")


def test_the_callers_own_clock() -> None:
    """`now_us` is passed on."""
    limiter = Limiter(MemoryStore(), "1/minute")
    assert limiter.take("k", now_us=NOW_US)
    assert limiter.peek("k", 1, now_us=NOW_US + 59_999_999).retry_after_us == 1
    assert limiter.take("k", now_us=NOW_US + 60_000_000)


def test_in_an_event_loop() -> None:
    """Coroutines of the same meaning: the store's own, or its methods in a thread."""

    async def use(limiter: Limiter) -> list[Any]:
        return [
            (await limiter.atake("k", 2, now_us=NOW_US)).remaining,
            (await limiter.apeek("k", 2)).allowed,
            await limiter.areset("k"),
            await limiter.areset("k"),
        ]

    class Own(MemoryStore):
        async def atake(self, *args: Any, **kwargs: Any) -> Any:
            own.append(threading.get_ident())
            return await super().atake(*args, **kwargs)

    own: list[int] = []
    assert asyncio.run(use(Limiter(Own(clock=lambda: NOW_US), "3/minute"))) == [1, False, True, False]
    assert own == [threading.get_ident()]
    plain: Any = Plain()
    assert asyncio.run(use(Limiter(plain, "3/minute"))) == [1, False, True, False]
    assert len(plain.threads) == 4
    assert threading.get_ident() not in plain.threads


def test_with_the_table(table: SharedTable) -> None:
    """The shared table is a store like any other."""
    limiter = Limiter(table, "2/minute")
    assert [bool(limiter.take("k")) for _ in range(3)] == [True, True, False]


def test_failures_are_raised(store: MemoryStore) -> None:
    """Outside HTTP nobody decides for the caller what a store that can't answer means."""
    limiter = Limiter(store, "3/minute")
    with pytest.raises(ValueError, match="cost"):
        limiter.take("k", -1)
    store.close()
    with pytest.raises(StoreError):
        limiter.take("k")


@pytest.mark.parametrize(
    ("store", "policy", "hint"),
    [
        ("a-name", "3/minute", 'SharedTable.open\\("a-name"\\)'),
        (MemoryStore(), "often", "often"),
        (MemoryStore(), 3, 'its notation such as "10/minute"'),
        (Plain(), "sliding-log 3/minute", "Plain can't run the policy of 'sliding-log 3/minute'. Choose another one"),
    ],
    ids=["store", "notation", "policy", "unsupported"],
)
def test_mistakes_are_config_errors(store: Any, policy: Any, hint: str) -> None:
    """What can't work is refused when the limiter is made."""
    with pytest.raises(ConfigError, match=hint):
        Limiter(store, policy)
