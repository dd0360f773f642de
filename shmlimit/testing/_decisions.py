"""The same decisions as the pure policy."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlimit import Decision, Policy
from shmlimit.policies.base import PERIOD_MAX_US
from shmlimit.testing._hooks import Hooks
from shmlimit.testing._model import (
    KINDS,
    MODEST,
    T0,
    TEN,
    TURNS_US,
    YEAR,
    Model,
    S,
    histories,
    policies,
    policy_of,
    runs,
    same,
    starts,
    waits,
)

# (limit, period_us, burst): fractions of a microsecond, the largest and the smallest numbers, a burst of its own.
NUMBERS = [
    (3, S, None),
    (7, 1_000, None),
    (1, 1_000, None),
    (7, 60 * S, 3),
    (2, 86_400 * S, 11),
    (10**9, S, None),
    (10**9, PERIOD_MAX_US, None),
    (1, PERIOD_MAX_US, None),
    (999_999_937, 86_400 * S, None),
]


class Decisions(Hooks):
    """All six fields, at any time, with any numbers."""

    @pytest.mark.parametrize("kind", KINDS)
    @MODEST
    @given(data=st.data())
    def test_every_decision_is_the_pure_one(self, data: st.DataObject, kind: type[Any]) -> None:
        """All six fields agree with the pure policy on any history of a key, with times that go back, for take and
        peek.
        """
        policy = data.draw(policies(kind))
        with self.new_store() as store:
            self.need(store, kind(10, 60))
            runs(self, store, policy)
            model, now_us = Model(self.lasts_us), data.draw(starts(self.latest_us))
            for step, cost, _ in data.draw(histories(policy, -2)):
                now_us = min(max(0, now_us + step), self.latest_us)
                peeked = store.peek(policy, "k", cost, now_us=now_us)
                wanted = model.take(policy, "k", cost, now_us)
                taken = store.take(policy, "k", cost, now_us=now_us)
                if not model.sure(now_us):
                    return
                same(peeked, wanted, policy, now_us, cost)
                same(taken, wanted, policy, now_us, cost)

    @pytest.mark.parametrize("kind", KINDS)
    @MODEST
    @given(data=st.data())
    def test_forgetting_is_not_seen(self, data: st.DataObject, kind: type[Any]) -> None:
        """While time goes forward, several keys get the pure policy's decisions, whatever was forgotten meanwhile."""
        policy = data.draw(policies(kind))
        with self.new_store() as store:
            self.need(store, kind(10, 60))
            runs(self, store, policy)
            model, now_us = Model(self.lasts_us), data.draw(starts(self.latest_us))
            for step, cost, key in data.draw(histories(policy, 0)):
                now_us = min(now_us + step, self.latest_us)
                wanted = model.take(policy, f"key {key}", cost, now_us)
                taken = store.take(policy, f"key {key}", cost, now_us=now_us)
                if not model.sure(now_us):
                    return
                same(taken, wanted, policy, now_us, cost)

    @pytest.mark.parametrize("kind", KINDS)
    def test_denied_until_exactly_the_promised_instant(self, kind: type[Any]) -> None:
        """With the largest and the smallest numbers, and wherever numbers of machines end: a wait is over at its last
        microsecond and not before.
        """
        asked = 0
        policies = filter(None, (policy_of(kind, *numbers) for numbers in NUMBERS))
        turns = [T0, *(max(0, turn_us - 2) for turn_us in TURNS_US), self.latest_us - 3]
        for policy, start_us in product(policies, [turn_us for turn_us in turns if turn_us <= self.latest_us]):
            with self.new_store() as store:
                if store.supports(policy) and self.exact(policy):
                    asked += 1
                    self._history(store, policy, start_us)
        if not asked:
            pytest.skip(f"no {kind.__name__} is run by exactly its numbers")

    def _history(self, store: Any, policy: Policy, start_us: int) -> None:
        model = Model(self.lasts_us)
        for now_us, cost in waits(policy, start_us):
            if now_us > self.latest_us:
                return
            wanted = model.take(policy, "k", cost, now_us)
            taken = store.take(policy, "k", cost, now_us=now_us)
            if not model.sure(now_us):
                return
            same(taken, wanted, policy, now_us, cost)

    @pytest.mark.parametrize("policy", TEN, ids=str)
    def test_a_clock_that_goes_back_grants_nothing(self, store: Any, policy: Policy) -> None:
        """A spent key is spent at every earlier `now_us`, too, and the wait is counted from there."""
        self.need(store, policy)
        assert store.take(policy, "k", 10, now_us=T0 + 30 * S).allowed
        later = policy.simulate([(T0 + 30 * S, 10), (T0 + 30 * S, 1)])[1]
        for back_us in (0, 1, 29 * S, 31 * S, 3600 * S):
            denied = store.take(policy, "k", now_us=T0 + 30 * S - back_us)
            same(denied, policy.simulate([(T0 + 30 * S, 10), (T0 + 30 * S - back_us, 1)])[1])
            assert denied.retry_after_us == (later.retry_after_us or 0) + back_us

    @pytest.mark.parametrize("kind", KINDS)
    def test_own_clock(self, store: Any, kind: type[Any]) -> None:
        """Without `now_us` a store reads a clock of its own, near to the time of day, and the quota goes down."""
        policy = kind(10, YEAR)
        self.need(store, policy)
        decisions = [store.take(policy, "k") for _ in range(3)]
        assert [decision.remaining for decision in decisions] == [9, 8, 7]
        assert isinstance(decisions[0], Decision)
        assert all(0 < decision.reset_us <= 2 * YEAR * S for decision in decisions)
        # From the time of day the same state is as long from whole: the two clocks are within 10 s.
        by_day = store.peek(policy, "k", now_us=time.time_ns() // 1000)
        assert abs(by_day.reset_us - decisions[-1].reset_us) < 10 * S

    def test_what_was_forgotten_is_not_judged_earlier(self) -> None:
        """A spent key that was forgotten and comes back with an earlier time gets one more quota, as of the time at
        which it was forgotten, and waits from the time that it gave.
        """
        asked = 0
        for policy in TEN:
            with self.new_store() as store:
                if store.supports(policy) and self.forgets(policy):
                    asked += 1
                    self._forgotten(store, policy)
        if not asked:
            pytest.skip("forgets nothing by a charge at a later time")

    def _forgotten(self, store: Any, policy: Policy) -> None:
        assert store.take(policy, "k", 10, now_us=T0).allowed
        assert not store.take(policy, "k", now_us=T0).allowed
        store.take(policy, "other", now_us=T0 + 3600 * S)
        expiry_us = policy.expires_at(policy.decide(None, T0, 10)[1])
        peeked, taken = store.peek(policy, "k", 1, now_us=T0), store.take(policy, "k", 1, now_us=T0)
        wanted = policy.decide(None, expiry_us, 1)[0]
        lead_us = expiry_us - T0
        assert peeked == taken
        same(taken, wanted._replace(reset_us=wanted.reset_us + lead_us, next_us=wanted.next_us + lead_us), policy)
        allowed = [store.take(policy, "k", now_us=T0).allowed for _ in range(20)]
        assert sum(allowed) <= 9, policy
        assert not store.take(policy, "k", 9, now_us=T0).allowed
        same(store.take(policy, "new", 11, now_us=T0), Decision(False, 10, 10, 0, None, 0))
