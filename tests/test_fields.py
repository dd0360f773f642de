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
IN_AN_APPLICATION = {"F029", "F041"}
"""Rows whose guards are each sound and don't go together: the middleware refuses them."""


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in VECTORS.read_text().splitlines()]


def of_the_limiter(emitted: list[tuple[str, str]]) -> dict[str, str]:
    """The fields that a row speaks about; each at most once."""
    kept = [(name, value) for name, value in emitted if name.startswith(("RateLimit", "X-RateLimit", "Retry-After"))]
    assert len(dict(kept)) == len(kept)
    return dict(kept)


def read(value: str) -> Any:
    """The value as a structured-field list of strings with parameters."""
    return http_sf.parse(value.encode(), tltype="list")


def test_number_of_rows() -> None:
    """All 44 rows, two of which are about guards that don't go together."""
    assert len(rows()) == 44
    assert {row["id"] for row in rows()} > IN_AN_APPLICATION


@pytest.mark.parametrize(
    "row", [row for row in rows() if row["id"] not in IN_AN_APPLICATION], ids=lambda row: row["id"]
)
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
    own = {name: value for name, value in row["want"].items() if [name, value] not in row.get("app_headers", [])}
    assert of_the_limiter(emitted) == own


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


def seconds(us: int) -> int:
    return min(-(-us // 10**6), fields.NUMBER_MAX)


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


# ---- the older dialects ----------------------------------------------------------------------------------------------

OK = Decision(True, 10, 9, 6_000_000, 0, 6_000_000)
NO = Decision(False, 10, 0, 60_000_000, 5_500_001, 5_500_001)


@given(st.lists(decisions, min_size=1, max_size=3), st.sampled_from(["draft-7", "draft-6"]), waits)
def test_older_drafts_parse(answers: list[Decision], dialect: str, reset_us: int) -> None:
    """A structured-field parser reads both older drafts back, with the numbers of one of the guards, in range."""
    answers = [decision._replace(reset_us=reset_us) for decision in answers]
    guards = [Guard(f"g{number}", "100/minute burst 7", headers=dialect) for number in range(len(answers))]
    emitted = dict(fields.response_fields(list(zip(guards, answers, strict=True)), NOW_US))
    emitted.pop("Retry-After", None)
    assert http_sf.parse(emitted.pop("RateLimit-Policy").encode(), tltype="list") == [(7, {"w": 5})]
    if dialect == "draft-7":
        read_back = http_sf.parse(emitted.pop("RateLimit").encode(), tltype="dictionary")
        shown = [read_back[name][0] for name in ("limit", "remaining", "reset")]
    else:
        names = ("RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset")
        shown = [http_sf.parse(emitted.pop(name).encode(), tltype="item")[0] for name in names]
    assert not emitted
    assert shown in [
        [decision.limit, min(decision.remaining, fields.NUMBER_MAX), seconds(decision.reset_us)] for decision in answers
    ]


@given(decisions, waits, st.integers(0, 10**18))
def test_legacy_fields_are_whole_numbers(decision: Decision, reset_us: int, now_us: int) -> None:
    """Plain integers; Reset is the Unix second by which the quota is whole, or with delta the seconds until then."""
    decision = decision._replace(reset_us=reset_us)
    epoch, delta = (dict(fields.legacy_fields(decision, now_us, reset)) for reset in ("epoch", "delta"))
    assert list(epoch) == ["X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"] == list(delta)
    assert int(epoch["X-RateLimit-Limit"]) == decision.limit
    assert int(epoch["X-RateLimit-Remaining"]) == min(decision.remaining, fields.NUMBER_MAX)
    assert int(epoch.pop("X-RateLimit-Reset")) == seconds(now_us + reset_us)
    assert int(delta.pop("X-RateLimit-Reset")) == seconds(reset_us)
    assert epoch == delta
    assert dict(fields.legacy_fields(decision, now_us)) == {
        **epoch,
        "X-RateLimit-Reset": str(seconds(now_us + reset_us)),
    }


def shown(*answers: Decision, dialect: str = "legacy") -> str:
    """The Reset (delta) of the one that a dialect with room for one shows."""
    guards = [Guard(f"g{number}", "10/minute", headers=dialect, reset="delta") for number in range(len(answers))]
    return dict(fields.response_fields(list(zip(guards, answers, strict=True)), NOW_US))["X-RateLimit-Reset"]


def test_room_for_one_shows_who_matters() -> None:
    """The refusing guard with the longest wait (never is the longest), else the smallest share left, else the first."""
    soon, late = NO._replace(reset_us=1 * 10**6, retry_after_us=5), NO._replace(reset_us=2 * 10**6, retry_after_us=6)
    never = NO._replace(reset_us=3 * 10**6, retry_after_us=None)
    half = OK._replace(reset_us=4 * 10**6, limit=10, remaining=5)
    third = OK._replace(reset_us=5 * 10**6, limit=300, remaining=100)
    assert shown(half, soon, late) == shown(late, soon, half) == "2"
    assert shown(late, never, soon) == "3"
    assert shown(half, third) == shown(third, half) == "5"
    assert shown(half, half._replace(reset_us=6 * 10**6, limit=20, remaining=10)) == "4"
    assert shown(late, late._replace(reset_us=7 * 10**6)) == "2"


def test_dialects_side_by_side() -> None:
    """Draft and legacy guards go together, each in its own fields, those of "both" in either; older drafts don't."""
    draft, legacy, both = (
        Guard("d", "10/minute"),
        Guard("l", "5/s", headers="legacy"),
        Guard("b", "9/s", headers="both"),
    )
    fields.check_dialects([draft, legacy, both, Guard("n", "1/s", headers="none")])
    emitted = dict(fields.response_fields([(draft, OK), (legacy, OK), (both, OK._replace(remaining=1))], NOW_US))
    assert emitted["RateLimit-Policy"] == '"d";q=10;w=60, "b";q=9;w=1'
    assert emitted["X-RateLimit-Remaining"] == "1"
    only = dict(fields.response_fields([(legacy, OK), (draft, OK)], NOW_US))
    assert only["RateLimit"] == '"d";r=9;t=6'
    assert only["X-RateLimit-Remaining"] == "9"


@pytest.mark.parametrize(
    "pair", [("draft", "draft-7"), ("draft-7", "draft-6"), ("both", "draft-6"), ("draft-6", "draft")]
)
def test_generations_do_not_mix(pair: tuple[str, str]) -> None:
    """One RateLimit-Policy in a response has one generation: the message names both guards and both dialects."""
    one, other = (Guard(dialect, "10/minute", headers=dialect) for dialect in pair)
    with pytest.raises(ConfigError, match=f"'{pair[0]}' and '{pair[1]}' write different generations"):
        fields.check_dialects([Guard("l", "1/s", headers="legacy"), one, other])


def test_resets_do_not_mix() -> None:
    """A client can't know whether a Reset counts from now, so guards of one response agree on it."""
    guards = [Guard("a", "1/s", headers="legacy"), Guard("b", "2/s", headers="both", reset="delta")]
    with pytest.raises(ConfigError, match="'a' and 'b' differ in reset"):
        fields.check_dialects(guards)
    fields.check_dialects([*guards[1:], Guard("c", "3/s")])


# ---- partitions ------------------------------------------------------------------------------------------------------

SECRET = b"sixteen bytes or more"


def test_partition_key_is_a_keyed_hash() -> None:
    """`pk` is a byte sequence that differs with the key and with the secret, and is the same each time."""
    pks = [fields.partition_key(key, secret) for key in (b"a", b"b") for secret in (SECRET, SECRET[::-1])]
    assert len(set(pks)) == 4
    assert fields.partition_key(b"a", SECRET) == pks[0]
    assert pks[0] == ":D+rOSkg39QdBXWqV:"  # workers of the next version must say the same
    value = http_sf.parse(pks[0].encode(), tltype="item")[0]
    assert isinstance(value, bytes)
    assert len(value) == 12


@pytest.mark.parametrize("headers", ["draft", "both"])
def test_partition_is_in_both_fields(headers: str) -> None:
    """A guard with `partition` shows `pk` in policy and limit, and nothing else of it changes."""
    guard = Guard('say "a"', "10/minute", headers=headers, partition=True)
    limit = guard.shown_to("key", SECRET)
    emitted = dict(fields.response_fields([(limit, NO)], NOW_US))
    pk = http_sf.parse(fields.partition_key(b"key", SECRET).encode(), tltype="item")[0]
    assert read(emitted["RateLimit-Policy"]) == [('say "a"', {"pk": pk, "q": 10, "w": 60})]
    assert read(emitted["RateLimit"]) == [('say "a"', {"pk": pk, "r": 0, "t": 6})]
    plain = dict(fields.response_fields([(Guard('say "a"', "10/minute", headers=headers), NO)], NOW_US))
    assert {name: value for name, value in emitted.items() if not name.startswith("RateLimit")} == {
        name: value for name, value in plain.items() if not name.startswith("RateLimit")
    }
    assert guard.shown_to(b"key", SECRET).parts == limit.parts
    assert guard.shown_to("other", SECRET).parts != limit.parts


def test_partition_needs_a_secret() -> None:
    """`True` takes the store's, bytes are one of its own; without either it is a mistake, told with a way out."""
    own = Guard("a", "10/minute", partition=SECRET)
    assert own.shown_to("k").parts == own.shown_to("k", b"of the store, sixteen").parts
    with pytest.raises(ConfigError, match="needs a store with a secret, such as SharedTable"):
        Guard("a", "10/minute", partition=True).shown_to("k")
    plain = Guard("a", "10/minute")
    assert plain.shown_to("k") is plain


# ---- problems --------------------------------------------------------------------------------------------------------


def problem(answer: tuple[int, Any, bytes]) -> dict[str, Any]:
    status, emitted, body = answer
    assert dict(emitted)["Content-Type"] == "application/problem+json"
    assert dict(emitted)["Cache-Control"] == "no-store"
    document: dict[str, Any] = json.loads(body)
    assert document["status"] == status
    return document


def test_refusal_as_problem() -> None:
    """RFC 9457: the registered type, and `violated-policies` has the names of those that refuse, unescaped."""
    quoted, fine = Guard('say "a"', "10/minute", problem=True), Guard("b", "5/s")
    answer = fields.too_many([(fine, OK), (quoted, NO)], NOW_US)
    assert problem(answer) == {
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Too many requests",
        "status": 429,
        "detail": "Try again in 6 seconds.",
        "violated-policies": ['say "a"'],
    }
    assert answer[1][:3] == fields.response_fields([(fine, OK), (quoted, NO)], NOW_US)


def test_who_refuses_says_how() -> None:
    """A text where nobody who refuses asked for a problem; a problem with all names if one of them did."""
    text, other = Guard("a", "10/minute"), Guard("b", "5/s", problem=True)
    assert dict(fields.too_many([(text, NO), (other, OK)], NOW_US)[1])["Content-Type"].startswith("text/plain")
    assert problem(fields.too_many([(text, NO), (other, NO)], NOW_US))["violated-policies"] == ["a", "b"]


def test_other_answers() -> None:
    """503 has Retry-After and its own registered type; 403 is about:blank; both are short texts where nobody asked."""
    text, other = Guard("a", "10/minute"), Guard("b", "5/s", problem=True)
    unavailable = fields.unavailable([text, other], 7)
    kind = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
    assert problem(unavailable)["type"] == kind
    assert dict(unavailable[1])["Retry-After"] == "7"
    assert problem(fields.denied([other]))["type"] == "about:blank"
    status, emitted, body = fields.unavailable([text])
    assert (status, dict(emitted)["Retry-After"], body) == (503, "1", b"The rate limiter can't answer.\n")
    status, emitted, body = fields.denied([text])
    assert (status, body) == (403, b"This request says too little about who sends it.\n")
    assert "Retry-After" not in dict(emitted)
