"""What is written and what isn't, what a state's end is, and what a closed store says."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shmlimit import Decision, FixedWindow, Policy, SlidingCounter, StoreError, TokenBucket
from shmlimit.testing._hooks import Hooks
from shmlimit.testing._model import KINDS, ONCE, T0, TEN, YEAR, S, same

WHOLE = Decision(True, 10, 10, 0, 0, 0)


class Written(Hooks):
    """`kept` is looked at where a store has it; what can be seen from outside is looked at in any case."""

    @pytest.mark.parametrize("policy", TEN, ids=str)
    def test_peek_writes_nothing(self, store: Any, policy: Policy) -> None:
        """`peek` says what `take` would and changes nothing, for a key that is there and one that isn't."""
        self.need(store, policy)
        store.take(policy, "k", 7, now_us=T0)
        before = self.kept(store)
        for _ in range(2):
            assert store.peek(policy, "k", now_us=T0).remaining == 3
            assert store.peek(policy, "k", 2, now_us=T0).remaining == 1
            assert not store.peek(policy, "k", 4, now_us=T0).allowed
            assert store.peek(policy, "new", 4, now_us=T0).remaining == 6
        assert store.peek(policy, "k", 1, now_us=T0 + 3600 * S).remaining == 9
        assert store.peek(policy, "k", now_us=T0).remaining == 3
        same(store.peek(policy, "new", now_us=T0), WHOLE)
        assert self.kept(store) == before

    @pytest.mark.parametrize("policy", TEN, ids=str)
    def test_denial_and_cost_0_store_nothing(self, store: Any, policy: Policy) -> None:
        """A refused request, one that only reports and one that never fits leave everything as it was."""
        self.need(store, policy)
        store.take(policy, "k", 10, now_us=T0)
        before, spent = self.kept(store), store.peek(policy, "k", now_us=T0)
        assert not store.take(policy, "k", now_us=T0).allowed
        assert store.take(policy, "k", 11, now_us=T0).retry_after_us is None
        assert store.take(policy, "new", 11, now_us=T0 + 3600 * S).retry_after_us is None
        same(store.take(policy, "new", 0, now_us=T0), WHOLE)
        assert store.take(policy, "k", 0, now_us=T0).remaining == 0
        if hasattr(store, "take_all"):
            assert all(store.take_all([(policy, "k", 0), (policy, "new", 0)], now_us=T0))
            assert not all(store.take_all([(policy, "k", 1), (policy, "new", 1)], now_us=T0))
        same(store.peek(policy, "k", now_us=T0), spent)
        same(store.peek(policy, "new", now_us=T0), WHOLE)
        assert self.kept(store) == before

    @pytest.mark.parametrize("policy", TEN, ids=str)
    @pytest.mark.parametrize("cost", [11, 2**31, 2**32 + 1, 2**64, 10**30])
    def test_cost_above_the_quota_never_succeeds(self, store: Any, policy: Policy, cost: int) -> None:
        """It is denied without a wait, says what is there, and leaves it to others; however large it is."""
        self.need(store, policy)
        store.take(policy, "k", 4, now_us=T0)
        wanted = policy.simulate([(T0, 4), (T0, cost)])[1]
        assert wanted.retry_after_us is None
        for ask in (store.peek, store.take):
            same(ask(policy, "k", cost, now_us=T0), wanted)
            same(ask(policy, "new", cost, now_us=T0), Decision(False, 10, 10, 0, None, 0))
        assert store.take(policy, "k", 6, now_us=T0).remaining == 0

    # ---- the end of a state ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("policy", TEN, ids=str)
    def test_nothing_is_left_after_the_expiry(self, store: Any, policy: Policy) -> None:
        """From a state's expiry on the quota is whole, and one microsecond before it isn't."""
        self.need(store, policy)
        store.take(policy, "k", 10, now_us=T0)
        expires_us = policy.expires_at(policy.decide(None, T0, 10)[1])
        assert store.peek(policy, "k", now_us=expires_us - 1).reset_us == 1
        assert not store.peek(policy, "k", 10, now_us=expires_us - 1).allowed
        same(store.peek(policy, "k", now_us=expires_us), WHOLE)
        same(store.take(policy, "k", 10, now_us=expires_us), policy.simulate([(expires_us, 10)])[0])
        assert not store.take(policy, "k", now_us=expires_us).allowed

    @pytest.mark.parametrize("kind", KINDS)
    def test_reset_gives_the_quota_back(self, store: Any, kind: type[Any]) -> None:
        """`reset` forgets a live state once, says whether there was one, and touches no other key and no other
        policy.
        """
        policy, other = kind(10, YEAR), kind(10, YEAR // 2)
        self.need(store, policy)
        assert store.reset(policy, "k") is False
        for one, key in [(policy, "k"), (policy, "other"), (other, "k")]:
            store.take(one, key, 10)
        assert store.reset(policy, "k") is True
        assert store.reset(policy, "k") is False
        assert store.take(policy, "k").remaining == 9
        assert not store.take(policy, "other").allowed
        assert not store.take(other, "k").allowed

    @pytest.mark.parametrize("policy", [TokenBucket(1, 0.02), FixedWindow(1, 0.02), SlidingCounter(1, 0.02)], ids=str)
    def test_reset_of_an_expired_state_is_none(self, store: Any, policy: Policy) -> None:
        """What has expired by the store's own clock is no state any more, whether or not it lies there."""
        self.need(store, policy)
        store.take(policy, "k")
        until_s = time.monotonic() + self.patience_s
        while store.peek(policy, "k").reset_us:
            assert time.monotonic() < until_s, "a state of some milliseconds goes on and on"
        assert store.reset(policy, "k") is False

    # ---- closed ------------------------------------------------------------------------------------------------------

    def test_closed_store_says_so(self, store: Any) -> None:
        """Every call after `close` is a StoreError; closing twice is no mistake."""
        store.take(ONCE, "k")
        store.close()
        for call in (store.take, store.peek, store.reset):
            with pytest.raises(StoreError, match="closed"):
                call(ONCE, "k")
        if hasattr(store, "take_all"):
            with pytest.raises(StoreError, match="closed"):
                store.take_all([(ONCE, "k", 1), (ONCE, "l", 1)])
        store.close()

    def test_with_closes(self, store: Any) -> None:
        """A store is its own context manager, which closes it."""
        self.need(store, method="__enter__")
        with store as entered:
            assert entered is store
            assert store.take(ONCE, "k").allowed
        with pytest.raises(StoreError, match="closed"):
            store.take(ONCE, "k")

    def test_closing_leaves_the_states(self, store: Any) -> None:
        """What one object of a shared store has charged is there for the next, also when the first is closed."""
        opener = self.opener(store)
        if opener is None:
            pytest.skip(f"{type(store).__name__} isn't opened twice")
        other = opener()
        try:
            assert store.take(ONCE, "k").allowed
            assert not other.take(ONCE, "k").allowed
            store.close()
            assert not other.take(ONCE, "k").allowed
            assert other.reset(ONCE, "k") is True
        finally:
            other.close()
