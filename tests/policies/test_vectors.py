"""The rows of vectors/policies.jsonl that buckets answer.

The contract is read like this there: levels and waits are exact fractions, rounded only in answers. On a denial
`remaining` and `reset_us` say what cost 0 would say. `reset_us` is 0 when nothing is used, else the time until the
bucket is full. A clock that goes back reads the level from the same straight line.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from shmlimit.policies import Gcra, TokenBucket

VECTORS = Path(__file__).parents[1] / "vectors" / "policies.jsonl"
ROWS = [json.loads(line) for line in VECTORS.read_text(encoding="utf-8").splitlines()]
BUCKET_ROWS = [row for row in ROWS if row["policy"]["kind"] == "TokenBucket"]
KINDS = {"TokenBucket": TokenBucket, "Gcra": Gcra}


def made(kind, numbers):
    return KINDS[kind](numbers["limit"], Fraction(numbers["period_us"], 10**6), numbers["burst"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", BUCKET_ROWS, ids=[f"{row['id']}: {row['why']}" for row in BUCKET_ROWS])
@pytest.mark.parametrize("through_json", [False, True], ids=["", "json"])
def test_row(kind, row, through_json):
    """Every step of a row gets its answer, under both algorithms, also when each state goes through JSON."""
    policy, state = made(kind, row["policy"]), None
    for number, step in enumerate(row["steps"]):
        decision, state = policy.decide(state, step["now_us"], step["cost"])
        answer = decision._asdict() | {"now_us": step["now_us"], "cost": step["cost"]}
        del answer["next_us"]
        assert answer == step, f"{row['id']} step {number}: {row['why']}"
        if through_json:
            state = json.loads(json.dumps(state))


def test_no_row_is_left_out():
    """80 of the 155 rows are for buckets; the others name the three kinds of window."""
    assert len(BUCKET_ROWS) == 80
    others = {row["policy"]["kind"] for row in ROWS} - {"TokenBucket"}
    assert others == {"FixedWindow", "SlidingLog", "SlidingCounter"}
    assert len(ROWS) == 155
