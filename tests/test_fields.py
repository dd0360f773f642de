"""The fields of a response: the vectors, and every emitted field read back with a structured-field library."""

import json
from pathlib import Path
from typing import Any

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlimit import fields
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard
from shmlimit.policies.base import Decision

VECTORS = Path(__file__).parent / "vectors" / "fields.jsonl"
NOW_US = 1_750_000_000_250_000
LATER = ("draft-7", "draft-6", "legacy", "both")
"""Dialects whose rows wait for the version that has them."""


def used_rows() -> list[dict[str, Any]]:
    """The rows with bucket policies and the dialects that there are, or with one that there never will be."""
    rows = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    return [
        row
        for row in rows
        if not any(guard["policy"].startswith(("fixed", "sliding")) for guard in row["guards"])
        and not any(guard["options"].get("headers") in LATER for guard in row["guards"])
    ]


def of_the_limiter(emitted: list[tuple[str, str]]) -> dict[str, str]:
    """The fields that a row speaks about; each at most once."""
    kept = [(name, value) for name, value in emitted if name.startswith(("RateLimit", "X-RateLimit", "Retry-After"))]
    assert len(dict(kept)) == len(kept)
    return dict(kept)


def read(value: str) -> Any:
    """The value as a structured-field list of strings with parameters."""
    return http_sf.parse(value.encode(), tltype="list")


def test_number_of_rows() -> None:
    """33 of the 44 rows are about this version; one of them, two guards of one name, is about the middleware."""
    assert len(used_rows()) == 33
    assert [
        row["id"] for row in used_rows() if len({g["name"].lower() for g in row["guards"]}) < len(row["guards"])
    ] == ["F029"]


@pytest.mark.parametrize("row", [row for row in used_rows() if row["id"] != "F029"], ids=lambda row: row["id"])
def test_vectors(row: dict[str, Any]) -> None:
    """A guard can't be made, or its fields for the row's decisions are exactly the row's."""
    if row["want"] == "CONFIG-ERROR":
        with pytest.raises(ConfigError):
            [Guard(g["name"], g["policy"], **g["options"]) for g in row["guards"]]
        return
    guards = [Guard(g["name"], g["policy"], **g["options"]) for g in row["guards"]]
    entries = list(zip(guards, [Decision(**decision) for decision in row["decisions"]], strict=True))
    if row["status"] == 429:
        status, emitted, _ = fields.too_many(entries, row["now_us"])
        assert status == 429
    else:
        emitted = fields.response_fields(entries, row["now_us"])
    want = {name: value for name, value in row["want"].items() if [name, value] not in row.get("app_headers", [])}
    assert of_the_limiter(emitted) == want


waits = st.integers(0, 10**30)
names = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=64)
decisions = st.builds(
    lambda allowed, limit, remaining, wait, next_us: Decision(
        allowed, limit, remaining, 0, 0 if allowed else wait, next_us
    ),
    st.booleans(),
    st.integers(1, 10**9),
    st.integers(0, 10**20),
    st.none() | waits,
    waits,
)


@given(st.lists(st.tuples(names, decisions), min_size=1, max_size=3))
def test_emitted_fields_parse(pairs: list[tuple[str, Decision]]) -> None:
    """Whatever names and numbers go in, a structured-field parser reads them back, in range and in order."""
    entries = [(Guard(name, "100/minute burst 7"), decision) for name, decision in pairs]
    emitted = dict(fields.response_fields(entries, NOW_US))
    assert read(emitted["RateLimit-Policy"]) == [(name, {"q": 7, "w": 5}) for name, _ in pairs]
    shown = read(emitted["RateLimit"])
    assert [name for name, _ in shown] == [name for name, _ in pairs]
    for (_, decision), (_, params) in zip(pairs, shown, strict=True):
        assert list(params) == ["r", "t"]
        assert params["r"] == min(decision.remaining, fields.NUMBER_MAX)
        wait_us = decision.next_us if decision.allowed or decision.retry_after_us is None else decision.retry_after_us
        assert 0 <= params["t"] <= fields.NUMBER_MAX
        assert params["t"] == fields.NUMBER_MAX or params["t"] * 10**6 >= wait_us
        assert (params["t"] - 1) * 10**6 < max(wait_us, 1)


@given(st.lists(decisions, min_size=1, max_size=3))
def test_retry_after_never_too_early(answers: list[Decision]) -> None:
    """Retry-After is the longest wait of those that refuse, rounded up, at least 1; absent where one never succeeds."""
    entries = [(Guard(f"g{number}", "10/minute"), decision) for number, decision in enumerate(answers)]
    emitted = dict(fields.response_fields(entries, NOW_US))
    refusing = [decision.retry_after_us for decision in answers if not decision.allowed]
    waits_us = [wait_us for wait_us in refusing if wait_us is not None]
    if not waits_us or None in refusing:
        assert "Retry-After" not in emitted
        return
    wait = int(emitted["Retry-After"])
    assert wait >= 1
    assert wait * 10**6 >= max(waits_us)
    assert wait == 1 or (wait - 1) * 10**6 < max(waits_us)


@given(names, decisions)
def test_pieces_agree_with_the_whole(name: str, decision: Decision) -> None:
    """`policy_field` and `ratelimit_field` write what a response has, without a guard."""
    guard = Guard(name, "3/s burst 10")
    emitted = dict(fields.response_fields([(guard, decision)], NOW_US))
    assert fields.policy_field((name, guard.policy)) == emitted["RateLimit-Policy"]
    assert fields.ratelimit_field((name, decision)) == emitted["RateLimit"]


def test_fields_of_several_pairs() -> None:
    """Several pairs are one list, in order."""
    a, b = Guard("a", "10/minute"), Guard("b", "gcra 5/s burst 10")
    ok = Decision(True, 10, 9, 6_000_000, 0, 6_000_000)
    no = Decision(False, 10, 0, 2_000_000, 200_000, 200_000)
    assert fields.policy_field(("a", a.policy), ("b", b.policy)) == '"a";q=10;w=60, "b";q=10;w=2'
    assert fields.ratelimit_field(("a", ok), ("b", no)) == '"a";r=9;t=6, "b";r=0;t=1'


@given(st.text(max_size=70))
def test_a_bad_name_never_gets_into_a_field(name: str) -> None:
    """A name is written exactly if `valid_policy_name` holds."""
    decision = Decision(True, 10, 9, 6_000_000, 0, 6_000_000)
    if fields.valid_policy_name(name):
        assert read(fields.ratelimit_field((name, decision))) == [(name, {"r": 9, "t": 6})]
    else:
        with pytest.raises(ConfigError, match="name must be 1 to 64"):
            fields.ratelimit_field((name, decision))


@pytest.mark.parametrize("name", ["", "n" * 65, "caf\u00e9", "a\nb", "a\n", "a\tb", "a\x7f", "a\x00", None, b"a", 7])
def test_invalid_names(name: object) -> None:
    """Not text, empty, too long, not ASCII or not printable: no name."""
    assert not fields.valid_policy_name(name)


@pytest.mark.parametrize("name", ["a", "n" * 64, " ", "per ip", 'say "hi"', "back\\slash", "a;b=1, c", "~"])
def test_valid_names(name: str) -> None:
    """Any 1 to 64 printable ASCII characters, blanks, quotes and separators included."""
    assert fields.valid_policy_name(name)


@pytest.mark.parametrize(
    ("allowed", "retry_after_us", "want"),
    [
        (True, 0, None),
        (False, None, None),
        (False, 0, 1),
        (False, 1, 1),
        (False, 10**6, 1),
        (False, 10**6 + 1, 2),
        (False, 6 * 10**6, 6),
    ],
)
def test_retry_after(allowed: bool, retry_after_us: int | None, want: int | None) -> None:
    """Whole seconds, rounded up, at least 1; nothing when allowed and nothing for never."""
    assert fields.retry_after(Decision(allowed, 10, 0, 0, retry_after_us, 0)) == want


def test_guards_without_fields_still_decide_retry_after() -> None:
    """A guard with headers="none" isn't listed, but what it refuses has its Retry-After."""
    shown, silent = Guard("shown", "10/minute"), Guard("silent", "5/minute", headers="none")
    ok = Decision(True, 10, 9, 6_000_000, 0, 6_000_000)
    no = Decision(False, 5, 0, 60_000_000, 11_000_001, 11_000_001)
    assert fields.response_fields([(silent, no), (shown, ok)], NOW_US) == [
        ("RateLimit-Policy", '"shown";q=10;w=60'),
        ("RateLimit", '"shown";r=9;t=6'),
        ("Retry-After", "12"),
    ]


def test_refusal_is_not_to_be_stored_and_says_when() -> None:
    """429 has cache-control: no-store and a short text that agrees with Retry-After."""
    guard = Guard("a", "10/minute")
    status, emitted, body = fields.too_many([(guard, Decision(False, 10, 0, 60, 5_500_001, 5_500_001))], NOW_US)
    assert status == 429
    assert dict(emitted)["Cache-Control"] == "no-store"
    assert dict(emitted)["Content-Type"] == "text/plain; charset=utf-8"
    assert body == b"Too many requests. Try again in 6 seconds.\n"
    assert fields.too_many([(guard, Decision(False, 10, 0, 60, 1, 1))], NOW_US)[2].endswith(b" in 1 second.\n")


def test_refusal_for_ever_says_so() -> None:
    """What can never succeed has no Retry-After and no advice to come back."""
    _, emitted, body = fields.too_many([(Guard("a", "10/minute"), Decision(False, 10, 10, 0, None, 0))], NOW_US)
    assert "Retry-After" not in dict(emitted)
    assert body == b"Too many requests. This request asks for more than its limit ever allows.\n"
