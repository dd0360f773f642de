"""Givings-back, resets, reservations and the bounds of loops, with another worker in between."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from shmlimit import ContentionError, FixedWindow, LayoutError, Policy, SharedTable, SlidingCounter, TokenBucket
from shmlimit.table import layout, native
from tests.between import LATER, T0, Between, clear, fill, reserve, reserved


@pytest.mark.parametrize("policy", [TokenBucket(3, 60), FixedWindow(3, 60), SlidingCounter(3, 60)], ids=str)
def test_giving_back_beside_another_is_never_too_much(small: SharedTable, hooked: Between, policy: Policy) -> None:
    """A charge is given back while another takes, charges or forgets, at each access: what is left is what was kept."""
    acts: dict[str, Callable[[], Any]] = {
        "take": lambda: small.take(policy, "k", now_us=LATER),
        "charge and give back": lambda: small.charge_all([(policy, b"k", 1)], LATER).give_back(),
        "clear": lambda: clear(small),
        "reserve": lambda: reserve(small, 1) if small.slots["state"].any() else None,
        "another": lambda: (clear(small), small.take(policy, "another", now_us=LATER)),
    }
    for act, do in acts.items():
        for at in range(200):
            clear(small)
            charges = small.charge_all([(policy, b"k", 2)], LATER)
            assert charges.stands
            hooked.run(charges.give_back, do, at)
            took = act == "take" and at < hooked.accesses
            remaining = small.peek(policy, "k", now_us=LATER).remaining
            assert remaining <= policy.quota - took
            assert remaining >= (policy.quota - took if act in {"charge and give back", "clear"} else 0)
            if at >= hooked.accesses:
                break
        else:
            pytest.fail("giving back never ends")


def test_reset_beside_another(small: SharedTable, hooked: Between) -> None:
    """A key is reset while another takes it, or another resets it, at each access: it has all its quota, or all but the
    other's hit; and who found it gone says so.
    """
    policy = TokenBucket(3, 3600)
    for other in ("take", "reset"):
        for at in range(200):
            clear(small)
            small.take(policy, "k", 2)
            act = {"take": lambda: small.take(policy, "k"), "reset": lambda: small.reset(policy, "k")}[other]
            inside: list[Any] = []
            was_live = hooked.run(lambda: small.reset(policy, "k"), lambda act=act, to=inside: to.append(act()), at)
            if at >= hooked.accesses:
                break
            remaining = small.peek(policy, "k").remaining
            assert remaining in ({3, 2} if other == "take" else {3})
            if other == "reset":
                assert was_live is not inside[0]
        else:
            pytest.fail("a reset never ends")


def test_nothing_charged_is_nothing_to_give_back(small: SharedTable) -> None:
    """A charge of cost 0 that is undone changes nothing."""
    policy = TokenBucket(3, 60)
    small.take(policy, "k", now_us=LATER)
    before = small.slots.tobytes()
    small.charge_all([(policy, b"k", 0)], LATER).give_back()
    assert small.slots.tobytes() == before


def test_nothing_is_to_be_had_without_room(small: SharedTable) -> None:
    """A take of cost 0 is allowed in a full table too, and counted so."""
    fill(small, LATER)
    before = small.stats()["allowed"]
    assert small.take(TokenBucket(3, 60), "k", 0, now_us=LATER).allowed
    assert small.stats()["allowed"] == before + 1


@pytest.mark.parametrize("later", [0, 1, 2])
def test_sliding_charge_is_given_back_from_the_window_after(small: SharedTable, later: int) -> None:
    """Its charge counts in its own window and as the one before the next: from either it is given back, and from none
    that is later.
    """
    policy = SlidingCounter(10, 60)
    charges = small.charge_all([(policy, b"k", 4)], LATER)
    at_us = LATER + later * 60 * 10**6
    small.take(policy, "k", now_us=at_us)  # on top
    charges.give_back()
    assert small.peek(policy, "k", now_us=at_us).remaining == 9


def test_reservation_of_another_nonce_is_another(small: SharedTable, hooked: Between) -> None:
    """Where another worker's reservation stands in the place of mine, that one is seen for a whole scan first."""
    policy = TokenBucket(2, 60)

    def take() -> Any:
        return small.take(policy, "k", now_us=LATER)

    clear(small)
    hooked.run(take)
    usual, replaced = hooked.accesses, 0

    def replace() -> None:
        nonlocal replaced
        mine = reserved(small)
        small.slots["state"][mine] += 1
        replaced += mine.any()

    for at in range(usual):
        clear(small)
        already = replaced
        assert hooked.run(take, replace, at).remaining == 1
        assert hooked.accesses == usual if replaced == already else hooked.accesses >= usual + 24
    assert replaced > 24


def test_reservation_that_was_not_kept_is_cleared(small: SharedTable, hooked: Between) -> None:
    """Where the second scan finds that another worker's slot was kept for the key, the hit counts in that one, and my
    reservation is cleared.
    """
    policy = TokenBucket(2, 60)
    slots, found = small.slots, False

    def commit_elsewhere() -> None:
        nonlocal found
        mine = reserved(small)
        if mine.any() and not found:
            found = True
            word = 1 << 63 | (LATER + 30 * 10**6) << 11  # after one hit
            slots[(mine.nonzero()[0][0] + 1) % 24] = slots["fingerprint"][mine][0], word

    decision = hooked.run(lambda: small.take(policy, "k", now_us=LATER), commit_elsewhere)
    assert found
    assert (decision.allowed, decision.remaining) == (True, 0)
    assert (slots["fingerprint"] != 0).sum() == 1


def test_two_that_choose_a_line_at_once_get_two(small: SharedTable, hooked: Between) -> None:
    """A line that another process has just taken is not taken from it."""
    helper, place = native.helper(), small._opened()[1]
    other = native.Table(header=place.header, keys=place.keys, spare=place.spare)
    at = layout.LANES_AT
    mapping = small._opened()[0].mapping
    mine = os.getpid()
    for number in range(200):
        mapping[at : layout.HEADER_BYTES] = bytes(layout.HEADER_BYTES - at)
        hooked.run(lambda: helper.choose_lane(place, mine), lambda: helper.choose_lane(other, os.getppid()), number)
        if number >= hooked.accesses:
            break
        assert place.lane != other.lane
    assert number > 60


def flip(table: SharedTable) -> Callable[[], None]:
    """Changes the key's state at every access, so that every swap on it is lost."""
    slots = table.slots
    (at,) = (slots["state"] != 0).nonzero()[0]
    word, turn = int(slots["state"][at]), 0

    def act() -> None:
        nonlocal turn
        turn = (turn + 1) % 997
        slots["state"][at] = word + (turn << 11)  # so many microseconds of a bucket's time

    return act


@pytest.mark.parametrize("what", ["take", "peek", "reset", "give back"])
def test_lost_swaps_have_a_bound(small: SharedTable, hooked: Between, what: str) -> None:
    """Where every look finds another state, each call ends with an error after thousands of swaps; a giving-back with
    the charge standing, which is safe.
    """
    policy = TokenBucket(10**4, 3600)
    charges = small.charge_all([(policy, b"k", 5)])
    if what == "give back":
        hooked.run(charges.give_back, flip(small))
        assert small.peek(policy, "k").remaining == 10**4 - 5
        return
    calls = {
        "take": lambda: small.take(policy, "k"),
        "peek": lambda: small.peek(policy, "k", 10**4),
        "reset": lambda: small.reset(policy, "k"),
    }
    with pytest.raises(ContentionError, match="thousands of swaps"):
        hooked.run(calls[what], flip(small))
    assert hooked.accesses > 10_000


def test_watermark_that_is_never_raised_forgets_nothing(small: SharedTable, hooked: Between) -> None:
    """Where the watermark can't be published, a key that needs another's slot is an error, and no state is lost."""
    policy = TokenBucket(1, 60)
    fill(small, T0)
    before = small.slots.tobytes()
    mapping = small._opened()[0].mapping
    at = layout.header_dtype().fields["watermark_us"][1]
    watermark = 0

    def act() -> None:
        nonlocal watermark
        watermark = (watermark + 1) % 1000
        mapping[at : at + 8] = watermark.to_bytes(8, "little")

    with pytest.raises(ContentionError):
        hooked.run(lambda: small.take(policy, "k", now_us=LATER), act)
    assert small.slots.tobytes() == before


def test_state_of_another_kind_beside_a_change(small: SharedTable, hooked: Between) -> None:
    """A corrupt state that is gone at the second look is no error."""
    policy = TokenBucket(2, 60)
    for at in range(200):
        clear(small)
        small.take(policy, "k", now_us=LATER)
        slots = small.slots
        (slot,) = (slots["state"] != 0).nonzero()[0]
        good, slots["state"][slot] = int(slots["state"][slot]), 0b010 << 61 | 1 << 40

        def mend(slot: int = slot, good: int = good) -> None:
            small.slots["state"][slot] = good

        try:
            decision = hooked.run(lambda: small.take(policy, "k", now_us=LATER), mend, at)
        except LayoutError:
            assert at >= hooked.accesses  # it was never mended
            break
        assert decision.remaining == 0
    assert at > 3
