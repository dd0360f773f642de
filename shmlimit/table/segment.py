"""The named shared-memory segment that a table lives in: made, found again, refused, removed.

It is a POSIX segment as `multiprocessing.shared_memory` makes them (`SharedMemory(name)` attaches to it), but mapped
without that class, whose resource tracker would remove it with the first process that ends, and which also removes it
when an attaching process runs out of memory.

- **Who is alive** is told by a shared `flock` that lives as long as the mapping, in the process that mapped the segment
  and in all that it forks. Whoever gets the exclusive lock is alone: only then is a half-made segment made anew.
- **Space** is allocated when the segment is made: a full /dev/shm is an error at start, not a SIGBUS later.
- **Trust**: mode 0600, and one that is neither the effective user's nor root's, or that others may write, is refused.
- **Nothing is unlinked** unless `remove` is called: a restarted server finds its counts again.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import errno
import fcntl
import os
import re
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

from shmlimit.errors import ConfigError, LayoutError, StoreError, TableExistsError, TableNotFoundError
from shmlimit.table.layout import MAKING_BYTES, is_half_made

_LINUX = sys.platform.startswith("linux")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,29}", re.ASCII)
_MAKER_WAIT_S = 10.0  # making a table takes milliseconds; a maker that is stopped must not hang every other start
_NOT_SUPPORTED = {errno.EINVAL, errno.ENODEV, errno.EOPNOTSUPP}


def check_name(name: str) -> str:
    """`name` if it can name a segment on every platform (macOS allows 30 characters), else a `ConfigError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"a table's name is 1 to 30 letters, digits, '-', '_' or '.', and doesn't begin with '.': not {name!r}"
        )
    return name


class Segment:
    """A mapped segment. `mapping` stays mapped, and the segment counts as used, until the last reference is gone."""

    def __init__(self, name: str, mapping: mmap, lock_fd: int) -> None:
        self.name = name
        self.mapping = mapping
        self._inode = os.fstat(lock_fd).st_ino
        # The lock must outlive every view of the mapping, and not this object.
        weakref.finalize(mapping, os.close, lock_fd).atexit = False

    def unlink(self) -> None:
        """Removes the name; processes that have the segment mapped go on with it. Nothing where it is gone already,
        or names another segment by now.
        """
        fd = _open(self.name, os.O_RDWR)
        if fd is None:
            return
        try:
            if not _LINUX or os.fstat(fd).st_ino == self._inode:
                _unlink(self.name)
        finally:
            os.close(fd)


def open_segment(
    name: str, size: int, initialise: Callable[[mmap], None], *, may_make: bool, may_attach: bool
) -> Segment:
    """Attaches to the segment `name`, or makes it with `size` bytes and calls `initialise` on the zeroed mapping.

    Safe when several processes do it at once. Raises `TableExistsError` or `TableNotFoundError` for what wasn't
    allowed, `LayoutError` for a segment that is not to be trusted, `StoreError` where there is no space.
    """
    check_name(name)
    deadline = time.monotonic() + _MAKER_WAIT_S
    while True:
        fd = _open(name, os.O_RDWR)
        if fd is None:
            if not may_make:
                raise TableNotFoundError(errno.ENOENT, "no such table; SharedTable.open would make it", name)
            fd = _open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if fd is None:
                continue  # somebody else just made it
        try:
            _check_trust(name, fd)
            lock_fd = _lock_file(name, fd)
        except BaseException:
            os.close(fd)
            raise
        try:
            segment = _settle(name, fd, lock_fd, size, initialise, may_make=may_make, may_attach=may_attach)
        except BaseException:
            os.close(lock_fd)
            raise
        finally:
            os.close(fd)  # the mapping has its own, and so has the lock
        if segment is not None:
            return segment
        os.close(lock_fd)
        if time.monotonic() > deadline:
            raise StoreError(
                f"the table {name!r} is being made by another process, which took over {_MAKER_WAIT_S:.0f} s so far. "
                f"Is it stopped? End it, or remove the table: python -m shmlimit rm {name}"
            )
        time.sleep(0.005)


def _settle(
    name: str,
    fd: int,
    lock_fd: int,
    size: int,
    initialise: Callable[[mmap], None],
    *,
    may_make: bool,
    may_attach: bool,
) -> Segment | None:
    """One attempt with an open segment; `None` when it has to be opened again."""
    alone = _try_lock(lock_fd, fcntl.LOCK_EX)
    if not alone and not _try_lock(lock_fd, fcntl.LOCK_SH):
        return None  # its maker is at work
    status = os.fstat(fd)
    if _LINUX and status.st_nlink == 0:
        return None  # removed since it was opened
    if status.st_size == 0:
        if not alone:
            return None
        if not may_make:
            raise _half_made(name)
        mapping = _allocate(name, fd, size)
        initialise(mapping)
    else:
        mapping = mmap(fd, status.st_size)
        if is_half_made(mapping):
            if not alone:
                return None
            if not may_make:
                raise _half_made(name)
            _unlink(name)  # its size may be another, and on macOS a segment is sized only once
            return None
        if not may_attach:
            raise TableExistsError(errno.EEXIST, "this table exists; SharedTable.open would attach to it", name)
    if alone and not _share(lock_fd):
        return None
    return Segment(name, mapping, lock_fd)


def _half_made(name: str) -> LayoutError:
    return LayoutError(
        f"the maker of the table {name!r} died before it was complete (SharedTable.open makes it anew)",
        found="a half-made segment",
        expected="a table",
    )


def _open(name: str, flags: int) -> int | None:
    """The descriptor, close-on-exec and not through a symbolic link; `None` where the name is missing (or taken)."""
    try:
        # O_CREAT is never used on what exists: in a sticky directory Linux then refuses others' files to root too.
        fd: int = _posixshmem.shm_open("/" + name, flags, mode=0o600)
    except (FileNotFoundError, FileExistsError):
        return None
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR}:
            raise _untrusted(name, os.strerror(error.errno)) from error
        raise StoreError(f"shared memory {name!r} can't be opened: {error}") from error
    return fd


def _check_trust(name: str, fd: int) -> None:
    status = os.fstat(fd)
    if _LINUX and not stat.S_ISREG(status.st_mode):
        raise _untrusted(name, "no regular file")
    if status.st_uid not in {os.geteuid(), 0}:
        raise _untrusted(name, f"a segment of user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _untrusted(name, f"mode {stat.S_IMODE(status.st_mode):04o}, so that others may write it")


def _untrusted(name: str, found: str) -> LayoutError:
    return LayoutError(
        f"shared memory {name!r} is not to be trusted; choose another name, or remove it as its owner",
        found=found,
        expected=f"a segment of user {os.geteuid()} or root, mode 0600 (workers of another user inherit it by fork)",
    )


def _lock_file(name: str, fd: int) -> int:
    """A descriptor to lock: the segment itself, or, where such objects can't be locked (macOS), a file beside it."""
    if _LINUX:
        return os.dup(fd)
    path = Path(tempfile.gettempdir()) / f"{name}.{os.geteuid()}.lock"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _share(fd: int) -> bool:
    """Changes an exclusive lock into a shared one. That isn't atomic: somebody else may have it for a moment."""
    deadline = time.monotonic() + _MAKER_WAIT_S
    while not _try_lock(fd, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _allocate(name: str, fd: int, size: int) -> mmap:
    """Sizes an empty segment and has its pages allocated; removes it again where there is no space."""
    try:
        if _LINUX:  # marked before it has a size: should this process die, others know whose it is (macOS can't write)
            os.pwrite(fd, MAKING_BYTES, 0)
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
        return mmap(fd, size)
    except OSError as error:
        _unlink(name)
        raise StoreError(
            f"no room for the table {name!r}: {size / 2**20:.1f} MiB of shared memory are needed ({error}). Ask for "
            "fewer slots (16 bytes each), or make /dev/shm larger (docker run --shm-size; in Kubernetes an emptyDir of "
            "medium Memory)"
        ) from error


def _unlink(name: str) -> bool:
    try:
        _posixshmem.shm_unlink("/" + name)
    except FileNotFoundError:
        return False
    return True


def remove(name: str) -> bool:
    """Removes the segment `name` and says whether processes still use it; those go on with what they have mapped.

    Raises `TableNotFoundError`, or `LayoutError` for a segment that isn't a table.
    """
    check_name(name)
    fd = _open(name, os.O_RDWR)
    if fd is None:
        raise TableNotFoundError(errno.ENOENT, "no such table", name)
    try:
        status = os.fstat(fd)
        size = status.st_size
        mine = not _LINUX or stat.S_ISREG(status.st_mode)
        if not mine or (size and not mmap(fd, size)[:7] == b"shmlimi" and not is_half_made(mmap(fd, size))):
            raise LayoutError(f"shared memory {name!r} is not removed", found="another program's", expected="a table")
        lock_fd = _lock_file(name, fd)
        try:
            in_use = not _try_lock(lock_fd, fcntl.LOCK_EX)
            _unlink(name)
        finally:
            os.close(lock_fd)
    finally:
        os.close(fd)
    return in_use
