"""What the tests of a store in trouble share."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from shmlimit import StoreError, TokenBucket
from shmlimit.stores.sqlite import SqliteStore

TEN = TokenBucket(10, 10**9)  # nothing refills meanwhile


class Clock:
    """Seconds, for a breaker whose waits are not to be waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def is_on(self, seconds: float) -> bool:
        """Goes on."""
        self.now_s += seconds
        return True


def answer(store: SqliteStore, key: str, policy: TokenBucket = TEN) -> int | str:
    """What is left, -1 for a denial; or what the StoreError says."""
    try:
        decision = store.take(policy, key)
    except StoreError as error:
        return str(error)
    return decision.remaining if decision.allowed else -1


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that gives one answer to everything; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = listening.accept()
                    with line:
                        line.recv(65536)
                        line.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()
