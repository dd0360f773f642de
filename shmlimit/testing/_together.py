"""Many at once: threads, processes, event loops."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shmlimit import Policy, TokenBucket
from shmlimit.stores.base import coroutine_of
from shmlimit.testing._hooks import Hooks
from shmlimit.testing._model import KINDS, ONCE, T0, TEN, YEAR
from shmlimit.testing._worker import Work, hit_often, persistently

PROCESSES = 4
HITS = 250

# What is wrong or refused, by a method's name.
MISTAKES: list[tuple[str, tuple[Any, ...]]] = [
    ("take", (TEN[0], "k", -1)),
    ("take", (TEN[0], 7)),
    ("take", ("10/minute", "k")),
    ("peek", (TEN[0], "k", 1.5)),
    ("peek", (None, "k")),
    ("reset", (TEN[0], None)),
    ("reset", ("10/minute", "k")),
    ("take_all", ([(TEN[0], "k", 1), (TEN[0], "k", True)],)),
    ("take_all", ([(TEN[0], "k", 1), (7, "k", 1)],)),
]


class Together(Hooks):
    """Exact under concurrency."""

    @pytest.fixture
    def _often(self) -> Iterator[None]:
        """Threads that are interrupted as often as can be."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        yield
        sys.setswitchinterval(before)

    @pytest.mark.usefixtures("_often")
    @pytest.mark.parametrize("kind", KINDS)
    def test_threads_get_exactly_the_limit(self, store: Any, kind: type[Any]) -> None:
        """In limits 5.8, 8 threads with 50 hits each got 126 of 100; here 100, on one key and all or nothing over
        two.
        """
        policy = kind(100, YEAR)
        self.need(store, policy)
        both = hasattr(store, "take_all")
        barrier = threading.Barrier(8)
        alone: list[bool] = []
        joint: list[bool] = []
        errors: list[BaseException] = []

        def hit() -> None:
            try:
                barrier.wait(self.patience_s)
                for i in range(50):
                    if both and i % 2:
                        asked = [(policy, "k", 1), (policy, "l", 1)]
                        joint.append(all(persistently(lambda: store.take_all(asked))))  # noqa: B023
                    else:
                        alone.append(persistently(lambda: store.take(policy, "k")).allowed)
            except BaseException as error:  # noqa: BLE001 - told in the test's own thread
                errors.append(error)

        self._run(hit, 8)
        assert not errors
        assert len(alone) + len(joint) == 400
        assert sum(alone) + sum(joint) == 100
        assert store.peek(policy, "k").remaining == 0
        # What is given back to a bucket is without the time since: up to one unit, once.
        assert 100 - sum(joint) - store.peek(policy, "l").remaining in ({0, 1} if both else {0})

    @pytest.mark.usefixtures("_often")
    def test_new_keys_of_many_threads(self, store: Any) -> None:
        """A key's first hits, from all sides at once, are one count: nobody makes it twice."""
        policy = TokenBucket(3, YEAR)
        allowed: list[int] = []
        barrier = threading.Barrier(6)

        def hit() -> None:
            for number in range(20):
                barrier.wait(self.patience_s)
                if persistently(lambda: store.take(policy, f"key {number}")).allowed:  # noqa: B023
                    allowed.append(number)

        self._run(hit, 6)
        assert sorted(allowed) == sorted([*range(20)] * 3)

    def _run(self, target: Callable[[], None], number: int) -> None:
        threads = [threading.Thread(target=target, daemon=True) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.patience_s)
        assert not any(thread.is_alive() for thread in threads), "threads wait for ever"

    def test_processes_get_exactly_the_limit(self, store: Any) -> None:
        """Four processes on one hot key of a shared store are allowed exactly the limit together."""
        opener = self.opener(store)
        if opener is None:
            pytest.skip(f"{type(store).__name__} is each process's own")
        policy = TokenBucket(PROCESSES * HITS // 2, YEAR)
        context = multiprocessing.get_context("spawn")
        barrier, results = context.Barrier(PROCESSES), context.Queue()
        arguments = (Work(opener, policy, HITS, self.patience_s), barrier, results)
        processes = [context.Process(target=hit_often, args=arguments, daemon=True) for _ in range(PROCESSES)]
        for process in processes:
            process.start()
        answers: list[int | str] = [results.get(timeout=self.patience_s) for _ in processes]
        for process in processes:
            process.join(self.patience_s)
        results.close()
        assert [answer for answer in answers if isinstance(answer, str)] == []
        assert sum(answer for answer in answers if isinstance(answer, int)) == policy.quota
        assert store.peek(policy, "k").remaining == 0
        assert store.reset(policy, "k") is True

    # ---- event loops -------------------------------------------------------------------------------------------------

    def test_coroutines_answer_alike(self, store: Any) -> None:
        """`atake`, `apeek` and `atake_all` give what the plain methods do: the store's own, or its methods in threads
        where it has none. They charge the same counts, in one event loop after another.
        """
        joint = hasattr(store, "take_all")

        async def all_of_them(key: str) -> list[Any]:
            take, peek = coroutine_of(store, "take"), coroutine_of(store, "peek")
            both = [(TEN[0], key, 1), (TEN[0], "l", 1)]
            return [
                await take(TEN[0], key, 2, now_us=T0),
                await take(TEN[0], key, 11, now_us=T0),
                await peek(TEN[0], key, 1, now_us=T0),
                await peek(TEN[0], key, now_us=T0),
                *(await coroutine_of(store, "take_all")(both, now_us=T0) if joint else []),
            ]

        for number, key in enumerate(["k", "other"]):
            taken, never, _ = TEN[0].simulate([(T0, 2), (T0, 11), (T0, 1)])
            peeked, told = TEN[0].simulate([(T0, 2), (T0, 1)])[1], TEN[0].simulate([(T0, 2), (T0, 0)])[1]
            other = TEN[0].simulate([(T0, 1)] * (number + 1))[-1]
            answers = asyncio.run(all_of_them(key))
            assert answers == [taken, never, peeked, told, *([peeked, other] if joint else [])]
            assert store.peek(TEN[0], key, now_us=T0).remaining == (7 if joint else 8)

    def test_coroutines_reset(self, store: Any) -> None:
        """`areset` forgets what `atake` charged, by the store's own clock."""

        async def taken_and_reset() -> list[Any]:
            take, reset = coroutine_of(store, "take"), coroutine_of(store, "reset")
            allowed = sum(one.allowed for one in await asyncio.gather(*(take(ONCE, "k") for _ in range(5))))
            return [allowed, await reset(ONCE, "k"), await reset(ONCE, "k")]

        for _ in range(2):
            assert asyncio.run(taken_and_reset()) == [1, True, False]
        assert store.take(ONCE, "k").allowed

    def test_coroutines_fail_alike(self, store: Any) -> None:
        """What a plain method raises its coroutine raises, and a closed store says so to both."""

        def plain(name: str, arguments: tuple[Any, ...]) -> type[Exception] | None:
            try:
                getattr(store, name)(*arguments)
            except Exception as error:  # noqa: BLE001 - whatever it is
                return type(error)
            return None

        async def awaited(name: str, arguments: tuple[Any, ...]) -> type[Exception] | None:
            try:
                await coroutine_of(store, name)(*arguments)
            except Exception as error:  # noqa: BLE001 - whatever it is
                return type(error)
            return None

        asked = [(name, arguments) for name, arguments in MISTAKES if hasattr(store, name)]
        raised = [plain(name, arguments) for name, arguments in asked]
        assert None not in raised
        assert [asyncio.run(awaited(name, arguments)) for name, arguments in asked] == raised
        assert store.peek(TEN[0], "k").remaining == 10
        store.close()
        closed: list[tuple[str, tuple[Any, ...]]] = [
            ("take", (ONCE, "k")),
            ("peek", (ONCE, "k")),
            ("reset", (ONCE, "k")),
        ]
        if hasattr(store, "take_all"):
            closed += [("take_all", ([(ONCE, "k", 1)],))]
        raised = [plain(name, arguments) for name, arguments in closed]
        assert None not in raised
        assert [asyncio.run(awaited(name, arguments)) for name, arguments in closed] == raised

    @pytest.mark.parametrize("policy", TEN, ids=str)
    def test_coroutines_get_exactly_the_limit(self, store: Any, policy: Policy) -> None:
        """Thirty coroutines at once are allowed ten, by the same clock as everybody."""
        self.need(store, policy)

        async def thirty() -> list[Any]:
            take = coroutine_of(store, "take")
            return await asyncio.gather(*(take(policy, "k", now_us=T0) for _ in range(30)))

        assert sum(decision.allowed for decision in asyncio.run(thirty())) == 10
        assert store.peek(policy, "k", now_us=T0).remaining == 0
