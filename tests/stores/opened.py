"""What other processes open stores with: a file of its own, so that they load no tests."""

from __future__ import annotations

from shmlimit import SharedTable
from shmlimit.stores.local import LocalStore
from shmlimit.stores.sqlite import SqliteStore


def open_local(name: str, path: str) -> LocalStore:
    """The table and the file that are there."""
    return LocalStore(SharedTable.attach(name), SqliteStore(path))
