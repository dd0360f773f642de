"""What every adapter shares: the facts of a request in, a verdict out; and the store that this process was given."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from shmlimit import fields
from shmlimit._rules import check_sync
from shmlimit.adapters._outcome import Asked, Outcome, Refusals
from shmlimit.adapters._phases import Answers, after, arun, before, run
from shmlimit.errors import ConfigError, StoreError
from shmlimit.guard import Guard, KeyFunction, Verdict
from shmlimit.keys import DENY, client_ip, needs_route
from shmlimit.limiter import check_policy, check_store
from shmlimit.policies.base import Decision, Policy
from shmlimit.stores.base import Store, coroutine_of, never_waits

log = logging.getLogger("shmlimit")

PASS = Verdict(None, [])
_new_verdict = tuple.__new__

UNBOUND = """\
this process shares no table, and a limit that each worker counts for itself is not the one that was asked for.
Under gunicorn, add to the configuration file, as its last line:

    from shmlimit.adapters.gunicorn import install
    install(globals())

Under other servers give it a table, store=SharedTable.open("a-name"), and for development, in one process,
store=MemoryStore() (from shmlimit.stores.memory)."""

NO_FILE = """\
The gunicorn hook keeps such policies in a SQLite file beside the table if it is given one: \
install(globals(), sqlite="limits.sqlite3")"""

FIRST: Final = 0
ROUTED: Final = 1
"""The two steps of a gate: before routing, and after it."""

Refuse: TypeAlias = Callable[[Any, Verdict], Verdict]
"""Request and refusal -> what is answered."""

T = TypeVar("T")

_bound: Store | None = None


def bind(store: Store) -> None:
    """Make `store` the one that adapters of this process, and of those forked from it, use by themselves."""
    global _bound  # noqa: PLW0603 - one for the process is what is meant
    _bound = store


def bound_store() -> Store | None:
    """What `bind` was given last, if anything."""
    return _bound


class _Alone(NamedTuple):
    """All that a decision takes of a gate with one guard without rare options. PERF: read at once, 40 ns less."""

    guard: Guard
    key: KeyFunction
    policy: Policy
    cost: int
    store: Store
    skipped: frozenset[str]
    draft: bool


class Gate:
    """Guards, their keys and their store: `check` (or `acheck`) turns the facts of a request into a verdict.

    Only where `by_path` is true does it look at the path. While `inline` is, an event loop may call `check`, too: the
    store waits for nothing.

    All guards that apply to a request are decided in one step, all or nothing. Where the adapter has a router
    (`routed=True`), those whose key needs the route are a second such step, `ROUTED`, after the first. The request's
    `Outcome` collects what was decided, and the fields of a verdict are those of all its guards, in their order here.
    Where it has something `pending`, the adapter calls `settle` (or `asettle`) with the status of the response.

    Without a store of its own it takes the bound one at the first request that is limited, not before: with gunicorn's
    `--preload` the application is made before the table is.
    """

    __slots__ = (
        "_alone",
        "_atake",
        "_atake_all",
        "_denied",
        "_failures",
        "_guards",
        "_listed",
        "_places",
        "_plain",
        "_refusals",
        "_steps",
        "_store",
        "by_path",
        "inline",
        "routed",
    )

    def __init__(
        self, guards: tuple[Guard, ...], store: Store | None, key: KeyFunction | None, *, routed: bool = False
    ) -> None:
        _check_guards(guards)
        if key is not None and not callable(key):
            raise ConfigError(f"key must be a callable of the request, such as keys.client_ip(), not {key!r}")
        check_sync("key", key)
        key = key or client_ip()
        keyed = [(guard, guard.key or key) for guard in guards]
        later = [pair for pair in keyed if routed and needs_route(pair[1])]
        self._guards = guards
        self._places = {guard.name: place for place, guard in enumerate(guards)}
        self._plain = not any(guard.shadow or guard.consume_on for guard in guards)
        self._denied, self._listed = fields.denied(guards), fields.denied(guards, listed=True)
        self._steps = [pair for pair in keyed if pair not in later], later
        self.routed = bool(later)
        self.by_path = any(guard.by_path for guard in guards)
        self.inline = False
        self._failures: dict[_Outage, int] = {}
        self._refusals = Refusals()
        self._store: Store | None = None
        # PERF: one guard without rare options, as nearly all have it, goes a shorter way: 1.5 µs instead of 2.9.
        self._alone: _Alone | None = None
        self._atake: Callable[..., Awaitable[Decision]]
        self._atake_all: Callable[..., Awaitable[list[Decision]]]
        if store is not None:
            self._use(store)

    def check(self, method: str, path: str, request: Any, outcome: Outcome | None = None, step: int = FIRST) -> Verdict:
        """The verdict; `path` is decoded and without the mount point, `request` is what the key callables get."""
        if self._alone is not None and step == FIRST:
            guard, key, policy, cost, store, skipped, draft = self._alone
            if method in skipped or (self.by_path and guard.exempt(method, path)):
                return PASS
            who = key(request)
            if (type(who) is not str or not who) and (verdict := self._unusual(guard, who)) is not None:
                return verdict
            try:
                decision = store.take(policy, who, cost)
            except StoreError as error:
                return self._failed(error, [(guard, (policy, who, cost))])
            if self._failures:
                self._recovered([(guard, (policy, who, cost))])
            if not decision.allowed or self._refusals.followed or outcome is None or outcome.entries:
                return self._verdict([(guard, (policy, who, cost))], [decision], outcome, step)
            outcome.entries.append((guard, decision))
            if draft:  # which names no point in time
                written = fields.draft_fields(guard, decision)
            else:
                written = fields.response_fields(outcome.entries, time.time_ns() // 1000)
            return _new_verdict(Verdict, (None, written, b""))  # as `Verdict(None, …)`, at a third of its 0.2 µs
        asked = self._who(method, path, request, step)
        if isinstance(asked, Verdict):
            return asked
        store = self._use(_bound) if self._store is None else self._store
        try:
            if not self._plain:
                return self._answer(run(before(asked), partial(getattr, store)), outcome, step)
            if len(asked) == 1:
                decisions = [store.take(*asked[0][1])]
            else:
                decisions = store.take_all([charge for _, charge in asked])
        except StoreError as error:
            return self._failed(error, asked)
        if self._failures:
            self._recovered(asked)
        return self._verdict(asked, decisions, outcome, step)

    async def acheck(
        self, method: str, path: str, request: Any, outcome: Outcome | None = None, step: int = FIRST
    ) -> Verdict:
        """`check` for an event loop: through the store's coroutines, or in a thread where it has none."""
        if self.inline:
            return self.check(method, path, request, outcome, step)
        asked = self._who(method, path, request, step)
        if isinstance(asked, Verdict):
            return asked
        store = self._use(_bound) if self._store is None else self._store
        try:
            if not self._plain:
                return self._answer(await arun(before(asked), partial(coroutine_of, store)), outcome, step)
            if len(asked) == 1:
                decisions = [await self._atake(*asked[0][1])]
            else:
                decisions = await self._atake_all([charge for _, charge in asked])
        except StoreError as error:
            return self._failed(error, asked)
        if self._failures:
            self._recovered(asked)
        return self._verdict(asked, decisions, outcome, step)

    def settle(self, outcome: Outcome, status: int) -> Verdict:
        """After the response of an outcome with something pending: charge what it consumes. The verdict has the fields
        as they are then; it is a refusal (503) where the store fails and the guards are closed.
        """
        pending = outcome.pending.pop(self, [])
        try:
            answers = run(after(pending, status), partial(getattr, self._store))
        except StoreError as error:
            return self._failed(error, pending, "charging responses")
        return self._settled(answers, pending, outcome)

    async def asettle(self, outcome: Outcome, status: int) -> Verdict:
        """`settle` for an event loop."""
        if self.inline:
            return self.settle(outcome, status)
        pending = outcome.pending.pop(self, [])
        try:
            answers = await arun(after(pending, status), partial(coroutine_of, self._store))
        except StoreError as error:
            return self._failed(error, pending, "charging responses")
        return self._settled(answers, pending, outcome)

    def _unusual(self, guard: Guard, who: object) -> Verdict | None:
        """What to do with a key that is no text, or an empty one; `None` if it is limited like others."""
        if who is None:
            return PASS
        guard.check_key(who)
        if who is not DENY:
            return None
        status, headers, body = self._denied
        return Verdict(status, [*headers], body)

    def _who(self, method: str, path: str, request: Any, step: int) -> list[Asked] | Verdict:
        """The guards that apply, each with what it charges, or the verdict where no store is asked."""
        asked = []
        last = who = None
        for guard, key in self._steps[step]:
            if method in guard.skip_methods or (guard.by_path and guard.exempt(method, path)):  # PERF: rarely a call
                continue
            policy = guard.policy or guard.policy_of(request)
            if policy is None:
                continue
            if key is not last:  # PERF: guards side by side often share a key
                last, who = key, key(request)
            if who is not None:
                if type(who) is not str or not who:  # PERF: what else a key may be is looked at by a call
                    guard.check_key(who)
                if guard.by_key and who in guard.allow_keys:
                    continue
                if who is DENY or (guard.by_key and who in guard.deny_keys):
                    if guard.shadow:
                        continue
                    status, headers, body = self._denied if who is DENY else self._listed
                    return Verdict(status, [*headers], body)
                cost = guard.cost
                asked.append((guard, (policy, who, cost if type(cost) is int else guard.units(request))))
        return asked or PASS

    def _verdict(self, asked: list[Asked], decisions: list[Decision], outcome: Outcome | None, step: int) -> Verdict:
        if len(asked) == 1:  # PERF: nearly every request; what is below takes three times as long.
            guard, (policy, key, _) = asked[0]
            limit = guard if policy is guard.policy and not guard.partition else self._shown(guard, key, policy)
            entries, allowed = [(limit, decisions[0])], decisions[0].allowed
        else:
            limits = [self._shown(guard, key, policy) for guard, (policy, key, _) in asked]
            entries, allowed = list(zip(limits, decisions, strict=True)), all(decisions)
        if not allowed or self._refusals.followed:
            self._log(zip(asked, decisions, strict=True))
        if outcome is not None:
            if outcome.entries and step == FIRST:  # what another limiter decided; those of this one go together
                fields.check_dialects(limit for limit, _ in (*outcome.entries, *entries))
            outcome.entries += entries
            if step == ROUTED:
                outcome.entries.sort(key=lambda entry: self._places[entry[0].name])
            entries = outcome.entries
        now_us = time.time_ns() // 1000
        if allowed:
            return Verdict(None, fields.response_fields(entries, now_us))
        return Verdict(*fields.too_many(entries, now_us))

    def _answer(self, answers: Answers, outcome: Outcome | None, step: int) -> Verdict:
        """The verdict after several questions."""
        if outcome is None:
            outcome = Outcome()
        if answers.pending:
            outcome.pending.setdefault(self, []).extend(answers.pending)
        for (guard, (policy, key, _)), decision in answers.shadows:
            outcome.shadows = (*outcome.shadows, (self._shown(guard, key, policy), decision))
        if answers.shadows:
            self._log(answers.shadows)
        if answers.error is not None:
            self._fail(answers.error, _SHADOWS, "what shadow guards would refuse isn't known")
        elif self._failures and answers.shadows:
            self._told_end(_SHADOWS)
        if self._failures and answers.firm and all(decision for _, decision in answers.firm):  # else it only looked
            self._recovered([one for one, _ in answers.firm])
        if not answers.firm:
            return PASS
        asked, decisions = zip(*answers.firm, strict=True)
        return self._verdict(list(asked), list(decisions), outcome, step)

    def _settled(self, answers: Answers, pending: list[Asked], outcome: Outcome) -> Verdict:
        if self._failures and answers.firm:
            self._recovered(pending, "charging responses")
        for (guard, _), decision in answers.firm:
            # The response is the application's, whatever was left: a quota that others have spent meanwhile shows as
            # spent, and refuses the next.
            outcome.replace(guard.name, decision._replace(allowed=True, retry_after_us=0))
        return Verdict(None, fields.response_fields(outcome.entries, time.time_ns() // 1000))

    def _log(self, decided: Iterable[tuple[Asked, Decision]]) -> None:
        secret = getattr(self._store, "secret", None)
        for (guard, charge), decision in decided:
            if not decision.allowed:
                self._refusals.refused(guard, charge, decision, secret)
            elif self._refusals.followed:
                self._refusals.allowed(guard, charge, secret)

    def _use(self, store: Store | None) -> Store:
        if store is None:
            raise ConfigError(UNBOUND)
        check_store(store)
        for method, what, instead in self._needed():
            if not callable(getattr(store, method, None)):
                raise ConfigError(
                    f"{type(store).__name__} has no {method}, so it can't decide {_names(self._guards)} {what}: "
                    f"{instead}, or a store that has it"
                )
        for guard in self._guards:
            guard.shown_to(b"", getattr(store, "secret", None))  # raises where there is none
            if guard.policy is not None:
                check_policy(store, guard.policy, repr(guard), NO_FILE if store is _bound else "Choose another one")
        self._atake = coroutine_of(store, "take")
        if callable(getattr(store, "take_all", None)):
            self._atake_all = coroutine_of(store, "take_all")
        self._store = store
        self.inline = all(never_waits(store, guard.policy) for guard in self._guards)
        if len(keyed := self._steps[FIRST]) == len(self._guards) == 1 and self._plain:
            ((guard, key),) = keyed
            if guard.policy and type(guard.cost) is int and not (guard.by_key or guard.partition):
                self._alone = _Alone(
                    guard, key, guard.policy, guard.cost, store, guard.skip_methods, guard.headers == "draft"
                )
        return store

    def _needed(self) -> Iterator[tuple[str, str, str]]:
        """What these guards need of a store beside `take`: the method, for what, and what would do without it."""
        at_once = [sum(not guard.shadow and guard.consume_on is None for guard, _ in step) for step in self._steps]
        if max(at_once) > 1:
            yield "take_all", "all or nothing", "give one guard"
        if any(guard.consume_on for guard in self._guards):
            yield "peek", "by the response", "leave consume_on out"

    def _shown(self, guard: Guard, key: str | bytes, policy: Policy) -> fields.Limit:
        return guard.shown_to(key, getattr(self._store, "secret", None), policy)

    def _failed(self, error: StoreError, asked: list[Asked], phase: str = "") -> Verdict:
        """The verdict without a decision."""
        firm = [guard for guard, _ in asked if not guard.shadow]
        fail_open = all(guard.fail_open for guard in firm)
        meanwhile = "requests pass unlimited" if fail_open else "requests are answered with 503"
        self._fail(error, _outage(asked, phase), meanwhile)
        return PASS if fail_open else Verdict(*fields.unavailable(firm))

    def _fail(self, error: StoreError, outage: _Outage, meanwhile: str) -> None:
        """Logged when failures begin and when they end, not once a request."""
        times = self._failures.get(outage, 0)
        self._failures[outage] = times + 1
        if not times:
            log.error("%s: the store failed (%s); %s until it answers again", self._of(outage), error, meanwhile)

    def _recovered(self, asked: list[Asked], phase: str = "") -> None:
        self._told_end(_outage(asked, phase))

    def _told_end(self, outage: _Outage) -> None:
        times = self._failures.pop(outage, None)
        if times is not None:
            log.warning("%s: the store answers again, after %d requests", self._of(outage), times)

    def _of(self, outage: _Outage) -> str:
        """The guards of an outage, and what of theirs failed where that isn't the decision."""
        phase, *names = outage
        found = [guard for guard in self._guards if guard.name in names or (guard.shadow and outage == _SHADOWS)]
        return _names(found) + (f", {phase}" if phase else "")


_Outage: TypeAlias = "tuple[str, ...]"
"""What failed, and the names of the guards that were asked.

What answers may be something else than what fails: a store looks while it can't write, or is two stores in one. The end
of an outage is that the same is answered again.
"""

_SHADOWS: _Outage = ("",)


def _outage(asked: list[Asked], phase: str) -> _Outage:
    return (phase, *[guard.name for guard, _ in asked if not guard.shadow])


def _check_guards(guards: Sequence[Guard]) -> None:
    """Raise `ConfigError` for what isn't one guard or several, each with a name of its own."""
    names: set[str] = set()
    for guard in guards:
        if not isinstance(guard, Guard):
            raise ConfigError(f'expected a guard, such as Guard("per-ip", "10/minute"), not {guard!r}')
        if guard.name.lower() in names:
            raise ConfigError(
                f"two guards are named {guard.name!r} (letter case doesn't matter): clients tell them apart by it"
            )
        names.add(guard.name.lower())
    fields.check_dialects(guards)
    if not names:
        raise ConfigError('nothing is limited without a guard, such as Guard("per-ip", "10/minute")')


def families(fields: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """How the names (in lower case) of an application's headers begin that give way to these fields.

    All `RateLimit…` where there is one of them, so that a response has one generation; likewise `X-RateLimit…`.
    Everything else, `Retry-After` too, is the application's.
    """
    draft = legacy = False
    for name, _ in fields:  # PERF: a set and a tuple of it take three times as long
        if name.startswith("X-"):
            legacy = True
        else:
            draft = True
    return _FAMILIES[draft, legacy]


_FAMILIES = {
    (False, False): (),
    (True, False): ("ratelimit",),
    (False, True): ("x-ratelimit",),
    (True, True): ("ratelimit", "x-ratelimit"),
}


def wrapped(app: T) -> T:
    """The application that a wrapper was given; `ConfigError` if that came first which comes second."""
    if not callable(app):
        raise ConfigError(f"the application comes first: RateLimit(app, guard), not {app!r}")
    return app


def checked_refuse(refuse: object) -> Refuse | None:
    """The callable that makes an answer of a refusal, or `ConfigError`."""
    if refuse is not None and not callable(refuse):
        raise ConfigError(
            f"refuse must be a callable of the request and the verdict that gives a Verdict, not {refuse!r}"
        )
    check_sync("refuse", refuse)
    return refuse


def with_length(verdict: Verdict) -> fields.Fields:
    """All fields of an answer, also of one that the application made of it."""
    kept = [field for field in verdict.fields if field[0].lower() != "content-length"]
    return [*kept, ("Content-Length", str(len(verdict.body)))]


def phrase(status: int) -> str:
    """The words for a status; an application may have chosen one that nobody registered."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Refused"


def below_mount(path: str, root: str) -> str:
    """The path below the mount point, which ASGI leaves in the path and WSGI does not."""
    root = root.rstrip("/")
    return (path[len(root) :] or "/") if root and f"{path}/".startswith(f"{root}/") else path


def _names(guards: Sequence[Guard]) -> str:
    return ("guard " if len(guards) == 1 else "guards ") + ", ".join([repr(guard.name) for guard in guards])
