"""The breaker: what a known failure costs, and how the server is taken back."""

from __future__ import annotations

import pytest

from shmlimit import StoreError
from shmlimit.stores._breaker import FIRST_WAIT_S, JITTER, LONGEST_WAIT_S, Breaker
from shmlimit.testing import FakeClock

WAITS_S = [1, 2, 4, 8, 16, 32, 32, 32]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(0)


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    """A breaker that the test's clock moves, with waits of just their length."""
    return Breaker(clock=lambda: clock.now_us / 1e6, chance=lambda: 0.5)


def is_shut(breaker: Breaker) -> bool:
    """Whether a call fails at once."""
    try:
        breaker.enter()
    except StoreError:
        return True
    return False


def test_calls_pass_while_the_server_answers(breaker: Breaker) -> None:
    """Successes change nothing."""
    for _ in range(3):
        outage = breaker.enter()
        assert outage is None
        breaker.succeeded(outage)
    assert breaker.outage is None


def test_waits_double_up_to_the_longest(breaker: Breaker, clock: FakeClock) -> None:
    """1, 2, 4 … 32 s after each failed probe, to the microsecond."""
    outage = breaker.enter()
    for failures, wait_s in enumerate(WAITS_S, 1):
        breaker.failed(outage, "down")
        assert breaker.outage is not None
        assert breaker.outage.failures == failures
        assert is_shut(breaker)
        clock.advance_us(wait_s * 1_000_000 - 1)
        assert is_shut(breaker)
        clock.advance_us(1)
        outage = breaker.enter()
    assert (FIRST_WAIT_S, LONGEST_WAIT_S) == (1, 32)


@pytest.mark.parametrize(("chance", "part"), [(0.0, 0.8), (0.25, 0.9), (0.75, 1.1), (1.0, 1.2)])
def test_waits_are_a_fifth_shorter_or_longer(clock: FakeClock, chance: float, part: float) -> None:
    """By chance, so that a fleet doesn't come back in one moment."""
    breaker = Breaker(clock=lambda: clock.now_us / 1e6, chance=lambda: chance)
    outage = breaker.enter()
    for wait_s in WAITS_S:
        breaker.failed(outage, "down")
        assert breaker.outage is not None
        assert breaker.outage.probe_at - clock.now_us / 1e6 == pytest.approx(wait_s * part)
        clock.advance(wait_s * part + 1e-6)
        outage = breaker.enter()


def test_chance_differs_from_breaker_to_breaker(clock: FakeClock) -> None:
    """With the default chance the waits are within the bounds, and not all the same."""
    probes: list[float] = []
    for _ in range(200):
        breaker = Breaker(clock=lambda: clock.now_us / 1e6)
        breaker.failed(breaker.enter(), "down")
        assert breaker.outage is not None
        probes.append(breaker.outage.probe_at)
    assert 1 - JITTER <= min(probes) < 1 < max(probes) <= 1 + JITTER
    assert len(set(probes)) > 100


def test_one_call_is_the_probe(breaker: Breaker, clock: FakeClock) -> None:
    """When it is time one call may ask, and the others go on failing; also if it never comes back, which is a failure
    as long as the next wait.
    """
    breaker.failed(breaker.enter(), "down")
    clock.advance(1)
    assert [is_shut(breaker) for _ in range(4)] == [False, True, True, True]
    clock.advance(1.999_999)
    assert is_shut(breaker)
    clock.advance_us(1)
    assert [is_shut(breaker) for _ in range(2)] == [False, True]


def test_failures_together_count_once(breaker: Breaker, clock: FakeClock) -> None:
    """Calls that were under way when the server went away are one failure, also those that notice late."""
    under_way = [breaker.enter() for _ in range(5)]
    for outage in under_way[:4]:
        breaker.failed(outage, "down")
    assert breaker.outage is not None
    assert breaker.outage.failures == 1
    clock.advance(1)
    probe = breaker.enter()
    breaker.failed(under_way[4], "a late one")
    assert breaker.outage is probe
    breaker.failed(probe, "still down")
    breaker.failed(probe, "the same probe again")
    assert breaker.outage is not None
    assert (breaker.outage.failures, breaker.outage.cause) == (2, "still down")


def test_an_answer_from_before_the_outage_does_not_end_it(breaker: Breaker) -> None:
    """A call that was under way when the server went away may have had its answer already."""
    under_way = breaker.enter()
    breaker.failed(breaker.enter(), "down")
    breaker.succeeded(under_way)
    assert is_shut(breaker)


def test_success_ends_the_outage(breaker: Breaker, clock: FakeClock) -> None:
    """All calls pass again, and the next outage begins with a wait of a second."""
    for wait_s in (1, 2, 4):
        breaker.failed(breaker.enter(), "down")
        clock.advance(wait_s)
    breaker.succeeded(breaker.enter())
    assert breaker.outage is None
    assert [breaker.enter() for _ in range(3)] == [None] * 3
    breaker.failed(None, "down again")
    assert breaker.outage is not None
    assert breaker.outage.failures == 1
    assert breaker.outage.probe_at == pytest.approx(clock.now_us / 1e6 + 1)


def test_message_names_the_cause_and_the_next_try(breaker: Breaker, clock: FakeClock) -> None:
    """A known failure says what it is, and when the server is asked again."""
    breaker.failed(breaker.enter(), "Redis at 127.0.0.1:6379 can't answer: refused")
    clock.advance(0.25)
    with pytest.raises(StoreError, match=r"^Redis at 127.0.0.1:6379 can't answer: refused; tried again in 0.8 s$"):
        breaker.enter()


def test_outage_of_days(breaker: Breaker, clock: FakeClock) -> None:
    """A server that is down for days is still asked every 32 s: no number grows out of bounds."""
    for _ in range(5_000):
        breaker.failed(breaker.outage, "down")
        clock.advance(32)
        breaker.enter()
    assert breaker.outage is not None
    assert breaker.outage.failures == 5_000
    assert breaker.outage.probe_at == clock.now_us / 1e6 + 32
