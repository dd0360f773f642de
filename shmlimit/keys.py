"""From a request to the key that is limited.

A key here is a callable that takes a falcon request (WSGI or ASGI), a WSGI environ or an ASGI scope. It gives

- a `str` or `bytes`: what is counted;
- `DENY`: the guard answers 403;
- `None`: this request isn't limited. The keys below give it only where `"skip"` was asked for.

What a request lacks is one explicit thing, chosen with `unknown=` or `missing=`: `"shared"` is one key for all such
requests, `"deny"` and `"skip"` are the other two. No key here is ever `""`.

A key with a true attribute `needs_route` is asked after routing where the adapter has a router (falcon): `route` has
it, and what is composed of such a key. Set it on a callable of your own that uses `req.uri_template`.
"""

from __future__ import annotations

import enum
import logging
import random
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, overload

from shmlimit.address import PRIVATE, Network, Networks, Resolver, header_name, networks, read, write
from shmlimit.errors import ConfigError
from shmlimit.policies.requests import key_bytes

__all__ = [
    "DENY",
    "UNKNOWN",
    "ClientIp",
    "Composed",
    "Deny",
    "Header",
    "Key",
    "Route",
    "address_key",
    "client_ip",
    "compose",
    "header",
    "join",
    "path",
    "route",
]

logger = logging.getLogger("shmlimit")


class Deny(enum.Enum):
    """The type of `DENY`; `key is DENY` is how to tell it."""

    DENY = "deny"


DENY: Final = Deny.DENY
UNKNOWN: Final = "unknown"

Request: TypeAlias = Any
Key: TypeAlias = "Callable[[Request], str | bytes | Deny | None]"

_PEERS: Final = 1_024  # of those whose key is remembered
_KINDS: Final = ("http", "websocket")  # of ASGI scopes that are requests
_LOOKS: Final = (
    64  # PERF: of known peers' requests at least one in so many is looked at for a proxy: a look takes 1.9 µs
)

_FALLBACKS: Final[Mapping[str, str | Deny | None]] = {"shared": UNKNOWN, "deny": DENY, "skip": None}

# IPv4 addresses inside NAT64 and 6to4 that say nothing about who it is. An own list: Python's `is_global` changes.
_NOT_PUBLIC = networks(
    [
        *("0.0.0.0/8", "127.0.0.0/8"),  # this network, loopback
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),  # private, carrier-grade NAT
        *("169.254.0.0/16", "224.0.0.0/3"),  # link-local; multicast and all above it
    ]
)
_NAT64 = bytes.fromhex("0064ff9b") + bytes(8)
_6TO4 = bytes.fromhex("2002")
_four_groups = struct.Struct("!4H").unpack_from

# How a key of `join` begins, or all of it where every part is missing.
_JOINED = re.compile(r"-*(?:[0-9]+:|\Z)")

# ASGI promises iterables, which may be readable only once (falcon's test client sends such): what isn't one of these is
# read and put back for the application.
_AGAIN = (list, tuple)

_NO_ADDRESS = (
    'a request has no client address: all such requests share the key "unknown". Over a unix socket, believe the '
    'proxy: client_ip(trusted=["unix"], header="x-forwarded-for"); or choose unknown="deny" or unknown="skip"'
)
_NO_CLIENT = (
    "behind the proxies that are trusted a request names no client, or only such as are trusted themselves: all such "
    'requests share the key "unknown". If clients are in those networks, trust the proxies alone: '
    'client_ip(trusted=["10.0.0.7"], …); or choose unknown="deny" or unknown="skip"'
)
_BEHIND_PROXY = (
    "requests come through a proxy (a private peer with X-Forwarded-For), but the key is the peer's address: all "
    "clients behind the proxy share one bucket. Put it right with the key "
    'client_ip(trusted="private", header="x-forwarded-for")'
)


# -- What is read from a request -------------------------------------------------------------------------------------


def scope_of(request: Request) -> dict[str, Any] | None:
    """The ASGI scope that a request has. On WSGI an application may call something of its own so."""
    found = getattr(request, "scope", None)
    return found if isinstance(found, dict) and found.get("type") in _KINDS else None


def _carrier(request: Request) -> dict[str, Any]:
    """The environ or scope that a request is or has.

    NOTE: falcon's `remote_addr` says 127.0.0.1 where ASGI has no client, and its `access_route` believes any peer and
    can raise; neither is used.
    """
    if isinstance(request, dict):
        return request
    # PERF: the scope first, since falcon's `env` raises on ASGI, and to catch that takes 0.35 µs.
    found = scope_of(request)
    if found is None:
        found = getattr(request, "env", None)
    if not isinstance(found, dict):
        raise TypeError(f"{type(request).__name__}: give a falcon request, a WSGI environ or an ASGI scope")
    return found


def _peer(carrier: dict[str, Any]) -> str | None:
    """The socket's peer. gunicorn gives `""` or `None` over a unix socket, and `None` for PROXY LOCAL."""
    if "type" in carrier:
        client = carrier.get("client")
        if client is not None and not isinstance(client, _AGAIN):
            client = carrier["client"] = tuple(client)
        return client[0] if client else None
    return carrier.get("REMOTE_ADDR")


def _method(request: Request, carrier: dict[str, Any]) -> str:
    if request is not carrier:  # falcon's own: a middleware may have put another one there
        return str(request.method)
    return str(carrier.get("method", "GET") if "type" in carrier else carrier["REQUEST_METHOD"])


def _path(carrier: dict[str, Any]) -> str:
    """The whole decoded path, the same on WSGI and ASGI: with the mount point."""
    if "type" in carrier:
        return str(carrier["path"])
    # PEP 3333: bytes of the path, each as a character of its own.
    latin1: str = carrier.get("SCRIPT_NAME", "") + carrier.get("PATH_INFO", "")
    return latin1.encode("latin-1").decode("utf-8", "replace") or "/"


class _Field:
    """One header, found in any kind of request.

    APPSEC: in an environ `X_Api_Key` looks like `X-Api-Key`; gunicorn drops names with an underscore by default.
    """

    __slots__ = ("name", "variable", "wire")

    def __init__(self, name: str) -> None:
        self.name = name
        self.wire = name.encode("ascii")
        variable = name.upper().replace("-", "_")
        self.variable = variable if variable in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{variable}"

    def lines(self, request: Request, carrier: dict[str, Any]) -> Sequence[str]:
        """The values of all its lines in their order; servers may have joined them with commas."""
        value: str | None
        if "type" not in carrier:
            value = carrier.get(self.variable)
        elif request is not carrier:  # falcon on ASGI has read the headers, which may be readable only once
            value = request.get_header(self.name)
        else:
            headers = carrier.get("headers", ())
            if not isinstance(headers, _AGAIN) or (headers and not isinstance(headers[0], _AGAIN)):
                headers = carrier["headers"] = [tuple(header) for header in headers]
            wire = self.wire  # ASGI has names in lower case
            return [value.decode("latin-1") for name, value in headers if name == wire]
        return () if value is None else (value,)


_X_FORWARDED_FOR = _Field("x-forwarded-for")


# -- The key of an address -------------------------------------------------------------------------------------------


class _Prefixes:
    """From the bytes of an address to its key: `ip:` and a whole address, or `net:` and a network."""

    __slots__ = ("_is_64", "_v4", "_v6")

    def __init__(self, v4_prefix: int, v6_prefix: int) -> None:
        self._v4 = _mask("v4_prefix", v4_prefix, 32)
        self._v6 = _mask("v6_prefix", v6_prefix, 128)
        self._is_64 = v6_prefix == 64

    def key(self, packed: bytes) -> str:
        if len(packed) == 16:
            # One prefix of NAT64 holds everybody behind it, and one IPv4 host owns 65,536 /64s of 6to4.
            if packed.startswith(_6TO4):
                inner = packed[2:6]
            elif packed.startswith(_NAT64):
                inner = packed[12:]
            elif self._is_64:
                return _cut_64(packed)
            else:
                return _cut(packed, *self._v6)
            if _NOT_PUBLIC.covers(inner):
                return _cut(packed, *self._v6)
            packed = inner
        return _cut(packed, *self._v4)


def _mask(field: str, prefix: int, bits: int) -> tuple[int, str]:
    """The mask of a prefix and what is written behind a network; a whole prefix writes nothing."""
    if type(prefix) is not int or not 0 <= prefix <= bits:
        raise ConfigError(f"{field} is {prefix!r}: give an int from 0 to {bits}")
    return (1 << bits) - (1 << bits - prefix), f"/{prefix}" if prefix < bits else ""


def _cut(packed: bytes, mask: int, suffix: str) -> str:
    if not suffix:
        return "ip:" + write(packed)
    return "net:" + write((int.from_bytes(packed, "big") & mask).to_bytes(len(packed), "big")) + suffix


def _cut_64(packed: bytes) -> str:
    """PERF: what `_cut` says of a /64, in a third of the time: the zeros at the end are the longest run."""
    groups = "{:x}:{:x}:{:x}:{:x}".format(*_four_groups(packed))
    while groups.endswith(":0"):
        groups = groups[:-2]
    return f"net:{groups}::/64" if groups != "0" else "net:::/64"


def address_key(text: str | None, v4_prefix: int = 32, v6_prefix: int = 64) -> str:
    """The key of an address: `ip:203.0.113.7`, or `net:2001:db8:1:2::/64` where the prefix isn't the whole of it.

    A port, brackets and a zone are dropped. What is no address, and `None` from `client_address`, is the one key
    `unknown`. NAT64 (`64:ff9b::/96`) and 6to4 (`2002::/16`) give the IPv4 address inside where that is a public one.

    Errors: `ConfigError` for a prefix outside 0 to 32, or 0 to 128.
    """
    prefixes = _Prefixes(v4_prefix, v6_prefix)
    packed = read(text.strip(" \t")) if text else None
    return UNKNOWN if packed is None else prefixes.key(packed)


# -- Keys ------------------------------------------------------------------------------------------------------------


class ClientIp:
    """The client's address as a key. Made by `client_ip`."""

    __slots__ = ("_field", "_known", "_prefixes", "_resolver", "_unknown", "_unlooked", "_untold")

    def __init__(self, resolver: Resolver, prefixes: _Prefixes, unknown: str | Deny | None) -> None:
        self._resolver = resolver
        self._prefixes = prefixes
        self._unknown = unknown
        self._field = None if resolver.header is None else _Field(resolver.header)
        self._known: dict[str | None, str] = {}  # without a header: the peers' keys
        self._unlooked = 0
        # What is logged once: `pop` is atomic, so that of several threads one finds it.
        self._untold = {"proxy": _BEHIND_PROXY} if self._field is None else {}
        if unknown == UNKNOWN:
            self._untold |= {"unknown": _NO_ADDRESS, "client": _NO_CLIENT}

    def __call__(self, request: Request) -> str | Deny | None:
        # PERF: what `_carrier` and `_peer` do, without the calls where all is as it nearly always is.
        carrier = request
        if type(request) is not dict:
            carrier = getattr(request, "scope", None)
            if type(carrier) is not dict or carrier.get("type") not in _KINDS:
                carrier = getattr(request, "env", None)
            if type(carrier) is not dict:
                carrier = _carrier(request)
        if "type" not in carrier:
            peer = carrier.get("REMOTE_ADDR")
        elif type(client := carrier.get("client")) is tuple and client:
            peer = client[0]
        else:
            peer = _peer(carrier)
        if self._field is None:
            # PERF: the same peers come again and again: 0.3 µs for one that is known, 1.9 for another.
            key = self._known.get(peer)
            if key is not None and self._unlooked < _LOOKS:
                self._unlooked += 1
                return key
            return self._look(peer, request, carrier)
        packed = self._resolver.packed(peer, self._field.lines(request, carrier))
        return self._none("client" if peer else "unknown") if packed is None else self._prefixes.key(packed)

    def _look(self, peer: str | None, request: Request, carrier: dict[str, Any]) -> str | Deny | None:
        """The key of a peer, and whether there is a proxy that nobody has told of."""
        packed = self._resolver.packed(peer, ())
        if packed is None:
            return self._none("unknown")
        if peer in self._known:
            # Not always as many: a health check that comes as regularly must not be all that is ever looked at.
            self._unlooked = random.randrange(_LOOKS)  # noqa: S311 - no secret
        elif len(self._known) >= _PEERS:
            self._known.clear()
        if "proxy" in self._untold and PRIVATE.covers(packed) and _X_FORWARDED_FOR.lines(request, carrier):
            self._tell("proxy")
        key = self._known[peer] = self._prefixes.key(packed)
        return key

    def _none(self, what: str) -> str | Deny | None:
        self._tell(what)
        return self._unknown

    def _tell(self, what: str) -> None:
        message = self._untold.pop(what, None)
        if message is not None:
            logger.warning(message)


def client_ip(
    *,
    trusted: Iterable[Network] | Networks = (),
    header: str | None = None,
    hops: int | None = None,
    v4_prefix: int = 32,
    v6_prefix: int = 64,
    unknown: Literal["shared", "deny", "skip"] = "shared",
) -> ClientIp:
    """The key of the client's address: `ip:203.0.113.7`, `net:2001:db8:1:2::/64`.

    By default the socket's peer. Behind a proxy that is the proxy, and all clients share one bucket: then say
    `client_ip(trusted="private", header="x-forwarded-for")`. `trusted`, `header` and `hops` are those of
    `address.Resolver`; **`hops` without `trusted` believes whoever connects.** `v4_prefix` and `v6_prefix` say how much
    of an address is one client (see `address_key`).

    `unknown`: what a request without an address is: `"shared"` gives all of them the one key `unknown` (each
    reason is logged once), `"deny"` answers 403, `"skip"` doesn't limit them.

    Errors: `ConfigError` for options that can't work or could never matter.
    """
    resolver = Resolver(trusted=trusted, header=header, hops=hops)
    if not isinstance(unknown, str) or unknown not in _FALLBACKS:
        raise ConfigError(f'unknown is {unknown!r}: give "shared", "deny" or "skip"')
    return ClientIp(resolver, _Prefixes(v4_prefix, v6_prefix), _FALLBACKS[unknown])


class Header:
    """The value of a header as a key. Made by `header`."""

    __slots__ = ("_field", "_missing", "needs_route")

    def __init__(self, name: str, missing: Key) -> None:
        self._field = _Field(name)
        self._missing = missing
        self.needs_route = needs_route(missing)

    def __call__(self, request: Request) -> str | bytes | Deny | None:
        lines = self._field.lines(request, _carrier(request))
        value = (lines[0] if len(lines) == 1 else ",".join(lines)).strip(" \t")
        if not value:
            return self._missing(request)
        # APPSEC: nobody must be able to send the key of an address, or of all who have none, and spend its quota.
        if value == UNKNOWN or value.startswith(("ip:", "net:", "header:")) or _JOINED.match(value):
            return "header:" + value
        return value


def header(name: str, missing: Literal["shared", "deny", "skip"] | Key = "shared") -> Header:
    """The key is the value of the header `name`; several lines are joined with commas.

    **A header that nobody verified is no identity**: whoever makes up values gets a fresh quota with each of them.
    Unless something in front of the application checks it, limit by address beside it, in a guard of its own.

    The value is the key as it was sent, but for one that looks like a key of this module (`unknown`, `ip:…`, `net:…`,
    `header:…`, `3:GET…`), which gets `header:` in front.

    `missing`: what a request without the header, or with an empty one, is: another key, usually `client_ip()`;
    `"shared"` gives all of them the one key `unknown`, `"deny"` answers 403, `"skip"` doesn't limit them.

    Errors: `ConfigError` for something that is no header name, and for another `missing`.
    """
    checked = header_name(name, "name")
    if isinstance(missing, str) and missing in _FALLBACKS:
        fallback = _FALLBACKS[missing]
        return Header(checked, lambda _: fallback)
    if not callable(missing):
        raise ConfigError(f'missing is {missing!r}: give "shared", "deny", "skip" or a key such as client_ip()')
    return Header(checked, missing)


def path(request: Request) -> str:
    """The key of method and path, the mount point included: `3:GET6:/items`.

    **Whoever makes up paths gets a fresh quota with each of them**: `route` has one for a route, and one for all paths
    that have none.
    """
    carrier = _carrier(request)
    return join(_method(request, carrier), _path(carrier))


class Route:
    """Method and route template as a key: `route` is the one."""

    __slots__ = ()

    needs_route: Final = True

    def __call__(self, request: Request) -> str:
        try:
            template: str | None = request.uri_template
        except AttributeError:  # an environ or a scope
            return path(request)
        return join(str(request.method), template)


route: Final = Route()
"""The key of method and route template, `3:GET11:/items/{id}`: one for a route, whatever the paths.

A falcon request without a template (a 404, a sink, a static route) has one fixed part instead, `3:GET-`, not the path
that the client made up. An environ or a scope knows no template: there it is `path`, so with the WSGI and ASGI
wrappers, which stand before any router, each path has a key of its own.
"""


class Composed:
    """Several keys as one. Made by `compose`."""

    __slots__ = ("_parts", "needs_route")

    def __init__(self, parts: tuple[Key | str | bytes, ...]) -> None:
        self._parts = parts
        self.needs_route = any(map(needs_route, parts))

    def __call__(self, request: Request) -> str | bytes | Deny:
        found: list[str | bytes | None] = []
        for part in self._parts:
            value = part(request) if callable(part) else part
            if isinstance(value, Deny):
                return value
            found.append(value)
        return join(*found)


def compose(*parts: Key | str | bytes) -> Composed:
    """One key of several, which are other keys and fixed texts: `compose("login", client_ip(), header("x-user"))`.

    Two of them are equal only where all parts are. A part that is `None` is kept as a missing one (it doesn't lift the
    limit), and one that is `DENY` makes the whole `DENY`.

    Errors: `ConfigError` without parts, and for a part that is neither a key nor a text.
    """
    if not parts:
        raise ConfigError("compose needs parts: keys such as client_ip(), or texts")
    for part in parts:
        if not callable(part) and not isinstance(part, str | bytes):
            raise ConfigError(f"a part of compose is a key such as client_ip(), or a text, not {part!r}")
    return Composed(parts)


@overload
def join(*texts: str | None) -> str: ...
@overload
def join(*texts: str | bytes | None) -> str | bytes: ...
def join(*texts: str | bytes | None) -> str | bytes:
    """One key from texts, different for different texts: `join("a/b", None, "c")` is `3:a/b-1:c`.

    Each has its length in front (in bytes, so that `str` and `bytes` are one key here as well), and a missing one is
    `-`. The result is `bytes` if one of the texts is. Of no texts at all it is `""`, which guards refuse.
    """
    whole = b"".join([b"-" if text is None else b"%d:%b" % (len(raw := key_bytes(text)), raw) for text in texts])
    return whole if any(isinstance(text, bytes) for text in texts) else whole.decode("utf-8", "surrogatepass")


def needs_route(key: object) -> bool:
    """Whether a key has to be asked after routing."""
    return bool(getattr(key, "needs_route", False))
