"""Several limits in one step: all or nothing, and what is given back is never too much."""

from __future__ import annotations

import ctypes
import itertools
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmlimit import ConfigError, FixedWindow, Gcra, Policy, SharedTable, SlidingCounter, TokenBucket
from shmlimit.policies.bucket import Bucket
from shmlimit.policies.requests import join
from shmlimit.table import native
from shmlimit.table.charges import Charges
from shmlimit.table.prepared import numbers
from tests.instrumented import SOURCES

T0 = 1_767_225_600_000_000
HOUR, MINUTE = TokenBucket(5, 3600), TokenBucket(1, 60)


def test_refused_request_consumes_nothing(table: SharedTable) -> None:
    """The limit that would have allowed is not charged when the other refuses."""
    results = [table.take_all([(HOUR, "k", 1), (MINUTE, "k", 1)], now_us=T0) for _ in range(3)]
    assert [[d.allowed for d in decisions] for decisions in results] == [[True, True], [True, False], [True, False]]
    assert [decisions[0].remaining for decisions in results] == [4, 4, 4]
    assert results[1][1].retry_after == 60.0
    assert table.peek(HOUR, "k", now_us=T0).remaining == 4


def test_larger_limit_keeps_what_the_smaller_refused(table: SharedTable) -> None:
    """31 requests through 10 a minute leave 20 of 30 in half an hour."""
    small, large = FixedWindow(10, 60), FixedWindow(30, 1800)
    allowed = sum(all(table.take_all([(small, "k", 1), (large, "k", 1)], now_us=T0)) for _ in range(31))
    assert allowed == 10
    assert table.peek(large, "k", now_us=T0).remaining == 20


def test_same_policy_and_key_twice_adds_up(table: SharedTable) -> None:
    """Costs on one state are one cost, and each place gets the joint answer."""
    decisions = table.take_all([(HOUR, "k", 2), (MINUTE, "k", 1), (HOUR, b"k", 2)], now_us=T0)
    assert [d.remaining for d in decisions] == [1, 0, 1]
    decisions = table.take_all([(HOUR, "k", 1), (HOUR, "k", 1)], now_us=T0)
    assert [d.allowed for d in decisions] == [False, False]
    assert table.peek(HOUR, "k", now_us=T0).remaining == 1


def test_counters_tell_what_stands(table: SharedTable) -> None:
    """`allowed` counts what stands, `denied` what refused; a charge that was given back is neither."""
    table.take_all([(HOUR, "k", 1), (MINUTE, "k", 1)])
    table.take_all([(HOUR, "k", 1), (MINUTE, "k", 1)])
    stats = table.stats()
    assert (stats["allowed"], stats["denied"]) == (2, 1)


def test_nothing_is_a_request_too(table: SharedTable) -> None:
    """No requests, no decisions; cost 0 reports; a cost above a quota refuses for good."""
    assert table.take_all([]) == []
    assert [d.remaining for d in table.take_all([(HOUR, "k", 0), (MINUTE, "k", 0)])] == [5, 1]
    never, other = table.take_all([(HOUR, "k", 2**40), (MINUTE, "k", 1)])
    assert never.retry_after_us is None
    assert (other.allowed, other.remaining) == (True, 1)
    assert table.used() == 0


def test_unsupported_policy_charges_nothing(table: SharedTable) -> None:
    """A policy that the table can't hold is a ConfigError before anything is charged."""
    with pytest.raises(ConfigError, match="ten years"):
        table.take_all([(HOUR, "k", 1), (TokenBucket(1, 10**9), "k", 1)])
    assert table.peek(HOUR, "k").remaining == 5


policies = st.sampled_from(
    [
        TokenBucket(3, 0.001),
        TokenBucket(7, 1, burst=3),
        Gcra(2, 0.01),
        FixedWindow(3, 0.002),
        FixedWindow(600_000, 4),
        SlidingCounter(3, 0.002),
        SlidingCounter(600, 1),
    ]
)
requests = st.lists(st.tuples(policies, st.sampled_from(["a", "b"]), st.integers(0, 4)), min_size=1, max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(history=st.lists(st.tuples(st.integers(-500, 3000), requests), max_size=12))
def test_every_joint_decision_is_the_pure_one(
    table: SharedTable, history: list[tuple[int, list[tuple[Policy, str, int]]]]
) -> None:
    """On any history the answers are those of the pure policies, charged all or none."""
    table.slots[:] = 0
    states: dict[tuple[Policy, bytes], object] = {}
    now_us = T0
    for step, asked in history:
        now_us += step
        joint = join(asked)
        decided = [policy.decide(states.get((policy, key)), now_us, cost) for policy, key, cost in joint.requests]
        stands = all(decision.allowed for decision, _ in decided)
        wanted = []
        for (policy, key, cost), (decision, state) in zip(joint.requests, decided, strict=True):
            if stands or not decision.allowed:
                wanted.append(decision)
            else:
                wanted.append(policy.decide(states.get((policy, key)), now_us, 0)[0])
            if stands and cost:
                states[policy, key] = state
        assert table.take_all(asked, now_us=now_us) == joint.spread(wanted)


# ---- giving back, with others in between -----------------------------------------------------------------------------

SOURCE = """
#include "_memory.h"
#include "_policies.h"
int do_judge(struct call *c, uint64_t state, int64_t now_us, int64_t cost, uint64_t *to) {
    int status = judge(c, state, now_us, now_us, cost, to);
    (void)CONTENDED, (void)siphash, (void)swap_pair, (void)raise_word, (void)expiry_us;
    return status == ANSWERED && c->allowed;
}
uint64_t do_give_back(struct call *c, uint64_t state, int64_t cost) { return give_back(c, state, cost); }
"""

State = int
GiveBack = Callable[[State, "Outstanding", int], State]


class Outstanding(NamedTuple):
    """A charge that may still be given back: when, how much, what it wrote, and what was there before."""

    stamp_us: int
    cost: int
    wrote: State
    before: State


class Words:
    """The arithmetic of the C helper on one policy's state words, with the clock in the test's hands."""

    def __init__(self, library: Path, policy: Policy) -> None:
        helper = ctypes.CDLL(str(library))
        self._judge, self._give_back = helper.do_judge, helper.do_give_back
        self._judge.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._give_back.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64]
        self._give_back.restype = ctypes.c_uint64
        self._policy = native.Policy(**numbers(policy)._asdict())
        self._call = native.Call(policy=ctypes.addressof(self._policy), now_us=-1)
        self._to = ctypes.c_uint64()

    def charge(self, state: State, now_us: int, cost: int) -> Outstanding | None:
        if not self._judge(ctypes.addressof(self._call), state, now_us, cost, ctypes.addressof(self._to)):
            return None
        return Outstanding(now_us, cost, self._to.value, state)

    def give_back(self, state: State, charge: Outstanding, _clock_us: int) -> State:
        self._call.before, self._call.charged = charge.before, charge.wrote
        return int(self._give_back(ctypes.addressof(self._call), state, charge.cost))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header with the arithmetic of the table, compiled for itself."""
    directory = tmp_path_factory.mktemp("words")
    source, library = directory / "words.c", directory / "words.so"
    source.write_text(SOURCE)
    include = SOURCES
    flags = ["-mcx16"] if platform.machine() == "x86_64" else []
    subprocess.run(
        ["cc", "-O1", "-std=gnu11", "-shared", "-fPIC", *flags, f"-I{include}", "-o", str(library), str(source)],
        check=True,
    )
    return library


def breaches(policy: Policy, words: Words, give_back: GiveBack, *, steps: int, tick_us: int) -> Iterator[list[str]]:
    """Every history of charges of 1 or 2, givings-back in any order and ticks of the clock, up to `steps` long, after
    which what was kept is more than the pure policy allows.
    """

    def go(
        state: State, now_us: int, held: list[Outstanding], kept: list[tuple[int, int]], told: list[str]
    ) -> Iterator[list[str]]:
        if not all(policy.simulate(kept)):
            yield told
            return
        if len(told) == steps:
            return
        yield from go(state, now_us + tick_us, held, kept, [*told, "tick"])
        # A worker may have read the clock long before it charges. (A window takes that as the state's own time, so what
        # it allows must be compared window by window, and is left to the histories in which nobody is late.)
        stamps = (now_us, now_us - tick_us) if isinstance(policy, Bucket) else (now_us,)
        for cost, stamp_us in itertools.product((1, 2), stamps):
            charge = words.charge(state, stamp_us, cost)
            if charge is not None:
                what = f"{cost} as of {stamp_us - T0}"
                yield from go(charge.wrote, now_us, held, [*kept, (stamp_us, cost)], [*told, f"keep {what}"])
                if len(held) < 3:
                    yield from go(charge.wrote, now_us, [*held, charge], kept, [*told, f"charge {what}"])
        for number, charge in enumerate(held):
            rest = held[:number] + held[number + 1 :]
            yield from go(give_back(state, charge, now_us), now_us, rest, kept, [*told, f"give back {number}"])

    yield from go(0, T0, [], [], [])


CASES = [
    (TokenBucket(1, 0.002, burst=2), 1_000),
    (TokenBucket(1, 0.002, burst=3), 1_000),
    (Gcra(3, 0.004, burst=2), 1_000),
    (FixedWindow(2, 0.002), 1_000),
    (SlidingCounter(3, 0.002), 1_000),
]


@pytest.mark.parametrize(("policy", "tick_us"), CASES, ids=str)
def test_giving_back_is_never_too_much(library: Path, policy: Policy, tick_us: int) -> None:
    """Over all small histories with up to three givers-back, what is kept is what the pure policy allows."""
    words = Words(library, policy)
    assert next(breaches(policy, words, words.give_back, steps=6, tick_us=tick_us), None) is None


SLOW = TokenBucket(1, 0.002, burst=2)  # an interval of 2,000 µs


def all_of_it(state: State, charge: Outstanding, _clock_us: int) -> State:
    return state - (charge.cost * 2_000 << 11)


def all_but_the_time_since(state: State, charge: Outstanding, clock_us: int) -> State:
    tat_us = max(charge.before & ~(1 << 63), charge.stamp_us << 11) + (charge.cost * 2_000 << 11)
    return state - max(0, min(tat_us - (clock_us << 11), state - (1 << 63)))


@pytest.mark.parametrize("wrong", [all_of_it, all_but_the_time_since], ids=lambda rule: rule.__name__)
def test_other_rules_give_back_too_much(library: Path, wrong: GiveBack) -> None:
    """The same search finds a breach of each simpler rule, so that it would find one of ours."""
    assert next(breaches(SLOW, Words(library, SLOW), wrong, steps=6, tick_us=1_000), None) is not None


def test_giving_back_is_all_of_it_at_once(library: Path) -> None:
    """With no time in between nothing is lost: the next decisions are as if the charge had not been."""
    for policy, _ in CASES:
        words = Words(library, policy)
        first = words.charge(0, T0, 1)
        assert first is not None
        second = words.charge(first.wrote, T0, 1)
        assert second is not None
        assert words.give_back(second.wrote, second, T0) == first.wrote


def test_given_back_after_a_commit_that_failed(table: SharedTable) -> None:
    """A store that charged the table first undoes it, and the quota is there again."""
    policy = TokenBucket(5, 10**6)
    charges = table.charge_all([(policy, b"k", 5)])
    assert charges.stands
    assert not table.take(policy, "k").allowed
    charges.give_back()
    assert table.peek(policy, "k").remaining >= 4  # all but what had run out meanwhile
    assert table.take(policy, "k", 4).allowed
    assert table.stats()["allowed"] == 1


def test_charge_that_was_built_on_stays(table: SharedTable) -> None:
    """A bucket's charge is given back only while its word is there; a window's while its window is."""
    bucket, window = TokenBucket(5, 10**6), FixedWindow(5, 10**6)
    for policy, remaining in ((bucket, 2), (window, 4)):
        first = table.charge_all([(policy, b"k", 2)], T0)
        first.give_back()
        assert table.peek(policy, "k", now_us=T0).remaining == 5
        second = table.charge_all([(policy, b"k", 2)], T0)
        assert table.take(policy, "k", 1, now_us=T0).allowed
        second.give_back()
        assert table.peek(policy, "k", now_us=T0).remaining == remaining


@pytest.mark.parametrize("policy", [FixedWindow(10, 60), SlidingCounter(10, 60)], ids=str)
@pytest.mark.parametrize("later_us", [60 * 10**6, 120 * 10**6, 180 * 10**6])
def test_late_worker_finds_no_empty_window(table: SharedTable, policy: Policy, later_us: int) -> None:
    """A window was spent; a charge in a later one was given back: who still judges as of the first one gets nothing."""
    for _ in range(10):
        assert table.take(policy, "k", now_us=T0).allowed
    table.charge_all([(policy, b"k", 1)], T0 + later_us).give_back()
    assert not any(table.take(policy, "k", now_us=T0 + 5).allowed for _ in range(30))
    # Two that overlap: the last of them stays, since it has not opened the window.
    first = table.charge_all([(policy, b"k", 1)], T0 + later_us)
    second = table.charge_all([(policy, b"k", 1)], T0 + later_us)
    if first.stands and second.stands:
        first.give_back()
        second.give_back()
        allowed = sum(table.take(policy, "k", now_us=T0 + 5).allowed for _ in range(30))
        allowed += sum(table.take(policy, "k", now_us=T0 + later_us).allowed for _ in range(30))
        assert allowed <= 9


@pytest.mark.parametrize(("policy", "lives"), [(FixedWindow(10, 60), 1), (SlidingCounter(10, 60), 2)], ids=str)
def test_window_of_nothing_keeps_its_place(table: SharedTable, policy: Policy, lives: int) -> None:
    """A new key's only charge was given back: who comes with an older time counts in that window, not in one before."""
    table.charge_all([(policy, b"k", 1)], T0 + 120 * 10**6).give_back()
    late = table.take(policy, "k", now_us=T0)
    assert (late.allowed, late.remaining) == (True, 9)
    assert late.reset_us == (120 + 60 * lives) * 10**6


def test_the_scarcest_limit_is_charged_first(table: SharedTable) -> None:
    """One that denies after all is then the first, and nothing was charged that another could build on."""
    charged: list[Policy] = []
    ask = Charges._ask

    def note(self: Charges, function: object, lease: object, cost: int) -> object:
        if function is native.helper().charge:
            charged.append(lease.policy)  # type: ignore[attr-defined]
        return ask(self, function, lease, cost)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Charges, "_ask", note)
        table.take_all([(HOUR, "k", 1), (TokenBucket(100, 60), "k", 1), (MINUTE, "k", 1)])
    assert charged == [MINUTE, HOUR, TokenBucket(100, 60)]
