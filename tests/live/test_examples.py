"""The examples, started by the very commands that their README gives, and asked over several connections."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.live.harness import PATIENCE_S, ROOT, Answer, Burst, Server, free_port, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc and /dev/shm")

EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
LIMIT, PER_TOKEN_S = 10, 6
WORKERS = 2
POLICIES = {"falcon_app": '"per-customer";q=10;w=60, "per-route";q=60;w=60'}
ONE_POLICY = '"per-ip";q=10;w=60'


class Command(NamedTuple):
    """A line of the README: `environ` is what stands in front of it."""

    environ: dict[str, str]
    argv: list[str]

    @property
    def module(self) -> str:
        """The example that it starts."""
        found = re.search(r"\b\w+_app\b", " ".join(self.argv))
        assert found is not None
        return found[0]

    @property
    def workers(self) -> int:
        """How many processes are to answer; 1 for what is for development."""
        several = self.argv[0] == "gunicorn" or "--workers" in self.argv
        return WORKERS if several else 1


def read(line: str) -> Command:
    words = shlex.split(line)
    environ = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    return Command(environ, words[len(environ) :])


COMMANDS = [read(line) for line in re.findall(r"^\$ (.+)$", README, re.MULTILINE) if not line.startswith("pip ")]


class Example(Server):
    """A server that was started by a command, in a copy of the examples."""

    def __init__(self, command: Command, directory: Path, name: str) -> None:
        port = free_port()
        program, *arguments = [word.replace("8000", str(port)) for word in command.argv]
        super().__init__(
            directory,
            arguments,
            port=port,
            workers=WORKERS,
            environ={"SHMLIMIT_NAME": name, "PYTHONDONTWRITEBYTECODE": "1", **command.environ},
            launcher=[str(Path(sys.executable).with_name(program))],
        )
        self._single = command.workers == 1

    def workers(self) -> list[int]:
        """Processes that answer: a single one itself, else the children, without that of multiprocessing's own."""
        if self._single:
            return self.masters()
        return [pid for pid in super().workers() if b"resource_tracker" not in command_line(pid)]


def command_line(pid: int) -> bytes:
    """Nothing for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture
def start(tmp_path: Path, name: str) -> Iterator[Callable[[Command], Example]]:
    """Starts the example of a command, on the table `name`, and waits until all its processes answer."""
    running: list[Example] = []

    def start(command: Command) -> Example:
        directory = tmp_path / "examples"
        shutil.copytree(EXAMPLES, directory)
        running.append(Example(command, directory, name))
        running[-1].wait_ready(command.workers)
        return running[-1]

    yield start
    for example in running:
        example.clean_up()


def in_time(ask: Callable[[str], list[Answer]]) -> list[Answer]:
    """What `ask` gives for a client that is new, within the time in which nothing is refilled: then every answer is
    foreseeable. On a machine that is too busy for that another client tries again.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        began = time.monotonic()
        answers = ask(new_client())
        if time.monotonic() < began + PER_TOKEN_S:
            return answers
        assert time.monotonic() < deadline, "the machine is too slow for a limit of ten a minute"


def new_client() -> str:
    """An address of this machine that no test has used."""
    number = next(_numbers)
    return f"127.{number >> 16}.{number >> 8 & 255}.{number & 255}"


_numbers = itertools.count(1 << 16)


def statuses(answers: list[Answer]) -> list[int]:
    return [answer.status for answer in answers]


# -- Every command ---------------------------------------------------------------------------------------------------


def test_commands_are_found() -> None:
    """Each example has a command, and what the issue asks for is among them."""
    assert {command.module for command in COMMANDS} == {path.stem for path in EXAMPLES.glob("*_app.py")}
    lines = [" ".join(command.argv) for command in COMMANDS]
    for wanted in ("^gunicorn (?!.*-k)", "^gunicorn .*-k gthread", "^gunicorn .*-k asgi", "^uvicorn .*--workers 2"):
        assert any(re.search(wanted, line) for line in lines), wanted
    assert any(line.startswith("flask ") for line in lines)
    assert any("runserver --noreload" in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.argv))
def test_refused_at_the_right_request(start: Callable[[Command], Example], command: Command) -> None:
    """The eleventh request is refused, by whichever worker; of 40 at once exactly ten pass."""
    server = start(command)
    workers = server.workers()
    assert len(workers) == command.workers

    def one_by_one(client: str) -> list[Answer]:
        return [server.ask(workers[i % len(workers)], source=client) for i in range(LIMIT + 3)]

    answers = in_time(one_by_one)
    assert statuses(answers) == [200] * LIMIT + [429] * 3
    assert [answer.remaining for answer in answers] == [*reversed(range(LIMIT)), 0, 0, 0]
    assert {answer.worker for answer in answers[:LIMIT]} == set(workers)
    policies = POLICIES.get(command.module, ONE_POLICY)
    assert {answer.fields["ratelimit-policy"] for answer in answers[:LIMIT]} == {policies}
    for answer in answers[LIMIT:]:
        assert answer.fields["ratelimit-policy"] == policies.partition(",")[0]
        assert 1 <= answer.retry_after <= PER_TOKEN_S
        assert answer.fields["cache-control"] == "no-store"
    assert not any("retry-after" in answer.fields for answer in answers[:LIMIT])

    bursts: list[Burst] = []

    def at_once(client: str) -> list[Answer]:
        bursts.append(server.burst(40, connections=8, source=client))
        return bursts[-1].answers

    answers = in_time(at_once)
    assert len(bursts[-1].allowed) == LIMIT
    assert len(bursts[-1].denied) == 40 - LIMIT
    assert bursts[-1].counts_down(LIMIT)

    health = server.get("/healthz", source=new_client())
    assert (health.status, "ratelimit" in health.fields) == (200, False)
    ALSO[command.module](server, command)


# -- What is special about each ------------------------------------------------------------------------------------


def everywhere(server: Example, paths: dict[str, int]) -> None:
    """Ten requests to ten places spend one quota, and the eleventh is refused wherever it goes."""

    def ask(client: str) -> list[Answer]:
        places = [*itertools.islice(itertools.cycle(paths), LIMIT), *paths]
        return [server.get(place, source=client) for place in places]

    answers = in_time(ask)
    assert statuses(answers) == [*itertools.islice(itertools.cycle(paths.values()), LIMIT), *[429] * len(paths)]
    assert [answer.remaining for answer in answers[:LIMIT]] == [*reversed(range(LIMIT))]


def fastapi(server: Example, _command: Command) -> None:
    """S53: an included router, a mount, the documentation, and what isn't there."""
    everywhere(server, {"/items/7": 200, "/admin/users": 200, "/": 200, "/docs": 200, "/admin/nothing": 404})


def starlette(server: Example, _command: Command) -> None:
    everywhere(server, {"/admin/users": 200, "/count": 200, "/nothing": 404})
    assert server.get("/count", source=new_client()).body == b"0\n1\n2\n"


def flask(server: Example, _command: Command) -> None:
    """The third report is refused, and takes nothing of the ten."""

    def ask(client: str) -> list[Answer]:
        return [server.get(path, source=client) for path in ("/reports", "/reports", "/reports", "/reports", "/")]

    answers = in_time(ask)
    assert statuses(answers) == [200, 200, 429, 429, 200]
    assert [json.loads(answer.body)["reports left"] for answer in answers[:2]] == [1, 0]
    assert answers[0].fields["ratelimit-policy"] == '"per-ip";q=10;w=60, "reports";q=2;w=60'
    assert answers[4].remaining == LIMIT - 3


def django(server: Example, command: Command) -> None:
    """Django's own middlewares work on what passes; an included URL counts, and so does what isn't there."""
    everywhere(server, {"/shop/items/5": 200, "/": 200, "/nothing": 404})
    answer = server.get("/", source=new_client())
    assert answer.fields["x-content-type-options"] == "nosniff"  # of SecurityMiddleware
    assert "content-length" in answer.fields  # of CommonMiddleware
    assert command.argv[0] != "python" or "Django" in server.log


def falcon(server: Example, _command: Command) -> None:
    """S54: five items are one route; the tier of a customer; wrong passwords."""

    def items(client: str) -> list[Answer]:
        return [server.get(f"/items/{number}", source=client) for number in range(1, 6)]

    answers = in_time(items)
    assert statuses(answers) == [200] * 5
    assert [re.search(r'"per-route";r=(\d+)', answer.fields["ratelimit"])[1] for answer in answers] == [  # type: ignore[index]
        str(left) for left in (59, 58, 57, 56, 55)
    ]

    def customers(client: str) -> list[Answer]:
        given = ["key-of-ada", "key-of-bob", "made-up", "made-up-too"]
        return [server.get("/", {"X-Api-Key": key}, client) for key in given]

    answers = in_time(customers)
    assert [answer.fields["ratelimit-policy"].partition(",")[0] for answer in answers] == [
        f'"per-customer";q={limit};w=60' for limit in (100, 20, 10, 10)
    ]
    assert [answer.remaining for answer in answers[2:]] == [9, 8]

    right, wrong = {"name": "ada", "password": "correct horse"}, {"name": "ada", "password": "?"}
    tried = [log_in(server, form) for form in (right, right, wrong, wrong, right, wrong, wrong, wrong, wrong, right)]
    assert tried == [200, 200, 401, 401, 200, 401, 401, 401, 429, 429]


def log_in(server: Example, form: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, PATIENCE_S)
    try:
        connection.request("POST", "/login", json.dumps(form), {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


ALSO = {
    "fastapi_app": fastapi,
    "starlette_app": starlette,
    "flask_app": flask,
    "django_app": django,
    "falcon_app": falcon,
}


def test_without_the_hook_nobody_is_let_in(tmp_path: Path, name: str) -> None:
    """An example that wants the table of the hook, started without it, answers 500 and says in its log what to do."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    command = Command({}, ["uvicorn", "--port", "8000", "starlette_app:app"])
    server = Example(command, tmp_path / "examples", name)
    try:
        until(server.listens, "somebody listens on the port")
        assert server.get("/").status == 500
        until(lambda: "SharedTable.open" in server.log, "the log names the way out")
    finally:
        server.clean_up()
