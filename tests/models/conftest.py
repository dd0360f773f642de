"""How the models are searched: Spin makes a program of one configuration, and the program goes through all of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

MODELS = Path(__file__).parent
SEARCH = ["-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000"]


def search(model: str, options: str, directory: Path) -> str:
    """Builds the search for one configuration in `directory` and runs it; gives what it printed."""
    # What ends at the first error, or is small, is compiled for longer than it runs.
    speed = "-O0" if re.search("-D(ONLYMORE|REACH|QUICK)", options) else "-O2"
    # "provided", which holds the others while one is alone, doesn't go with partial order reduction.
    whole = ["-DNOREDUCE"] if "-DALONE" in options else []
    output = ""
    for command in (
        ["spin", *options.split(), "-a", str(MODELS / model)],
        ["cc", "-w", speed, *SEARCH, *whole, "-o", "pan", "pan.c"],
        ["./pan", "-m100000"],
    ):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600, check=False)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{' '.join(command)}:\n{output}"
    assert "Full statespace search for:" in output, output
    assert "max search depth too small" not in output, output
    return output


@pytest.fixture(scope="module")
def searches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """The searches of the tests of a module that were selected, two at a time: its RUNS of its MODEL."""
    missing = [
        f"{tool} is not installed (apt-get install {package})"
        for tool, package in (("spin", "spin"), ("cc", "gcc"))
        if shutil.which(tool) is None
    ]
    if missing and os.environ.get("CI"):
        pytest.fail("; ".join(missing))
    if missing:
        pytest.skip("; ".join(missing))
    module = request.module
    runs = [item.callspec.params["run"] for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {
            run: pool.submit(search, module.MODEL, module.RUNS[run], tmp_path_factory.mktemp("model")) for run in runs
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def finds_nothing(searches: dict[str, Future[str]]) -> Callable[[str], None]:
    """Asserts that a run went through everything and that no assertion of the model was violated."""

    def check(run: str) -> None:
        output = searches[run].result()
        assert "errors: 0" in output, output
        assert "Search not completed" not in output, output

    return check


@pytest.fixture
def fails_at(searches: dict[str, Future[str]]) -> Callable[[str, str, str], None]:
    """Asserts that a run found an assertion violated: the one that begins as the pattern says."""

    def check(run: str, what: str, pattern: str) -> None:
        output = searches[run].result()
        assert re.search("assertion violated " + pattern, output), f"{what}:\n{output}"

    return check


@pytest.fixture
def reaches(fails_at: Callable[[str, str, str], None]) -> Callable[[dict[int, tuple[str, str]], str], None]:
    """Asserts that a run REACH=n was stopped at the mark n."""

    def check(marks: dict[int, tuple[str, str]], run: str) -> None:
        mark = int(run.removeprefix("REACH="))
        fails_at(run, marks[mark][0], rf"\(*{mark}!={mark}\)")

    return check
