"""`take` of a table that is closed, or let go of, whichever way it goes: also in the middle of a call."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest

from shmlimit import Policy, SharedTable, StoreError, TokenBucket
from shmlimit.table import native, prepared
from tests.bindings import bound

MINUTE = TokenBucket(10, 60)


def test_take_that_is_held_ends_with_the_table(table: SharedTable) -> None:
    """`take = table.take`, as a loop may have it, raises after `close` as the table does; for old policies and new."""
    take = table.take
    take(MINUTE, "k")
    table.close()
    for policy in (MINUTE, TokenBucket(3, 60)):
        for call in (take, table.take):
            with pytest.raises(StoreError, match="is closed"):
                call(policy, "k")


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("at", range(1, 5))
def test_closed_while_a_policy_is_met(name: str, monkeypatch: pytest.MonkeyPatch, at: int, is_known: bool) -> None:
    """A table that another thread closes in the middle of a call may answer that one, and none after it."""
    prepared.misfit.cache_clear()  # which asks for a hash as well
    with SharedTable.create(name, 64) as table:
        take = table.take
        if is_known:
            take(TokenBucket(10, 60), "k")
        hash_of, asked = TokenBucket.__hash__, 0

        def closing(policy: TokenBucket) -> int:
            nonlocal asked
            asked += 1
            if asked == at:
                table.close()
            return hash_of(policy)

        other = TokenBucket(10, 60)  # equal, and not the same object
        with monkeypatch.context() as patch:
            patch.setattr(TokenBucket, "__hash__", closing)
            with contextlib.suppress(StoreError):
                assert take(other, "k").remaining == 9 - is_known
        if asked < at:  # a second time would undo what the first one missed
            table.close()
        for policy in (other, TokenBucket(10, 60)):
            with pytest.raises(StoreError, match="is closed"):
                take(policy, "k")


def test_closed_while_a_policy_is_prepared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a policy that nobody had taken before."""
    with SharedTable.create(name, 64) as table:
        take, prepare = table.take, table._prepare

        def closing(policy: Policy) -> native.Policy:
            made = prepare(policy)
            table.close()
            return made

        with monkeypatch.context() as patch:
            patch.setattr(table, "_prepare", closing)
            assert take(MINUTE, "k").remaining == 9
        with pytest.raises(StoreError, match="is closed"):
            take(MINUTE, "k")


class Closing(dict[Any, Any]):
    """A look-up in the middle of which another thread closes the table."""

    table: SharedTable

    def __getitem__(self, key: object) -> Any:
        found = super().__getitem__(key)
        self.table.close()
        return found


def test_closed_while_a_policy_is_looked_up(name: str) -> None:
    """Through ctypes, nothing of what was found before the end is found after it."""
    with bound("ctypes"), SharedTable.create(name, 64) as table:
        table.take(MINUTE, "k")
        table.take(TokenBucket(5, 60), "k")
        table._by_id = Closing(table._by_id)
        table._by_id.table = table
        assert table.take(MINUTE, "k").remaining == 8
        for policy in (MINUTE, TokenBucket(5, 60)):
            with pytest.raises(StoreError, match="is closed"):
                table.take(policy, "k")


def test_table_is_freed(name: str) -> None:
    """With the last reference to a closed table at once; of one that nobody closed when the collector comes."""
    gc.collect()
    gc.disable()
    try:
        table = SharedTable.create(name, 64)
        table.take(MINUTE, "k")
        gone = weakref.ref(table)
        table.close()
        del table
        assert gone() is None
        table = SharedTable.attach(name)
        table.take(MINUTE, "k")
        gone = weakref.ref(table)
        del table
    finally:
        gc.enable()
    gc.collect()
    assert gone() is None


def test_closing_beside_taking(name: str) -> None:
    """Threads take while the table is opened and closed: an answer or the error, and the counts are exact."""
    policy = TokenBucket(10**6, 10**8)
    counts: list[int] = []
    with SharedTable.create(name, 64) as watching:

        def take(table: SharedTable, begun: threading.Barrier) -> None:
            begun.wait()
            count = 0
            try:
                while count < 10_000:
                    table.take(policy, "k")
                    count += 1
            except StoreError:
                pass
            counts.append(count)

        for _ in range(10):
            table, begun = SharedTable.attach(name), threading.Barrier(4)
            threads = [threading.Thread(target=take, args=(table, begun)) for _ in range(3)]
            for thread in threads:
                thread.start()
            begun.wait()
            table.close()
            for thread in threads:
                thread.join()
        assert len(counts) == 30
        assert watching.peek(policy, "k").remaining == 10**6 - sum(counts)
