"""The contract of stores: what every one of them promises, as tests that run over any."""

from __future__ import annotations

from shmlimit.testing._decisions import Decisions
from shmlimit.testing._joint import Joint
from shmlimit.testing._keys import Keys
from shmlimit.testing._together import Together
from shmlimit.testing._written import Written


class StoreContract(Decisions, Written, Keys, Joint, Together):
    """Tests of everything that the `Store` protocol promises. Needs pytest and hypothesis.

        from shmlimit.testing import StoreContract

        class TestMyStore(StoreContract):
            make_store = MyStore

    `make_store()` makes a new, empty store, and is called at least once a test (it may be a method; fixtures of the
    class, such as an `autouse` one that keeps `tmp_path` in `self`, work as ever). A store is closed after its test.
    What it says it doesn't do (`supports`, no `take_all`, no `__enter__`) is left out. Most tests set the time, so
    `now_us` must work. More may be said of a store, and all of it has a default:

    - `discard(store)`: be done with one; by default `store.close()`.
    - `kept(store)`: all that it keeps, as anything that can be compared. Refusals and `peek` must leave it as it is;
      without it (`None`) they must at least not be seen by later calls.
    - `opener(store)`: for a store that processes share, what opens the same one in another process: a callable that can
      be pickled, such as `functools.partial(SqliteStore, path)`. Four processes then hit one key. `None`: it is this
      process's own.
    - `forgets(policy) -> bool`: whether every charge removes all states of such policies that have expired by its
      `now_us`. They must then not be judged as of an earlier time.
    - `exact(policy) -> bool`: false where the store runs a policy that it supports by rounded numbers.
    - `latest_us`: the latest `now_us` that it takes, 10**18 by default; one more must be a `ValueError`.
    - `lasts_us`: for a store that forgets by a clock of its own, whatever `now_us` says, as servers with an expiry do:
      how many microseconds it keeps a state longer than until its expiry. Tests then give up where a state may be gone
      that they would need. `None`: it forgets by `now_us` only.
    - `patience_s`: how long threads and processes may take before the test fails, 60 s by default.
    """
