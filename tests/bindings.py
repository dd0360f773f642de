"""Which way `SharedTable.take` goes to the C helper: as a builtin, or through ctypes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from shmlimit.table import native

WAYS = ("builtin", "ctypes")


@contextlib.contextmanager
def bound(way: str) -> Iterator[None]:
    """Tables that are opened meanwhile, also in processes that are started, go that way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.REFUSE, {"builtin": "1", "ctypes": "0"}[way])
        native.builtins.cache_clear()
        if way == "builtin" and native.builtins() is None:
            reason = "the builtin was not built (it needs Python.h: apt-get install python3-dev, and install again)"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
        yield
    native.builtins.cache_clear()
