"""How a charge is given back, searched exhaustively; README.md says what is modelled, and how."""

from __future__ import annotations

from collections.abc import Callable

import pytest

MODEL = "giving_back.pml"

CLOCK = "-DBYCLOCK -DONEATATIME "  # the other rule: by the clock, and one at a time

# Nothing is found wrong in any of these.
RIGHT = {
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
REACHED = {
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

RUNS = {
    **RIGHT,
    **{name: f"{options} -D{name} -DONLYMORE" for name, (_, options) in TOO_MUCH.items()},
    **{f"REACH={mark}": f"{options} -DREACH={mark}" for mark, (_, options) in REACHED.items()},
}


@pytest.mark.parametrize("run", RIGHT)
def test_giving_back_is_never_too_much(finds_nothing: Callable[[str], None], run: str) -> None:
    """In no interleaving of charges and givings-back is a request kept that the bucket of those kept refuses."""
    finds_nothing(run)


@pytest.mark.parametrize("run", TOO_MUCH)
def test_other_ways_give_back_too_much(fails_at: Callable[[str, str, str], None], run: str) -> None:
    """With another rule, the search finds a request that was kept and that the bucket of those kept refuses."""
    fails_at(run, TOO_MUCH[run][0], r"\(\(ghost\[x\]\+")


@pytest.mark.parametrize("run", [f"REACH={mark}" for mark in REACHED])
def test_what_is_given_back_happens(reaches: Callable[[dict[int, tuple[str, str]], str], None], run: str) -> None:
    """A search that is told to fail where something happens does fail there: it isn't only searching quiet runs."""
    reaches(REACHED, run)
