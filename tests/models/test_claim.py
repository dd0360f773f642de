"""How a key takes a slot, searched exhaustively; README.md says what is modelled, and how."""

from __future__ import annotations

from collections.abc import Callable

import pytest

MODEL = "claim.pml"

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

RUNS = {
    **{name: SMALL + options for name, options in RIGHT.items()},
    **{name: f"{SMALL}{options} -D{name} -DONLYMORE" for name, (_, options) in WRONG.items()},
    **{name: f"{SMALL}{options} -D{name}" for name, (_, options) in LESS.items()},
    **{f"REACH={mark}": f"{SMALL}{options} -DREACH={mark}" for mark, (_, options) in REACHED.items()},
}


@pytest.mark.parametrize("run", RIGHT)
def test_never_more(finds_nothing: Callable[[str], None], run: str) -> None:
    """In no interleaving is a request allowed that the true bucket refuses, or one refused that it allows."""
    finds_nothing(run)


@pytest.mark.parametrize("run", WRONG)
def test_every_step_is_needed(fails_at: Callable[[str, str, str], None], run: str) -> None:
    """With a step left out, the search finds a request that was allowed and that the true bucket refuses."""
    fails_at(run, WRONG[run][0], r"\(ghost\[K\]<=")


@pytest.mark.parametrize("run", LESS)
def test_a_denial_needs_its_second_look(fails_at: Callable[[str, str, str], None], run: str) -> None:
    """Without the second look, the search finds a request that was denied and that the true bucket allows."""
    fails_at(run, LESS[run][0], "denies")


@pytest.mark.parametrize("run", [f"REACH={mark}" for mark in REACHED])
def test_what_is_searched_happens(reaches: Callable[[dict[int, tuple[str, str]], str], None], run: str) -> None:
    """A search that is told to fail where something happens does fail there: it isn't only searching quiet runs."""
    reaches(REACHED, run)
