"""Another worker comes in between: the helper built with a hook before each access to shared memory (`between.h`)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmlimit import Policy, SharedTable, TokenBucket
from shmlimit.table import native
from tests.instrumented import ROOT, build, need_compiler

T0 = 1_767_225_600_000_000
LATER = T0 + 10**9
HOOK = ["-include", str(ROOT / "tests" / "between.h")]


class Between:
    """The hook: runs `act` before the access of that number, or before every one."""

    def __init__(self, library: Path) -> None:
        self._set = ctypes.PyDLL(str(library)).shmlimit_test_between
        self._hook = ctypes.PYFUNCTYPE(None)(self._called)  # kept, for C has only its address
        self.accesses = 0
        self._at: int | None = None
        self._act: Callable[[], object] | None = None

    def _called(self) -> None:
        number, self.accesses = self.accesses, self.accesses + 1
        if self._act is not None and self._at in {None, number}:
            self._set(None)  # nobody comes in between what comes in between
            self._act()
            self._set(self._hook)

    def run(self, call: Callable[[], Any], act: Callable[[], object] | None = None, at: int | None = None) -> Any:
        self.accesses, self._act, self._at = 0, act, at
        self._set(self._hook)
        try:
            return call()
        finally:
            self._set(None)


@contextlib.contextmanager
def hooked_helper(directory: Path) -> Iterator[Between]:
    """The helper with the hook, in use meanwhile; the library that the run uses, where that has it."""
    if hasattr(ctypes.PyDLL(str(native.LIBRARY)), "shmlimit_test_between"):
        yield Between(native.LIBRARY)
        return
    need_compiler()
    library = build(directory / "helper.so", "-O1", "-shared", "-fPIC", *HOOK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY", library)
        native.helper.cache_clear()
        yield Between(library)
    native.helper.cache_clear()


# ---- what another worker did -----------------------------------------------------------------------------------------


def fill(table: SharedTable, now_us: int, number: int = 24) -> None:
    for filler in range(number):
        assert table.take(TokenBucket(1, 60), f"filler {filler}", now_us=now_us).allowed


def reserve(table: SharedTable, copies: int) -> None:
    """What a dead worker left of the key: its state is taken for a reservation, or several."""
    slots = table.slots
    (at,) = (slots["state"] != 0).nonzero()[0][:1]
    fingerprint = slots["fingerprint"][at]
    for number in range(copies):
        slots[(at + number) % 24] = fingerprint, 1 << 19 | number + 1


def reserved(table: SharedTable) -> Any:
    """Which slots are reserved."""
    slots = table.slots
    return (slots["fingerprint"] != 0) & (slots["state"] >> 61 == 0)


def clear(table: SharedTable) -> None:
    """A reset of every key (by the slots, since `reset` has no time of its own)."""
    table.slots[:] = 0


def left(table: SharedTable, policy: Policy) -> Any:
    """What the key has left, and all states; and that each key's is in one place only."""
    committed = table.slots["state"] >> 61 != 0
    pairs = sorted(table.slots[committed].tolist())
    assert len(pairs) == len(dict(pairs))
    return table.peek(policy, "k", 1, now_us=LATER + 10**6), pairs
