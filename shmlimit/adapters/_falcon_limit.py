"""Falcon's decorator: `@limit("10/minute")` on a responder or on a whole resource."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from falcon.constants import COMBINED_METHODS

from shmlimit.adapters._falcon import Seen, path_of, status_of
from shmlimit.adapters._gate import Gate
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard, KeyFunction
from shmlimit.notation import parse
from shmlimit.policies.base import Policy
from shmlimit.stores.base import Store

T = TypeVar("T", bound=Callable[..., Any])
X = TypeVar("X")

_EXEMPT = "_shmlimit_exempt"

_RESPONDER = re.compile(rf"on_(request|{'|'.join(COMBINED_METHODS)})(_\w+)?", re.IGNORECASE)
_OWN = "_shmlimit_limited"


def limit(
    *guards: Guard | str,
    store: Store | None = None,
    key: KeyFunction | None = None,
    cost: int | Callable[[Any], int] = 1,
) -> Callable[[T], T]:
    """Limit a responder (`on_get`, a coroutine or not), or all responders of a resource class.

    `guards` are guards or notation: `limit("10/minute")` names its guard after the responder (`Items.on_get`; where
    there are several notations the policy is added). They are decided in one step, all or nothing, after those of a
    middleware, and all are listed in the fields. `store` and `key` are as for `RateLimitMiddleware`; `cost` is that of
    the guards that are made of notation.

    On a class it covers responders with a suffix, `on_request` and `on_websocket`, and inherited ones; not those that
    have a `limit` of their own or are `exempt`. Decorators on one responder, or on one class and its base, all apply.

    **Equal policies with the same key share one count**, whichever responder they stand at. For a count for each route:
    `key=keys.compose(keys.route, keys.client_ip())`.

    Raises `ConfigError` for what can't work.
    """
    for guard in guards:
        if not isinstance(guard, Guard | str):
            raise ConfigError(f'expected a guard or notation, as in limit("10/minute"), not {guard!r}')
    given = [parse(guard) if isinstance(guard, str) else guard for guard in guards]
    if cost != 1 and all(isinstance(guard, Guard) for guard in guards):
        raise ConfigError("cost is for guards that are made of notation; a Guard has one of its own: Guard(…, cost=2)")
    several = sum(isinstance(item, Policy) for item in given) > 1

    def guard_of(name: str, item: Guard | Policy) -> Guard:
        return item if isinstance(item, Guard) else Guard(f"{name} {item}" if several else name, item, cost=cost)

    def gate(name: str) -> Gate:
        return Gate(tuple(guard_of(name, item) for item in given), store, key)

    def decorate(target: T) -> T:
        if isinstance(target, type):
            _limit_class(target, gate)
            return target
        if not inspect.isroutine(target) or isinstance(target, staticmethod | classmethod):
            raise ConfigError(f"limit decorates a responder or a resource class, not {target!r}")
        limited: T = _limited(target, gate(_name(target)))
        setattr(limited, _OWN, True)
        return limited

    return decorate


def exempt(target: X) -> X:
    """Leave a responder out of the `limit` of its class; or a whole resource, and what inherits from it, out of what a
    middleware decides after routing. What that decides before it can't take back: `skip_paths` is for that.
    """
    if not isinstance(target, type) and not inspect.isroutine(target):
        raise ConfigError(f"exempt decorates a responder or a resource class, not {target!r}")
    setattr(target, _EXEMPT, True)
    return target


def is_exempt(target: object) -> bool:
    """Whether `exempt` was said of it, or of a class that it inherits from."""
    return getattr(target, _EXEMPT, None) is True  # a proxy has every attribute, but hardly this one


def _limit_class(resource: type, gate: Callable[[str], Gate]) -> None:
    found = False
    for name, responder in inspect.getmembers(resource, callable):
        if _RESPONDER.fullmatch(name):
            found = True
            if isinstance(inspect.getattr_static(resource, name), staticmethod | classmethod):
                raise ConfigError(f"{_name(resource)}.{name} must be an ordinary method to be limited")
            if not hasattr(responder, _OWN) and not is_exempt(responder):
                setattr(resource, name, _limited(responder, gate(f"{_name(resource)}.{name}")))
    if not found:
        raise ConfigError(f"{_name(resource)} has no responder (on_get, on_post, …) to limit")


def _limited(responder: Any, gate: Gate) -> Any:
    if inspect.iscoroutinefunction(responder):

        @functools.wraps(responder)
        async def limited(self: object, req: Any, resp: Any, *args: Any, **kwargs: Any) -> None:
            seen = Seen.of(req)
            seen.go_on(resp, await gate.acheck(req.method, path_of(req), req, seen))
            try:
                await responder(self, req, resp, *args, **kwargs)
            except Exception as error:
                if seen.pending:
                    seen.go_on(resp, await gate.asettle(seen, status_of(resp, error)))
                raise
            else:
                if seen.pending:
                    seen.go_on(resp, await gate.asettle(seen, status_of(resp)))
            finally:
                seen.write(resp)

    else:

        @functools.wraps(responder)
        def limited(self: object, req: Any, resp: Any, *args: Any, **kwargs: Any) -> None:
            seen = Seen.of(req)
            seen.go_on(resp, gate.check(req.method, path_of(req), req, seen))
            try:
                responder(self, req, resp, *args, **kwargs)
            except Exception as error:
                if seen.pending:
                    seen.go_on(resp, gate.settle(seen, status_of(resp, error)))
                raise
            else:
                if seen.pending:
                    seen.go_on(resp, gate.settle(seen, status_of(resp)))
            finally:
                seen.write(resp)

    return limited


def _name(target: Any) -> str:
    """`Items.on_get`, wherever the class stands."""
    return str(target.__qualname__).rpartition("<locals>.")[2]
