"""The fixture that starts real servers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.live.harness")

from tests.live.harness import ROOT, Serve, Server, free_port  # noqa: E402 - for its asserts to be explained


@pytest.fixture
def serve(name: str, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers: the demo with the repository's configuration and 4 workers, on the table `name`.

    `config` is the text of another configuration file, `code` that of a module with an `app` to serve instead of the
    demo. `ready=False` doesn't wait until all workers answer.
    """
    with contextlib.ExitStack() as stack:

        def start(
            *arguments: str,
            app: str = "shmlimit.demo:app",
            code: str | None = None,
            config: str | None = None,
            workers: int = 4,
            port: int | None = None,
            environ: Mapping[str, str] | None = None,
            launcher: Sequence[str] = (sys.executable, "-m", "gunicorn"),
            directory: Path = tmp_path,
            ready: bool = True,
        ) -> Server:
            config_path = ROOT / "gunicorn_conf.py"
            if config is not None:
                config_path = directory / "conf.py"
                config_path.write_text(config)
            if code is not None:
                app = "live_app:app"
                (directory / "live_app.py").write_text(code)
            server = Server(
                directory,
                ["-c", str(config_path), *arguments, app],
                port=free_port() if port is None else port,
                workers=workers,
                environ={"SHMLIMIT_NAME": name, **(environ or {})},
                launcher=launcher,
            )
            stack.callback(server.clean_up)
            if ready:
                server.wait_ready(workers)
            return server

        yield start
