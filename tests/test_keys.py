"""`shmlimit.keys` against its vectors, on each kind of request that a key takes."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import falcon
import falcon.asgi
import falcon.testing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmlimit import keys
from shmlimit.errors import ConfigError
from tests.request_kinds import Headers, each_kind, falcon_asgi, receive, scope

ROWS = [json.loads(line) for line in (Path(__file__).parent / "vectors/client_key.jsonl").read_text().splitlines()]

unhurried = settings(deadline=None)  # a busy machine is no failure


# -- The vectors -----------------------------------------------------------------------------------------------------


def test_all_rows_are_there() -> None:
    """The vectors are 31 rows with ids of their own."""
    assert len(ROWS) == 31
    assert len({row["id"] for row in ROWS}) == 31


@each_kind
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_vector(row: dict[str, Any], request_of: Any) -> None:
    """Each row's request gives the row's key, or its options are refused, on every kind of request."""
    if row["want"] == "CONFIG-ERROR":
        with pytest.raises(ConfigError):
            keys.client_ip(**row["options"])
        return
    key = keys.client_ip(**row["options"])
    assert key(request_of(row["peer"], row["headers"])) == row["want"], f"{row['id']}: {row['why']}"
    if not row["headers"]:
        assert keys.address_key(row["peer"], **row["options"]) == row["want"], f"{row['id']}: {row['why']}"


ADDRESS_ROWS = (Path(__file__).parent / "vectors/client_address.jsonl").read_text().splitlines()


@each_kind
def test_the_address_is_that_of_the_address_vectors(request_of: Any) -> None:
    """`client_ip` takes the options of `client_address`, and keys by the address that it gives, in all 129 rows."""
    assert len(ADDRESS_ROWS) == 129
    for line in ADDRESS_ROWS:
        row = json.loads(line)
        where = f"{row['id']}: {row['why']}"
        if row["want"] == "CONFIG-ERROR":
            with pytest.raises(ConfigError):
                keys.client_ip(**row["options"])
        elif row["id"] != "A054" or request_of in (scope, falcon_asgi):  # an environ can't tell _ from -
            key = keys.client_ip(**row["options"], v6_prefix=128)
            assert key(request_of(row["peer"], row["headers"])) == keys.address_key(row["want"], v6_prefix=128), where


# -- What users reported about other limiters ------------------------------------------------------------------------


@each_kind
def test_s39_a_port_is_no_part_of_a_key(request_of: Any) -> None:
    """`1.2.3.4:5678` and `[2001:db8::1]:443` in a believed header are keyed without port and brackets."""
    key = keys.client_ip(trusted="private", header="x-forwarded-for")
    assert key(request_of("10.0.0.1", [("X-Forwarded-For", "1.2.3.4:5678")])) == "ip:1.2.3.4"
    assert key(request_of("10.0.0.1", [("X-Forwarded-For", "[2001:db8::1]:443")])) == "net:2001:db8::/64"


@each_kind
def test_s40_mapped_addresses_are_not_one_client(request_of: Any) -> None:
    """IPv4 inside IPv6 is keyed as IPv4, never masked as IPv6."""
    assert keys.client_ip()(request_of("::ffff:1.2.3.4", [])) == "ip:1.2.3.4"
    assert keys.client_ip()(request_of("::ffff:5.6.7.8", [])) == "ip:5.6.7.8"


@each_kind
def test_s41_the_leftmost_element_is_not_believed(request_of: Any) -> None:
    """Behind one trusted proxy the right element counts, and from an untrusted peer none."""
    key = keys.client_ip(trusted=["10.0.0.1"], header="x-forwarded-for")
    assert key(request_of("10.0.0.1", [("X-Forwarded-For", "9.9.9.9, 203.0.113.7")])) == "ip:203.0.113.7"
    assert key(request_of("10.0.0.2", [("X-Forwarded-For", "9.9.9.9, 203.0.113.7")])) == "ip:10.0.0.2"


@each_kind
def test_s42_header_text_is_never_the_key(request_of: Any) -> None:
    """`evil, 1.1.1.1` without settings leaves the key to the peer."""
    assert keys.client_ip()(request_of("203.0.113.7", [("X-Forwarded-For", "evil, 1.1.1.1")])) == "ip:203.0.113.7"


@each_kind
def test_s48_fewer_elements_than_hops_are_an_unknown_client(request_of: Any) -> None:
    """`hops=2` with one element is a request without an address, and no exception."""
    key = keys.client_ip(header="x-forwarded-for", hops=2)
    assert key(request_of("10.0.0.1", [("X-Forwarded-For", "1.1.1.1")])) == "unknown"


# -- The key of an address -------------------------------------------------------------------------------------------

v4 = st.integers(1, 2**32 - 1).map(ipaddress.IPv4Address)
v6 = st.one_of(st.integers(1, 2**128 - 1), st.integers(0x2002 << 112, 0x2003 << 112)).map(ipaddress.IPv6Address)


@unhurried
@given(v4)
def test_the_spelling_of_ipv4_does_not_matter(ip: ipaddress.IPv4Address) -> None:
    """One key for an IPv4 address, with a port, mapped in any spelling, in brackets, with blanks around."""
    high, low = divmod(int(ip), 65536)
    spellings = [f"{ip}:1", f"{ip}:_p", f"::ffff:{ip}", f"::FFFF:{high:x}:{low:x}", f"[::ffff:{ip}]:80", f" {ip}\t"]
    spellings.append(ipaddress.IPv6Address(f"::ffff:{ip}").exploded)
    assert {keys.address_key(spelling) for spelling in spellings} == {f"ip:{ip}"}


@unhurried
@given(v6, st.sampled_from([0, 1, 32, 48, 56, 63, 64, 127, 128]))
def test_the_spelling_of_ipv6_does_not_matter(ip: ipaddress.IPv6Address, prefix: int) -> None:
    """One key for an IPv6 address however it is written, and it is the network that `ipaddress` finds."""
    plain, long = str(ip), ip.exploded
    spellings = [plain, long, plain.upper(), f"[{long}]", f"[{plain}]:443", f"{plain}%eth0", f"[{long}%1]:_p"]
    found = {keys.address_key(spelling, v6_prefix=prefix) for spelling in spellings}
    assert len(found) == 1
    (key,) = found
    if ip.ipv4_mapped is None and ip.sixtofour is None and not plain.startswith("64:ff9b::"):
        network = ipaddress.IPv6Network((int(ip), prefix), strict=False)
        assert key == (f"ip:{ip}" if prefix == 128 else f"net:{network}")


@unhurried
@given(v4, st.integers(0, 32))
def test_the_prefix_of_ipv4(ip: ipaddress.IPv4Address, prefix: int) -> None:
    """`v4_prefix` gives the network that `ipaddress` finds."""
    network = ipaddress.IPv4Network((int(ip), prefix), strict=False)
    assert keys.address_key(str(ip), v4_prefix=prefix) == (f"ip:{ip}" if prefix == 32 else f"net:{network}")


EDGES = {
    True: "1.0.0.0 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 169.253.255.255 "
    "169.255.0.0 172.15.255.255 172.32.0.0 192.167.255.255 192.169.0.0 223.255.255.255 203.0.113.7",
    False: "0.0.0.0 0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.127.255.255 127.0.0.0 127.255.255.255 "
    "169.254.0.0 169.254.255.255 172.16.0.0 172.31.255.255 192.168.0.0 192.168.255.255 224.0.0.0 255.255.255.255",
}


@pytest.mark.parametrize("public", EDGES)
def test_only_public_addresses_come_out_of_ipv6(public: bool) -> None:
    """NAT64 and 6to4 give the IPv4 address inside at the edges of the public ranges, and else the prefix rule."""
    for inside in EDGES[public].split():
        high, low = divmod(int(ipaddress.IPv4Address(inside)), 65536)
        nat64 = keys.address_key(f"64:ff9b::{inside}")
        sixtofour = keys.address_key(f"2002:{high:x}:{low:x}:5::1")
        if public:
            assert (nat64, sixtofour) == (f"ip:{inside}", f"ip:{inside}")
        else:
            assert nat64 == "net:64:ff9b::/64"
            network = ipaddress.ip_network(f"2002:{high:x}:{low:x}:5::/64")
            assert sixtofour == f"net:{network}"


@pytest.mark.parametrize("text", [None, "", "garbage", "0.0.0.0", "::", "unknown", "1.2.3.4, 5.6.7.8", "\ud800", "a\0"])
def test_what_is_no_address_is_unknown(text: str | None) -> None:
    """`address_key` gives `unknown` for all that is no address: no exception, and no key of its own."""
    assert keys.address_key(text) == "unknown"


# -- A header --------------------------------------------------------------------------------------------------------


@each_kind
def test_a_header_is_the_key(request_of: Any) -> None:
    """The value is the key, whatever the letter case of the name; blanks around it don't matter."""
    for name in ("X-Api-Key", "x-api-key"):
        assert keys.header(name)(request_of("1.1.1.1", [("X-API-Key", "s3cret")])) == "s3cret"
    assert keys.header("x-api-key")(request_of("1.1.1.1", [("X-Api-Key", " s3cret\t")])) == "s3cret"
    assert keys.header("x-api-key")(request_of("1.1.1.1", [("X-Api-Key", "caf\xe9 \xff")])) == "caf\xe9 \xff"
    assert keys.header("x-api-key")(request_of("1.1.1.1", [("X-Api-Key", "a"), ("X-Api-Key", "b")])) == "a,b"


def test_content_type_has_no_prefix_in_an_environ() -> None:
    """The two headers that WSGI names differently are found too."""
    made = {"REMOTE_ADDR": "1.1.1.1", "CONTENT_TYPE": "text/plain", "CONTENT_LENGTH": "5"}
    assert keys.header("Content-Type")(made) == "text/plain"
    assert keys.header("content-length")(made) == "5"


@each_kind
@pytest.mark.parametrize("headers", [[], [("X-Api-Key", "")], [("X-Api-Key", " \t")], [("X-Other", "a")]], ids=str)
def test_a_missing_header_is_one_explicit_thing(request_of: Any, headers: Headers) -> None:
    """A missing or empty header is the shared key, a refusal, not limited, or another key's matter, as was chosen."""
    request = request_of("203.0.113.7", headers)
    assert keys.header("x-api-key")(request) == "unknown"
    assert keys.header("x-api-key", missing="shared")(request) == "unknown"
    assert keys.header("x-api-key", missing="deny")(request) is keys.DENY
    assert keys.header("x-api-key", missing="skip")(request) is None
    assert keys.header("x-api-key", missing=keys.client_ip())(request) == "ip:203.0.113.7"
    assert keys.header("x-api-key", missing=keys.header("x-other"))(request) == (
        "a" if "Other" in str(headers) else "unknown"
    )
    assert keys.header("x-api-key", missing=lambda _: b"own")(request) == b"own"


@unhurried
@given(st.text(st.characters(max_codepoint=255), min_size=1), st.text(st.characters(max_codepoint=255), min_size=1))
def test_two_values_are_two_keys(one: str, other: str) -> None:
    """Two values are two keys, and none is empty."""
    key = keys.header("x-api-key")
    found, second = (key({"HTTP_X_API_KEY": value}) for value in (one, other))
    assert found
    assert (found == second) == (one.strip(" \t") == other.strip(" \t"))


@pytest.mark.parametrize("value", ["ip:203.0.113.7", "net:2001:db8::/64", "unknown", "header:ip:203.0.113.7"])
def test_a_header_never_forges_the_key_of_an_address(value: str) -> None:
    """Nobody spends the quota of an address by sending its key; such values keep keys of their own."""
    assert keys.header("x-api-key")({"HTTP_X_API_KEY": value}) == "header:" + value


def test_the_docstring_says_what_a_header_is_worth() -> None:
    """Whoever reads `header` learns that an unverified one is no identity."""
    assert "no identity" in (keys.header.__doc__ or "")
    assert "limit by address beside it" in (keys.header.__doc__ or "")


# -- Kinds of requests -----------------------------------------------------------------------------------------------


def test_iterables_of_asgi_are_kept_for_the_application() -> None:
    """Headers and client that can be read only once, as falcon's test client sends them, can be read again."""
    headers = {"X-Forwarded-For": "203.0.113.7", "X-Api-Key": "a"}
    made = falcon.testing.create_scope(headers=headers, remote_addr="10.0.0.1")
    assert iter(made["headers"]) is made["headers"]
    for _ in range(2):
        assert keys.client_ip(trusted="private", header="x-forwarded-for")(made) == "ip:203.0.113.7"
        assert keys.header("x-api-key")(made) == "a"
    request = falcon.asgi.Request(made, receive)
    assert request.get_header("x-api-key") == "a"
    assert request.remote_addr == "10.0.0.1"
    made = falcon.testing.create_scope(headers=headers, remote_addr="10.0.0.1")
    made["headers"] = list(made["headers"])  # of pairs that are iterators themselves
    assert [keys.header("x-api-key")(made) for _ in range(2)] == ["a", "a"]


def test_a_falcon_request_that_has_read_its_headers() -> None:
    """A falcon ASGI request is asked itself: its scope's headers may be used up."""
    made = falcon.testing.create_scope(headers={"X-Real-IP": "203.0.113.7"}, remote_addr="10.0.0.1")
    request = falcon.asgi.Request(made, receive)
    assert list(made["headers"]) == []
    assert keys.client_ip(trusted="private", header="x-real-ip")(request) == "ip:203.0.113.7"


def test_a_websocket_scope_has_a_key() -> None:
    """A scope of type websocket is a request like any other."""
    made = scope("203.0.113.7", []) | {"type": "websocket"}
    assert keys.client_ip()(made) == "ip:203.0.113.7"


@pytest.mark.parametrize("request_", [None, "environ", object()], ids=["None", "text", "object"])
def test_anything_else_is_a_mistake(request_: object) -> None:
    """What is no request is a `TypeError` that says what a key takes."""
    for key in (keys.client_ip(), keys.header("x-api-key")):
        with pytest.raises(TypeError, match="give a falcon request, a WSGI environ or an ASGI scope"):
            key(request_)


# -- Options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [-1, 129, True, 24.0, "24", None])
@pytest.mark.parametrize("field", ["v4_prefix", "v6_prefix"])
def test_a_prefix_out_of_range_is_told_at_once(field: str, prefix: object) -> None:
    """A prefix that isn't an int in the range of the address is a `ConfigError` that names the field and the bound."""
    for make in (keys.client_ip, lambda **options: keys.address_key("1.1.1.1", **options)):
        with pytest.raises(ConfigError, match=f"{field} is .*: give an int from 0 to (32|128)"):
            make(**{field: prefix})


@pytest.mark.parametrize("choice", ["", "allow", None, 1, [], keys.DENY])
def test_a_choice_that_is_none_is_told_at_once(choice: Any) -> None:
    """`unknown` and `missing` take their own words only."""
    with pytest.raises(ConfigError, match=r'unknown is .*: give "shared", "deny" or "skip"'):
        keys.client_ip(unknown=choice)
    with pytest.raises(ConfigError, match=r'missing is .*: give "shared", "deny", "skip" or a key'):
        keys.header("x-api-key", missing=choice)


@pytest.mark.parametrize("name", ["", "x api key", "x-api-key:", "schlüssel", None, b"x-api-key"])
def test_a_header_without_a_name_is_told_at_once(name: Any) -> None:
    """`header` takes the name of a header."""
    with pytest.raises(ConfigError, match="give the name of a header"):
        keys.header(name)


def test_nothing_optional_is_imported() -> None:
    """`import shmlimit.keys` needs neither falcon nor numpy."""
    code = "import sys, shmlimit.keys; print(sorted({'falcon', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
