"""Stores that are each broken in one way: keys and policies, all or nothing, many at once."""

from __future__ import annotations

import asyncio
import threading
import time
import unicodedata
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NoReturn

from shmlimit import ConfigError, Decision, Policy, SlidingLog, State, StoreError, parse
from shmlimit.policies.base import check_cost
from shmlimit.policies.requests import Joint, Request, key_bytes
from tests.testing.sound import Sound, found_by

# ---- keys and policies -----------------------------------------------------------------------------------------------


class Keyed(Sound):
    """Makes another key of a key."""

    def bytes(self, key: Any) -> bytes:
        return self.bent(key_bytes(key))

    def bent(self, key: bytes) -> bytes:
        raise NotImplementedError


@found_by("test_keys_of_any_bytes_are_told_apart")
class LetterCaseIsIgnored(Keyed):
    def bent(self, key: bytes) -> bytes:
        return key.lower()


@found_by("test_keys_of_any_bytes_are_told_apart")
class KeysEndAtNul(Keyed):
    def bent(self, key: bytes) -> bytes:
        return key.split(b"\0")[0]


@found_by("test_keys_of_any_bytes_are_told_apart")
class BlanksAreStripped(Keyed):
    def bent(self, key: bytes) -> bytes:
        return key.strip()


@found_by("test_keys_of_any_bytes_are_told_apart")
class KeysHave250Bytes(Keyed):
    def bent(self, key: bytes) -> bytes:
        return key[:250]


@found_by("test_keys_of_any_bytes_are_told_apart")
class KeysAreUnicode(Keyed):
    def bent(self, key: bytes) -> bytes:
        return key.decode("utf-8", "replace").encode()


@found_by("test_keys_of_any_bytes_are_told_apart")
class KeysAreNormalised(Keyed):
    def bent(self, key: bytes) -> bytes:
        return unicodedata.normalize("NFC", key.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


@found_by("test_keys_of_any_bytes_are_told_apart")
class NumbersAreKeys(Keyed):
    """As SQLite's columns of type NUMERIC have it."""

    def bent(self, key: bytes) -> bytes:
        try:
            return b"%g" % float(key)
        except ValueError:
            return key


@found_by("test_different_bytes_are_different_keys")
class KeysAreHashedToAByte(Keyed):
    def bent(self, key: bytes) -> bytes:
        return bytes([sum(key) % 256])


@found_by("test_text_and_bytes_are_one_key")
class TextIsAnotherKey(Sound):
    def bytes(self, key: Any) -> bytes:
        return b"text " + key_bytes(key) if isinstance(key, str) else key_bytes(key)


@found_by("test_equal_policies_share_and_others_do_not")
class PoliciesAreObjects(Sound):
    def identity(self, policy: Policy, key: bytes) -> Hashable:
        return id(policy), key


@found_by("test_equal_policies_share_and_others_do_not")
class BurstIsNoPartOfIt(Sound):
    def identity(self, policy: Policy, key: bytes) -> Hashable:
        return policy.kind, policy.limit, policy.period_us, key


@found_by("test_reset_gives_the_quota_back")
class PeriodIsNoPartOfIt(Sound):
    def identity(self, policy: Policy, key: bytes) -> Hashable:
        return policy.kind, policy.limit, getattr(policy, "burst", None), key


@found_by("test_equal_policies_share_and_others_do_not")
class KindIsNoPartOfIt(Sound):
    def identity(self, policy: Policy, key: bytes) -> Hashable:
        return policy.limit, policy.period_us, getattr(policy, "burst", policy.limit), key


@found_by("test_raised_and_lowered_limits")
class LimitIsNoPartOfIt(Sound):
    def identity(self, policy: Policy, key: bytes) -> Hashable:
        return policy.kind, policy.period_us, key


@found_by("test_policy_and_key_do_not_run_into_each_other")
class SideBySide(Sound):
    def identity(self, policy: Policy, key: bytes) -> Hashable:
        return f"{policy.kind}:{policy.limit}:{policy.period_us // 10**6}:{getattr(policy, 'burst', '')}".encode() + key


@found_by("test_bad_cost_is_refused")
class TrueIsACost(Sound):
    def cost(self, cost: int) -> int:
        return check_cost(int(cost) if isinstance(cost, bool) else cost)


@found_by("test_bad_cost_is_refused")
class WholeFloatsAreCosts(Sound):
    def cost(self, cost: int) -> int:
        return check_cost(int(cost) if isinstance(cost, float) and cost.is_integer() else cost)


@found_by("test_bad_cost_is_refused")
class NegativeCostsAreNone(Sound):
    def cost(self, cost: int) -> int:
        return check_cost(max(0, cost) if type(cost) is int else cost)


@found_by("test_bad_time_is_refused")
class AnyTime(Sound):
    def time(self, now_us: int | None) -> int:
        return super().time(None if now_us is None else max(0, min(10**18, int(now_us))))


@found_by("test_bad_key_is_refused")
class AnythingIsAKey(Sound):
    def bytes(self, key: Any) -> bytes:
        return key_bytes(key if isinstance(key, str | bytes) else str(key))


@found_by("test_no_policy_is_refused")
class NotationIsAPolicy(Sound):
    def joined(self, requests: Iterable[Request]) -> Joint:
        return super().joined(
            [(parse(policy) if isinstance(policy, str) else policy, key, cost) for policy, key, cost in requests]
        )


@found_by("test_supports_is_what_it_runs")
class PromisesTooMuch(Sound):
    def joined(self, requests: Iterable[Request]) -> Joint:
        joint = super().joined(requests)
        if any(isinstance(policy, SlidingLog) for policy, _, _ in joint.requests):
            raise ConfigError("no logs here")
        return joint


@found_by("test_supports_is_what_it_runs")
class RunsWhatItDoesNotSupport(Sound):
    def supports(self, policy: Policy) -> bool:
        return super().supports(policy) and not isinstance(policy, SlidingLog)


# ---- all or nothing --------------------------------------------------------------------------------------------------


class OneByOne(Sound):
    """Makes of `take_all` what it likes."""

    def take(self, policy: Policy, key: Any, cost: int = 1, *, now_us: int | None = None) -> Decision:
        return super().take_all([(policy, key, cost)], now_us=now_us)[0]


@found_by("test_all_or_nothing")
class ChargesAllThatAllow(OneByOne):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        return [self.take(*request, now_us=now_us) for request in requests]


@found_by("test_a_refusal_charges_nobody")
class ChargesUpToTheRefusal(OneByOne):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        decisions: list[Decision] = []
        for request in requests:
            ask = self.take if all(decisions) else self.peek
            decisions.append(ask(*request, now_us=now_us))
        return decisions


@found_by("test_a_refusal_charges_nobody")
class StopsAtTheRefusal(Sound):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        decisions = super().take_all(requests, now_us=now_us)
        denied = [number for number, one in enumerate(decisions) if not one.allowed]
        return decisions[: denied[0] + 1] if denied else decisions


@found_by("test_all_or_nothing")
class OthersReportACharge(OneByOne):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        requests = list(requests)
        if all(peeked := [self.peek(*request, now_us=now_us) for request in requests]):
            return super().take_all(requests, now_us=now_us)
        return peeked


@found_by("test_refused_hits_do_not_use_up_the_larger_limit")
class GivesBackTooMuch(OneByOne):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        requests = list(requests)
        before = {self.identity(policy, key_bytes(key)) for policy, key, _ in requests}
        decisions = super().take_all(requests, now_us=now_us)
        if not all(decisions):
            self.states = {identity: one for identity, one in self.states.items() if identity not in before}
        return decisions


@found_by("test_every_joint_decision_is_the_pure_one")
class ChargesThreeAtMost(Sound):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        requests = list(requests)
        fourth = [(policy, key, 0) for policy, key, _ in requests[3:]]
        return super().take_all([*requests[:3], *fourth], now_us=now_us)


@found_by("test_same_key_twice_gets_the_joint_answer")
class EachIsJudgedAlone(OneByOne):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        requests = list(requests)
        alone = [self.peek(*request, now_us=now_us) for request in requests]
        return (
            super().take_all(requests, now_us=now_us)
            if not all(alone)
            else [self.take(*request, now_us=now_us) for request in requests]
        )


@found_by("test_mistake_in_one_charges_none")
class MistakesAreFoundLate(OneByOne):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        requests = list(requests)
        if all(type(cost) is int and isinstance(key, str | bytes) for _, key, cost in requests[1:]):
            return super().take_all(requests, now_us=now_us)
        return [self.take(*request, now_us=now_us) for request in requests]


@found_by("test_many_in_one_step")
class AnswersComeInAnotherOrder(Sound):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        return super().take_all(sorted(requests, key=lambda request: key_bytes(request[1])), now_us=now_us)


@found_by("test_take_all_of_one_is_take")
class GoesThroughItTwice(Sound):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        number = len([*requests])
        return super().take_all(requests, now_us=now_us) if number else []


@found_by("test_the_own_clock_is_read_for_all")
class JointChargesAreOfTheEpoch(OneByOne):
    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        return super().take_all(requests, now_us=now_us or 0)


# ---- many at once ----------------------------------------------------------------------------------------------------


class NoLock:
    """Lets everyone in."""

    def __enter__(self) -> None:
        """At once."""

    def __exit__(self, *_error: object) -> None:
        """At once."""


@found_by("test_threads_get_exactly_the_limit")
class ReadsThenWrites(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.lock = NoLock()

    def load(self, policy: Policy, key: bytes, asked_us: int) -> tuple[State | None, int]:
        found = super().load(policy, key, asked_us)
        time.sleep(0)  # whoever likes may go on now
        return found


@found_by("test_new_keys_of_many_threads")
class NewKeysRace(Sound):
    """Only what is there already has a lock."""

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        requests = list(requests)
        new = [request for request in requests if (request[0], key_bytes(request[1])) not in self.states]
        if len(requests) != 1 or not new:
            return super().take_all(requests, now_us=now_us)
        policy, key, cost = requests[0]
        decision, state = policy.decide(None, self.time(now_us), cost)
        time.sleep(0.001)
        with self.lock:
            self.save(policy, key_bytes(key), state)
        return [decision]


@found_by("test_threads_get_exactly_the_limit")
class EachThreadCountsForItself(Sound):
    def identity(self, policy: Policy, key: bytes) -> Hashable:
        return policy, key, threading.get_ident()


@found_by("test_coroutines_answer_alike")
class CoroutinesHaveNoTime(Sound):
    async def atake(self, policy: Policy, key: Any, cost: int = 1, *, now_us: int | None = None) -> Decision:  # noqa: ARG002
        return self.take(policy, key, cost)


@found_by("test_coroutines_answer_alike")
class CoroutinesCountApart(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.other = Sound()

    async def atake(self, policy: Policy, key: Any, cost: int = 1, *, now_us: int | None = None) -> Decision:
        return self.other.take(policy, key, cost, now_us=now_us)

    async def apeek(self, policy: Policy, key: Any, cost: int = 0, *, now_us: int | None = None) -> Decision:
        return self.other.peek(policy, key, cost, now_us=now_us)

    async def atake_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        return self.other.take_all(requests, now_us=now_us)


@found_by("test_coroutines_get_exactly_the_limit")
class CoroutinesLoseCounts(Sound):
    async def atake(self, policy: Policy, key: Any, cost: int = 1, *, now_us: int | None = None) -> Decision:
        state, at_us = self.load(policy, key_bytes(key), self.time(now_us))
        await asyncio.sleep(0)
        decision, after = policy.decide(state, at_us, cost)
        self.save(policy, key_bytes(key), after)
        return decision


@found_by("test_coroutines_fail_alike")
class CoroutinesLetInWhatFails(Sound):
    async def atake(self, policy: Policy, key: Any, cost: int = 1, *, now_us: int | None = None) -> Decision:
        try:
            return self.take(policy, key, cost, now_us=now_us)
        except StoreError:
            return Decision(True, policy.quota, policy.quota, 0, 0, 0)


@found_by("test_coroutines_reset")
class CoroutinesDoNotReset(Sound):
    async def areset(self, policy: Policy, key: Any) -> bool:  # noqa: ARG002
        return False


@found_by("test_processes_get_exactly_the_limit")
class EachProcessCountsForItself(Sound):
    @property
    def open(self) -> Callable[[], Sound]:
        return partial(Sound)


@found_by("test_closing_leaves_the_states")
class EachObjectCountsForItself(Sound):
    @property
    def open(self) -> Callable[[], Sound]:
        return partial(Sound)


@found_by("test_closing_leaves_the_states")
class TheFirstTakesAllWithIt(Sound):
    """A second one that looks into the first, until that is closed."""

    def open(self) -> Sound:
        other = Sound()
        other.states, other.lock = self.states, self.lock
        return other

    def close(self) -> None:
        super().close()
        self.states.clear()


@found_by("test_processes_get_exactly_the_limit")
class CannotBeOpened(Sound):
    @property
    def open(self) -> Callable[[], NoReturn]:
        return not_there


def not_there() -> NoReturn:
    raise StoreError("not there")
