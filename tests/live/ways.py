"""Ways to a server, who comes by them and what they make up: the rows of the matrix that test_addresses.py measures.

Nothing but data: the servers of the test read it too.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from tests.live.connection import Fields

Worker = Literal["sync", "gthread", "asgi"]
WORKERS: tuple[Worker, ...] = get_args(Worker)

# -- What clients make up ----------------------------------------------------------------------------------------------

VICTIM = "198.51.100.1"
PADDING = ", ".join([VICTIM] * 600)  # more than 8 KiB
FORGERIES: dict[str, Fields] = {
    "nothing": [],
    "a line": [("X-Forwarded-For", VICTIM), ("Forwarded", f"for={VICTIM}"), ("X-Real-IP", VICTIM)],
    "several lines": [
        *(("X-Forwarded-For", f"{VICTIM}, 127.0.0.1"), ("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-For", "::1")),
        *(("Forwarded", f"for={VICTIM}"), ("Forwarded", 'for=127.0.0.1, for="[::1]"'), ("Forwarded", "for=unix")),
        *(("X-Real-IP", VICTIM), ("X-Real-IP", "127.0.0.1")),
    ],
    "open quotes": [
        ("X-Forwarded-For", f'{VICTIM}, "'),
        ("Forwarded", f'for="{VICTIM}'),
        ("X-Real-IP", f'"{VICTIM}'),
    ],
    "an open quote that ends in a backslash": [
        ("X-Forwarded-For", f'"{VICTIM}\\'),
        ("Forwarded", f'for={VICTIM}, for="\\'),
        ("X-Real-IP", f'{VICTIM}"\\'),
    ],
    "padding": [("X-Forwarded-For", PADDING), ("Forwarded", f"for={VICTIM}, {PADDING}"), ("X-Real-IP", PADDING)],
    "padding with an open quote": [
        ("X-Forwarded-For", f'"{PADDING},'),
        ("Forwarded", f'for={VICTIM}, for="{PADDING}'),
        ("X-Real-IP", f'"{PADDING}'),
    ],
    "nobody": [
        *(("X-Forwarded-For", "unknown, 0.0.0.0, _hidden,,"), ("Forwarded", "for=unknown;;, by=_x, ,")),
        ("X-Real-IP", "::"),
    ],
    "other spellings": [
        *(("X_Forwarded_For", VICTIM), ("x-forwarded-FOR", f"[::ffff:{VICTIM}]:80"), ("X_Real_IP", VICTIM)),
        *(("FORWARDED", f'For="[2001:db8::1%eth0]:_p"; FOR={VICTIM}'), ("x-real-ip", "2001:db8::1")),
    ],
}

# -- Clients -----------------------------------------------------------------------------------------------------------


class Client(NamedTuple):
    """Who comes from `address`: from there, or from `source` with a line of the PROXY protocol first."""

    address: str
    source: str | None
    line: bytes = b""


def local(address: str) -> Client:
    """A client with an address of this machine's own."""
    return Client(address, address)


def told(address: str, source: str | None = "127.0.0.1") -> Client:
    """A client from anywhere, whose address a load balancer at `source` tells in a line of the PROXY protocol."""
    family, to = ("TCP6", "::1") if ":" in address else ("TCP4", "127.0.0.1")
    return Client(address, source, f"PROXY {family} {address} {to} 40000 80\r\n".encode())


Pair = tuple[Client, Client]

LOCAL: Pair = local("127.0.0.9"), local("127.0.0.10")
LOOPBACK_6: Pair = local("::1"), local("::1")  # there is no other
BESIDE: Pair = local("127.0.0.1"), local("127.0.0.10")  # the first from where the proxies come
NOBODY: Pair = Client("", None), Client("", None)  # who come to a unix socket
OUTSIDE: Pair = told("203.0.113.7"), told("203.0.113.8")
OUTSIDE_6: Pair = told("2001:db8:1:2::3"), told("2001:db8:1:3::3")
OVER_UNIX: Pair = told("203.0.113.7", None), told("203.0.113.8", None)
STRANGERS: Pair = told("203.0.113.7", "127.0.0.9"), told("203.0.113.8", "127.0.0.10")
UNKNOWN: Pair = (
    Client("127.0.0.9", "127.0.0.1", b"PROXY UNKNOWN\r\n"),
    Client("127.0.0.10", "127.0.0.1", b"PROXY UNKNOWN\r\n"),
)

# -- What `client_ip` is told ------------------------------------------------------------------------------------------

_XFF = {"header": "x-forwarded-for"}
_FORWARDED = {"header": "forwarded"}
_PRIVATE = {"trusted": "private"}
_LOOPBACK = {"trusted": ["127.0.0.1"]}
_LOOPBACK_6 = {"trusted": ["::1"]}
_UNIX = {"trusted": ["unix"]}
_TWO = {"trusted": ["127.0.0.1", "127.0.0.2"]}

# -- What comes of it --------------------------------------------------------------------------------------------------

Want = tuple[str, str] | int | Literal["forged"]
"""The keys of the two clients; the status with which both are refused; or that what the first forges is believed."""

_LOCAL = ("ip:127.0.0.9", "ip:127.0.0.10")
_OUTSIDE = ("ip:203.0.113.7", "ip:203.0.113.8")
_OUTSIDE_6 = ("net:2001:db8:1:2::/64", "net:2001:db8:1:3::/64")
_LOOPBACK_NET = ("net:::/64", "net:::/64")
_UNKNOWN = ("unknown", "unknown")
_PROXY = ("ip:127.0.0.1", "ip:127.0.0.1")
_PROXY_2 = ("ip:127.0.0.2", "ip:127.0.0.2")
_WSGI_403: dict[Worker, Want] = {"sync": 403, "gthread": 403, "asgi": 400}
_WSGI_400: dict[Worker, Want] = {"sync": 400, "gthread": 400, "asgi": _PROXY}
_WSGI_ONLY: dict[Worker, Want] = {"sync": _OUTSIDE, "gthread": _OUTSIDE, "asgi": 400}


class Way(NamedTuple):
    """How two clients reach the server, what its `client_ip` was told, and what comes of it.

    `door` is where they connect; test_addresses.py has them. `wanted` is for all workers, or one for each.
    """

    door: str
    options: dict[str, Any]
    clients: Pair
    wanted: Want | dict[Worker, Want]

    def want(self, worker: Worker) -> Want:
        """What has to come of it there."""
        return self.wanted[worker] if isinstance(self.wanted, dict) else self.wanted


# One line each, to be read as the table that it is.
WAYS: dict[str, Way] = {
    "tcp": Way("tcp", {}, LOCAL, _LOCAL),
    "tcp, past the proxy": Way("tcp", {**_LOOPBACK, **_XFF}, LOCAL, _LOCAL),
    "tcp, past the proxy (Forwarded)": Way("tcp", {**_LOOPBACK, **_FORWARDED}, LOCAL, _LOCAL),
    "tcp, past the proxy (X-Real-IP)": Way("tcp", {**_LOOPBACK, "header": "x-real-ip"}, LOCAL, _LOCAL),
    "tcp, hops alone": Way("tcp", {"hops": 2, **_XFF}, LOCAL, "forged"),
    "tcp, hops and trusted": Way("tcp", {"hops": 2, **_LOOPBACK, **_XFF}, LOCAL, _LOCAL),
    "tcp, beside the proxy": Way("tcp", {**_LOOPBACK, **_XFF}, BESIDE, "forged"),
    "unix": Way("unix", {}, NOBODY, _UNKNOWN),
    "unix, deny": Way("unix", {"unknown": "deny"}, NOBODY, 403),
    "unix, past the proxy": Way("unix", {**_LOOPBACK, **_XFF}, NOBODY, _UNKNOWN),
    "[::] over IPv4": Way("[::] 4", {}, LOCAL, _LOCAL),
    "[::] over IPv6": Way("[::] 6", {}, LOOPBACK_6, _LOOPBACK_NET),
    "PROXY TCP4": Way("PROXY", {}, OUTSIDE, _OUTSIDE),
    "PROXY TCP4, and X-Forwarded-For": Way("PROXY", {**_LOOPBACK, **_XFF}, OUTSIDE, _OUTSIDE),
    "PROXY TCP6": Way("PROXY", {}, OUTSIDE_6, _OUTSIDE_6),
    "PROXY UNKNOWN": Way("PROXY", {}, UNKNOWN, _WSGI_400),
    "PROXY left out": Way("PROXY", {}, LOCAL, _LOCAL),
    "PROXY of a stranger": Way("PROXY", {}, STRANGERS, _WSGI_403),
    "PROXY over unix": Way("PROXY unix", {}, OVER_UNIX, _WSGI_ONLY),
    "PROXY to [::] over IPv4": Way("PROXY [::]", {}, OUTSIDE, _WSGI_403),
    "nginx, X-Forwarded-For": Way("nginx append", {**_LOOPBACK, **_XFF}, LOCAL, _LOCAL),
    "nginx, X-Forwarded-For, outside": Way("nginx append PROXY", {**_PRIVATE, **_XFF}, OUTSIDE, _OUTSIDE),
    "nginx, X-Forwarded-For, outside, IPv6": Way("nginx append PROXY", {**_PRIVATE, **_XFF}, OUTSIDE_6, _OUTSIDE_6),
    "nginx, X-Forwarded-For, over IPv6": Way("nginx append 6", {**_LOOPBACK, **_XFF}, LOOPBACK_6, _LOOPBACK_NET),
    "nginx, Forwarded": Way("nginx forwarded", {**_LOOPBACK, **_FORWARDED}, LOCAL, _LOCAL),
    "nginx, Forwarded, IPv6": Way("nginx forwarded PROXY", {**_PRIVATE, **_FORWARDED}, OUTSIDE_6, _OUTSIDE_6),
    "nginx, Forwarded set anew": Way("nginx anew", {**_LOOPBACK, **_FORWARDED}, LOCAL, _LOCAL),
    "nginx, Forwarded set anew, IPv6": Way("nginx anew PROXY", {**_LOOPBACK, **_FORWARDED}, OUTSIDE_6, _OUTSIDE_6),
    "nginx, X-Real-IP": Way("nginx real-ip", {**_LOOPBACK, "header": "x-real-ip"}, LOCAL, _LOCAL),
    "nginx, X-Forwarded-For in a line of its own": Way("nginx lines", {**_LOOPBACK, **_XFF}, LOCAL, _LOCAL),
    "nginx, Forwarded in a line of its own": Way("nginx lines", {**_LOOPBACK, **_FORWARDED}, LOCAL, _LOCAL),
    "nginx, X-Real-IP in a line of its own": Way("nginx lines", {**_LOOPBACK, "header": "x-real-ip"}, LOCAL, _LOCAL),
    "nginx, no header": Way("nginx append", {}, LOCAL, _PROXY),
    "nginx, header only passed on": Way("nginx pass", {**_LOOPBACK, **_XFF}, LOCAL, "forged"),
    "nginx to unix, X-Forwarded-For": Way("nginx unix", {**_UNIX, **_XFF}, LOCAL, _LOCAL),
    "nginx to unix, Forwarded": Way("nginx unix", {**_UNIX, **_FORWARDED}, LOCAL, _LOCAL),
    "nginx to unix, no header": Way("nginx unix", {}, LOCAL, _UNKNOWN),
    "nginx to [::] over IPv4": Way("nginx any-4", {**_LOOPBACK, **_XFF}, LOCAL, _LOCAL),
    "nginx to [::] over IPv6": Way("nginx any-6", {**_LOOPBACK_6, **_XFF}, LOCAL, _LOCAL),
    "two proxies, trusted": Way("nginx front", {**_TWO, **_XFF}, LOCAL, _LOCAL),
    "two proxies, hops": Way("nginx front", {"hops": 2, **_LOOPBACK, **_XFF}, LOCAL, _LOCAL),
    "two proxies, hops alone": Way("nginx front", {"hops": 2, **_XFF}, LOCAL, _LOCAL),
    "two proxies, Forwarded": Way("nginx front-forwarded", {**_TWO, **_FORWARDED}, LOCAL, _LOCAL),
    "two proxies, one hop told": Way("nginx front", {"hops": 1, **_LOOPBACK, **_XFF}, LOCAL, _PROXY_2),
}  # fmt: skip

OTHERWISE: dict[tuple[Worker, str], str] = {
    **{(worker, way): why for worker in WORKERS for way, why in {
        "tcp, hops alone": "`hops` without `trusted` believes whoever connects, as its docstring says: add `trusted`",
        "tcp, beside the proxy": "who connects from an address in `trusted` is the proxy: nothing else may run there",
        "unix": 'a unix socket has no addresses: one key for all, logged once; `trusted=["unix"]` where a proxy is',
        "unix, deny": 'the same, with `unknown="deny"`: nobody is let in',
        "unix, past the proxy": "no proxy, and no address: the header is ignored",
        "PROXY to [::] over IPv4": "to gunicorn the balancer is `::ffff:127.0.0.1`: allow that in `proxy_allow_ips`",
        "PROXY of a stranger": "gunicorn believes only `proxy_allow_ips`, and refuses all others",
        "nginx, no header": "the peer is the proxy: one key for all, logged once with the line that puts it right",
        "nginx, header only passed on": "a proxy that doesn't write the header hands on the client's own word",
        "nginx to unix, no header": "as without the proxy",
        "two proxies, one hop told": "the address of the outer proxy: `hops` has to count them all",
    }.items()},
    ("sync", "PROXY UNKNOWN"): "gunicorn's WSGI workers refuse it",
    ("gthread", "PROXY UNKNOWN"): "gunicorn's WSGI workers refuse it",
    ("asgi", "PROXY UNKNOWN"): "the balancer says that it speaks for itself, so the key is the balancer's address",
    ("asgi", "PROXY over unix"): "gunicorn's asgi worker refuses it",
}  # fmt: skip
