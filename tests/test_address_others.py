"""`shmlimit.address` beside what others make of the same headers: uvicorn, werkzeug, and the package `forwarded`.

Each known difference is pinned with its reason and taken out of their answer (or kept out of the headers); in all the
rest, whatever the elements are, the answers are the same.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

import pytest
from forwarded import client_from_forwarded, client_from_x_forwarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from werkzeug.middleware.proxy_fix import ProxyFix

from shmlimit.address import client_address

PEER = "10.0.0.1"
TRUSTED = ["10.0.0.0/8", "fd00::/8"]
unhurried = settings(deadline=None)

proxies = st.sampled_from(["10.0.0.2", "10.1.1.1:80", "[fd00::1]", "fd00::2", "10.0.0.3:65535"])
clients = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip.exploded.upper()}]:443"),
    st.sampled_from(["203.0.113.7", "198.51.100.2:1234", "[2001:db8::2]:443", "2001:DB8:0::5"]),
)
garbage = st.sampled_from(["unknown", "_hidden", "1.2.3.4.5", "010.0.0.1", "1.2.3.4:x", "0.0.0.0", "::", "[::1", "a b"])
blanks = st.sampled_from(["", " ", "\t"])
mapped = st.sampled_from(["::ffff:203.0.113.9", "::ffff:10.0.0.9", "::FFFF:0a00:9"])


def lists(*kinds: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.one_of(proxies, clients, *kinds), min_size=1, max_size=5)


def ours(value: str, *, header: str = "x-forwarded-for", hops: int | None = None) -> str | None:
    trusted = TRUSTED if hops is None else ()
    return client_address(PEER, [(header, value)], trusted=trusted, header=header, hops=hops)


def as_ours(host: str | None, trusted: Iterable[str] = TRUSTED) -> str | None:
    """Their answer without what is known: text that is no address, `0.0.0.0` and `::` are no client here; a trusted
    client means that all were (then they take the leftmost, here there is none); mapped addresses are IPv4; and text is
    made anew from the address.
    """
    try:
        ip = ipaddress.ip_address(host or "")
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.scope_id:
            return None
        ip = ip.ipv4_mapped or ip
    nobody = ip.is_unspecified or any(ip in ipaddress.ip_network(network) for network in trusted)
    return None if nobody else str(ip)


# ---- the package forwarded -------------------------------------------------------------------------------------------


def of_forwarded(read: Callable[..., object], value: str, **options: object) -> str | None:
    client = read(value, PEER, **options)
    if client is None:
        return None
    node = client.node  # type: ignore[attr-defined]
    return str(node.ip) if node.ip is not None else str(node)


@unhurried
@given(lists(garbage, blanks, mapped))
@example(["203.0.113.7", "::ffff:10.0.0.9"])
def test_forwarded_reads_x_forwarded_for_alike(elements: list[str]) -> None:
    """The walk past trusted proxies stops at the same element, garbage, blanks and mapped addresses included."""
    value = ", ".join(elements)
    assert ours(value) == as_ours(of_forwarded(client_from_x_forwarded, value, trusted=TRUSTED))


@unhurried
@given(lists(garbage, blanks, mapped), st.sampled_from(['for="{}"', 'FOR="{}";by=_x', 'proto=https;for="{}"']))
def test_forwarded_reads_forwarded_alike(elements: list[str], form: str) -> None:
    """So it does in elements of RFC 7239, quoted, with other parameters beside `for`."""
    value = ", ".join(form.format(element) if element.strip() else element for element in elements)
    assert ours(value, header="forwarded") == as_ours(of_forwarded(client_from_forwarded, value, trusted=TRUSTED))


@unhurried
@given(lists(garbage, mapped), st.integers(1, 6))
def test_forwarded_counts_hops_alike(elements: list[str], hops: int) -> None:
    """With a number of proxies, the same element counts, and fewer of them give no client."""
    value = ", ".join(elements)
    assert ours(value, hops=hops) == as_ours(of_forwarded(client_from_x_forwarded, value, hops=hops), trusted=())


@pytest.mark.parametrize(
    ("value", "theirs", "why"),
    [
        ("unknown", "unknown", "an identifier that names nobody would be one bucket for all who send it"),
        ("_hidden", "_hidden", "the same"),
        ("0.0.0.0", "0.0.0.0", "no client has it"),
        ("10.0.0.2, 10.0.0.3", "10.0.0.2", "all trusted: what the leftmost proxy was told is not known"),
        (" ", PEER, "no element at all: the proxy said nothing, and it is no client"),
    ],
)
def test_differences_from_forwarded(value: str, theirs: str, why: str) -> None:
    """Where it gives an answer and we give none."""
    assert of_forwarded(client_from_x_forwarded, value, trusted=TRUSTED) == theirs
    assert ours(value) is None, why


# ---- uvicorn ---------------------------------------------------------------------------------------------------------


def of_uvicorn(value: str) -> str:
    import asyncio

    seen: dict[str, str] = {}

    async def app(scope: dict[str, object], _receive: object, _send: object) -> None:
        seen["host"] = scope["client"][0]  # type: ignore[index]

    scope = {"type": "http", "client": (PEER, 1), "headers": [(b"x-forwarded-for", value.encode())]}
    asyncio.run(ProxyHeadersMiddleware(app, TRUSTED)(scope, None, None))  # type: ignore[arg-type]
    return seen["host"]


@unhurried
@given(lists(garbage))
def test_uvicorn_walks_alike(elements: list[str]) -> None:
    """The same element decides, without blanks and mapped addresses between."""
    value = ", ".join(elements)
    assert ours(value) == as_ours(of_uvicorn(value))


@pytest.mark.parametrize(
    ("value", "theirs", "want", "why"),
    [
        ("203.0.113.7, ", PEER, "203.0.113.7", "a blank is no element (RFC 9110, section 5.6.1); they take the proxy"),
        ("203.0.113.7, ::ffff:10.0.0.9", "::ffff:10.0.0.9", "203.0.113.7", "a mapped address is the IPv4 proxy"),
        ("evil text", "evil text", None, "what is no address would be a key that the client makes up"),
        ("2001:DB8::0005", "2001:DB8::0005", "2001:db8::5", "one client, one text, however it is spelled"),
        ("203.0.113.7:x", "203.0.113.7:x", None, "a port that is none spoils its element"),
        ("10.0.0.2", "10.0.0.2", None, "all trusted: there is no client"),
        ("fe80::1%eth0", "fe80::1%eth0", "fe80::1", "a zone means something on its own host only"),
    ],
)
def test_differences_from_uvicorn(value: str, theirs: str, want: str | None, why: str) -> None:
    """What uvicorn puts into `client`, and the address here."""
    assert of_uvicorn(value) == theirs
    assert ours(value) == want, why


# ---- werkzeug --------------------------------------------------------------------------------------------------------


def of_werkzeug(value: str, hops: int) -> str:
    seen: dict[str, str] = {}

    def app(environ: dict[str, str], _start: object) -> Iterable[bytes]:
        seen["host"] = environ["REMOTE_ADDR"]
        return []

    environ = {"REMOTE_ADDR": PEER, "HTTP_X_FORWARDED_FOR": value}
    ProxyFix(app, x_for=hops)(environ, None)  # type: ignore[arg-type]
    return seen["host"]


plain = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6).filter(lambda ip: ip.ipv4_mapped is None)).map(str)


@unhurried
@given(st.lists(st.one_of(plain, blanks), min_size=1, max_size=5), st.integers(1, 5))
def test_werkzeug_counts_alike(elements: list[str], hops: int) -> None:
    """The n-th address from the right, blanks passed over; with fewer they leave the peer, and here there is none."""
    value = ", ".join(elements)
    theirs = of_werkzeug(value, hops)
    fewer = sum(bool(element.strip()) for element in elements) < hops
    assert (theirs == PEER) >= fewer
    assert ours(value, hops=hops) == (None if fewer or theirs in {"0.0.0.0", "::"} else theirs)


@pytest.mark.parametrize(
    ("value", "hops", "theirs", "want", "why"),
    [
        ("9.9.9.9", 2, PEER, None, "fewer elements than proxies: their answer is one bucket for all"),
        ('9.9.9.9", 203.0.113.7', 1, PEER, "203.0.113.7", "a quote that the client left open swallows the rest"),
        ("203.0.113.7:1234", 1, "203.0.113.7:1234", "203.0.113.7", "each connection would be a client of its own"),
        ("evil text", 1, "evil text", None, "what is no address would be a key that the client makes up"),
        ("::ffff:203.0.113.7", 1, "::ffff:203.0.113.7", "203.0.113.7", "one client, one text"),
        ("0.0.0.0", 1, "0.0.0.0", None, "no client has it"),
    ],
)
def test_differences_from_werkzeug(value: str, hops: int, theirs: str, want: str | None, why: str) -> None:
    """What werkzeug puts into REMOTE_ADDR, and the address here."""
    assert of_werkzeug(value, hops) == theirs
    assert ours(value, hops=hops) == want, why
