"""What becomes of a key that finds no room, searched exhaustively; README.md says what is modelled, and how."""

from __future__ import annotations

from collections.abc import Callable

import pytest

MODEL = "share.pml"

# Short clocks, and what is forgotten at 2 was taken at 1.  TWO have one hit of a burst of two left.
SMALL = "-DP=1 -DTMAX=2 -DQUICK "
TWO = "-DB=2 -DH0=1 "

# Nothing is found wrong in any of these.
RIGHT = {
    "a key is shared, and the group forgotten": "",
    "two keys share a group": "-DK2=2",
    "a burst of two": TWO,
    "a burst of two, a longer interval": TWO + "-DP=2 -DTMAX=3",
    "two that may give back": TWO + "-DV1=1 -DV2=1",
    "loads of a pair are torn": "-DTORN",
    "two slots": "-DNS=2 -DFMAX=0",
    "a key's slot is reset": TWO + "-DR1=1 -DFMAX=0",
    "another key's slot expires": "-DX0=2",
    "no slot is ever free": "-DX0=9 -DK3=1 -DFMAX=0",
    "three takers of one key": "-DK3=1 -DFMAX=0",
}

# Other ways to do it, in which nothing is found wrong either: README.md says what speaks for each.
ALSO_RIGHT = {
    "LOOKAGAIN": "",
    "PUBLISHAFTER": "",
    "RESTAMP": "",
    "NORAISE": "",
    "STAMPFRESH": "",
}

# A step is left out or done wrong: a key gets more than its limit, even where nothing but that is checked.
WRONG = {
    "NOSECOND": ("no look for the key's slot after the charge", ""),
    "KEEPRESERVED": ("a reservation that the second look finds isn't cleared", ""),
    "IGNORELOST": ("the swap that clears it is lost, and the slot isn't looked at again", ""),
    "LIVEONLY": ("an expired state that the second look finds doesn't count", "-DK3=1 -DFMAX=0"),
    "NOMARK": ("the watermark isn't read after the second look", ""),
    "MARKEARLY": ("the watermark is read before the second look", "-DK3=2 -DFMAX=0"),
    "NOPUBLISH": ("nobody is told that a group is in use", ""),
    "PUBLISHLAST": ("it is told after the second look", ""),
    "NOGROUP": ("who takes a slot doesn't look at the group", ""),
    "GROUPEARLY": ("who takes a slot looks at the group before it reserves, and not after", ""),
    "WATERFIRST": ("who takes a slot reads the watermark before the group", ""),
    "FROMFRESH": ("who takes a slot starts afresh where the group allows it", TWO),
    "ALLBACK": ("a charge is given back although another came", ""),
    "NOFORGETPUBLISH": ("a group is forgotten and the watermark not raised", ""),
}

# That these do happen shows that the searches above aren't empty.
SOME = TWO + "-DV1=1 -DR1=1"
REACHED = {
    1: ("a scan misses the group, which was forgotten and came back", SOME),
    2: ("the group denies a slot, and the reservation is cleared", SOME),
    3: ("a slot starts from a live state of the group", SOME),
    4: ("a taker commits another's reservation", SOME),
    5: ("a key is allowed by its slot and through the group", SOME),
    6: ("a charge of a slot is given back", SOME),
    7: ("the swap of a group's charge is lost", SOME),
    8: ("a group is forgotten and made anew", SOME),
    9: ("a fresh group is judged as of the watermark, not the stamp", SOME),
    10: ("the second look finds a slot of the key", SOME),
    11: ("the second look finds an expired one", SOME),
    12: ("the second look clears a reservation", SOME),
    13: ("the second look finds a reservation, and its clearing is lost", SOME),
    14: ("a sharer starts again because of the watermark", SOME),
    15: ("a sharer that starts again gives its charge back", SOME),
    16: ("a charge of a group is given back after it was allowed", SOME),
    17: ("another came to the group, so nothing is given back", SOME),
    18: ("a reset clears a slot", SOME),
}

RUNS = {
    **{name: SMALL + options for name, options in RIGHT.items()},
    **{name: f"{SMALL}{options} -D{name}" for name, options in ALSO_RIGHT.items()},
    **{name: f"{SMALL}{options} -D{name} -DONLYMORE" for name, (_, options) in WRONG.items()},
    **{f"REACH={mark}": f"{SMALL}{options} -DREACH={mark}" for mark, (_, options) in REACHED.items()},
}


@pytest.mark.parametrize("run", [*RIGHT, *ALSO_RIGHT])
def test_sharing_is_never_more(finds_nothing: Callable[[str], None], run: str) -> None:
    """In no interleaving does a key get more than its limit from its slot and its group together."""
    finds_nothing(run)


@pytest.mark.parametrize("run", WRONG)
def test_every_step_of_sharing_is_needed(fails_at: Callable[[str, str, str], None], run: str) -> None:
    """With a step left out, the search finds a request that was allowed and that the true bucket refuses."""
    fails_at(run, WRONG[run][0], r"\(e<=\(j\+")


@pytest.mark.parametrize("run", [f"REACH={mark}" for mark in REACHED])
def test_what_is_shared_happens(reaches: Callable[[dict[int, tuple[str, str]], str], None], run: str) -> None:
    """A search that is told to fail where something happens does fail there: it isn't only searching quiet runs."""
    reaches(REACHED, run)
