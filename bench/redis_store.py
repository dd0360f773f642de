"""The cost of a decision in Redis or Valkey, beside other libraries on the same server, and what an outage costs.

    python bench/redis_store.py [rounds]

Every contender decides on a hundred keys in turn, over one connection, and so do its denials, on keys that are spent.
`limits` says whether it allowed, and nothing else; what the fields of a response need is a second call, and a row of
its own. `throttled-py` answers with remaining, reset and retry. Ours are all six fields of a decision.

The second part kills the server, and stops it (SIGSTOP), and looks at what calls cost then.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, NamedTuple

import limits
import limits.aio.storage
import limits.aio.strategies
import limits.storage
import limits.strategies
import redis
import throttled
import throttled.asyncio
from _rounds import Contender, interleave, machine, publish, ratios, spread
from _servers import Server, running

from shmlimit import FixedWindow, Gcra, Policy, SlidingCounter, SlidingLog, StoreError, TokenBucket
from shmlimit.stores.redis import RedisStore

N = 200
KEYS = [f"ip:203.0.113.{i}" for i in range(100)]
DAY = 86_400
OPEN, SPENT = 1_000_000, 1
OUTAGES = 5

OURS, LIMITS, STATS, THROTTLED = "shmlimit", "limits", "limits, with what the fields need", "throttled-py"


class Algorithm(NamedTuple):
    """What it is called here and there; `None` where it isn't there."""

    name: str
    ours: type[Policy]
    limits: str | None
    throttled: throttled.RateLimiterType | None


ALGORITHMS = [
    Algorithm("fixed window", FixedWindow, "FixedWindowRateLimiter", throttled.RateLimiterType.FIXED_WINDOW),
    Algorithm(
        "sliding counter", SlidingCounter, "SlidingWindowCounterRateLimiter", throttled.RateLimiterType.SLIDING_WINDOW
    ),
    Algorithm("sliding log", SlidingLog, "MovingWindowRateLimiter", None),
    Algorithm("token bucket", TokenBucket, None, throttled.RateLimiterType.TOKEN_BUCKET),
    Algorithm("GCRA", Gcra, None, throttled.RateLimiterType.GCRA),
]


def each_key(take: Callable[[str], object]) -> Callable[[int], None]:
    def run(n: int) -> None:
        for i in range(n):
            take(KEYS[i % len(KEYS)])

    return run


def each_key_awaited(
    loop: asyncio.AbstractEventLoop, take: Callable[[str], Coroutine[Any, Any, object]]
) -> Callable[[int], None]:
    async def run(n: int) -> None:
        for i in range(n):
            await take(KEYS[i % len(KEYS)])

    return lambda n: loop.run_until_complete(run(n))


def quota_of(limit: int) -> throttled.Quota:
    return throttled.rate_limiter.per_duration(timedelta(days=1), limit, limit)


def contenders(server: Server, store: RedisStore, algorithm: Algorithm, limit: int) -> list[Contender]:
    policy = algorithm.ours(limit, DAY)
    found = [Contender(OURS, each_key(lambda key: store.take(policy, key)))]
    if algorithm.limits:
        strategy = getattr(limits.strategies, algorithm.limits)(limits.storage.RedisStorage(server.url))
        item = limits.RateLimitItemPerDay(limit)
        found.append(Contender(LIMITS, each_key(lambda key: strategy.hit(item, key))))

        def hit(key: str) -> tuple[bool, object]:
            return strategy.hit(item, key), strategy.get_window_stats(item, key)

        found.append(Contender(STATS, each_key(hit)))
    if algorithm.throttled:
        other = throttled.Throttled(
            using=algorithm.throttled.value, quota=quota_of(limit), store=throttled.RedisStore(server=server.url)
        )
        found.append(Contender(THROTTLED, each_key(other.limit)))
    return found


def awaited(
    server: Server, store: RedisStore, loop: asyncio.AbstractEventLoop, algorithm: Algorithm, limit: int
) -> list[Contender]:
    policy = algorithm.ours(limit, DAY)
    found = [Contender(OURS, each_key_awaited(loop, lambda key: store.atake(policy, key)))]
    if algorithm.limits:
        storage = limits.aio.storage.RedisStorage(f"async+{server.url}", implementation="redispy")
        strategy = getattr(limits.aio.strategies, algorithm.limits)(storage)
        item = limits.RateLimitItemPerDay(limit, namespace="ASYNC")
        found.append(Contender(LIMITS, each_key_awaited(loop, lambda key: strategy.hit(item, key))))
    if algorithm.throttled:
        other = throttled.asyncio.Throttled(
            using=algorithm.throttled.value,
            quota=quota_of(limit),
            store=throttled.asyncio.RedisStore(server=server.url),
        )
        found.append(Contender(THROTTLED, each_key_awaited(loop, other.limit)))
    return found


def rows(kind: str, rounds: int, make: Callable[..., list[Contender]], *arguments: Any) -> list[str]:
    lines = []
    for algorithm in ALGORITHMS:
        for word, limit in (("allowed", OPEN), ("denied", SPENT)):
            redis.Redis.from_url(arguments[0].url).flushall()  # limits keeps what two strategies count under one key
            figures = interleave(make(*arguments, algorithm, limit), rounds=rounds, n=N)
            for name, values in figures.items():
                median = statistics.median(values)
                beside = "" if name == OURS else spread(ratios(figures, OURS, name), 2)
                lines.append(
                    f"| {kind} | {algorithm.name}, {word} | {name} | {spread([value / 1000 for value in values], 1)} | "
                    f"{1e9 / median:,.0f} | {beside} |"
                )
    return lines


# ---- outages ---------------------------------------------------------------------------------------------------------


def outage(server: Server, begin: Callable[[], None], end: Callable[[], None]) -> tuple[float, float, float]:
    """Seconds: the first call that failed, the median of those that failed after it, and from the server's being back
    to the first answer.
    """
    policy = TokenBucket(OPEN, DAY)
    with RedisStore(server.url) as store:
        store.take(policy, "k")
        begin()
        waits = []
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until or len(waits) < 100:
            asked = time.perf_counter()
            try:
                store.take(policy, "k")
                raise AssertionError("the server is down")
            except StoreError:
                waits.append(time.perf_counter() - asked)
        end()
        back = time.perf_counter()
        while True:
            try:
                store.take(policy, "k")
                return waits[0], statistics.median(waits[1:]), time.perf_counter() - back
            except StoreError:  # noqa: PERF203 - goes on
                time.sleep(0.001)


def outages(kind: str) -> list[str]:
    lines = []
    with running(kind) as server:
        for name, begin, end in (
            ("killed, and started again", server.kill, server.start),
            ("stopped (SIGSTOP), and continued", server.pause, server.resume),
        ):
            first, later, recovery = zip(*(outage(server, begin, end) for _ in range(OUTAGES)), strict=True)
            at_first, then = statistics.median(first) * 1e3, statistics.median(later) * 1e6
            back = f"{statistics.median(recovery):.2f} s ({min(recovery):.2f}–{max(recovery):.2f})"
            lines.append(f"| {kind} | {name} | {at_first:,.1f} ms | {then:,.1f} µs | {back} |")
    return lines


def main(rounds: int) -> None:
    head = ["| | | | µs per decision | a second | shmlimit ÷ this |", "|---|---|---|---:|---:|---:|"]
    lines = []
    for kind in ("valkey", "redis"):
        with running(kind) as server, RedisStore(server.url) as store:
            lines += rows(kind, rounds, contenders, server, store)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with running("valkey") as server, RedisStore(server.url) as store:
        in_loop = rows("valkey", rounds, awaited, server, store, loop)
        loop.run_until_complete(store.aclose())
    where = machine("shmlimit", "redis", "limits", "throttled-py")
    text = [
        "# One decision in Redis or Valkey",
        "",
        f"{where}; server on the same machine; {rounds} interleaved rounds of {N}. Median (middle half).",
        "",
        *head,
        *lines,
        "",
        "In an event loop, one call after the other:",
        "",
        *head,
        *in_loop,
        "",
        f"An outage, median of {OUTAGES}; `timeout` is 0.25 s. The first probe comes after 0.8 to 1.2 s:",
        "",
        "| | the server is | first failure | later failures | first answer after it is back |",
        "|---|---|---:|---:|---:|",
        *(line for kind in ("valkey", "redis") for line in outages(kind)),
    ]
    publish("redis.md", "\n".join(text) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
