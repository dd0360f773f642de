"""The demo's routes, each with the limits that it promises."""

from collections.abc import Callable
from typing import Any

import pytest

from shmlimit import parse
from shmlimit.adapters import _gate
from shmlimit.demo import create_app
from shmlimit.errors import ConfigError
from shmlimit.stores.memory import MemoryStore

NOW_US = 1_750_000_000_250_000
ALICE = {"X-Api-Key": "alice"}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(clock=lambda: NOW_US)


@pytest.fixture(params=[False, True], ids=["wsgi", "asgi"])
def app(request: pytest.FixtureRequest, store: MemoryStore) -> Any:
    return create_app(asgi=request.param, store=store)


def test_home(app: Any, ask: Callable[..., Any]) -> None:
    """`/` has 10 a minute for each address, and says which worker answered."""
    answers = [ask(app) for _ in range(11)]
    assert [answer.status for answer in answers] == [200] * 10 + [429]
    assert b'"worker":' in answers[0].body
    assert answers[0].limits == {"ratelimit-policy": '"per-ip";q=10;w=60', "ratelimit": '"per-ip";r=9;t=6'}
    assert ask(app, peer="203.0.113.8").status == 200


def test_healthz(app: Any, ask: Callable[..., Any]) -> None:
    """`/healthz` isn't limited."""
    answers = [ask(app, "/healthz") for _ in range(20)]
    assert {answer.status for answer in answers} == {200}
    assert answers[0].limits == {}
    assert b'"worker":' in answers[0].body


def test_search(app: Any, store: MemoryStore, ask: Callable[..., Any]) -> None:
    """`/search`: burst, hourly and address in one step, listed in this order; what burst refuses uses up nothing."""
    answers = [ask(app, "/search", headers=ALICE) for _ in range(7)]
    assert [answer.status for answer in answers] == [200] * 5 + [429] * 2
    assert b'"worker":' in answers[0].body
    assert answers[-1].limits == {
        "ratelimit-policy": '"burst";q=5;w=1, "hourly";q=100;w=3600, "address";q=600;w=60',
        "ratelimit": '"burst";r=0;t=1, "hourly";r=95;t=36, "address";r=595;t=1',
        "retry-after": "1",
    }
    assert ask(app, "/search", headers={"X-Api-Key": "bob"}).status == 200
    assert store.peek(parse("600/minute"), "ip:203.0.113.7").remaining == 594


def test_reports(app: Any, ask: Callable[..., Any]) -> None:
    """`/reports`: a sliding log of 5 a minute by key, and the address; both take the address where there is no key."""
    answers = [ask(app, "/reports", headers=ALICE) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 5 + [429]
    assert answers[-1].limits == {
        "ratelimit-policy": '"reports";q=5;w=60, "address";q=600;w=60',
        "ratelimit": '"reports";r=0;t=60, "address";r=595;t=1',
        "retry-after": "60",
    }
    assert ask(app, "/reports").status == 200
    assert ask(app, "/reports", peer="203.0.113.8").status == 200


def test_the_address_is_one_count(app: Any, ask: Callable[..., Any]) -> None:
    """Whatever keys a client makes up, its address has 600 a minute over both routes."""
    statuses = [
        ask(app, path, headers={"X-Api-Key": f"made-up-{number}"}).status
        for number in range(305)
        for path in ("/search", "/reports")
    ]
    assert statuses == [200] * 600 + [429] * 10


def test_reports_without_a_file(ask: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """Under a hook without `sqlite=` only `/reports` fails, and the log says what is missing."""

    class Table(MemoryStore):
        def supports(self, policy: Any) -> bool:
            return policy.kind != "sliding-log"

    _gate.bind(Table(clock=lambda: NOW_US))
    app = create_app(asgi=True)
    assert ask(app, "/search").status == 200
    assert ask(app, "/reports").status == 500
    assert ConfigError.__name__ in caplog.text
    assert 'install(globals(), sqlite="limits.sqlite3")' in caplog.text
