"""The algorithms: pure, exact, and told once. base.py has THE RULES."""

from shmlimit.policies.base import Decision, Policy, State
from shmlimit.policies.gcra import Gcra
from shmlimit.policies.reservation import Reservation
from shmlimit.policies.token_bucket import TokenBucket, per_day, per_hour, per_minute, per_second

__all__ = [
    "Decision",
    "Gcra",
    "Policy",
    "Reservation",
    "State",
    "TokenBucket",
    "per_day",
    "per_hour",
    "per_minute",
    "per_second",
]
