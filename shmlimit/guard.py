"""`Guard`: how requests are limited, and what is answered. No request type and no store in here.

A limiter of one's own is four lines around it:

    if not guard.skipped(method, path, key):
        verdict = guard.enforce(store.take(guard.policy, key), now_us)
        if verdict.status is not None:
            ...  # answer verdict.status with verdict.fields and verdict.body
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from shmlimit import fields
from shmlimit.errors import ConfigError
from shmlimit.keys import DENY
from shmlimit.notation import parse
from shmlimit.policies.base import Decision, Policy, check_cost
from shmlimit.policies.requests import key_bytes

KeyFunction: TypeAlias = Callable[[Any], Any]
"""Request (falcon), environ or scope -> who is limited: `str` or `bytes`; `None` nobody; `keys.DENY` answers 403."""


class Verdict(NamedTuple):
    """What to do with a request.

    `status` is `None` when the request passes: then `fields` are for the application's response. Otherwise it is the
    status of the answer (429, 403, 503), `fields` are all its fields and `body` is its text.
    """

    status: int | None
    fields: fields.Fields
    body: bytes = b""


class Guard:
    """A named limit with the options of its HTTP side.

    - `name`: 1 to 64 printable ASCII characters; clients see it in the fields.
    - `policy`: a policy or its notation, `"10/minute"`.
    - `key`: a callable of the request that says who is limited; `None` leaves it to the adapter.
    - `cost`: units that a request takes, an integer >= 0 or a callable of the request that gives one. 0 only reports.
    - `partition`: whether the draft's fields carry `pk`, a keyed hash of the key: clients behind one address can tell
      their quotas apart by it, and nobody learns the key. `True` takes the secret of the store (a table has one, and so
      has `LocalStore`); for other stores give a secret of 16 to 64 bytes that all processes share.
    - `headers`: the dialect of the fields: `"draft"`, `"draft-7"`, `"draft-6"`, `"legacy"` (`X-RateLimit-…`), `"both"`
      (draft and legacy), or `"none"` (nothing but `Retry-After`); `shmlimit.fields` shows them.
    - `reset`: `"epoch"` for an `X-RateLimit-Reset` in Unix seconds, `"delta"` for seconds from now.
    - `problem`: whether what is answered instead of the application is `application/problem+json` (RFC 9457).
    - `skip_paths`: paths that aren't limited. `"/health"` is itself and what is below it (`/health/x`, not `/healthz`),
      `"/"` only itself, and an entry that ends in `*` is a prefix. They are compared with the decoded path, as it came
      (nothing is normalised), without the mount point.
    - `skip_methods`: methods that aren't limited. `OPTIONS` by default: a refused CORS preflight breaks the page.
    - `fail_open`: whether requests pass, unlimited, while the store can't answer (otherwise they get a 503).

    Raises `ConfigError` for anything that can't work.
    """

    __slots__ = (
        "_exact",
        "_prefixes",
        "cost",
        "fail_open",
        "headers",
        "key",
        "name",
        "partition",
        "parts",
        "policy",
        "problem",
        "reset",
        "skip_methods",
    )

    def __init__(
        self,
        name: str,
        policy: Policy | str,
        *,
        key: KeyFunction | None = None,
        partition: bool | bytes = False,
        cost: int | Callable[[Any], int] = 1,
        headers: str = "draft",
        reset: str = "epoch",
        skip_paths: Iterable[str] = (),
        skip_methods: Iterable[str] = ("OPTIONS",),
        problem: bool = False,
        fail_open: bool = False,
    ) -> None:
        if isinstance(policy, str):
            policy = parse(policy)
        elif not isinstance(policy, Policy):
            raise ConfigError(f'policy must be a policy or its notation such as "10/minute", not {policy!r}')
        if key is not None and not callable(key):
            raise ConfigError(f"key must be a callable of the request, such as keys.client_ip(), not {key!r}")
        if not callable(cost):
            try:
                check_cost(cost)
            except ValueError as error:
                raise ConfigError(f"{error} (or a callable of the request that gives one)") from None
        for field, choices, value in (("headers", fields.DIALECTS, headers), ("reset", fields.RESETS, reset)):
            if not isinstance(value, str) or value not in choices:
                raise ConfigError(f"{field} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        for field, choice in (("problem", problem), ("fail_open", fail_open)):
            if not isinstance(choice, bool):
                raise ConfigError(f"{field} must be True or False, not {choice!r}")
        if reset != "epoch" and headers not in {"legacy", "both"}:
            raise ConfigError(f"reset={reset!r} is for headers='legacy' and 'both'; {headers!r} has no such field")
        _check_partition(partition, headers)
        self.parts = fields.prepare(name, policy)
        self.name = name
        self.policy = policy
        self.key = key
        self.partition = partition
        self.cost = cost
        self.headers = headers
        self.reset = reset
        self.skip_methods = frozenset(text.upper() for text in _texts("skip_methods", skip_methods, "OPTIONS"))
        self.problem = problem
        self.fail_open = fail_open
        self._exact, self._prefixes = _compile_paths(_texts("skip_paths", skip_paths, "/healthz"))

    def __repr__(self) -> str:
        return f"Guard({self.name!r}, {str(self.policy)!r})"

    def exempt(self, method: str, path: str) -> bool:
        """Whether method or path alone put the request beyond this limit, so that its key needn't be made."""
        return method in self.skip_methods or path in self._exact or path.startswith(self._prefixes)

    def skipped(self, method: str, path: str, key: object) -> bool:
        """Whether this request isn't limited: by its method, by its path, or because its key is `None`.

        Raises `ValueError` for a key that `check_key` refuses.
        """
        if self.exempt(method, path) or key is None:
            return True
        self.check_key(key)
        return False

    def check_key(self, key: object) -> None:
        """Raise `ValueError` for an empty key and for one that is neither text, bytes nor `keys.DENY`.

        Whoever wrote the callable that gave it meant neither one bucket for everybody nor no limit at all.
        """
        if not (key and isinstance(key, str | bytes)) and key is not DENY:
            raise ValueError(
                f"the key callable of guard {self.name!r} gave {key!r}: give text or bytes that say who is limited, "
                "None for a request that isn't, or shmlimit.keys.DENY to answer 403"
            )

    def units(self, request: Any) -> int:
        """The cost of this request; `ValueError` if the guard's callable gives no integer >= 0."""
        cost = self.cost
        return check_cost(cost(request)) if callable(cost) else cost

    def shown_to(self, key: str | bytes, secret: bytes | None = None) -> fields.Limit:
        """What the fields of a response to this key are made from: the guard, with `partition` its `pk` in it.

        `secret` is the store's (`store.secret`), which a guard that has one of its own doesn't need. Raises
        `ConfigError` where there is neither.
        """
        if not self.partition:
            return self
        own = self.partition if isinstance(self.partition, bytes) else secret
        if not own:
            raise ConfigError(
                f"partition=True of {self!r} needs a store with a secret, such as SharedTable; "
                "or give a secret that all processes share: partition=b'…'"
            )
        partition = fields.partition_key(key_bytes(key), own)
        return fields.Shown(
            self.name, self.headers, self.reset, self.problem, fields.prepare(self.name, self.policy, partition)
        )

    def enforce(self, decision: Decision, now_us: int) -> Verdict:
        """What to do with a request that got this decision; `now_us` is the Unix time, for the fields."""
        entries = ((self, decision),)
        if decision.allowed:
            return Verdict(None, fields.response_fields(entries, now_us))
        return Verdict(*fields.too_many(entries, now_us))


def _check_partition(partition: object, headers: str) -> None:
    if not isinstance(partition, bool | bytes) or (isinstance(partition, bytes) and not 16 <= len(partition) <= 64):
        raise ConfigError("partition must be True, False or a secret of 16 to 64 bytes")  # which isn't shown
    if partition and headers not in {"draft", "both"}:
        raise ConfigError(f"partition is for headers='draft' and 'both'; {headers!r} has no such field")


def _texts(field: str, values: Iterable[str], example: str) -> list[str]:
    """The values as a list; a lone text, which would count letter by letter, is refused."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(f"{field} must be a list of texts, such as [{example!r}], not {values!r}")
    texts = list(values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{field} must have texts such as {example!r} in it, not {text!r}")
    return texts


def _compile_paths(entries: list[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Paths that are skipped as they are, and beginnings that are."""
    exact, prefixes = set(), []
    for entry in entries:
        if not entry.startswith("/"):
            raise ConfigError(f"an entry of skip_paths must begin with '/', not {entry!r}")
        if entry.endswith("*"):
            prefixes.append(entry[:-1])
            continue
        exact.add(entry)
        if entry != "/":
            prefixes.append(entry if entry.endswith("/") else entry + "/")
    return frozenset(exact), tuple(prefixes)
