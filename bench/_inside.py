"""What measuring needs of a table beyond its public side: a process's own counters, and slots live at a given time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from shmlimit import SharedTable
from shmlimit.table import layout, native

SHARED, FULL, CONTENDED = (layout.LANE_FIELDS.index(name) for name in ("shared", "full", "contended"))


@contextlib.contextmanager
def passing_table(slots: int) -> Iterator[SharedTable]:
    """A table that is gone afterwards."""
    with SharedTable.create(f"shmlimit-bench-{os.getpid()}", slots) as table:
        try:
            yield table
        finally:
            table.unlink()


def own_lane(table: SharedTable) -> memoryview:
    """The counters of this process, as they are now: to be asked for again after a fork.

    `stats()` sums all lanes in some 20 µs; this tells what one call did. It counts other threads' calls, too.
    """
    segment, place = table._opened()
    at = int(place.lane) - int(place.header)
    return memoryview(segment.mapping)[at : at + layout.LANE_BYTES].cast("Q")


def live_slots(table: SharedTable, now_us: int) -> int:
    """Slots whose state is live as of `now_us`: what `used()` says of the table's own clock."""
    place = table._opened()[1]
    return int(native.helper().count_live(int(place.header) + layout.HEADER_BYTES, table._slots, now_us))
