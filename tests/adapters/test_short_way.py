"""One guard without rare options is decided on a shorter way: it says what the long one says, whatever comes."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import falcon
import pytest

from shmlimit import keys
from shmlimit.adapters._gate import Gate
from shmlimit.adapters._outcome import Outcome, Refusals
from shmlimit.adapters.falcon import RateLimitMiddleware
from shmlimit.errors import ConfigError, StoreError
from shmlimit.guard import Guard, Verdict
from shmlimit.stores.memory import MemoryStore

NOW_US = 1_750_000_000_000_000
NEVER = ["never"]  # a key that nobody has; with a list of keys a guard goes the long way

Requests = list[tuple[str, str, Any]]


class Clocked(MemoryStore):
    """Fails while it is told to; each call is a second later than the one before. An event loop asks it directly."""

    blocks = False

    def __init__(self) -> None:
        self.now_us = NOW_US
        self.failing = False
        super().__init__(clock=self._clock)

    def _clock(self) -> int:
        return self.now_us

    def take(self, *arguments: Any, **named: Any) -> Any:
        self.now_us += 1_000_000
        if self.failing:
            raise StoreError("told to")
        return super().take(*arguments, **named)


def plain(gate: Gate, *request: Any) -> Verdict:
    return gate.check(*request)


def awaited(gate: Gate, *request: Any) -> Verdict:
    return asyncio.run(gate.acheck(*request))


class Blocking(Clocked):
    """An event loop asks it through its coroutines."""

    blocks = True


def run(check: Callable[..., Verdict], guard: Guard, requests: Requests, kind: type[Clocked] = Clocked) -> list[Any]:
    """What each request is told: the verdict or the error, and what its application finds."""
    store = kind()
    gate = Gate((guard,), store, None)
    said: list[Any] = []
    for method, path, key in requests:
        store.failing = path == "/failing"
        outcome = Outcome()
        try:
            verdict: Any = check(gate, method, path, key, outcome)
        except ValueError as error:
            verdict = str(error)
        said.append((verdict, dict(outcome)))
    return said


REQUESTS: Requests = [
    ("GET", "/", "a"),
    ("OPTIONS", "/", "a"),
    ("GET", "/skipped", "a"),
    ("GET", "/", None),
    ("GET", "/", keys.DENY),
    ("GET", "/", ""),
    ("GET", "/", b""),
    ("GET", "/", 7),
    ("GET", "/", b"a"),
    ("GET", "/", "a"),
    ("GET", "/", "a"),
    ("GET", "/failing", "a"),
    ("GET", "/", "b"),
    ("GET", "/failing", "b"),
    ("GET", "/failing", "b"),
    *[("GET", "/", "a")] * 20,
    ("GET", "/", b"\xff"),
]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"skip_paths": ["/skipped"]},
    {"fail_open": True},
    {"cost": 2},
    {"cost": 0},
    {"cost": 9},
    {"problem": True},
    *[{"headers": headers} for headers in ("draft-6", "draft-7", "none")],
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("check", "kind"), [(plain, Clocked), (awaited, Clocked), (awaited, Blocking)])
def test_it_says_what_the_long_way_says(
    check: Callable[..., Verdict],
    kind: type[Clocked],
    options: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Verdicts, errors, what the application finds, and the log: keys of all kinds, refusals, failures, recoveries."""
    monkeypatch.setattr(Refusals, "QUIET_US", 0)  # the ends of refusals, too
    caplog.set_level(logging.INFO, "shmlimit")
    told: list[list[str]] = []
    said: list[list[Any]] = []
    for rare in ({}, {"allow_keys": NEVER}):
        guard = Guard("per-key", "3/20s", key=lambda key: key, **options, **rare)
        said.append(run(check, guard, REQUESTS, kind))
        told.append([record.getMessage().partition(" seconds=")[0] for record in caplog.records])
        caplog.clear()
    assert said[0] == said[1]
    assert told[0] == told[1]
    # What is compared has something of everything in it.
    statuses = {verdict.status for verdict, _ in said[0] if isinstance(verdict, Verdict)}
    assert {None, 403} <= statuses
    assert (503 in statuses) is not bool(options.get("fail_open"))
    assert (429 in statuses) is (options.get("cost") != 0)
    assert any("allowed again" in line for line in told[0]) is (options.get("cost", 1) in {1, 2})
    assert sum("the store answers again" in line for line in told[0]) == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda outcome: pickle.loads(pickle.dumps(outcome))])
def test_what_was_decided_can_be_copied(copied: Callable[[Outcome], Outcome]) -> None:
    """An application may copy its environ, or send what it found elsewhere."""
    outcome = Outcome()
    assert dict(copied(outcome)) == {}
    Gate((Guard("per-key", "9/minute", key=str),), MemoryStore(), None).check("GET", "/", "a", outcome)
    assert dict(copied(outcome)) == dict(outcome)
    assert outcome["per-key"].remaining == 8


def test_legacy_names_the_time() -> None:
    """`X-RateLimit-Reset` is a Unix time, also on the short way."""
    gate = Gate((Guard("per-key", "10/minute", key=lambda key: key, headers="legacy"),), MemoryStore(), None)
    fields = dict(gate.check("GET", "/", "a", Outcome()).fields)
    assert int(fields["X-RateLimit-Reset"]) > NOW_US // 1_000_000


def test_two_limiters_of_one_request_are_told_together() -> None:
    """The second one lists what the first has decided."""
    store, outcome = Clocked(), Outcome()
    for name, policy in (("first", "3/minute"), ("second", "5/minute")):
        gate = Gate((Guard(name, policy, key=lambda key: key),), store, None)
        fields = dict(gate.check("GET", "/", "a", outcome).fields)
    assert fields["RateLimit-Policy"] == '"first";q=3;w=60, "second";q=5;w=60'
    assert list(outcome) == ["first", "second"]


def test_legacy_of_another_limiter_names_the_time() -> None:
    """The second limiter's draft needs no time, but what it is told together with does."""
    store, outcome = MemoryStore(), Outcome()
    for name, headers in (("first", "legacy"), ("second", "draft")):
        gate = Gate((Guard(name, "9/minute", key=lambda key: key, headers=headers),), store, None)
        fields = dict(gate.check("GET", "/", "a", outcome).fields)
        assert int(fields["X-RateLimit-Reset"]) > NOW_US // 1_000_000
    assert list(outcome) == ["first", "second"]


def test_two_generations_of_two_limiters_are_a_mistake() -> None:
    """The same as in one limiter, but told at the request."""
    store, outcome = MemoryStore(), Outcome()
    first, second = (
        Gate((Guard(headers, "9/minute", key=lambda key: key, headers=headers),), store, None)
        for headers in ("draft-7", "draft")
    )
    first.check("GET", "/", "a", outcome)
    with pytest.raises(ConfigError, match="generations"):
        second.check("GET", "/", "a", outcome)


def test_a_method_of_a_subclass_is_called(ask: Callable[..., Any]) -> None:
    """Falcon isn't told to leave out a step that the middleware itself doesn't need, where a subclass has it."""
    seen: list[str] = []

    class Own(RateLimitMiddleware):
        def process_resource(self, req: Any, resp: Any, resource: object, params: object) -> None:
            super().process_resource(req, resp, resource, params)
            seen.append(req.uri_template)

    class Hello:
        def on_get(self, _req: Any, resp: Any) -> None:
            resp.text = "hello"

    app = falcon.App(middleware=[Own(Guard("per-ip", "9/minute"), store=MemoryStore())])
    app.add_route("/", Hello())
    assert ask(app).status == 200
    assert seen == ["/"]


def test_shadows_of_two_limiters_are_found_together() -> None:
    """The application finds what both have counted."""
    store, outcome = MemoryStore(), Outcome()
    for name in ("first", "second"):
        Gate((Guard(name, "9/minute", key=lambda key: key, shadow=True),), store, None).check("GET", "/", "a", outcome)
    assert [(name, decision.remaining) for name, decision in outcome.items()] == [("first", 8), ("second", 7)]
