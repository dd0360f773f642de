"""Builds the C helper as a plain shared library, and beside it, where Python's headers are, `take` as a builtin.

With both the wheel is `cp310-abi3-<platform>` and serves every CPython from 3.10 on; the library alone knows nothing of
Python, so without the builtin it is `py3-none-<platform>`.
"""

import platform
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# -mcx16: the compiler then emits `cmpxchg16b` inline; without it the 16-byte CAS would be a call that may take a lock.
CX16 = ["-mcx16"] if platform.machine() in {"x86_64", "AMD64"} else []
FLAGS = ["-O2", "-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden"]
HEADERS = sorted(map(str, Path("shmlimit/table").glob("*.h")))

HELPER = Extension(
    "shmlimit.table._table", sources=["shmlimit/table/_table.c"], depends=HEADERS, extra_compile_args=[*FLAGS, *CX16]
)
BUILTIN = Extension(
    "shmlimit.table._fast",
    sources=["shmlimit/table/_fast.c"],
    depends=HEADERS,
    extra_compile_args=[*FLAGS, "-fno-plt"],  # PERF: 20 calls of the interpreter in each decision, 5 ns of 155
    py_limited_api=True,
)


def why_no_builtin() -> str | None:
    """What is missing for `_fast.c`, if anything."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python has no stable ABI"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"there is no Python.h in {sysconfig.get_path('include')} (Debian: python3-dev)"
    return None


class BuildHelper(build_ext):
    """The helper is a library for ctypes, not an extension module: its file name carries no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rsplit(".", 1)[-1] == "_table":
            return fullname.replace(".", "/") + ".so"
        return super().get_ext_filename(fullname)


class AbiWheel(bdist_wheel):
    """For every CPython from 3.10 on; without the builtin the wheel depends on the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi = ("cp310", "abi3") if BUILTIN in self.distribution.ext_modules else ("py3", "none")
        return python, abi, super().get_tag()[2]


missing = why_no_builtin()
if missing:
    sys.stderr.write(f"shmlimit: {missing}, so SharedTable.take goes through ctypes alone, four times as slow\n")

setup(
    ext_modules=[HELPER] if missing else [HELPER, BUILTIN],
    cmdclass={"build_ext": BuildHelper, "bdist_wheel": AbiWheel},
)
