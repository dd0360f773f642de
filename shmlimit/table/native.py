"""The C helper through ctypes: its structures, its signatures, and which library is loaded; and whether `take` may be a
builtin over it.

SAFETY: the calls that decide (`take`, `peek`, `charge`, `give_back`, `reset`) are undeclared, since converting declared
arguments costs more than the decision. ctypes then cuts integers to 32 bits without a word and takes any object as a
pointer: callers check key, cost and length first (see table.py).
"""

from __future__ import annotations

import ctypes
import os
import sys
from _ctypes import CFuncPtr
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_uint8, c_uint64, c_void_p
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from shmlimit.errors import StoreError

ABI = 4
LIBRARY = Path(__file__).with_name("_table.so")
REFUSE = "SHMLIMIT_FAST"
"""The environment variable that, when it is `0` as the first table is opened, keeps a process to ctypes."""

# What the deciding calls return, in bits: the answer lies in `struct call`, for NEVER without a wait; CROWDED says that
# the table is too small. Below 0 there is no answer.
NEVER, CROWDED = 1, 2
CONTENDED, CORRUPT = -1, -2


class Region(Structure):
    """`struct region`: slots in buckets."""

    _fields_ = (("slots", c_void_p), ("buckets", c_uint64))


class Table(Structure):
    """`struct table`: where an attached table lies in this process. `keep` is what keeps it mapped."""

    keep: object

    _fields_ = (("header", c_void_p), ("lane", c_void_p), ("keys", Region), ("spare", Region))


class Policy(Structure):
    """`struct policy`: all that is constant for a policy in one table, which `keep` keeps."""

    keep: object

    _fields_ = (
        ("table", c_void_p),
        ("key", c_uint64 * 2),
        ("kind", c_int64),
        ("quota", c_int64),
        ("period_us", c_int64),
        ("denominator", c_int64),
        ("interval", c_int64),
        ("tolerance", c_int64),
    )


class Call(Structure):
    """`struct call`: one call under way. From `allowed` on it is the answer, in the order of `Decision`; `keep` is its
    policy.
    """

    keep: object

    _fields_ = (
        ("policy", c_void_p),
        ("now_us", c_int64),
        ("allowed", c_uint8),
        ("shared", c_uint8),
        ("full", c_uint8),
        ("in_spare", c_uint8),
        ("limit", c_int64),
        ("remaining", c_int64),
        ("reset_us", c_int64),
        ("retry_after_us", c_int64),
        ("next_us", c_int64),
        ("before", c_uint64),
        ("charged", c_uint64),
        ("tries", c_int64),
    )


class _Undeclared(CFuncPtr):
    """A function that holds the GIL, and of which ctypes knows no types. PERF: not even of its result, which is then an
    int: a type would be looked up in each call (15 ns of 150).
    """

    _flags_ = ctypes.PyDLL._func_flags_


class Helper:
    """The loaded library.

    What decides holds the GIL (`PyDLL`): giving it away costs more than the half microsecond they take.
    `count_live` looks at every slot, so it lets other threads run (`CDLL`).
    """

    def __init__(self, path: Path) -> None:
        try:
            fast, slow = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        except OSError as error:
            raise StoreError(
                f"the C helper of the shared table can't be loaded ({error}). Install shmlimit from a wheel for this "
                "platform, or with a C compiler at hand. Without it limits can be kept in SQLite: "
                "shmlimit.stores.sqlite.SqliteStore"
            ) from error
        abi = fast.shmlimit_abi()
        if abi == -ABI:
            raise StoreError(
                "this machine has no 16-byte compare-and-swap, which the shared table needs. Limits can be kept in "
                "SQLite here: shmlimit.stores.sqlite.SqliteStore"
            )
        if abi != ABI:
            raise StoreError(f"{path} is of another version ({abi}, expected {ABI}): install shmlimit again")
        self.take = _Undeclared(("shmlimit_take", fast))
        self.take_one = _Undeclared(("shmlimit_take_one", fast))
        self.peek = _Undeclared(("shmlimit_peek", fast))
        self.reset = _Undeclared(("shmlimit_reset", fast))
        self.charge = _Undeclared(("shmlimit_charge", fast))
        self.give_back = _Undeclared(("shmlimit_give_back", fast))
        self.count = _declare(fast.shmlimit_count, None, POINTER(Table), c_int, c_int, c_int, c_int)
        self.clock_offset_us = _declare(fast.shmlimit_clock_offset_us, c_int64)
        self.now_us = _declare(fast.shmlimit_now_us, c_int64, POINTER(Table))
        self.subkey = _declare(fast.shmlimit_subkey, None, POINTER(Policy), c_char_p, c_int)
        self.choose_lane = _declare(fast.shmlimit_choose_lane, None, POINTER(Table), c_int64)
        self.siphash = _declare(fast.shmlimit_siphash, c_uint64, c_uint64 * 2, c_char_p, c_int)
        self.layout = _declare(fast.shmlimit_layout, c_int, POINTER(c_uint64))
        self.count_live = _declare(slow.shmlimit_count_live, c_uint64, c_void_p, c_uint64, c_int64)


def _declare(function: ctypes._NamedFuncPointer, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function.restype, function.argtypes = result, arguments
    return function


@cache
def helper() -> Helper:
    """The helper, loaded at the first use; a `StoreError` that says what to do where that can't be."""
    return Helper(LIBRARY)


@cache
def builtins() -> ModuleType | None:
    """`_fast.c`, which makes `take` a builtin. `None` where it isn't to be used: it wasn't built or is of another
    version, the environment refuses it, or this Python was built to run without a GIL, which it relies on.
    """
    if os.environ.get(REFUSE) == "0" or "t" in sys.abiflags:
        return None
    try:
        module = import_module("shmlimit.table._fast")
    except ImportError:
        return None
    return module if module.ABI == ABI else None
