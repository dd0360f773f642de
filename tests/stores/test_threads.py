"""The threads in which stores that block answer an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shmlimit import StoreError, TokenBucket
from shmlimit.stores import _threads
from shmlimit.stores._threads import THREADS, Threads, threads_of
from shmlimit.stores.base import BaseStore, coroutine_of
from shmlimit.stores.memory import MemoryStore

PATIENCE_S = 30
ONE = TokenBucket(1, 3600)


class Plain:
    """A store that says where it was asked."""

    def take(self, *arguments: Any, **named: Any) -> Any:
        return threading.current_thread(), arguments, named


class Slotted:
    """No weak reference can be made to it."""

    __slots__ = ()
    take = Plain.take


class Unhashable(Plain):
    """Equal to others of its kind, and so without a hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds threads up until it is set: at the end of the test if not before."""
    gate = threading.Event()
    yield gate
    gate.set()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


def test_own_coroutine_is_taken() -> None:
    """A store that has the coroutine answers by itself, in the loop where it doesn't block."""
    store = MemoryStore()
    assert coroutine_of(store, "take").__func__ is BaseStore.atake  # type: ignore[attr-defined]
    assert [run(coroutine_of(store, "take")(ONE, "k")).allowed for _ in range(2)] == [True, False]
    assert _threads._of_store.get(store) is None


@pytest.mark.parametrize("kind", [Plain, Slotted, Unhashable])
def test_foreign_stores_are_asked_in_threads(kind: Callable[[], Any]) -> None:
    """One without coroutines is called in a thread of shmlimit's, with the arguments as they came; also one that has no
    hash, or that can't be referred to weakly.
    """
    thread, arguments, named = run(coroutine_of(kind(), "take")(ONE, "k", now_us=1))
    assert thread is not threading.current_thread()
    assert thread.name.startswith("shmlimit")
    assert (arguments, named) == ((ONE, "k"), {"now_us": 1})


def test_errors_come_through() -> None:
    """What the method raises the coroutine raises."""

    def fail() -> None:
        raise StoreError("gone")

    with pytest.raises(StoreError, match="gone"):
        run(Threads().run(fail))


def test_context_comes_along() -> None:
    """The method sees the context variables of the request."""
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")

    async def ask() -> str:
        request.set("mine")
        return await Threads().run(request.get)

    assert run(ask()) == "mine"


def test_not_the_loops_own_threads(gate: threading.Event) -> None:
    """A store answers while every thread of the event loop's own is busy, and a busy store leaves those alone."""

    async def ask() -> Any:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, gate.wait)
        thread, *_ = await coroutine_of(Plain(), "take")()
        gate.set()
        await busy
        return thread

    assert run(ask()).name.startswith("shmlimit")


def test_stores_do_not_wait_for_each_other(gate: threading.Event) -> None:
    """Each has threads of its own: when all of one's are held up, another answers."""
    slow, quick = Plain(), Plain()
    assert threads_of(slow) is threads_of(slow)
    assert threads_of(slow) is not threads_of(quick)

    async def ask() -> None:
        held = [asyncio.ensure_future(threads_of(slow).run(gate.wait)) for _ in range(3 * THREADS)]
        await coroutine_of(quick, "take")()
        assert not any(one.done() for one in held)
        gate.set()
        await asyncio.gather(*held)

    run(ask())


def test_so_many_threads_and_no_more() -> None:
    """Calls run side by side up to the number, and more of them wait for one to end."""
    together, lock = threading.Barrier(THREADS), threading.Lock()
    inside, most = 0, 0

    def call() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait(PATIENCE_S)  # nobody leaves before so many are in
        with lock:
            inside -= 1

    async def ask() -> None:
        threads = Threads()
        await asyncio.gather(*(threads.run(call) for _ in range(3 * THREADS)))

    run(ask())
    assert most == THREADS


def test_threads_are_started_as_they_are_needed() -> None:
    """A store that nobody asks in a loop has none, and the first call has the first."""
    threads = Threads()
    assert not hasattr(threads, "_executor")
    run(threads.run(int))
    assert len(threads._executor._threads) == 1


def test_threads_end_with_the_store() -> None:
    """When nobody has the store any more its threads end."""
    store = Plain()
    thread, *_ = run(coroutine_of(store, "take")())
    assert thread.is_alive()
    del store
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_cancelled_call_goes_on(gate: threading.Event) -> None:
    """Nobody waits for it, and it ends all the same: a charge that has begun is not half done."""
    done = threading.Event()

    def call() -> None:
        gate.wait(PATIENCE_S)
        done.set()

    async def ask() -> None:
        call_under_way = asyncio.ensure_future(Threads().run(call))
        await asyncio.sleep(0)
        call_under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call_under_way

    run(ask())
    assert not done.is_set()
    gate.set()
    assert done.wait(PATIENCE_S)


# ---- forks -----------------------------------------------------------------------------------------------------------


def in_child(check: Callable[[], bool]) -> bool:
    """Whether `check` is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE_S)  # a child that waits for a thread which isn't there ends by it
        right = False
        try:
            right = check()
        finally:
            os._exit(0 if right else 1)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_anew_after_a_fork() -> None:
    """A child has none of its parent's threads, and starts its own; the parent goes on with what it has."""
    store = Plain()
    take = coroutine_of(store, "take")
    before, *_ = run(take())
    assert in_child(lambda: run(take())[0].name.startswith("shmlimit") and run(take())[0] is not before)
    assert run(take())[0] is before


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_fork_while_another_thread_makes_threads(gate: threading.Event) -> None:
    """The lock is nobody's in a child: a fork waits until no other thread has it."""
    held, forked = threading.Event(), threading.Event()
    answers: list[bool] = []

    def hold() -> None:
        with _threads._making:
            held.set()
            gate.wait(PATIENCE_S)

    def fork() -> None:
        answers.append(in_child(lambda: threads_of(Plain()) is not None and not _threads._making.locked()))
        forked.set()

    both = [threading.Thread(target=hold), threading.Thread(target=fork)]
    both[0].start()
    assert held.wait(PATIENCE_S)
    both[1].start()
    forked.wait(0.05)  # a fork that doesn't wait has taken the lock along by now
    gate.set()
    for thread in both:
        thread.join(2 * PATIENCE_S)
    assert answers == [True]
    assert not _threads._making.locked()


def test_two_threads_that_ask_first_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store's threads are made once, though two threads find that there are none."""
    store, firsts = Plain(), Threads()

    class Late:
        def __enter__(self) -> None:
            _threads._of_store[store] = firsts  # the other one was quicker

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(_threads, "_making", Late())
    assert threads_of(store) is firsts
    assert threads_of(store) is firsts
