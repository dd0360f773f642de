"""`Guard`: what can be configured, what is skipped, what is answered."""

from typing import Any

import pytest

from shmlimit import TokenBucket, keys
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard, Verdict
from shmlimit.notation import parse
from shmlimit.policies.base import Decision

NOW_US = 1_750_000_000_250_000
OK = Decision(True, 10, 9, 6_000_000, 0, 6_000_000)
NO = Decision(False, 10, 0, 60_000_000, 6_000_000, 6_000_000)


def test_policy_may_be_notation() -> None:
    """Text is parsed, a policy is taken as it is: the two are the same guard."""
    policy = parse("10/minute")
    assert Guard("a", "10/minute").policy == policy == Guard("a", policy).policy


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"name": ""}, "name must be 1 to 64"),
        ({"name": 7}, "name must be 1 to 64"),
        ({"policy": 10}, '"10/minute"'),
        ({"policy": "often"}, "often"),
        ({"key": "X-Api-Key"}, "callable"),
        ({"cost": -1}, "0 or more"),
        ({"cost": True}, "integer"),
        ({"cost": 1.5}, "callable of the request"),
        ({"headers": "draft-99"}, "'draft', 'draft-7'"),
        ({"headers": None}, "'draft', 'draft-7'"),
        ({"skip_paths": "/healthz"}, r"\['/healthz'\]"),
        ({"skip_paths": ["healthz"]}, "begin with '/'"),
        ({"skip_paths": ["*"]}, "begin with '/'"),
        ({"skip_paths": [""]}, "texts"),
        ({"skip_paths": None}, "list of texts"),
        ({"skip_methods": "OPTIONS"}, r"\['OPTIONS'\]"),
        ({"skip_methods": [None]}, "texts"),
        ({"fail_open": "no"}, "True or False"),
        ({"problem": 1}, "problem must be True or False"),
        ({"headers": "legacy", "reset": "soon"}, "reset must be one of 'epoch', 'delta'"),
        ({"reset": "delta"}, "'draft' has no such field"),
        ({"partition": "yes"}, "secret of 16 to 64 bytes"),
        ({"partition": b"short"}, "secret of 16 to 64 bytes"),
        ({"partition": b"x" * 65}, "secret of 16 to 64 bytes"),
        ({"partition": True, "headers": "legacy"}, "'legacy' has no such field"),
    ],
    ids=str,
)
def test_mistakes_are_config_errors(options: dict[str, Any], hint: str) -> None:
    """What can't work is refused when the guard is made, and the message says what would."""
    with pytest.raises(ConfigError, match=hint):
        Guard(**{"name": "a", "policy": "10/minute", **options})


@pytest.mark.parametrize(
    ("entry", "skipped", "limited"),
    [
        ("/health", ["/health", "/health/", "/health/x"], ["/healthz", "/", "/x/health", "/Health", "//health"]),
        ("/health/", ["/health/", "/health/x"], ["/health", "/healthz"]),
        ("/", ["/"], ["/x", "//", ""]),
        ("/static*", ["/static", "/static/x", "/statics"], ["/stati", "/x/static"]),
        ("/static/*", ["/static/", "/static/x"], ["/static", "/statics"]),
        ("/a b", ["/a b"], ["/a%20b", "/a+b"]),
        ("/a", ["/a/../b"], ["/b/../a", "/./a"]),
    ],
)
def test_skip_paths(entry: str, skipped: list[str], limited: list[str]) -> None:
    """Entries match the path as it came, whole or on a boundary; a star at the end makes a prefix."""
    guard = Guard("a", "10/minute", skip_paths=["/other", entry])
    assert [path for path in skipped + limited if guard.skipped("GET", path, "k")] == skipped


def test_skip_methods() -> None:
    """OPTIONS isn't limited unless asked for; methods of the configuration are in any letter case."""
    assert Guard("a", "10/minute").skipped("OPTIONS", "/", "k")
    assert not Guard("a", "10/minute").skipped("GET", "/", "k")
    assert not Guard("a", "10/minute", skip_methods=()).skipped("OPTIONS", "/", "k")
    assert Guard("a", "10/minute", skip_methods=["head"]).skipped("HEAD", "/", "k")


def test_keys_of_a_request() -> None:
    """None isn't limited; text, bytes and DENY are not skipped."""
    guard = Guard("a", "10/minute")
    assert guard.skipped("GET", "/", None)
    assert not any(guard.skipped("GET", "/", key) for key in ("k", b"k", keys.DENY))


@pytest.mark.parametrize("key", ["", b"", 0, 7, False, ("a", "b")])
def test_an_empty_key_is_a_mistake(key: object) -> None:
    """A key callable that gives nothing, or no text, is wrong and never makes a request unlimited."""
    with pytest.raises(ValueError, match="key callable of guard 'per-ip' gave"):
        Guard("per-ip", "10/minute").skipped("GET", "/", key)


def test_cost_of_a_request() -> None:
    """A number, or what a callable says of the request: a bad one is raised, not charged."""
    assert Guard("a", "10/minute").units({}) == 1
    assert Guard("a", "10/minute", cost=0).units({}) == 0
    assert Guard("a", "10/minute", cost=lambda request: request["n"]).units({"n": 5}) == 5
    for bad in (-1, None, "5"):
        with pytest.raises(ValueError, match="cost must be"):
            Guard("a", "10/minute", cost=lambda request: request["n"]).units({"n": bad})


def test_enforce_an_allowed_request() -> None:
    """A request that passes has no status, and the fields for the application's response."""
    assert Guard("a", "10/minute").enforce(OK, NOW_US) == Verdict(
        None, [("RateLimit-Policy", '"a";q=10;w=60'), ("RateLimit", '"a";r=9;t=6')], b""
    )


def test_enforce_a_refused_request() -> None:
    """A refusal is 429 with all fields and a body."""
    verdict = Guard("a", "10/minute").enforce(NO, NOW_US)
    assert verdict.status == 429
    assert dict(verdict.fields) == {
        "RateLimit-Policy": '"a";q=10;w=60',
        "RateLimit": '"a";r=0;t=6',
        "Retry-After": "6",
        "Cache-Control": "no-store",
        "Content-Type": "text/plain; charset=utf-8",
    }
    assert verdict.body == b"Too many requests. Try again in 6 seconds.\n"


def test_enforce_without_fields() -> None:
    """headers="none" says nothing but Retry-After."""
    guard = Guard("a", "10/minute", headers="none")
    assert guard.enforce(OK, NOW_US).fields == []
    assert "RateLimit" not in dict(guard.enforce(NO, NOW_US).fields)
    assert dict(guard.enforce(NO, NOW_US).fields)["Retry-After"] == "6"


def test_enforce_for_a_policy_of_the_request() -> None:
    """With what is shown to the key, the fields say the policy that decided, and its partition."""
    guard = Guard("a", lambda _: "10/minute", partition=b"0123456789abcdef")
    verdict = guard.enforce(OK, NOW_US, guard.shown_to("k", None, guard.policy_of({})))
    assert dict(verdict.fields)["RateLimit-Policy"].startswith('"a";pk=:')
    assert dict(verdict.fields)["RateLimit-Policy"].endswith(":;q=10;w=60")


def test_what_is_shown_of_a_policy_is_kept_for_some() -> None:
    """A tier's part of the fields is made once; made-up policies don't grow the memory."""
    guard = Guard("a", lambda _: "10/minute")
    tier = guard.shown_to("k", None, TokenBucket(10, 60))
    assert guard.shown_to("other", None, TokenBucket(10, 60)) is tier
    for limit in range(1, 1001):
        guard.shown_to("k", None, TokenBucket(limit, 1))
    assert len(guard._prepared) <= 256
    assert guard.shown_to("k", None, TokenBucket(10, 60)) == tier


def test_repr_tells_guards_apart() -> None:
    """A guard shows its name and its policy."""
    assert repr(Guard("per-ip", "10/minute")).startswith("Guard('per-ip', '")
