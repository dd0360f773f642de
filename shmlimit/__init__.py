"""Exact rate limits that all worker processes of a host share, without Redis and without a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmlimit.errors import (
    ConfigError,
    ContentionError,
    LayoutError,
    ShmlimitError,
    StoreError,
    TableExistsError,
    TableNotFoundError,
)
from shmlimit.guard import Guard
from shmlimit.limiter import Limiter
from shmlimit.notation import parse, parse_many
from shmlimit.policies import (
    Decision,
    FixedWindow,
    Gcra,
    Policy,
    Reservation,
    SlidingCounter,
    SlidingLog,
    State,
    TokenBucket,
    per_day,
    per_hour,
    per_minute,
    per_second,
)

if TYPE_CHECKING:
    from shmlimit.table import SharedTable

__all__ = [
    "ConfigError",
    "ContentionError",
    "Decision",
    "FixedWindow",
    "Gcra",
    "Guard",
    "LayoutError",
    "Limiter",
    "Policy",
    "Reservation",
    "SharedTable",
    "ShmlimitError",
    "SlidingCounter",
    "SlidingLog",
    "State",
    "StoreError",
    "TableExistsError",
    "TableNotFoundError",
    "TokenBucket",
    "parse",
    "parse_many",
    "per_day",
    "per_hour",
    "per_minute",
    "per_second",
]


def __getattr__(name: str) -> object:
    """`SharedTable` is loaded at its first use, so that `import shmlimit` works where there is no shared memory."""
    if name == "SharedTable":
        from shmlimit.table import SharedTable

        return SharedTable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
