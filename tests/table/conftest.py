"""Every test of the table runs both ways; and a table with a hook before each access to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shmlimit import SharedTable
from tests.between import Between, hooked_helper
from tests.bindings import WAYS, bound


@pytest.fixture(params=WAYS, autouse=True)
def binding(request: pytest.FixtureRequest) -> Iterator[str]:
    """How `take` goes to the C helper in this run of the test."""
    with bound(request.param):
        yield request.param


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Between]:
    """The hook of the helper, which is in use for the tests of this file."""
    with hooked_helper(tmp_path_factory.mktemp("between")) as between:
        yield between


@pytest.fixture
def small(hooked: Between, name: str) -> Iterator[SharedTable]:
    """A table in which every key looks at every slot."""
    with SharedTable.create(name, 24) as table:
        yield table
