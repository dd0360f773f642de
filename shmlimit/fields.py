"""Decision -> HTTP fields: the only place that knows dialects. Pure, by hand, and without a clock.

    draft     RateLimit-Policy: "burst";q=100;w=60    q the quota, w its window in seconds
              RateLimit: "burst";r=50;t=30            r what is left, t the seconds in which no more than r can be used
    draft-7   RateLimit-Policy: 100;w=60
              RateLimit: limit=100, remaining=50, reset=30
    draft-6   RateLimit-Policy: 100;w=60
              RateLimit-Limit: 100, RateLimit-Remaining: 50, RateLimit-Reset: 30
    legacy    X-RateLimit-Limit: 100, X-RateLimit-Remaining: 50, X-RateLimit-Reset: 1750000030
    both      draft and legacy
    none      nothing but Retry-After

The draft is draft-ietf-httpapi-ratelimit-headers, 08 to 11 (structured fields, RFC 9651); -7 and -6 are its ancestors,
and the legacy names are nobody's standard. `reset` in those is the time until the whole quota is there again: in
seconds, and in the legacy one in Unix seconds, unless a guard asks for `reset="delta"`.

The draft's fields list all guards of a response. The others have room for one: a guard that refuses, the one with the
longest wait, or else the one with the smallest share left.

Whole seconds are rounded up, so nobody who believes them comes too early. Formatting by hand costs well under a
microsecond, a structured-field library ten; the tests read every field back with one.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeAlias

from shmlimit.errors import ConfigError
from shmlimit.policies.base import US_PER_S, Decision, Policy

NUMBER_MAX = 999_999_999_999_999
"""The largest integer of a structured field: 15 digits."""

RESETS = ("epoch", "delta")
"""What a guard's `reset` may be: Unix seconds, or seconds from now."""

PROBLEM = "application/problem+json"

_NAME = re.compile(r"[ -~]{1,64}")

Fields: TypeAlias = "list[tuple[str, str]]"
"""Names and values of HTTP fields, each name once."""

Answer: TypeAlias = "tuple[int, Fields, bytes]"
"""Status, fields and body of what is answered instead of the application."""


class Parts(NamedTuple):
    """What is the same in every response of a guard, prepared once: see `prepare`."""

    policy_item: str
    limit_head: str
    numbers: str
    policy_field: tuple[str, str]


class Limit(Protocol):
    """What a field has to know of a guard."""

    @property
    def name(self) -> str:
        """What clients know it by."""

    @property
    def headers(self) -> str:
        """The dialect: a name in `DIALECTS`."""

    @property
    def reset(self) -> str:
        """How the legacy dialect says when: one of `RESETS`."""

    @property
    def problem(self) -> bool:
        """Whether its refusals are `application/problem+json` (RFC 9457)."""

    @property
    def parts(self) -> Parts:
        """`prepare(name, policy)`."""


class Shown(NamedTuple):
    """A `Limit` for one response: a guard's, with the key's partition in its parts."""

    name: str
    headers: str
    reset: str
    problem: bool
    parts: Parts


Entries: TypeAlias = "Sequence[tuple[Limit, Decision]]"
"""The guards of a request, each with what its store decided, in the order in which the fields list them."""


def valid_policy_name(text: object) -> bool:
    """Whether `text` can name a guard: 1 to 64 printable ASCII characters (a blank is one)."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def prepare(name: str, policy: Policy, partition: str = "") -> Parts:
    """The fixed text of a guard's fields; raises `ConfigError` for a name that a field can't carry.

    `partition` is what `partition_key` gave.
    """
    head = _quoted(name) + (f";pk={partition}" if partition else "")
    numbers = f"{min(policy.quota, NUMBER_MAX)};w={min(_seconds(policy.window_us), NUMBER_MAX)}"
    item = f"{head};q={numbers}"
    return Parts(item, f"{head};r=", numbers, ("RateLimit-Policy", item))


def partition_key(key: bytes, secret: bytes) -> str:
    """The value of `pk`: tells the quotas of two keys apart, and tells nobody what the key is.

    A keyed hash (BLAKE2b, RFC 7693, 96 bits) as a structured-field byte sequence. `secret` is what all processes that
    answer for one limit have in common, 16 to 64 bytes.
    """
    return f":{base64.b64encode(blake2b(key, key=secret, digest_size=12, person=b'shmlimit pk').digest()).decode()}:"


def policy_field(*pairs: tuple[str, Policy]) -> str:
    """The value of `RateLimit-Policy` for pairs of (name, policy)."""
    return ", ".join([prepare(name, policy).policy_item for name, policy in pairs])


def ratelimit_field(*pairs: tuple[str, Decision]) -> str:
    """The value of `RateLimit` for pairs of (name, decision)."""
    return ", ".join([_limit_item(f"{_quoted(name)};r=", decision) for name, decision in pairs])


def legacy_fields(decision: Decision, now_us: int, reset: str = "epoch") -> Fields:
    """`X-RateLimit-Limit`, `-Remaining` and `-Reset`: in Unix seconds, `now_us` being the Unix time of the response, or
    with `reset="delta"` in seconds from then.
    """
    end_us = decision.reset_us + (now_us if reset == "epoch" else 0)
    return _three("X-RateLimit", decision, _seconds(end_us))


def retry_after(decision: Decision) -> int | None:
    """The value of `Retry-After` in seconds, at least 1; `None` when allowed, and where waiting never helps."""
    if decision.allowed or decision.retry_after_us is None:
        return None
    return _seconds(decision.retry_after_us) or 1


def response_fields(entries: Entries, now_us: int) -> Fields:
    """Every field of a response, `Retry-After` included.

    `now_us` is the Unix time of the response, for dialects that name a point in time.
    """
    if len(entries) == 1:  # PERF: nearly every response; the loop below takes twice as long.
        ((guard, decision),) = entries
        fields: Fields = []
        for write in DIALECTS[guard.headers]:
            fields += write(entries, now_us)
        if decision.allowed:
            return fields
    else:
        fields = []
        for write in _WRITERS:
            shown = [entry for entry in entries if write in DIALECTS[entry[0].headers]]
            if shown:
                fields += write(shown, now_us)
    wait = _longest_wait(entries)
    if wait is not None:
        fields.append(("Retry-After", str(wait)))
    return fields


def draft_fields(guard: Limit, decision: Decision) -> Fields:
    """The fields of the draft for one guard, without `Retry-After`; PERF: nearly every response is just these."""
    _, limit_head, _, policy_field = guard.parts
    allowed, _, remaining, _, _, next_us = decision
    if allowed and remaining <= NUMBER_MAX and next_us <= NUMBER_MAX:  # PERF: as `_limit_item`, a third less
        item = f"{limit_head}{remaining};t={-(-next_us // US_PER_S)}"
    else:
        item = _limit_item(limit_head, decision)
    return [policy_field, ("RateLimit", item)]


def too_many(entries: Entries, now_us: int) -> Answer:
    """The refusal (429), for entries of which at least one refuses."""
    fields = response_fields(entries, now_us)
    wait = _longest_wait(entries)
    if wait is None:
        advice = "This request asks for more than its limit ever allows."
    else:
        advice = f"Try again in {wait} second{'' if wait == 1 else 's'}."
    refusing = [guard for guard, decision in entries if not decision.allowed]
    members = {"violated-policies": [guard.name for guard in refusing]} if _any_problem(refusing) else None
    return _answer(429, advice, fields, members)


def unavailable(limits: Iterable[Limit], wait: int = 1) -> Answer:
    """The answer (503) where the store of these limits can't decide; to be tried again in `wait` seconds."""
    fields = [("Retry-After", str(wait))]
    return _answer(503, "The rate limiter can't answer.", fields, {} if _any_problem(limits) else None)


def denied(limits: Iterable[Limit], *, listed: bool = False) -> Answer:
    """The answer (403) to a request whose key is `keys.DENY`, or is in a list of denied ones."""
    advice = "You may not send requests here." if listed else "This request says too little about who sends it."
    return _answer(403, advice, [], {} if _any_problem(limits) else None)


def check_dialects(guards: Iterable[Limit]) -> None:
    """Raise `ConfigError` for guards whose fields can't stand in one response.

    There is one `RateLimit-Policy` in a response, so it has one generation of the draft; and a client can't know which
    `X-RateLimit-Reset` it sees.
    """
    first: Limit | None = None
    legacy: Limit | None = None
    for guard in guards:
        writers = DIALECTS[guard.headers]
        if _legacy in writers:
            legacy = legacy or guard
            if legacy.reset != guard.reset:
                raise ConfigError(
                    f"guards {legacy.name!r} and {guard.name!r} differ in reset ({legacy.reset!r}, {guard.reset!r}), "
                    "and a response has one X-RateLimit-Reset: give them the same"
                )
        if writers and writers[0] is not _legacy:
            first = first or guard
            if DIALECTS[first.headers][0] is not writers[0]:
                raise ConfigError(
                    f"guards {first.name!r} and {guard.name!r} write different generations of RateLimit-Policy "
                    f"({first.headers!r}, {guard.headers!r}), and a response can carry only one: give them the same "
                    "headers"
                )


_KINDS = {
    403: ("about:blank", "Forbidden"),
    429: ("https://iana.org/assignments/http-problem-types#quota-exceeded", "Too many requests"),
    503: ("https://iana.org/assignments/http-problem-types#temporary-reduced-capacity", "Service unavailable"),
}
"""What is answered instead of the application: the type of the problem, and its title."""


def _answer(status: int, detail: str, fields: Fields, members: Mapping[str, object] | None) -> Answer:
    """A short text, or where there are `members` a problem (RFC 9457) with them."""
    kind, title = _KINDS[status]
    if members is None:
        media_type = "text/plain; charset=utf-8"
        body = f"{title}. {detail}\n" if status == 429 else f"{detail}\n"
    else:
        media_type = PROBLEM
        body = json.dumps({"type": kind, "title": title, "status": status, "detail": detail, **members})
    return status, [*fields, ("Cache-Control", "no-store"), ("Content-Type", media_type)], body.encode()


def _any_problem(limits: Iterable[Limit]) -> bool:
    return any(limit.problem for limit in limits)


def _quoted(name: str) -> str:
    """A structured-field string (RFC 9651, section 4.1.6)."""
    if not valid_policy_name(name):
        raise ConfigError(f"a guard's name must be 1 to 64 printable ASCII characters, not {name!r}")
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _seconds(us: int) -> int:
    return -(-us // US_PER_S)


def _limit_item(head: str, decision: Decision) -> str:
    """One item of `RateLimit`: `t` is what `Retry-After` says where it refuses, so that the two agree."""
    wait = None if decision.allowed else retry_after(decision)
    if wait is None:
        wait = _seconds(decision.next_us)
    return f"{head}{min(decision.remaining, NUMBER_MAX)};t={min(wait, NUMBER_MAX)}"


def _longest_wait(entries: Entries) -> int | None:
    """The longest wait of those that refuse; `None` if nobody does, or if one of them can never succeed."""
    longest = None
    for _, decision in entries:
        if not decision.allowed:
            wait = retry_after(decision)
            if wait is None:
                return None
            if longest is None or wait > longest:
                longest = wait
    return longest


# ---- the dialects ----------------------------------------------------------------------------------------------------


def _draft(entries: Entries, _now_us: int) -> Fields:
    if len(entries) == 1:
        return draft_fields(*entries[0])
    policies = limits = ""
    for guard, decision in entries:
        policy_item, limit_head, _, _ = guard.parts
        policies += f", {policy_item}" if policies else policy_item
        item = _limit_item(limit_head, decision)
        limits += f", {item}" if limits else item
    return [("RateLimit-Policy", policies), ("RateLimit", limits)]


def _draft_7(entries: Entries, _now_us: int) -> Fields:
    guard, decision = _one(entries)
    limit, remaining, reset = _numbers(decision, _seconds(decision.reset_us))
    value = f"limit={limit}, remaining={remaining}, reset={reset}"
    return [("RateLimit-Policy", guard.parts.numbers), ("RateLimit", value)]


def _draft_6(entries: Entries, _now_us: int) -> Fields:
    guard, decision = _one(entries)
    fields = _three("RateLimit", decision, _seconds(decision.reset_us))
    return [("RateLimit-Policy", guard.parts.numbers), *fields]


def _legacy(entries: Entries, now_us: int) -> Fields:
    guard, decision = _one(entries)
    return legacy_fields(decision, now_us, guard.reset)


def _one(entries: Entries) -> tuple[Limit, Decision]:
    """Which one is shown, of equals the first."""
    refusing = [entry for entry in entries if not entry[1].allowed]
    if refusing:
        # One that can never succeed is the longest wait of all.
        return max(refusing, key=lambda entry: (entry[1].retry_after_us is None, entry[1].retry_after_us or 0))
    least = entries[0]
    for entry in entries[1:]:
        if entry[1].remaining * least[1].limit < least[1].remaining * entry[1].limit:
            least = entry
    return least


def _three(family: str, decision: Decision, reset: int) -> Fields:
    numbers = _numbers(decision, reset)
    return [(f"{family}-{name}", number) for name, number in zip(("Limit", "Remaining", "Reset"), numbers, strict=True)]


def _numbers(decision: Decision, reset: int) -> list[str]:
    return [str(min(number, NUMBER_MAX)) for number in (decision.limit, decision.remaining, reset)]


Writer: TypeAlias = Callable[[Entries, int], Fields]

_WRITERS: tuple[Writer, ...] = (_draft, _draft_7, _draft_6, _legacy)

DIALECTS: Mapping[str, tuple[Writer, ...]] = {
    "draft": (_draft,),
    "draft-7": (_draft_7,),
    "draft-6": (_draft_6,),
    "legacy": (_legacy,),
    "both": (_draft, _legacy),
    "none": (),
}
"""What a guard's `headers` may be, and who writes its fields."""
