"""Notation: `"100/minute burst 20"` to a policy. The way back is `str(policy)`.

    policies   policy (";" policy)*                                      only in `parse_many`
    policy     [algorithm] count ("/" | "per") [count] unit ["burst" count]
    algorithm  a key of ALGORITHMS; without one, a token bucket
    unit       a key of UNITS, also directly behind its count: "30s", "30 s"
    count      ASCII digits, "_" between them: "10_000"; never 0

Letter case doesn't matter, nor do blanks round "/" and ";". Anything else is a `ConfigError` that shows the text with
the offending word marked: a limit that was misread is worse than a service that doesn't start.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple, NoReturn

from shmlimit.errors import ConfigError
from shmlimit.policies.base import DEFAULT_KIND, LIMIT_MAX, PERIOD_MAX_US, PERIOD_MIN_US, US_PER_S, Policy
from shmlimit.policies.bucket import Bucket
from shmlimit.policies.fixed_window import FixedWindow
from shmlimit.policies.gcra import Gcra
from shmlimit.policies.sliding_counter import SlidingCounter
from shmlimit.policies.sliding_log import SlidingLog
from shmlimit.policies.token_bucket import TokenBucket

_KINDS: tuple[type[Policy], ...] = (TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter)
ALGORITHMS = {cls.kind: cls for cls in _KINDS}
"""The word in front, and what it makes. Only subclasses of `Bucket` take a burst."""

UNITS = {"us": 1, "ms": 1_000}
"""Each spelling of a unit, in microseconds."""
for _size_s, _letter, *_words in (
    (1, "s", "sec", "second"),
    (60, "m", "min", "minute"),
    (3_600, "h", "hr", "hour"),
    (86_400, "d", "day"),
    (604_800, "w", "week"),
):
    UNITS |= dict.fromkeys([_letter, *_words, *(f"{word}s" for word in _words)], _size_s * US_PER_S)

_WORDS = re.compile(r"[/;]|[^\s/;]+")
_COUNT = re.compile(r"[0-9]+(?:_[0-9]+)*")
_MANY_DIGITS = 30


class _Word(NamedTuple):
    text: str
    start: int

    @property
    def lower(self) -> str:
        # HAZARD: beyond ASCII, lower() makes known letters out of others (the Kelvin sign is a k).
        return self.text.lower() if self.text.isascii() else self.text


class _Reader:
    """The words of one policy, `text[start:end]`; errors show all of `text`."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.text = text
        self.words = [_Word(match[0], match.start()) for match in _WORDS.finditer(text, start, end)]
        self.end = _Word("", end)
        if not self.words:
            self.fail(self.end, "a policy is expected here, e.g. 100/minute")

    def fail(self, word: _Word, problem: str) -> NoReturn:
        raise ConfigError(_marked(self.text, word, problem))

    def peek(self) -> _Word:
        return self.words[0] if self.words else self.end

    def next(self) -> _Word:
        return self.words.pop(0) if self.words else self.end

    def glued(self) -> None:
        """Part a count from the unit directly behind it: `30s`."""
        word = self.peek()
        digits = _COUNT.match(word.text)
        if digits and digits.end() < len(word.text):
            self.words[:1] = [
                _Word(digits[0], word.start),
                _Word(word.text[digits.end() :], word.start + digits.end()),
            ]

    def is_count(self) -> bool:
        return _COUNT.fullmatch(self.peek().text) is not None

    def count(self, what: str, maximum: int) -> int:
        word = self.next()
        if _COUNT.fullmatch(word.text) is None:
            self.fail(word, f"{what} must be a whole number like 100 or 10_000")
        # HAZARD: int() of thousands of digits is a ValueError of its own.
        number = int(word.text) if len(word.text) <= _MANY_DIGITS else maximum + 1
        if not 1 <= number <= maximum:
            self.fail(word, f"{what} must be within 1 and {maximum}")
        return number


def parse(text: str) -> Policy:
    """The one policy that `text` describes, or a `ConfigError` that marks the offending word."""
    _check_text(text)
    return _policy(text, 0, len(text))


def parse_many(text: str) -> list[Policy]:
    """The policies that `text` describes, separated by `;` and in its order; no empty elements."""
    _check_text(text)
    ends = [match.start() for match in re.finditer(";", text)] + [len(text)]
    return [_policy(text, start, end) for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]


def _policy(text: str, start: int, end: int) -> Policy:
    words = _Reader(text, start, end)
    algorithm = ALGORITHMS[DEFAULT_KIND]
    first = words.peek()
    if first.lower in ALGORITHMS:
        algorithm = ALGORITHMS[words.next().lower]
    elif not words.is_count():
        words.fail(first, f"a whole number or an algorithm ({', '.join(ALGORITHMS)}) is expected here")
    limit = words.count("limit", LIMIT_MAX)
    if (per := words.next()).lower not in ("/", "per"):
        words.fail(per, 'after the limit, "/" or "per" and a period are expected')
    period_us = _period_us(words)
    burst = None
    if (word := words.peek()).lower == "burst":
        words.next()
        if not issubclass(algorithm, Bucket):
            words.fail(word, f"{algorithm.kind} takes no burst")
        if words.peek() is words.end:
            words.fail(word, "burst needs a number")
        burst = words.count("burst", LIMIT_MAX)
    if words.words:
        several = "; parse_many takes several policies" if words.peek().text == ";" else ""
        words.fail(words.peek(), f"this is not understood here{several}")
    period = Fraction(period_us, US_PER_S)
    try:
        if burst is not None and issubclass(algorithm, Bucket):
            return algorithm(limit, period, burst)
        return algorithm(limit, period)
    except ConfigError as error:
        whole = text[first.start : end].rstrip()
        raise ConfigError(_marked(text, _Word(whole, first.start), str(error))) from error


def _period_us(words: _Reader) -> int:
    words.glued()
    first, number = words.peek(), 1
    if words.is_count():
        number = words.count("period", PERIOD_MAX_US)
    unit = words.next()
    if unit.lower not in UNITS:
        words.fail(unit, f"a unit is expected here: one of {', '.join(UNITS)}")
    period_us = number * UNITS[unit.lower]
    if not PERIOD_MIN_US <= period_us <= PERIOD_MAX_US:
        words.fail(first, "period must be within 1 ms and 10**9 seconds")
    return period_us


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"notation must be text like 100/minute, not {text!r}")


def _marked(text: str, word: _Word, problem: str) -> str:
    """The problem, the text, and carets under the word; or behind the text, where something is missing."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    quoted = f'"{word.text}": ' if word.text else ""
    return f"{quoted}{problem}\n    {shown}\n    {' ' * word.start}{'^' * max(1, len(word.text))}"
