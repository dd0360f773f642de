"""Full tables and floods of made-up keys: the simulations of `bench/load.py` on small tables, held to the promises."""

from __future__ import annotations

import pytest
from _flood import Flood, Run
from _population import Phase, Steady, lives, steady

from shmlimit import FixedWindow, Policy, SharedTable, SlidingCounter, TokenBucket

LOADS = (0.5, 0.75, 0.9, 1.0, 4.0)
POLICIES = (TokenBucket(10, 60), FixedWindow(10, 60), SlidingCounter(10, 60))


@pytest.fixture(scope="module")
def floods() -> dict[tuple[Policy, float], Flood]:
    """One run of each flood, for all the questions about it."""
    return {}


@pytest.fixture(params=POLICIES, ids=lambda policy: policy.kind)
def policy(request: pytest.FixtureRequest) -> Policy:
    return request.param


@pytest.fixture(params=LOADS, ids=lambda load: f"{load:.0%}")
def load(request: pytest.FixtureRequest) -> float:
    return request.param


@pytest.fixture
def flood(floods: dict[tuple[Policy, float], Flood], policy: Policy, load: float, name: str) -> Flood:
    if (policy, load) not in floods:
        with SharedTable.create(name, 512) as table:
            floods[policy, load] = Run(table, policy, seed=1).flood(load, clients=20)
    return floods[policy, load]


def test_flood_is_one(flood: Flood, policy: Policy, load: float) -> None:
    """It brings as many keys as it says and, from the size of the table on, more than find a slot."""
    assert flood.flooded >= 512 * load
    if load >= 1:
        assert flood.unserved > 20


def test_spent_key_is_never_fresh_before_its_time(flood: Flood) -> None:
    """Nothing is allowed that the pure policy denies, though everybody asks up to the last microsecond."""
    assert flood.early > 1000
    assert flood.more == 0


def test_keys_with_slots_are_served_as_if_there_were_no_flood(flood: Flood) -> None:
    """Each decision on them is the pure policy's, field by field."""
    assert flood.held > 1000
    assert flood.differing == 0


def test_newcomers_wait_for_the_flood_and_no_longer(flood: Flood) -> None:
    """Some get in during the flood, and when all that it left has expired each one is served as a fresh key."""
    assert flood.at_once > 0
    assert flood.settled > 10
    assert flood.unsettled == 0


# ---- keys that come and go -------------------------------------------------------------------------------------------

ONE, SEVERAL = POLICIES[:1], tuple(TokenBucket(limit, 60) for limit in range(10, 18))


def populated(name: str, policies: tuple[TokenBucket, ...], *phases: Phase) -> Steady:
    with SharedTable.create(name, 4096) as table:
        return steady(table, lives(policies, 1600, seed=1), phases, seed=2)


@pytest.mark.parametrize("policies", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("load", [0.6, 0.7])
def test_hardly_a_key_gets_less_than_its_limit(name: str, policies: tuple[TokenBucket, ...], load: float) -> None:
    """At the loads that a table is meant for, at most one key of a hundred does, and none gets more."""
    seen = populated(name, policies, Phase(load, 2), Phase(load, 2))
    assert seen.live > load - 0.01
    assert seen.keys >= 2 * int(load * 4096)
    assert seen.less <= seen.keys / 100
    assert seen.more == 0


def test_overfull_table_shows_in_its_counters(name: str) -> None:
    """With twice as many keys as slots many get less, so the look for them finds them, and `stats()` tells of it."""
    seen = populated(name, ONE, Phase(2.0, 1), Phase(2.0, 1))
    assert seen.less > seen.keys / 20
    assert seen.crowded > seen.new / 20
    assert seen.full + seen.shared >= seen.crowded
    assert seen.more == 0


@pytest.mark.parametrize("load", [0.6, 0.7])
def test_table_that_was_overfull_recovers(name: str, load: float) -> None:
    """Once its keys are fewer again, and two lifetimes later, they get what they would have got without the crowd."""
    seen = populated(name, ONE, Phase(2.0, 1.5), Phase(load, 2), Phase(load, 1))
    assert seen.live < load + 0.01
    assert seen.less <= seen.keys / 100
    assert seen.more == 0
