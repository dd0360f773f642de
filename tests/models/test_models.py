"""The claim protocol and giving back, searched exhaustively; README.md says what is modelled, and how."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

MODELS = Path(__file__).parent
SEARCH = ["-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000"]

# Short clocks: what key 1 takes at 1 has expired at 2, and a clock that was read as 1 may be used long after that.
SMALL = "-DP=1 -DTMAX=2 -DTORN "

# Nothing is found wrong in any of these.
RIGHT = {
    "three takers meet a new key": "-DK1=1 -DK2=1 -DK3=1",
    "another key competes for the slots": "-DK1=1 -DK2=1 -DK3=2 -DRMAX=1",
    "only one slot can ever be free": "-DK1=1 -DK2=1 -DK3=2 -DX0=9",
    "a key is forgotten and comes back": "-DK1=1 -DK2=1 -DK3=2 -DK0=1 -DX0=2",
    "a burst of two": "-DK1=1 -DK2=1 -DK3=2 -DK0=1 -DX0=2 -DB=2",
    "a dead taker left a reservation": "-DK1=1 -DK2=1 -DK3=2 -DK0=1 -DX0=32 -DRMAX=1",
    "a key is reset while it is taken and forgotten": "-DK1=1 -DK2=1 -DK3=2 -DR1=1 -DK0=1 -DX0=2 -DRMAX=1",
    "a key is reset before its burst is over": "-DK1=1 -DK2=1 -DR1=1 -DB=2",
    "a new key is reset meanwhile": "-DK1=1 -DK2=1 -DR1=1",
    "two stop anywhere, another of their key comes alone": "-DK1=1 -DK2=1 -DALONE=1",
    "two stop anywhere, another comes alone for one key": "-DK1=1 -DK2=2 -DALONE=1",
}

# A step is left out or done wrong: a key gets more than its limit, even where nothing but that is checked.
WRONG = {
    "NORESCAN": ("the maker of a reservation commits without a second scan", "-DK1=1 -DK2=1"),
    "FIRSTSIGHT": ("another's reservation is committed by the scan that first sees it", "-DK1=1 -DK2=1 -DK3=1"),
    "KEEPALL": ("of several reservations the first is committed, and none is cleared", "-DK1=1 -DK2=1"),
    "NOWATER": ("a fresh state is judged as of the clock alone", "-DK1=1 -DK2=2 -DK0=1 -DX0=2"),
    "WATEREARLY": ("the watermark is read before the scans", "-DK1=1 -DK2=2 -DK0=1 -DX0=2"),
    "NOPUBLISH": ("a state is forgotten and the watermark not raised", "-DK1=1 -DK2=2 -DK0=1 -DX0=2"),
    "PUBLISHLATE": ("a state is forgotten before the watermark is raised", "-DK1=1 -DK2=2 -DK0=1 -DX0=2"),
    "HALFCAS": ("a hit compares the state and not the fingerprint", "-DK1=1 -DK2=1 -DK3=2 -DK0=1 -DX0=1"),
    "SAMEWORD": ("reservations of a key are all alike", "-DK1=1 -DK2=1 -DK3=1 -DX0=1"),
}

# As above, but it is the other promise that breaks: a key gets less.
LESS = {"NOCONFIRM": ("a denial isn't confirmed by a second look at the pair", "-DK1=1 -DK2=2 -DK0=1 -DX0=1")}

# That these do happen shows that the searches above aren't empty.
REACHED = {
    1: ("a second reservation is cleared", "-DK1=1 -DK2=1"),
    2: ("the swap of a hit is lost", "-DK1=1 -DK2=1 -DK0=1 -DX0=1"),
    3: ("a denial isn't confirmed by the second look", "-DK1=1 -DK2=2 -DK0=1 -DX0=2"),
    4: ("a taker clears its own reservation, since another's was kept", "-DK1=1 -DK2=1"),
    5: ("a taker commits another's reservation", "-DK1=1 -DK2=1"),
    6: ("a fresh state is judged as of the watermark, not the clock", "-DK1=1 -DK2=2 -DK0=1 -DX0=2"),
    7: ("a key is forgotten and committed again", "-DK1=1 -DK2=2 -DK0=1 -DX0=2"),
    8: ("two keys are committed", "-DK1=1 -DK2=2"),
    9: ("the swap of a commit is lost", "-DK1=1 -DK2=1"),
    10: ("the swap of a reservation is lost", "-DK1=1 -DK2=1"),
    11: ("a reset finds a live state and clears it", "-DK1=1 -DK2=0 -DR1=1"),
    12: ("a lone taker commits the reservation of a stopped one", "-DK1=1 -DK2=2 -DALONE=1"),
}

# ---- giving back ----------------------------------------------------------------------------------------------------

CLOCK = "-DBYCLOCK -DONEATATIME "  # the other rule: by the clock, and one at a time

# Nothing is found wrong in any of these.
GIVEN_BACK = {
    "while the word is unchanged": "-DTMAX=5",
    "while it is unchanged, three that give back": "-DGIVERS=3 -DTMAX=3 -DEACH=2",
    "while it is unchanged, costs of 1 and 2": "-DB=3 -DCMAX=2 -DTMAX=3",
    "while it is unchanged, two that keep": "-DTMAX=3 -DKEEPERS=2 -DEACH=2",
    "while it is unchanged, times that no clock showed": "-DEXPLICIT -DTMAX=3 -DKEEPERS=2 -DEACH=2",
    "while it is unchanged, only others' times are ahead": "-DAHEAD",
    "while it is unchanged, and no time passes": "-DTMAX=1 -DB=3 -DCMAX=2 -DGIVERS=3 -DEACH=2",
    "while it is unchanged, the key is forgotten meanwhile": "-DFORGET -DP=1",
    "while it is unchanged, two keys": "-DNK=2 -DTMAX=3 -DEACH=2",
    "by the clock": CLOCK + "-DTMAX=5",
    "by the clock, costs of 1 and 2": CLOCK + "-DB=3 -DCMAX=2 -DTMAX=3",
    "by the clock, two that keep": CLOCK + "-DTMAX=3 -DKEEPERS=2 -DEACH=2",
    "by the clock, and no time passes": CLOCK + "-DTMAX=1 -DB=3 -DCMAX=2 -DGIVERS=3 -DEACH=2",
    "by the clock, the key is forgotten meanwhile": CLOCK + "-DFORGET -DP=1",
    "by the clock, two keys": CLOCK + "-DNK=2 -DTMAX=3 -DEACH=2",
}

# Too much is given back: a key gets more than its limit, even where nothing but that is checked.
TOO_MUCH = {
    "NOGUARD": ("given back although another came", "-DEXPLICIT"),
    "BYCLOCK": ("by the clock, while another may be giving back", ""),
    "ALL": ("all of it, whatever the clock says", CLOCK),
    "STAMPED": ("counted from the old state where that was later than the charge", CLOCK),
    "OLDWORD": ("all of it where the word is unchanged, else by the clock", CLOCK),
    "CLOCKEARLY": ("the clock is read before the state", CLOCK),
    "MIXED": ("one gives back by the clock, and one while the word is unchanged", CLOCK),
    "AHEAD": ("by the clock, which others' times are ahead of", CLOCK),
}

# That these do happen shows that the searches above aren't empty.
GIVING_REACHED = {
    1: ("the swap of a charge is lost", ""),
    2: ("two keys are charged and kept", "-DNK=2"),
    3: ("another is giving back, so nothing is given", CLOCK),
    4: ("a key was forgotten before it could be given back to", "-DFORGET -DP=1"),
    5: ("another gave back what it had charged before", CLOCK),
    6: ("another came, so nothing is given", ""),
    7: ("some of the charge has run out", CLOCK),
    8: ("all of the charge has run out", CLOCK),
    9: ("two give back after another's charge", CLOCK + "-DB=3"),
    10: ("one gives back after another's charge", CLOCK),
    11: ("a key was forgotten, came back and is given back to", "-DFORGET -DP=1"),
    12: ("the swap of a giving back is lost", CLOCK),
}

CLAIM_RUNS = {
    **{name: SMALL + options for name, options in RIGHT.items()},
    **{name: f"{SMALL}{options} -D{name} -DONLYMORE" for name, (_, options) in WRONG.items()},
    **{name: f"{SMALL}{options} -D{name}" for name, (_, options) in LESS.items()},
    **{f"REACH={mark}": f"{SMALL}{options} -DREACH={mark}" for mark, (_, options) in REACHED.items()},
}
GIVING_RUNS = {
    **GIVEN_BACK,
    **{name: f"{options} -D{name} -DONLYMORE" for name, (_, options) in TOO_MUCH.items()},
    **{f"GIVING={mark}": f"{options} -DREACH={mark}" for mark, (_, options) in GIVING_REACHED.items()},
}
RUNS = {
    **{run: ("claim.pml", options) for run, options in CLAIM_RUNS.items()},
    **{run: ("giving_back.pml", options) for run, options in GIVING_RUNS.items()},
}
assert len(RUNS) == len(CLAIM_RUNS) + len(GIVING_RUNS)


def search(model: str, options: str, directory: Path) -> str:
    """Builds the search for one configuration in `directory` and runs it; gives what it printed."""
    # What ends at the first error is compiled for longer than it runs.
    speed = "-O0" if "-DONLYMORE" in options or "-DREACH" in options else "-O2"
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
    """The searches of the tests that were selected, two at a time."""
    missing = [
        f"{tool} is not installed (apt-get install {package})"
        for tool, package in (("spin", "spin"), ("cc", "gcc"))
        if shutil.which(tool) is None
    ]
    if missing and os.environ.get("CI"):
        pytest.fail("; ".join(missing))
    if missing:
        pytest.skip("; ".join(missing))
    runs = [item.callspec.params["run"] for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {run: pool.submit(search, *RUNS[run], tmp_path_factory.mktemp("model")) for run in runs}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("run", RIGHT)
def test_never_more(searches: dict[str, Future[str]], run: str) -> None:
    """In no interleaving is a request allowed that the true bucket refuses, or one refused that it allows."""
    output = searches[run].result()
    assert "errors: 0" in output, output
    assert "Search not completed" not in output, output


@pytest.mark.parametrize("run", WRONG)
def test_every_step_is_needed(searches: dict[str, Future[str]], run: str) -> None:
    """With a step left out, the search finds a request that was allowed and that the true bucket refuses."""
    output = searches[run].result()
    assert re.search(r"assertion violated \(ghost\[K\]<=", output), f"{WRONG[run][0]}:\n{output}"


@pytest.mark.parametrize("run", LESS)
def test_a_denial_needs_its_second_look(searches: dict[str, Future[str]], run: str) -> None:
    """Without the second look, the search finds a request that was denied and that the true bucket allows."""
    output = searches[run].result()
    assert "assertion violated denies" in output, f"{LESS[run][0]}:\n{output}"


@pytest.mark.parametrize("run", [f"REACH={mark}" for mark in REACHED])
def test_what_is_searched_happens(searches: dict[str, Future[str]], run: str) -> None:
    """A search that is told to fail where something happens does fail there: it isn't only searching quiet runs."""
    output = searches[run].result()
    mark = int(run.removeprefix("REACH="))
    assert re.search(rf"assertion violated \(*{mark}!={mark}\)", output), f"{REACHED[mark][0]}:\n{output}"


@pytest.mark.parametrize("run", GIVEN_BACK)
def test_giving_back_is_never_too_much(searches: dict[str, Future[str]], run: str) -> None:
    """In no interleaving of charges and givings-back is a request kept that the bucket of those kept refuses."""
    output = searches[run].result()
    assert "errors: 0" in output, output
    assert "Search not completed" not in output, output


@pytest.mark.parametrize("run", TOO_MUCH)
def test_other_ways_give_back_too_much(searches: dict[str, Future[str]], run: str) -> None:
    """With another rule, the search finds a request that was kept and that the bucket of those kept refuses."""
    output = searches[run].result()
    assert re.search(r"assertion violated \(\(ghost\[x\]\+", output), f"{TOO_MUCH[run][0]}:\n{output}"


@pytest.mark.parametrize("run", [f"GIVING={mark}" for mark in GIVING_REACHED])
def test_what_is_given_back_happens(searches: dict[str, Future[str]], run: str) -> None:
    """As `test_what_is_searched_happens`, for giving back."""
    output = searches[run].result()
    mark = int(run.removeprefix("GIVING="))
    assert re.search(rf"assertion violated \(*{mark}!={mark}\)", output), f"{GIVING_REACHED[mark][0]}:\n{output}"
