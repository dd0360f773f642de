"""RedisStore and replies out of the ordinary: of one key, of every key, of no server at all, and very long ones."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import redis
from _servers import Server

from shmlimit import FixedWindow, Gcra, SlidingCounter, SlidingLog, StoreError, TokenBucket
from shmlimit.stores import _redis_scripts as scripts
from shmlimit.stores._breaker import Outage
from shmlimit.stores.redis import RedisStore
from tests.stores.trouble import answering

TEN = TokenBucket(10, 3600)
FAR = b"9" * 30


def asks(store: RedisStore) -> list[Callable[[], Any]]:
    return [
        lambda: store.take(TEN, "k"),
        lambda: store.take_all([(TEN, "k", 1)]),
        lambda: store.reset(TEN, "k"),
        lambda: asyncio.run(store.atake(TEN, "k")),
    ]


@pytest.mark.parametrize(
    ("policy", "state"),
    [
        *((kind(10, 60), FAR + b" 0 0") for kind in (Gcra, TokenBucket, SlidingCounter)),
        (FixedWindow(10, 60), FAR + b" 0"),
        (SlidingLog(10, 60), FAR + b" 0 0 1"),
    ],
    ids=str,
)
def test_spoilt_state_is_no_outage(redis_store: RedisStore, redis_server: Server, policy: Any, state: bytes) -> None:
    """A key that somebody else wrote, with a time that is out of the world, fails for itself: the others go on."""
    place = redis_store._plan(policy).key(b"k")
    with redis.Redis(port=redis_server.port) as client:
        for by_itself in (True, False):
            if isinstance(policy, SlidingLog):
                client.rpush(place, state)
            else:
                client.set(place, state)
            with pytest.raises(StoreError, match="somebody else wrote"):
                redis_store.take(policy, "k") if by_itself else redis_store.take_all([(policy, "k", 1)])
            assert redis_store._breaker.outage is None
            client.delete(place)
    assert redis_store.take(policy, "k").remaining == 9


def test_reply_that_nobody_knows_is_no_outage() -> None:
    """A server that refuses with words that the store doesn't know did answer, and is asked again for other keys."""
    with answering(b"-ERR something new\r\n") as port, RedisStore(f"redis://127.0.0.1:{port}", timeout=10) as store:
        for ask in asks(store):
            with pytest.raises(StoreError, match="something new"):
                ask()
            assert store._breaker.outage is None


def test_refusal_of_one_key_ends_an_outage() -> None:
    """A probe that is answered, whatever it is, was answered: other keys needn't wait for the next one."""
    with answering(b"-ERR something new\r\n") as port, RedisStore(f"redis://127.0.0.1:{port}", timeout=10) as store:
        for ask in asks(store):
            store._breaker._outage = Outage("down", 1, probe_at=0.0)
            with pytest.raises(StoreError, match="something new"):
                ask()
            assert store._breaker.outage is None


@pytest.mark.parametrize("number", [1, 3])
def test_answer_for_another_number_of_keys(number: int) -> None:
    """It is a StoreError, however many of them it is good for."""
    requests = [(TEN, f"key {one}", 1) for one in range(number)]
    with answering(b"+1 1 2;1 2\r\n") as port, RedisStore(f"redis://127.0.0.1:{port}", timeout=10) as store:
        with pytest.raises(StoreError, match="no answer to a script"):
            store.take_all(requests)
        assert store._breaker.outage is None


def test_reset_of_what_had_just_expired() -> None:
    """A key outlives its state by some milliseconds: to reset it then is to reset nothing."""
    plan = scripts.Plan("shmlimit", Gcra(10, 60))
    assert scripts.was_live(plan, b"1 100 0 100 0 1") is True
    assert scripts.was_live(plan, b"1 100 0 100 0 0") is False
    assert scripts.was_live(plan, b"1 100 0 99 999999 9") is False
    assert scripts.was_live(plan, b"1 100 0 ") is False


@pytest.mark.parametrize(
    ("reply", "hint"),
    [
        (b"-ERR unknown command 'EVALSHA', with args\r\n", "Redis 5 or later"),
        (b"-NOREPLICAS Not enough good replicas to write.\r\n", "too few replicas"),
    ],
    ids=["command", "replicas"],
)
def test_reply_that_holds_for_every_key_is_an_outage(reply: bytes, hint: str) -> None:
    """And says what to do."""
    with answering(reply) as port:
        for number in range(4):
            with RedisStore(f"redis://127.0.0.1:{port}", timeout=10) as store:
                with pytest.raises(StoreError, match=hint):
                    asks(store)[number]()
                assert store._breaker.outage is not None


def test_database_that_is_not_there(redis_server: Server) -> None:
    """Its number is in the URL, so it is an outage that says so."""
    for number in (0, 3):
        with RedisStore(f"redis://127.0.0.1:{redis_server.port}/99", timeout=10) as store:
            with pytest.raises(StoreError, match="no database of the number in the URL"):
                asks(store)[number]()
            assert store._breaker.outage is not None


@pytest.mark.parametrize(
    "reply",
    [
        *(b"$-5\r\n", b"$abc\r\n", b":abc\r\n", b"$" + b"9" * 30 + b"\r\n", b"-MOVED 1 x\r\n"),
        b"*1\r\n" * 5_000 + b"$1\r\na\r\n",
    ],
    ids=lambda reply: repr(reply[:12]),
)
def test_bytes_that_no_server_sends(reply: bytes) -> None:
    """Where redis-py's parser stumbles it is a StoreError and an outage all the same, and not an error of Python's."""
    with answering(reply) as port:
        for number in range(4):
            with RedisStore(f"redis://127.0.0.1:{port}", timeout=0.1) as store:
                with pytest.raises(StoreError, match="can't answer"):
                    asks(store)[number]()
                assert store._breaker.outage is not None


def test_long_answers_to_coroutines(redis_server: Server) -> None:
    """An answer beyond the longest line that asyncio reads (64 KiB) is read, and what was charged is told."""
    requests = [(TEN, f"key {number}", 1) for number in range(3_000)]
    with RedisStore(redis_server.url, prefix=f"t{secrets.token_hex(6)}", timeout=10) as store:
        for left in (9, 8):
            answers = asyncio.run(store.atake_all(requests))
            assert {one.remaining for one in answers} == {left}
            assert len(answers) == 3_000
        assert {one.remaining for one in store.take_all(requests)} == {7}
