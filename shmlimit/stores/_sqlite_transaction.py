"""One transaction of a `SqliteStore`: finds states, has the policies decide, keeps what comes of it, and forgets."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shmlimit.policies.base import Decision, Policy, State
from shmlimit.policies.requests import Request, decide_all, join
from shmlimit.stores.base import NOW_MAX_US, check_now, check_policy, policy_text, seen_from

if TYPE_CHECKING:
    from typing_extensions import Self

    from shmlimit.stores.sqlite import SqliteStore

PURGE_ROWS = 100  # that a decision looks at, at most: half a millisecond
_LOOK_CHARGES = 64  # after which a decision looks for expired rows of other processes
_text_of = lru_cache(maxsize=1024)(policy_text)
# PERF: a state holds no circles; not to look for them halves the time of a log.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().raw_decode


class _Found(NamedTuple):
    """What there is of a key (`None` twice where there is no row), and the time to judge it at."""

    id: int | None
    state: State | None
    at_us: int
    written_us: int
    due_us: int


class Transaction:
    """An open transaction of a `SqliteStore`: nobody else writes to the file until its block ends.

    `now_us` is the time that it decides at: the one that was given, else the wall clock's as it began.
    """

    __slots__ = ("_clock_us", "_cursor", "_given", "_sql", "_start", "_store", "execute", "now_us", "set_back")
    execute: Callable[..., sqlite3.Cursor]

    def __init__(self, store: SqliteStore, start: str = "BEGIN IMMEDIATE") -> None:
        self._store, self._sql, self._start = store, store._sql, start
        self.set_back = self._given = False

    def __enter__(self) -> Self:
        self._cursor = self._store._file.begin(self, self._start)
        self.execute = self._cursor.execute
        try:
            self._clock_us = self.now_us = self._store._clock()
        except BaseException as error:
            self._store._file.undo(self, error)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            self._store._file.commit(self, self._cursor)
        else:
            self._store._file.undo(self, error)

    def decide_all(
        self, requests: Iterable[Request], now_us: int | None = None
    ) -> tuple[list[Decision], Callable[[], None] | None]:
        """The decisions that `take_all` would give, and what charges them (`None` if one denies).

        Nothing is charged until that is called, which must be within the block and before the same keys are decided on
        again. To report that nothing was taken after all, decide once more with a cost of 0 for each.
        """
        joint = join((check_policy(policy), key, cost) for policy, key, cost in requests)
        self._as_of(now_us)
        found: list[_Found] = []

        def load(policy: Policy, key: bytes) -> tuple[State | None, int]:
            one = self._find(policy, key)
            found.append(one)
            return one.state, one.at_us

        decisions, states = decide_all(joint.requests, load)
        seen = [seen_from(one, where.at_us - self.now_us) for one, where in zip(decisions, found, strict=True)]
        if states is None:
            return joint.spread(seen), None
        charged = [entry for entry in zip(joint.requests, found, states, strict=True) if entry[0][2]]

        def charge() -> None:
            for (policy, key, _), where, state in charged:
                self._keep(policy, key, where, state)
            if charged:
                self._tidy()

        return joint.spread(seen), charge

    def _as_of(self, now_us: int | None) -> None:
        self._given = check_now(now_us) is not None
        self.now_us = self._clock_us if now_us is None else now_us

    def _find(self, policy: Policy, key: bytes) -> _Found:
        row = self.execute(self._sql.find, (_text_of(policy), key)).fetchone()
        if row is None:
            return _Found(None, None, self._not_before(policy), 0, 0)
        number, text, written_us, due_us = row
        try:
            state: State = _decode(text)[0]
        except (ValueError, TypeError):
            raise self._store._file.failure(f"the state in row {number} of {self._store.table} is broken") from None
        found = _Found(number, state, self.now_us, written_us, due_us)
        if self._given or written_us <= self._clock_us:
            return found
        # The clock was set back, and the state moves with it. That is written even if the request is then denied: else
        # the difference would be taken anew each time, and the key be shut until the clock is where it was.
        self.set_back = True
        found = found._replace(state=policy.shift(state, self._clock_us - written_us), written_us=0)
        if self._start != "BEGIN":
            self._keep(policy, key, found, found.state or {})
        return found

    def _not_before(self, policy: Policy) -> int:
        """The time to judge a key without a row at: it may have had one, which was forgotten as of a later time."""
        row = self.execute(self._sql.forgotten).fetchone()
        if row is None:
            raise self._store._file.failure(f"its table {self._store.table}:forgotten was emptied; remove the file")
        own_us, turned_us, given_us, latest_us = row
        if self._given:
            return max(self.now_us, int(latest_us))
        if self._clock_us < own_us:
            self.set_back, turned_us = True, self._clock_us
            if self._start != "BEGIN":
                self.execute(self._sql.turn, (turned_us, turned_us))
        return max(self._clock_us, int(given_us), _moved(policy, turned_us) if turned_us else 0)

    def _keep(self, policy: Policy, key: bytes, found: _Found, state: State) -> None:
        text, expires_us = _encode(state), policy.expires_at(state)
        written_us = max(found.written_us, self._clock_us)
        if found.id is None:
            self.execute(self._sql.add, (_text_of(policy), key, text, expires_us, expires_us, written_us))
        elif expires_us < found.due_us:
            self.execute(self._sql.change_due, (text, expires_us, written_us, expires_us, found.id))
        else:
            self.execute(self._sql.change, (text, expires_us, written_us, found.id))
        self._store._look_us = min(self._store._look_us, expires_us)

    def _tidy(self) -> None:
        """After a charge: look for expired rows, where there may be some."""
        self._store._charges += 1
        if self._store._look_us <= self.now_us or self._store._charges >= _LOOK_CHARGES:
            self._purge(PURGE_ROWS)

    def _purge(self, rows: int) -> tuple[int, bool]:
        """Look at up to `rows` rows that may have expired: how many it removed, and whether there may be more."""
        due = self.execute(self._sql.due, (self.now_us, rows)).fetchall()
        gone = [expires_us for _, expires_us in due if expires_us <= self.now_us]
        if gone:
            latest_us = max(gone)
            self.execute(self._sql.forget_given if self._given else self._sql.forget_own, (latest_us, latest_us))
        for number, expires_us in due:
            if expires_us <= self.now_us:
                self.execute(self._sql.remove, (number,))
            else:
                self.execute(self._sql.put_off, (expires_us, number))
        (next_us,) = self.execute(self._sql.next_due).fetchone()
        self._store._look_us, self._store._charges = NOW_MAX_US if next_us is None else next_us, 0
        return len(gone), len(due) == rows


def _moved(policy: Policy, delta_us: int) -> int:
    """Where the start of a state at the epoch is once moved by `delta_us`: there, or at the next window's start."""
    _, state = policy.decide(None, 0)
    return policy.expires_at(policy.shift(state, delta_us)) - policy.expires_at(state)
