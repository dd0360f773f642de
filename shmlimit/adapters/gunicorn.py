"""gunicorn: `install(globals())` as the last line of a configuration file makes one table for all workers.

The table is opened in `when_ready`, in the master, after the sockets are bound and before the first worker is forked.
Not earlier: a second server that was started by mistake runs everything before that and then fails to bind. Workers
inherit the mapping, and nothing is unlinked at exit: a restart finds its counts again. A SQLite file beside the table
is opened by each worker, at the first decision that needs it: connections don't survive a fork.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple, TypeAlias

from shmlimit.adapters import _gate
from shmlimit.errors import ConfigError, ShmlimitError
from shmlimit.stores.base import Store

Hook: TypeAlias = Callable[[Any], object]
_MARK = "_shmlimit_hook_of_the_user"


class _Settings(NamedTuple):
    name: str
    slots: int
    sqlite: str | None

    def __str__(self) -> str:
        return f"{self.name!r} with {self.slots} slots" + (f" and the file {self.sqlite!r}" if self.sqlite else "")


_running: _Settings | None = None


def install(
    namespace: MutableMapping[str, Any],
    name: str | None = None,
    slots: int = 65536,
    sqlite: str | os.PathLike[str] | None = None,
) -> None:
    """Set the hooks `when_ready` and `on_reload` in the namespace of a configuration file, around the user's own.

    Must come last in the file: a hook that is defined after it replaces it. `name` is the table's (by default made from
    the user's id and the file's path), `slots` its size. `sqlite` is the path of a SQLite file for policies that the
    table can't hold (`SlidingLog`); the workers' user must be able to write there, and in its directory. A relative one
    is in the server's working directory. Without it such a policy is a `ConfigError` at the first request.

    Nothing is opened here, so `--check-config` leaves nothing behind. A HUP doesn't open the table again: another name,
    size or file needs a restart, and a warning says so.

    Raises `ConfigError` for what can't work. A table that can't be opened stops the server at its start, and so do
    settings with which gunicorn itself tells wrong client addresses: the PROXY protocol in gthread workers that keep
    connections (at a HUP those are an error in the log).
    """
    if not isinstance(namespace, MutableMapping):
        raise ConfigError(f"install needs the configuration's namespace: install(globals()), not {namespace!r}")
    if isinstance(slots, bool) or not isinstance(slots, int):
        raise ConfigError(f"slots must be an integer, not {slots!r}")
    wanted = _Settings(_default_name(namespace) if name is None else name, slots, _file(sqlite))
    theirs = {hook: _user_hook(namespace, hook) for hook in ("when_ready", "on_reload")}

    def when_ready(server: Any) -> None:
        if wrong := _wrong_addresses(server.cfg):
            server.log.critical("shmlimit: %s", wrong)
            sys.exit(1)
        _start(server, wanted)
        theirs["when_ready"](server)

    def on_reload(server: Any) -> None:
        if wrong := _wrong_addresses(server.cfg):
            server.log.error("shmlimit: %s", wrong)
        if _running != wanted:
            server.log.warning("shmlimit: %s; restart the server to use %s", _state(), wanted)
        theirs["on_reload"](server)

    for hook in (when_ready, on_reload):
        setattr(hook, _MARK, theirs[hook.__name__])
        namespace[hook.__name__] = hook


def _start(server: Any, wanted: _Settings) -> None:
    """Open the table and bind it; where that fails log why and end the server, as gunicorn does for its sockets."""
    global _running  # noqa: PLW0603 - what this process has running
    try:
        # NOTE: a warning of Python's goes to standard error, which a daemon hasn't.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            store = _open(*wanted)
    except (ShmlimitError, OSError) as error:
        server.log.critical("shmlimit: can't open the table %r: %s", wanted.name, error)
        sys.exit(1)
    for warning in caught:
        server.log.warning("shmlimit: %s", warning.message)
    _gate.bind(store)
    _running = wanted
    server.log.info("shmlimit: workers share the table %r", wanted.name)


def _wrong_addresses(config: Any) -> str | None:
    """What to say of settings with which `REMOTE_ADDR` isn't the client's; `None` where it is.

    APPSEC: one client could spend the quota of all behind the proxy. gunicorn's other workers hand the line's address
    on to all requests of a connection (its issue 899); ThreadWorker, as of 27.0, doesn't.
    """
    if config.proxy_protocol == "off" or not config.keepalive:
        return None
    from gunicorn.workers.gthread import ThreadWorker

    if not issubclass(config.worker_class, ThreadWorker):
        return None
    return (
        "with gthread workers the address in a PROXY protocol line holds for the first request of a connection only; "
        "later ones seem to come from the proxy, so all its clients would share one limit. "
        "Set keepalive = 0 (--keep-alive 0), or take another worker class"
    )


def _open(name: str, slots: int, sqlite: str | None) -> Store:
    from shmlimit.table import SharedTable  # late: a file that is only checked needs no C helper

    table = SharedTable.open(name, slots)
    if sqlite is None:
        return table
    from shmlimit.stores.local import LocalStore
    from shmlimit.stores.sqlite import SqliteStore

    return LocalStore(table, SqliteStore(sqlite))


def _state() -> str:
    if _running is None:
        return "no table was opened when this server started"
    return f"the table stays {_running}"


def _user_hook(namespace: MutableMapping[str, Any], name: str) -> Hook:
    """The user's hook, by gunicorn's own rules (any callable of one argument, or "package.module.name")."""
    if name not in namespace:
        return lambda _server: None
    from gunicorn.config import validate_callable

    try:
        hook: Hook = validate_callable(1)(namespace[name])
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from error
    # A hook of an earlier install (a file that is imported by this one) gives way, what it wraps is kept.
    return getattr(hook, _MARK, hook)


def _file(sqlite: object) -> str | None:
    path = os.fspath(sqlite) if isinstance(sqlite, os.PathLike) else sqlite
    if path is None or (isinstance(path, str) and path not in {"", ":memory:"}):
        return path
    raise ConfigError(f'sqlite must be the path of a file, such as "limits.sqlite3", not {sqlite!r}')


def _default_name(namespace: MutableMapping[str, Any]) -> str:
    path = namespace.get("__file__")
    if not path:
        raise ConfigError('this configuration has no file to name the table after: install(globals(), name="a-name")')
    # NOTE: links are kept as they are. A deployment that switches one from release to release keeps its table.
    path = os.path.abspath(path)  # noqa: PTH100
    return "shmlimit-" + hashlib.sha1(f"{os.getuid()}:{path}".encode(), usedforsecurity=False).hexdigest()[:8]
