"""What limiters say in the log, through every adapter: who is refused, and outages of the store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shmlimit import parse
from shmlimit.adapters import _outcome
from shmlimit.errors import StoreError
from shmlimit.stores.memory import MemoryStore
from tests.adapters.adapter import ADAPTERS, Adapter, Flaky, a, b, failed_logins, fixed_clock, header_of


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return Adapter(request.param)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def now_us(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of the log and of stores that are made with it, which tests move on."""
    now = [1_750_000_000_000_000]
    monkeypatch.setattr(_outcome, "time", SimpleNamespace(monotonic_ns=lambda: now[0] * 1000))
    return now


def test_refusals_are_told_once_and_their_end(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture, now_us: list[int]
) -> None:
    """One line when a key begins to be refused, one when it is allowed again, whatever the number of requests; what it
    may take with a cost of 0, or what others may, is not its end.
    """
    caplog.set_level(logging.INFO, "shmlimit")
    app = adapter.make(
        b(key=lambda request: header_of(request, "x-key"), cost=lambda request: int(header_of(request, "x-cost"))),
        store=MemoryStore(clock=lambda: now_us[0]),
    )

    def send(key: str = "k", cost: int = 1) -> None:
        ask(app, headers={"x-key": key, "x-cost": str(cost)})

    for _ in range(5):
        send()
        now_us[0] += 500_000
    now_us[0] += 60_000_000
    send(cost=0)
    send("other")
    assert len(caplog.records) == 1
    send()
    send()
    first, second, third = [record.shmlimit for record in caplog.records]
    assert first == {
        "event": "refused", "guard": "b", "key": "k", "policy": "1/minute", "cost": 1, "retry_after": 59.5
    }  # fmt: skip
    assert second == {"event": "allowed again", "guard": "b", "key": "k", "refusals": 4, "seconds": 1.5}
    assert third["event"] == "refused"
    assert caplog.records[0].getMessage() == ("refused: guard='b' key='k' policy='1/minute' cost=1 retry_after=59.5")
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_a_key_that_always_asks_for_too_much_is_told_once(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture, now_us: list[int]
) -> None:
    """At twice its rate a key is allowed and refused by turns: that is one line, and the end comes a minute after the
    last refusal, not earlier.
    """
    caplog.set_level(logging.INFO, "shmlimit")
    app = adapter.make(a(policy="2/second"), store=MemoryStore(clock=lambda: now_us[0]))
    statuses = []
    for _ in range(40):
        now_us[0] += 250_000
        statuses.append(ask(app).status)
    assert statuses[-4:] == [200, 429, 200, 429]
    now_us[0] += 59_999_999
    ask(app)
    assert [record.shmlimit["event"] for record in caplog.records] == ["refused"]
    now_us[0] += 1
    ask(app)
    assert [record.shmlimit["event"] for record in caplog.records] == ["refused", "allowed again"]
    assert caplog.records[1].shmlimit["refusals"] == statuses.count(429)


def test_keys_can_be_hashed_in_the_log(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With log_keys="hash" the log has what `pk` says, and never the key."""
    caplog.set_level(logging.INFO, "shmlimit")
    app = adapter.make(b(key=lambda _: "secret-token", log_keys="hash", partition=True), store=fixed_clock())
    answer, _ = ask(app), ask(app)
    pk = answer.limits["ratelimit"].partition(";pk=")[2].partition(";")[0]
    (record,) = caplog.records
    assert record.shmlimit["key"] == pk
    assert "secret-token" not in record.getMessage() + str(record.__dict__)


def test_the_log_remembers_a_bounded_number_of_keys(
    adapter: Adapter,
    ask: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    now_us: list[int],
) -> None:
    """A flood of refused keys grows neither the memory nor the log: others aren't followed, which is told once, until
    the one that was refused longest ago is quiet and gives way, which is told too.
    """
    caplog.set_level(logging.INFO, "shmlimit")
    monkeypatch.setattr(_outcome.Refusals, "MOST", 2)
    app = adapter.make(b(policy="1/day", key=lambda request: header_of(request, "x-name")), store=fixed_clock())

    def told(names: str) -> list[tuple[Any, Any]]:
        caplog.clear()
        for name in names:
            ask(app, headers={"x-name": name})
        return [(record.shmlimit["event"], record.shmlimit.get("key")) for record in caplog.records]

    assert told("abcd") == []
    assert told("abcdcda") == [("refused", "a"), ("refused", "b"), ("too many to follow", None)]
    now_us[0] += 59_999_999
    assert told("acd") == []
    now_us[0] += 1
    assert told("cda") == [("no longer followed", None), ("refused", "c"), ("too many to follow", None)]
    assert caplog.records[0].shmlimit == {"event": "no longer followed", "guard": "b", "refusals": 1}  # that was b
    assert caplog.records[2].shmlimit == {"event": "too many to follow", "guard": "b", "keys": 2}


def test_the_longest_quiet_key_gives_way(
    adapter: Adapter,
    ask: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    now_us: list[int],
) -> None:
    """Also where it was asked before whether it does: `a` is quiet after a minute, while `b` was refused since."""
    caplog.set_level(logging.INFO, "shmlimit")
    monkeypatch.setattr(_outcome.Refusals, "MOST", 2)
    app = adapter.make(b(policy="1/day", key=lambda request: header_of(request, "x-name")), store=fixed_clock())
    for step_us, names in ((0, "abcbaa"), (30_000_000, "bc"), (30_000_000, "c")):
        now_us[0] += step_us
        for name in names:
            ask(app, headers={"x-name": name})
    events = [record.shmlimit for record in caplog.records]
    assert [event["event"] for event in events] == [
        "refused",
        "refused",
        "too many to follow",
        "no longer followed",
        "refused",
    ]
    assert [event.get("key") for event in events] == ["b", "a", None, None, "c"]
    assert events[3]["refusals"] == 2  # those of a


# ---- outages in the log ----------------------------------------------------------------------------------------------


def outages(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_an_outage_of_one_phase_is_told_once(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A store that can look but not write (a full disk) fails after each response: two lines for all of it, although it
    answered before each of them.
    """
    store = Flaky()
    app = adapter.make(failed_logins(), store=store)
    adapter.status = 401
    store.failing = ("take",)
    assert [ask(app).status for _ in range(3)] == [503] * 3
    (begun,) = outages(caplog)
    assert begun.startswith(
        "guard 'logins', charging responses: the store failed (gone); requests are answered with 503"
    )
    store.failing = ()
    adapter.status = 200
    ask(app)
    assert outages(caplog) == []  # nothing was charged
    adapter.status = 401
    assert [ask(app).status for _ in range(2)] == [401, 401]
    assert outages(caplog) == ["guard 'logins', charging responses: the store answers again, after 3 requests"]


def test_an_outage_of_half_a_store_is_told_once(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A store that answers for one guard and fails for another (a table and a file): two lines for all of it."""

    class Half(MemoryStore):
        broken = True

        def take(self, policy: Any, *arguments: Any, **named: Any) -> Any:
            if self.broken and policy == parse("1/minute"):
                raise StoreError("gone")
            return super().take(policy, *arguments, **named)

    store = Half(clock=lambda: 1_750_000_000_000_000)
    app = adapter.make(a(paths=["/a"]), b(paths=["/b"]), store=store)
    assert [ask(app, path).status for path in ("/a", "/b", "/a", "/b", "/a")] == [200, 503, 200, 503, 200]
    assert outages(caplog) == [
        "guard 'b': the store failed (gone); requests are answered with 503 until it answers again"
    ]
    store.broken = False
    assert [ask(app, path).status for path in ("/b", "/a")] == [200, 200]
    assert outages(caplog) == ["guard 'b': the store answers again, after 2 requests"]


def test_an_outage_beside_a_shadow_ends(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The shadow isn't asked while the other guard can't be, and is no part of its outage."""
    store = Flaky()
    app = adapter.make(a(), b(shadow=True), store=store)
    store.failing = ("take",)
    assert [ask(app).status for _ in range(2)] == [503] * 2
    store.failing = ()
    assert ask(app).status == 200
    assert outages(caplog) == [
        "guard 'a': the store failed (gone); requests are answered with 503 until it answers again",
        "guard 'a': the store answers again, after 2 requests",
    ]


def test_what_was_only_looked_at_ends_no_outage(
    adapter: Adapter, ask: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal by a guard that is charged later takes nothing, so it says nothing of a store that can't write."""
    store = Flaky()
    store.take(parse("3/hour"), "spent", 3)
    key = {"key": lambda request: header_of(request, "x-key")}
    app = adapter.make(a(**key), failed_logins(**key), store=store)

    def statuses(*names: str) -> list[int]:
        return [ask(app, headers={"x-key": name}).status for name in names]

    store.failing = ("take", "take_all")
    assert statuses("spent", "other", "spent", "other") == [429, 503, 429, 503]
    (begun,) = outages(caplog)
    assert begun.startswith("guards 'a', 'logins': the store failed")
    store.failing = ()
    assert statuses("spent", "other") == [429, 200]
    assert outages(caplog) == ["guards 'a', 'logins': the store answers again, after 2 requests"]
