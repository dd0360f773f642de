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

import json
import sqlite3
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from shmlimit.policies.base import Decision, Policy, State, check_cost
from shmlimit.policies.requests import Request, decide_all, join, key_bytes
from shmlimit.stores._sqlite_file import Path, Sql, SqliteFile, valid_table_name
from shmlimit.stores.base import NOW_MAX_US, BaseStore, check_now, check_policy, policy_text, seen_from, wall_clock

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SqliteStore", "Transaction", "valid_table_name"]

PURGE_ROWS = 100  # that a decision looks at, at most: half a millisecond
_BATCH_ROWS = 1_000  # that `purge` looks at in one transaction, so that deciders get in between
_LOOK_CHARGES = 64  # after which a decision looks for expired rows of other processes
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode


class SqliteStore(BaseStore):
    """Rate limits in a table of the SQLite file `path`: all policies, exact over the threads and processes of one host
    (so not on a network file system), and still there after a restart or a reboot.

    The file is made and opened at the first decision, so a server's master may construct the store for its workers. A
    process has one connection, which its threads take in turn; it is closed before a fork and opened again after it.
    `timeout` is how many seconds a decision waits for other users of the file before it is a `StoreError`. `clock` (a
    callable that gives microseconds since 1970) stands in for the wall clock in tests.

    Whatever SQLite can't do is a `StoreError` that names the file and the cause. Raises `ConfigError` for a path, a
    table name or a timeout that can't work. Remove the file only while nobody has it open: others would go on with it.
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
        """Close the file; later calls raise `StoreError`. The states stay in it."""
        self._file.close()

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


class _Found(NamedTuple):
    """What there is of a key (`None` twice where there is no row), and the time to judge it at."""

    id: int | None
    state: State | None
    at_us: int
    written_us: int
    due_us: int


class Transaction:
    """An open transaction of a `SqliteStore`: nobody else writes to the file until its block ends.

    `now_us` is the time that it decides at: the one that was given, else the wall clock's as it began.
    """

    __slots__ = ("_clock_us", "_cursor", "_given", "_sql", "_start", "_store", "execute", "now_us", "set_back")
    execute: Callable[..., sqlite3.Cursor]

    def __init__(self, store: SqliteStore, start: str = "BEGIN IMMEDIATE") -> None:
        self._store, self._sql, self._start = store, store._sql, start
        self.set_back = self._given = False

    def __enter__(self) -> Self:
        self._cursor = self._store._file.begin(self, self._start)
        self.execute = self._cursor.execute
        try:
            self._clock_us = self.now_us = self._store._clock()
        except BaseException as error:
            self._store._file.undo(self, error)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self._store._file.commit(self, self._cursor)
        else:
            self._store._file.undo(self, error)

    def decide_all(
        self, requests: Iterable[Request], now_us: int | None = None
    ) -> tuple[list[Decision], Callable[[], None] | None]:
        """The decisions that `take_all` would give, and what charges them (`None` if one denies).

        Nothing is charged until that is called, which must be within the block and before the same keys are decided on
        again. To report that nothing was taken after all, decide once more with a cost of 0 for each.
        """
        joint = join((check_policy(policy), key, cost) for policy, key, cost in requests)
        self._as_of(now_us)
        found: list[_Found] = []

        def load(policy: Policy, key: bytes) -> tuple[State | None, int]:
            one = self._find(policy, key)
            found.append(one)
            return one.state, one.at_us

        decisions, states = decide_all(joint.requests, load)
        seen = [seen_from(one, where.at_us - self.now_us) for one, where in zip(decisions, found, strict=True)]
        if states is None:
            return joint.spread(seen), None
        charged = [entry for entry in zip(joint.requests, found, states, strict=True) if entry[0][2]]

        def charge() -> None:
            for (policy, key, _), where, state in charged:
                self._keep(policy, key, where, state)
            if charged:
                self._tidy()

        return joint.spread(seen), charge

    def _as_of(self, now_us: int | None) -> None:
        self._given = check_now(now_us) is not None
        self.now_us = self._clock_us if now_us is None else now_us

    def _find(self, policy: Policy, key: bytes) -> _Found:
        row = self.execute(self._sql.find, (policy_text(policy), key)).fetchone()
        if row is None:
            return _Found(None, None, self._not_before(policy), 0, 0)
        number, text, written_us, due_us = row
        try:
            state: State = _decode(text)[0]
        except (ValueError, TypeError):
            raise self._store._file.failure(f"the state in row {number} of {self._store.table} is broken") from None
        found = _Found(number, state, self.now_us, written_us, due_us)
        if self._given or written_us <= self._clock_us:
            return found
        # The clock was set back, and the state moves with it. That is written even if the request is then denied: else
        # the difference would be taken anew each time, and the key be shut until the clock is where it was.
        self.set_back = True
        found = found._replace(state=policy.shift(state, self._clock_us - written_us), written_us=0)
        if self._start != "BEGIN":
            self._keep(policy, key, found, found.state or {})
        return found

    def _not_before(self, policy: Policy) -> int:
        """The time to judge a key without a row at: it may have had one, which was forgotten as of a later time."""
        row = self.execute(self._sql.forgotten).fetchone()
        if row is None:
            raise self._store._file.failure(f"its table {self._store.table}:forgotten was emptied; remove the file")
        own_us, turned_us, given_us, latest_us = row
        if self._given:
            return max(self.now_us, int(latest_us))
        if self._clock_us < own_us:
            self.set_back, turned_us = True, self._clock_us
            if self._start != "BEGIN":
                self.execute(self._sql.turn, (turned_us, turned_us))
        return max(self._clock_us, int(given_us), _moved(policy, turned_us) if turned_us else 0)

    def _keep(self, policy: Policy, key: bytes, found: _Found, state: State) -> None:
        text, expires_us = _encode(state), policy.expires_at(state)
        written_us = max(found.written_us, self._clock_us)
        if found.id is None:
            self.execute(self._sql.add, (policy_text(policy), key, text, expires_us, expires_us, written_us))
        elif expires_us < found.due_us:
            self.execute(self._sql.change_due, (text, expires_us, written_us, expires_us, found.id))
        else:
            self.execute(self._sql.change, (text, expires_us, written_us, found.id))
        self._store._look_us = min(self._store._look_us, expires_us)

    def _tidy(self) -> None:
        """After a charge: look for expired rows, where there may be some."""
        self._store._charges += 1
        if self._store._look_us <= self.now_us or self._store._charges >= _LOOK_CHARGES:
            self._purge(PURGE_ROWS)

    def _purge(self, rows: int) -> tuple[int, bool]:
        """Look at up to `rows` rows that may have expired: how many it removed, and whether there may be more."""
        due = self.execute(self._sql.due, (self.now_us, rows)).fetchall()
        gone = [expires_us for _, expires_us in due if expires_us <= self.now_us]
        if gone:
            latest_us = max(gone)
            self.execute(self._sql.forget_given if self._given else self._sql.forget_own, (latest_us, latest_us))
        for number, expires_us in due:
            if expires_us <= self.now_us:
                self.execute(self._sql.remove, (number,))
            else:
                self.execute(self._sql.put_off, (expires_us, number))
        (next_us,) = self.execute(self._sql.next_due).fetchone()
        self._store._look_us, self._store._charges = NOW_MAX_US if next_us is None else next_us, 0
        return len(gone), len(due) == rows


def _moved(policy: Policy, delta_us: int) -> int:
    """Where the start of a state at the epoch is once moved by `delta_us`: there, or at the next window's start."""
    _, state = policy.decide(None, 0)
    return policy.expires_at(policy.shift(state, delta_us)) - policy.expires_at(state)
