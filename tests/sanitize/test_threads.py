"""The C file with real threads, under ThreadSanitizer and under AddressSanitizer with UBSan."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.instrumented import broken, build, need_compiler

DRIVER = Path(__file__).with_name("threads.c")
THREAD = ["-O1", "-fsanitize=thread", "-pthread"]
MEMORY = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread"]
LIMIT = 200


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    need_compiler()


def run(program: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}

    def go(*before: str) -> subprocess.CompletedProcess[str]:
        command = [*before, str(program), str(seconds)]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)

    done = go()
    if "unexpected memory mapping" in done.stderr:  # a kernel that places more at random than the runtime knows of
        done = go("setarch", platform.machine(), "-R")
    return done


def check(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Nothing was reported, and the threads did meet on a table that forgets and has no room."""
    assert done.returncode == 0, done.stderr[:4000]
    assert not done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    takes, charges = counts["allowed"][::2], counts["allowed"][1::2]
    assert takes == [LIMIT] * 3
    assert all(LIMIT // 2 < number <= LIMIT for number in charges)  # what was built on stays charged
    assert counts["lost"] == 0
    assert counts["reclaimed"] > 100
    assert counts["full"] + counts["shared"] > 100
    return counts


def test_no_data_race(tmp_path: Path) -> None:
    """Threads that take, charge, give back, peek, reset and count on 24 slots: all that they share is atomic."""
    counts = check(run(build(tmp_path / "threads", *THREAD, source=DRIVER), 2))
    assert counts["contended"] > 0


def test_no_access_beyond_the_table_and_nothing_undefined(tmp_path: Path) -> None:
    """The same on a table that ends where its memory ends: nothing outside it is touched, no arithmetic overflows."""
    check(run(build(tmp_path / "threads", *MEMORY, source=DRIVER), 2))


RACES = {
    "a pair is stored": (
        "return __sync_bool_compare_and_swap((pair *)slot, from, to);",
        "return *(pair *)slot == from ? *(pair *)slot = to, 1 : 0;",
    ),
    "a word is looked at": ("return __atomic_load_n(word, __ATOMIC_SEQ_CST);", "return *word;"),
    "a word is stored": (
        "return __sync_bool_compare_and_swap(word, from, to);",
        "return *word == from ? *word = to, 1 : 0;",
    ),
    "a counter is stored": ("return __atomic_fetch_add(word, n, __ATOMIC_RELAXED);", "return *word += n, *word - n;"),
}


@pytest.mark.parametrize("what", RACES)
def test_plain_access_is_reported(tmp_path: Path, what: str) -> None:
    """Each of the four accesses to shared memory is watched: where it is a plain one, a race is found."""
    include = broken(tmp_path / "broken", "_memory.h", *RACES[what])
    done = run(build(tmp_path / "threads", *THREAD, source=DRIVER, include=include), 3)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr


def test_access_beyond_the_table_is_reported(tmp_path: Path) -> None:
    """A scan that runs one slot too far is found."""
    loop = "for (; n > 0; n--, slot++) {"
    include = broken(tmp_path / "broken", "_table.c", loop, "for (n += 1025; n > 0; n--, slot++) {")
    done = run(build(tmp_path / "threads", *MEMORY, source=DRIVER, include=include), 3)
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "shmlimit_count_live" in done.stderr
