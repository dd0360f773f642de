"""SqliteStore: the file, or its log, is removed, replaced or emptied while processes have it open."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmlimit import StoreError
from shmlimit.stores import _sqlite_place
from shmlimit.stores._sqlite_place import LOG_LOOKS
from shmlimit.stores.sqlite import SqliteStore
from tests.stores.trouble import TEN, answer

HOLDERS = 3

# What they may find, as of the path of the file.
CHANGES: dict[str, Callable[[str], object]] = {
    "removed": lambda path: remove(path, ""),
    "removed with its log": lambda path: remove(path, "", "-wal", "-shm"),
    "renamed": lambda path: Path(path).rename(f"{path}.old"),
    "emptied": lambda path: os.truncate(path, 0),
    "replaced": lambda path: replace_by_another(path),  # noqa: PLW0108 - it comes below
}
LOG_CHANGES: dict[str, Callable[[str], object]] = {
    "log removed": lambda path: remove(path, "-wal"),
    "index removed": lambda path: remove(path, "-shm"),
    "both removed": lambda path: remove(path, "-wal", "-shm"),
}


def remove(path: str, *ends: str) -> None:
    for end in ends:
        Path(path + end).unlink()


def replace_by_another(path: str) -> None:
    with SqliteStore(f"{path}.other") as other:
        other.take(TEN, "of the other")
    Path(f"{path}.other").replace(path)


def serve(path: str, end: Any) -> None:
    store = SqliteStore(path)
    while (key := end.recv()) is not None:
        end.send(answer(store, key))
    store.close()


class Worker:
    """A process with a store of its own."""

    def __init__(self, path: str) -> None:
        context = multiprocessing.get_context("fork")
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(path, theirs))
        self._process.start()
        theirs.close()

    def take(self, key: str = "k") -> int | str:
        self._end.send(key)
        assert self._end.poll(30), "no answer"
        return self._end.recv()

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._end.send(None)
        self._process.join(30)
        assert self._process.exitcode == 0
        self._end.close()


@pytest.fixture
def start(path: Path) -> Iterator[Callable[[], Worker]]:
    """Starts a worker on the file."""
    workers: list[Worker] = []

    def start() -> Worker:
        workers.append(Worker(str(path)))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()
    if path.exists():
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("change", CHANGES)
def test_everybody_goes_on_with_one_file(path: Path, start: Callable[[], Worker], change: str) -> None:
    """Each process that had the file open says once that it is gone, and lets nobody in with that; then they count
    together in one new file, those that come later too.
    """
    workers = [start() for _ in range(HOLDERS)]
    assert [worker.take() for worker in workers] == [9, 8, 7]
    CHANGES[change](str(path))
    first = [worker.take() for worker in workers]
    assert all(str(path) in said and "while it was open; the next decision" in said for said in first), first
    again = [worker.take() for worker in (*workers, start(), *workers)]
    assert again == [9, 8, 7, 6, 5, 4, 3]
    assert [worker.take("other") for worker in workers] == [9, 8, 7]


@pytest.mark.parametrize("change", CHANGES)
def test_newcomer_comes_before_the_others_have_noticed(path: Path, start: Callable[[], Worker], change: str) -> None:
    """A process that opens the new file first isn't disturbed by what the others do to leave the old one."""
    workers = [start() for _ in range(HOLDERS)]
    assert [worker.take() for worker in workers] == [9, 8, 7]
    CHANGES[change](str(path))
    newcomer = start()
    if change == "replaced":
        # NOTE: what stands there has the log of another file beside it, which nobody can see: SQLite's own hazard.
        assert isinstance(workers[0].take(), str)
    assert [newcomer.take(), newcomer.take()] == [9, 8]
    assert [type(worker.take()) for worker in workers[change == "replaced" :]] == [str] * (3 - (change == "replaced"))
    assert [worker.take() for worker in (*workers, newcomer, *workers)] == [7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("change", LOG_CHANGES)
def test_removed_log_takes_nothing_along(path: Path, start: Callable[[], Worker], change: str) -> None:
    """Charges that are in a removed log are saved by those who have it open, and everybody goes on with them."""
    workers = [start() for _ in range(HOLDERS)]
    assert [worker.take() for worker in workers] == [9, 8, 7]
    path.chmod(0o640)
    mode = path.stat().st_mode
    LOG_CHANGES[change](str(path))
    newcomer = start()
    assert "others had it open" in newcomer.take("other")
    said = [workers[0].take("looks")]
    while not isinstance(said[-1], str) and len(said) < LOG_LOOKS:
        said.append(workers[0].take("looks"))
    assert "log (-wal, -shm) was removed" in said[-1]
    assert ["replaced" in worker.take() for worker in workers[1:]] == [True, True]
    assert newcomer.take("looks") == max(-1, 10 - len(said))
    assert [worker.take() for worker in (*workers, newcomer, *workers, workers[0])] == [6, 5, 4, 3, 2, 1, 0, -1]
    assert path.stat().st_mode == mode
    assert not Path(f"{path}-copy").exists()


def test_charge_under_way_is_in_the_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that finds the log gone waits for who is writing: what is charged then is in the copy, too."""
    settles = threading.Event()
    settle = _sqlite_place._settle

    def watched(connection: sqlite3.Connection) -> None:
        settles.set()
        settle(connection)

    monkeypatch.setattr(_sqlite_place, "_settle", watched)
    with SqliteStore(path) as writer, SqliteStore(path) as reader:
        assert [answer(writer, "k"), answer(reader, "k")] == [9, 8]

        def look() -> None:
            for _ in range(LOG_LOOKS):
                with contextlib.suppress(StoreError):
                    reader.peek(TEN, "k")

        looking = threading.Thread(target=look)
        with writer.transaction() as transaction:
            transaction.decide_all([(TEN, "k", 4)])[1]()
            LOG_CHANGES["both removed"](str(path))
            looking.start()
            settles.wait(10)
        looking.join()
        assert answer(reader, "k") == 3


def test_log_that_was_replaced(path: Path) -> None:
    """A log with another one in its place, even one of the same content, is as good as removed: nothing is lost."""
    with SqliteStore(path) as store:
        assert [answer(store, "k") for _ in range(3)] == [9, 8, 7]
        copy = path.with_name("copy")
        shutil.copy(f"{path}-wal", copy)
        copy.replace(f"{path}-wal")
        answers = [answer(store, f"looks {number}") for number in range(LOG_LOOKS)]
        assert [one for one in answers if isinstance(one, str)] != []
        assert answer(store, "k") == 6


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_removed_while_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """What is removed just as it is opened isn't taken for what stands there: a StoreError, and the next call works."""
    with SqliteStore(path) as store:
        place = store._file._place
        note = place.note

        def late(*, alone: bool) -> None:
            Path(f"{path}{end}").unlink()
            note(alone=alone)

        monkeypatch.setattr(place, "note", late)
        assert "removed" in str(answer(store, "k"))
        assert store._file._connection is None
        monkeypatch.undo()
        assert [answer(store, "k"), answer(store, "k")] == [9, 8]


@pytest.mark.parametrize("removed", [True, False])
def test_error_of_the_disk_while_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool) -> None:
    """SQLite's word for a file that is removed under its hands is the disk's fault only if the file is still there."""

    def broken(*_arguments: Any) -> None:
        if removed:
            path.unlink()
        raise sqlite3.OperationalError("disk I/O error")

    with SqliteStore(path) as store:
        monkeypatch.setattr("shmlimit.stores._sqlite_file._patiently", broken)
        said = str(answer(store, "k"))
        assert ("removed while it was being opened" in said) is removed
        assert ("disk is full or broken" in said) is not removed
        monkeypatch.undo()
        assert [answer(store, "k"), answer(store, "k")] == [9, 8]


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_replaced_while_it_is_opened(
    path: Path, start: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Nor is another file, or another log, that stands there by then."""
    assert start().take() == 9
    with SqliteStore(path) as store:
        place = store._file._place
        prepare = place.prepare

        def late() -> None:
            prepare()
            copy = path.with_name("copy")
            shutil.copy(f"{path}{end}", copy)
            copy.replace(f"{path}{end}")

        monkeypatch.setattr(place, "prepare", late)
        assert "removed" in str(answer(store, "k"))
        assert store._file._connection is None


def test_renamed_file_is_whole(path: Path, start: Callable[[], Worker]) -> None:
    """A file that was moved away while in use has all that was charged, also what was in its log."""
    worker = start()
    assert [worker.take() for _ in range(3)] == [9, 8, 7]
    elsewhere = path.with_name("kept")
    path.rename(elsewhere)
    assert isinstance(worker.take(), str)
    with SqliteStore(elsewhere) as kept:
        assert kept.take(TEN, "k").remaining == 6
    assert worker.take() == 9


@pytest.mark.parametrize("how", ["close", "fork"])
@pytest.mark.parametrize("change", ["removed", "emptied"])
def test_closing_a_removed_file_leaves_the_new_one_alone(
    path: Path, start: Callable[[], Worker], change: str, how: str
) -> None:
    """Who closes a file that is gone, unasked or for a fork, doesn't take the new one's log along."""
    with SqliteStore(path) as store:
        store.take(TEN, "k")
    newcomer = start()  # before: a fork closes the file
    with SqliteStore(path) as store:
        # NOTE: nothing is in its log, so emptied it is a file without a page to SQLite.
        store.peek(TEN, "k")
        CHANGES[change](str(path))
        assert newcomer.take() == 9
        before = Path(f"{path}-wal").stat()
        store.close() if how == "close" else start().take("other")
        assert os.path.samestat(Path(f"{path}-wal").stat(), before)
        assert [newcomer.take(), start().take()] == [8, 7]


def test_link_that_is_switched(path: Path, tmp_path: Path) -> None:
    """A link's new target is another file; the old one stays whole, with its log, for those who have it open."""
    targets = [tmp_path / "one.sqlite3", tmp_path / "other.sqlite3"]
    path.symlink_to(targets[0])
    targets[1].touch()
    with SqliteStore(path) as store, SqliteStore(targets[0]) as direct:
        assert [answer(store, "k"), answer(direct, "k")] == [9, 8]
        switch = tmp_path / "switch"
        switch.symlink_to(targets[1])
        switch.replace(path)
        assert "replaced" in str(answer(store, "k"))
        assert Path(f"{targets[0]}-wal").exists()
        assert [answer(store, "k"), answer(direct, "k"), answer(direct, "k")] == [9, 7, 6]


def test_left_over_log_is_not_the_new_files(path: Path) -> None:
    """A log without its file, that of a process that was killed, is cleared: nothing of it gets into a new file."""

    def charge() -> None:
        SqliteStore(path).take(TEN, "k", 10)
        os._exit(0)

    worker = multiprocessing.get_context("fork").Process(target=charge)
    worker.start()
    worker.join(30)
    assert Path(f"{path}-wal").stat().st_size > 0
    path.unlink()
    with SqliteStore(path) as store:
        assert store.take(TEN, "k").remaining == 9
        assert store.count() == 1


def test_empty_file_that_was_made_ready(path: Path) -> None:
    """An empty file without a log is used as it is: somebody made it for another user."""
    path.touch(0o600)
    before = path.stat()
    with SqliteStore(path) as store:
        store.take(TEN, "k")
        assert os.path.samestat(path.stat(), before)
        assert path.stat().st_mode == before.st_mode


def test_removed_while_it_is_waited_for(path: Path) -> None:
    """The look comes after the wait for the lock: a charge doesn't go to a file that was removed meanwhile."""
    with SqliteStore(path, timeout=30) as store, contextlib.closing(sqlite3.connect(path)) as other:
        store.take(TEN, "k")
        other.isolation_level = None
        other.execute("BEGIN IMMEDIATE")
        said: list[int | str] = []
        thread = threading.Thread(target=lambda: said.append(answer(store, "k")))
        thread.start()
        while store._file.transaction is None:  # it waits, or is about to
            pass
        path.unlink()
        other.execute("COMMIT")
        thread.join()
        assert "removed" in str(said[0])


def test_somebody_else_is_opening_it(path: Path) -> None:
    """While another process opens files of that directory one waits, up to `timeout`; what is open isn't held up."""
    with SqliteStore(path, timeout=0.05) as store, SqliteStore(path, timeout=0.05) as late:
        store.take(TEN, "k")
        directory = os.open(path.parent, os.O_RDONLY)
        fcntl.flock(directory, fcntl.LOCK_EX)
        try:
            assert "busy opening it" in str(answer(late, "k"))
            assert answer(store, "k") == 8
        finally:
            os.close(directory)
        assert answer(late, "k") == 7
