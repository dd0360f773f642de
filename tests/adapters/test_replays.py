"""What users reported about the HTTP side of other limiters, on every adapter: the right result here.

S53 to S55 are in test_every_adapter.py, the addresses (S39 to S42, S48) in test_address.py and test_keys.py, and keys
of odd bytes (S43, S47, S49) in the contract of stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from shmlimit.guard import Guard
from shmlimit.policies.base import Decision
from shmlimit.stores.memory import MemoryStore
from shmlimit.testing import FakeClock, ToldStore
from tests.adapters.adapter import ADAPTERS, Adapter


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return Adapter(request.param)


def guard(policy: str, **options: Any) -> Guard:
    return Guard("a", policy, **{"key": lambda _: "k", **options})


@pytest.mark.parametrize("policy", ["1/s", "fixed 1/s", "sliding-counter 1/s", "sliding-log 1/s", "3/s burst 1"])
def test_s50_retry_after_is_enough(adapter: Adapter, ask: Callable[..., Any], policy: str) -> None:
    """flask-limiter#62, #56, dragonfly#1008: Retry-After 0 or negative; here at least 1, and the retry succeeds."""
    clock = FakeClock(1_750_000_000_750_000)
    app = adapter.make(guard(policy), store=MemoryStore(clock=clock))
    for _ in range(5):
        while (answer := ask(app)).status == 200:
            pass
        wait = int(answer.limits["retry-after"])
        assert wait >= 1
        clock.advance(wait)
        assert ask(app).status == 200
    clock.advance(10)
    numbers = [int(part) for part in ask(app).limits["ratelimit"].replace("r=", "").replace("t=", "").split(";")[1:]]
    assert min(numbers) >= 0


@pytest.mark.parametrize(("us", "seconds"), [(2_000_000, 2), (2_000_001, 3)])
def test_s51_a_whole_second_is_not_rounded_up(adapter: Adapter, ask: Callable[..., Any], us: int, seconds: int) -> None:
    """dragonfly#8288: one second too many at a whole second."""
    app = adapter.make(guard("10/minute"), store=ToldStore(Decision(True, 10, 9, us, 0, us)))
    assert ask(app).limits["ratelimit"] == f'"a";r=9;t={seconds}'


def test_s52_nothing_is_negative(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """litestar#3776: Remaining and Reset negative; `2/minute` after one hit has 1 left for up to a minute."""
    name, remaining, reset = ask(adapter.make(guard("2/minute"), store=MemoryStore())).limits["ratelimit"].split(";")
    assert (name, remaining) == ('"a"', "r=1")
    assert 1 <= int(reset.removeprefix("t=")) <= 60


@pytest.mark.parametrize(("cost", "has_it"), [(1, True), (11, False)])
def test_s56_a_refusal_that_can_end_says_when(
    adapter: Adapter, ask: Callable[..., Any], cost: int, has_it: bool
) -> None:
    """slowapi, falcon-limiter, fastapi-limiter, litestar: no Retry-After; a cost above the quota has none rightly."""
    app = adapter.make(guard("10/hour", cost=cost), store=MemoryStore(clock=FakeClock()))
    answers = [ask(app) for _ in range(11)]
    assert answers[-1].status == 429
    assert ("retry-after" in answers[-1].limits) is has_it


def test_s57_seconds_not_milliseconds(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """fastify#301: a refusal with 5 s left says 5."""
    clock = FakeClock()
    app = adapter.make(guard("fixed 1/minute"), store=MemoryStore(clock=clock))
    ask(app)
    clock.advance(55)
    assert ask(app).limits["retry-after"] == "5"


def test_s59_check_and_count_are_one(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """go-chi/httprate#2, Kong#2629: 50 at once pass 25; here `25/minute` lets exactly 25 of 50 threads through."""
    app = adapter.make(guard("25/minute"), store=MemoryStore(clock=FakeClock()))
    barrier, statuses = threading.Barrier(50), []

    def go() -> None:
        barrier.wait()
        statuses.append(ask(app).status)

    threads = [threading.Thread(target=go) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] * 25 + [429] * 25


@pytest.mark.parametrize(("gives", "wanted"), [("", "error"), (None, 200)])
def test_s46_an_empty_key_is_not_unlimited(
    adapter: Adapter, ask: Callable[..., Any], gives: Any, wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Flask-Limiter#186: an empty key means unlimited; here it is the application's mistake, and only `None` skips."""
    app = adapter.make(guard("1/hour", key=lambda _: gives), store=MemoryStore())
    if wanted == 200:
        assert [ask(app).status for _ in range(3)] == [200] * 3
    elif adapter.falcon:
        assert ask(app).status == 500
    else:
        with pytest.raises(ValueError, match="gave ''"):
            ask(app)
