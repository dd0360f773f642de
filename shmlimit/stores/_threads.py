"""The threads in which stores that block answer an event loop: a few for each store, and for nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_T = TypeVar("_T")

THREADS = 8
"""At most, for a store in a process. More calls at once wait for one of them."""


class Threads:
    """Up to `THREADS` threads, started as they are needed, and anew after a fork.

    Not the event loop's own (`asyncio.to_thread`): those serve everything else in the process, name lookups too, and a
    store that waits for a lock would have all of them.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._executor: ThreadPoolExecutor

    async def run(self, method: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """What the method returns or raises. Cancelled, a call that has begun goes on, but nobody waits for it."""
        import asyncio  # late: 30 ms that only async servers need

        call = partial(copy_context().run, method, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._pool(), call)

    def _pool(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():  # a fork leaves the threads behind
            from concurrent.futures import ThreadPoolExecutor

            self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="shmlimit")
            self._pid = os.getpid()
        return self._executor


_of_store: WeakKeyDictionary[object, Threads] = WeakKeyDictionary()
_of_others = Threads()  # of stores that no weak reference can be made to, or that have no hash
_making = threading.Lock()
os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


def threads_of(store: object) -> Threads:
    """The store's threads; they end when nobody has the store any more."""
    try:
        found = _of_store.get(store)
        if found is None:
            with _making:
                found = _of_store.setdefault(store, Threads())
    except TypeError:
        return _of_others
    return found
