"""Several limits in the table for one request: read all, charge all, and give back where one denies after all.

Most refusals end with the reading, without a write. The charges begin with the limit that has least left, so one that
denies after all is nearly always the first, and there is nothing to give back. What is given back is never too much
(`_policies.h` says why); a charge that another request has built on meanwhile stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shmlimit.policies.base import Decision, Policy
from shmlimit.table import native

if TYPE_CHECKING:
    from shmlimit.table.table import Call, Pool, SharedTable


class _Lease(NamedTuple):
    """A request and the call that is its own until all is decided: the charge that may be given back is noted in it."""

    policy: Policy
    key: bytes
    cost: int
    pool: Pool
    call: Call


class Charges:
    """Requests on different policies and keys, charged all or none.

    `decisions` has an answer for each: if one denies, the others report what they would with nothing taken. Where
    `stands` is true all are charged, and the caller ends it with `keep` or `give_back`; otherwise none is.
    """

    def __init__(self, table: SharedTable, requests: list[tuple[Policy, bytes, int]], now_us: int | None) -> None:
        self._table = table
        self._helper = native.helper()
        self._leases = [_Lease(*request, *table._borrow(request[0])) for request in requests]
        self._charged: list[_Lease] = []
        self.stands = False
        try:
            for lease in self._leases:
                lease.call[2].now_us = -1 if now_us is None else now_us
            self.decisions = [self._ask(self._helper.peek, lease, lease.cost) for lease in self._leases]
            self.stands = all(self.decisions) and self._charge()
            if not self.stands:
                self._refuse()
        finally:
            if not self.stands:
                self._release()

    def keep(self) -> None:
        """The charges stand, and are counted."""
        self._count(allowed=len(self._leases), shared=sum(lease.call[2].shared for lease in self._leases))
        self._release()

    def give_back(self) -> None:
        """The charges are undone where nobody has built on them; they aren't counted."""
        self._undo()
        self._release()

    def _charge(self) -> bool:
        for number in sorted(range(len(self._leases)), key=lambda number: self.decisions[number].remaining):
            lease = self._leases[number]
            try:
                self.decisions[number] = decision = self._ask(self._helper.charge, lease, lease.cost)
            except BaseException:
                self._undo()
                raise
            if not decision.allowed:
                self._undo()
                return False
            self._charged.append(lease)
        return True

    def _undo(self) -> None:
        for lease in reversed(self._charged):
            # A swap that is lost too often leaves the charge, which is safe.
            self._helper.give_back(lease.call[0], lease.key, len(lease.key), lease.cost)

    def _refuse(self) -> None:
        """What those say that didn't deny, and the counters."""
        denied = shared = full = 0
        for number, lease in enumerate(self._leases):
            decision = self.decisions[number]
            if decision.allowed:
                self.decisions[number] = self._ask(self._helper.peek, lease, 0)
            elif lease.call[2].full and decision.retry_after_us is not None:
                full += 1
            else:
                denied += 1
                shared += lease.call[2].shared
        self._count(denied=denied, shared=shared, full=full)

    def _ask(self, function: Any, lease: _Lease, cost: int) -> Decision:
        return self._table._ask(function, lease.call, lease.key, cost)

    def _count(self, *, allowed: int = 0, denied: int = 0, shared: int = 0, full: int = 0) -> None:
        self._helper.count(self._table._opened()[1], allowed, denied, shared, full)

    def _release(self) -> None:
        for lease in self._leases:
            lease.call[2].now_us = -1
            lease.pool.append(lease.call)
