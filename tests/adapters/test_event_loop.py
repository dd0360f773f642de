"""Where an event loop asks a store itself, and where it must not: a store that waits is asked in a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmlimit import SharedTable
from shmlimit.adapters import _gate
from shmlimit.guard import Guard
from shmlimit.policies.base import Decision
from shmlimit.stores.local import LocalStore
from shmlimit.stores.memory import MemoryStore
from shmlimit.stores.sqlite import SqliteStore
from tests.adapters.adapter import ADAPTERS, NOW_US, Adapter, failed_logins

LOG = "sliding-log 5/minute"
WINDOW = "fixed 5/minute"


@pytest.fixture(params=["falcon asgi", "asgi"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return Adapter(request.param)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A store of each kind, by name."""
    name = f"shmlimit-test-loop-{os.getpid()}"
    with SharedTable.create(name, 1024) as table, SqliteStore(tmp_path / "limits.sqlite3") as sqlite:
        try:
            yield {"table": table, "local": LocalStore(table, sqlite), "sqlite": sqlite, "memory": MemoryStore()}
        finally:
            table.unlink()


class Threads:
    """Notes the threads in which stores are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *stores: Any) -> None:
        self.seen: list[int] = []
        for store in stores:
            for name in ("take", "take_all", "peek"):
                monkeypatch.setattr(store, name, self._noting(getattr(store, name)))

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **named: Any) -> Any:
            self.seen.append(threading.get_ident())
            return method(*arguments, **named)

        return noting

    def in_loop(self) -> bool:
        """Whether all were asked in this thread, which is the loop's; they must have been asked."""
        here = {ident == threading.get_ident() for ident in self.seen}
        assert len(here) == 1
        return here.pop()


@pytest.mark.parametrize(
    ("name", "policies", "part", "in_loop"),
    [
        ("table", [WINDOW], "table", True),
        ("table", [WINDOW, "100/hour"], "table", True),
        ("memory", [LOG], "memory", True),
        ("local", [WINDOW], "table", True),
        ("local", [WINDOW, "100/hour"], "table", True),
        ("local", [LOG], "sqlite", False),
        ("local", [WINDOW, LOG], "local", False),
        ("sqlite", [WINDOW], "sqlite", False),
        ("sqlite", [WINDOW, LOG], "sqlite", False),
    ],
)
def test_what_waits_is_asked_in_a_thread(
    stores: dict[str, Any],
    adapter: Adapter,
    ask: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    policies: list[str],
    part: str,
    in_loop: bool,
) -> None:
    """The table and memory are asked on the loop, a file never; of LocalStore the part that decides says it."""
    threads = Threads(monkeypatch, stores[part])
    guards = [Guard(f"guard {policy}", policy, key=lambda _: "k") for policy in policies]
    app = adapter.make(*guards, store=stores[name])
    assert [ask(app).status for _ in range(6)] == [200] * 5 + [429]
    assert threads.in_loop() is in_loop


class RefusesByCoroutine:
    """Put before a store: its `take` says what the store says, and its coroutine refuses."""

    async def atake(self, *arguments: Any, **named: Any) -> Any:
        decision = await super().atake(*arguments, **named)  # type: ignore[misc]
        return decision._replace(allowed=False, retry_after_us=1_000_000)


class OwnMemory(RefusesByCoroutine, MemoryStore):
    pass


class OwnLocal(RefusesByCoroutine, LocalStore):
    pass


class OwnTable(RefusesByCoroutine, SharedTable):
    pass


def test_coroutine_of_ones_own_is_asked(stores: dict[str, Any], adapter: Adapter, ask: Callable[..., Any]) -> None:
    """What inherits from a store that never waits may have something else to say."""
    with OwnTable.attach(stores["table"].name) as table:
        for store in (OwnMemory(), OwnLocal(stores["table"], stores["sqlite"]), table):
            app = adapter.make(Guard("per-key", WINDOW, key=lambda _: "k"), store=store)
            assert ask(app).status == 429, store


@pytest.mark.parametrize("kind", ADAPTERS)
def test_take_of_ones_own_is_asked(
    stores: dict[str, Any], kind: str, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LocalStore's `take` decides, and not its table's: also one that was put there later."""
    store = stores["local"]
    app = Adapter(kind).make(Guard("per-key", WINDOW, key=lambda _: "k"), store=store)
    assert ask(app).status == 200
    refusing = lambda policy, key, cost=1: Decision(False, 5, 0, 60_000_000, 60_000_000, 60_000_000)  # noqa: ARG005, E731
    monkeypatch.setattr(store, "take", refusing)
    assert ask(app).status == 429


@pytest.mark.parametrize(("blocks", "in_loop"), [(False, True), (True, False), (0, False), (None, False)])
def test_store_must_say_that_it_never_waits(
    adapter: Adapter, ask: Callable[..., Any], *, blocks: Any, in_loop: bool
) -> None:
    """Whatever else it calls so is no promise."""
    seen: list[int] = []

    class Foreign:
        def supports(self, _policy: Any) -> bool:
            return True

        def take(self, policy: Any, _key: Any, cost: int = 1) -> Decision:
            seen.append(threading.get_ident())
            return policy.decide(None, NOW_US, cost)[0]

    Foreign.blocks = blocks  # type: ignore[attr-defined]
    store: Any = Foreign()
    assert ask(adapter.make(Guard("per-key", WINDOW, key=lambda _: "k"), store=store)).status == 200
    assert (seen == [threading.get_ident()]) is in_loop


@pytest.mark.parametrize(("name", "in_loop"), [("table", True), ("sqlite", False)])
def test_so_is_what_the_response_consumes(
    stores: dict[str, Any],
    adapter: Adapter,
    ask: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str,
    in_loop: bool,
) -> None:
    """The looks before the response (a second one where little is left), and the charge after it."""
    threads = Threads(monkeypatch, stores[name])
    adapter.status = 401
    app = adapter.make(failed_logins(), store=stores[name])
    assert [ask(app).status for _ in range(4)] == [401, 401, 401, 429]
    assert len(threads.seen) == 8
    assert threads.in_loop() is in_loop


@pytest.mark.parametrize("chosen", [LOG, WINDOW])
def test_policy_of_the_request_may_be_one_that_waits(
    stores: dict[str, Any], adapter: Adapter, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    """Which part of LocalStore decides is then not known before."""
    threads = Threads(monkeypatch, stores["sqlite"])
    app = adapter.make(Guard("tier", lambda _: chosen, key=lambda _: "k"), store=stores["local"])
    assert [ask(app).status for _ in range(6)] == [200] * 5 + [429]
    assert threads.seen == [] if chosen == WINDOW else not threads.in_loop()


def test_bound_store_is_asked_the_same_way(
    stores: dict[str, Any], adapter: Adapter, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store is known only at the first request."""
    threads = Threads(monkeypatch, stores["sqlite"])
    app = adapter.make(Guard("per-key", WINDOW, key=lambda _: "k"))
    _gate.bind(stores["sqlite"])
    assert [ask(app).status for _ in range(6)] == [200] * 5 + [429]
    assert not threads.in_loop()
