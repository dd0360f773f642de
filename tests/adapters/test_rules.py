"""The rules of guards through every adapter: tiers, lists of keys, shadow guards, charging by the response, the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from shmlimit import keys, parse
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard, Verdict
from tests.adapters.adapter import ADAPTERS, Adapter, Flaky, a, b, failed_logins, fixed_clock, header_of


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return Adapter(request.param)


# ---- which requests --------------------------------------------------------------------------------------------------


def test_tiers(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """A policy of the request: each tier has its own count and its own fields, and `None` isn't limited."""
    tiers = {"free": "2/minute", "paid": parse("100/minute"), "ours": None}
    app = adapter.make(a(policy=lambda request: tiers[header_of(request, "x-tier")]), store=fixed_clock())

    def of(tier: str) -> Any:
        return ask(app, headers={"x-tier": tier})

    assert [of("free").status for _ in range(3)] == [200, 200, 429]
    assert of("free").limits["ratelimit-policy"] == '"a";q=2;w=60'
    assert of("paid").limits == {"ratelimit-policy": '"a";q=100;w=60', "ratelimit": '"a";r=99;t=1'}
    assert of("ours").limits == {}
    assert of("paid").limits["ratelimit"] == '"a";r=98;t=1'


def test_costs_of_the_request(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """A cost of the request is what is charged."""
    app = adapter.make(a(cost=lambda request: int(header_of(request, "x-cost"))), store=fixed_clock())
    statuses = [ask(app, headers={"x-cost": cost}).status for cost in ("2", "3", "0", "1")]
    assert statuses == [200, 200, 200, 429]


def test_allowed_and_denied_keys(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Allowed keys pass without fields and uncounted; denied ones are 403; the rest is limited."""
    store = fixed_clock()
    app = adapter.make(
        Guard("a", "1/hour", allow_keys=["10.0.0.0/8"], deny_keys=["192.0.2.0/24"]), store=store, key=None
    )
    assert [ask(app, peer="10.1.2.3").status for _ in range(3)] == [200] * 3
    assert ask(app, peer="10.1.2.3").limits == {}
    assert ask(app, peer="192.0.2.9").status == 403
    assert len(store) == 0
    assert [ask(app, peer="203.0.113.7").status for _ in range(2)] == [200, 429]


def test_other_paths_and_methods_pass(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """`paths` and `methods` limit only what they name."""
    app = adapter.make(a(policy="1/hour", paths=["/items"], methods=["GET"]), store=fixed_clock())
    assert [ask(app, "/items/1").status, ask(app, "/items/2").status] == [200, 429]
    assert ask(app, "/").limits == {}
    assert ask(app, "/items/1", method="HEAD").status == 200


def test_a_header_is_not_in_a_network(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Whoever sends an allowed address or network as an API key is limited like anybody else."""
    guard = Guard(
        "a",
        "1/hour",
        key=keys.header("x-api-key", missing=keys.client_ip()),
        allow_keys=["10.0.0.0/8", "192.0.2.1"],
    )
    app = adapter.make(guard, store=fixed_clock())
    for made_up in ("10.0.0.0/8", "10.1.2.3", "192.0.2.1", "ip:192.0.2.1"):
        assert [ask(app, headers={"x-api-key": made_up}).status for _ in range(2)] == [200, 429], made_up
    assert [ask(app, peer="192.0.2.1").status for _ in range(3)] == [200] * 3


def test_what_a_denied_request_is_told(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Who is on a list of denied keys isn't told that the request lacks something; who is `DENY` is."""
    listed = ask(adapter.make(a(deny_keys=["k"]), store=fixed_clock())).body
    lacking = ask(adapter.make(a(key=lambda _: keys.DENY), store=fixed_clock())).body
    assert b"You may not send requests here." in listed
    assert b"says too little about who sends it" in lacking


# ---- shadow ----------------------------------------------------------------------------------------------------------


def test_s58_a_shadow_refuses_nothing(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A spent shadow guard stands in nobody's way: the enforcing one counts, decides and is alone in the fields; the
    shadow counts by itself, and says in the log once what it would have refused.
    """
    caplog.set_level(logging.INFO, "shmlimit")
    store = fixed_clock()
    app = adapter.make(b(shadow=True), a(), store=store)
    answers = [ask(app) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    assert all(answer.limits["ratelimit-policy"] == '"a";q=5;w=3600' for answer in answers)
    assert store.peek(parse("1/minute"), "k").remaining == 0
    assert [record.shmlimit["event"] for record in caplog.records] == ["would be refused", "refused"]
    assert [record.shmlimit["guard"] for record in caplog.records] == ["b", "a"]


def test_a_shadow_alone(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Only a shadow guard: every request passes, without fields, and it is charged for what it would let pass."""
    store = fixed_clock()
    app = adapter.make(a(shadow=True), store=store)
    answers = [ask(app) for _ in range(7)]
    assert [(answer.status, answer.limits) for answer in answers] == [(200, {})] * 7
    assert store.peek(parse("5/hour"), "k").remaining == 0


def test_a_shadow_is_not_charged_for_what_others_refuse(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """It is asked about the requests that pass the enforcing guards."""
    store = fixed_clock()
    app = adapter.make(a(shadow=True), b(), store=store)
    assert [ask(app).status for _ in range(3)] == [200, 429, 429]
    assert store.peek(parse("5/hour"), "k").remaining == 4


def test_a_shadow_denies_nobody(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Not even who is on its list, or has no key at all: those aren't counted either."""
    store = fixed_clock()
    listed = a(shadow=True, deny_keys=["k"])
    app = adapter.make(listed, b(shadow=True, key=lambda _: keys.DENY), store=store)
    assert ask(app).status == 200
    assert len(store) == 0


def test_a_shadow_does_not_close_an_open_guard(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Whether requests pass while the store fails is for the guards that can refuse to say."""
    store = Flaky()
    store.failing = ("take",)
    assert ask(adapter.make(a(fail_open=True), b(shadow=True), store=store)).status == 200
    assert ask(adapter.make(a(), b(shadow=True, fail_open=True), store=store)).status == 503


def test_a_shadow_whose_store_fails_lets_pass(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Requests pass, and the log says once that it fails and once that it answers again."""
    store = Flaky()
    app = adapter.make(a(shadow=True), store=store)
    store.failing = ("take",)
    assert [ask(app).status for _ in range(3)] == [200] * 3
    store.failing = ()
    assert ask(app).status == 200
    begun, ended = [record.getMessage() for record in caplog.records]
    assert begun == (
        "guard 'a': the store failed (gone); what shadow guards would refuse isn't known until it answers again"
    )
    assert ended == "guard 'a': the store answers again, after 3 requests"


# ---- charged by the response -----------------------------------------------------------------------------------------


def test_only_what_fails_is_charged(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Successful requests cost nothing; failed ones are charged after the response, whose fields say what is left; the
    fourth is refused before it, also where it would have succeeded.
    """
    app = adapter.make(failed_logins(), store=fixed_clock())
    adapter.status = 200
    assert [ask(app).limits["ratelimit"] for _ in range(2)] == ['"logins";r=3;t=0'] * 2
    adapter.status = 401
    answers = [ask(app) for _ in range(4)]
    assert [answer.status for answer in answers] == [401, 401, 401, 429]
    assert [answer.limits["ratelimit"] for answer in answers[:3]] == [f'"logins";r={r};t=1200' for r in (2, 1, 0)]
    assert all("retry-after" not in answer.limits for answer in answers[:3])
    assert answers[3].limits["retry-after"] == "1200"
    calls = adapter.calls
    adapter.status = 200
    assert ask(app).status == 429
    assert adapter.calls == calls
    assert answers[0].body == b"hello"


def test_the_status_is_an_int(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """The callable gets the number, once a response."""
    seen: list[Any] = []
    guard = Guard("a", "3/hour", key=lambda _: "k", consume_on=lambda status: seen.append(status) or False)
    adapter.status = 404
    ask(adapter.make(guard, store=fixed_clock()))
    assert seen == [404]


def test_beside_guards_that_charge_at_once(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """While it is spent nothing else is charged either, and all are in the fields, in order."""
    store = fixed_clock()
    app = adapter.make(a(), failed_logins(), store=store)
    adapter.status = 401
    assert [ask(app).status for _ in range(4)] == [401, 401, 401, 429]
    assert store.peek(parse("5/hour"), "k").remaining == 2
    assert ask(app).limits["ratelimit"] == '"a";r=2;t=720, "logins";r=0;t=1200'


def test_refused_by_another_it_is_not_charged(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """A request that another guard refuses never gets to a response of the application's."""
    store = fixed_clock()
    app = adapter.make(b(), failed_logins(), store=store)
    adapter.status = 401
    assert [ask(app).status for _ in range(2)] == [401, 429]
    assert store.peek(parse("3/hour"), "k").remaining == 2


def test_what_others_spent_meanwhile_refuses_nobody(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A response that can't be charged any more is the application's all the same, and shows the quota as spent."""
    caplog.set_level(logging.INFO, "shmlimit")
    store = fixed_clock()
    guard = Guard(
        "a", "3/hour", key=lambda _: "k", consume_on=lambda _status: bool(store.take(parse("3/hour"), "k", 3))
    )
    app = adapter.make(guard, store=store)
    answer = ask(app)
    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.limits == {"ratelimit-policy": '"a";q=3;w=3600', "ratelimit": '"a";r=0;t=1200'}
    assert caplog.records == []
    assert ask(app).status == 429


@pytest.mark.parametrize(("fail_open", "status"), [(False, 503), (True, 401)])
@pytest.mark.parametrize("failing", ["peek", "take"])
def test_s55_the_same_failure_policy_in_both_phases(
    adapter: Adapter, ask: Callable[..., Any], failing: str, fail_open: bool, status: int
) -> None:
    """A store that fails before the response or after it: 503 with Retry-After, or the application's own response."""
    store = Flaky()
    store.failing = (failing,)
    app = adapter.make(failed_logins(fail_open=fail_open), store=store)
    adapter.status = 401
    answer = ask(app)
    assert answer.status == status
    assert answer.limits.get("retry-after") == ("1" if status == 503 else None)
    assert answer.body.startswith(b"hello") == (status == 401)
    assert (b"can't answer" in answer.body) == (status == 503)
    assert ("ratelimit" in answer.limits) == (fail_open and failing == "take")  # as it was before the response


def test_what_says_nothing_is_charged_too(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Without fields there is still a response to charge."""
    app = adapter.make(failed_logins(headers="none"), store=fixed_clock())
    adapter.status = 401
    answers = [ask(app) for _ in range(4)]
    assert [answer.status for answer in answers] == [401, 401, 401, 429]
    assert [answer.limits for answer in answers] == [{}, {}, {}, {"retry-after": "1200"}]


def test_what_has_no_room_for_the_cost_is_refused_before(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """A response that would cost more than is left doesn't come to be, although something is left."""
    app = adapter.make(failed_logins(cost=2), store=fixed_clock())
    adapter.status = 401
    assert [ask(app).status for _ in range(2)] == [401, 429]
    assert adapter.calls == 1


def test_an_exception_is_a_500(adapter: Adapter, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that breaks before its response is charged for the 500 that the server makes of it."""
    seen: list[int] = []
    guard = Guard("a", "1/hour", key=lambda _: "k", consume_on=lambda status: seen.append(status) or status == 500)
    app = adapter.make(guard, store=fixed_clock())

    def fail(_self: Adapter, _name: str, _value: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Adapter, "__setattr__", fail)  # the application counts its calls first
    if adapter.falcon:
        assert ask(app).status == 500
    else:
        with pytest.raises(RuntimeError, match="broken"):
            ask(app)
    assert (ask(app).status, seen) == (429, [500])


def test_a_store_without_peek_is_told(adapter: Adapter) -> None:
    """A store that can't look without charging is refused when the limiter is made."""

    class Least:
        def supports(self, _policy: Any) -> bool:
            return True

        def take(self, *_: Any) -> Any: ...

    with pytest.raises(ConfigError, match="has no peek, so it can't decide guard 'logins' by the response"):
        adapter.make(failed_logins(), store=Least())


# ---- what the application sees ---------------------------------------------------------------------------------------


def test_the_handler_finds_the_decisions(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """A mapping from the guards' names to their decisions, shadow guards too, guards that didn't apply not."""
    app = adapter.make(
        a(), b(skip_paths=["/"]), Guard("s", "7/hour", key=lambda _: "k", shadow=True), store=fixed_clock()
    )
    ask(app)
    assert {name: decision.remaining for name, decision in adapter.outcome.items()} == {"a": 4, "s": 6}
    assert len(adapter.outcome) == 2
    assert adapter.outcome["a"].limit == 5
    assert "b" not in adapter.outcome


@pytest.mark.parametrize("adapter", ["wsgi", "asgi"], indirect=True)
def test_another_answer_for_refusals(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """The wrappers take a callable that makes the answer; falcon has error handlers for that (test_falcon_rules.py)."""

    def refuse(request: Any, verdict: Verdict) -> Verdict:
        assert verdict.status == 429
        return verdict._replace(body=header_of(request, "x-name").encode(), fields=[*verdict.fields, ("X-Own", "yes")])

    app = adapter.make(b(), store=fixed_clock(), refuse=refuse)
    ask(app, headers={"x-name": "alice"})
    answer = ask(app, headers={"x-name": "alice"})
    assert (answer.status, answer.body, dict(answer.headers)["x-own"]) == (429, b"alice", "yes")
    assert answer.limits["retry-after"] == "60"
    with pytest.raises(ConfigError, match="refuse must be a callable"):
        adapter.make(b(), store=fixed_clock(), refuse="no")


@pytest.fixture(params=["wsgi", "asgi"])
def wrapper(request: pytest.FixtureRequest) -> Adapter:
    """Those that take `refuse`."""
    return Adapter(request.param)


def test_an_answer_may_be_made_of_the_verdicts_own_fields(wrapper: Adapter, ask: Callable[..., Any]) -> None:
    """What one refusal adds to them isn't in the next."""

    def refuse(_request: Any, verdict: Verdict) -> Verdict:
        verdict.fields.append(("X-Own", "yes"))
        return verdict

    app = wrapper.make(b(key=lambda _: keys.DENY), store=fixed_clock(), refuse=refuse)
    for _ in range(3):
        answer = ask(app)
        assert answer.status == 403
        assert [name for name, _ in answer.headers].count("x-own") == 1


@pytest.mark.parametrize("status", [420, 429, 503])
def test_an_answer_of_any_status_and_length(wrapper: Adapter, ask: Callable[..., Any], status: int) -> None:
    """A status that nobody registered is fine, and there is one length, that of the body."""

    def refuse(_request: Any, _verdict: Verdict) -> Verdict:
        return Verdict(status, [("Content-Type", "text/plain"), ("content-length", "9")], b"calm")

    app = wrapper.make(b(), store=fixed_clock(), refuse=refuse)
    ask(app)
    answer = ask(app)
    assert (answer.status, answer.body) == (status, b"calm")
    assert [value for name, value in answer.headers if name == "content-length"] == ["4"]


def test_coroutine_functions_are_refused(adapter: Adapter) -> None:
    """What a coroutine function gives is always true and never awaited: that is told when the limiter is made."""

    async def refuse(_request: Any, verdict: Verdict) -> Verdict:
        return verdict

    async def key(_request: Any) -> str:
        return "k"

    with pytest.raises(ConfigError, match="key must be an ordinary callable"):
        adapter.make(Guard("a", "1/hour"), store=fixed_clock(), key=key)
    if not adapter.falcon:
        with pytest.raises(ConfigError, match="refuse must be an ordinary callable"):
            adapter.make(b(), store=fixed_clock(), refuse=refuse)
