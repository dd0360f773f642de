"""SqliteStore: files that are damaged, locked, or stand in odd places. Nobody is let in, and the store recovers."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shmlimit import StoreError
from shmlimit.stores import _sqlite_file, _sqlite_place
from shmlimit.stores.sqlite import SqliteStore
from tests.stores.trouble import TEN, answer

# ---- damaged ---------------------------------------------------------------------------------------------------------


def overwritten(path: Path, first: int, *, each: int | None = None, size: int = 0, byte: bytes = b"\xee") -> None:
    """Puts `size` bytes of garbage at `first` and, with `each`, so many bytes on, and on."""
    length = path.stat().st_size
    with path.open("r+b") as file:
        for offset in range(first, length, each or length):
            file.seek(offset)
            file.write(byte * min(size, length - offset))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "header": lambda path: overwritten(path, 0, size=100),
    "heads of pages": lambda path: overwritten(path, 4096, each=4096, size=100),
    "middle of pages": lambda path: overwritten(path, 4096 + 1000, each=4096, size=2000),
    "cut to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut to a page and a half": lambda path: os.truncate(path, 6000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file(path: Path, damage: str) -> None:
    """Who opens it gets a StoreError and who has it open that or the right answer, but nobody is let in; once the file
    is removed, the same stores work.
    """
    with SqliteStore(path) as store:
        for number in range(300):
            store.take(TEN, f"key {number}", 10)
    with SqliteStore(path) as late, SqliteStore(path) as opened:
        assert not opened.take(TEN, "key 0").allowed
        DAMAGE[damage](path)
        answers = [answer(store, f"key {number}") for store in (late, opened) for number in range(300)]
        failures = {one for one in answers if one != -1}
        assert failures
        assert all("limits.sqlite3" in one and ("malformed (" in one or "not a database (" in one) for one in failures)
        path.unlink()
        for store in (opened, late):
            with contextlib.suppress(StoreError):  # "was removed while it was open", where it is
                store.peek(TEN, "new")
        assert [late.take(TEN, "new").remaining, opened.take(TEN, "new").remaining] == [9, 8]


@pytest.mark.parametrize("cut", [False, True], ids=["garbage", "cut"])
def test_damaged_log(path: Path, cut: bool) -> None:
    """A log with garbage, or cut, under its users lets nobody in whose charges were in the file before, and while it is
    open nobody whose charges are in the log either; once the file is removed, all is well.
    """
    with SqliteStore(path) as store:
        for number in range(50):
            store.take(TEN, f"old {number}", 10)
    with SqliteStore(path) as store, SqliteStore(path) as other:
        for number in range(50):
            store.take(TEN, f"key {number}", 10)
        other.peek(TEN, "old 0")
        log = Path(f"{path}-wal")
        os.truncate(log, 0) if cut else overwritten(log, 0, size=10**7)
        for one in (store, other):
            for number in range(50):
                for key in (f"old {number}", f"key {number}"):
                    with contextlib.suppress(StoreError):
                        assert not one.take(TEN, key).allowed, key
    with SqliteStore(path) as store:
        for number in range(50):
            with contextlib.suppress(StoreError):
                assert not store.take(TEN, f"old {number}").allowed
        path.unlink()
        with contextlib.suppress(StoreError):  # "was removed while it was open", where it is
            store.peek(TEN, "new")
        assert store.take(TEN, "new").remaining == 9


def test_hot_journal(path: Path) -> None:
    """A program that used the file without a write-ahead log was killed while it wrote: that is rolled back first."""
    with SqliteStore(path) as store:
        store.take(TEN, "k", 10)

    def write_and_die() -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA cache_size = 1", "BEGIN"):
            connection.execute(statement)
        connection.execute("DELETE FROM ratelimit")
        connection.execute("CREATE TABLE filler (text)")
        connection.executemany("INSERT INTO filler VALUES (?)", [("x" * 3000,)] * 500)
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=write_and_die)
    child.start()
    child.join(30)
    assert Path(f"{path}-journal").stat().st_size > 0
    with SqliteStore(path) as store:
        assert not store.take(TEN, "k").allowed
        assert store.count() == 1
    assert not Path(f"{path}-journal").exists()


# ---- locked, and odd places ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [False, True])
def test_locked_file(path: Path, opened: bool) -> None:
    """A lock that is held for longer than `timeout` is a StoreError that says so, no denial; then the store works."""
    with SqliteStore(path, timeout=0.05) as store, contextlib.closing(sqlite3.connect(path)) as other:
        if opened:
            store.take(TEN, "k")
        before = store._file._connection
        other.isolation_level = None
        other.execute("BEGIN EXCLUSIVE")
        for call in (store.take, store.reset):
            with pytest.raises(StoreError, match=r"limits\.sqlite3.*locked \(.*keeps a transaction open"):
                call(TEN, "k")
        assert store._file._connection is before, "a file that is only locked stays open"
        other.execute("ROLLBACK")
        assert store.take(TEN, "k").remaining == 9 - opened


class Clock:
    """Time that passes with naps only."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.naps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1


@pytest.mark.parametrize("opened", [False, True])
def test_one_wait_for_everything(path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool) -> None:
    """A call's waits add up to `timeout`, not each step's of opening and beginning; and what a call has waited before
    it came here counts. Where nothing has to be waited for, it answers however late it is.
    """
    with SqliteStore(path, timeout=0.2) as store, contextlib.closing(sqlite3.connect(path)) as other:
        store.take(TEN, "k")
        if not opened:
            store._file._disconnect()
        other.isolation_level = None
        other.execute("BEGIN EXCLUSIVE")
        clock = Clock()
        monkeypatch.setattr(_sqlite_file, "time", clock)
        monkeypatch.setattr(_sqlite_place, "time", clock)
        for waited_s in (0, 0.1, 0.2, 100):
            until = store._file.deadline()
            clock.now += waited_s
            clock.naps = 0
            with pytest.raises(StoreError, match="locked"):
                store._file.within(until, store.take, TEN, "k")
            assert abs(clock.naps - max(0, 0.2 - waited_s) * 1000) <= 2
        other.execute("ROLLBACK")
        assert store._file.within(clock.now - 100, store.take, TEN, "k").remaining == 8
        assert store._file._thread.until is None


def test_link_in_a_circle(path: Path) -> None:
    """A link that leads nowhere is a StoreError."""
    path.symlink_to(path)
    with SqliteStore(path) as store:
        with pytest.raises(StoreError, match=r"limits\.sqlite3.*unable to open"):
            store.take(TEN, "k")
        path.unlink()
        assert store.take(TEN, "k").allowed


def test_directory_that_comes_and_goes(tmp_path: Path) -> None:
    """A directory that isn't there, or stands in the file's place, is a StoreError; made or gone, the store works."""
    path = tmp_path / "later" / "limits.sqlite3"
    with SqliteStore(path) as store:
        with pytest.raises(StoreError, match=r"unable to open.*directory must exist"):
            store.take(TEN, "k")
        path.mkdir(parents=True)
        with pytest.raises(StoreError, match="unable to open"):
            store.take(TEN, "k")
        path.rmdir()
        assert store.take(TEN, "k").allowed


@pytest.mark.parametrize(
    "name",
    ["with blanks", "ümläut", "a'b\"c;--", "question?mark=1&x", "file:x?mode=memory", "100%25", "new\nline", "\udcff"],
    ids=ascii,
)
def test_odd_file_names(tmp_path: Path, name: str) -> None:
    """Whatever a file may be called, it is that file, found again under that name, and its removal is noticed."""
    path = tmp_path / name
    with SqliteStore(path) as store:
        store.take(TEN, "k")
        assert path in tmp_path.iterdir()
        assert Path(f"{path}-wal").exists()
        with SqliteStore(path) as other:
            assert other.take(TEN, "k").remaining == 8
        path.unlink()
        with pytest.raises(StoreError, match="removed"):
            store.take(TEN, "k")
        assert store.take(TEN, "k").remaining == 9


def test_close_while_others_wait(path: Path) -> None:
    """Closing waits for the decision under way, and those behind it are refused at once."""
    with SqliteStore(path, timeout=30) as store:
        said: list[str] = []

        def take() -> None:
            try:
                store.take(TEN, "k")
            except StoreError as error:
                said.append(str(error))

        waiting = [threading.Thread(target=take) for _ in range(3)]
        closing = threading.Thread(target=store.close)
        with store.transaction() as transaction:
            for thread in waiting:
                thread.start()
            closing.start()
            while not store._file._closed:
                pass
            transaction.decide_all([(TEN, "other", 4)])[1]()
        for thread in (*waiting, closing):
            thread.join(30)
        assert len(said) == 3
        assert all("store is closed" in one for one in said)
    with SqliteStore(path) as store:
        assert [store.peek(TEN, key).remaining for key in ("other", "k")] == [6, 10]
