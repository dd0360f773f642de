"""Stores that are each broken in one way: what they decide, and what they write."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from shmlimit import Decision, FixedWindow, Policy, State, StoreError
from shmlimit.policies.base import check_cost
from shmlimit.policies.requests import Joint, Request, key_bytes
from shmlimit.stores.base import wall_clock
from tests.testing.sound import Sound, found_by

# ---- decisions -------------------------------------------------------------------------------------------------------


class Told(Sound):
    """Says something else than it decided."""

    def told(self, decision: Decision, lead_us: int) -> Decision:
        return self.bent(super().told(decision, lead_us))

    def bent(self, decision: Decision) -> Decision:
        raise NotImplementedError


@found_by("test_denied_until_exactly_the_promised_instant")
class RemainingIsOneMore(Told):
    def bent(self, decision: Decision) -> Decision:
        return decision._replace(remaining=min(decision.limit, decision.remaining + 1))


@found_by("test_denied_until_exactly_the_promised_instant")
class ResetIsLateByOne(Told):
    def bent(self, decision: Decision) -> Decision:
        return decision._replace(reset_us=decision.reset_us and decision.reset_us + 1)


@found_by("test_denied_until_exactly_the_promised_instant")
class RetryIsZero(Told):
    def bent(self, decision: Decision) -> Decision:
        return decision._replace(retry_after_us=decision.retry_after_us and 0)


@found_by("test_denied_until_exactly_the_promised_instant")
class NextIsReset(Told):
    def bent(self, decision: Decision) -> Decision:
        return decision._replace(next_us=decision.reset_us)


@found_by("test_cost_above_the_quota_never_succeeds")
class NeverIsALongTime(Told):
    def bent(self, decision: Decision) -> Decision:
        never = not decision.allowed and decision.retry_after_us is None
        return decision._replace(retry_after_us=2**62) if never else decision


@found_by("test_every_decision_is_the_pure_one")
class TimesAreFloats(Told):
    def bent(self, decision: Decision) -> Decision:
        return decision._replace(reset_us=float(decision.reset_us))  # type: ignore[arg-type]


@found_by("test_every_decision_is_the_pure_one")
class AllowedIsANumber(Told):
    def bent(self, decision: Decision) -> Decision:
        return decision._replace(allowed=int(decision.allowed))


@found_by("test_denied_until_exactly_the_promised_instant")
class AnswersArePlainTuples(Told):
    def bent(self, decision: Decision) -> Any:
        return tuple(decision)


@found_by("test_every_decision_is_the_pure_one")
class EveryoneIsLetIn(Told):
    def bent(self, decision: Decision) -> Decision:
        return decision._replace(allowed=True)


@found_by("test_denied_until_exactly_the_promised_instant")
class CostIsForgotten(Sound):
    def cost(self, cost: int) -> int:
        return min(1, check_cost(cost))


@found_by("test_cost_above_the_quota_never_succeeds")
class CostHas32Bits(Sound):
    def cost(self, cost: int) -> int:
        return check_cost(cost) % 2**32


@found_by("test_cost_above_the_quota_never_succeeds")
class CostIsCapped(Sound):
    def joined(self, requests: Iterable[Request]) -> Joint:
        joint = super().joined(requests)
        return joint._replace(requests=[(policy, key, min(cost, policy.quota)) for policy, key, cost in joint.requests])


@found_by("test_denied_until_exactly_the_promised_instant")
class TimeInMilliseconds(Sound):
    def time(self, now_us: int | None) -> int:
        return super().time(now_us) // 1000 * 1000


@found_by("test_denied_until_exactly_the_promised_instant")
class TimeHas53Bits(Sound):
    def time(self, now_us: int | None) -> int:
        return int(float(super().time(now_us)))


@found_by("test_denied_until_exactly_the_promised_instant")
class MillisecondsHave32Bits(Sound):
    def time(self, now_us: int | None) -> int:
        return super().time(now_us) % (2**32 * 1000)


@found_by("test_every_decision_is_the_pure_one")
class GivenTimeIsIgnored(Sound):
    def time(self, now_us: int | None) -> int:
        super().time(now_us)
        return wall_clock()


@found_by("test_own_clock")
class OwnClockIsAnHourSlow(Sound):
    def time(self, now_us: int | None) -> int:
        return super().time(now_us) - (3600 * 10**6 if now_us is None else 0)


@found_by("test_own_clock")
class OwnClockCountsFromTheStart(Sound):
    def time(self, now_us: int | None) -> int:
        return time.monotonic_ns() // 1000 if now_us is None else super().time(now_us)


@found_by("test_own_clock")
class OwnClockStands(Sound):
    def time(self, now_us: int | None) -> int:
        return super().time(1_767_225_600_000_000 if now_us is None else now_us)


@found_by("test_a_clock_that_goes_back_grants_nothing")
class EarlierTimesFindNothing(Sound):
    latest_us = 0

    def load(self, policy: Policy, key: bytes, asked_us: int) -> tuple[State | None, int]:
        back, self.latest_us = asked_us < self.latest_us, max(asked_us, self.latest_us)
        return (None, asked_us) if back else super().load(policy, key, asked_us)


@found_by("test_what_was_forgotten_is_not_judged_earlier")
class NoWatermark(Sound):
    def forget(self, now_us: int) -> None:
        super().forget(now_us)
        self.watermark_us = 0


@found_by("test_what_was_forgotten_is_not_judged_earlier")
class WaitsCountFromTheWatermark(Sound):
    def told(self, decision: Decision, lead_us: int) -> Decision:  # noqa: ARG002
        return decision


@found_by("test_forgetting_is_not_seen")
class ForgetsTheLatest(Sound):
    """Room for two keys."""

    def forget(self, now_us: int) -> None:
        super().forget(now_us)
        if len(self.states) > 2:
            self.states.popitem()


@found_by("test_windows_of_two_keys_are_apart")
class WindowsEndTogether(Sound):
    def forget(self, now_us: int) -> None:
        before = len(self.states)
        super().forget(now_us)
        if len(self.states) < before:
            self.states = {key: one for key, one in self.states.items() if not isinstance(one[0], FixedWindow)}


# ---- what is written -------------------------------------------------------------------------------------------------


@found_by("test_peek_writes_nothing")
class PeekTakes(Sound):
    def peek(self, policy: Policy, key: Any, cost: int = 0, *, now_us: int | None = None) -> Decision:
        return self.take(policy, key, cost, now_us=now_us)


@found_by("test_peek_writes_nothing")
class PeekMakesAState(Sound):
    def peek(self, policy: Policy, key: Any, cost: int = 0, *, now_us: int | None = None) -> Decision:
        self.states.setdefault((policy, key_bytes(key)), (policy, policy.fresh(0)))
        return super().peek(policy, key, cost, now_us=now_us)


@found_by("test_peek_writes_nothing")
class PeekForgets(Sound):
    def peek(self, policy: Policy, key: Any, cost: int = 0, *, now_us: int | None = None) -> Decision:
        self.forget(self.time(now_us))
        return super().peek(policy, key, cost, now_us=now_us)


class After(Sound):
    """Does something more after a `take`."""

    def take(self, policy: Policy, key: Any, cost: int = 1, *, now_us: int | None = None) -> Decision:
        decision = super().take(policy, key, cost, now_us=now_us)
        self.after(policy, key_bytes(key), decision, cost)
        return decision

    def after(self, policy: Policy, key: bytes, decision: Decision, cost: int) -> None:
        raise NotImplementedError


@found_by("test_every_decision_is_the_pure_one")
class DenialPutsOff(After):
    """Who knocks waits anew, as some limiters have it."""

    def after(self, policy: Policy, key: bytes, decision: Decision, cost: int) -> None:  # noqa: ARG002
        if not decision.allowed and (policy, key) in self.states:
            self.save(policy, key, policy.shift(self.states[policy, key][1], policy.period_us))


@found_by("test_denial_and_cost_0_store_nothing")
class DenialWritesWhatWasThere(After):
    def after(self, policy: Policy, key: bytes, decision: Decision, cost: int) -> None:  # noqa: ARG002
        if not decision.allowed and (policy, key) in self.states:
            self.save(policy, key, self.states[policy, key][1])


@found_by("test_denial_and_cost_0_store_nothing")
class ReportsMakeAState(After):
    def after(self, policy: Policy, key: bytes, decision: Decision, cost: int) -> None:  # noqa: ARG002
        if cost == 0 and (policy, key) not in self.states:
            self.save(policy, key, policy.fresh(0))


@found_by("test_nothing_is_left_after_the_expiry")
class ExpiresAtTheNextMillisecond(Sound):
    def load(self, policy: Policy, key: bytes, asked_us: int) -> tuple[State | None, int]:
        state, at_us = super().load(policy, key, asked_us)
        ends_us = 0 if state is None else policy.expires_at(state)
        return (state, ends_us - 1) if ends_us <= at_us < ends_us + 1000 else (state, at_us)


@found_by("test_nothing_is_left_after_the_expiry")
class ExpiresOneEarly(Sound):
    def load(self, policy: Policy, key: bytes, asked_us: int) -> tuple[State | None, int]:
        state, at_us = super().load(policy, key, asked_us)
        return (None if state is not None and policy.expires_at(state) <= at_us + 1 else state), at_us


@found_by("test_reset_gives_the_quota_back")
class ResetForgetsAllPoliciesOfAKey(Sound):
    def reset(self, policy: Policy, key: Any) -> bool:
        there = super().reset(policy, key)
        for identity in [one for one in self.states if one[1] == key_bytes(key)]:  # type: ignore[index]
            del self.states[identity]
        return there


@found_by("test_reset_gives_the_quota_back")
class ResetForgetsAllKeys(Sound):
    def reset(self, policy: Policy, key: Any) -> bool:
        there = super().reset(policy, key)
        self.states.clear()
        return there


@found_by("test_reset_gives_the_quota_back")
class ResetIsAlwaysTrue(Sound):
    def reset(self, policy: Policy, key: Any) -> bool:
        super().reset(policy, key)
        return True


@found_by("test_reset_gives_the_quota_back")
class ResetOnlySaysSo(Sound):
    def reset(self, policy: Policy, key: Any) -> bool:
        before = dict(self.states)
        there = super().reset(policy, key)
        self.states = before
        return there


@found_by("test_reset_of_an_expired_state_is_none")
class ResetFindsExpiredStates(Sound):
    def reset(self, policy: Policy, key: Any) -> bool:
        there = (policy, key_bytes(key)) in self.states if isinstance(key, str) else False
        return super().reset(policy, key) or there


@found_by("test_closed_store_says_so")
class ClosedAnswers(Sound):
    def close(self) -> None:
        """Goes on."""


@found_by("test_closed_store_says_so")
class ClosesOnce(Sound):
    def close(self) -> None:
        if self.closed:
            raise StoreError("closed already")
        super().close()


@found_by("test_with_closes")
class WithDoesNotClose(Sound):
    def __exit__(self, *_error: object) -> None:
        """Goes on."""
