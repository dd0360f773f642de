"""The real C code of the table under every schedule; README.md says what is tried and what is checked.

`SCHEDULE_MORE=1 pytest tests/schedule` takes one more preemption where they are bounded, which takes minutes.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.schedule.sabotages import SABOTAGES, Sabotage

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "shmlimit" / "table"
SCENARIOS = re.findall(r'^    \{"([^"]+)"', (HERE / "scenarios.h").read_text(encoding="utf-8"), re.MULTILINE)
MORE = os.environ.get("SCHEDULE_MORE", "0")

# As setup.py has it.  _FORTIFY_SOURCE would take the way from one stack to another for an error.
CC = ["cc", "-O2", "-std=c11", "-U_FORTIFY_SOURCE", *(["-mcx16"] if platform.machine() in {"x86_64", "AMD64"} else [])]


def build(table: Path, driver: Path, *options: str) -> Path:
    """The driver, made with the C files in the directory `table`."""
    command = [*CC, *options, "-I", str(table), "-o", str(driver), str(HERE / "driver.c")]
    subprocess.run(command, check=True, timeout=300)
    return driver


def search(driver: Path, *arguments: str) -> str:
    """What the driver printed, with a breach or without."""
    done = subprocess.run([driver, *arguments], capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == ("BREACH" in done.stdout), f"{done.returncode}: {done.stdout[-2000:]}{done.stderr}"
    return done.stdout


class Searches:
    """The searches that tests ask for, two at a time; those of the tests that were selected are under way before."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(max_workers=2)
        self._runs: dict[str, Future[str]] = {}
        self.driver = build(TABLE, directory / "driver", "-Wall", "-Wextra", "-Werror")

    def begin(self, run: str) -> Future[str]:
        if run not in self._runs:
            action = self._sabotage if run in SABOTAGES else self._scenario
            self._runs[run] = self._pool.submit(action, run)
        return self._runs[run]

    def result(self, run: str) -> str:
        return self.begin(run).result()

    def end(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _scenario(self, name: str) -> str:
        return search(self.driver, "-more", MORE, name)

    def _sabotage(self, name: str) -> str:
        sabotage: Sabotage = SABOTAGES[name]
        directory = self._directory / re.sub(r"\W+", "-", name)
        directory.mkdir()
        for source in TABLE.glob("_*.[ch]"):
            text = source.read_text(encoding="utf-8")
            if source.name == sabotage.file:
                assert text.count(sabotage.old) == 1, f"{sabotage.file} has not once: {sabotage.old}"
                text = text.replace(sabotage.old, sabotage.new)
            (directory / source.name).write_text(text, encoding="utf-8")
        driver = build(directory, directory / "driver", "-w", "-O1")
        return search(driver, "-only", sabotage.kind, "-more", str(sabotage.more), sabotage.scenario)


@pytest.fixture(scope="module")
def searches(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searches]:
    """The driver is built once."""
    if shutil.which("cc") is None:
        if os.environ.get("CI"):
            pytest.fail("cc is not installed (apt-get install gcc)")
        pytest.skip("cc is not installed (apt-get install gcc)")
    searches = Searches(tmp_path_factory.mktemp("schedule"))
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec") and "run" in item.callspec.params:
            searches.begin(item.callspec.params["run"])
    yield searches
    searches.end()


@pytest.mark.parametrize("run", SCENARIOS)
def test_no_schedule_breaks_a_guarantee(searches: Searches, run: str) -> None:
    """Under every schedule with at most k preemptions, all that the README promises of a table holds."""
    output = searches.result(run)
    assert "BREACH" not in output, output
    assert output.startswith(f"{run}: k="), output


@pytest.mark.parametrize("run", SABOTAGES)
def test_every_step_is_needed(searches: Searches, run: str) -> None:
    """With one line of the C code done wrong, some schedule breaks the guarantee that the line upholds."""
    output = searches.result(run)
    assert f"BREACH {SABOTAGES[run].kind}: " in output, f"{run}: not found\n{output}"


def test_what_is_searched_happens(searches: Searches) -> None:
    """All that can happen to a key happens somewhere: the searches aren't quiet runs."""
    happened = {mark for run in SCENARIOS for mark in searches.result(run).rstrip("\n").split("; ")[1:]}
    assert happened == set(search(searches.driver, "marks").splitlines())


def test_every_scenario_is_searched(searches: Searches) -> None:
    """The names that are read here are those that the driver has."""
    assert search(searches.driver, "list").splitlines() == SCENARIOS


@pytest.mark.parametrize("name", ["a fixed window is charged and given back", "a slot gets free while its key shares"])
def test_remembered_states_lose_nothing(searches: Searches, name: str) -> None:
    """Going on from states that were met before, too, takes more schedules, and they end in the same ways."""
    lines = [search(searches.driver, "-k", "3", *option, name) for option in ([], ["-all"])]
    (few, few_ends), (many, many_ends) = (
        re.findall(r"(\d+) schedules, \d+ states, (\d+ ends.*)", line)[0] for line in lines
    )
    assert int(many) > int(few)
    assert many_ends == few_ends
