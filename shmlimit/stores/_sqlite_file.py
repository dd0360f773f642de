"""The file under `SqliteStore`: its tables, one connection a process, forks, and what SQLite's errors mean."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
import time
import weakref
from typing import TypeAlias

from shmlimit.errors import ConfigError, StoreError

Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
_NAME = re.compile(r"(?!sqlite_)[a-z_][a-z0-9_]{0,63}", re.ASCII | re.IGNORECASE)

_NAP_S = 0.001

# What SQLite says -> what to do about it.
_HINTS = {
    "unable to open": "its directory must exist, and this user must be able to write there",
    "readonly": "this user must be able to write the file and its directory",
    "locked": "somebody held its write lock all that time; look for a program that keeps a transaction open",
    "not a database": "give another path",
    "column": "it has a table of that name which is not shmlimit's; give another table=",
}


def valid_table_name(text: object) -> bool:
    """Whether `text` can name a store's table: 1 to 64 ASCII letters, digits and underscores, no digit first, and not
    SQLite's own prefix `sqlite_`.
    """
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


class Sql:
    """The statements, for a table name; a `ConfigError` for one that is no `valid_table_name`.

    `expires_us` is when a row's state has expired, and `due_us`, which has the index, when a purge looks at the row:
    then or earlier; a row that is looked at too early is put off. PERF: each hit moves the expiry, and to write that
    into an index would take as long as all the rest of a commit.
    """

    def __init__(self, table: str) -> None:
        if not valid_table_name(table):
            raise ConfigError(f"table must be 1 to 64 of a-z, 0-9 and _, no digit or sqlite_ first, not {table!r}")
        rows, index, forgotten = f'"{table}"', f'"{table}:due"', f'"{table}:forgotten"'
        identity = "policy = ? AND key = ?"
        # ruff: noqa: S608 - valid_table_name has seen what is put in
        self.make = (
            f"""CREATE TABLE IF NOT EXISTS {rows} (
                id INTEGER PRIMARY KEY, policy TEXT NOT NULL, key BLOB NOT NULL, state TEXT NOT NULL,
                expires_us INTEGER NOT NULL, due_us INTEGER NOT NULL, written_us INTEGER NOT NULL, UNIQUE (policy, key))
            """,
            f"CREATE INDEX IF NOT EXISTS {index} ON {rows} (due_us)",
            f"""CREATE TABLE IF NOT EXISTS {forgotten} (
                id INTEGER PRIMARY KEY CHECK (id = 1), own_us INTEGER NOT NULL, turned_us INTEGER NOT NULL,
                given_us INTEGER NOT NULL, latest_us INTEGER NOT NULL)
            """,
            f"INSERT OR IGNORE INTO {forgotten} VALUES (1, 0, 0, 0, 0)",
        )
        self.made = f"SELECT count(*) FROM sqlite_master WHERE name IN ('{table}', '{table}:due', '{table}:forgotten')"
        self.find = f"SELECT id, state, written_us, due_us FROM {rows} WHERE {identity}"
        self.add = f"INSERT INTO {rows} (policy, key, state, expires_us, due_us, written_us) VALUES (?, ?, ?, ?, ?, ?)"
        self.change = f"UPDATE {rows} SET state = ?, expires_us = ?, written_us = ? WHERE id = ?"
        self.change_due = f"UPDATE {rows} SET state = ?, expires_us = ?, written_us = ?, due_us = ? WHERE id = ?"
        self.remove = f"DELETE FROM {rows} WHERE id = ?"
        self.lifetime = f"SELECT id, expires_us, written_us FROM {rows} WHERE {identity}"
        self.due = f"SELECT id, expires_us FROM {rows} WHERE due_us <= ? ORDER BY due_us LIMIT ?"
        self.next_due = f"SELECT min(due_us) FROM {rows}"
        self.put_off = f"UPDATE {rows} SET due_us = ? WHERE id = ?"
        self.count = f"SELECT count(*) FROM {rows}"
        self.forgotten = f"SELECT own_us, turned_us, given_us, latest_us FROM {forgotten} WHERE id = 1"
        self.forget_own = f"UPDATE {forgotten} SET own_us = max(own_us, ?), latest_us = max(latest_us, ?)"
        self.forget_given = f"UPDATE {forgotten} SET given_us = max(given_us, ?), latest_us = max(latest_us, ?)"
        self.turn = f"UPDATE {forgotten} SET own_us = ?, turned_us = ?"


class SqliteFile:
    """One connection, which the threads of a process take in turn: `begin`, statements, then `commit` or `undo`.

    SQLite lets one write at a time anyway, and a thread that waits for a lock gets on sooner than one that sleeps in
    SQLite. It is opened when it is first needed.
    """

    def __init__(self, path: Path, sql: Sql, timeout: float) -> None:
        try:
            text = os.fsdecode(path)
        except TypeError:
            raise ConfigError(f"path must name a file, not {path!r}") from None
        if text in {"", ":memory:"} or "\0" in text:
            raise ConfigError(f"path must name a file, not {text!r}; for a single process there is MemoryStore")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= 3600:
            raise ConfigError(f"timeout must be within 0 and 3600 seconds, not {timeout!r}")
        self.path = os.path.abspath(text)  # noqa: PTH100 - a server may change its directory, but links stay links
        self.transaction: object = None  # what has it, of the thread that holds the lock
        self._sql = sql
        self._timeout = timeout
        self._closed = False
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        with _forking:
            _files.add(self)

    def begin(self, transaction: object, statement: str) -> sqlite3.Cursor:
        """Waits for its turn, opens the file where it isn't open, and begins a transaction."""
        if not self._lock.acquire(timeout=self._timeout):
            raise self.failure("other threads of this process were busy with it all that time")
        try:
            connection = self._connected()
            self.transaction = transaction
            return self._patiently(connection, statement)
        except BaseException as error:
            self.undo(transaction, error)
            raise

    def commit(self, transaction: object, cursor: sqlite3.Cursor) -> None:
        """Makes what was written stand, and lets others in."""
        try:
            self._check_own(transaction)
            cursor.execute("COMMIT")
        except BaseException as error:
            self.undo(transaction, error)
            raise
        self.transaction = None
        self._lock.release()

    def undo(self, transaction: object, error: BaseException) -> None:
        """Rolls back, lets others in, and raises an error of SQLite's as a `StoreError`."""
        of_sqlite = isinstance(error, sqlite3.Error | OverflowError)
        if self.transaction is transaction or self.transaction is None:
            try:
                if of_sqlite:
                    self._disconnect()  # which rolls back; the next decision opens the file anew
                elif self._connection is not None:
                    self._connection.rollback()
            except sqlite3.Error:
                self._disconnect()
            self.transaction = None
        self._lock.release()
        if of_sqlite:
            raise self.failure(str(error)) from error

    def failure(self, cause: str) -> StoreError:
        """The error to raise: it names the file, the cause and what to do."""
        hint = next((f" ({hint})" for said, hint in _HINTS.items() if said in cause), "")
        return StoreError(f"the SQLite file {self.path!r} can't answer: {cause}{hint}")

    def close(self) -> None:
        """Closes the file for good."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def _check_own(self, transaction: object) -> None:
        if self.transaction is not transaction:
            raise self.failure("this process was forked within the transaction, which is its parent's")

    def _connected(self) -> sqlite3.Connection:
        if self.transaction is not None:
            raise self.failure("this thread has a transaction open already; decide within that one")
        if self._closed:
            raise self.failure("the store is closed")
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_NAP_S, isolation_level=None, check_same_thread=False)
        try:
            # A write-ahead log: a commit is one append, and readers don't wait for it.
            self._patiently(connection, "PRAGMA journal_mode=WAL")
            # What a killed process has committed is in the page cache already, and no process's death takes it away:
            # so NORMAL loses nothing to a kill -9, nor to an orderly reboot. It doesn't wait for the disk at each
            # commit: a power cut or a crash of the whole host may lose the last moments (the file stays sound). FULL
            # would keep those, too, for a millisecond or more a decision.
            connection.execute("PRAGMA synchronous=NORMAL")
            if self._patiently(connection, self._sql.made).fetchone()[0] < 3:
                self._patiently(connection, "BEGIN IMMEDIATE")
                for statement in self._sql.make:
                    connection.execute(statement)
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _patiently(self, connection: sqlite3.Connection, statement: str) -> sqlite3.Cursor:
        """A statement that has to wait for others, tried until `timeout` has passed.

        SQLite's own waiting sleeps for longer and longer, up to 100 ms: where others come all the time, one was seen to
        wait for three seconds. And it doesn't cover the switch of the log, which several processes may want at once.
        """
        until: float | None = None
        while True:
            try:
                return connection.execute(statement)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or (until is not None and time.monotonic() > until):
                    raise
            until = time.monotonic() + self._timeout if until is None else until
            time.sleep(_NAP_S)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


# SAFETY: a SQLite connection must not be carried across a fork, not even unused. SQLite keeps in memory which locks its
# process has: a child would take its parent's for its own, and when the parent closes the file, the log is removed
# under the child's feet. So the parent closes it before, when no decision is under way, and both open it again.
_files: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
_forking = threading.Lock()
_held: list[SqliteFile] = []
_carried: list[sqlite3.Connection] = []  # never closed: that would give the parent's locks away


def _before_fork() -> None:
    _forking.acquire()
    _held.extend(_files)
    for file in _held:
        file._lock.acquire()
        if file.transaction is None:
            file._disconnect()


def _after_fork() -> None:
    for file in _held:
        file._lock.release()
    _held.clear()
    _forking.release()


def _after_fork_in_child() -> None:
    for file in _held:
        if file._connection is not None:  # forked from within a transaction: it is the parent's
            _carried.append(file._connection)
            file._connection = file.transaction = None
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
