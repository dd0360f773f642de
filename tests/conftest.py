"""What every test may use: names of tables that are gone afterwards, and a look that nothing was left behind."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _servers import MissingServerError, Server, running

from shmlimit.errors import TableNotFoundError
from shmlimit.table.segment import remove
from shmlimit.table.table import SharedTable

SHM = Path("/dev/shm")
TAG = f"shmlimit-t{os.getpid():x}-"
VECTORS = Path(__file__).parent / "vectors"


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """`ls /dev/shm` is after the run as it was before."""
    before = _segments()
    yield
    left = _segments() - before
    # Another run, which looks after its own, may be under way beside this one; in CI nothing else is.
    others = ("shmlimit-t", "shmlimit-bench-") if "CI" in os.environ else ("",)
    left = {segment for segment in left if segment.startswith(TAG) or not segment.startswith(others)}
    assert not left


def _segments() -> set[str]:
    return {path.name for path in SHM.iterdir()} if SHM.exists() else set()


@pytest.fixture
def name() -> Iterator[str]:
    """A name that no other table has; the table is removed afterwards."""
    name = f"{TAG}{secrets.token_hex(5)}"
    yield name
    with contextlib.suppress(TableNotFoundError):
        remove(name)


@pytest.fixture(scope="session")
def new_name() -> Iterator[Callable[[], str]]:
    """Makes names like `name`, for what lives longer than a test."""
    names: list[str] = []

    def new_name() -> str:
        names.append(f"{TAG}{secrets.token_hex(5)}")
        return names[-1]

    yield new_name
    for name in names:
        with contextlib.suppress(TableNotFoundError):
            remove(name)


@pytest.fixture
def table(name: str) -> Iterator[SharedTable]:
    """A new table of 1,024 slots."""
    with SharedTable.create(name, 1024) as table:
        yield table


@pytest.fixture(scope="session")
def server_of() -> Iterator[Callable[[str], Server]]:
    """The server of a kind (`valkey`, `redis`, `memcached`) that the tests of a run share; nobody may stop it."""
    shared: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:

        def server_of(kind: str) -> Server:
            if kind not in shared:
                shared[kind] = _run(stack, kind)
            return shared[kind]

        yield server_of


@pytest.fixture
def own_server() -> Iterator[Callable[[str], Server]]:
    """Starts a server of a kind for this test alone, to be paused, killed and emptied."""
    with contextlib.ExitStack() as stack:
        yield lambda kind: _run(stack, kind)


def _run(stack: contextlib.ExitStack, kind: str) -> Server:
    try:
        return stack.enter_context(running(kind))
    except MissingServerError as error:
        return pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


@pytest.fixture(scope="session")
def vectors() -> Callable[[str], list[dict[str, Any]]]:
    """The rows of a file of `tests/vectors`."""

    def read(file: str) -> list[dict[str, Any]]:
        with (VECTORS / file).open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    return read
