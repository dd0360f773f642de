"""The benches: `make bench` runs all of them, they work, and what is told of them is there. No test looks at a time."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import _nginx
import growth
import pytest
import scaling
import served
from _plots import curve, plot
from _servers import MissingServerError, Server

from shmlimit.stores.redis import RedisStore

ROOT = Path(__file__).parents[1]
BENCH, RESULTS = ROOT / "bench", ROOT / "bench" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMPETITORS = {"limits", "throttled", "pyrate_limiter", "flask_limiter", "slowapi"}  # not in the tests' environment
FIGURE = re.compile(r"\d+(?:[.,]\d+)*")
COST = "## What does it cost?"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc and /dev/shm")


@pytest.fixture(scope="module")
def run_all() -> ModuleType:
    """The module that `python bench` runs."""
    spec = importlib.util.spec_from_file_location("bench_main", BENCH / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_main"] = module
    spec.loader.exec_module(module)
    return module


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python bench …`."""
    command = [sys.executable, str(BENCH), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# ---- what is run, and what is told -----------------------------------------------------------------------------------


def test_every_script_is_run(run_all: ModuleType) -> None:
    """Every script of the directory is one that `make bench` runs, with a result that is in git."""
    assert set(run_all.SCRIPTS) == {path.stem for path in BENCH.glob("[!_]*.py")}
    assert {script.result for script in run_all.SCRIPTS.values()} == {path.name for path in RESULTS.glob("*.md")}


def test_every_script_is_explained(run_all: ModuleType) -> None:
    """bench/README.md has a row for each, whose links lead to the script and to its result."""
    text = (BENCH / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+ \| \[(\w+)\.py\]\(\1\.py\) \| \[\S+\]\(results/(\S+)\) \|$", text, re.MULTILINE)
    assert dict(rows) == {name: script.result for name, script in run_all.SCRIPTS.items()}
    assert len(rows) == len(run_all.SCRIPTS)


def test_results_say_where_and_when(run_all: ModuleType) -> None:
    """Each result begins with date, machine and versions; its plots are there, and small."""
    for script in run_all.SCRIPTS.values():
        text = (RESULTS / script.result).read_text(encoding="utf-8")
        assert re.match(r"# .+\n\n20\d\d-\d\d-\d\d; \d+ × .+; CPython 3\.\d+\.\d+; shmlimit \d", text), script.result
        for image in re.findall(r"!\[.+\]\((\S+)\)", text):
            assert 1_000 < (RESULTS / image).stat().st_size < 60_000, image


def paragraphs(text: str) -> list[str]:
    """Paragraphs, list items and rows of tables, without code."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=\s*[-|#] ?)", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def told(text: str) -> list[str]:
    """The figures of a paragraph, without what is code or the address of a link."""
    return FIGURE.findall(re.sub(r"\]\(.*?\)|`.*?`", "", text))


def linked(text: str) -> list[Path]:
    """The results that a paragraph links to."""
    return [ROOT / target for target in re.findall(r"\]\((bench/results/[^)#]+)\)", text)]


def unfounded(readme: str) -> list[str]:
    """What a page claims and no result that it links to there says."""
    before, _, rest = readme.partition(COST)
    section, _, after = rest.partition("\n## ")
    assert section, "the README tells what it costs"
    wrong = []
    for text in paragraphs(section):
        results = "\n".join(path.read_text(encoding="utf-8") for path in linked(text) if path.exists())
        missing = [path for path in linked(text) if not path.exists()]
        figures = [
            figure for figure in told(text) if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d|[.,]\d)", results)
        ]
        wrong += [f"{text}: {what}" for what in [*figures, *missing]]
    # Elsewhere a time that was measured stands beside a link; the number is in the linked file, or near it (rounded).
    for text in paragraphs(before + after):
        times = re.findall(r"\d[\d.,]*\s(?:µs|ns)\b", re.sub(r"`.*?`", "", text))
        if times and not linked(text):
            wrong.append(f"{text}: {times}")
    return wrong


def test_the_readme_claims_what_was_measured() -> None:
    """Each figure of "What does it cost?" stands in a result that its row links to; each time elsewhere has a link."""
    assert unfounded(README) == []


@pytest.mark.parametrize(
    "line",
    [
        "| One decision | 0.0123 µs | [take](bench/results/take.md) |",
        "| One decision | 2.2 µs | nowhere |",
        "See [this](bench/results/nothing.md).",
        "| In all | 98,765 decisions a second | [many](bench/results/scaling.md) |",
    ],
)
def test_an_unfounded_claim_is_found(line: str) -> None:
    """A figure that is in no result, in none that is linked, and a result that isn't there."""
    assert unfounded(f"# Page\n\n{COST}\n\n| a | b | c |\n|---|---|---|\n{line}\n\n## Next\n") != []


def test_a_time_without_a_link_is_found() -> None:
    """Also outside of the section."""
    page = f"# Page\n\nIt takes 2 µs.\n\n{COST}\n\nNothing.\n\n## Next\n"
    assert len(unfounded(page)) == 1
    assert unfounded(page.replace("2 µs", "2 µs ([take](bench/results/take.md))")) == []


# ---- the scripts -----------------------------------------------------------------------------------------------------


def test_help_names_every_script(run_all: ModuleType) -> None:
    """`python bench --help`, and a name that there isn't."""
    text = bench("--help").stdout
    assert all(name in text for name in run_all.SCRIPTS)
    wrong = bench("nothing")
    assert wrong.returncode == 2
    assert "no such bench: nothing" in wrong.stderr


def test_a_script_that_fails_is_told(tmp_path: Path, run_all: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends with an error, and one that writes nothing, isn't a result of long ago."""
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    (tmp_path / "take.md").write_text("old")
    os.utime(tmp_path / "take.md", (1, 1))
    for code, good in (
        ("pass", False),
        ("import os; open(os.environ['BENCH_RESULTS'] + '/take.md', 'w').close(); raise SystemExit(1)", False),
        ("import os; open(os.environ['BENCH_RESULTS'] + '/take.md', 'w').close()", True),
    ):
        (tmp_path / "take.py").write_text(code)
        assert run_all.run("take", tmp_path, quick=True) is good, code
        os.utime(tmp_path / "take.md", (1, 1))


@pytest.mark.parametrize("script", sorted(path.stem for path in BENCH.glob("[!_]*.py")))
def test_script_can_be_imported(script: str) -> None:
    """Nothing is measured at import. Where a competitor isn't installed there is nothing to see."""
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import {script}; assert callable({script}.main)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    lacks = re.search(r"ModuleNotFoundError: No module named '(\w+)", done.stderr)
    if lacks and lacks[1] in COMPETITORS:
        pytest.skip(f"{lacks[1]} is in the environment of `make bench` only")
    assert done.returncode == 0, done.stderr


def test_scaling_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny round of every way and every number of processes; what decides wrongly would end it."""
    monkeypatch.setattr(scaling, "PROCESSES", (1, 2))
    figures = scaling.measure(1, seconds=0.01)
    assert len(figures) == 2 * (1 + 2 * 5)
    assert all(value > 0 for values in figures.values() for value in values)


def test_counting_counts_every_decision() -> None:
    """What `count` says was decided is what was decided, and it goes on until the time."""
    decided: list[int] = []
    until_ns = time.monotonic_ns() + 3_000_000
    done, end_ns = scaling.count(decided.append, until_ns)
    assert done == sum(decided) > 0
    assert end_ns >= until_ns


@pytest.mark.parametrize("limit", [1, 3])
def test_plain_counts_are_right(limit: int, tmp_path: Path) -> None:
    """What is measured under flock and under a lock counts: it allows as many as its limit, and no more."""
    seen = []
    begin_s = count = 0
    for _ in range(limit + 2):
        allowed, begin_s, count = scaling.counted(begin_s, count, limit)
        seen.append(allowed)
    assert seen == [True] * limit + [False] * 2
    file = tmp_path / "count"
    file.write_bytes(scaling.COUNT.pack(begin_s, limit - 1))
    scaling.of_flock(file, limit)  # opens it
    assert scaling.COUNT.unpack(file.read_bytes()) == (begin_s, limit - 1)
    if limit > 1:
        scaling.of_flock(file, limit)(1)
        with pytest.raises(AssertionError):
            scaling.of_flock(file, limit)(1)
        assert scaling.COUNT.unpack(file.read_bytes()) == (begin_s, limit)


@pytest.fixture
def _quiet_log() -> Iterator[None]:
    """A script has the log for itself, and turns it down."""
    log = logging.getLogger("shmlimit")
    before = log.level
    yield
    log.setLevel(before)


@pytest.mark.usefixtures("_quiet_log")
def test_growth_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of the smallest table, filled: shares of what, and how many bytes, don't depend on the machine."""
    monkeypatch.setattr(growth, "publish", lambda file, text: (tmp_path / file).write_text(text))
    monkeypatch.setattr(growth, "plot", lambda *_: None)
    monkeypatch.setattr(growth, "ENOUGH", 200)
    growth.main(1, 1_000)
    text = (tmp_path / "growth.md").read_text()
    assert "| 700 live keys | 58.5 |" in text
    monkeypatch.setattr(growth, "ENOUGH", 2_000)
    full = growth.measure(1_000, random.Random(1))
    assert full[0.5].new_shared == full[0.5].shared == 0
    assert full[1.0].new_shared > 0.2
    assert 0 < full[1.0].shared < full[1.0].new_shared
    assert full[1.0].new_refused == 0  # it has more spare slots than slots


@pytest.mark.parametrize("kind", served.KINDS)
def test_served_works(kind: str) -> None:
    """Every server of a kind starts, answers a few requests, and is gone; one that isn't limited as said ends it."""
    if _nginx.program() is None:
        message = "nginx isn't installed: apt-get install nginx"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    before = served.children(os.getpid())
    figures = served.measure(kind, rounds=1, n=16, with_limits=False)
    assert served.children(os.getpid()) == before
    assert not Path(f"/dev/shm/shmlimit-bench-{os.getpid()}").exists()
    assert list(figures) == [served.BARE, served.OURS, served.FIELDS, served.NGINX, served.PROXY]
    # Of so few requests the kernel may not have told yet what one has used; so not of each.
    assert all(value >= 0 for values in figures.values() for value in values)
    assert sum(value for values in figures.values() for value in values) > 0


def test_processor_time_is_all_threads() -> None:
    """The clock by which a process is told what it has used is its own: between two looks of its own."""
    before = time.process_time_ns()
    seen = served.processor_ns(os.getpid())
    assert before <= seen <= time.process_time_ns()


def test_interval_holds_what_was_drawn() -> None:
    """It is within the figures, holds their median, and is wider where the starts differ."""
    alike = [[1.0, 1.02, 1.04], [1.01, 1.02, 1.03]]
    low, high = served.interval(alike)
    assert 1.0 <= low <= 1.02 <= high <= 1.04
    wide = served.interval([[1.0, 1.0, 1.0], [1.5, 1.5, 1.5]])
    assert wide == (1.0, 1.5)
    assert served.verdict(low, high - 0.02) == "met"
    assert served.verdict(*wide) == "not told apart"
    assert served.verdict(1.2, 1.5) == "missed"


def test_redis_on_a_unix_socket(tmp_path: Path) -> None:
    """A server is asked over its socket where it has one."""
    try:
        server = Server("valkey", tmp_path / "socket")
    except MissingServerError as error:
        pytest.skip(str(error))
    server.start()
    try:
        with RedisStore(server.url) as store:
            assert store.take(scaling.SPENT, "k").allowed
        assert server.url.startswith("unix://")
    finally:
        server.kill()


def test_plots_say_when_there_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib that is said, and nothing is written."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    plot("none.svg", lambda axes: curve(axes, "a", [1], [1]))
    assert capsys.readouterr().out == "no none.svg: matplotlib isn't installed\n"
    assert not (RESULTS / "none.svg").exists()
