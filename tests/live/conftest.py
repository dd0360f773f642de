"""The fixture that starts real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.live.connection", "tests.live.harness")

from tests.live.harness import Serve, serving  # noqa: E402 - for its asserts to be explained


@pytest.fixture
def serve(name: str, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers: the demo with the repository's configuration and 4 workers, on the table `name`.

    `config` is the text of another configuration file, `code` that of a module with an `app` to serve instead of the
    demo. `binds` are more places to listen. `ready=False` doesn't wait until all workers answer.
    """
    with serving(name, tmp_path) as start:
        yield start
