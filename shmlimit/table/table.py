"""SharedTable: rate limits in shared memory, exact over all processes that have it open, without a lock."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import secrets
import struct
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from mmap import mmap
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from shmlimit.errors import ContentionError, LayoutError, StoreError
from shmlimit.policies.base import Decision, Policy, check_cost
from shmlimit.policies.requests import Request, join, key_bytes
from shmlimit.table import layout, native
from shmlimit.table.charges import Charges
from shmlimit.table.prepared import check_fit, identity, misfit, numbers
from shmlimit.table.segment import Segment, open_segment

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from typing_extensions import Self

Call: TypeAlias = tuple[Any, memoryview, native.Call]
"""For one call at a time: its prepared argument, a view of its answer, and the structure (which keeps all mapped)."""

Pool: TypeAlias = deque[Call]

NOW_MAX_US = 4_133_980_800_000_000  # 2101-01-01: with the longest refill on top it still fits a state word
# Of keys and costs: above every quota, within a C int, and (PERF) one digit of a Python integer, compared in line.
_INT_MAX = 2**30 - 1
_POLICIES_MAX = 1024
_ANSWER = struct.Struct("@?5q")  # of struct call, from `allowed` on
_unpack = _ANSWER.unpack
_new_decision = tuple.__new__
_NOTHING: tuple[object, Pool] = object(), deque()
_ONE = 1  # `cost is _ONE` is true of no bool; an equal integer that is another object goes the longer way

log = logging.getLogger("shmlimit")


class SharedTable:
    """A fixed-size table of rate limits in the shared-memory segment `name` (`/dev/shm/<name>` on Linux).

    Made by `create`, `attach` or `open`, not by the constructor. All processes that open the same name, or inherit the
    object by fork, share exact limits: no key is ever allowed more than its policy says, whatever is interleaved,
    killed or stopped. It keeps `TokenBucket` and `Gcra` (both run as GCRA), `FixedWindow` and `SlidingCounter`.
    One call takes about a microsecond, never waits, and a refusal writes nothing shared. Objects may be used by any
    number of threads.
    """

    blocks: ClassVar[bool] = False

    def __init__(self, segment: Segment) -> None:
        helper = native.helper()
        self.name = segment.name
        self._take, self._peek, self._reset = helper.take, helper.peek, helper.reset
        self._take_one = helper.take_one
        # A pool of spare calls per policy. A call is popped for the time of one decision, so no two threads (nor a
        # signal handler within one) share an answer; `threading.local` would not keep the handler out.
        self._pools: dict[Policy, Pool] = {}
        # PERF: the pools once more, by the id of the policy object: a policy's hash is a Python call (60 ns). An id is
        # never another object's, since the entry keeps this one alive.
        self._by_id: dict[int, tuple[Policy, Pool]] = {}
        self._last: tuple[object, Pool] = _NOTHING
        self._warned = False  # that the table is too small
        self._slots = layout.read_slots(segment.name, segment.mapping)
        self._open_as: tuple[Segment, native.Table] | None = segment, _place(segment.mapping, self._slots)
        self._choose_lane()
        _open_tables.add(self)
        # What the builtin knows of a policy: its address and what keeps it there, for each policy.
        self._told: dict[Policy, tuple[int, native.Policy]] = {}
        self._builtin = self._bind()
        self._binding = "ctypes" if self._builtin is None else "builtin"
        if self._builtin is not None:
            self.take = self._builtin.take  # type: ignore[method-assign]

    # ---- opening and closing -----------------------------------------------------------------------------------------

    @classmethod
    def create(cls, name: str, slots: int = 65536) -> Self:
        """Makes a new table of `slots` slots (16 bytes each, rounded up to whole buckets of 8).

        Raises `TableExistsError` (also a `FileExistsError`) where the name is taken, `ConfigError` for a bad name or
        number, `StoreError` where there is no space or no C helper.
        """
        return cls._open(name, slots, may_make=True, may_attach=False)

    @classmethod
    def attach(cls, name: str) -> Self:
        """Attaches to an existing table.

        Raises `TableNotFoundError` (also a `FileNotFoundError`) where there is none, `LayoutError` where what is there
        is no table of this version, or not to be trusted.
        """
        return cls._open(name, layout.MIN_SLOTS, may_make=False, may_attach=True)

    @classmethod
    def open(cls, name: str, slots: int = 65536) -> Self:
        """Attaches to the table `name`, or makes it: safe when several processes start at once.

        A table of another size is used as it is, with a `RuntimeWarning`; remove it for another size
        (`python -m shmlimit rm NAME`).
        """
        table = cls._open(name, slots, may_make=True, may_attach=True)
        if table._slots != layout.round_slots(slots):
            warnings.warn(
                f"the table {name!r} has {table._slots} slots, not {layout.round_slots(slots)}, and is used as it is. "
                f"For another size stop its users and remove it: python -m shmlimit rm {name}",
                RuntimeWarning,
                stacklevel=2,
            )
        return table

    @classmethod
    def _open(cls, name: str, slots: int, *, may_make: bool, may_attach: bool) -> Self:
        helper = native.helper()
        rounded = layout.round_slots(slots)

        def initialise(mapping: mmap) -> None:
            layout.write_header(mapping, rounded, secrets.token_bytes(16), helper.clock_offset_us())

        size = layout.segment_bytes(rounded)
        return cls(open_segment(name, size, initialise, may_make=may_make, may_attach=may_attach))

    def close(self) -> None:
        """Lets go of the table: later calls raise `StoreError`. The table itself stays, for others and for a restart.

        The memory is unmapped when the last view of it (`slots`) and the last call under way are gone.
        """
        # SAFETY: nothing is unmapped by hand. Whatever still points into the mapping holds a reference to it.
        self._open_as = None
        self._forget()
        builtin, self._builtin = self._builtin, None  # which has the table's methods, so it would keep the table
        if builtin is not None:
            builtin.forget()
            self.__dict__.pop("take", None)  # and the method says that it is closed
        _open_tables.discard(self)

    def unlink(self) -> None:
        """Removes the table's name. Processes that have it open go on with it; whoever opens the name next gets a new
        table, so that is for when all of them have ended.
        """
        self._opened()[0].unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SharedTable {self.name!r}, {'closed' if self._open_as is None else f'{self._slots} slots'}>"

    def _opened(self) -> tuple[Segment, native.Table]:
        if self._open_as is None:
            raise StoreError(f"the table {self.name!r} is closed")
        return self._open_as

    @property
    def binding(self) -> str:
        """How `take` reaches the C helper: `"builtin"`, or `"ctypes"` where that wasn't built, can't be used (a Python
        without a GIL, a subclass with a `take` of its own) or was refused: with `SHMLIMIT_FAST=0` in the environment
        when the first table of the process is opened.
        """
        return self._binding

    def _choose_lane(self) -> None:
        native.helper().choose_lane(self._opened()[1], os.getpid())

    # ---- the store's protocol ----------------------------------------------------------------------------------------

    def take(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """Decides on a request of `cost` units for `key` and charges it where it is allowed.

        `now_us` (microseconds of Unix time, 0 to the year 2100) stands in for the table's clock, for tests and
        simulation. A time far ahead moves the time of every later key: a key without a slot is judged as of the latest
        expiry that was forgotten, by anyone. Raises `ValueError` for a bad cost or time, `TypeError` for a key that is
        neither `str` nor `bytes`, `ConfigError` for a policy that the table can't hold, `ContentionError` (nothing was
        charged) past thousands of lost swaps.
        """
        # PERF: what `_decide` does, in line for usual arguments (0.6 µs instead of 1.0); the usual cost is asked for
        # by `is`, which spares it three comparisons (25 ns).
        # SAFETY: undeclared ctypes integers are cut to 32 bits without a word, so cost and size are checked first.
        if now_us is not None or (cost is not _ONE and (type(cost) is not int or cost < 0 or cost > _INT_MAX)):
            return self._decide(self._take, policy, key, cost, now_us)
        try:
            if type(key) is str:
                key = key.encode()
            elif type(key) is not bytes:
                return self._decide(self._take, policy, key, cost, now_us)
            size = len(key)
            if size > _INT_MAX:
                raise _too_long()
            # PERF: the policy of the call before, where it is the same object, spares `id` and a look-up: 30 ns of 600.
            known, pool = self._last
            if known is not policy:
                self._last = _, pool = self._by_id[id(policy)]
                if self._open_as is None:  # closed meanwhile, by another thread
                    self._forget()
            call = pool.pop()
        except UnicodeEncodeError:
            return self._decide(self._take, policy, key, cost, now_us)
        except (KeyError, IndexError):
            pool, call = self._borrow(policy)
        argument, answer, _ = call
        if cost is _ONE:
            take = self._take_one  # not self._take_one(…): CPython looks that up as a method
            status = take(argument, key, size)
        else:
            status = self._take(argument, key, size, cost)
        # PERF: unpacked at once, and made a Decision by tuple.__new__: 190 ns, of which its constructor would add 150.
        values = _unpack(answer)
        pool.append(call)
        if status:
            return self._unusual(status, values)
        return _new_decision(Decision, values)

    def peek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """What `take` would say, taking nothing and writing nothing."""
        return self._decide(self._peek, policy, key, cost, now_us)

    def reset(self, policy: Policy, key: str | bytes) -> bool:
        """Forgets the key's state, so that its whole quota is there again; whether it had a live one.

        A key that took a spare slot, since the table was full, can't be reset before that state has expired: `False`.
        """
        key = key_bytes(key)
        pool, call = self._borrow(policy)
        status: int = self._reset(call[0], key, _size(key))
        pool.append(call)
        if status < 0:
            raise self._failure(status)
        return bool(status)

    def take_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """Decides on several `(policy, key, cost)` at once: if one denies, none is charged.

        The denying ones say so and the others report what they would with nothing taken. The same policy and key twice
        adds the costs up and gets the joint answer. A refusal consumes nothing, unless a
        concurrent request on the same key has built on a charge before it was given back: then that stays. Such a
        request may meanwhile be denied, and a `reset` that races a giving-back can grant the difference.
        Errors as for `take`.
        """
        joint = join(requests)
        charges = self.charge_all(joint.requests, now_us)
        if charges.stands:
            charges.keep()
        return joint.spread(charges.decisions)

    def charge_all(self, requests: list[tuple[Policy, bytes, int]], now_us: int | None = None) -> Charges:
        """Charges that can still be given back, for a store that has to decide on more than the table has."""
        now_us = None if now_us is None else _check_now(now_us)
        return Charges(self, [(policy, key, min(cost, _INT_MAX)) for policy, key, cost in requests], now_us)

    @staticmethod
    def supports(policy: Policy) -> bool:
        """Whether the table can keep `policy`: buckets that refill within ten years; fixed windows to a limit of
        524,287, or 10**9 from 4 s on; sliding counters to 511, or 16,383 from 1 s on; windows to 366 days.
        """
        return isinstance(policy, Policy) and misfit(policy) is None

    async def atake(self, policy: Policy, key: str | bytes, cost: int = 1, *, now_us: int | None = None) -> Decision:
        """`take`, which never blocks."""
        return self.take(policy, key, cost, now_us=now_us)

    async def apeek(self, policy: Policy, key: str | bytes, cost: int = 0, *, now_us: int | None = None) -> Decision:
        """`peek`, which never blocks."""
        return self.peek(policy, key, cost, now_us=now_us)

    async def atake_all(self, requests: Iterable[Request], *, now_us: int | None = None) -> list[Decision]:
        """`take_all`, which never blocks."""
        return self.take_all(requests, now_us=now_us)

    async def areset(self, policy: Policy, key: str | bytes) -> bool:
        """`reset`, which never blocks."""
        return self.reset(policy, key)

    # ---- looking at it -----------------------------------------------------------------------------------------------

    def used(self) -> int:
        """How many slots hold a state that is live now. Looks at every slot: 10 ms for a table of 10**7."""
        _, table = self._opened()
        helper = native.helper()
        return int(helper.count_live(table.keys.slots, self._slots, helper.now_us(table)))

    def stats(self) -> dict[str, int]:
        """The counters over all processes since the table was made.

        `allowed` and `denied` decisions; `shared`, those of them that were made over the state of a spare slot: the key
        found no room, or had found none before; `full`, denials for which there wasn't even a spare slot; `reclaimed`,
        expired slots that were given to another key; `contended`, swaps that were lost to another and tried again.
        """
        return layout.read_counters(self._opened()[0].mapping)

    @property
    def secret(self) -> bytes:
        """32 bytes that the processes of this table share, for `Guard(…, partition=True)`: the same while the table is
        there, also after a restart. Not the secret that keys the fingerprints.
        """
        secret = layout.read_secret(self._opened()[0].mapping)
        return hashlib.blake2b(key=secret, digest_size=32, person=b"shmlimit secret").digest()

    @property
    def slots(self) -> np.ndarray[Any, Any]:
        """A view of the live table: a structured array of shape `(slots,)` with the fields `fingerprint` and `state`
        (layout.py tells the bits). For inspection: writing through it breaks every promise. It stays valid after
        `close`.
        """
        import numpy as np

        mapping = self._opened()[0].mapping
        return np.frombuffer(mapping, layout.slot_dtype(), self._slots, layout.HEADER_BYTES)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _decide(self, function: Any, policy: Policy, key: str | bytes, cost: int, now_us: int | None) -> Decision:
        key = key_bytes(key)
        cost = min(check_cost(cost), _INT_MAX)  # above every quota: denied for good
        now = -1 if now_us is None else _check_now(now_us)
        try:
            _, pool = self._by_id[id(policy)]
            call = pool.pop()
        except (KeyError, IndexError):
            pool, call = self._borrow(policy)
        if now < 0:
            decision = self._ask(function, call, key, cost)
            pool.append(call)
            return decision
        call[2].now_us = now
        try:
            return self._ask(function, call, key, cost)
        finally:
            call[2].now_us = -1
            pool.append(call)

    def _ask(self, function: Any, call: Call, key: bytes, cost: int) -> Decision:
        status = function(call[0], key, _size(key), cost)
        values = _unpack(call[1])
        return self._unusual(status, values) if status else _new_decision(Decision, values)

    def _unusual(self, status: int, values: tuple[Any, ...]) -> Decision:
        if status < 0:
            raise self._failure(status)
        if status & native.CROWDED and not self._warned:
            self._warned = True
            log.warning(
                "the table %r is too small: a new key found none of its %d slots free. Such keys have few spare slots, "
                "and are denied when those are full. Give the table %d slots (see `shared` and `full` in stats())",
                self.name,
                self._slots,
                2 * self._slots,
            )
        if status & native.NEVER:
            allowed, limit, remaining, reset_us, _, next_us = values
            return Decision(allowed, limit, remaining, reset_us, None, next_us)
        return _new_decision(Decision, values)

    def _failure(self, status: int) -> Exception:
        if status == native.CONTENDED:
            return ContentionError(f"the table {self.name!r} lost thousands of swaps in one call; nothing was charged")
        return LayoutError(
            f"the table {self.name!r} is corrupt (remove it: python -m shmlimit rm {self.name})",
            found="a state of another kind",
            expected="one of its policy's",
        )

    def _borrow(self, policy: Policy) -> tuple[Pool, Call]:
        """A spare call for `policy` (made where there is none) and the pool that it is to be given back to."""
        pool = self._pools.get(policy) if isinstance(policy, Policy) else None
        if pool is None:
            self._check(policy)
            if len(self._pools) >= _POLICIES_MAX:  # an application with a policy for each customer
                self._pools = {}
            pool = self._pools.setdefault(policy, deque())
        if len(self._by_id) >= _POLICIES_MAX:  # one that makes its policies anew for each request
            self._by_id = {}
        self._by_id[id(policy)] = policy, pool
        if self._open_as is None:  # closed meanwhile, by another thread
            self._forget()
        try:
            return pool, pool.pop()
        except IndexError:
            return pool, self._make_call(policy)

    def _forget(self) -> None:
        self._pools, self._by_id, self._told, self._last = {}, {}, {}, _NOTHING

    def _check(self, policy: Policy) -> None:
        self._opened()  # a closed table is told first
        check_fit(policy)

    def _make_call(self, policy: Policy) -> Call:
        prepared = self._prepare(policy)
        call = native.Call(policy=ctypes.addressof(prepared), now_us=-1)
        call.keep = prepared
        begin = native.Call.allowed.offset
        answer = memoryview(call).cast("B")[begin : begin + _ANSWER.size]
        return ctypes.byref(call), answer, call

    def _prepare(self, policy: Policy) -> native.Policy:
        _, table = self._opened()
        prepared = native.Policy(table=ctypes.addressof(table), **numbers(policy)._asdict())
        prepared.keep = table
        text = identity(policy)
        native.helper().subkey(prepared, text, len(text))
        return prepared

    def _bind(self) -> Any:
        """What makes `take` a builtin, or `None`. It calls the same function of the same library as ctypes does, and
        the methods here for a policy that it hasn't seen, and for arguments and answers that are not plain.
        """
        module = native.builtins()
        if module is None or type(self).take is not SharedTable.take:
            return None
        function = ctypes.cast(self._take, ctypes.c_void_p).value
        method = MethodType(SharedTable.take, self)
        return module.Binding(function, Decision, self._tell, method, self._unusual)

    def _tell(self, policy: Policy) -> tuple[int, native.Policy]:
        """What the builtin has to know of a policy: where its `struct policy` lies, and what keeps that."""
        told = self._told.get(policy) if isinstance(policy, Policy) else None
        if told is None:
            self._check(policy)
            prepared = self._prepare(policy)
            if len(self._told) >= _POLICIES_MAX:
                self._told = {}
            told = self._told[policy] = ctypes.addressof(prepared), prepared
        if self._open_as is None:
            self._forget()
        return told


def _place(mapping: mmap, slots: int) -> native.Table:
    """Where the table lies, for the helper; keeps the mapping as long as it lives."""
    anchor = ctypes.c_char.from_buffer(mapping)
    base = ctypes.addressof(anchor)
    keys = native.Region(base + layout.HEADER_BYTES, slots // layout.BUCKET_SLOTS)
    spare = native.Region(keys.slots + slots * layout.SLOT_BYTES, layout.spare_slots(slots) // layout.BUCKET_SLOTS)
    place = native.Table(header=base, keys=keys, spare=spare)
    place.keep = anchor
    return place


def _size(key: bytes) -> int:
    size = len(key)
    if size > _INT_MAX:
        raise _too_long()
    return size


def _too_long() -> ValueError:
    return ValueError("a key has less than 1 GiB")


def _check_now(now_us: object) -> int:
    if isinstance(now_us, bool) or not isinstance(now_us, int):
        raise ValueError(f"now_us must be an integer of microseconds, not {now_us!r}")
    if not 0 <= now_us <= NOW_MAX_US:
        raise ValueError(f"now_us must be within 0 and {NOW_MAX_US} (the year 2100), not {now_us}")
    return now_us


_open_tables: weakref.WeakSet[SharedTable] = weakref.WeakSet()


def _choose_lanes_again() -> None:
    for table in list(_open_tables):
        table._choose_lane()


# A child would go on counting on its parent's line, and the two would fight for it.
os.register_at_fork(after_in_child=_choose_lanes_again)
