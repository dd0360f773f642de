"""Which line of counters a process gets."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from shmlimit import SharedTable
from shmlimit.table import layout, native


@pytest.fixture
def owners(table: SharedTable) -> Any:
    """The owners of the lines, which may be written."""
    return np.frombuffer(table._opened()[0].mapping, layout.header_dtype(), 1)[0]["lanes"]["owner"]


def choose(table: SharedTable, pid: int) -> int:
    """The line that a process with that id gets."""
    place = table._opened()[1]
    native.helper().choose_lane(place, pid)
    lane = (place.lane - place.header - layout.LANES_AT) // layout.LANE_BYTES
    native.helper().choose_lane(place, os.getpid())
    return int(lane)


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_own_line_is_found_again(table: SharedTable, owners: Any) -> None:
    """A process keeps its line, wherever that is."""
    owners[:] = 0
    owners[37] = 4242
    assert choose(table, 4242) == 37


def test_line_of_the_dead_is_given_on(table: SharedTable, owners: Any, gone: int) -> None:
    """Lines of the living are left alone; one of a process that is gone, or that names none, has a new owner."""
    for last in (gone, 2**40, 0):
        owners[:] = os.getppid()
        owners[20] = os.getpid()
        owners[59] = last
        assert choose(table, 4242) == 59
        assert owners[59] == 4242


def test_line_is_shared_where_all_are_taken(table: SharedTable, owners: Any) -> None:
    """More processes than lines share them, by their id; no owner changes."""
    owners[:] = os.getppid()
    owners[20] = os.getpid()
    before = owners.copy()
    assert choose(table, 60 * 5 + 7) == 7
    assert choose(table, 60 * 5 + 8) == 8
    assert (owners == before).all()
