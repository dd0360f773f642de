"""The algorithms: pure, exact, and told once. base.py has THE RULES."""

from shmlimit.policies.base import Decision, Policy, State
from shmlimit.policies.fixed_window import FixedWindow
from shmlimit.policies.gcra import Gcra
from shmlimit.policies.reservation import Reservation
from shmlimit.policies.sliding_counter import SlidingCounter
from shmlimit.policies.sliding_log import SlidingLog
from shmlimit.policies.token_bucket import TokenBucket, per_day, per_hour, per_minute, per_second

__all__ = [
    "Decision",
    "FixedWindow",
    "Gcra",
    "Policy",
    "Reservation",
    "SlidingCounter",
    "SlidingLog",
    "State",
    "TokenBucket",
    "per_day",
    "per_hour",
    "per_minute",
    "per_second",
]
