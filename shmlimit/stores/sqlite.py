"""SqliteStore: limits in a SQLite file, exact over all processes of a host that have it open, and kept over a reboot.

One row a key. Each decision is one transaction, so deciders queue for the file's one write lock:

    BEGIN IMMEDIATE -> read the clock -> SELECT the row -> the policy decides -> allowed: UPDATE it -> COMMIT

A wall clock can be set back, so the file has what it takes to notice. `written_us` in a row is the clock at the row's
last write: a clock that is behind it was set back, and the state moves with it. What was purged is remembered in
`<table>:forgotten`, a table of one row: `latest_us` is the latest expiry that was ever forgotten, `given_us` the latest
as of a caller's `now_us`, `own_us` the latest as of the store's clock. A clock behind that was set back, too, and
`turned_us` is where it then stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shmlimit.policies.base import Decision, Policy, check_cost
from shmlimit.policies.requests import Request, key_bytes
from shmlimit.stores._sqlite_file import Path, SqliteFile
from shmlimit.stores._sqlite_sql import Sql, valid_table_name
from shmlimit.stores._sqlite_transaction import PURGE_ROWS, Transaction
from shmlimit.stores.base import BaseStore, check_policy, policy_text, seen_from, wall_clock

__all__ = ["PURGE_ROWS", "SqliteStore", "Transaction", "valid_table_name"]

_BATCH_ROWS = 1_000  # that `purge` looks at in one transaction, so that deciders get in between
_T = TypeVar("_T")


class SqliteStore(BaseStore):
    """Rate limits in a table of the SQLite file `path`: all policies, exact over the threads and processes of one host
    (so not on a network file system), and still there after a restart or a reboot.

    The file is made and opened at the first decision, so a server's master may construct the store for its workers. A
    process has one connection, which its threads take in turn; it is closed before a fork and opened again after it.
    `timeout` is how many seconds a decision waits for other users of the file before it is a `StoreError`. `clock` (a
    callable that gives microseconds since 1970) stands in for the wall clock in tests.

    Whatever SQLite can't do is a `StoreError` that names the file and the cause, and no charge; once the trouble is
    over the same store goes on. Raises `ConfigError` for a path, a table name or a timeout that can't work.

    To start afresh remove the file, also while it is in use: each process says so once (`StoreError`), then all go on
    with a new one. To put another file in its place is for when nobody has it open.
    """

    def __init__(
        self, path: Path, table: str = "ratelimit", *, timeout: float = 5.0, clock: Callable[[], int] | None = None
    ) -> None:
        self.table, self._sql = table, Sql(table)
        self._file = SqliteFile(path, self._sql, timeout)
        self.path = self._file.path
        self._clock = wall_clock if clock is None else clock
        # When to look for expired rows again: at this time, or after so many charges.
        self._look_us, self._charges = 0, 0

    def __repr__(self) -> str:
        return f"<SqliteStore {self.path!r}, table {self.table!r}>"

    # ---- the store's protocol ----------------------------------------------------------------------------------------

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """Charge `cost` units to the key if they are there; see `Store.take`.

        Raises `ValueError` for a bad cost or time, `TypeError` for a key that is neither `str` nor `bytes`.
        """
        # PERF: what `take_all` does, for one request: a tenth of the time.
        identity = check_policy(policy), key_bytes(key)
        check_cost(cost)
        with Transaction(self) as transaction:
            transaction._as_of(now_us)
            found = transaction._find(*identity)
            decision, state = policy.decide(found.state, found.at_us, cost)
            if decision.allowed and cost:
                transaction._keep(*identity, found, state)
                transaction._tidy()
        return seen_from(decision, found.at_us - transaction.now_us)

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """Charge all of them or none, in one transaction; see `Store.take_all`."""
        requests = list(requests)
        with self.transaction() as transaction:
            decisions, charge = transaction.decide_all(requests, now_us)
            if charge is not None:
                charge()
        return decisions

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """What `take` would say, taking nothing (and writing nothing, unless the clock was set back)."""
        requests = ((policy, key, cost),)
        with Transaction(self, "BEGIN") as reading:
            decisions, _ = reading.decide_all(requests, now_us)
        if reading.set_back:
            with self.transaction() as transaction:
                decisions, _ = transaction.decide_all(requests, now_us)
        return decisions[0]

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """Forget the key, so that its whole quota is there again; whether it had a live state."""
        identity = policy_text(check_policy(policy)), key_bytes(key)
        with self.transaction() as transaction:
            row = transaction.execute(self._sql.lifetime, identity).fetchone()
            if row is None:
                return False
            transaction.execute(self._sql.remove, row[:1])
            return bool(row[1] > max(row[2], transaction.now_us))

    def supports(self, policy: Policy) -> bool:
        """Whether it is a policy: this store runs them all."""
        return isinstance(policy, Policy)

    def transaction(self) -> Transaction:
        """One transaction over several decisions, for stores that are built on this one.

        It holds the file's write lock for the time of its block, then commits; a block that raises is rolled back.

            with store.transaction() as transaction:
                decisions, charge = transaction.decide_all(requests, now_us)
                if charge is not None and others_allow():
                    charge()
            # here it is charged for good; or a StoreError was raised, and nothing is
        """
        return Transaction(self)

    def close(self) -> None:
        """Close the file, after the decision under way; later calls raise `StoreError`. The states stay in it."""
        self._file.close()

    async def _off_loop(self, method: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        # The wait for a thread is part of the wait: while the file is locked, the hundredth call fails with the first.
        return await super()._off_loop(self._file.within, self._file.deadline(), method, *arguments, **named)

    # ---- looking after the file --------------------------------------------------------------------------------------

    def purge(self, now_us: int | None = None) -> int:
        """Remove every row that has expired by `now_us` (default: by now), and say how many. Decisions do it by and by,
        so nobody has to call this; others get in between its transactions.
        """
        removed, more = 0, True
        while more:
            with self.transaction() as transaction:
                transaction._as_of(now_us)
                gone, more = transaction._purge(_BATCH_ROWS)
            removed += gone
        return removed

    def count(self) -> int:
        """Rows in the table, expired ones that nobody has purged yet among them."""
        with Transaction(self, "BEGIN") as reading:
            return int(reading.execute(self._sql.count).fetchone()[0])
