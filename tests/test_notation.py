"""Notation: the rows of vectors/notation.jsonl, errors that mark the word, and the way there and back."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmlimit.errors import ConfigError
from shmlimit.notation import ALGORITHMS, UNITS, parse, parse_many
from shmlimit.policies import Gcra, TokenBucket, per_minute, per_second

VECTORS = Path(__file__).parent / "vectors" / "notation.jsonl"
ROWS = [json.loads(line) for line in VECTORS.read_text(encoding="utf-8").splitlines()]
MADE = {cls.__name__: cls for cls in ALGORITHMS.values()}
"""The policies that notation can make, by the name that rows give them."""


def policies_of(row):
    return row.get("policies") or ([row["policy"]] if "policy" in row else [])


def numbers(policy):
    names = ("limit", "period_us", "burst")
    return {"kind": type(policy).__name__} | {name: getattr(policy, name) for name in names if hasattr(policy, name)}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['id']}: {row.get('text', 'roundtrip')}" for row in ROWS])
def test_row(row):
    """A row is understood as it says, or refused with its word in the message, and never taken for something else."""
    if row["check"] == "roundtrip":
        told = row["policy"]
        burst = [told["burst"]] if "burst" in told else []
        policy = MADE[told["kind"]](told["limit"], Fraction(told["period_us"], 10**6), *burst)
        assert parse(str(policy)) == policy
        return
    call = {"parse": lambda text: [parse(text)], "parse_many": parse_many}[row["check"]]
    if row.get("error"):
        with pytest.raises(ConfigError) as caught:
            call(row["text"])
        assert row.get("word", "") in str(caught.value)
        assert row["text"] in str(caught.value)
    else:
        # What may be refused (`or_error`) is all understood here.
        assert [numbers(policy) for policy in call(row["text"])] == policies_of(row)


def test_a_window_takes_no_burst():
    """A burst behind an algorithm without one is refused for that reason."""
    with pytest.raises(ConfigError, match="sliding-log takes no burst"):
        parse("sliding-log 10/minute burst 5")


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("10/minute bust 20", "bust"),
        ("1 per 0 minute", "0"),
        ("0/minute", "0"),
        ("10/minute burst 0", "0"),
        ("10//minute", "/"),
        ("leaky 10/minute", "leaky"),
        ("10/month", "month"),
        ("10/s burst 3 burst 4", "burst"),
        ("10/s burst ten", "ten"),
        ("10/s burst 1000000001", "1000000001"),
        ("gcra gcra 5/s", "gcra"),
        ("5/5us", "5"),
        ("5/1000000001s", "1000000001"),
        ("1_/s", "1_"),
        ("1__0/s", "1__0"),
        ("_1/s", "_1"),
        ("+5/s", "+5"),
        ("1e3/s", "1e3"),
        ("\u0661/s", "\u0661"),
        ("\uff15/s", "\uff15"),
        ("5/1.5s", ".5s"),
        ("5/-1s", "-1s"),
        ("5/wee\u212a", "wee\u212a"),
        ("5/\u017f", "\u017f"),
        ("5 s", "s"),
        ("5/s/m", "/"),
        ("5/s; 6/s", ";"),
        ("5/s;", ";"),
        ("5/s, 6/s", "s,"),
        ("9" * 5_000 + "/s", "9" * 5_000),
        ("5/" + "9" * 5_000 + "s", "9" * 5_000),
        ("1/1000000000s burst 2", "1/1000000000s burst 2"),
    ],
    ids=lambda text: text[:20].encode("ascii", "backslashreplace").decode(),
)
def test_the_offending_word_is_marked(text, marked):
    """Under the text, carets stand under the word that isn't understood, which is quoted as well."""
    with pytest.raises(ConfigError) as caught:
        parse(text)
    problem, shown, carets = str(caught.value).split("\n")
    assert problem.startswith(f'"{marked}": ')
    start, end = re.search(r"\^+", carets).span()
    assert shown[start:end] == marked
    assert shown.strip() == text


@pytest.mark.parametrize("text", ["", " ", "10", "10/", "10 per", "10/30", "gcra", "gcra 10/"])
def test_something_is_missing(text):
    """Where the text ends too early, the caret stands behind it."""
    with pytest.raises(ConfigError, match=r"expected|must be") as caught:
        parse(text)
    assert str(caught.value).endswith("\n    " + " " * len(text) + "^")


@pytest.mark.parametrize("text", ["", ";", "5/s;", ";5/s", "5/s;;6/s", "5/s; ;6/s", " "])
def test_no_empty_elements(text):
    """An empty element, also at the end, and an empty text are errors for `parse_many`."""
    with pytest.raises(ConfigError, match="a policy is expected"):
        parse_many(text)


def test_an_error_among_many_is_marked_in_the_whole_text():
    """The mark is in the text as it was given, not in the part."""
    with pytest.raises(ConfigError) as caught:
        parse_many("1 per hour; 10 perr day")
    assert str(caught.value).endswith("    1 per hour; 10 perr day\n" + " " * 19 + "^^^^")


def test_an_unknown_algorithm_tells_the_known_ones():
    """Whoever misspells an algorithm reads what there is."""
    with pytest.raises(ConfigError, match=r'"leaky".*token-bucket, gcra'):
        parse("leaky 10/minute")


@pytest.mark.parametrize("text", [None, 5, b"5/s", TokenBucket(5, 1)], ids=repr)
def test_only_text(text):
    """What isn't text is a ConfigError as well."""
    for call in (parse, parse_many):
        with pytest.raises(ConfigError, match="must be text"):
            call(text)


def test_parts_go_together_freely():
    """Algorithm, "per", a count of units, underscores, burst, letter case and blanks mix."""
    assert parse("gcra 1_000 per hour burst 2_000") == Gcra(1000, 3600, 2000)
    assert parse("  GCRA\t5 / 30 Seconds  BURST 7 ") == Gcra(5, 30, 7)
    assert parse("Token-Bucket 5 PER 2hrs") == TokenBucket(5, 7200)
    assert parse_many("5/second ;100/minute burst 3; gcra 1/w") == [
        per_second(5),
        per_minute(100, 3),
        Gcra(1, 604_800),
    ]


@pytest.mark.parametrize(
    ("seconds", "spellings"),
    [
        (Fraction(1, 1000), "1000us ms 1ms"),
        (1, "s sec secs second seconds"),
        (60, "m min mins minute minutes"),
        (3_600, "h hr hrs hour hours"),
        (86_400, "d day days"),
        (604_800, "w week weeks"),
    ],
)
def test_units(seconds, spellings):
    """Every spelling of a unit, in any letter case, is that long; there are no others."""
    for spelling in spellings.split():
        assert parse(f"5/{spelling}") == parse(f"5/{spelling.upper()}") == TokenBucket(5, seconds)
    assert len(UNITS) == sum((2, 5, 5, 5, 3, 3))


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (TokenBucket(100, 60), "100/minute"),
        (TokenBucket(100, 60, 20), "100/minute burst 20"),
        (Gcra(5, 1, 10), "gcra 5/second burst 10"),
        (TokenBucket(5, 30), "5/30s"),
        (TokenBucket(5, 120), "5/2min"),
        (TokenBucket(5, 90), "5/90s"),
        (TokenBucket(5, 7200), "5/2h"),
        (TokenBucket(5, 86_400), "5/day"),
        (TokenBucket(5, 604_800), "5/week"),
        (TokenBucket(5, 1.5), "5/1500ms"),
        (TokenBucket(5, 0.001), "5/ms"),
        (TokenBucket(5, 1.000001), "5/1000001us"),
    ],
)
def test_str(policy, text):
    """`str` writes the largest unit that divides the period, the burst where it isn't the limit, and parses back."""
    assert str(policy) == text
    assert parse(text) == policy


@given(st.sampled_from([TokenBucket, Gcra]), st.integers(1, 10**9), st.integers(10**3, 10**15), st.integers(1, 10**9))
@settings(deadline=None)
def test_there_and_back(kind, limit, period_us, burst):
    """Every policy's `str` parses back to an equal policy, down to the microsecond."""
    for tokens in (burst, None):
        try:
            policy = kind(limit, Fraction(period_us, 10**6), tokens)
        except ConfigError:
            continue
        assert parse(str(policy)) == policy


@given(st.text(alphabet="0159_ /;.-+pershminudaywkgctokenbuS\n", max_size=30))
@settings(deadline=None, max_examples=500)
def test_anything_else_is_a_config_error(text):
    """Whatever the text is, there is a policy or a ConfigError, and a policy says the same again."""
    try:
        policy = parse(text)
    except ConfigError:
        return
    assert parse(str(policy)) == policy
