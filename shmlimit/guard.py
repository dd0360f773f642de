"""`Guard`: how requests are limited, and what is answered. No request type and no store in here.

A limiter of one's own is four lines around it:

    if not guard.skipped(method, path, key):
        verdict = guard.enforce(store.take(guard.policy, key), now_us)
        if verdict.status is not None:
            ...  # answer verdict.status with verdict.fields and verdict.body
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from shmlimit import fields
from shmlimit._rules import KeyList, Paths, check_sync, texts
from shmlimit.errors import ConfigError
from shmlimit.keys import DENY
from shmlimit.notation import parse
from shmlimit.policies.base import Decision, Policy, check_cost
from shmlimit.policies.requests import key_bytes

KeyFunction: TypeAlias = Callable[[Any], Any]
"""Request (falcon), environ or scope -> who is limited: `str` or `bytes`; `None` nobody; `keys.DENY` answers 403."""

PolicyFunction: TypeAlias = "Callable[[Any], Policy | str | None]"
"""Request (falcon), environ or scope -> its policy or notation; `None` doesn't limit it."""

_PREPARED = 256  # policies of a guard whose part of the fields is kept


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
    - `policy`: a policy or its notation, `"10/minute"`; or a callable of the request that gives one (tiers), or `None`
      for a request that this guard doesn't limit. Then `guard.policy` is `None`.
    - `key`: a callable of the request that says who is limited; `None` leaves it to the adapter.
    - `partition`: whether the draft's fields carry `pk`, a keyed hash of the key: clients behind one address can tell
      their quotas apart by it, and nobody learns the key. `True` takes the secret of the store (a table has one, and so
      has `LocalStore`); for other stores give a secret of 16 to 64 bytes that all processes share.
    - `cost`: units that a request takes, an integer >= 0 or a callable of the request that gives one. 0 only reports.
    - `headers`: the dialect of the fields: `"draft"`, `"draft-7"`, `"draft-6"`, `"legacy"` (`X-RateLimit-…`), `"both"`
      (draft and legacy), or `"none"` (nothing but `Retry-After`); `shmlimit.fields` shows them.
    - `reset`: `"epoch"` for an `X-RateLimit-Reset` in Unix seconds, `"delta"` for seconds from now.
    - `paths`, `methods`: the only ones that are limited; by default all are. `GET` isn't `HEAD`, which many frameworks
      answer with the same work: name both.
    - `skip_paths`: paths that aren't limited. `"/health"` is itself and what is below it (`/health/x`, not `/healthz`),
      `"/"` only itself, and an entry that ends in `*` is a prefix. They are compared with the decoded path, as it came
      (nothing is normalised), without the mount point. `paths` are compared alike.
    - `skip_methods`: methods that aren't limited. `OPTIONS` by default: a refused CORS preflight breaks the page.
    - `allow_keys`, `deny_keys`: keys that are never limited, and keys that are answered 403. An address or a network
      (`"10.0.0.0/8"`) stands for the keys that `keys.client_ip` makes of the addresses in it; to allow a key of your
      own that is spelt like one, give its bytes (`b"10.1.2.3"`). Denied are both.
    - `problem`: whether what is answered instead of the application is `application/problem+json` (RFC 9457).
    - `fail_open`: whether requests pass, unlimited, while the store can't answer (otherwise they get a 503).
    - `shadow`: counts, reports and logs what it would refuse, refuses nothing and isn't in the fields. It is asked
      about requests that the other guards let pass, and is charged by itself.
    - `consume_on`: a callable of the response's status, an `int`, that says whether the request is charged: for failed
      logins `lambda status: status == 401`. It is refused while the quota is spent, and charged after the response; so
      requests that are under way together can overshoot by as many as they are. An exception is a 500. A WebSocket is
      101 when it is accepted and 403 when it is closed instead; falcon's middleware isn't told and charges none.
    - `log_keys`: whether a key stands in the log as it is (`"plain"`) or as a `"hash"`.

    Raises `ConfigError` for anything that can't work.
    """

    __slots__ = (
        "_only",
        "_policy_of",
        "_prepared",
        "_skip",
        "allow_keys",
        "by_key",
        "by_path",
        "consume_on",
        "cost",
        "deny_keys",
        "fail_open",
        "headers",
        "key",
        "log_keys",
        "methods",
        "name",
        "partition",
        "parts",
        "policy",
        "problem",
        "reset",
        "shadow",
        "skip_methods",
    )

    def __init__(
        self,
        name: str,
        policy: Policy | str | PolicyFunction,
        *,
        key: KeyFunction | None = None,
        partition: bool | bytes = False,
        cost: int | Callable[[Any], int] = 1,
        headers: str = "draft",
        reset: str = "epoch",
        paths: Iterable[str] = (),
        methods: Iterable[str] = (),
        skip_paths: Iterable[str] = (),
        skip_methods: Iterable[str] = ("OPTIONS",),
        allow_keys: Iterable[str | bytes] = (),
        deny_keys: Iterable[str | bytes] = (),
        problem: bool = False,
        fail_open: bool = False,
        shadow: bool = False,
        consume_on: Callable[[int], bool] | None = None,
        log_keys: str = "plain",
    ) -> None:
        fixed = parse(policy) if isinstance(policy, str) else policy
        if not isinstance(fixed, Policy) and not callable(fixed):
            raise ConfigError(f'policy must be a policy or its notation such as "10/minute", not {policy!r}')
        if key is not None and not callable(key):
            raise ConfigError(f"key must be a callable of the request, such as keys.client_ip(), not {key!r}")
        for field, given in (("key", key), ("policy", policy), ("cost", cost), ("consume_on", consume_on)):
            check_sync(field, given)
        if not callable(cost):
            try:
                check_cost(cost)
            except ValueError as error:
                raise ConfigError(f"{error} (or a callable of the request that gives one)") from None
        for field, choices, value in (
            ("headers", fields.DIALECTS, headers),
            ("reset", fields.RESETS, reset),
            ("log_keys", ("plain", "hash"), log_keys),
        ):
            if not isinstance(value, str) or value not in choices:
                raise ConfigError(f"{field} must be one of {', '.join(map(repr, choices))}, not {value!r}")
        for field, choice in (("problem", problem), ("fail_open", fail_open), ("shadow", shadow)):
            if not isinstance(choice, bool):
                raise ConfigError(f"{field} must be True or False, not {choice!r}")
        if reset != "epoch" and headers not in {"legacy", "both"}:
            raise ConfigError(f"reset={reset!r} is for headers='legacy' and 'both'; {headers!r} has no such field")
        _check_partition(partition, headers)
        if consume_on is not None and not callable(consume_on):
            raise ConfigError(f"consume_on must be a callable of the status (an int), not {consume_on!r}")
        if consume_on is not None and shadow:
            raise ConfigError(
                "a guard that consumes by the response can't be a shadow: it would have nothing to report"
            )
        self._policy_of: PolicyFunction | None = None if isinstance(fixed, Policy) else fixed
        self._prepared: dict[Policy, fields.Limit] = {}
        self.policy: Policy | None = fixed if isinstance(fixed, Policy) else None
        self.parts = fields.prepare(name, fixed if isinstance(fixed, Policy) else _ANY)
        self.name = name
        self.key = key
        self.partition = partition
        self.cost = cost
        self.headers = headers
        self.reset = reset
        self.skip_methods = frozenset(text.upper() for text in texts("skip_methods", skip_methods, "OPTIONS"))
        self.methods = frozenset(text.upper() for text in texts("methods", methods, "POST"))
        if both := sorted(self.methods & self.skip_methods):
            raise ConfigError(
                f"{both[0]} is in methods and in skip_methods (by default OPTIONS is): give skip_methods=()"
            )
        self._skip = Paths("skip_paths", skip_paths)
        self._only = Paths("paths", paths)
        self.allow_keys = KeyList("allow_keys", allow_keys)
        self.deny_keys = KeyList("deny_keys", deny_keys, literal=True)
        # PERF: whether there is anything to look for, told once: each list says so in 60 ns, five of them a request.
        self.by_path = bool(self.methods or self._skip or self._only)
        self.by_key = bool(self.allow_keys or self.deny_keys)
        self.problem = problem
        self.fail_open = fail_open
        self.shadow = shadow
        self.consume_on = consume_on
        self.log_keys = log_keys

    def __repr__(self) -> str:
        return f"Guard({self.name!r}, {str(self.policy) if self.policy else self._policy_of!r})"

    def exempt(self, method: str, path: str) -> bool:
        """Whether method or path alone put the request beyond this limit, so that its key needn't be made."""
        if method in self.skip_methods or path in self._skip:
            return True
        # APPSEC: there are frameworks that take "post" for POST, so that is one of `methods` too.
        return bool((self.methods and method.upper() not in self.methods) or (self._only and path not in self._only))

    def skipped(self, method: str, path: str, key: object) -> bool:
        """Whether this request isn't limited: by its method, by its path, or because its key is `None` or allowed.

        Raises `ValueError` for a key that `check_key` refuses.
        """
        if self.exempt(method, path) or key is None:
            return True
        self.check_key(key)
        return key in self.allow_keys

    def check_key(self, key: object) -> None:
        """Raise `ValueError` for an empty key and for one that is neither text, bytes nor `keys.DENY`.

        Whoever wrote the callable that gave it meant neither one bucket for everybody nor no limit at all.
        """
        if not (key and isinstance(key, str | bytes)) and key is not DENY:
            raise ValueError(
                f"the key callable of guard {self.name!r} gave {key!r}: give text or bytes that say who is limited, "
                "None for a request that isn't, or shmlimit.keys.DENY to answer 403"
            )

    def denies(self, key: object) -> bool:
        """Whether the key is answered 403: `keys.DENY`, or one of `deny_keys`."""
        return key is DENY or key in self.deny_keys

    def policy_of(self, request: Any) -> Policy | None:
        """The policy of this request; `None` where it isn't limited.

        Raises `ConfigError` if the guard's callable gives neither a policy nor its notation nor `None`.
        """
        if self._policy_of is None:
            return self.policy
        policy = self._policy_of(request)
        if policy is None or isinstance(policy, Policy):
            return policy
        if isinstance(policy, str):
            return _parsed(policy)
        raise ConfigError(
            f"the policy callable of guard {self.name!r} gave {policy!r}: give a policy, its notation, or None"
        )

    def units(self, request: Any) -> int:
        """The cost of this request; `ValueError` if the guard's callable gives no integer >= 0."""
        cost = self.cost
        return check_cost(cost(request)) if callable(cost) else cost

    def shown_to(self, key: str | bytes, secret: bytes | None = None, policy: Policy | None = None) -> fields.Limit:
        """What the fields of a response to this key are made from: the guard, with `partition` its `pk` in it, and
        where the policy is the request's (`policy_of`) that one.

        `secret` is the store's (`store.secret`), which a guard that has one of its own doesn't need. Raises
        `ConfigError` where there is neither.
        """
        if not self.partition:
            return self if policy is None or policy is self.policy else self._prepare(policy)
        own = self.partition if isinstance(self.partition, bytes) else secret
        if not own:
            raise ConfigError(
                f"partition=True of {self!r} needs a store with a secret, such as SharedTable; "
                "or give a secret that all processes share: partition=b'…'"
            )
        return self._limit(policy or self.policy or _ANY, fields.partition_key(key_bytes(key), own))

    def enforce(self, decision: Decision, now_us: int, shown: fields.Limit | None = None) -> Verdict:
        """What to do with a request that got this decision; `now_us` is the Unix time, for the fields.

        `shown` is `shown_to(key, secret, policy)`, for a guard whose policy is the request's or that has a `partition`.
        """
        entries = ((shown or self, decision),)
        if decision.allowed:
            return Verdict(None, fields.response_fields(entries, now_us))
        return Verdict(*fields.too_many(entries, now_us))

    def _prepare(self, policy: Policy) -> fields.Limit:
        """PERF: the parts of a policy are made once, and not for each request of a tier."""
        found = self._prepared.get(policy)
        if found is None:
            if len(self._prepared) >= _PREPARED:
                self._prepared.clear()
            found = self._prepared[policy] = self._limit(policy)
        return found

    def _limit(self, policy: Policy, partition: str = "") -> fields.Limit:
        parts = fields.prepare(self.name, policy, partition)
        return fields.Shown(self.name, self.headers, self.reset, self.problem, parts)


_ANY = parse("1/second")  # for a guard whose policy comes with the request: only the name is looked at
_parsed = functools.lru_cache(256)(parse)


def _check_partition(partition: object, headers: str) -> None:
    if not isinstance(partition, bool | bytes) or (isinstance(partition, bytes) and not 16 <= len(partition) <= 64):
        raise ConfigError("partition must be True, False or a secret of 16 to 64 bytes")  # which isn't shown
    if partition and headers not in {"draft", "both"}:
        raise ConfigError(f"partition is for headers='draft' and 'both'; {headers!r} has no such field")
