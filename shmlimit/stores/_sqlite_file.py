"""The file under `SqliteStore`: one connection a process, its threads, forks, and what SQLite's errors mean."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from shmlimit.errors import ConfigError, StoreError
from shmlimit.stores._sqlite_place import GONE, NAP_S, Place
from shmlimit.stores._sqlite_sql import Sql

Path: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
_T = TypeVar("_T")

_CLOSE_S = 1.0
"""At most, to be alone for closing a file. Who has to wait for longer closes it anyway."""

# What SQLite or the system says -> what to do about it.
_HINTS = {
    "unable to open": "its directory must exist, and this user must be able to write there",
    "readonly": "this user must be able to write the file and its directory",
    "Permission denied": "this user must be able to read and write its directory",
    "locked": "somebody held its write lock all that time; look for a program that keeps a transaction open",
    "is full": "make room on its disk; nothing was charged, and what had been is kept",
    "I/O error": "its disk is full or broken, or the file was cut; make room, or mend or remove it",
    "malformed": "the file is damaged; stop what writes to it, then mend or remove it",
    "not a database": "give another path, or remove the file",
    "column": "it has a table of that name which is not shmlimit's; give another table=",
}


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
        self._thread = _OfThread()
        self._closed = False
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._place = Place(self.path)
        with _forking:
            _files.add(self)

    def deadline(self) -> float:
        """When a call that comes now has waited for `timeout`, by `time.monotonic`."""
        return time.monotonic() + self._timeout

    def within(self, until: float, method: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """Calls a method of the store's which waits until then at most, however late it is called. Where nothing has
        to be waited for it still answers.
        """
        self._thread.until = until
        try:
            return method(*arguments, **named)
        finally:
            self._thread.until = None

    def begin(self, transaction: object, statement: str) -> sqlite3.Cursor:
        """Waits for its turn, opens the file where it isn't open, and begins a transaction."""
        until = self._thread.until or self.deadline()
        # PERF: without a timeout it takes half as long.
        if not (self._lock.acquire(blocking=False) or self._lock.acquire(timeout=max(0.0, until - time.monotonic()))):
            raise self.failure("other threads of this process were busy with it all that time")
        try:
            connection = self._connected(until)
            self.transaction = transaction
            return self._begun(connection, statement, until)
        except BaseException as error:
            self.undo(transaction, error)
            if isinstance(error, OSError):
                raise self.failure(str(error)) from error
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
                # A file that is locked, or has no room, stays open: denials still answer, and to open it takes room.
                if of_sqlite and not any(said in str(error) for said in ("locked", "is full")):
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
        """Closes the file for good, once a transaction that is under way has ended."""
        self._closed = True  # first, so that those who wait for their turn give it up
        with self._lock:
            self._disconnect()

    def _check_own(self, transaction: object) -> None:
        if self.transaction is not transaction:
            raise self.failure("this process was forked within the transaction, which is its parent's")

    def _connected(self, until: float) -> sqlite3.Connection:
        if self.transaction is not None:
            raise self.failure("this thread has a transaction open already; decide within that one")
        if self._closed:
            raise self.failure("the store is closed")
        if self._connection is None:
            with self._place.alone(until, opening=True) as alone:
                if alone:
                    self._place.prepare()
                self._connection = self._connect(until, alone=alone)
        return self._connection

    def _connect(self, until: float, *, alone: bool) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=NAP_S, isolation_level=None, check_same_thread=False)
        try:
            # A write-ahead log: a commit is one append, and readers don't wait for it.
            _patiently(connection, "PRAGMA journal_mode=WAL", until)
            # What a killed process has committed is in the page cache already, and no process's death takes it away:
            # so NORMAL loses nothing to a kill -9, nor to an orderly reboot. It doesn't wait for the disk at each
            # commit: a power cut or a crash of the whole host may lose the last moments (the file stays sound). FULL
            # would keep those, too, for a millisecond or more a decision.
            connection.execute("PRAGMA synchronous=NORMAL")
            if _patiently(connection, self._sql.made, until).fetchone()[0] < 3:
                _patiently(connection, "BEGIN IMMEDIATE", until)
                for statement in self._sql.make:
                    connection.execute(statement)
                connection.execute("COMMIT")
            self._place.note(alone=alone)
        except BaseException as error:
            connection.close()
            if alone and isinstance(error, sqlite3.Error) and self._place.is_gone():  # to SQLite a fault of the disk
                raise FileNotFoundError(GONE) from error
            raise
        return connection

    def _begun(self, connection: sqlite3.Connection, statement: str, until: float) -> sqlite3.Cursor:
        try:
            cursor = _patiently(connection, statement, until)
        except sqlite3.DatabaseError as error:
            cause: Exception | None = error
        else:
            cause = None
        # Not asked before: to get the lock may take a while, and the file may be gone by then.
        change = self._place.change()
        if change is not None:
            self._disconnect(until)
            raise self.failure(change) from cause
        if cause is not None:
            raise cause
        return cursor

    def _disconnect(self, until: float | None = None) -> None:
        """Rolls back and closes the connection, alone: the last one to close a file removes its log, by name.

        Given `until` it raises what keeps it from leaving the file in order, and the connection is as it was.
        """
        connection = self._connection
        if connection is None:
            return
        with contextlib.ExitStack() as stack:
            try:
                connection.rollback()  # first: who is alone with the file may be waiting for its lock
                alone = stack.enter_context(self._place.alone(until or time.monotonic() + _CLOSE_S))
                if alone and self._place.change(thorough=True) is not None:
                    self._place.leave(connection)
            except (sqlite3.Error, OSError):
                if until is not None:
                    raise
            self._connection = None
            with contextlib.suppress(sqlite3.Error):
                connection.close()


class _OfThread(threading.local):
    until: float | None = None


def _patiently(connection: sqlite3.Connection, statement: str, until: float) -> sqlite3.Cursor:
    """A statement that has to wait for others, tried until then, and once at least.

    SQLite's own waiting sleeps for longer and longer, up to 100 ms: where others come all the time, one was seen to
    wait for three seconds. And it doesn't cover the switch of the log, which several processes may want at once.
    """
    while True:
        try:
            return connection.execute(statement)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(NAP_S)


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
