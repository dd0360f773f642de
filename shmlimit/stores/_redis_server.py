"""The server under `RedisStore`: how it is reached, as an URL or a client says, and what its errors mean."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any
from urllib.parse import urlsplit

from shmlimit.errors import ConfigError, StoreError
from shmlimit.stores._breaker import Breaker, Outage

# What of a client or an URL says where the server is and who asks. Timeouts, retries, caches and decoding are ours.
_TAKEN = {
    *("host", "port", "path", "db", "username", "password", "credential_provider", "client_name"),
    *("socket_keepalive", "socket_keepalive_options", "socket_type"),
}

# What a server says -> whether it is so for every key, and what to do about it.
_HINTS = {
    "shmlimit: ": (False, "somebody else wrote it; delete it, or give another prefix="),
    "LOADING": (True, "it is still reading its data; wait"),
    "BUSY": (True, "a script of somebody else is running there; SCRIPT KILL ends it"),
    "READONLY": (True, "it is a replica; give the address of the primary"),
    "OOM": (True, "it has no memory left and evicts nothing; raise maxmemory"),
    "MISCONF": (True, "it can't write its snapshots and so refuses to write at all; see its log"),
    "NOAUTH": (True, "put user and password into the URL"),
    "unauthenticated": (True, "put user and password into the URL"),  # said of commands with many parts
    "WRONGPASS": (True, "correct user and password in the URL"),
    "NOPERM": (True, "let its user run EVALSHA, EVAL, TIME and the commands of the scripts on the store's keys"),
    "MOVED": (True, "it is a cluster, and another node has the slot of the store's prefix: give that node's address"),
    "CLUSTERDOWN": (True, "its cluster has lost nodes"),
    "MASTERDOWN": (True, "it is a replica that has lost its primary"),
    "NOREPLICAS": (True, "it has too few replicas and so refuses to write; see min-replicas-to-write there"),
    "DB index": (True, "it has no database of the number in the URL"),
    "unknown command": (True, "it must be Redis 5 or later, or Valkey"),
    "out of range": (False, "somebody else wrote the key; delete it, or give another prefix="),
    "WRONGTYPE": (False, "another program uses a key of the store; give another prefix="),
}
# redis-py takes the word off and raises a class of its own.
_WORDS = {
    "BusyLoadingError": "LOADING",
    "ReadOnlyError": "READONLY",
    "OutOfMemoryError": "OOM",
    "MasterDownError": "MASTERDOWN",
    "AuthenticationError": "NOAUTH",
    "NoPermissionError": "NOPERM",
    "MovedError": "MOVED",
    "ClusterDownError": "CLUSTERDOWN",
}


class Settings:
    """Where a server is, as redis-py's connections are made: of an URL or of a client."""

    def __init__(self, source: object, timeout: float) -> None:
        if isinstance(source, str):
            pool = _pool_of(source)
        else:
            pool = getattr(source, "connection_pool", None)
            if pool is None:
                raise ConfigError(
                    "RedisStore takes an URL (redis://, rediss://, valkey://, valkeys://, unix://) or a client of "
                    f"redis or valkey for one server, not {source!r}"
                )
        package = type(pool).__module__.partition(".")[0]
        names = [kind.__name__ for kind in (pool.connection_class,) if kind.__module__.startswith(f"{package}.")]
        if names not in (["Connection"], ["SSLConnection"], ["UnixDomainSocketConnection"]):
            raise ConfigError(f"RedisStore can't use connections of {pool.connection_class}; give an URL")
        given = pool.connection_kwargs
        self.timeout = timeout
        self.wanted = {name: value for name, value in given.items() if _is_taken(name, value)}
        self.wanted |= {"socket_timeout": timeout, "socket_connect_timeout": timeout, "protocol": 2}
        self.kind = getattr(import_module(f"{package}.connection"), names[0])
        self.twin = getattr(import_module(f"{package}.asyncio.connection"), names[0])
        known = signature(self.twin).parameters
        self.not_for_loops = [name for name in self.wanted if name.startswith("ssl_") and name not in known]
        errors = import_module(f"{package}.exceptions")
        self.refused = errors.ResponseError  # what a server says
        self.unknown_script = errors.NoScriptError
        # And all else that can happen. Of bytes that no server sends the parsers make errors of Python's own.
        any_other = getattr(errors, "RedisError", None) or errors.ValkeyError
        self.lost = (any_other, ValueError, OverflowError, RecursionError)
        self.timed_out = errors.TimeoutError
        self.strange = errors.InvalidResponse
        where = given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
        self.name = f"{'Valkey' if package == 'valkey' else 'Redis'} at {where}"


def _is_taken(name: str, value: object) -> bool:
    # What isn't set is left out: asyncio connections don't know of OCSP, not even that it isn't wanted.
    is_set = value is not None and not (value is False and name.startswith("ssl_validate_ocsp"))
    return is_set and (name in _TAKEN or name.startswith("ssl_"))


def _pool_of(url: str) -> Any:
    try:
        from redis import ConnectionPool
    except ImportError:
        raise ConfigError("RedisStore needs redis-py: pip install 'shmlimit[redis]'") from None
    try:
        if not url.startswith("unix"):
            int(urlsplit(url).path.strip("/") or 0)  # redis-py takes a database that is no number for 0
        return ConnectionPool.from_url(url.replace("valkey", "redis", 1) if url.startswith("valkey") else url)
    except (ValueError, TypeError):
        raise ConfigError(
            "RedisStore can't read the URL (not shown, it may have a password): give redis://[user:password@]host[:port]"
            "[/database], rediss:// or valkey:// or valkeys:// likewise, or unix:///path; in a password write / as %2F"
        ) from None


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def closed(settings: Settings) -> StoreError:
    """What calls after `close` raise."""
    return StoreError(f"this RedisStore ({settings.name}) is closed")


def failure(settings: Settings, breaker: Breaker, outage: Outage | None, error: Exception) -> StoreError:
    """What an error means: the server, the cause and what to do. One that concerns every key is an outage."""
    text = str(error).partition(" script: ")[0] or type(error).__name__
    word = _WORDS.get(type(error).__name__) or next((word for word in _HINTS if word in text), None)
    if word is not None:
        for_all, hint = _HINTS[word]
        text = text if word in text or not for_all else f"{word} {text}"
    elif isinstance(error, settings.refused):  # it answers; what it says may be of this key alone
        for_all, hint = False, "it must be Redis 5 or later, or Valkey"
    else:
        for_all, hint = True, "see whether it runs and can be reached from here"
    cause = f"{settings.name} can't answer: {text} ({hint})"
    if for_all:
        breaker.failed(outage, cause)
    else:
        breaker.succeeded(outage)  # it did answer
    return StoreError(cause)
