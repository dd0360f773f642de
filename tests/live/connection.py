"""A client of a test's server: one connection, over TCP from any address of the loopback or over a unix socket."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

PATIENCE_S = 60.0

Fields: TypeAlias = "Mapping[str, str] | Sequence[tuple[str, str]]"
"""The fields of a request; several of one name are pairs."""


class Answer(NamedTuple):
    """A response; `worker` is the pid that the application tells, `remaining` the draft's `r`."""

    status: int
    worker: int | None
    remaining: int | None
    fields: dict[str, str]
    body: bytes

    @property
    def retry_after(self) -> int:
        """Seconds to wait."""
        return int(self.fields["retry-after"])


class Connection:
    """A connection to the server, opened again where the server has closed it, as sync workers do after each answer.

    `to` is a port of 127.0.0.1, an address, or the path of a unix socket; `source` is the client's own address, and
    `preamble` what it sends before its first request (a line of the PROXY protocol).

    `begin` and `finish` send a request in two parts: a worker that has accepted the first waits for the second.
    """

    def __init__(self, to: int | str | tuple[str, int], *, source: str | None = None, preamble: bytes = b"") -> None:
        self._to = ("127.0.0.1", to) if isinstance(to, int) else to
        self._source = None if source is None else (source, 0)
        self._preamble = preamble
        self.own_port = 0
        self._socket: socket.socket | None = None

    def begin(self, path: str = "/", fields: Fields | None = None) -> None:
        """Sends a request but for its last line."""
        self._send(path, fields, whole=False)

    def request(self, path: str = "/", fields: Fields | None = None) -> Answer:
        """Sends a request in one piece, so that a server that refuses its beginning has got all of it."""
        self._send(path, fields, whole=True)
        return self._read()

    def _send(self, path: str, fields: Fields | None, *, whole: bool) -> None:
        preamble = b""
        if self._socket is None:
            if isinstance(self._to, str):
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.settimeout(PATIENCE_S)
                self._socket.connect(self._to)
            else:
                self._socket = socket.create_connection(self._to, timeout=PATIENCE_S, source_address=self._source)
                self.own_port = self._socket.getsockname()[1]
            preamble = self._preamble
        pairs = fields.items() if isinstance(fields, Mapping) else fields or ()
        lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in pairs)]
        self._socket.sendall(preamble + "\r\n".join([*lines, "\r\n" if whole else ""]).encode())

    def finish(self) -> Answer:
        """Sends the last line and reads the response."""
        assert self._socket is not None
        self._socket.sendall(b"\r\n")
        return self._read()

    def _read(self) -> Answer:
        assert self._socket is not None
        response = http.client.HTTPResponse(self._socket)
        with response:
            response.begin()
            body = response.read()
            fields = {name.lower(): value for name, value in response.getheaders()}
        if response.will_close:
            self.close()
        is_json = response.status == 200 and fields["content-type"] == "application/json"
        worker = json.loads(body).get("worker") if is_json else None
        remaining = re.search(r";r=(\d+)", fields.get("ratelimit", ""))
        return Answer(response.status, worker, int(remaining[1]) if remaining else None, fields, body)

    def close(self) -> None:
        """Closes it, if it is open."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
