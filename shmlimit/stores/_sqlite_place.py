"""What stands at a SQLite file's path: whether that still is the file which is open, and who may open or close it now.

SAFETY: SQLite finds a file's log (`-wal`) and the log's index (`-shm`) by name. Once somebody has removed or replaced
the file under its users, these names may belong to another file, and who mixes the two up counts twice or spoils both:

- Each decision compares device and inode of the file with what it has open (a few compare those of the log, too); an
  inode that is open isn't given away. So nobody goes on with a file that others have left. Each process hears of it
  once, as a `StoreError`.
- Opening, leaving and closing are done under a lock of the directory, one process at a time. What an earlier file has
  left behind is cleared under it, before there is a new one.
- SQLite itself, when it closes a file that was moved, leaves what stands at its names alone.
"""

# ruff: noqa: PTH105, PTH116, PTH120 - SQLite takes names, and a Path takes twice as long to look

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from os import stat
from pathlib import Path
from typing import TypeAlias

NAP_S = 0.001
LOG_LOOKS = 32
"""Decisions of a process after which it looks whether the log is still there."""
LOGS = ("-wal", "-shm")
_Identity: TypeAlias = tuple[int, int]

GONE = "it was removed while it was being opened"
REMOVED = "it was removed while it was open; the next decision makes a new one"
REPLACED = "it was replaced while it was open; the next decision opens the new one"
EMPTIED = "it was emptied while it was open; the next decision makes a new one"
NOT_NOTICED = "its log (-wal, -shm) was removed while others had it open, and they haven't noticed yet"
LOG_GONE = (
    "its log (-wal, -shm) was removed while it was open, which can spoil it; the next decision opens a copy of it"
)


class Place:
    """The place at `path`: `alone` with it, `prepare` it, open the file, `note` what was opened; then ask `change`, and
    `leave` if there is one.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._real = path
        self._file: _Identity | None = None
        self._logs: dict[str, _Identity | None] = {}
        self._looks = 0

    @contextlib.contextmanager
    def alone(self, until: float, *, opening: bool = False) -> Iterator[bool]:
        """Keeps other processes and stores from opening, leaving and closing here, once they let it.

        False where the directory can't be read, and so not be locked: there SQLite says what is wrong. `TimeoutError`
        when it is `until`, by `time.monotonic`.
        """
        if opening:  # else it is the open file's directory, wherever a link at `path` leads by now
            self._real = os.path.realpath(self.path)
        try:
            directory = os.open(os.path.dirname(self._real), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield False
            return
        try:
            while True:
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError("other processes were busy opening it all that time") from None
                time.sleep(NAP_S)
            yield True
        finally:
            os.close(directory)  # and so the lock is free

    def prepare(self) -> None:
        """Makes the file where there is none, and clears what an earlier one has left. An empty file with a log is one
        that was emptied, maybe under users who still have it open: it makes room for another one.
        """
        self._file, self._logs = _identity(self.path), self._logs_now()
        if self._file is not None:
            if stat(self.path).st_size:
                if not all(self._logs.values()):
                    self._check_unused()
                return
            if not any(self._logs.values()):
                return
            self._bury()
        self._logs = {}
        for log in LOGS:
            _remove(self._real + log)
        with contextlib.suppress(OSError):  # SQLite will say why it can't be made
            # NOTE: nobody else has this file open, or closing it here would give their locks away.
            made = os.open(self._real, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
            self._file = _identity_of(os.fstat(made))
            os.close(made)

    def note(self, *, alone: bool) -> None:
        """Remembers what was opened. `OSError` where it isn't the file that was prepared, or nothing could be."""
        if not alone:
            raise PermissionError("Permission denied to lock its directory")
        found = _identity(self.path)
        if found is None or found != self._file:
            raise FileNotFoundError(GONE)
        before, self._logs = self._logs, self._logs_now()
        if not all(self._logs.values()):
            raise FileNotFoundError("its log (-wal, -shm) is missing: removed just now, or not possible here")
        if any(before[name] not in {None, self._logs[name]} for name in before):
            raise FileNotFoundError("its log (-wal, -shm) was removed while it was being opened")

    def is_gone(self) -> bool:
        """Whether the file that was prepared isn't there any more."""
        return _identity(self.path) != self._file

    def change(self, *, thorough: bool = False) -> str | None:
        """What has happened to the open file, if anything. `OSError` where its directory can't be looked into.

        PERF: asked at each decision, so flat, 1 µs. The log is looked at now and then, unless it is to be `thorough`:
        while one who has the file open is left, nobody else can begin another log (`prepare`).
        """
        try:
            found = stat(self.path)
        except FileNotFoundError:
            return REMOVED
        if (found.st_dev, found.st_ino) != self._file:
            return REPLACED
        if not found.st_size:
            return EMPTIED
        self._looks += 1
        if self._looks % LOG_LOOKS and not thorough:
            return None
        try:
            for name, identity in self._logs.items():
                found = stat(name)
                if (found.st_dev, found.st_ino) != identity:
                    return LOG_GONE
        except FileNotFoundError:
            return LOG_GONE
        return None

    def leave(self, connection: sqlite3.Connection) -> None:
        """Sees to it, alone, that everybody goes to one new file and nothing of the open one gets in its way.

        A file that was renamed gets what its log had. One that only lost its log is copied from what this process sees,
        and the copy takes its place: with a new log under its old users' feet it would be spoilt.
        """
        if _identity(self._real) != self._file:
            with contextlib.suppress(sqlite3.Error):
                _settle(connection)
                connection.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
        elif not stat(self._real).st_size:
            self._bury()
        elif self._logs_now() != self._logs:
            _settle(connection)
            self._copy(connection)
            for log in LOGS:
                _remove(self._real + log)
        else:
            return  # it stands where it stood: a link to it was switched
        for name, identity in self._logs.items():
            if _identity(name) == identity:
                _remove(name)

    def _logs_now(self) -> dict[str, _Identity | None]:
        return {self._real + log: _identity(self._real + log) for log in LOGS}

    def _check_unused(self) -> None:
        """`OSError` where somebody has the file open: its log was removed, and only who has it open knows what it held.

        To begin another log meanwhile would be a second count. In this mode SQLite opens a file for itself alone.
        """
        with contextlib.closing(sqlite3.connect(self._real, timeout=NAP_S)) as connection:
            try:
                connection.execute("PRAGMA locking_mode = EXCLUSIVE")
                connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
            except sqlite3.Error as error:  # another one will be met again, and told
                if "locked" in str(error):
                    raise BlockingIOError(NOT_NOTICED) from None

    def _bury(self) -> None:
        """Removes an empty file. HAZARD: SQLite takes one for unmoved wherever it is, and who closes it would remove
        the next one's log; so it doesn't stay empty for those who have it open.
        """
        os.truncate(self._real, 4096)
        _remove(self._real)

    def _copy(self, connection: sqlite3.Connection) -> None:
        copy = f"{self._real}-copy"
        _remove(copy)
        try:
            with contextlib.closing(sqlite3.connect(copy)) as target:
                connection.backup(target)
            shutil.copymode(self._real, copy)
            owner = stat(self._real)
            if os.geteuid() == 0:
                os.chown(copy, owner.st_uid, owner.st_gid)
            os.replace(copy, self._real)
        finally:
            _remove(copy)


def _settle(connection: sqlite3.Connection) -> None:
    """Waits for the one who writes, a second at most. Who gets the write lock after that looks first, and leaves."""
    for _ in range(1000):
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            return
        time.sleep(NAP_S)


def _identity_of(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino


def _identity(name: str) -> _Identity | None:
    """Device and inode, or `None` where nothing can be seen."""
    try:
        return _identity_of(stat(name))
    except OSError:
        return None


def _remove(name: str) -> None:
    if os.path.lexists(name):  # else a file system that is read-only would complain
        Path(name).unlink(missing_ok=True)
