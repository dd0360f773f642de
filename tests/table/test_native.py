"""The C helper itself: its hash, its independence of Python, and what is said where it is missing."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from shmlimit.errors import StoreError
from shmlimit.table import native

# The published vectors of SipHash-2-4: the key 00 01 … 0f over the messages "", 00, 00 01, … by their length.
SIPHASH = {
    0: 0x726FDB47DD0E0E31,
    1: 0x74F839C593DC67FD,
    2: 0x0D6C8009D9A94F5A,
    7: 0xAB0200F58B01D137,
    8: 0x93F5F5799A932462,
    15: 0xA129CA6149BE45E5,
}


@pytest.mark.parametrize("length", SIPHASH)
def test_siphash_agrees_with_its_published_vectors(length: int) -> None:
    """The fingerprint's hash is SipHash-2-4."""
    key = (ctypes.c_uint64 * 2).from_buffer_copy(bytes(range(16)))
    assert native.helper().siphash(key, bytes(range(length)), length) == SIPHASH[length]


def test_library_knows_nothing_of_python() -> None:
    """One library serves every Python: it refers to no symbol of the interpreter."""
    symbols = subprocess.run(["nm", "-D", str(native.LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert "shmlimit_take" in symbols
    assert " Py" not in symbols
    assert " _Py" not in symbols


def test_swap_of_a_pair_is_one_instruction() -> None:
    """The 16-byte swap is inline: a call to libatomic might take a lock."""
    symbols = subprocess.run(["nm", "-D", str(native.LIBRARY)], capture_output=True, text=True, check=True).stdout
    assert "__atomic" not in symbols
    assert "__sync" not in symbols


def test_missing_library_is_explained(tmp_path: Path) -> None:
    """Without the helper a table can't be opened, and the error names the way out."""
    with pytest.raises(StoreError, match="SqliteStore"):
        native.Helper(tmp_path / "missing.so")


def _compile(tmp_path: Path, body: str) -> Path:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(body)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def test_machine_without_pair_swap_is_refused(tmp_path: Path) -> None:
    """A helper built without the 16-byte swap says so instead of counting wrongly."""
    with pytest.raises(StoreError, match="16-byte compare-and-swap"):
        native.Helper(_compile(tmp_path, f"int shmlimit_abi(void) {{ return -{native.ABI}; }}"))


def test_other_version_of_the_library_is_refused(tmp_path: Path) -> None:
    """A stale library is told apart before anything is called in it."""
    with pytest.raises(StoreError, match="another version"):
        native.Helper(_compile(tmp_path, "int shmlimit_abi(void) { return 77; }"))


def test_import_needs_no_helper_and_nothing_optional() -> None:
    """`import shmlimit` loads neither the helper nor numpy nor any framework."""
    code = (
        "import shmlimit, sys; from shmlimit.table import native;"
        "assert native.helper.cache_info().currsize == 0;"
        "print([m for m in ('numpy', 'gunicorn', 'falcon', 'multiprocessing', 'sqlite3', 'redis') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
