"""What a guard's lists mean: paths, and keys. Compiled once, and pure."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network

from shmlimit.address import networks, parse
from shmlimit.errors import ConfigError
from shmlimit.policies.requests import key_bytes


def texts(field: str, values: Iterable[str], example: str) -> list[str]:
    """The values as a list; a lone text, which would count letter by letter, is refused."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(f"{field} must be a list of texts, such as [{example!r}], not {values!r}")
    listed = list(values)
    for text in listed:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{field} must have texts such as {example!r} in it, not {text!r}")
    return listed


def check_sync(field: str, given: object) -> None:
    """Raise `ConfigError` for a coroutine function: what it gives is true and is never awaited."""
    if inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(getattr(given, "__call__", None)):  # noqa: B004
        raise ConfigError(f"{field} must be an ordinary callable, not a coroutine function: {given!r}")


class Paths:
    """Paths: `"/health"` and what is below it, `"/"` only itself, and `"/static*"` all that begins so."""

    __slots__ = ("_exact", "_prefixes")

    def __init__(self, field: str, entries: Iterable[str]) -> None:
        exact, prefixes = set(), []
        for entry in texts(field, entries, "/healthz"):
            if not entry.startswith("/"):
                raise ConfigError(f"an entry of {field} must begin with '/', not {entry!r}")
            if entry.endswith("*"):
                prefixes.append(entry[:-1])
                continue
            exact.add(entry)
            if entry != "/":
                prefixes.append(entry if entry.endswith("/") else entry + "/")
        self._exact, self._prefixes = frozenset(exact), tuple(prefixes)

    def __bool__(self) -> bool:
        return bool(self._exact or self._prefixes)

    def __contains__(self, path: str) -> bool:
        return path in self._exact or path.startswith(self._prefixes)


class KeyList:
    """Keys, and addresses and networks that stand for the keys `ip:…` and `net:…` of `keys.client_ip`.

    `literal` lists have an address or a network as a key too.
    """

    __slots__ = ("_keys", "_networks")

    def __init__(self, field: str, entries: Iterable[str | bytes], *, literal: bool = False) -> None:
        if isinstance(entries, str | bytes) or not isinstance(entries, Iterable):
            raise ConfigError(f"{field} must be a list of keys, such as ['10.0.0.0/8', 'key-of-ours'], not {entries!r}")
        keys: set[bytes] = set()
        found: list[IPv4Network | IPv6Network] = []
        for entry in entries:
            if not entry or not isinstance(entry, str | bytes):
                raise ConfigError(f"{field} must have keys, addresses and networks in it, not {entry!r}")
            try:
                network = next(iter(networks([entry]))) if isinstance(entry, str) else None
            except ConfigError:
                network = None  # a key, then
            # APPSEC: a client that sends "10.0.0.0/8" as its API key isn't in that network.
            if network is None or literal:
                keys.add(key_bytes(entry))
            if network is not None:
                if network.version == 6 and network.prefixlen > 64:
                    raise ConfigError(
                        f"{entry!r} in {field}: IPv6 clients are limited by their /64, so give that; or the whole key, "
                        f"'ip:{network.network_address}', where they are not"
                    )
                found.append(network)
        self._keys, self._networks = frozenset(keys), networks(found)

    def __bool__(self) -> bool:
        return bool(self._keys or self._networks)

    def __contains__(self, key: object) -> bool:
        if not self or not isinstance(key, str | bytes):
            return False
        if key_bytes(key) in self._keys:
            return True
        if not self._networks or not isinstance(key, str) or not key.startswith(("ip:", "net:")):
            return False
        host, _, prefix = key.partition(":")[2].partition("/")
        ip = parse(host)
        # APPSEC: a /64 is in a network only as a whole, so its first address and its last are.
        return ip is not None and all(self._networks.covers(end) for end in _ends(ip.packed, prefix))


def _ends(packed: bytes, prefix: str) -> tuple[bytes, bytes]:
    """The first and the last address of a network that begins at `packed`; for no prefix, or none that can be, one."""
    free = 8 * len(packed) - int(prefix) if prefix.isdecimal() and len(prefix) < 4 else 0
    spread = (1 << max(0, free)) - 1
    return packed, (int.from_bytes(packed, "big") | spread).to_bytes(len(packed), "big")
