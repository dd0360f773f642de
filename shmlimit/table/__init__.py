"""The shared-memory table. layout.py tells the format, segment.py the memory, _table.c the protocol."""

from shmlimit.table.table import SharedTable

__all__ = ["SharedTable"]
