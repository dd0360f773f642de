"""The segment: every trap of shared memory that was met, closed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from shmlimit import ConfigError, LayoutError, SharedTable, ShmlimitError, StoreError, TokenBucket
from shmlimit.table import layout, segment

POLICY = TokenBucket(3, 3600)
SHM = Path("/dev/shm")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /dev/shm")
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
NOBODY = 65534


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def in_child(body: Callable[[], None]) -> int:
    """Runs `body` in a forked child; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_create_of_an_existing_name_is_refused(name: str) -> None:
    """`create` never touches a table that exists."""
    with SharedTable.create(name) as table:
        table.take(POLICY, "k")
        with pytest.raises(FileExistsError) as raised:
            SharedTable.create(name)
        assert isinstance(raised.value, ShmlimitError)
        assert table.peek(POLICY, "k").remaining == 2


def test_attach_to_a_missing_name_is_refused(name: str) -> None:
    """`attach` never makes a table."""
    with pytest.raises(FileNotFoundError) as raised:
        SharedTable.attach(name)
    assert isinstance(raised.value, ShmlimitError)


def test_counts_survive_the_last_process(name: str) -> None:
    """A table that everybody left goes on counting when it is opened again."""
    for remaining in (2, 1, 0):
        with SharedTable.open(name, 64) as table:
            assert table.take(POLICY, "k").remaining == remaining
        gc.collect()
    with SharedTable.open(name, 64) as table:
        assert not table.take(POLICY, "k").allowed


def test_another_size_is_used_as_it_is_and_warned_of(name: str) -> None:
    """`open` with other slots never makes a second count."""
    with SharedTable.create(name, 64) as table:
        table.take(POLICY, "k")
        with pytest.warns(RuntimeWarning, match="64 slots, not 128"):
            other = SharedTable.open(name, 128)
        assert other.take(POLICY, "k").remaining == 1
        other.close()


def test_multiprocessing_can_attach(name: str) -> None:
    """The segment is one of `multiprocessing.shared_memory`."""
    with SharedTable.create(name, 64) as table:
        other = shared_memory.SharedMemory(name)
        try:
            assert bytes(other.buf[:8]) == b"shmlimit"
        finally:
            other.close()
            resource_tracker.unregister(f"/{name}", "shared_memory")
        table.take(POLICY, "k")


def test_no_resource_tracker_is_started(name: str) -> None:
    """A process that attaches and ends takes nothing with it, and starts no tracker."""
    with SharedTable.create(name, 64) as table:
        done = python(
            "import sys; from shmlimit import SharedTable, TokenBucket\n"
            "from multiprocessing import resource_tracker\n"
            "t = SharedTable.attach(sys.argv[1]); t.take(TokenBucket(3, 3600), 'k')\n"
            "assert resource_tracker._resource_tracker._fd is None",
            name,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        with SharedTable.attach(name) as again:
            assert again.peek(POLICY, "k").remaining == 2
        assert table.peek(POLICY, "k").remaining == 2


def test_failed_attach_leaves_the_segment(name: str) -> None:
    """An attacher that runs out of address space fails alone."""
    with SharedTable.create(name, 2**20) as table:
        done = python(
            "import sys, resource; from shmlimit import SharedTable\n"
            "import shmlimit.table.table, shmlimit.table.native as n; n.helper()\n"
            "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
            "resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, used + 2**20))\n"
            "SharedTable.attach(sys.argv[1])",
            name,
        )
        assert done.returncode == 1
        assert "annot allocate memory" in done.stderr
        assert table.take(POLICY, "k").allowed
        SharedTable.attach(name).close()


@linux
def test_mode_is_private(name: str) -> None:
    """Only the owner may read the secret, whatever the umask is."""
    before = os.umask(0)
    try:
        SharedTable.create(name, 64).close()
    finally:
        os.umask(before)
    assert (SHM / name).stat().st_mode & 0o777 == 0o600


@linux
def test_space_is_allocated_at_creation(name: str) -> None:
    """Every page is there before the first request, so that none is missing later."""
    SharedTable.create(name, 65536).close()
    assert (SHM / name).stat().st_blocks * 512 >= layout.segment_bytes(65536)


@linux
@root
def test_full_shared_memory_is_an_error_at_start() -> None:
    """Where /dev/shm is too small, `create` says so and leaves nothing behind."""
    code = (
        "from shmlimit import SharedTable, StoreError; import os\n"
        "try: SharedTable.create('shmlimit-big', 2**20)\n"
        "except StoreError as error: print(error)\n"
        "print(os.listdir('/dev/shm')); SharedTable.create('shmlimit-small', 64).close()"
    )
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" -c "$1"',
            sys.executable,
            code,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "16.3 MiB of shared memory are needed" in done.stdout
    assert done.stdout.endswith("[]\n")


@linux
@root
def test_segment_of_another_user_is_refused(name: str) -> None:
    """A squatter can't hand a server his segment."""

    def squat() -> None:
        os.setuid(NOBODY)
        SharedTable.create(name, 64).close()

    assert in_child(squat) == 0
    with pytest.raises(LayoutError, match="segment of user 65534") as raised:
        SharedTable.open(name)
    assert raised.value.expected.startswith("a segment of user 0")


@linux
@root
def test_segment_of_root_is_not_opened_by_others(name: str) -> None:
    """A worker that gave up root inherits the table; by name it is refused with a reason."""
    table = SharedTable.create(name, 64)

    def worker() -> None:
        os.setuid(NOBODY)
        assert table.take(POLICY, "k").allowed
        with pytest.raises(LayoutError, match="inherit it by fork"):
            SharedTable.attach(name)

    assert in_child(worker) == 0
    assert table.peek(POLICY, "k").remaining == 2


@linux
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_segment_that_others_may_write_is_refused(name: str, mode: int) -> None:
    """Counts that others can change are no counts."""
    SharedTable.create(name, 64).close()
    (SHM / name).chmod(mode)
    with pytest.raises(LayoutError, match="others may write"):
        SharedTable.open(name)


@linux
def test_symbolic_link_is_not_followed(name: str, tmp_path: Path) -> None:
    """A link in /dev/shm can't lead a server to another file."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (SHM / name).symlink_to(target)
    with pytest.raises(LayoutError):
        SharedTable.open(name)
    assert target.read_bytes() == b"precious"
    (SHM / name).unlink()


@linux
@pytest.mark.parametrize(
    "content",
    [b"x" * 4096, b"\0" * 100 + b"data" + b"\0" * 20000, b"\0" * 8, b"\0\1\2", b"\0" * 2**20],
    ids=["small", "zeros first", "a word of zeros", "three bytes", "a mebibyte of zeros"],
)
def test_segment_of_another_program_is_left_alone(name: str, content: bytes) -> None:
    """What isn't a table is neither used, made anew nor removed."""
    (SHM / name).write_bytes(content)
    (SHM / name).chmod(0o600)
    with pytest.raises(LayoutError):
        SharedTable.open(name)
    with pytest.raises(LayoutError):
        segment.remove(name)
    assert (SHM / name).read_bytes() == content
    (SHM / name).unlink()


@linux
@pytest.mark.parametrize(
    "content",
    [
        b"",
        layout.MAKING_BYTES,
        layout.MAKING_BYTES + b"\0" * 20000,
        layout.MAKING_BYTES + b"\1" * 30 + b"\0" * 20000,
    ],
    ids=["not begun", "not sized", "no header", "half a header"],
)
def test_half_made_segment_is_made_anew(name: str, content: bytes) -> None:
    """A maker that died in the middle leaves nothing that anybody uses, and nothing that stands in the way."""
    (SHM / name).write_bytes(content)
    (SHM / name).chmod(0o600)
    with pytest.raises(LayoutError, match="half-made"):
        SharedTable.attach(name)
    with SharedTable.create(name, 64) as table:
        assert table.take(POLICY, "k").allowed


@linux
def test_maker_that_died_is_followed(name: str) -> None:
    """A maker that is killed before the header is written leaves a segment that the next one makes anew."""

    def make() -> None:
        segment.open_segment(name, layout.segment_bytes(64), lambda _: os._exit(9), may_make=True, may_attach=False)

    assert in_child(make) == 9
    assert (SHM / name).stat().st_size == layout.segment_bytes(64)
    with SharedTable.open(name, 128) as table:
        assert table.take(POLICY, "k").allowed


@linux
def test_maker_that_is_stopped_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a maker is bounded, and the error says what to do."""
    import fcntl

    monkeypatch.setattr(segment, "_MAKER_WAIT_S", 0.05)
    with (SHM / name).open("wb") as maker:
        (SHM / name).chmod(0o600)
        fcntl.flock(maker, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="being made by another process"):
            SharedTable.open(name)


@linux
def test_other_layout_version_is_told(name: str) -> None:
    """A table of another version is not read, and the error names both."""
    SharedTable.create(name, 64).close()
    with (SHM / name).open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    with pytest.raises(LayoutError, match="found layout version 99, expected version 1"):
        SharedTable.open(name)


@linux
def test_truncated_table_is_told(name: str) -> None:
    """A header that promises more than there is isn't believed."""
    SharedTable.create(name, 65536).close()
    os.truncate(SHM / name, 100_000)
    with pytest.raises(LayoutError, match="65536"):
        SharedTable.open(name)


def test_view_outlives_close(name: str) -> None:
    """A view of the slots stays valid after `close`, and the process lives."""
    table = SharedTable.create(name, 64)
    table.take(POLICY, "k")
    view = table.slots
    table.close()
    del table
    gc.collect()
    assert (view["fingerprint"] != 0).sum() == 1


def test_closed_table_says_so(name: str) -> None:
    """Calls after `close` are errors that name the table; closing twice is fine."""
    table = SharedTable.create(name, 64)
    table.take(POLICY, "k")
    table.close()
    table.close()
    for call in (
        lambda: table.take(POLICY, "k"),
        lambda: table.peek(POLICY, "k"),
        lambda: table.reset(POLICY, "k"),
        table.used,
        table.stats,
        lambda: table.slots,
        table.unlink,
    ):
        with pytest.raises(StoreError, match=f"{name}.*closed"):
            call()


@linux
def test_unlink_spares_another_table_of_the_name(name: str) -> None:
    """`unlink` removes this table, not one that was made under the name since."""
    first = SharedTable.create(name, 64)
    segment.remove(name)
    with SharedTable.create(name, 64) as second:
        first.unlink()
        assert (SHM / name).exists()
        second.unlink()
        assert not (SHM / name).exists()
        second.unlink()
    first.close()


@linux
def test_remove_takes_nothing_but_segments(name: str) -> None:
    """A pipe in /dev/shm isn't a table."""
    os.mkfifo(SHM / name)
    with pytest.raises(LayoutError):
        segment.remove(name)
    (SHM / name).unlink()


def test_remove_tells_whether_it_is_in_use(name: str) -> None:
    """`remove` knows whether anybody still has the table open."""
    table = SharedTable.create(name, 64)
    assert segment.remove(name)
    table.close()
    del table
    gc.collect()
    SharedTable.create(name, 64).close()
    gc.collect()
    assert not segment.remove(name)


@pytest.mark.parametrize("bad", ["", "a/b", "/a", ".hidden", "a" * 31, "ä", "a b", "a\0b", None, 7])
def test_bad_name_is_refused(bad: object) -> None:
    """A name that some platform can't have is a ConfigError."""
    with pytest.raises(ConfigError, match="30 letters"):
        SharedTable.open(bad)  # type: ignore[arg-type]


def _open_and_take(name: str, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    with SharedTable.open(name, 64) as table:
        results.put((table.take(TokenBucket(1000, 3600), "k").remaining, time.monotonic()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_opening_at_once_makes_one_table(name: str, method: str) -> None:
    """Processes that open a missing table at the same moment all count in one."""
    context = multiprocessing.get_context(method)
    barrier, results = context.Barrier(6), context.Queue()
    workers = [context.Process(target=_open_and_take, args=(name, barrier, results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    remaining = sorted(results.get(timeout=60)[0] for _ in workers)
    for worker in workers:
        worker.join(60)
    assert remaining == list(range(994, 1000))
