"""The rows of vectors/policies.jsonl.

The contract is read like this there: levels and waits are exact fractions, rounded only in answers. On a denial
`remaining` and `reset_us` say what cost 0 would say. `reset_us` is 0 when nothing is used, else the time until the
bucket is full, the window ends, or the newest hit has left. A clock that goes back reads a bucket's level from the same
straight line, and is taken as the state's own time by a window.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from shmlimit.policies import FixedWindow, Gcra, SlidingCounter, SlidingLog, TokenBucket

VECTORS = Path(__file__).parents[1] / "vectors" / "policies.jsonl"
ROWS = [json.loads(line) for line in VECTORS.read_text(encoding="utf-8").splitlines()]
KINDS = {cls.__name__: cls for cls in (TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter)}
# Each row of a token bucket holds word for word for GCRA.
CASES = [
    (row, kind)
    for row in ROWS
    for kind in ({row["policy"]["kind"]} | ({"Gcra"} if "burst" in row["policy"] else set()))
]


def made(kind, numbers):
    burst = [numbers["burst"]] if "burst" in numbers else []
    return KINDS[kind](numbers["limit"], Fraction(numbers["period_us"], 10**6), *burst)


@pytest.mark.parametrize(("row", "kind"), CASES, ids=[f"{row['id']} {kind}: {row['why']}" for row, kind in CASES])
@pytest.mark.parametrize("through_json", [False, True], ids=["", "json"])
def test_row(row, kind, through_json):
    """Every step of a row gets its answer, also when each state goes through JSON."""
    policy, state = made(kind, row["policy"]), None
    for number, step in enumerate(row["steps"]):
        decision, state = policy.decide(state, step["now_us"], step["cost"])
        answer = decision._asdict() | {"now_us": step["now_us"], "cost": step["cost"]}
        del answer["next_us"]
        assert answer == step, f"{row['id']} step {number}: {row['why']}"
        if through_json:
            state = json.loads(json.dumps(state))


def test_no_row_is_left_out():
    """All 155 rows are run, the 80 of token buckets under GCRA too."""
    assert len(ROWS) == 155
    assert len(CASES) == 155 + 80
