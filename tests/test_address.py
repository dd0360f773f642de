"""`shmlimit.address` against its vectors, and against what must hold whatever a client sends."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shmlimit import address
from shmlimit.address import PRIVATE, Forwarded, Resolver, client_address, forwarded, networks, parse, text
from shmlimit.errors import ConfigError

ROWS = [json.loads(line) for line in (Path(__file__).parent / "vectors/client_address.jsonl").read_text().splitlines()]

RESOLVERS = {
    "peer": Resolver(),
    "walk": Resolver(trusted="private", header="x-forwarded-for"),
    "walk unix": Resolver(trusted=["10.0.0.0/8", "unix"], header="x-forwarded-for"),
    "hops 1": Resolver(header="x-forwarded-for", hops=1),
    "hops 3": Resolver(header="x-forwarded-for", hops=3, trusted="private"),
    "forwarded": Resolver(trusted="private", header="forwarded"),
    "forwarded hops 2": Resolver(header="forwarded", hops=2),
    "single": Resolver(trusted=["10.0.0.0/8", "unix"], header="x-real-ip"),
}
unhurried = settings(deadline=None)  # a busy machine is no failure

BEHIND = [name for name in RESOLVERS if name != "peer"]

pieces = st.sampled_from(
    [
        *("10.0.0.1", "10.9.9.9:80", "203.0.113.7", "198.51.100.2:1234", "2001:db8::1", "[2001:db8::2]:443", "[::1]"),
        *("::ffff:203.0.113.9", "fe80::1%eth0", "0.0.0.0", "::", "unknown", "_hidden", "1.2.3.4.5", "010.0.0.1"),
        *("for=", "For=", "by=", "host=", "=", ";", ",", ", ", '"', '\\"', "\\", "[", "]", ":", ":_p", "%", " ", "\t"),
        *("for=203.0.113.7", 'for="[2001:db8::3]:80"', "for=10.0.0.2", "\0", "\xa0", "\ud800", "1.2.3.4\n"),
    ]
)
garbage = st.one_of(st.lists(pieces, max_size=12).map("".join), st.text(max_size=20))
peers = st.one_of(st.none(), garbage)

trusted_elements = st.sampled_from(["10.0.0.2", " 10.3.4.5:80 ", "[fd00::1]", "::ffff:10.0.0.9", "", "  "])
deciding_elements = st.sampled_from(["203.0.113.7", "[2001:db8::7]:80", "nope", "0.0.0.0", "_h", "1.2.3.4:x", "\\"])


def in_forwarded(element: str) -> str:
    element = element.strip()
    return f'for="{element}";by="a,\\"b"' if element else ""


def ask(resolver: Resolver, peer: str | None, *lines: str) -> str | None:
    return resolver(peer, [(resolver.header or "x-forwarded-for", line) for line in lines])


# -- The vectors -----------------------------------------------------------------------------------------------------


def test_all_rows_are_there() -> None:
    """The vectors are 129 rows with ids of their own."""
    assert len(ROWS) == 129
    assert len({row["id"] for row in ROWS}) == 129


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_vector(row: dict[str, object]) -> None:
    """Each row's request gives the row's address, or its options are refused; compiled or not."""
    peer, headers, options, want, why = (row[name] for name in ("peer", "headers", "options", "want", "why"))
    if want == "CONFIG-ERROR":
        with pytest.raises(ConfigError):
            client_address(peer, headers, **options)
        with pytest.raises(ConfigError):
            Resolver(**options)
    else:
        assert client_address(peer, headers, **options) == want, f"{row['id']}: {why}"
        assert Resolver(**options)(peer, headers) == want, f"{row['id']}: {why}"


# -- What users reported about other limiters ------------------------------------------------------------------------


def test_s39_an_address_with_a_port_loses_it() -> None:
    """`1.2.3.4:5678` and `[2001:db8::1]:443` in a believed header are addresses."""
    assert ask(RESOLVERS["walk"], "10.0.0.1", "1.2.3.4:5678") == "1.2.3.4"
    assert ask(RESOLVERS["walk"], "10.0.0.1", "[2001:db8::1]:443") == "2001:db8::1"


@pytest.mark.parametrize(
    "element", ["[1.2.3.4]:80", "2001:db8::1%", "2001:db8::1%a%b", "[2001:db8::1", "[]", "[", "1.2.3.4:_"]
)
def test_half_written_elements_are_garbage(element: str) -> None:
    """Brackets round IPv4, odd zones and what was begun only are no address."""
    assert ask(RESOLVERS["walk"], "10.0.0.1", element) is None


def test_s41_the_leftmost_element_is_not_believed() -> None:
    """What the client wrote in front changes nothing, and an untrusted peer is the client itself."""
    assert ask(RESOLVERS["walk"], "10.0.0.1", "9.9.9.9, 203.0.113.7") == "203.0.113.7"
    assert ask(RESOLVERS["walk"], "198.51.100.9", "9.9.9.9, 203.0.113.7") == "198.51.100.9"
    assert ask(RESOLVERS["hops 1"], "10.0.0.1", "9.9.9.9, 203.0.113.7") == "203.0.113.7"


def test_s42_without_settings_no_header_counts() -> None:
    """`evil, 1.1.1.1` without options gives the peer, never header text."""
    assert client_address("203.0.113.7", [("X-Forwarded-For", "evil, 1.1.1.1")]) == "203.0.113.7"


def test_s48_fewer_elements_than_hops_give_no_address() -> None:
    """`hops=2` and one element: `None`, and nothing is raised."""
    assert client_address("10.0.0.1", [("X-Forwarded-For", "1.1.1.1")], header="x-forwarded-for", hops=2) is None


# -- Whatever a client sends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESOLVERS)
@unhurried
@given(peer=peers, lines=st.lists(garbage, max_size=4))
def test_the_answer_is_canonical_or_none(name: str, peer: str | None, lines: list[str]) -> None:
    """Nothing raises, and an answer is the canonical text of an address that is somebody's."""
    answer = ask(RESOLVERS[name], peer, *lines)
    if answer is not None:
        ip = ipaddress.ip_address(answer)
        assert str(ip) == answer
        assert int(ip) != 0
        assert getattr(ip, "ipv4_mapped", None) is None


@pytest.mark.parametrize("name", BEHIND)
@unhurried
@given(lines=st.lists(garbage, max_size=4))
def test_several_lines_are_their_join(name: str, lines: list[str]) -> None:
    """Several lines give what one line gives in which they are joined with commas."""
    resolver = RESOLVERS[name]
    for peer in ("10.0.0.1", ""):
        assert ask(resolver, peer, *lines) == ask(resolver, peer, ",".join(lines))


@pytest.mark.parametrize("name", BEHIND)
@unhurried
@given(
    left=garbage,
    times=st.sampled_from([1, 1, 1, 2000]),
    deciding=deciding_elements,
    trusted=st.lists(trusted_elements, min_size=2, max_size=4),
)
@example(left='for="evil', times=1, deciding="203.0.113.7", trusted=["10.0.0.2", "10.0.0.2"])
@example(left='for=9.9.9.9;by="\\', times=2000, deciding="203.0.113.7", trusted=["10.0.0.2", "10.0.0.2"])
def test_the_left_never_matters(name: str, left: str, times: int, deciding: str, trusted: list[str]) -> None:
    """Text in front of what the proxies wrote never changes the answer, in the same line or in a line before it."""
    resolver = RESOLVERS[name]
    elements = [deciding, *trusted]
    if "forwarded" in name:
        elements = [in_forwarded(element) for element in elements]
    assume("hops" not in name or sum(1 for element in elements if element.strip()) >= 3)
    written = ",".join(elements)
    want = ask(resolver, "10.0.0.1", written)
    assert ask(resolver, "10.0.0.1", left * times + "," + written) == want
    assert ask(resolver, "10.0.0.1", left * times, written) == want
    assert ask(resolver, "10.0.0.1", left * times, *elements) == want


@pytest.mark.parametrize("name", BEHIND)
@unhurried
@given(lines=st.lists(garbage, max_size=4), limit=st.integers(1, 60))
@example(lines=['for="a, for=6.6.6.6, for=1.1.1.1", for=10.0.0.2'], limit=36)
def test_a_cut_never_forges_an_address(name: str, lines: list[str], limit: int) -> None:
    """Looking at fewer characters gives the same answer or none, never another one."""
    whole = ask(RESOLVERS[name], "10.0.0.1", *lines)
    with mock.patch.object(address, "MAX_CHARACTERS", limit):
        assert ask(RESOLVERS[name], "10.0.0.1", *lines) in {whole, None}


def test_a_cut_leaves_half_an_address_out() -> None:
    """Of 8,192 characters the part before the first comma is dropped; with exactly 8,192 nothing is."""
    fill = "," * 8176
    assert ask(RESOLVERS["walk"], "10.0.0.1", "203.0.113.7" + fill + "10.0.0.2") is None  # seen from 03.0.113.7 on
    assert ask(RESOLVERS["walk"], "10.0.0.1", "9.113.7.1" + fill[:8175] + "10.0.0.2") == "9.113.7.1"
    assert ask(RESOLVERS["walk"], "10.0.0.1", "x9.113.7.1" + fill[:8175] + "10.0.0.2") is None
    assert ask(RESOLVERS["hops 3"], "10.0.0.1", "1.1.1.1", *[""] * 8190, "2.2.2.2", "3.3.3.3") is None


def test_a_cut_over_several_lines() -> None:
    """Lines count with the commas that join them: with 8,192 characters all are seen, with one more the first isn't."""
    resolver = Resolver(trusted=["::1"], header="x-forwarded-for")
    for blanks, want in ((8192 - 7 - 1 - 4000 - 1 - 1 - 3, "1.1.1.1"), (8192 - 7 - 4000 - 1 - 1 - 3, None)):
        lines = ["1.1.1.1", " " * 4000, " " * blanks, "::1"]
        assert len(",".join(lines)) == 8192 + (want is None)
        assert ask(resolver, "::1", *lines) == want
        assert ask(resolver, "::1", ",".join(lines)) == want


def test_a_cut_makes_no_parameter_of_half_a_name() -> None:
    """A cut in the middle of `xfor=6.6.6.6` leaves no element `for=6.6.6.6`."""
    assert ask(RESOLVERS["forwarded"], "10.0.0.1", "xfor=6.6.6.6" + "," * (8192 - 11)) is None


def test_a_cut_inside_quotes_drops_the_quoted_text() -> None:
    """Where the cut took a quote's partner, the text left of it may have been quoted and is no element."""
    resolver = Resolver(header="forwarded", hops=3)
    assert ask(resolver, "", 'for="' + "a" * 8192 + ', for=6.6.6.6, for=1.1.1.1", for=10.0.0.2') is None
    assert ask(resolver, "", "a" * 8192 + ", for=6.6.6.6, for=1.1.1.1, for=10.0.0.2") == "6.6.6.6"


@pytest.mark.parametrize("line", [",1" * 500_000, '"' * 500_000, '\\"' * 500_000, '",\\' * 500_000])
def test_the_work_is_bounded(line: str) -> None:
    """Of a header of any length at most 4,096 elements are looked at, in 8,192 characters."""
    for lines in ([line], [line] * 3, [line[:10]] * 100_000):
        for split in (address._plain_elements, address._quoted_elements):
            elements = split(lines)
            assert len(elements) <= 4096
            assert sum(map(len, elements)) <= 8192


# -- Small pure functions --------------------------------------------------------------------------------------------


@unhurried
@given(st.integers(0, 2**128 - 1) | st.integers(0, 2**34) | st.lists(st.sampled_from([0, 0, 1, 0xABC0]), min_size=8))
def test_the_text_of_ipv6_is_pythons(number: int | list[int]) -> None:
    """`write` gives what `ipaddress` gives: RFC 5952, hexadecimal groups only."""
    if isinstance(number, list):
        number = sum(group << 16 * place for place, group in enumerate(number[:8]))
    ip = ipaddress.IPv6Address(number)
    assert address.write(ip.packed) == str(ip)


digits = st.text("0123456789abcdefF:.", max_size=24)


@unhurried
@given(digits | garbage | st.ip_addresses().map(str))
@example("::ffff:1.2.3.4")
@example("1::2:3:4:5:6:7:8")
@example("00001::")
def test_parse_takes_what_python_takes(candidate: str) -> None:
    """`parse` and `ipaddress` agree on what is an address, zones aside; mapped ones are unwrapped."""
    try:
        want = ipaddress.ip_address(candidate)
    except ValueError:
        want = None
    if "%" in candidate:
        want = None
    if isinstance(want, ipaddress.IPv6Address) and want.ipv4_mapped:
        want = want.ipv4_mapped
    assert parse(candidate) == want


@pytest.mark.parametrize(
    "candidate", ["1.2.3.4:80", "[::1]", "fe80::1%eth0", " 1.2.3.4", "01.2.3.4", "1.2.3", "", "٣.1.1.1"]
)
def test_parse_is_strict(candidate: str) -> None:
    """Ports, brackets, zones, blanks, leading zeros and foreign digits are refused."""
    assert parse(candidate) is None


def test_text_unwraps() -> None:
    """`text` writes mapped addresses as IPv4, in any Python, and drops a zone."""
    assert text(ipaddress.ip_address("::ffff:1.2.3.4")) == "1.2.3.4"
    assert text(ipaddress.ip_address("2001:DB8::1%eth0")) == "2001:db8::1"
    assert text(ipaddress.ip_address("0.0.0.0")) == "0.0.0.0"


def test_networks_contain_addresses() -> None:
    """`in` takes texts and objects, unwraps mapped addresses, and is false for anything else."""
    found = networks(["10.1.2.3/8", "2001:db8::/32", ipaddress.ip_address("192.0.2.1"), "::ffff:198.51.100.0/120"])
    for inside in ("10.9.9.9", "::ffff:10.0.0.1", "2001:db8:1::", "192.0.2.1", "198.51.100.77"):
        assert inside in found
        assert ipaddress.ip_address(inside) in found
    for outside in ("11.0.0.0", "192.0.2.2", "::10.0.0.1", "2001:db9::", "198.51.101.0", "nope", "", None, 10):
        assert outside not in found
    assert [str(network) for network in found] == ["10.0.0.0/8", "2001:db8::/32", "192.0.2.1/32", "198.51.100.0/24"]
    assert (len(found), len(networks([]))) == (4, 0)
    assert "networks(['10.0.0.0/8'" in repr(found)
    assert networks(found) is found


def test_private_networks() -> None:
    """`PRIVATE` is loopback, RFC 1918, RFC 4193, link-local and carrier-grade NAT, and nothing beside them."""
    for edge in (
        *("127.0.0.0", "127.255.255.255", "10.0.0.0", "10.255.255.255", "172.16.0.0", "172.31.255.255", "192.168.0.0"),
        *("192.168.255.255", "169.254.0.0", "169.254.255.255", "100.64.0.0", "100.127.255.255"),
        *("::1", "fc00::", "fdff::1", "fe80::", "febf:ffff::1"),
    ):
        assert edge in PRIVATE
    for beyond in ("126.255.255.255", "9.255.255.255", "11.0.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255"):
        assert beyond not in PRIVATE
    for beyond in ("192.169.0.0", "169.253.255.255", "169.255.0.0", "100.63.255.255", "100.128.0.0", "::", "::2"):
        assert beyond not in PRIVATE
    for beyond in ("fbff::", "fe00::", "fec0::", "0.0.0.0", "224.0.0.1", "203.0.113.7"):
        assert beyond not in PRIVATE
    assert list(networks("private")) == list(PRIVATE)


def test_forwarded_elements() -> None:
    """`forwarded` gives all elements in their order, unquoted; one that can't be read is an empty one."""
    headers = [
        ("Forwarded", 'For="[2001:db8:cafe::17]:4711";proto=https, for=_hidden;BY=203.0.113.43;host="a\\"b"'),
        ("X-Forwarded-For", "1.1.1.1"),
        ("forwarded", 'proto=http; proto=https;for=1.1.1.1, , broken, for=2.2.2.2;for=3.3.3.3;by=a,;,host="a,b";by=_c'),
    ]
    assert forwarded(headers) == [
        Forwarded(for_="[2001:db8:cafe::17]:4711", proto="https"),
        Forwarded(for_="_hidden", by="203.0.113.43", host='a"b'),
        Forwarded(for_="1.1.1.1"),
        *[Forwarded()] * 3,
        Forwarded(host="a,b", by="_c"),
    ]
    assert forwarded([]) == []


def test_a_quote_left_open_spoils_its_own_element() -> None:
    """Left of a quote without a partner, commas part elements as everywhere, and the elements count."""
    line = 'for=1.1.1.1, for="evil, for="_a,b"'
    assert forwarded([("forwarded", line)]) == [Forwarded("1.1.1.1"), Forwarded(), Forwarded("_a,b")]
    assert ask(Resolver(header="forwarded", hops=3), "", line) == "1.1.1.1"


@unhurried
@given(st.lists(garbage, max_size=4))
def test_forwarded_never_raises(lines: list[str]) -> None:
    """`forwarded` gives an element for each that the resolver counts."""
    elements = forwarded([("forwarded", line) for line in lines])
    assert len(elements) == len(address._quoted_elements(lines))


# -- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trusted": "unix", "header": "x-forwarded-for"}, "give a list"),
        ({"trusted": None, "header": "x-forwarded-for"}, "give a list"),
        ({"trusted": [10], "header": "x-forwarded-for"}, "not a text"),
        ({"trusted": ["private"], "header": "x-forwarded-for"}, "PRIVATE"),
        ({"trusted": ["10.0.0.0/0.255.255.255"], "header": "x-forwarded-for"}, "10.0.0.0/8"),
        ({"trusted": ["10.0.0.0/8 "], "header": "x-forwarded-for"}, "can't be read"),
        ({"trusted": [ipaddress.ip_address("fe80::1%a")], "header": "x-forwarded-for"}, "zone"),
        ({"header": "x-forwarded-for", "hops": True}, "int of at least 1"),
        ({"header": "x-forwarded-for", "hops": 1.0}, "int of at least 1"),
        ({"header": "x-real-ip", "trusted": "private", "hops": 1}, "drop hops"),
        ({"header": "x real ip", "trusted": "private"}, "name of a header"),
        ({"header": b"x-real-ip", "trusted": "private"}, "name of a header"),
        ({"header": "x-forwarded-for"}, 'add trusted="private"'),
        ({"hops": 1}, "need a header"),
    ],
    ids=str,
)
def test_a_mistake_is_told_at_once(options: dict[str, object], says: str) -> None:
    """Options that can't work or could never matter are a `ConfigError` that says what to do."""
    with pytest.raises(ConfigError, match=says):
        Resolver(**options)


def test_trusted_takes_networks() -> None:
    """`trusted` may be `PRIVATE`, or a list with its networks and `"unix"` in it, also an iterator."""
    for trusted in ("private", PRIVATE, iter([*PRIVATE, "unix"])):
        assert ask(Resolver(trusted=trusted, header="x-real-ip"), "127.0.0.1", "203.0.113.7") == "203.0.113.7"
    assert ask(Resolver(trusted=[*PRIVATE, "unix"], header="x-real-ip"), "", "203.0.113.7") == "203.0.113.7"
    assert ask(Resolver(trusted="private", header="x-real-ip"), "", "203.0.113.7") is None
