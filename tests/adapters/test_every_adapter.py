"""What holds for every adapter: one body of tests for the falcon middleware on both stacks and for both wrappers."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import falcon
import pytest

from shmlimit import keys
from shmlimit.adapters import _gate
from shmlimit.errors import ConfigError, StoreError
from shmlimit.guard import Guard
from shmlimit.notation import parse
from shmlimit.policies.base import Decision
from shmlimit.stores.memory import MemoryStore
from shmlimit.testing import ToldStore
from tests.adapters.adapter import ADAPTERS, Adapter, a, b, fixed_clock

OK = Decision(True, 10, 9, 6_000_000, 0, 6_000_000)
NO = Decision(False, 10, 0, 60_000_000, 5_500_001, 5_500_001)


class OneAtATime:
    """A store without take_all."""

    def __init__(self) -> None:
        told = ToldStore(OK)
        self.take, self.supports = told.take, told.supports


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return Adapter(request.param)


# -- All or nothing --------------------------------------------------------------------------------------------------


def test_one_guard_is_one_take(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """A single guard, also the only one that applies, is asked for with `take`; several are one `take_all`."""
    store = ToldStore(OK)
    app = adapter.make(a(), b(skip_paths=["/free"], cost=3), store=store)
    assert [ask(app, path).status for path in ("/free", "/")] == [200, 200]
    both = [(parse("5/hour"), "k", 1), (parse("1/minute"), "k", 3)]
    assert store.asked == [("take", both[:1]), ("take_all", both)]


def test_s71_what_refuses_uses_up_nothing(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """S71: of 5/hour and 1/minute the second refuses, and the hourly one keeps its 4."""
    app = adapter.make(a(), b(), store=fixed_clock())
    answers = [ask(app) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 429, 429]
    for answer in answers[1:]:
        assert answer.limits == {
            "ratelimit-policy": '"a";q=5;w=3600, "b";q=1;w=60',
            "ratelimit": '"a";r=4;t=720, "b";r=0;t=60',
            "retry-after": "60",
        }
    assert adapter.calls == 1


def test_s72_refused_requests_leave_the_larger_limit_alone(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """S72: 31 requests on fixed windows of 10 a minute and 30 in half an hour: 10 pass, and the larger has 20 left."""
    key = {"key": lambda _: "k"}
    guards = Guard("small", "fixed 10/minute", **key), Guard("large", "fixed 30/1800s", **key)
    app = adapter.make(*guards, store=fixed_clock())
    answers = [ask(app) for _ in range(31)]
    assert [answer.status for answer in answers] == [200] * 10 + [429] * 21
    assert '"large";r=20;' in answers[-1].limits["ratelimit"]


def test_s53_limited_wherever_it_goes(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """S53: with 2/minute the third request is refused, also below mount points and for other methods."""
    app = adapter.make(Guard("a", "2/minute"), Guard("b", "100/minute"), store=fixed_clock())
    kinds: list[dict[str, Any]] = [{"path": "/x"}, {"path": "/y", "mount": "/inner"}, {"path": "/z", "method": "HEAD"}]
    assert [ask(app, **kind).status == 429 for kind in kinds] == [False, False, True]


def test_a_head_that_is_refused_has_no_body(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """The refusal of a HEAD request has the fields of a GET and no body."""
    app = adapter.make(a(), store=ToldStore(NO))
    head, get = ask(app, method="HEAD"), ask(app)
    assert (head.status, head.body, head.headers) == (429, b"", get.headers)
    assert int(dict(head.headers)["content-length"]) == len(get.body) > 0


def test_skipped_guards_are_left_out(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """By method, by path, or by a key of None: the others are decided and shown without it."""
    store = fixed_clock()
    by_key = {"key": keys.header("x-api-key", missing="skip")}
    app = adapter.make(a(skip_paths=["/free"]), b(skip_methods=["HEAD"], **by_key), store=store)
    assert ask(app, "/free").limits == {}
    assert ask(app, "/free", headers={"X-Api-Key": "x"}).limits["ratelimit-policy"] == '"b";q=1;w=60'
    assert ask(app).limits["ratelimit-policy"] == '"a";q=5;w=3600'
    assert ask(app, method="HEAD", headers={"X-Api-Key": "x"}).limits["ratelimit-policy"] == '"a";q=5;w=3600'
    assert store.peek(parse("5/hour"), "k").remaining == 3
    assert store.peek(parse("1/minute"), "x").remaining == 0


@pytest.mark.parametrize("first", [True, False])
def test_a_denied_key_charges_nothing(adapter: Adapter, ask: Callable[..., Any], first: bool) -> None:
    """Whichever guard has the DENY: 403 without a question to the store, and without limits in the answer."""
    store = ToldStore(OK)
    guards = [a(), b(key=lambda _: keys.DENY)]
    answer = ask(adapter.make(*guards[:: -1 if first else 1], store=store))
    assert (answer.status, answer.limits, store.asked) == (403, {}, [])
    assert dict(answer.headers)["cache-control"] == "no-store"


def test_keys_side_by_side_are_made_once(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Guards that share the adapter's key ask it once a request."""
    made: list[Any] = []
    guards = Guard("a", "5/hour"), Guard("b", "1/minute")
    store = ToldStore(OK)
    ask(adapter.make(*guards, store=store, key=lambda request: made.append(request) or "k"))
    assert len(made) == 1
    assert store.keys == ["k", "k"]


# -- What can't work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["Per-IP", "per-ip"])
def test_two_guards_of_one_name(adapter: Adapter, other: str) -> None:
    """Names are unique whatever their letter case."""
    with pytest.raises(ConfigError, match="two guards are named"):
        adapter.make(Guard("per-ip", "1/minute"), Guard(other, "5/hour"), store=fixed_clock())


def test_nothing_to_limit(adapter: Adapter) -> None:
    """No guard is a mistake."""
    with pytest.raises(ConfigError, match="nothing is limited without a guard"):
        adapter.make(store=fixed_clock())


def test_a_store_without_take_all(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Such a store serves one guard, and several are refused when the adapter is made."""
    store: Any = OneAtATime()
    with pytest.raises(ConfigError, match="OneAtATime has no take_all, so it can't decide guards 'a', 'b'"):
        adapter.make(a(), b(), store=store)
    assert ask(adapter.make(a(), store=store)).status == 200


def first_error(adapter: Adapter, ask: Callable[..., Any], app: Any, caplog: pytest.LogCaptureFixture) -> str:
    """What the first request that can't be limited says: the wrappers raise it, falcon logs it and answers 500."""
    if not adapter.falcon:
        with pytest.raises(ConfigError) as raised:
            ask(app)
        return str(raised.value)
    if isinstance(app, falcon.asgi.App):
        assert ask(app).status == 500
        return caplog.text
    errors: list[str] = []
    app.add_error_handler(Exception, lambda _req, _resp, ex, _params: errors.append(f"{type(ex).__name__}: {ex}"))
    ask(app)
    return errors[0]


def test_without_a_store_the_first_request_says_what_to_do(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing bound: the error names the hook and, for development, MemoryStore."""
    told = first_error(adapter, ask, adapter.make(a(), b()), caplog)
    assert "from shmlimit.adapters.gunicorn import install\n" in told
    assert "store=MemoryStore()" in told
    assert adapter.calls == 0


def test_a_bound_store_that_cannot_hold_a_policy(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What the hook made can't keep the policy: the error names `sqlite=`."""

    class Table(ToldStore):
        def supports(self, policy: Any) -> bool:
            return policy.kind != "sliding-log"

        def peek(self, policy: Any, _key: Any) -> Any:
            raise ConfigError(f"{policy} is not for tables")

    _gate.bind(Table(OK))
    told = first_error(adapter, ask, adapter.make(Guard("a", "sliding-log 5/minute"), b()), caplog)
    assert "Table can't run the policy of Guard('a', 'sliding-log 5/minute'): sliding-log 5/minute is not for" in told
    assert 'install(globals(), sqlite="limits.sqlite3")' in told


def test_the_bound_store_is_taken_at_the_first_request(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """The application may be made before the store is bound."""
    app = adapter.make(a(), b())
    store = ToldStore(OK)
    _gate.bind(store)
    assert ask(app).status == 200
    assert len(store.asked) == 1


# -- A store that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("are_open", "status"), [((True, True), 200), ((True, False), 503), ((False, True), 503)])
def test_s55_a_store_that_fails(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture, are_open: Any, status: int
) -> None:
    """S55: 503 with Retry-After if any guard is closed, and passing without fields only if all are open."""
    caplog.set_level(logging.WARNING, "shmlimit")
    store = ToldStore(StoreError("gone"))
    app = adapter.make(a(fail_open=are_open[0]), b(fail_open=are_open[1]), store=store)
    for answer in (ask(app), ask(app)):
        assert answer.status == status
        assert answer.limits == ({} if status == 200 else {"retry-after": "1"})
    store.answers = [OK]
    assert ask(app).status == 200
    begun, ended = [record.getMessage() for record in caplog.records if record.name == "shmlimit"]
    meanwhile = "requests pass unlimited" if status == 200 else "requests are answered with 503"
    assert begun == f"guards 'a', 'b': the store failed (gone); {meanwhile} until it answers again"
    assert ended == "guards 'a', 'b': the store answers again, after 2 requests"


def test_s55_only_guards_that_apply_are_asked_whether_they_are_open(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """A closed guard that a path skips doesn't keep the request from passing."""
    app = adapter.make(a(fail_open=True), b(skip_paths=["/free"]), store=ToldStore(StoreError("gone")))
    assert [ask(app, path).status for path in ("/free", "/")] == [200, 503]


# -- Fields ----------------------------------------------------------------------------------------------------------

ROWS = [json.loads(row) for row in (Path(__file__).parents[1] / "vectors" / "fields.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_vectors(
    adapter: Adapter, ask: Callable[..., Any], row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter can't be made, or the response has exactly the row's status and fields."""

    def make() -> Any:
        guards = [Guard(g["name"], g["policy"], **g["options"]) for g in row["guards"]]
        store = ToldStore(*[Decision(**decision) for decision in row["decisions"]])
        monkeypatch.setattr(_gate.time, "time_ns", lambda: row["now_us"] * 1000)
        return adapter.make(*guards, store=store, key=lambda _: "k", headers=row.get("app_headers", ()))

    if row["want"] == "CONFIG-ERROR":
        with pytest.raises(ConfigError):
            make()
        return
    answer = ask(make())
    assert answer.status == row["status"]
    assert answer.limits == {name.lower(): value for name, value in row["want"].items()}


def test_fields_of_the_application_give_way(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """RateLimit fields of an inner application are replaced, its Retry-After and all else is left alone."""
    inner = [("RateLimit", '"x";r=1;t=1'), ("RateLimit-Policy", '"x";q=1;w=1'), ("Retry-After", "9"), ("X-Own", "yes")]
    answer = ask(adapter.make(a(), b(), store=ToldStore(OK), headers=inner))
    assert answer.limits == {
        "ratelimit-policy": '"a";q=5;w=3600, "b";q=1;w=60',
        "ratelimit": '"a";r=9;t=6, "b";r=9;t=6',
        "retry-after": "9",
    }
    assert dict(answer.headers)["x-own"] == "yes"


@pytest.mark.parametrize("headers", ["draft", "legacy", "both", "draft-7"])
def test_one_generation_in_a_response(adapter: Adapter, ask: Callable[..., Any], headers: str) -> None:
    """Whatever generation an inner limiter wrote, its fields give way as a whole to the outer one's."""
    inner = [("RateLimit-Limit", "7"), ("X-RateLimit-Limit", "7"), ("X-RateLimit-Used", "3")]
    limits = ask(adapter.make(a(headers=headers), store=ToldStore(OK), headers=inner)).limits
    draft = {name for name in limits if name.startswith("ratelimit")}
    legacy = {name for name in limits if name.startswith("x-ratelimit")}
    ours = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}
    assert draft == ({"ratelimit-limit"} if headers == "legacy" else {"ratelimit", "ratelimit-policy"})
    assert legacy == (ours if headers in {"legacy", "both"} else {"x-ratelimit-limit", "x-ratelimit-used"})


def test_partition_has_the_secret_of_the_store(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Two keys have two `pk`, each the same in every response; nobody reads the key in it."""
    store = MemoryStore()
    app = adapter.make(a(partition=True, key=keys.header("x-key")), b(cost=0), store=store)
    pks = {}
    for who in ("alice", "bob", "alice"):
        limits = ask(app, headers={"x-key": who}).limits
        pk = limits["ratelimit"].partition(";pk=")[2].partition(";")[0]
        assert limits["ratelimit-policy"] == f'"a";pk={pk};q=5;w=3600, "b";q=1;w=60'
        assert pks.setdefault(who, pk) == pk
        assert who not in limits["ratelimit"]
    assert len(set(pks.values())) == 2


def test_partition_without_a_secret_is_a_mistake(adapter: Adapter) -> None:
    """A store without a secret is refused when the limiter is made, unless the guard has one of its own."""
    with pytest.raises(ConfigError, match="needs a store with a secret"):
        adapter.make(a(partition=True), store=ToldStore(OK))
    adapter.make(a(partition=b"sixteen bytes or more"), store=ToldStore(OK))


def test_refusals_as_problems(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """429, 503 and 403 are application/problem+json where a guard asks for it, with the same fields as ever."""
    store = ToldStore(NO)
    app = adapter.make(a(problem=True), store=store)
    refused = ask(app)
    store.answers = [StoreError("gone")]
    failed = ask(app)
    nobody = ask(adapter.make(a(problem=True, key=lambda _: keys.DENY), store=ToldStore(OK)))
    for answer, status in ((refused, 429), (failed, 503), (nobody, 403)):
        assert answer.status == json.loads(answer.body)["status"] == status
        assert dict(answer.headers)["content-type"] == "application/problem+json"
        assert dict(answer.headers)["cache-control"] == "no-store"
        assert dict(answer.headers)["content-length"] == str(len(answer.body))
    assert json.loads(refused.body)["violated-policies"] == ["a"]
    assert refused.limits == {"ratelimit-policy": '"a";q=5;w=3600', "ratelimit": '"a";r=0;t=6', "retry-after": "6"}
    assert failed.limits == {"retry-after": "1"}


def test_fields_of_the_application_stay_where_there_are_none(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """A request that isn't limited leaves the application's fields as they are."""
    inner = [("RateLimit", '"x";r=1;t=1')]
    app = adapter.make(a(skip_paths=["/"]), store=ToldStore(OK), headers=inner)
    assert ask(app).limits == {"ratelimit": '"x";r=1;t=1'}


# -- The route -------------------------------------------------------------------------------------------------------


def test_s54_one_bucket_for_a_route(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """S54: falcon counts by template; the wrappers, which stand before any router, by method and path."""
    app = adapter.make(Guard("a", "2/minute", key=keys.route), store=fixed_clock())
    statuses = [ask(app, f"/items/{item}").status for item in range(4)]
    assert statuses == ([200, 200, 429, 429] if adapter.falcon else [200] * 4)
    assert [ask(app, "/items/0").status for _ in range(2)] == ([429, 429] if adapter.falcon else [200, 429])


def test_guards_of_the_route_are_a_second_step(adapter: Adapter, ask: Callable[..., Any]) -> None:
    """Falcon charges them after the others, which keep their charge; the wrappers all at once. Order is kept."""
    route = Guard("route", "1/minute", key=keys.compose(keys.route, lambda _: "k"))
    store = fixed_clock()
    app = adapter.make(route, a(), store=store)
    answers = [ask(app, "/items/1"), ask(app, "/items/1")]
    assert [answer.status for answer in answers] == [200, 429]
    assert [answer.limits["ratelimit-policy"] for answer in answers] == ['"route";q=1;w=60, "a";q=5;w=3600'] * 2
    assert store.peek(parse("5/hour"), "k").remaining == (3 if adapter.falcon else 4)
    assert answers[1].limits["ratelimit"] == f'"route";r=0;t=60, "a";r={3 if adapter.falcon else 4};t=720'
    assert answers[1].limits["retry-after"] == "60"
    missing = ask(app, "/no/such/page")
    policies = missing.limits["ratelimit-policy"]
    assert policies == ('"a";q=5;w=3600' if adapter.falcon else '"route";q=1;w=60, "a";q=5;w=3600')
