"""RedisStore's keys: they expire by themselves, are told apart, are taken by a cluster; and what is forgotten."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from _servers import Server
from redis.crc import key_slot

from shmlimit import ConfigError, FixedWindow, Gcra, Policy, SlidingCounter, SlidingLog, StoreError, TokenBucket
from shmlimit.stores import _redis_scripts as scripts
from shmlimit.stores.redis import RedisStore

T0 = 1_767_225_600_000_000  # 2026-01-01
S = 1_000_000
KINDS = [TokenBucket, Gcra, FixedWindow, SlidingLog, SlidingCounter]
TEN = [kind(10, 60) for kind in KINDS]


@pytest.fixture
def client(redis_server: Server) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port) as client:
        yield client


def keys_of(store: RedisStore, client: redis.Redis) -> list[bytes]:
    return sorted(client.scan_iter(f"{{{store.prefix}}}:*"))


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_every_key_expires(redis_store: RedisStore, client: redis.Redis) -> None:
    """Whatever is written has an expiry: a few milliseconds after the state's own, never before it; a minute after it
    where the time was given.
    """
    for kind in KINDS:
        for policy in (kind(10, 60), kind(10**9, 10**9), kind(7, 3600)):
            redis_store.take(policy, "k", 3)
            redis_store.take_all([(policy, "l", 1)])
            redis_store.take(policy, "given", now_us=T0)
            plan = redis_store._plan(policy)
            for key in (b"k", b"l"):
                reply = redis_store._lines.ask(scripts.take(plan, key, 0, None, charges=False))
                state, _ = plan.found(reply.split()[1:], None)
                expires_us = plan.engine.expires_at(state or {})
                assert expires_us < client.pexpiretime(plan.key(key)) * 1000 <= expires_us + 12_000
            window_ms = policy.window_us // 1000 + 1
            assert 50_000 < client.pttl(plan.key(b"given")) <= 2 * window_ms + 61_000
    for policy in TEN:
        for now_us in (T0 + 10**9 * S, 10**18 - 1, 0):
            redis_store.take(policy, "far", now_us=now_us)
    left_ms = [client.pttl(key) for key in keys_of(redis_store, client)]
    assert len(left_ms) > 60
    assert min(left_ms) > 0


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_key_is_gone_when_its_state_has_expired(redis_store: RedisStore, client: redis.Redis, policy: Policy) -> None:
    """Nothing is left of a key that nobody asks about any more."""
    brief = type(policy)(2, 0.1)
    redis_store.take(brief, "k", 2)
    until = time.monotonic() + 10
    while keys_of(redis_store, client):
        assert time.monotonic() < until


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_key_without_expiry_gets_one(redis_store: RedisStore, client: redis.Redis, policy: Policy) -> None:
    """Somebody took a key's expiry away: a charge gives it one again, and so does a denial, alone or with others."""
    asks: list[Callable[[], Any]] = [
        lambda: redis_store.take(policy, "k", 5),
        lambda: redis_store.take(policy, "k", 8),
        lambda: redis_store.take_all([(policy, "k", 8), (policy, "other", 1)]),
        lambda: redis_store.take_all([(policy, "k", 1), (policy, "other", 11)]),
    ]
    asks[0]()
    (key,) = keys_of(redis_store, client)
    for ask in asks[1:3]:
        assert client.persist(key)
        ask()
        assert 0 < client.pttl(key) <= 121_000
    client.persist(key)
    redis_store.peek(policy, "k", 8)
    asks[3]()
    assert client.pttl(key) == -1  # a look writes nothing, and what never fits is a look
    redis_store.take(policy, "k")
    assert 0 < client.pttl(key) <= 121_000


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_denial_writes_nothing(redis_store: RedisStore, client: redis.Redis, policy: Policy) -> None:
    """Neither the value nor the expiry of a key changes when it is refused, reported on, or asked for too much."""
    redis_store.take(policy, "k", 10, now_us=T0)
    before = {key: (client.dump(key), client.pexpiretime(key)) for key in keys_of(redis_store, client)}
    assert not redis_store.take(policy, "k", now_us=T0).allowed
    assert redis_store.take(policy, "k", 11, now_us=T0).retry_after_us is None
    redis_store.take(policy, "k", 0, now_us=T0)
    redis_store.take_all([(policy, "k", 0), (policy, "new", 0)], now_us=T0)
    redis_store.take_all([(policy, "new", 1), (policy, "k", 1)], now_us=T0)
    redis_store.peek(policy, "new", 1, now_us=T0)
    assert {key: (client.dump(key), client.pexpiretime(key)) for key in keys_of(redis_store, client)} == before


def test_keys_are_told_apart(redis_store: RedisStore, client: redis.Redis) -> None:
    """Any bytes, any length; a key that looks like the hash of another, a mark or another policy's is none of them."""
    long = b"x" * 65
    hashed = hashlib.blake2b(long, digest_size=20).hexdigest().encode()
    once = TokenBucket(1, 3600)
    keys = [
        *(b"", b"\0", b"\r\n", b" ", b"=", b"!", b"#", b"#" + hashed, hashed, b"=k", b"k", b"}{", b"\xff\xfe"),
        *(b"x" * 64, long, long + b"y", b"y" * 100_000, b"y" * 99_999 + b"z", b"1=k", b"1:3600000000:1=k"),
    ]
    assert [redis_store.take(once, key).allowed for key in keys] == [True] * len(keys)
    assert [redis_store.take(once, key).allowed for key in keys] == [False] * len(keys)
    assert len(keys_of(redis_store, client)) == len(keys)
    assert max(map(len, keys_of(redis_store, client))) < 150


def test_policies_are_told_apart(redis_store: RedisStore, client: redis.Redis) -> None:
    """Every kind and every number makes a key of its own, a token bucket and its `as_gcra` among them."""
    others = [*TEN, TokenBucket(10, 61), TokenBucket(10, 60, 11), TokenBucket(11, 60, 10), Gcra(10, 60, 11)]
    assert [redis_store.take(policy, "k").remaining for policy in others] == [policy.quota - 1 for policy in others]
    assert len(keys_of(redis_store, client)) == len(others)


def test_stores_with_other_prefixes_are_apart(redis_server: Server, redis_store: RedisStore) -> None:
    """One server, two prefixes, two counts; the same prefix, one."""
    with RedisStore(redis_server.url, prefix=redis_store.prefix + "x") as other:
        assert [store.take(TEN[0], "k").remaining for store in (redis_store, other, redis_store)] == [9, 9, 8]
    with RedisStore(redis_server.url, prefix=redis_store.prefix) as same:
        assert same.take(TEN[0], "k").remaining == 7


def test_all_keys_have_one_slot(redis_store: RedisStore, client: redis.Redis) -> None:
    """All keys of a store, marks among them, are in one slot of a cluster, also keys with braces in them."""
    requests = [(policy, key, 1) for policy in TEN for key in ("a", "{b}", "}{", "c" * 100)]
    redis_store.take_all(requests, now_us=T0)
    redis_store.take_all(requests)
    keys = keys_of(redis_store, client)
    assert len(keys) == 25
    assert {key_slot(key) for key in keys} == {key_slot(redis_store.prefix.encode())}


def test_cluster_takes_several_keys(
    own_server: Any, redis_kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A node in cluster mode accepts every script; one without the slot is an error that says where to ask."""
    monkeypatch.chdir(tmp_path)  # it writes nodes.conf
    monkeypatch.setattr(Server, "_command", _in_cluster(Server._command))
    server = own_server(redis_kind)
    with redis.Redis(port=server.port) as client, RedisStore(server.url, prefix="mine") as store:
        slot = key_slot(b"mine")
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, slot - 1, slot + 1, 16_383)
        with pytest.raises(StoreError, match=r"can't answer: .*CLUSTERDOWN|can't answer: .*Hash slot not served"):
            store.take(TEN[0], "k")
        client.execute_command("CLUSTER", "ADDSLOTS", slot)
        until_up(client)
    with RedisStore(server.url, prefix="mine") as store:
        for given_us in (None, T0):
            answer = store.take_all([(policy, key, 1) for policy in TEN for key in ("k", "l")], now_us=given_us)
            assert [one.remaining for one in answer] == [9] * 10
            assert [store.take(policy, "m", now_us=given_us).remaining for policy in TEN] == [9] * 5
            assert all(store.reset(policy, key) or given_us for policy in TEN for key in ("k", "l", "m"))


def until_up(client: redis.Redis) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"):
            return
    pytest.fail("the cluster didn't come up")


def _in_cluster(command: Callable[[Server, int], list[str]]) -> Callable[[Server, int], list[str]]:
    return lambda server, port: [*command(server, port), "--cluster-enabled", "yes"]


def test_broken_state_and_wrong_type_are_one_keys_trouble(redis_store: RedisStore, client: redis.Redis) -> None:
    """A key that somebody else wrote is a StoreError that says what to do, each time; other keys go on."""
    for policy in TEN:
        redis_store.take(policy, "k")
        (key,) = client.scan_iter(f"{redis_store._plan(policy).head.decode()}=*")
        for spoil, says in [
            (lambda k=key: client.sadd(k, "x"), "prefix"),
            (lambda k=key: spoiled(client, k), "is broken"),
        ]:
            client.delete(key)
            spoil()
            for _ in range(2):
                with pytest.raises(StoreError, match=says):
                    redis_store.take(policy, "k")
                with pytest.raises(StoreError, match=says):
                    redis_store.take_all([(policy, "fine", 1), (policy, "k", 1)])
            assert redis_store.peek(policy, "fine").remaining == 10
        client.delete(key)


def spoiled(client: redis.Redis, key: bytes) -> None:
    if b":l:" in key:
        client.rpush(key, "nonsense")
    else:
        client.set(key, "nonsense")


# ---- forgetting, by a clock that is not the caller's -----------------------------------------------------------------


@pytest.mark.parametrize("policy", TEN, ids=str)
def test_what_was_forgotten_is_not_judged_earlier(redis_store: RedisStore, client: redis.Redis, policy: Policy) -> None:
    """A spent key that the server has forgotten is fresh as of when it expired by the caller's clock, and no earlier;
    every answer says so from the time that was asked for.
    """
    redis_store.take(policy, "live", 3, now_us=T0)
    _spend_and_forget(redis_store, client, policy, T0)
    assert redis_store.peek(policy, "live", 1, now_us=T0) == policy.simulate([(T0, 3), (T0, 1)])[1]
    expiry_us = policy.expires_at(policy.decide(None, T0, 10)[1])
    wanted = policy.decide(None, expiry_us, 1)[0]
    lead_us = expiry_us - T0
    wanted = wanted._replace(reset_us=wanted.reset_us + lead_us, next_us=wanted.next_us + lead_us)
    assert redis_store.peek(policy, "k", 1, now_us=T0) == wanted
    assert redis_store.take_all([(policy, "other", 1), (policy, "third", 0)], now_us=T0)[0] == wanted
    assert redis_store.take(policy, "k", 1, now_us=T0) == wanted
    assert sum(redis_store.take(policy, "k", now_us=T0).allowed for _ in range(20)) <= 9
    never = redis_store.take(policy, "new", 11, now_us=T0)
    assert (never.retry_after_us, never.reset_us, never.next_us, never.remaining) == (None, 0, 0, 10)
    later = expiry_us + 1
    assert redis_store.peek(policy, "fourth", 1, now_us=later) == policy.decide(None, later, 1)[0]
    assert redis_store.peek(policy, "fourth", 1).reset_us <= 2 * 60 * S  # the server's own time is never raised


def test_state_is_forgotten_as_of_a_whole_microsecond(redis_store: RedisStore, client: redis.Redis) -> None:
    """A state that expires at a fraction of a microsecond counts as forgotten as of the next one."""
    policy = Gcra(7, 60)
    _spend_and_forget(redis_store, client, policy, T0, 5)
    expiry_us = policy.expires_at(policy.decide(None, T0, 5)[1])
    assert expiry_us * 7 > (T0 + 5 * 60 * S // 7) * 7
    assert (
        redis_store.peek(policy, "k", 1, now_us=T0).reset_us == expiry_us - T0 + policy.decide(None, T0, 1)[0].reset_us
    )


def _spend_and_forget(store: RedisStore, client: redis.Redis, policy: Policy, now_us: int, cost: int = 10) -> None:
    """Has the server forget a key as it does by itself, without the wait for it."""
    assert store.take(policy, "k", cost, now_us=now_us).allowed
    plan = store._plan(policy)
    client.delete(plan.key(b"k"))
    steps = [step.split() for step in client.get(plan.head + b"!").split(b",")]
    client.set(plan.head + b"!", b",".join(b"1 " + b" ".join(step[1:]) for step in steps), px=10**6)


def test_reset_is_no_forgetting(redis_store: RedisStore) -> None:
    """A key that was reset is fresh as of any time."""
    for policy in TEN:
        redis_store.take(policy, "k", 10, now_us=T0)
        redis_store.reset(policy, "k")
        assert redis_store.take(policy, "k", 10, now_us=T0 - S).allowed


@pytest.mark.parametrize("rising", [True, False], ids=["rising", "any order"])
def test_steps_are_few_and_on_the_safe_side(redis_store: RedisStore, client: redis.Redis, *, rising: bool) -> None:
    """However many charges come with a given time, at most 32 steps stand for them, and each charge has one that comes
    no later than its key goes and counts for no less than its expiry.
    """
    policy = Gcra(1, 1, 200)
    mark = redis_store._plan(policy).head + b"!"
    charged = []
    for i in range(1, 201):
        cost, now_us = (i, T0 + i * S) if rising else (1 + i * i % 200, T0 + i * i % 97 * 10 * S)
        assert redis_store.take(policy, f"key {i}", cost, now_us=now_us).allowed
        charged.append((client.pexpiretime(redis_store._plan(policy).key(b"key %d" % i)), now_us + cost * S))
    steps = [[int(part) for part in step.split()] for step in client.get(mark).split(b",")]
    expiries = [seconds * S + us for _, seconds, us in steps]
    assert len(steps) == 32 if rising else 1 < len(steps) <= 32
    assert steps == sorted(steps)
    assert expiries == sorted(set(expiries))
    for goes_ms, expires_us in charged:
        assert any(at <= goes_ms and expiry >= expires_us for (at, _, _), expiry in zip(steps, expiries, strict=True))
    assert 29 * 86_400_000 < client.pttl(mark) <= 31 * 86_400_000


def test_steps_that_have_come_are_one(redis_store: RedisStore, client: redis.Redis) -> None:
    """Of those whose keys are gone the latest counts, and so the others make no room scarce for what is to come."""
    policy = Gcra(1, 1, 200)
    mark = redis_store._plan(policy).head + b"!"
    client.set(mark, b",".join(b"%d %d 0" % (number, number) for number in range(1, 31)))
    assert redis_store.take(policy, "k", now_us=T0).allowed
    come, to_come = client.get(mark).split(b",")
    assert come == b"30 30 0"
    assert to_come.endswith(b" %d 0" % (T0 // S + 1))


# ---- bad arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "a b", "{a}", "a}", "ä", "x" * 65, "a\n", b"a", None], ids=repr)
def test_bad_prefix_is_refused(prefix: Any) -> None:
    """A prefix is 1 to 64 printable ASCII characters without braces or blanks."""
    with pytest.raises(ConfigError, match="prefix must be"):
        RedisStore("redis://localhost", prefix=prefix)


@pytest.mark.parametrize("timeout", [0, -1, True, None, "1", float("nan"), float("inf"), 3601], ids=repr)
def test_bad_timeout_is_refused(timeout: Any) -> None:
    """A timeout is a number of seconds."""
    with pytest.raises(ConfigError, match="timeout must be"):
        RedisStore("redis://localhost", timeout=timeout)


def test_policies_of_others_are_refused(redis_store: RedisStore) -> None:
    """A policy that Lua doesn't know isn't run as the one that it derives from."""

    class Strict(FixedWindow):
        pass

    assert redis_store.supports(TEN[0])
    assert not redis_store.supports(Strict(1, 1))
    assert not redis_store.supports("10/minute")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="own policies"):
        redis_store.take(Strict(1, 1), "k")
    with pytest.raises(ConfigError, match="takes policies"):
        redis_store.take("10/minute", "k")  # type: ignore[arg-type]


def test_plans_are_bounded(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that are made anew for each request don't pile up, and their counts go on."""
    monkeypatch.setattr("shmlimit.stores.redis._MOST_PLANS", 10)
    for number in range(1, 50):
        assert redis_store.take(TokenBucket(number, 3600), "k").remaining == number - 1
        assert len(redis_store._plans) <= 10
    assert redis_store.take(TokenBucket(5, 3600), "k").remaining == 3
