"""What only the WSGI wrapper has to keep: PEP 3333, on both of its sides."""

import sys
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.validate import validator

import pytest

from shmlimit.adapters.wsgi import RateLimit
from shmlimit.errors import ConfigError
from shmlimit.guard import Guard
from shmlimit.stores.memory import MemoryStore
from shmlimit.testing import FailingStore

NOW_US = 1_750_000_000_250_000
LIMITS = {"ratelimit-policy": '"a";q=1;w=60', "ratelimit": '"a";r=0;t=60'}


def limited(app: Any, **options: Any) -> RateLimit:
    """The application between two validators: the other one is the client's."""
    store = MemoryStore(clock=lambda: NOW_US)
    return RateLimit(validator(app), Guard("a", "1/minute", **{"key": lambda _: "k", **options}), store=store)


def plain(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def test_a_refusal_is_text(ask: Callable[..., Any]) -> None:
    """A 429 says in a line what to do, with its length and without caching."""
    app = limited(plain)
    assert ask(app).body == b"hello"
    answer = ask(app)
    assert (answer.status, answer.body) == (429, b"Too many requests. Try again in 60 seconds.\n")
    assert dict(answer.headers) == {
        **LIMITS,
        "retry-after": "60",
        "cache-control": "no-store",
        "content-type": "text/plain; charset=utf-8",
        "content-length": str(len(answer.body)),
    }


def test_a_stream_is_passed_on_as_it_comes() -> None:
    """Chunks aren't gathered, the response starts once, and the iterable of the application is closed."""
    events: list[Any] = []

    class Stream:
        def __iter__(self) -> Iterator[bytes]:
            for number in range(3):
                events.append(number)
                yield b"%d" % number

        def close(self) -> None:
            events.append("closed")

    def app(environ: Any, start_response: Any) -> Stream:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return Stream()

    store = MemoryStore(clock=lambda: NOW_US)
    wrapper = RateLimit(app, Guard("a", "1/minute", key=lambda _: "k"), store=store)
    starts: list[Any] = []
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/"}
    chunks: Any = wrapper(environ, lambda *arguments: starts.append(arguments))  # type: ignore[arg-type,return-value]
    assert len(starts) == 1
    iterator = iter(chunks)
    assert (next(iterator), events) == (b"0", [0])
    chunks.close()
    assert events == [0, "closed"]
    assert len(starts) == 1


def test_the_application_may_start_again_after_an_error(ask: Callable[..., Any]) -> None:
    """A second start_response with exc_info goes through with the fields, once each."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        try:
            raise RuntimeError("late")
        except RuntimeError:
            start_response("500 Oops", [("Content-Type", "text/plain"), ("RateLimit", "x")], sys.exc_info())
        return [b"oops"]

    answer = ask(limited(app))
    assert (answer.status, answer.limits, answer.body) == (500, LIMITS, b"oops")


def test_a_charged_application_may_start_again_after_an_error(ask: Callable[..., Any]) -> None:
    """Also after it was charged: the status that came first counts, and the second start has the fields too."""
    seen: list[int] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        yield b""
        try:
            raise RuntimeError("late")
        except RuntimeError:
            start_response("500 Oops", [("Content-Type", "text/plain"), ("RateLimit", "x")], sys.exc_info())
        yield b"oops"

    answer = ask(limited(app, consume_on=lambda status: seen.append(status) or True))
    assert (answer.status, answer.limits, answer.body, seen) == (500, LIMITS, b"oops", [200])


@pytest.mark.parametrize("started", [True, False])
def test_an_exception_in_the_body_is_a_500(started: bool) -> None:
    """Before its first part nothing was sent, so that is what the server makes of it; the iterable is closed."""
    seen: list[Any] = []

    class Broken:
        def __iter__(self) -> Iterator[bytes]:
            return self

        def __next__(self) -> bytes:
            raise RuntimeError("broken")

        def close(self) -> None:
            seen.append("closed")

    def app(environ: Any, start_response: Any) -> Broken:
        if started:
            start_response("200 OK", [("Content-Type", "text/plain")])
        return Broken()

    guard = Guard("a", "1/minute", key=lambda _: "k", consume_on=lambda status: seen.append(status) or True)
    wrapper = RateLimit(app, guard, store=MemoryStore(clock=lambda: NOW_US))
    with pytest.raises(RuntimeError, match="broken"):
        wrapper({"REQUEST_METHOD": "GET"}, lambda *_: pytest.fail("started"))
    assert seen == ["closed", 500]


def charged(app: Any, store: Any = None, **options: Any) -> tuple[RateLimit, list[int]]:
    """The application with a guard that charges all its responses, and the statuses that it was charged for."""
    seen: list[int] = []
    guard = Guard("a", "1/minute", key=lambda _: "k", consume_on=lambda status: seen.append(status) or True, **options)
    return RateLimit(app, guard, store=store or MemoryStore(clock=lambda: NOW_US)), seen


def served(app: Any) -> list[Any]:
    """What a server sends that gives an application all that PEP 3333 allows: starts, what is written, and the body."""
    sent: list[Any] = []

    def start_response(status: str, _headers: Any, *_: Any) -> Any:
        sent.append(status)
        return sent.append

    chunks = app({"REQUEST_METHOD": "GET", "PATH_INFO": "/"}, start_response)
    sent += chunks
    if hasattr(chunks, "close"):
        chunks.close()
    return sent


class Closed(list[bytes]):
    """A body that counts how often it is closed."""

    times = 0

    def close(self) -> None:
        self.times += 1


def test_a_charged_application_may_write() -> None:
    """What it writes comes after its start, in order, and before its body; it is charged once."""

    def app(_environ: Any, start_response: Any) -> Closed:
        write = start_response("401 No", [])
        write(b"a")
        write(b"b")
        return body

    body = Closed([b"c"])
    wrapper, seen = charged(app)
    assert served(wrapper) == ["401 No", b"a", b"b", b"c"]
    assert (seen, body.times) == ([401], 1)


@pytest.mark.parametrize("writes", [True, False])
def test_a_replaced_response_is_closed(writes: bool) -> None:
    """Where the store fails nothing of the application's is sent, written or given; what it gave is closed."""
    store = FailingStore(MemoryStore(clock=lambda: NOW_US))

    def app(_environ: Any, start_response: Any) -> Closed:
        store.failing = True
        write = start_response("401 No", [])
        if writes:
            write(b"a")
            write(b"b")
        return body

    body = Closed([b"c"])
    wrapper, seen = charged(app, store)
    assert served(wrapper) == ["503 Service Unavailable", b"The rate limiter can't answer.\n"]
    assert (seen, body.times) == ([401], 1)


def test_an_application_may_start_late() -> None:
    """Empty parts before its start are passed over."""

    def app(_environ: Any, start_response: Any) -> Iterator[bytes]:
        yield b""
        yield b""
        start_response("401 No", [])
        yield b"a"

    wrapper, seen = charged(app)
    assert served(wrapper) == ["401 No", b"a"]
    assert seen == [401]


def test_an_application_that_never_starts() -> None:
    """That is for the server to complain of; there is no status to charge."""
    wrapper, seen = charged(lambda _environ, _start_response: [])
    assert served(wrapper) == []
    assert seen == []


def test_a_worker_that_stops_charges_nothing() -> None:
    """What ends the process rather than the request is no response."""

    def app(_environ: Any, _start_response: Any) -> list[bytes]:
        raise SystemExit(1)

    wrapper, seen = charged(app)
    with pytest.raises(SystemExit):
        served(wrapper)
    assert seen == []


def test_a_server_that_fails_to_start_charges_once() -> None:
    """The response was charged before the server was told of it, so not again for the exception."""
    wrapper, seen = charged(plain)

    def start_response(*_: Any) -> Any:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        wrapper({"REQUEST_METHOD": "GET"}, start_response)
    assert seen == [200]


def test_exc_info_reaches_the_server() -> None:
    """What the server raises for a second start that comes too late is raised in the application."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [], ("type", "value", "traceback"))
        return []

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
        assert exc_info == ("type", "value", "traceback")
        raise OSError("headers were sent")

    store = MemoryStore(clock=lambda: NOW_US)
    with pytest.raises(OSError, match="headers were sent"):
        RateLimit(app, Guard("a", "1/minute"), store=store)({"REQUEST_METHOD": "GET"}, start_response)


def test_the_write_callable_is_the_servers() -> None:
    """An application that writes in the old way gets what the server gave."""
    written: list[bytes] = []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])(b"old")
        return []

    store = MemoryStore(clock=lambda: NOW_US)
    RateLimit(app, Guard("a", "1/minute"), store=store)({"REQUEST_METHOD": "GET"}, lambda *_: written.append)
    assert written == [b"old"]


def test_the_applications_own_list_is_not_changed(ask: Callable[..., Any]) -> None:
    """An application may keep one list of headers for all its responses."""
    headers = [("Content-Type", "text/plain"), ("RateLimit-Remaining", "7")]

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", headers)
        return [b"hello"]

    assert ask(limited(app)).limits == LIMITS  # the field of an older generation gave way as well
    assert headers == [("Content-Type", "text/plain"), ("RateLimit-Remaining", "7")]


def test_skipped_paths_are_decoded_and_below_the_mount_point(ask: Callable[..., Any]) -> None:
    """PATH_INFO has neither the mount point nor escapes, and its bytes are UTF-8; an empty one is `/`."""
    app = limited(plain, skip_paths=["/état", "/"])
    for path, skipped in (("/état/x", True), ("", True), ("/api", False)):
        assert (ask(app, path, mount="/api").limits == {}) == skipped, path


@pytest.mark.parametrize("app", [Guard("a", "1/minute"), None])
def test_the_application_comes_first(app: Any) -> None:
    """A forgotten application is told at once."""
    with pytest.raises(ConfigError, match="the application comes first"):
        RateLimit(app, Guard("b", "1/minute"))
