"""Decision -> HTTP fields: the only place that knows dialects. Pure, by hand, and without a clock.

The dialect `"draft"` is that of draft-ietf-httpapi-ratelimit-headers, 08 to 11 (structured fields, RFC 9651):

    RateLimit-Policy: "burst";q=100;w=60      q the quota, w its window in seconds
    RateLimit: "burst";r=50;t=30              r what is left, t the seconds in which no more than r can be used

Whole seconds are rounded up, so nobody who believes them comes too early. Formatting by hand costs well under a
microsecond, a structured-field library ten; the tests read every field back with one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from shmlimit.errors import ConfigError
from shmlimit.policies.base import US_PER_S, Decision, Policy

NUMBER_MAX = 999_999_999_999_999
"""The largest integer of a structured field: 15 digits."""

_NAME = re.compile(r"[ -~]{1,64}")

Fields: TypeAlias = "list[tuple[str, str]]"
"""Names and values of HTTP fields, each name once."""


class Parts(NamedTuple):
    """What is the same in every response of a guard, prepared once: see `prepare`."""

    policy_item: str
    limit_head: str


class Limit(Protocol):
    """What a field has to know of a guard."""

    @property
    def headers(self) -> str:
        """The dialect: a name in `DIALECTS`."""

    @property
    def parts(self) -> Parts:
        """`prepare(name, policy)`."""


Entries: TypeAlias = "Sequence[tuple[Limit, Decision]]"
"""The guards of a request, each with what its store decided, in the order in which the fields list them."""


def valid_policy_name(text: object) -> bool:
    """Whether `text` can name a guard: 1 to 64 printable ASCII characters (a blank is one)."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def prepare(name: str, policy: Policy) -> Parts:
    """The fixed text of a guard's fields; raises `ConfigError` for a name that a field can't carry."""
    quoted = _quoted(name)
    window = min(_seconds(policy.window_us), NUMBER_MAX)
    return Parts(f"{quoted};q={min(policy.quota, NUMBER_MAX)};w={window}", f"{quoted};r=")


def policy_field(*pairs: tuple[str, Policy]) -> str:
    """The value of `RateLimit-Policy` for pairs of (name, policy)."""
    return ", ".join([prepare(name, policy).policy_item for name, policy in pairs])


def ratelimit_field(*pairs: tuple[str, Decision]) -> str:
    """The value of `RateLimit` for pairs of (name, decision)."""
    return ", ".join([_limit_item(f"{_quoted(name)};r=", decision) for name, decision in pairs])


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
        fields = DIALECTS[guard.headers](entries, now_us)
        if decision.allowed:
            return fields
    else:
        fields = []
        for dialect, write in DIALECTS.items():
            shown = [entry for entry in entries if entry[0].headers == dialect]
            if shown:
                fields += write(shown, now_us)
    wait = _longest_wait(entries)
    if wait is not None:
        fields.append(("Retry-After", str(wait)))
    return fields


def too_many(entries: Entries, now_us: int) -> tuple[int, Fields, bytes]:
    """Status, fields and body of the refusal, for entries of which at least one refuses."""
    fields = response_fields(entries, now_us)
    wait = _longest_wait(entries)
    if wait is None:
        advice = "This request asks for more than its limit ever allows."
    else:
        advice = f"Try again in {wait} second{'' if wait == 1 else 's'}."
    return 429, [*fields, *PLAIN_ANSWER], f"Too many requests. {advice}\n".encode()


PLAIN_ANSWER: tuple[tuple[str, str], ...] = (
    ("Cache-Control", "no-store"),
    ("Content-Type", "text/plain; charset=utf-8"),
)
"""The fields of every answer that is given instead of the application's."""


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
        wait = -(-decision.next_us // US_PER_S)
    remaining = decision.remaining
    if wait > NUMBER_MAX or remaining > NUMBER_MAX:  # PERF: hardly ever, and two calls of min() are a tenth of all this
        wait, remaining = min(wait, NUMBER_MAX), min(remaining, NUMBER_MAX)
    return f"{head}{remaining};t={wait}"


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


def _draft(entries: Entries, _now_us: int) -> Fields:
    policies = limits = ""
    for guard, decision in entries:
        policy_item, limit_head = guard.parts
        policies += f", {policy_item}" if policies else policy_item
        item = _limit_item(limit_head, decision)
        limits += f", {item}" if limits else item
    return [("RateLimit-Policy", policies), ("RateLimit", limits)]


def _none(_entries: Entries, _now_us: int) -> Fields:
    return []


DIALECTS: Mapping[str, Callable[[Entries, int], Fields]] = {"draft": _draft, "none": _none}
"""What a guard's `headers` may be, and who writes it."""
