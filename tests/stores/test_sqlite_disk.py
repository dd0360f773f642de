"""SqliteStore: disks that are full and files that can't be written. Nothing is lost, and nobody let in."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmlimit import StoreError, TokenBucket
from shmlimit.stores.sqlite import SqliteStore
from tests.stores.trouble import TEN, answer

NOBODY = 65534
MANY = TokenBucket(10**6, 10**9)
DISK_KIB = 700


def take_until_it_fails(store: SqliteStore) -> tuple[int, str]:
    """Charges one unit after the other to `many`; how many it took, and what the StoreError says."""
    for taken in range(5000):
        left = answer(store, "many", MANY)
        if isinstance(left, str):
            return taken, left
        assert left == 10**6 - taken - 1
    raise AssertionError("it doesn't fail")


# ---- no room ---------------------------------------------------------------------------------------------------------


class Disk:
    """A small file system; `path` is a file on it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.path = place / "limits.sqlite3"
        self._filler = place / "filler"

    def fill(self, spare_kib: int = 0) -> None:
        """Uses up what is free, but for `spare_kib`."""
        space = os.statvfs(self.place)
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as filler:
            for _ in range(space.f_bavail * space.f_frsize // 4096 - spare_kib // 4):
                filler.write(b"x" * 4096)

    def make_room(self) -> None:
        self._filler.unlink()

    def mount(self, *options: str) -> None:
        subprocess.run(["mount", *options, str(self.place)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Needs root, to mount it."""
    disk = Disk(tmp_path / "disk")
    disk.place.mkdir()
    try:
        disk.mount("-t", "tmpfs", "-o", f"size={DISK_KIB}k,mode=777", "tmpfs")
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        reason = f"mounting takes root: {getattr(error, 'stderr', error)}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    yield disk
    subprocess.run(["umount", str(disk.place)], check=True)


def test_disk_that_fills_up(disk: Disk) -> None:
    """A charge that finds no room for the log is a StoreError that says so, every time; refusals still answer, all that
    was charged is kept, and with room again the same store goes on from there.
    """
    with SqliteStore(disk.path) as store, SqliteStore(disk.path) as other:
        store.take(TEN, "spent", 10)
        other.peek(TEN, "spent")
        disk.fill(spare_kib=100)
        taken, said = take_until_it_fails(store)
        assert taken > 0
        assert str(disk.path) in said
        assert "disk is full (make room" in said
        disk.fill()
        for one in (store, other):
            for key in ("many", "another"):
                with pytest.raises(StoreError, match="full"):
                    one.take(MANY, key, 2)
            assert not one.take(TEN, "spent").allowed
            assert not one.take(TEN, "spent", 11).allowed
            assert one.peek(MANY, "many").remaining == 10**6 - taken
        disk.make_room()
        assert [one.take(MANY, "many").remaining for one in (store, other)] == [10**6 - taken - 1, 10**6 - taken - 2]
        assert not store.take(TEN, "spent").allowed
        assert store.count() == 2


@pytest.mark.parametrize("made_before", [False, True])
def test_disk_without_room_for_the_file_or_its_index(disk: Disk, made_before: bool) -> None:
    """A file that can't be made or opened for want of room is a StoreError, and is made and opened once there is."""
    if made_before:
        with SqliteStore(disk.path) as store:
            store.take(TEN, "k", 10)
    with SqliteStore(disk.path) as store:
        disk.fill(spare_kib=4)
        for _ in range(3):
            with pytest.raises(StoreError, match=r"limits\.sqlite3.*(full|unable to open|I/O error) ?\("):
                store.take(TEN, "k")
        disk.make_room()
        assert store.take(TEN, "k").allowed is not made_before


def test_several_charges_without_room(disk: Disk) -> None:
    """All or nothing on a full disk is nothing."""
    with SqliteStore(disk.path) as store:
        store.take_all([(TEN, "a", 1), (MANY, "b", 1)])
        disk.fill()
        with pytest.raises(StoreError, match="full"):
            store.take_all([(MANY, f"{number} {'x' * 4000}", 1) for number in range(200)])
        disk.make_room()
        assert store.count() == 2
        assert [one.remaining for one in store.take_all([(TEN, "a", 1), (MANY, "b", 1)])] == [8, 10**6 - 2]


def test_database_that_may_not_grow(path: Path) -> None:
    """The same without root: SQLite's own bound on a file's pages."""
    with SqliteStore(path) as store:
        store.take(TEN, "spent", 10)
        store._file._connection.execute("PRAGMA max_page_count = 1")
        answers = [answer(store, f"key {number}", MANY) for number in range(500)]
        made = answers.index(next(one for one in answers if isinstance(one, str)))
        assert "disk is full (make room" in answers[made]
        assert not store.take(TEN, "spent").allowed
        assert store.count() == made + 1
        store._file._connection.execute("PRAGMA max_page_count = 100000")
        assert store.take(MANY, f"key {made}").remaining == 10**6 - 1


# ---- not writable ----------------------------------------------------------------------------------------------------


def test_file_system_that_is_read_only(disk: Disk) -> None:
    """Charges are StoreErrors, for a file that is there and one that isn't; writable again, the same stores work."""
    with SqliteStore(disk.path) as store:
        store.take(TEN, "k", 4)
    disk.mount("-o", "remount,ro")
    with SqliteStore(disk.path) as store, SqliteStore(disk.place / "new") as new:
        with pytest.raises(StoreError, match=r"limits\.sqlite3.*(readonly|unable to open).*must be able to write"):
            store.take(TEN, "k")
        with pytest.raises(StoreError, match=r"new.*unable to open.*must be able to write"):
            new.take(TEN, "k")
        disk.mount("-o", "remount,rw")
        assert [store.take(TEN, "k").remaining, new.take(TEN, "k").remaining] == [5, 9]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_rights_that_come_and_go(tmp_path: Path) -> None:
    """A user who may not write or read there gets StoreErrors; once he may, the same store works."""
    for place in (tmp_path, *tmp_path.parents[:3]):
        place.chmod(0o755)
    place = tmp_path / "place"
    place.mkdir()
    path = place / "limits.sqlite3"
    with SqliteStore(path) as store:
        store.take(TEN, "k")
    path.chmod(0o444)
    turn, done = (multiprocessing.get_context("fork").Semaphore(0) for _ in range(2))

    def work() -> None:
        os.setuid(NOBODY)
        with SqliteStore(path) as store:
            for cause in ("readonly|unable to open", "unable to open", "ermission denied"):
                with pytest.raises(StoreError, match=rf"limits\.sqlite3.*({cause}).*\(.*must be able to"):
                    store.take(TEN, "k")
                done.release()
                assert turn.acquire(timeout=30)
            assert store.take(TEN, "k").remaining == 8
            done.release()
            assert turn.acquire(timeout=30)
            # Open, and its directory can't be looked into: who knows what stands there?
            with pytest.raises(StoreError, match=r"limits\.sqlite3.*Permission denied"):
                store.take(TEN, "k")
            done.release()
            assert turn.acquire(timeout=30)
            assert store.take(TEN, "k").remaining == 7

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    for file_mode, mode in ((0o644, 0o700), (0o666, 0o733), (0o666, 0o777), (0o666, 0o700), (0o666, 0o777)):
        assert done.acquire(timeout=30)
        path.chmod(file_mode)
        place.chmod(mode)
        turn.release()
    child.join(60)
    assert child.exitcode == 0
