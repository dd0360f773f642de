"""SqliteStore: transactions, forks, files that can't be used, and names."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmlimit import ConfigError, StoreError, TokenBucket
from shmlimit.stores.sqlite import SqliteStore, valid_table_name
from tests.stores.conftest import T0, TEN, Clock, S, rows

NOBODY = 65534


# ---- transactions ----------------------------------------------------------------------------------------------------


def test_transaction_decides_and_then_charges(store: SqliteStore) -> None:
    """Nothing is charged before its `charge` is called, and only with the end of the block."""
    with store.transaction() as transaction:
        decisions, charge = transaction.decide_all([(TEN, "k", 4), (TEN, b"k", 1)])
        assert [one.remaining for one in decisions] == [5, 5]
        assert transaction.decide_all([(TEN, "k", 0)])[0][0].remaining == 10
        assert rows(store) == []
        charge()
        assert rows(store) == []
    assert store.peek(TEN, "k").remaining == 5


def test_transaction_rolls_back(store: SqliteStore) -> None:
    """A block that raises charges nothing and leaves the file free; one that doesn't charge changes nothing."""

    def charge_and_raise() -> None:
        with store.transaction() as transaction:
            transaction.decide_all([(TEN, "k", 4)])[1]()
            raise KeyError

    with pytest.raises(KeyError):
        charge_and_raise()
    with store.transaction() as transaction:
        assert transaction.decide_all([(TEN, "k", 11)])[1] is None
    assert store.count() == 0


def test_error_of_sqlite_within_a_transaction(store: SqliteStore, path: Path) -> None:
    """It is a StoreError, charges nothing, and lets other threads and other users of the file in."""

    def charge_and_fail() -> None:
        with store.transaction() as transaction:
            transaction.decide_all([(TEN, "k", 4)])[1]()
            transaction.execute("SELECT * FROM missing")

    with pytest.raises(StoreError, match=r"limits\.sqlite3.*no such table"):
        charge_and_fail()
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(store.take(TEN, "k")))
    thread.start()
    thread.join()
    with SqliteStore(path, clock=Clock()) as other:
        seen.append(other.take(TEN, "k"))
    assert [one.remaining for one in seen] == [9, 8]


def test_transactions_of_a_thread_do_not_nest(store: SqliteStore) -> None:
    """A decision within an open transaction of the same thread is a StoreError, and the outer one stands."""
    with store.transaction() as transaction:
        transaction.decide_all([(TEN, "k", 4)])[1]()
        with pytest.raises(StoreError, match="already"):
            store.take(TEN, "k")
    assert store.peek(TEN, "k").remaining == 6


def test_commit_that_fails_charges_nothing(store: SqliteStore) -> None:
    """Closed before its end, a transaction is a StoreError at the end of its block, not a silent loss."""

    def charge_and_lose_it() -> None:
        with store.transaction() as transaction:
            transaction.decide_all([(TEN, "k", 4)])[1]()
            store._file._disconnect()

    store.take(TEN, "k")
    with pytest.raises(StoreError, match=r"limits\.sqlite3"):
        charge_and_lose_it()
    assert store.peek(TEN, "k").remaining == 9


def test_file_is_locked_for_too_long(path: Path) -> None:
    """A lock that somebody holds for longer than `timeout` is a StoreError that says so, and no denial."""
    with SqliteStore(path, timeout=0.05) as store, contextlib.closing(sqlite3.connect(path)) as other:
        store.take(TEN, "k")
        other.isolation_level = None
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"limits\.sqlite3.*locked.*keeps a transaction open"):
            store.take(TEN, "k")
        assert store.peek(TEN, "k").remaining == 9
        other.execute("ROLLBACK")
        assert store.take(TEN, "k").remaining == 8


def test_thread_waits_for_its_turn(path: Path) -> None:
    """Threads take turns: one that holds a transaction lets another wait, up to `timeout`."""
    with SqliteStore(path, timeout=0.05) as store:
        seen: list[BaseException] = []

        def take() -> None:
            try:
                store.take(TEN, "k")
            except StoreError as error:
                seen.append(error)

        with store.transaction():
            thread = threading.Thread(target=take)
            thread.start()
            thread.join()
        assert "other threads" in str(seen[0])
        assert store.take(TEN, "k").remaining == 9


# ---- forks -----------------------------------------------------------------------------------------------------------


def in_child(action: Callable[[], object]) -> int:
    """Runs it in a fork; 0 when it is true."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if action() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_store_that_was_used_before_a_fork(store: SqliteStore) -> None:
    """Parent and child go on with one count, each with a connection of its own."""
    store.take(TEN, "k")
    assert store._file._connection is not None
    assert in_child(lambda: store._file._connection is None and store.take(TEN, "k").remaining == 8) == 0
    assert store.take(TEN, "k").remaining == 7


def test_parent_that_closes_does_not_take_the_log_along(store: SqliteStore) -> None:
    """A child's charges survive its parent's closing the file: they aren't in a log that was removed."""
    store.take(TEN, "k")
    ours, theirs = os.pipe(), os.pipe()

    def work() -> bool:
        ok = store.take(TEN, "k").remaining == 8
        os.write(theirs[1], b"x")
        os.read(ours[0], 1)
        return ok and store.take(TEN, "k").remaining == 7

    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    os.read(theirs[0], 1)
    store.close()
    os.write(ours[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for end in (*ours, *theirs):
        os.close(end)
    with SqliteStore(store.path, clock=Clock()) as again:
        assert again.take(TEN, "k").remaining == 6


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_while_threads_decide(path: Path) -> None:
    """A fork waits for decisions under way, and no child inherits a lock that nobody gives back."""
    with SqliteStore(path) as store:
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                store.take(TokenBucket(10**6, 60), "k")

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            codes = [in_child(lambda: store.take(TEN, "child").limit == 10) for _ in range(20)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert codes == [0] * 20
        assert store.peek(TEN, "child").remaining == 0


def test_fork_within_a_transaction(store: SqliteStore) -> None:
    """The transaction stays the parent's: the child can't commit it, and decides on its own afterwards."""
    with store.transaction() as transaction:
        transaction.decide_all([(TEN, "k", 4)])[1]()

        def end_it() -> bool:
            with pytest.raises(StoreError, match="parent"):
                transaction.__exit__(None, None, None)
            return store._file._connection is None

        assert in_child(end_it) == 0
    assert store.peek(TEN, "k").remaining == 6


def test_store_made_in_the_master(path: Path) -> None:
    """The file is opened at the first decision, so a master that makes a store for others needn't be able to write."""
    with SqliteStore(path) as store:
        assert not path.exists()
        assert in_child(lambda: store.take(TEN, "k").remaining == 9) == 0
        assert path.exists()


# ---- files that can't be used ----------------------------------------------------------------------------------------


def failing(path: Path, cause: str) -> None:
    with SqliteStore(path) as store:
        for call in (store.take, store.peek, store.reset):
            with pytest.raises(StoreError, match=cause) as caught:
                call(TEN, "k")
            assert str(path) in str(caught.value)
            assert isinstance(caught.value.__cause__, sqlite3.Error)
        for look in (store.purge, store.count):
            with pytest.raises(StoreError, match=cause):
                look()


def test_missing_directory(tmp_path: Path) -> None:
    """A file in a directory that isn't there is a StoreError that names the file, the cause and what to do."""
    failing(tmp_path / "no" / "limits.sqlite3", "unable to open.*directory must exist")


def test_directory_in_place_of_the_file(tmp_path: Path) -> None:
    """So is a directory."""
    failing(tmp_path, "unable to open")


def test_file_that_is_no_database(path: Path) -> None:
    """So is a file of something else, which is left as it was."""
    path.write_bytes(b"anything but a database " * 100)
    failing(path, "not a database")
    assert path.read_bytes() == b"anything but a database " * 100


def test_file_that_was_cut(path: Path, clock: Clock) -> None:
    """So is a database that lost its middle."""
    with SqliteStore(path, clock=clock) as store:
        for i in range(500):
            store.take(TEN, f"key {i}")
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with SqliteStore(path, clock=clock) as store, pytest.raises(StoreError, match="malformed"):
        store.take(TEN, "k")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("what", ["file", "directory"])
def test_file_or_directory_is_read_only(tmp_path: Path, what: str) -> None:
    """A user who may not write gets a StoreError with the cause."""
    for place in (tmp_path, *tmp_path.parents[:3]):
        place.chmod(0o755)
    path = tmp_path / "limits.sqlite3"
    if what == "file":
        with SqliteStore(path) as store:
            store.take(TEN, "k")
        path.chmod(0o444)
        tmp_path.chmod(0o777)

    def refused() -> bool:
        os.setuid(NOBODY)
        if what == "directory":
            failing(path, "unable to open.*able to write there")
        else:
            with SqliteStore(path) as store, pytest.raises(StoreError, match=r"limits\.sqlite3.*readonly.*able to"):
                store.take(TEN, "k")
        return True

    assert in_child(refused) == 0


def test_other_table_of_that_name(path: Path) -> None:
    """A table that isn't shmlimit's is refused and left alone."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE users (name TEXT)")
        connection.execute("INSERT INTO users VALUES ('ann')")
        connection.commit()
        with SqliteStore(path, "users") as store, pytest.raises(StoreError, match=r"column.*another table="):
            store.take(TEN, "k")
        assert connection.execute("SELECT * FROM users").fetchall() == [("ann",)]
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)


def test_state_that_is_broken(store: SqliteStore) -> None:
    """Text in a row that is no JSON is a StoreError, not a fresh quota, and `reset` mends it. JSON of another shape is
    fresh.
    """
    store.take(TEN, "k", 10)
    for text, fresh in [("{", False), ("", False), ("[]", True), ('{"kind":"gcra"}', True)]:
        with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
            connection.execute("UPDATE ratelimit SET state = ?", (text,))
        if fresh:
            assert store.peek(TEN, "k").remaining == 10
        else:
            with pytest.raises(StoreError, match="row 1 of ratelimit is broken"):
                store.take(TEN, "k")
    assert store.reset(TEN, "k")
    assert store.take(TEN, "k").allowed


def test_store_recovers(path: Path) -> None:
    """After an error the file is opened anew: what was wrong may be mended meanwhile."""
    path.write_bytes(b"x" * 5000)
    with SqliteStore(path) as store:
        with pytest.raises(StoreError):
            store.take(TEN, "k")
        path.unlink()
        assert store.take(TEN, "k").allowed


# ---- names and numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ratelimit", "RateLimit", "_", "a1", "select", "t" * 64, "sqlite"])
def test_valid_table_names(path: Path, name: str) -> None:
    """Letters, digits and underscores name a table, a word of SQL too; several tables in one file are apart."""
    assert valid_table_name(name)
    with SqliteStore(path) as first, SqliteStore(path, name) as store:
        first.take(TEN, "k", 5)
        assert store.take(TEN, "k").remaining == (4 if name.lower() == "ratelimit" else 9)
        assert store.count() == 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1a",
        "a b",
        "a-b",
        "a\n",
        "a\0",
        "ä",
        "t" * 65,
        "sqlite_master",
        "SQLite_x",
        'a"; DROP TABLE x; --',
        "a'",
        "a;b",
        "a]",
        "main.a",
        "a:forgotten",
        None,
        7,
        b"ratelimit",
    ],
    ids=repr,
)
def test_invalid_table_names(path: Path, name: Any) -> None:
    """Anything else is refused before it gets near the file."""
    assert not valid_table_name(name)
    with pytest.raises(ConfigError, match="table must be"):
        SqliteStore(path, name)
    assert not path.exists()


@pytest.mark.parametrize("bad", ["", ":memory:", "a\0b", None, 7], ids=repr)
def test_bad_path(bad: Any) -> None:
    """A path must name a file: a database in memory isn't shared."""
    with pytest.raises(ConfigError, match="path must"):
        SqliteStore(bad)


@pytest.mark.parametrize("bad", [-1, 3601, float("nan"), float("inf"), "5", None, True], ids=repr)
def test_bad_timeout(path: Path, bad: Any) -> None:
    """A timeout is a number of seconds up to an hour."""
    with pytest.raises(ConfigError, match="timeout must"):
        SqliteStore(path, timeout=bad)


def test_path_is_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path doesn't move with the working directory, and may be text, bytes or a Path."""
    monkeypatch.chdir(tmp_path)
    stores = [SqliteStore(form) for form in ("a.sqlite3", b"a.sqlite3", Path("a.sqlite3"))]
    monkeypatch.chdir("/")
    assert [store.take(TEN, "k").remaining for store in stores] == [9, 8, 7]
    assert (tmp_path / "a.sqlite3").exists()
    for store in stores:
        store.close()


def test_what_is_kept(store: SqliteStore) -> None:
    """One row a key, with the state as JSON and the key as its bytes; the file has a write-ahead log."""
    store.take(TEN, "ä")
    store.take(TEN, "ä")
    _, policy, key, state, expires_us, due_us, written_us = rows(store)[0]
    assert (policy, key) == ("token-bucket 10 60000000 10", "ä".encode())
    assert state == '{"kind":"token-bucket","level":480000000,"at_us":1767225600000000}'
    assert (expires_us, due_us, written_us) == (T0 + 12 * S, T0 + 6 * S, T0)
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def hit_once(path: str, barrier: Any, results: Any) -> None:
    with SqliteStore(path) as store:
        barrier.wait()
        results.put(store.take(TEN, "k").allowed)


def test_many_processes_make_the_file_at_once(path: Path) -> None:
    """Processes that all find no file yet make one, and count together from the first hit on."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(12), context.Queue()
    workers = [context.Process(target=hit_once, args=(str(path), barrier, results)) for _ in range(12)]
    for worker in workers:
        worker.start()
    assert sum(results.get(timeout=60) for _ in workers) == 10
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
