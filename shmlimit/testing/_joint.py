"""Several limits for one request: all or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlimit import Gcra, Policy, SlidingLog, TokenBucket, parse
from shmlimit.testing._hooks import Hooks
from shmlimit.testing._model import KINDS, MODEST, T0, TEN, YEAR, Model, S, same

POLICIES: list[Policy] = [kind(limit, period) for kind in KINDS for limit, period in ((4, 60), (7, 3600))]
BOTH = (TEN[0], TEN[1])


class Joint(Hooks):
    """`take_all`."""

    @MODEST
    @given(
        history=st.lists(
            st.tuples(
                st.integers(-30 * S, 60 * S),
                st.lists(
                    st.tuples(st.sampled_from(POLICIES), st.sampled_from(["a", "b"]), st.integers(0, 4)), max_size=5
                ),
            ),
            max_size=15,
        )
    )
    def test_every_joint_decision_is_the_pure_one(
        self, history: list[tuple[int, list[tuple[Policy, str, int]]]]
    ) -> None:
        """On any history of requests over several policies and keys the answers are those of the pure policies, charged
        all or none. Time goes back only where the store forgets nothing by a later one.
        """
        with self.new_store() as store:
            self.need(store, method="take_all")
            model, now_us = Model(self.lasts_us), T0
            for step_us, asked in history:
                requests = [request for request in asked if store.supports(request[0])]
                now_us = max(now_us + step_us, model.floor_us)
                wanted = model.take_all(list(requests), now_us)
                taken = store.take_all(requests, now_us=now_us)
                if not model.sure(now_us):
                    return
                assert len(taken) == len(wanted)
                for request, answer, right in zip(requests, taken, wanted, strict=True):
                    same(answer, right, now_us, request, requests)

    def test_all_or_nothing(self, store: Any) -> None:
        """The first limit was charged although the second refused (limits, falcon-limiter); here none is charged, the
        denying one says so and the other reports what `peek` would.
        """
        self.need(store, method="take_all")
        hourly, minute = parse("5/hour"), parse("1/minute")
        for both in ([(hourly, "k", 1), (minute, "k", 1)], [(minute, "l", 1), (hourly, "l", 1)]):
            answers = [store.take_all(both, now_us=T0) for _ in range(3)]
            allowed = [
                {policy: one.allowed for (policy, _, _), one in zip(both, answer, strict=True)} for answer in answers
            ]
            assert allowed == [{hourly: True, minute: True}, *2 * [{hourly: True, minute: False}]]
            key = both[0][1]
            whole = {hourly: store.peek(hourly, key, now_us=T0), minute: store.peek(minute, key, 1, now_us=T0)}
            assert whole[hourly].remaining == 4
            assert answers[1] == answers[2] == [whole[policy] for policy, _, _ in both]

    @pytest.mark.parametrize("policy", TEN, ids=str)
    def test_a_refusal_charges_nobody(self, store: Any, policy: Policy) -> None:
        """Wherever in the list the refusal is, and whatever kinds of policies the others are."""
        self.need(store, policy, method="take_all")
        others: list[tuple[Policy, str | bytes, int]] = [(one, "k", 2) for one in TEN if store.supports(one)]
        store.take(policy, "spent", 10, now_us=T0)
        before = self.kept(store)
        for place in range(len(others) + 1):
            for cost in (1, 11):
                answer = store.take_all([*others[:place], (policy, "spent", cost), *others[place:]], now_us=T0)
                allows = [number != place for number in range(len(others) + 1)]
                assert [one.allowed for one in answer] == allows
                assert [one.remaining for one in answer] == [10 * allowed for allowed in allows]
                assert (answer[place].retry_after_us is None) == (cost == 11)
        assert [store.peek(one, key, now_us=T0).remaining for one, key, _ in others] == [10] * len(others)
        assert self.kept(store) == before

    def test_refused_hits_do_not_use_up_the_larger_limit(self, store: Any) -> None:
        """graphql-rate-limit#129: 10 of 31 within the minute, and the larger limit has 20 left."""
        minute, half_hour = parse("fixed 10/minute"), parse("fixed 30/1800s")
        self.need(store, minute, half_hour, method="take_all")
        answers = [store.take_all([(minute, "k", 1), (half_hour, "k", 1)], now_us=T0 + i) for i in range(31)]
        assert sum(all(answer) for answer in answers) == 10
        assert store.peek(half_hour, "k", now_us=T0).remaining == 20

    @pytest.mark.parametrize("policy", TEN, ids=str)
    def test_same_key_twice_gets_the_joint_answer(self, store: Any, policy: Policy) -> None:
        """The same policy and key twice adds the costs up, also as text and bytes; denied together, nothing is
        charged.
        """
        self.need(store, policy, method="take_all")
        answer = store.take_all([(policy, "k", 2), (policy, "other", 1), (policy, b"k", 3)], now_us=T0)
        assert [one.remaining for one in answer] == [5, 9, 5]
        denied = store.take_all([(policy, "k", 3), (policy, "other", 1), (policy, "k", 3)], now_us=T0)
        assert [one.allowed for one in denied] == [False, True, False]
        same(denied[0], policy.simulate([(T0, 5), (T0, 6)])[1])
        assert denied[0] == denied[2]
        never = store.take_all([(policy, "k", 6), (policy, "k", 5)], now_us=T0)
        assert [one.retry_after_us for one in never] == [None, None]
        assert store.peek(policy, "k", now_us=T0).remaining == 5
        assert store.peek(policy, "other", now_us=T0).remaining == 9

    def test_take_all_of_one_is_take(self, store: Any) -> None:
        """One request is `take`, and none at all is an empty answer; anything to go through will do."""
        self.need(store, method="take_all")
        assert store.take_all([], now_us=T0) == []
        assert store.take_all([(TEN[0], "k", 4)], now_us=T0) == TEN[0].simulate([(T0, 4)])
        assert [one.remaining for one in store.take_all(iter([(TEN[0], "k", 0)]), now_us=T0)] == [6]
        assert [one.remaining for one in store.take_all((one, "l", 1) for one in BOTH)] == [9, 9]

    @pytest.mark.parametrize(
        "bad",
        [(TEN[0], "k", -1), (TEN[0], "k", True), (TEN[0], "k", 1.0), (TEN[0], 7, 1), ("10/minute", "k", 1)],
        ids=["negative", "bool", "float", "key", "policy"],
    )
    def test_mistake_in_one_charges_none(self, store: Any, bad: Any) -> None:
        """A bad cost, key or policy anywhere in the list is raised before anything is charged."""
        self.need(store, method="take_all")
        with pytest.raises((TypeError, ValueError)):
            store.take_all([(TEN[0], "first", 1), bad], now_us=T0)
        with pytest.raises((TypeError, ValueError)):
            store.take_all([bad, (TEN[1], "last", 1)], now_us=T0)
        assert store.peek(TEN[0], "first", now_us=T0).remaining == 10
        assert store.peek(TEN[1], "last", now_us=T0).remaining == 10

    def test_many_in_one_step(self, store: Any) -> None:
        """A hundred keys are charged together, or none of them, and the answers come in their order."""
        self.need(store, method="take_all")
        policy = TokenBucket(100, YEAR)
        requests = [(policy, f"key {number}", number) for number in range(100)]
        answers = store.take_all(requests, now_us=T0)
        assert [one.remaining for one in answers] == list(range(100, 0, -1))
        denied = store.take_all(requests, now_us=T0)
        assert [one.allowed for one in denied] == [number <= 50 for number in range(100)]
        assert store.peek(policy, "key 50", now_us=T0).remaining == 50

    def test_the_own_clock_is_read_for_all(self, store: Any) -> None:
        """Without `now_us` all are judged by the store's clock."""
        once = [Gcra(1, YEAR), SlidingLog(1, YEAR)]
        policies = [one for one in (*(kind(10, YEAR) for kind in KINDS), *once) if store.supports(one)]
        self.need(store, method="take_all")
        requests: list[tuple[Policy, str, int]] = [(one, "k", 1) for one in policies]
        left = [one.quota - 1 for one in policies]
        assert [one.remaining for one in store.take_all(requests)] == left
        assert [store.peek(one, "k").remaining for one in policies] == left
        assert [one.allowed for one in store.take_all(requests)] == [rest > 0 for rest in left]
