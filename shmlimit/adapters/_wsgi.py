"""WSGI responses that are charged by their status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shmlimit.adapters._gate import Gate, families
from shmlimit.adapters._outcome import Outcome
from shmlimit.fields import Fields
from shmlimit.guard import Verdict

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication


class Settling:
    """A response that may be charged: what the application starts waits until it is settled.

    That is when the first part of the body comes, or its end, or `write` is called; the rest is streamed as ever. An
    exception before that is a 500, whatever was started.
    """

    def __init__(
        self,
        gate: Gate,
        answer: Callable[[Verdict], Iterable[bytes]],
        start_response: StartResponse,
        outcome: Outcome,
        fields: Fields,
    ) -> None:
        self._gate, self._answer, self._start_response = gate, answer, start_response
        self._outcome, self._fields = outcome, fields
        self._started: tuple[Any, ...] | None = None
        self._write: Any = None
        self._instead: Iterable[bytes] | None = None

    def run(self, app: WSGIApplication, environ: dict[str, Any]) -> Iterable[bytes]:
        """The application's response, or what to answer instead where the store failed."""
        chunks: Iterable[bytes] = ()
        try:
            chunks = app(environ, self._start)
            iterator = iter(chunks)
            first = next(iterator, None)
            while first == b"" and self._started is None:  # PEP 3333: started before the first part that isn't empty
                first = next(iterator, None)
            instead = self._settle()
        except BaseException as error:
            _close(chunks)
            if isinstance(error, Exception):
                self._gate.settle(self._outcome, 500)
            raise
        if instead is not None:
            _close(chunks)
            return instead
        return _Rest(first, iterator, chunks)

    def _start(self, line: str, headers: list[tuple[str, str]], *exc_info: Any) -> Any:
        if self._write is not None:  # it has begun already: with exc_info the server decides what becomes of that
            return self._start_response(line, self._with_fields(headers), *exc_info)
        self._started = (line, headers, *exc_info)
        return self._write_through

    def _write_through(self, data: bytes) -> None:
        self._settle()
        if self._instead is None:
            self._write(data)

    def _settle(self) -> Iterable[bytes] | None:
        """Charge and start the response, once; what to answer instead where the store failed."""
        if self._write is not None or self._instead is not None:
            return self._instead
        if self._started is None:
            return None  # an application that never started; the server says so
        line, headers, *exc_info = self._started
        verdict = self._gate.settle(self._outcome, int(line[:3]))
        if verdict.status is not None:
            self._instead = self._answer(verdict)
            return self._instead
        self._fields = verdict.fields or self._fields
        self._write = self._start_response(line, self._with_fields(headers), *exc_info)
        return None

    def _with_fields(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        ours = families(self._fields)
        return [header for header in headers if not header[0].lower().startswith(ours)] + self._fields


class _Rest:
    """The body from its first part on; closes what the application gave."""

    def __init__(self, first: bytes | None, iterator: Iterator[bytes], chunks: Iterable[bytes]) -> None:
        self._first, self._iterator, self._chunks = first, iterator, chunks

    def __iter__(self) -> Iterator[bytes]:
        if self._first is not None:
            yield self._first
            yield from self._iterator

    def close(self) -> None:
        _close(self._chunks)


def _close(chunks: Iterable[bytes]) -> None:
    close = getattr(chunks, "close", None)
    if close is not None:
        close()
