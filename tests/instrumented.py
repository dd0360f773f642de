"""The C helper built otherwise than for use: under sanitizers, for coverage, or broken on purpose.

As a pytest plugin (`-p tests.instrumented`) it makes a whole run use such a build: the one that `SHMLIMIT_TEST_HELPER`
names.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from shmlimit.table import native

ROOT = Path(__file__).parent.parent
SOURCES = native.LIBRARY.parent
CHOOSE = "SHMLIMIT_TEST_HELPER"
_CX16 = ["-mcx16"] if platform.machine() in {"x86_64", "AMD64"} else []


def pytest_configure() -> None:
    """Of the plugin."""
    if CHOOSE in os.environ:
        native.LIBRARY = Path(os.environ[CHOOSE])


def need_compiler() -> None:
    """Skips where there is no gcc, whose sanitizers these tests load; in CI that is a failure."""
    if shutil.which("gcc") is None:
        reason = "gcc is not installed (apt-get install gcc)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def build(output: Path, *flags: str, source: Path = SOURCES / "_table.c", include: Path = SOURCES) -> Path:
    """Compiles `source`, which may include the helper's files from `include`."""
    command = ["gcc", "-std=c11", "-g", "-Wall", "-Wextra", *_CX16, f"-I{include}", *flags]
    subprocess.run([*command, "-o", str(output), str(source)], check=True)
    return output


def broken(directory: Path, file: str, line: str, instead: str) -> Path:
    """A copy of the helper's sources in `directory`, with `line`, which must occur once, replaced in one of them."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in SOURCES.glob("*.[ch]"):
        shutil.copy(path, directory)
    text = (directory / file).read_text(encoding="utf-8")
    assert text.count(line) == 1, f"{file} has not one {line!r}: choose another line to break"
    (directory / file).write_text(text.replace(line, instead), encoding="utf-8")
    return directory


def runtime(name: str) -> str:
    """The path of a sanitizer's library, to be loaded before all others."""
    return subprocess.check_output(["gcc", f"-print-file-name=lib{name}.so"], text=True).strip()
