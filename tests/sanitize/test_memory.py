"""The C helper under AddressSanitizer and UBSan, driven from Python: the differential tests, and random bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.instrumented import CHOOSE, ROOT, broken, build, need_compiler, runtime

FLAGS = ["-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
LIBRARY = [*FLAGS, "-shared", "-fPIC"]
# What compares the table with the pure policies, on any history, at every bound, with charges and without room.
DIFFERENTIAL = "pure_one or bound or rounded or case_rows or given_back or room or full or forgotten_key"
WITHOUT = ("test_native", "test_layout", "test_segment", "test_between", "test_between_ends")  # of other builds
SHM = Path("/dev/shm")


def environment(library: Path) -> dict[str, str]:
    # With malloc each object of Python has a block of its own, so what is read beyond a key is noticed.
    return os.environ | {
        CHOOSE: str(library),
        "LD_PRELOAD": runtime("asan"),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def python(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(library), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=300)
        finally:
            process.kill()  # where it hangs
            for segment in SHM.glob(f"shmlimit-t{process.pid:x}-*"):  # a pytest that a sanitizer ends leaves its tables
                segment.unlink()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def differential(library: Path) -> subprocess.CompletedProcess[str]:
    """The tests of the table that compare it with the pure policies, with that library."""
    ignored = [f"--ignore=tests/table/{file}.py" for file in WITHOUT]
    # -s: what a sanitizer writes is not captured by the pytest that it ends.
    options = ["-q", "-s", "-p", "tests.instrumented", "-p", "no:cacheprovider", "-x", *ignored]
    return python(library, "-m", "pytest", "tests/table", *options, "-k", DIFFERENTIAL)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The helper with both sanitizers."""
    need_compiler()
    return build(tmp_path_factory.mktemp("watched") / "helper.so", *LIBRARY)


def test_instrumented_helper_decides_without_a_report(watched: Path) -> None:
    """The differential tests, as they are, find nothing in the instrumented helper."""
    done = differential(watched)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "ERROR: AddressSanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


BROKEN = {
    "bytes beyond the key are read": (
        ("_memory.h", "for (size_t i = 0; i < n; i++)", "for (size_t i = 0; i < n + 16; i++)"),
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "a sum overflows": (
        ("_policies.h", "return n / d + (n % d != 0);", "return (n + d - 1) / d;"),
        "runtime error: signed integer overflow",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_instrumented_helper_reports_what_is_wrong(tmp_path: Path, name: str, what: str) -> None:
    """A helper that reads too far, or that overflows, does not pass."""
    need_compiler()
    change, report = BROKEN[what]
    source = broken(tmp_path / "broken", *change)
    library = build(tmp_path / "helper.so", *LIBRARY, source=source / "_table.c", include=source)
    done = python(library, "-m", "tests.sanitize.random_bytes", name, "0", "10")
    assert done.returncode != 0
    assert report in done.stderr


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("which", ["as installed", "watched"])
def test_any_bytes_are_an_error_or_a_decision(request: pytest.FixtureRequest, name: str, which: str, seed: int) -> None:
    """Whatever the slots and the header hold: no crash, no endless loop, and of the decisions none is absurd."""
    arguments = ["-m", "tests.sanitize.random_bytes", name, str(seed), "300"]
    if which == "watched":
        done = python(request.getfixturevalue("watched"), *arguments)
    else:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    happened = Counter(json.loads(done.stdout))
    assert happened["allowed"] > 100
    assert happened["denied"] > 100
    assert happened["LayoutError of take"] > 30
    assert happened["given back"] > 10
