"""Whose request is it? From a socket's peer and the request's headers to one client address. Pure.

THE RULES

1. The peer is the client. A header is believed only when it is named, one header at a time, and never as a fallback.
2. With `trusted`, a peer that isn't trusted *is* the client and the header is ignored. Behind a trusted peer the header
   is walked from right to left past trusted addresses; the first that isn't trusted is the client. What is no address
   (garbage, `unknown`, `_hidden`, `0.0.0.0`, `::`) stops the walk without an answer, and so does its end.
3. With `hops=n` the n-th element from the right is the client; with fewer elements there is none.
4. `x-forwarded-for` and `forwarded` are lists. Any other header has one value: its last element, never walked.
5. Several lines are one list. What stands on the left, where the client wrote, can't change what stands on the right:
   everything here reads from the right end, quotes included.
6. Blank text between commas is no element. An address may carry a port, brackets and a zone, which are dropped.
7. Only the last 8,192 characters of a header are looked at, from the first comma after the cut.
8. An option that can't work, or that could never matter, is a `ConfigError` when the resolver is made.

Inside, an address is its 4 or 16 bytes (`read`), IPv4-mapped ones always 4. Its text is made from the bytes by `write`,
so no text that a client sent ever comes out of `client_address`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import NamedTuple, TypeAlias

from shmlimit.errors import ConfigError

__all__ = ["PRIVATE", "Forwarded", "Networks", "Resolver", "client_address", "forwarded", "networks", "parse", "text"]

Headers: TypeAlias = Iterable[tuple[str, str]]
Network: TypeAlias = "str | IPv4Address | IPv6Address | IPv4Network | IPv6Network"

MAX_CHARACTERS = 8192  # of one header, over all its lines
_PROXIES = 256  # whose spelling is remembered

_TCHARS = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"  # RFC 9110, section 5.6.2
_is_token = re.compile(_TCHARS).fullmatch
_is_port = re.compile(rf":(?:[0-9]{{1,5}}|_{_TCHARS})").fullmatch
# One `name=value` of a Forwarded element, or nothing, up to and with the `;` behind it. Blanks stand in the group only
# after a value, so that a long run of them is never tried in two places at once (the match stays linear).
_pair = re.compile(
    rf"[ \t]*(?:({_TCHARS})="
    r"(?:([!#$%&'*+\-.^_`|~0-9A-Za-z:\[\]]+)"
    r'|"((?:[^"\\\x00-\x08\x0a-\x1f\x7f]|\\[^\x00-\x08\x0a-\x1f\x7f])*)")'
    r"[ \t]*)?(;|\Z)"
).match
_escaped = re.compile(r"\\(.)")

_MAPPED = bytes(10) + b"\xff\xff"
_NOBODY = frozenset({bytes(4), bytes(16)})
_eight_groups = struct.Struct("!8H").unpack
_ZERO_RUNS = tuple(":" + "0:" * length for length in range(8, 1, -1))


# -- Addresses: text, bytes, text ------------------------------------------------------------------------------------


def _v4(text: str) -> bytes | None:
    try:
        return socket.inet_pton(socket.AF_INET, text)
    except (OSError, ValueError):  # ValueError: a NUL, or text that UTF-8 can't hold
        return None


def _v6(text: str) -> bytes | None:
    try:
        packed = socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return None
    return packed[12:] if packed.startswith(_MAPPED) else packed


def read(text: str) -> bytes | None:
    """The 4 or 16 bytes of an address that may carry a port, brackets or a zone; `None` for anything else.

    Also `None` for the unspecified addresses, which are nobody's. Blanks are the caller's to trim.
    """
    colons = text.count(":")
    if not colons:
        packed = _v4(text)
    elif text[0] == "[":
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not _is_port(port)):
            return None
        packed = _v6(_without_zone(host))
    elif colons == 1:
        host, _, port = text.partition(":")
        packed = _v4(host) if _is_port(":" + port) else None
    else:
        packed = _v6(_without_zone(text))
    return None if packed in _NOBODY else packed


def _without_zone(text: str) -> str:
    host, _, zone = text.partition("%")
    return host if zone and "%" not in zone else text  # an odd zone stays where it is and spoils the address


def write(packed: bytes) -> str:
    """The canonical text of 4 or 16 bytes: RFC 5952, IPv6 with hexadecimal groups only.

    Not `inet_ntop`, which writes some IPv6 addresses with a dotted tail, and not on every system.
    """
    if len(packed) == 4:
        return socket.inet_ntoa(packed)
    groups = ":{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:{:x}:".format(*_eight_groups(packed))
    if ":0:0:" in groups:
        for run in _ZERO_RUNS:
            if run in groups:  # the longest run, and of equally long ones the first
                groups = groups.replace(run, "::", 1)
                break
    start = 0 if groups.startswith("::") else 1
    return groups[start:] if groups.endswith("::") else groups[start:-1]


def parse(text: str) -> IPv4Address | IPv6Address | None:
    """The address that `text` is, IPv4-mapped IPv6 as IPv4; `None` for anything else.

    Strict: no port, no brackets, no zone, no blanks, no leading zeros in IPv4.
    """
    packed = _v6(text) if ":" in text else _v4(text)
    if packed is None or "%" in text:  # some systems read a zone
        return None
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


def text(ip: IPv4Address | IPv6Address) -> str:
    """The canonical text of an address: RFC 5952, IPv4-mapped IPv6 as IPv4, without a zone."""
    return write(_unmapped(ip))


def _unmapped(ip: IPv4Address | IPv6Address) -> bytes:
    return ip.packed[12:] if ip.packed.startswith(_MAPPED) else ip.packed


# -- Networks --------------------------------------------------------------------------------------------------------


class Networks:
    """Networks that can be asked with `in` for an address (a text or an `ipaddress` object). Made by `networks`."""

    __slots__ = ("_all", "_by_mask")

    def __init__(self, items: Iterable[IPv4Network | IPv6Network]) -> None:
        self._all = tuple(items)
        by_mask: dict[int, dict[int, set[int]]] = {4: {}, 16: {}}  # by the length of an address
        for network in self._all:
            masks = by_mask[len(network.network_address.packed)]
            masks.setdefault(int(network.netmask), set()).add(int(network.network_address))
        self._by_mask = {length: tuple(masks.items()) for length, masks in by_mask.items()}

    def covers(self, packed: bytes) -> bool:
        """Whether one of the networks has the address of these 4 or 16 bytes."""
        number = int.from_bytes(packed, "big")
        for mask, found in self._by_mask[len(packed)]:  # noqa: SIM110 - PERF: half the time of any()
            if number & mask in found:
                return True
        return False

    def __contains__(self, address: object) -> bool:
        if isinstance(address, str):
            address = parse(address)
        return isinstance(address, (IPv4Address, IPv6Address)) and self.covers(_unmapped(address))

    def __iter__(self) -> Iterator[IPv4Network | IPv6Network]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"networks({[str(network) for network in self._all]})"


def networks(items: Iterable[Network] | Networks) -> Networks:
    """CIDR texts, addresses and `ipaddress` objects as one set of networks; the text `"private"` is `PRIVATE`.

    Host bits are masked off and netmasks (`/255.255.255.0`) are fine. A mapped network (`::ffff:10.0.0.0/104`) is the
    IPv4 network; no other IPv6 network covers an IPv4 address. Anything else is a `ConfigError`.
    """
    return items if isinstance(items, Networks) else Networks(_network(item) for item in _listed(items, "networks"))


def _listed(items: Iterable[Network], field: str) -> Iterable[Network]:
    if isinstance(items, str) and items == "private":
        return PRIVATE
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise ConfigError(
            f'{field} is {items!r}: give a list of networks, such as ["10.0.0.0/8"], or the text "private"'
        )
    return items


def _network(item: Network) -> IPv4Network | IPv6Network:
    text = str(item) if isinstance(item, (IPv4Address, IPv6Address, IPv4Network, IPv6Network)) else item
    hint = 'give a text like "10.0.0.0/8", "10.1.2.3" or "fd00::/8"'
    if not isinstance(text, str):
        raise ConfigError(f"network {item!r} is not a text: {hint}")
    if "%" in text:
        raise ConfigError(f"network {text!r} has a zone: leave out what follows the %")
    if text in {"private", "unix"}:
        hint = '"private" stands alone, or give [*address.PRIVATE, …]; "unix" is for `trusted` only'
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ConfigError(f"network {text!r} can't be read: {hint}") from None
    mask = text.partition("/")[2]
    if "." in mask and mask != str(network.netmask):
        raise ConfigError(f"network {text!r} has a host mask: write it as {network.with_prefixlen!r}")
    packed = network.network_address.packed
    if packed.startswith(_MAPPED) and network.prefixlen >= 96:
        return IPv4Network((packed[12:], network.prefixlen - 96))
    return network


PRIVATE = Networks(
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "::1/128"),  # loopback
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # RFC 1918
        "fc00::/7",  # RFC 4193, unique local
        *("169.254.0.0/16", "fe80::/10"),  # link-local
        "100.64.0.0/10",  # RFC 6598, carrier-grade NAT
    )
)
"""Where the proxies of a deployment usually are: `trusted="private"`. An own list: Python's `is_private` changes."""


# -- Headers: elements from the right end ----------------------------------------------------------------------------


def _joined(lines: Sequence[str]) -> tuple[str, bool]:
    """All lines as one text of at most `MAX_CHARACTERS`, and whether something on its left was cut off."""
    if len(lines) == 1:
        text = lines[0]
    else:
        length, start = -1, len(lines)
        while start > 0 and length <= MAX_CHARACTERS:
            start -= 1
            length += len(lines[start]) + 1
        text = ",".join(lines[start:])
    return (text, False) if len(text) <= MAX_CHARACTERS else (text[-MAX_CHARACTERS:], True)


def _plain_elements(lines: Sequence[str]) -> list[str]:
    """The elements of a list without quoting, the rightmost first, trimmed, blanks left out."""
    text, cut = _joined(lines)
    if cut:  # what is left of the first comma may be half an address
        text = text.partition(",")[2]
    return [element for part in reversed(text.split(",")) if (element := part.strip(" \t"))]


def _quoted_elements(lines: Sequence[str]) -> list[str]:
    """The same for a list with quoted strings, whose quotes pair up from the right end.

    APPSEC: paired from the left, one quote left open by the client would swallow what the proxies wrote behind it.
    """
    text, cut = _joined(lines)
    parts = []
    end = len(text)
    comma, quote = text.rfind(","), text.rfind('"')
    while True:
        if quote > comma:
            start = _opening(text, quote)
            if start >= 0:
                if comma > start:
                    comma = text.rfind(",", 0, start)
                quote = text.rfind('"', 0, start)
            elif cut:  # its partner was cut off, so all that is left of it may have stood inside quotes
                break
            else:  # left open: from here on leftwards a quote is a character like any other
                quote = -1
        elif comma >= 0:
            parts.append(text[comma + 1 : end])
            end = comma
            comma = text.rfind(",", 0, end)
        else:
            if not cut:
                parts.append(text[:end])
            break
    return [element for part in parts if (element := part.strip(" \t"))]


def _opening(text: str, closing: int) -> int:
    """Where the quoted string begins that ends at `closing`: the next quote to the left that isn't escaped, or -1."""
    start = text.rfind('"', 0, closing)
    while start > 0:
        before = start
        while before > 0 and text[before - 1] == "\\":
            before -= 1
        if (start - before) % 2 == 0:
            break
        start = text.rfind('"', 0, start)
    return start


class Forwarded(NamedTuple):
    """One element of a `Forwarded` header (RFC 7239): its texts as they were sent, without quotes.

    A parameter that is absent or given twice is `None`; in an element that can't be read, all are.
    """

    for_: str | None = None
    by: str | None = None
    host: str | None = None
    proto: str | None = None


def _forwarded_element(element: str) -> Forwarded:
    values: dict[str, str | None] = {}
    position, more = 0, True
    while more:
        pair = _pair(element, position)
        if pair is None:
            return Forwarded()
        name, plain, quoted, separator = pair.groups()
        if name is not None:
            name = name.lower()
            values[name] = None if name in values else _escaped.sub(r"\1", quoted) if plain is None else plain
        position, more = pair.end(), separator == ";"
    if "for" in values and values["for"] is None:  # two clients in one element
        return Forwarded()
    return Forwarded(values.get("for"), values.get("by"), values.get("host"), values.get("proto"))


def forwarded(headers: Headers) -> list[Forwarded]:
    """The elements of all `Forwarded` lines from left to right; never an error, however broken they are.

    The client wrote the left ones. `Resolver` says which of them is to be believed.
    """
    lines = [value for name, value in headers if name.lower() == "forwarded"]
    return [_forwarded_element(element) for element in reversed(_quoted_elements(lines))]


def _read_forwarded(element: str) -> bytes | None:
    node = _forwarded_element(element).for_
    return read(node) if node else None


# -- The client ------------------------------------------------------------------------------------------------------


class Resolver:
    """`client_address` with its options checked and parsed once: `resolver(peer, headers) -> str | None`.

    `trusted`: the proxies: networks, addresses and the word `"unix"` for a peer without an address, or the text
    `"private"` for the networks of `PRIVATE`.
    `header`: the one header that they write: `"x-forwarded-for"`, `"forwarded"`, or one with a single value such as
    `"x-real-ip"`. The proxy must set or extend it itself: one that it only passes on is the client's own word.
    `hops`: a fixed number of proxies instead of a walk. **Without `trusted`, `hops` believes whoever connects**: it is
    for servers that nobody but the proxy can reach.

    Errors: `ConfigError` for options that can't work or could never matter.
    """

    __slots__ = ("_elements", "_hops", "_networks", "_proxies", "_read", "_unix", "header")

    header: str | None
    _elements: Callable[[Sequence[str]], list[str]]
    _read: Callable[[str], bytes | None]

    def __init__(
        self, *, trusted: Iterable[Network] | Networks = (), header: str | None = None, hops: int | None = None
    ) -> None:
        items = list(_listed(trusted, "trusted"))
        self._networks = networks([item for item in items if item != "unix"])
        self._unix = "unix" in items
        self._proxies: set[str] = set()
        self._elements, self._read = _plain_elements, read
        if header is None:
            if items or hops is not None:
                raise ConfigError('trusted and hops need a header to read: add header="x-forwarded-for", or drop them')
            self.header = None
            self._hops = 0
            return
        self.header = header_name(header, "header")
        if hops is not None and (type(hops) is not int or hops < 1):
            raise ConfigError(f"hops is {hops!r}: give the number of proxies, an int of at least 1")
        self._hops = hops or 0
        if self.header == "forwarded":
            self._elements, self._read = _quoted_elements, _read_forwarded
        elif self.header != "x-forwarded-for":
            if not items:
                raise ConfigError(f'header {header!r} needs trusted: the proxies that set it, such as "private"')
            if hops is not None:
                raise ConfigError(f"hops={hops} can't matter: header {header!r} has a single value; drop hops")
            self._hops = 1
        if not items and hops is None:
            raise ConfigError(f'header {header!r} would never be read: add trusted="private" (the proxies), or hops')

    def __call__(self, peer: str | None, headers: Headers) -> str | None:
        """The canonical text of the client's address, or `None`. Never raises for what a client can send."""
        lines = () if self.header is None else [value for name, value in headers if name.lower() == self.header]
        packed = self.packed(peer, lines)
        return None if packed is None else write(packed)

    def packed(self, peer: str | None, lines: Sequence[str]) -> bytes | None:
        """The same as bytes, from the lines of the one header that counts, in their order."""
        if self.header is None:
            return read(peer.strip(" \t")) if peer else None
        covers = self._networks.covers
        if self._unix or self._networks:
            if peer in self._proxies:  # PERF: the same few nearly always; to read and compare it anew takes 0.7 µs
                pass
            elif peer:
                address = read(peer.strip(" \t"))
                if address is None or not covers(address):
                    return address
                if len(self._proxies) < _PROXIES:
                    self._proxies.add(peer)
            elif not self._unix:
                return None
        elements = self._elements(lines)
        if self._hops:
            return self._read(elements[self._hops - 1]) if self._hops <= len(elements) else None
        for element in elements:
            address = self._read(element)
            if address is None or not covers(address):
                return address
        return None


def header_name(name: str, field: str) -> str:
    """`name` in lower case; a `ConfigError` when it can't be the name of a header."""
    if not isinstance(name, str) or not _is_token(name):
        raise ConfigError(f'{field} is {name!r}: give the name of a header, such as "x-forwarded-for"')
    return name.lower()


def client_address(
    peer: str | None,
    headers: Headers,
    *,
    trusted: Iterable[Network] | Networks = (),
    header: str | None = None,
    hops: int | None = None,
) -> str | None:
    """The canonical text of the client's address, or `None` where there is none.

    `peer` is the socket's peer (`REMOTE_ADDR`, the host of the ASGI `client`; `None` or `""` on a unix socket) and
    `headers` a list of (name, value). For the options see `Resolver`, which checks them once instead of at each call.
    **`hops` without `trusted` believes whoever connects.**

    Errors: `ConfigError` for the options, nothing for what a client can send.
    """
    return Resolver(trusted=trusted, header=header, hops=hops)(peer, headers)
