"""Keys and policies: what is one count and what is two, and what is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlimit import ConfigError, FixedWindow, Gcra, SlidingCounter, SlidingLog, TokenBucket, parse
from shmlimit.policies.base import PERIOD_MAX_US
from shmlimit.policies.requests import key_bytes
from shmlimit.testing._hooks import Hooks
from shmlimit.testing._model import MODEST, ONCE, T0, TEN, S, policy_of

APART: list[tuple[str | bytes, str | bytes]] = [
    (b"AB\0CD", b"AB\0EF"),
    ("AB", b"AB\0"),
    ("", "\0"),
    ("a b", "a\nb"),
    ("a", "a "),
    ("a", "a\r\n"),
    ("x" * 100_000, "x" * 99_999 + "y"),
    ("x" * 250, "x" * 251),
    ("k" * 63 + "a", "k" * 63 + "b"),
    (b"\xff", b"\xfe"),
    ("\ud800", "\ud801"),
    ("é", "e\N{COMBINING ACUTE ACCENT}"),
    ("a", "A"),
    ("1", "1.0"),
    ("1", "01"),
    ("a:b", "a::b"),
    ("{a}b", "{a}c"),
    ("*", "?"),
    ("'; DROP TABLE ratelimit; --", '"; DROP TABLE ratelimit; --'),
]


class Keys(Hooks):
    """The identity of a state is policy and key."""

    @pytest.mark.parametrize("keys", APART, ids=lambda keys: ascii(keys)[:30])
    def test_keys_of_any_bytes_are_told_apart(self, store: Any, keys: tuple[str | bytes, str | bytes]) -> None:
        """NUL, blanks, letter case, length and bytes beyond UTF-8 all count."""
        assert [store.take(ONCE, key).allowed for key in (*keys, *keys)] == [True, True, False, False]

    @MODEST
    @given(keys=st.lists(st.one_of(st.binary(max_size=300), st.text()), min_size=2, max_size=11, unique_by=key_bytes))
    def test_different_bytes_are_different_keys(self, keys: list[str | bytes]) -> None:
        """Each of any keys has a count of its own, and finds it again."""
        with self.new_store() as store:
            left = [10 - number for number, _ in enumerate(keys)]
            assert [store.take(TEN[0], key, number, now_us=T0).remaining for number, key in enumerate(keys)] == left
            assert [store.peek(TEN[0], key, now_us=T0).remaining for key in keys] == left

    def test_text_and_bytes_are_one_key(self, store: Any) -> None:
        """A `str` key is its UTF-8 bytes."""
        assert store.take(TEN[0], "ä").remaining == 9
        assert store.take(TEN[0], "ä".encode()).remaining == 8
        assert store.peek(TEN[0], "ä".encode()).remaining == 8
        assert store.reset(TEN[0], "ä".encode())
        assert store.take(TEN[0], "\ud800").remaining == 9  # half of a surrogate pair, as filesystems' names have them
        assert store.take(TEN[0], b"\xed\xa0\x80").remaining == 8

    def test_equal_policies_share_and_others_do_not(self, store: Any) -> None:
        """The identity of a state is policy and key: the kind and every number."""
        others = [
            Gcra(10, 60),
            *TEN[2:],
            TokenBucket(10, 61),
            TokenBucket(10, 60, burst=11),
            TokenBucket(11, 60, burst=10),
        ]
        assert store.take(TokenBucket(10, 60), "k").remaining == 9
        assert store.take(TokenBucket(10, 60.0, burst=10), "k").remaining == 8
        for policy in others:
            if store.supports(policy):
                assert store.take(policy, "k").remaining == policy.quota - 1
        assert store.peek(TokenBucket(10, 60), "k").remaining == 8

    def test_policy_and_key_do_not_run_into_each_other(self, store: Any) -> None:
        """Numbers and keys that read alike side by side ("1" and "1/x", "11" and "/x"; a/b, c and a, b/c) are apart."""
        policies: list[Any] = [FixedWindow(2, 11), FixedWindow(21, 1), FixedWindow(2, 111), TokenBucket(2, 11, burst=2)]
        policies += [TokenBucket(2, 11, burst=21), TokenBucket(2, 11, burst=211), Gcra(2, 11)]
        keys = ["", "1", "11", "1/x", "/x", ":1", " 1", "1 1", "|1", "\x001", "a/b:c", "a:b/c"]
        pairs = list(product(policies, keys))
        for taken in (1, 2):
            remaining = [store.take(policy, key, now_us=T0).remaining for policy, key in pairs]
            assert remaining == [policy.quota - taken for policy, _ in pairs]

    def test_raised_and_lowered_limits(self, store: Any) -> None:
        """redis-cell#54, Metron#629: a changed limit met the old state; here it is a policy of its own."""
        for _ in range(2):
            store.take(parse("10/20s burst 16"), "k", now_us=T0)
        assert store.take(parse("1000/20s burst 16"), "k", now_us=T0).remaining == 15
        high, low = parse("sliding-log 100/minute"), parse("sliding-log 10/minute")
        if store.supports(high):
            store.take(high, "k", 50, now_us=T0)
            assert store.take(low, "k", now_us=T0).remaining == 9

    def test_windows_of_two_keys_are_apart(self, store: Any) -> None:
        """ulule/limiter#230: one key's window reset another's; here the hourly count goes down without a jump."""
        hourly, often = parse("fixed 30/hour"), parse("fixed 10/s")
        self.need(store, hourly, often)
        remaining = []
        for i in range(10):
            remaining.append(store.take(hourly, "A", now_us=T0 + i * 400_000).remaining)
            store.take(often, "B", now_us=T0 + i * 400_000)
        assert remaining == list(range(29, 19, -1))

    # ---- what is refused ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("cost", [-1, -5, 1.0, 1.5, "1", None, True], ids=repr)
    def test_bad_cost_is_refused(self, store: Any, cost: Any) -> None:
        """A cost that is no integer of 0 or more is a ValueError, and nothing is charged."""
        store.take(TEN[0], "k", now_us=T0)
        for call in (store.take, store.peek):
            with pytest.raises(ValueError, match="cost must be"):
                call(TEN[0], "k", cost, now_us=T0)
        assert store.peek(TEN[0], "k", now_us=T0).remaining == 9

    @pytest.mark.parametrize("now_us", [-1, 10**18 + 1, 1.5, True, "0"], ids=repr)
    def test_bad_time_is_refused(self, store: Any, now_us: Any) -> None:
        """A time that is no integer of microseconds since 1970, or too late, is a ValueError."""
        late_us = self.latest_us + 1 if now_us == 10**18 + 1 else now_us
        for call in (store.take, store.peek):
            with pytest.raises(ValueError, match="now_us must be"):
                call(TEN[0], "k", now_us=late_us)
        if hasattr(store, "take_all"):
            with pytest.raises(ValueError, match="now_us must be"):
                store.take_all([(TEN[0], "k", 1), (TEN[0], "l", 1)], now_us=late_us)
        assert store.peek(TEN[0], "k").remaining == 10

    @pytest.mark.parametrize("key", [None, 7, bytearray(b"k"), memoryview(b"k")], ids=lambda key: type(key).__name__)
    def test_bad_key_is_refused(self, store: Any, key: Any) -> None:
        """A key is text or bytes."""
        for call in (store.take, store.peek, store.reset):
            with pytest.raises(TypeError, match="str or bytes"):
                call(TEN[0], key)

    @pytest.mark.parametrize("policy", ["10/minute", None, TokenBucket, 10], ids=repr)
    def test_no_policy_is_refused(self, store: Any, policy: Any) -> None:
        """A store takes policies: notation and other things are a ConfigError, and not supported."""
        assert store.supports(policy) is False
        for call in (store.take, store.peek, store.reset):
            with pytest.raises(ConfigError):
                call(policy, "k")

    def test_supports_is_what_it_runs(self, store: Any) -> None:
        """A policy that isn't supported is a ConfigError everywhere and charges nobody; one that is runs."""
        kinds: list[tuple[type[Any], tuple[int, int]]] = list(
            product(
                (TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter),
                (
                    (1, 1_000),
                    (10, 60 * S),
                    (600, S),
                    (20_000, S),
                    (10**9, S),
                    (1, PERIOD_MAX_US),
                    (10**9, PERIOD_MAX_US),
                ),
            )
        )
        run = 0
        for kind, (limit, period_us) in kinds:
            policy = policy_of(kind, limit, period_us)
            assert policy is not None
            if store.supports(policy):
                try:
                    assert store.take(policy, "k", now_us=T0).remaining == policy.quota - 1, policy
                except ConfigError as error:
                    pytest.fail(f"supports({policy}) is true, and yet: {error}")
                run += 1
                continue
            assert store.supports(policy) is False
            for call in (store.take, store.peek, store.reset):
                with pytest.raises(ConfigError):
                    call(policy, "k")
            if hasattr(store, "take_all"):
                with pytest.raises(ConfigError):
                    store.take_all([(ONCE, "k", 1), (policy, "k", 1)], now_us=T0)
        assert run
        assert store.peek(ONCE, "k", now_us=T0).remaining == 1
