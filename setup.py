"""Builds the C helper as a plain shared library, so that one `py3-none-<platform>` wheel serves every Python."""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# -mcx16: the compiler then emits `cmpxchg16b` inline; without it the 16-byte CAS would be a call that may take a lock.
CX16 = ["-mcx16"] if platform.machine() in {"x86_64", "AMD64"} else []


class BuildHelper(build_ext):
    """A library for ctypes, not an extension module: its file name carries no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"


class AnyPythonWheel(bdist_wheel):
    """The helper knows nothing of Python, so the wheel depends on the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "shmlimit.table._table",
            sources=["shmlimit/table/_table.c"],
            depends=sorted(map(str, Path("shmlimit/table").glob("*.h"))),
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden", *CX16],
        ),
    ],
    cmdclass={"build_ext": BuildHelper, "bdist_wheel": AnyPythonWheel},
)
