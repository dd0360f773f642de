"""LocalStore: the shared table where it can keep a policy, else a SQLite file; all or nothing over both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shmlimit.errors import ConfigError
from shmlimit.policies.base import Decision, Policy
from shmlimit.policies.requests import Request, join
from shmlimit.stores.base import BaseStore
from shmlimit.stores.sqlite import SqliteStore, Transaction
from shmlimit.table import SharedTable
from shmlimit.table.charges import Charges

_Requests = list[tuple[Policy, bytes, int]]
_T = TypeVar("_T")


class LocalStore(BaseStore):
    """The embedded default under gunicorn: all five policies, exact over the processes of a host.

    `table` decides for the policies that it supports, in about a microsecond; `sqlite` for the others, and only then is
    its file opened. Errors are those of the two.
    """

    def __init__(self, table: SharedTable, sqlite: SqliteStore) -> None:
        if not isinstance(table, SharedTable) or not isinstance(sqlite, SqliteStore):
            raise ConfigError(
                f"LocalStore(table, sqlite) takes a SharedTable and a SqliteStore, not {table!r}, {sqlite!r}"
            )
        self.table = table
        self.sqlite = sqlite

    def __repr__(self) -> str:
        return f"LocalStore({self.table!r}, {self.sqlite!r})"

    @property
    def secret(self) -> bytes:
        """The table's."""
        return self.table.secret

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """See `Store.take`."""
        return self.part_for(policy).take(policy, key, cost, now_us=now_us)

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """See `Store.peek`."""
        return self.part_for(policy).peek(policy, key, cost, now_us=now_us)

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """See `Store.reset`."""
        return self.part_for(policy).reset(policy, key)

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """See `Store.take_all`. Over both: the file decides inside its open transaction, then the table, then the file
        commits or rolls back. A commit that fails gives the table's charge back.
        """
        joint = join(requests)
        kept = [self.table.supports(policy) for policy, _, _ in joint.requests]
        if all(kept):
            return joint.spread(self.table.take_all(joint.requests, now_us=now_us))
        if not any(kept):
            return joint.spread(self.sqlite.take_all(joint.requests, now_us=now_us))
        here = [request for request, in_table in zip(joint.requests, kept, strict=True) if in_table]
        there = [request for request, in_table in zip(joint.requests, kept, strict=True) if not in_table]
        in_table, in_file = (iter(decisions) for decisions in self._take_both(here, there, now_us))
        return joint.spread([next(in_table if keeps else in_file) for keeps in kept])

    def supports(self, policy: Policy) -> bool:
        """Whether it is a policy."""
        return self.table.supports(policy) or self.sqlite.supports(policy)

    def close(self) -> None:
        """Close both."""
        self.table.close()
        self.sqlite.close()

    async def atake(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """`take`; in a thread only where the file decides."""
        if self.table.supports(policy):
            return self.table.take(policy, key, cost, now_us=now_us)
        return await self.sqlite.atake(policy, key, cost, now_us=now_us)

    async def apeek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """`peek`; in a thread only where the file decides."""
        if self.table.supports(policy):
            return self.table.peek(policy, key, cost, now_us=now_us)
        return await self.sqlite.apeek(policy, key, cost, now_us=now_us)

    async def areset(self, policy: Policy, key: str | bytes) -> bool:
        """`reset`; in a thread only where the file decides."""
        if self.table.supports(policy):
            return self.table.reset(policy, key)
        return await self.sqlite.areset(policy, key)

    async def atake_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """`take_all`; in a thread only where the file has a part in it."""
        requests = list(requests)
        if all(self.table.supports(policy) for policy, _, _ in requests):
            return self.table.take_all(requests, now_us=now_us)
        return await super().atake_all(requests, now_us=now_us)

    async def _off_loop(self, method: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        return await self.sqlite._off_loop(method, *arguments, **named)  # in its threads, and within its timeout

    def part_for(self, policy: Policy) -> SharedTable | SqliteStore:
        """Which of the two decides on `policy`."""
        return self.table if self.table.supports(policy) else self.sqlite

    def _take_both(
        self, here: _Requests, there: _Requests, now_us: int | None
    ) -> tuple[list[Decision], list[Decision]]:
        charges: Charges | None = None
        try:
            with self.sqlite.transaction() as transaction:
                in_file, charge_file = transaction.decide_all(there, now_us)
                if charge_file is None:
                    return self._report(here, now_us), in_file
                charges = self.table.charge_all(here, now_us)
                if not charges.stands:
                    return charges.decisions, _untaken(transaction, there, now_us)
                charge_file()
        except BaseException:
            if charges is not None and charges.stands:
                charges.give_back()
            raise
        charges.keep()
        return charges.decisions, in_file

    def _report(self, here: _Requests, now_us: int | None) -> list[Decision]:
        """What the table says of a request that the file refused: its own refusals, else nothing taken."""
        decisions = []
        for policy, key, cost in here:
            decision = self.table.peek(policy, key, cost, now_us=now_us)
            decisions.append(self.table.peek(policy, key, now_us=now_us) if decision.allowed else decision)
        return decisions


def _untaken(transaction: Transaction, there: _Requests, now_us: int | None) -> list[Decision]:
    return transaction.decide_all([(policy, key, 0) for policy, key, _ in there], now_us)[0]
