"""The cost of a decision in memcached, what a hot key does to it, and an outage in figures.

    python bench/memcached.py [rounds]

A hundred keys in turn, one process, one server on the same machine. What a decision has to pay for is the way to the
server: a `gets` for a denial, a `cas` on top for a charge; the bare lines do just these, with pymemcache. `limits` has
a fixed window for memcached, which is one `incr` (and once a window an `add` that makes the counter) also where it
denies; what is left and until when is another trip (`get_window_stats`), so the lines with it do what a decision here
does.

Then processes that do nothing but decide on one key: each lost swap is two trips more for somebody. And a server that
is killed, or stopped (SIGSTOP: it takes connections and answers nothing), for a while, and what a `FallbackStore` makes
of that.
"""

from __future__ import annotations

import multiprocessing
import secrets
import statistics
import sys
import time
from collections import Counter
from typing import Any

from _rounds import Contender, interleave, machine, publish, ratios, spread
from _servers import Server, running
from limits import RateLimitItemPerHour
from limits.storage import MemcachedStorage
from limits.strategies import FixedWindowRateLimiter
from pymemcache.client.base import Client

from shmlimit import ContentionError, FixedWindow, Gcra, SharedTable, StoreError, TokenBucket
from shmlimit.stores.fallback import FallbackStore
from shmlimit.stores.memcached import MemcachedStore

N = 400
KEYS = [f"ip:203.0.113.{i}" for i in range(100)]
DAY = 86_400
OPEN, SPENT = FixedWindow(10**9, DAY), FixedWindow(1, DAY)
BUCKET, EMPTY, MORE = TokenBucket(10**9, DAY), TokenBucket(1, 10**6), Gcra(10**9, DAY)
HOT = FixedWindow(10**9, 10**9)
TAKEN, DENIED, PEEKED = "fixed window, allowed", "fixed window, denied", "fixed window, `peek`"
BUCKET_TAKEN, BUCKET_DENIED, BOTH = "token bucket, allowed", "token bucket, denied", "`take_all` of two, allowed"
LIMITS, LIMITS_DENIED = "`limits`, fixed window, allowed", "`limits`, fixed window, denied"
LIMITS_STATS, LIMITS_DENIED_STATS = f"{LIMITS}, and the rest", f"{LIMITS_DENIED}, and the rest"
BARE, BARE_READ = "bare pymemcache: `gets`, `cas`", "bare pymemcache: `gets`"
AGAINST = {
    TAKEN: LIMITS_STATS,
    DENIED: LIMITS_DENIED_STATS,
    BUCKET_TAKEN: LIMITS_STATS,
    BUCKET_DENIED: LIMITS_DENIED_STATS,
}
SECONDS = 3.0
OUTAGES_S = (0.5, 0.5, 0.5, 5.0)


def contenders(server: Server, store: MemcachedStore) -> list[Contender]:
    limiter = FixedWindowRateLimiter(MemcachedStorage(server.url))
    allowing, denying = RateLimitItemPerHour(10**9, 24), RateLimitItemPerHour(1, 24)
    client = Client(("127.0.0.1", server.port), no_delay=True)
    value = b'{"kind":"fixed","start_us":1767225600000000,"count":12345}'
    for key in KEYS:
        client.set(key, value, expire=DAY, noreply=False)
        store.take(SPENT, key)
        store.take(EMPTY, key)
        limiter.hit(denying, key)

    def each(call: Any) -> Any:
        def run(n: int) -> None:
            for key in (KEYS * (n // len(KEYS) + 1))[:n]:
                call(key)

        return run

    def hit_and_see(item: Any) -> Any:
        def call(key: str) -> None:
            limiter.hit(item, key)
            limiter.get_window_stats(item, key)

        return call

    def bare(key: str) -> None:
        _, unique = client.gets(key)
        client.cas(key, value, unique, expire=DAY, noreply=False)

    return [
        Contender(TAKEN, each(lambda key: store.take(OPEN, key))),
        Contender(DENIED, each(lambda key: store.take(SPENT, key))),
        Contender(PEEKED, each(lambda key: store.peek(OPEN, key))),
        Contender(BUCKET_TAKEN, each(lambda key: store.take(BUCKET, key))),
        Contender(BUCKET_DENIED, each(lambda key: store.take(EMPTY, key))),
        Contender(BOTH, each(lambda key: store.take_all([(BUCKET, key, 1), (MORE, key, 1)]))),
        Contender(LIMITS, each(lambda key: limiter.hit(allowing, key))),
        Contender(LIMITS_DENIED, each(lambda key: limiter.hit(denying, key))),
        Contender(LIMITS_STATS, each(hit_and_see(allowing))),
        Contender(LIMITS_DENIED_STATS, each(hit_and_see(denying))),
        Contender(BARE, each(bare)),
        Contender(BARE_READ, each(client.gets)),
    ]


def decide(url: str, barrier: Any, results: Any) -> None:
    """How many decisions took how many swaps; 0 stands for the ones given up."""
    tries: Counter[int] = Counter()
    with MemcachedStore(url) as store:
        put, swaps = store._server.put, 0

        def counted(*arguments: Any) -> bool:
            nonlocal swaps
            swaps += 1
            return put(*arguments)

        store._server.put = counted  # type: ignore[method-assign]
        store.peek(HOT, "hot")
        barrier.wait()
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            swaps = 0
            try:
                store.take(HOT, "hot")
            except ContentionError:
                swaps = 0
            tries[swaps] += 1
    results.put(tries)


def together(url: str, workers: int) -> str:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(workers), context.Queue()
    processes = [context.Process(target=decide, args=(url, barrier, results)) for _ in range(workers)]
    for process in processes:
        process.start()
    tries: Counter[int] = sum((results.get() for _ in processes), Counter())
    for process in processes:
        process.join()
    total = tries.total()
    lost = sum((swaps - 1) * number for swaps, number in tries.items() if swaps)
    with MemcachedStore(url) as store:
        counted = HOT.quota - store.peek(HOT, "hot").remaining
        store.reset(HOT, "hot")
    late = sorted(tries.elements())[int(total * 0.999)]
    return (
        f"| {workers} | {total / SECONDS:,.0f} | {lost / total:.2f} | {late} | {max(tries)} | {tries[0]} | "
        f"{total - tries[0]:,} | {counted:,} |"
    )


def outage(store: MemcachedStore, stop: Any, go_on: Any, seconds: float) -> tuple[float, list[float], float]:
    """Seconds: of the first failure, of each later one while the server was away, and from its return to an answer."""
    store.take(HOT, "k")
    stop()
    begin = time.perf_counter()
    first = failure(store)
    later = []
    while time.perf_counter() < begin + seconds:
        later.append(failure(store))
        time.sleep(0.001)
    assert all((first, *later)), "the server is away, and answers"
    go_on()
    back = time.perf_counter()
    while failure(store):
        time.sleep(0.001)
    return first, later, time.perf_counter() - back


def failure(store: MemcachedStore) -> float:
    """How long it took to fail; 0 if it didn't."""
    begin = time.perf_counter()
    try:
        store.take(HOT, "k")
    except StoreError:
        return time.perf_counter() - begin
    return 0.0


def outages() -> list[str]:
    lines = []
    for what, stop, go_on in (("killed", "kill", "start"), ("paused", "pause", "resume")):
        for seconds in OUTAGES_S:
            with running("memcached") as server, MemcachedStore(server.url) as store:
                first, later, back = outage(store, getattr(server, stop), getattr(server, go_on), seconds)
            lines.append(
                f"| {what} | {seconds:.1f} s | {first * 1e3:,.1f} ms | {statistics.median(later) * 1e6:,.1f} µs | "
                f"{max(later) * 1e3:,.1f} ms | {back:,.2f} s |"
            )
    return lines


def through_fallback(rounds: int) -> list[str]:
    """A table alone, and behind a memcached that answers, and one that is known to be down."""
    name = f"shmlimit-bench-{secrets.token_hex(4)}"
    with running("memcached") as server, SharedTable.create(name) as table:
        with MemcachedStore(server.url) as there, MemcachedStore(server.url) as gone:
            server.kill()
            failure(gone)
            server.start()
            # Not for the length of this: it would be tried again, and found.
            gone._server._breaker._clock = lambda: 0.0
            behind, instead = FallbackStore(there, table), FallbackStore(gone, table)

            def each(store: Any) -> Any:
                def run(n: int) -> None:
                    for key in (KEYS * (n // len(KEYS) + 1))[:n]:
                        store.take(BUCKET, key)

                return run

            stores = {
                "the table alone": table,
                "memcached alone": there,
                "`FallbackStore`, memcached answers": behind,
                "`FallbackStore`, memcached is known to be down": instead,
            }
            figures = interleave([Contender(what, each(store)) for what, store in stores.items()], rounds=rounds, n=N)
            assert instead.stats()["primary"] == behind.stats()["secondary"] == 0
        table.unlink()
    return [f"| {what} | {spread([value / 1000 for value in values], 1)} |" for what, values in figures.items()]


def main(rounds: int) -> None:
    with running("memcached") as server, MemcachedStore(server.url) as store:
        figures = interleave(contenders(server, store), rounds=rounds, n=N)
        hot = [together(server.url, workers) for workers in (1, 2, 4, 8)]
    lines = [
        "# One decision in memcached",
        "",
        f"{machine('shmlimit', 'pymemcache', 'limits')}; {rounds} rounds of {N:,}. Median (middle half).",
        "",
        "| | µs per call | a second | ÷ bare `gets` | ÷ `limits` with the rest |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, values in figures.items():
        bare = spread(ratios(figures, name, BARE_READ), 2)
        against = spread(ratios(figures, name, AGAINST[name]), 2) if name in AGAINST else ""
        a_second = f"{1e9 / statistics.median(values):,.0f}"
        lines.append(f"| {name} | {spread([value / 1000 for value in values], 1)} | {a_second} | {bare} | {against} |")
    lines += [
        "",
        "“The rest” is what is left, and until when: what a decision says anyhow.",
        "",
        f"Processes that do nothing but decide on one key, for {SECONDS:.0f} s. Given up is a `ContentionError`:",
        "",
        "| processes | decisions/s | lost swaps a decision | swaps, 99.9 % | most | given up | allowed | counted |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
        *hot,
        "",
        "A server that goes away under one process (timeout 0.25 s). Later failures are known ones, but for the probes",
        "after 1, 2, 4 … s, of which the longest is one where there was one:",
        "",
        "| server | away for | first failure | later ones, median | the longest | back after its return |",
        "|---|---:|---:|---:|---:|---:|",
        *outages(),
        "",
        "With the host's table as the second store, one process:",
        "",
        "| | µs per call |",
        "|---|---:|",
        *through_fallback(rounds),
    ]
    publish("memcached.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
