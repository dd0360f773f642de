"""`install(globals())`: with the user's hooks, by gunicorn's own rules, and in the configuration of a real server."""

import functools
import hashlib
import logging
import os
import runpy
import subprocess
import sys
import types
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
from gunicorn.config import Config

from shmlimit import SharedTable, parse
from shmlimit.adapters import _gate
from shmlimit.adapters import gunicorn as hook
from shmlimit.errors import ConfigError, StoreError
from shmlimit.stores.local import LocalStore

ROOT = Path(__file__).parents[2]
FILE = "/srv/app/gunicorn.conf.py"
calls: list[str] = []


def record(label: str, server: Any) -> None:
    """Remember that a hook ran, and whether the table was there."""
    calls.append(f"{label} {'after' if _gate.bound_store() else 'before'}")


def module_hook(server: Any) -> None:
    """A hook to be named by a text."""
    record("text", server)


class Hooks:
    """Hooks of other shapes."""

    def method(self, server: Any) -> None:
        record("method", server)

    def __call__(self, server: Any) -> None:
        record("object", server)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was opened, instead of tables."""
    tables: list[tuple[Any, ...]] = []

    def fake_open(name: str, slots: int, sqlite: str | None) -> Any:
        tables.append((name, slots) if sqlite is None else (name, slots, sqlite))
        return types.SimpleNamespace(name=name)

    calls.clear()
    monkeypatch.setattr(hook, "_open", fake_open)
    monkeypatch.setattr(hook, "_running", None)
    monkeypatch.setattr(_gate, "_bound", None)
    monkeypatch.setitem(sys.modules, "hook_module", types.SimpleNamespace(module_hook=module_hook))
    return tables


@pytest.fixture
def server() -> Any:
    return types.SimpleNamespace(log=logging.getLogger("gunicorn.error"), cfg=Config())


def load(namespace: dict[str, Any]) -> Config:
    """The configuration that gunicorn makes of a file's names."""
    config = Config()
    for name, value in namespace.items():
        if name in config.settings:
            config.set(name, value)
    return config


def test_install_opens_nothing(opened: list[tuple[Any, ...]], server: Any) -> None:
    """The table is opened and bound in when_ready, not when the file is read, and by the name and size given."""
    namespace: dict[str, Any] = {}
    hook.install(namespace, name="a", slots=128)
    config = load(namespace)
    assert (opened, _gate.bound_store()) == ([], None)
    config.when_ready(server)
    assert opened == [("a", 128)]
    assert _gate.bound_store() == types.SimpleNamespace(name="a")


def test_only_two_names_are_set(opened: list[tuple[Any, ...]]) -> None:
    """Nothing but the two hooks gets into the user's configuration, so no other setting changes."""
    namespace: dict[str, Any] = {"workers": 3}
    hook.install(namespace, name="a")
    assert set(namespace) == {"workers", "when_ready", "on_reload"}


@pytest.mark.parametrize(
    ("user_hook", "label"),
    [
        (lambda server: record("function", server), "function"),
        (functools.partial(record, "partial"), "partial"),
        (Hooks().method, "method"),
        (Hooks(), "object"),
        ("hook_module.module_hook", "text"),
    ],
    ids=["function", "partial", "method", "object", "text"],
)
def test_hooks_of_the_user_are_kept(opened: list[tuple[Any, ...]], server: Any, user_hook: Any, label: str) -> None:
    """Whatever gunicorn takes for a hook runs as before, when_ready with the table in place."""
    namespace = {"when_ready": user_hook, "on_reload": user_hook}
    hook.install(namespace, name="a")
    config = load(namespace)
    config.when_ready(server)
    config.on_reload(server)
    assert calls == [f"{label} after"] * 2
    assert opened == [("a", 65536)]


@pytest.mark.parametrize("name", ["when_ready", "on_reload"])
@pytest.mark.parametrize(
    "user_hook",
    [lambda: None, lambda *_: None, lambda _a, _b: None, 7, None, "nodots", "no.such.module", "hook_module.no"],
)
def test_hooks_that_gunicorn_refuses_are_refused(opened: list[tuple[Any, ...]], name: str, user_hook: Any) -> None:
    """A hook of another arity, or one that isn't there, is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=name):
        hook.install({name: user_hook}, name="a")


def test_a_file_that_is_read_again(opened: list[tuple[Any, ...]], server: Any) -> None:
    """HUP runs the file again: nothing is opened again, and each hook runs once."""
    namespace: dict[str, Any] = {}
    for _ in range(3):  # the start and two reloads, each with a new namespace
        namespace = {"on_reload": functools.partial(record, "reload"), "when_ready": functools.partial(record, "ready")}
        hook.install(namespace, name="a")
        if not opened:
            load(namespace).when_ready(server)
    load(namespace).on_reload(server)
    assert (opened, calls) == ([("a", 65536)], ["ready after", "reload after"])


def test_installed_twice_in_one_namespace(opened: list[tuple[Any, ...]], server: Any) -> None:
    """A file that imports another's names and installs again has one table, the last, and each hook runs once."""
    namespace: dict[str, Any] = {"when_ready": functools.partial(record, "ready")}
    hook.install(namespace, name="base")
    hook.install(namespace, name="a", slots=128)
    load(namespace).when_ready(server)
    assert (opened, calls) == ([("a", 128)], ["ready after"])


def test_a_warning_while_opening_is_logged(
    monkeypatch: pytest.MonkeyPatch, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A table of another size is used, and the server's log says so: a daemon has no standard error."""

    def open_with_a_warning(name: str, slots: int, sqlite: str | None) -> Any:
        warnings.warn("64 slots, not 128", RuntimeWarning, stacklevel=2)
        return types.SimpleNamespace(name=name)

    monkeypatch.setattr(hook, "_open", open_with_a_warning)
    namespace: dict[str, Any] = {}
    hook.install(namespace, name="a", slots=128)
    load(namespace).when_ready(server)
    assert "shmlimit: 64 slots, not 128" in caplog.messages


@pytest.mark.parametrize(("name", "slots"), [("a", 256), ("b", 128)])
def test_a_change_at_reload_is_a_warning(
    opened: list[tuple[Any, ...]], server: Any, caplog: pytest.LogCaptureFixture, name: str, slots: int
) -> None:
    """Another name or size at HUP is not used, and the log says that it takes a restart."""
    first: dict[str, Any] = {}
    hook.install(first, name="a", slots=128)
    load(first).when_ready(server)
    bound = _gate.bound_store()
    load(first).on_reload(server)
    assert caplog.records == []
    second: dict[str, Any] = {}
    hook.install(second, name=name, slots=slots)
    load(second).on_reload(server)
    assert _gate.bound_store() is bound
    assert opened == [("a", 128)]
    assert [record.getMessage() for record in caplog.records] == [
        f"shmlimit: the table stays 'a' with 128 slots; restart the server to use {name!r} with {slots} slots"
    ]


@pytest.mark.parametrize(("before", "after"), [(None, "b.sqlite3"), ("a.sqlite3", "b.sqlite3"), ("a.sqlite3", None)])
def test_another_file_at_reload_is_a_warning(
    opened: list[tuple[Any, ...]], server: Any, caplog: pytest.LogCaptureFixture, before: Any, after: Any
) -> None:
    """Another file at HUP is not used either, and the log says so."""
    first: dict[str, Any] = {}
    hook.install(first, name="a", slots=128, sqlite=before)
    load(first).when_ready(server)
    load(first).on_reload(server)
    assert caplog.records == []
    second: dict[str, Any] = {}
    hook.install(second, name="a", slots=128, sqlite=after)
    load(second).on_reload(server)
    assert len(opened) == 1
    old, new = (f" and the file {file!r}" if file else "" for file in (before, after))
    assert [record.getMessage() for record in caplog.records] == [
        f"shmlimit: the table stays 'a' with 128 slots{old}; restart the server to use 'a' with 128 slots{new}"
    ]


@pytest.mark.parametrize("sqlite", ["limits.sqlite3", Path("limits.sqlite3")], ids=["text", "path"])
def test_a_file_beside_the_table(
    name: str, server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sqlite: Any
) -> None:
    """With `sqlite` the bound store has all policies; the file is made by the first decision that needs it, where the
    server works, and stays there when the application goes elsewhere.
    """
    monkeypatch.setattr(hook, "_running", None)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    hook.install(namespace, name=name, slots=64, sqlite=sqlite)
    load(namespace).when_ready(server)
    store = _gate.bound_store()
    assert isinstance(store, LocalStore)
    monkeypatch.chdir("/")
    try:
        assert store.take(parse("5/minute"), "k").remaining == 4
        assert list(tmp_path.iterdir()) == []
        assert store.take(parse("sliding-log 5/minute"), "k").remaining == 4
        assert (tmp_path / "limits.sqlite3").exists()
    finally:
        store.close()


def test_without_a_file_the_table_is_the_store(name: str, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of SQLite is there that nobody asked for."""
    monkeypatch.setattr(hook, "_running", None)
    namespace: dict[str, Any] = {}
    hook.install(namespace, name=name, slots=64)
    load(namespace).when_ready(server)
    store = _gate.bound_store()
    assert isinstance(store, SharedTable)
    store.close()


def test_installed_by_a_reload(opened: list[tuple[Any, ...]], server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A server that started without the hook is told to restart."""
    namespace: dict[str, Any] = {}
    hook.install(namespace, name="a")
    load(namespace).on_reload(server)
    assert (opened, _gate.bound_store()) == ([], None)
    assert "no table was opened when this server started; restart the server" in caplog.text


@pytest.mark.parametrize(
    "error", [StoreError("no space for 1 MiB"), ConfigError("slots are few"), PermissionError("no")]
)
def test_a_table_that_cannot_be_opened_ends_the_server(
    opened: list[tuple[Any, ...]],
    server: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Any,
) -> None:
    """Without a table the server doesn't start: the reason is logged, and the user's hook isn't called."""

    def refuse(name: str, slots: int, sqlite: str | None) -> Any:
        raise error

    monkeypatch.setattr(hook, "_open", refuse)
    namespace: dict[str, Any] = {"when_ready": functools.partial(record, "ready")}
    hook.install(namespace, name="a")
    with pytest.raises(SystemExit) as stopped:
        load(namespace).when_ready(server)
    assert stopped.value.code == 1
    assert f"shmlimit: can't open the table 'a': {error}" in caplog.text
    assert (calls, _gate.bound_store()) == ([], None)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({}, False),
        ({"worker_class": "gthread"}, False),
        ({"worker_class": "gthread", "proxy_protocol": "v1"}, True),
        ({"threads": 2, "proxy_protocol": "auto"}, True),  # gunicorn makes sync workers with threads gthread
        ({"worker_class": "gthread", "proxy_protocol": "v1", "keepalive": 0}, False),
        ({"worker_class": "sync", "proxy_protocol": "v2"}, False),
        ({"worker_class": "asgi", "proxy_protocol": "v1"}, False),
    ],
    ids=str,
)
def test_settings_that_tell_wrong_addresses_end_the_server(
    opened: list[tuple[Any, ...]], server: Any, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], wrong: bool
) -> None:
    """The PROXY protocol in gthread workers that keep connections: no start, with advice; at a HUP an error."""
    namespace: dict[str, Any] = {}
    hook.install(namespace, name="a")
    for setting, value in settings.items():
        server.cfg.set(setting, value)
    advice = "Set keepalive = 0 (--keep-alive 0), or take another worker class"
    if wrong:
        with pytest.raises(SystemExit) as stopped:
            load(namespace).when_ready(server)
        assert (stopped.value.code, opened) == (1, [])
        assert advice in caplog.text
        caplog.clear()
    else:
        load(namespace).when_ready(server)
    load(namespace).on_reload(server)
    levels = [record.levelname for record in caplog.records if advice in record.message]
    assert levels == (["ERROR"] if wrong else [])


def test_the_default_name(opened: list[tuple[Any, ...]], server: Any) -> None:
    """Without a name the table is named after the user and the file, the same at each start."""
    digest = hashlib.sha1(f"{os.getuid()}:{FILE}".encode()).hexdigest()
    for path in (FILE, FILE, "/srv/other/gunicorn.conf.py"):
        namespace: dict[str, Any] = {"__file__": path}
        hook.install(namespace)
        load(namespace).when_ready(server)
    assert opened[0] == opened[1] == (f"shmlimit-{digest[:8]}", 65536)
    assert opened[2] != opened[0]


def test_a_relative_file_is_named_by_its_whole_path(opened: list[tuple[Any, ...]], server: Any) -> None:
    """`-c conf.py` in two directories are two tables."""
    namespace: dict[str, Any] = {"__file__": "conf.py"}
    hook.install(namespace)
    load(namespace).when_ready(server)
    digest = hashlib.sha1(f"{os.getuid()}:{Path.cwd()}/conf.py".encode()).hexdigest()
    assert opened == [(f"shmlimit-{digest[:8]}", 65536)]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (({},), 'name="a-name"'),
        ((None, "a"), "install\\(globals\\(\\)\\)"),
        (({}, "a", "65536"), "slots must be an integer"),
        (({}, "a", True), "slots must be an integer"),
        (({}, "a", 128, ""), "sqlite must be the path of a file"),
        (({}, "a", 128, ":memory:"), "sqlite must be the path of a file"),
        (({}, "a", 128, b"a.sqlite3"), "sqlite must be the path of a file"),
        (({}, "a", 128, True), "sqlite must be the path of a file"),
    ],
    ids=str,
)
def test_mistakes_are_config_errors(arguments: Any, hint: str) -> None:
    """What can't work is refused when the file is read."""
    with pytest.raises(ConfigError, match=hint):
        hook.install(*arguments)


def run_gunicorn(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The demo's configuration in a real gunicorn that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "gunicorn", "-c", "gunicorn_conf.py", *arguments, "shmlimit.demo:app"],
        cwd=ROOT,
        env={**os.environ, "GUNICORN_CMD_ARGS": "--bind 127.0.0.1:0 --workers 2 --no-control-socket", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("option", ["--check-config", "--print-config"])
def test_checking_the_configuration_creates_nothing(option: str) -> None:
    """The file is run to check it: no table is left behind, and GUNICORN_CMD_ARGS goes over the file."""
    name = f"shmlimit-test-{uuid.uuid4().hex}"
    done = run_gunicorn(option, SHMLIMIT_NAME=name)
    assert done.returncode == 0, done.stderr
    assert not Path("/dev/shm", name).exists()
    if option == "--print-config":
        assert "['127.0.0.1:0']" in done.stdout


def test_the_demos_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """SHMLIMIT_DB names the file, by default the table's name and `.sqlite3`."""
    wanted: list[dict[str, Any]] = []
    monkeypatch.setattr(hook, "install", lambda _namespace, **settings: wanted.append(settings))
    for variables, file in (
        ({}, "shmlimit-demo.sqlite3"),
        ({"SHMLIMIT_NAME": "other"}, "other.sqlite3"),
        ({"SHMLIMIT_NAME": "other", "SHMLIMIT_DB": "limits.db"}, "limits.db"),
    ):
        for variable in ("SHMLIMIT_NAME", "SHMLIMIT_SLOTS", "SHMLIMIT_DB"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        runpy.run_path(str(ROOT / "gunicorn_conf.py"))
        assert wanted[-1]["sqlite"] == file


@pytest.mark.parametrize("text", ["many", "", "-1", "6.5"])
def test_a_bad_size_in_the_environment(text: str) -> None:
    """SHMLIMIT_SLOTS that is no number ends gunicorn with a line that says so."""
    done = run_gunicorn("--check-config", SHMLIMIT_SLOTS=text)
    assert done.returncode == 1
    assert f"SHMLIMIT_SLOTS must be a number of slots, such as 65536, not {text!r}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_without_its_table_does_not_start() -> None:
    """A name that no segment can have: the log has the reason, and no worker was started."""
    done = run_gunicorn(SHMLIMIT_NAME="no/such/name")
    assert done.returncode == 1
    assert "shmlimit: can't open the table 'no/such/name'" in done.stderr
    assert "Booting worker" not in done.stderr


def test_importing_the_hook_needs_no_gunicorn() -> None:
    """`shmlimit` imports neither falcon nor gunicorn, and the hook's module doesn't either."""
    code = (
        "import sys, shmlimit, shmlimit.guard, shmlimit.adapters.gunicorn\n"
        "assert not {'gunicorn', 'falcon'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
