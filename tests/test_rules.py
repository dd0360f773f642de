"""Which requests a guard is about: paths, methods, allowed and denied keys, policies of the request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmlimit import TokenBucket, keys
from shmlimit._rules import KeyList
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard


def guard(**options: Any) -> Guard:
    return Guard("a", options.pop("policy", "10/minute"), **options)


@pytest.mark.parametrize(
    ("entry", "limited", "skipped"),
    [
        ("/api", ["/api", "/api/", "/api/x"], ["/apis", "/", "/x/api"]),
        ("/", ["/"], ["/x", "//"]),
        ("/api/v*", ["/api/v", "/api/v1/x"], ["/api", "/api/x"]),
    ],
)
def test_only_some_paths(entry: str, limited: list[str], skipped: list[str]) -> None:
    """`paths` are matched as `skip_paths` are, the other way round; a path in both is skipped."""
    only = guard(paths=[entry])
    assert [only.exempt("GET", path) for path in limited + skipped] == [False] * len(limited) + [True] * len(skipped)
    assert guard(paths=["/api"], skip_paths=["/api/free"]).exempt("GET", "/api/free/x")


def test_only_some_methods() -> None:
    """`methods` in any letter case; the others pass, and so do those that are skipped by default."""
    posts = guard(methods=["post", "PUT"])
    assert [posts.exempt(method, "/") for method in ("POST", "PUT", "GET", "OPTIONS")] == [False, False, True, True]
    assert not posts.exempt("post", "/")
    assert not guard(methods=["OPTIONS"], skip_methods=()).exempt("OPTIONS", "/")
    with pytest.raises(ConfigError, match="OPTIONS is in methods and in skip_methods"):
        guard(methods=["OPTIONS"])


@pytest.mark.parametrize(
    ("entries", "key", "found"),
    [
        (["of-ours"], "of-ours", True),
        (["of-ours"], b"of-ours", True),
        ([b"\xff"], b"\xff", True),
        (["of-ours"], "of-our", False),
        (["10.0.0.0/8"], keys.address_key("10.1.2.3"), True),
        (["10.0.0.0/8"], keys.address_key("11.1.2.3"), False),
        (["10.1.2.3"], keys.address_key("::ffff:10.1.2.3"), True),
        (["10.0.0.0/8"], keys.address_key("10.1.2.3", v4_prefix=24), True),
        (["10.1.2.0/25"], keys.address_key("10.1.2.3", v4_prefix=24), False),
        (["2001:db8::/32"], keys.address_key("2001:db8:1::7"), True),
        (["2001:db8::/64"], keys.address_key("2001:db8::7"), True),
        (["2001:db8::/64"], keys.address_key("2001:db8::7", v6_prefix=48), False),
        (["::/64"], keys.address_key("::1"), True),
        (["10.0.0.0/8"], "header:10.1.2.3", False),
        (["10.0.0.0/8"], "10.1.2.3", False),
        (["10.0.0.0/8"], "10.0.0.0/8", False),
        (["10.1.2.3"], "10.1.2.3", False),
        (["10.1.2.3"], "ip:10.1.2.3", True),
        ([b"10.1.2.3"], "10.1.2.3", True),
        ([b"10.1.2.3"], "ip:10.1.2.3", False),
        (["10.0.0.0/8"], "net:nonsense/8", False),
        (["10.0.0.0/8"], "net:10.0.0.0/99", True),
        (["10.0.0.0/8"], "net:10.0.0.0/" + "9" * 5000, True),
        (["10.0.0.0/8"], b"ip:10.1.2.3", False),
        ([], "anything", False),
        (["ip:2001:db8::7"], keys.address_key("2001:db8::7", v6_prefix=128), True),
    ],
)
def test_lists_of_keys(entries: list[str | bytes], key: str | bytes, found: bool) -> None:
    """A key as it is, or an address or a network for the keys of `client_ip` that lie wholly in it."""
    assert (key in KeyList("allow_keys", entries)) is found


@given(st.ip_addresses(), st.ip_addresses(v=4).map(lambda ip: f"{ip}/9"))
def test_networks_have_the_addresses_that_python_finds_in_them(ip: Any, network: str) -> None:
    """For whole addresses a list agrees with `ipaddress`."""
    import ipaddress

    key = keys.address_key(str(ip), v6_prefix=128)
    unwrapped = ipaddress.ip_address(key.removeprefix("ip:")) if key != keys.UNKNOWN else None
    inside = unwrapped is not None and unwrapped in ipaddress.ip_network(network, strict=False)
    assert (key in KeyList("allow_keys", [network])) is inside


@pytest.mark.parametrize(
    ("entries", "hint"),
    [
        ("10.0.0.0/8", r"list of keys, such as \['10.0.0.0/8'"),
        (None, "list of keys"),
        ([""], "keys, addresses and networks"),
        ([7], "keys, addresses and networks"),
        (["2001:db8::7"], "limited by their /64"),
        (["2001:db8::/65"], "limited by their /64"),
    ],
)
def test_lists_that_cannot_work(entries: Any, hint: str) -> None:
    """A lone text, nothing, and an IPv6 address that no key of a /64 can lie in are refused with what to do."""
    for field in ("allow_keys", "deny_keys"):
        with pytest.raises(ConfigError, match=hint):
            guard(**{field: entries})


def test_allowed_keys_are_skipped() -> None:
    """`Guard.skipped` is what a limiter of one's own asks."""
    ours = guard(allow_keys=["ours", "10.0.0.0/8"])
    assert [ours.skipped("GET", "/", key) for key in ("ours", "ip:10.0.0.1", "theirs")] == [True, True, False]
    assert guard(deny_keys=["bad"]).denies("bad")
    # A key of one's own may be the bare address; to deny it too can't let anybody in.
    assert all(guard(deny_keys=["10.1.2.3"]).denies(key) for key in ("ip:10.1.2.3", "10.1.2.3"))
    assert guard().denies(keys.DENY)
    assert not guard(deny_keys=["bad"]).denies("good")


def test_policy_of_the_request() -> None:
    """A callable may give a policy, notation, or `None`; anything else is told with the guard's name."""
    tiers = guard(policy=lambda request: request)
    assert tiers.policy is None
    assert tiers.policy_of("5/second") == TokenBucket(5, 1)
    assert tiers.policy_of(TokenBucket(5, 1)) == TokenBucket(5, 1)
    assert tiers.policy_of(None) is None
    with pytest.raises(ConfigError, match="guard 'a' gave 7: give a policy, its notation, or None"):
        tiers.policy_of(7)
    assert guard().policy_of("whatever") == TokenBucket(10, 60)


async def nothing(_: Any) -> None:
    """A coroutine function, where none can work."""


class AsyncObject:
    async def __call__(self, _: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"shadow": "yes"}, "shadow must be True or False"),
        ({"consume_on": 401}, "callable of the status"),
        ({"consume_on": lambda _: True, "shadow": True}, "can't be a shadow"),
        ({"log_keys": "never"}, "log_keys must be one of 'plain', 'hash'"),
        ({"paths": "/api"}, "list of texts"),
        ({"paths": ["api"]}, "must begin with '/'"),
        ({"methods": "POST"}, "list of texts"),
        *(({field: nothing}, f"{field} must be an ordinary callable") for field in ("key", "policy", "cost")),
        ({"consume_on": nothing}, "consume_on must be an ordinary callable"),
        ({"consume_on": AsyncObject()}, "consume_on must be an ordinary callable"),
    ],
    ids=str,
)
def test_mistakes_are_config_errors(options: dict[str, Any], hint: str) -> None:
    """What can't work is refused when the guard is made."""
    with pytest.raises(ConfigError, match=hint):
        guard(**options)
