"""The wheel: one for every CPython of a platform, with helper and builtin in it; and one without the builtin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


# What a build sees where Python's headers are missing: a directory without them.
WITHOUT_HEADERS = """
import runpy, sys, sysconfig
get_path = sysconfig.get_path
sysconfig.get_path = lambda name, *a, **k: "/nowhere" if name == "include" else get_path(name, *a, **k)
sys.argv = ["setup.py", *sys.argv[1:]]
runpy.run_path("setup.py", run_name="__main__")
"""


def sources(directory: Path) -> Path:
    """A copy of what a build needs, and nothing that was built."""
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, directory)
    shutil.copytree(ROOT / "shmlimit", directory / "shmlimit", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return directory


def run(command: list[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, built without a network."""
    out = tmp_path_factory.mktemp("sdist")
    source = sources(tmp_path_factory.mktemp("source"))
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, source])
    (sdist,) = out.iterdir()
    return sdist


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from it, without a network."""
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (source,) = source.iterdir()
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source])
    (wheel,) = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def plain_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built where Python's headers are missing."""
    out, source = tmp_path_factory.mktemp("plain"), sources(tmp_path_factory.mktemp("source"))
    done = run([sys.executable, "-c", WITHOUT_HEADERS, "bdist_wheel", "--dist-dir", out], cwd=source)
    assert "there is no Python.h in /nowhere" in done.stderr
    (wheel,) = out.iterdir()
    return wheel


def pythons() -> Iterator[str]:
    """The interpreters of this machine that the wheel is for, this one first: of the path, and of pyenv."""
    yield sys.executable
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(10, 16):
        if minor == sys.version_info.minor:
            continue
        found = [shutil.which(f"python3.{minor}"), *sorted(map(str, versions.glob(f"*/bin/python3.{minor}")))]
        for python in filter(None, found):
            works = subprocess.run([python, "-c", ""], capture_output=True, timeout=60, check=False)
            if works.returncode == 0:  # a version manager's shim may stand for nothing
                yield python
                break


def test_wheel_is_for_every_cpython_of_the_platform(wheel: Path) -> None:
    """Its tag names the platform, and the oldest CPython that it serves."""
    assert "-cp310-abi3-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


def test_wheel_without_the_builtin_is_for_every_python(plain_wheel: Path) -> None:
    """Without headers the build goes on, says what is missing, and the wheel knows nothing of Python."""
    assert "-py3-none-" in plain_wheel.name
    assert not plain_wheel.name.endswith("-any.whl")
    assert not [name for name in zipfile.ZipFile(plain_wheel).namelist() if "_fast." in name and name.endswith(".so")]


def test_wheel_has_what_is_needed(wheel: Path) -> None:
    """Library and builtin, the marker for type checkers, the license; nothing of tests or bench."""
    names = zipfile.ZipFile(wheel).namelist()
    scripts = {f"shmlimit/stores/lua/{file.name}" for file in (ROOT / "shmlimit/stores/lua").iterdir()}
    assert len(scripts) > 5
    libraries = {"shmlimit/table/_table.so", "shmlimit/table/_fast.abi3.so"}
    assert {*libraries, "shmlimit/py.typed", *scripts} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"shmlimit"}


USE = """
import sys; sys.path.insert(0, sys.argv[1])
from shmlimit import SharedTable, TokenBucket
with SharedTable.open(sys.argv[2], 64) as table:
    decisions = [table.take(TokenBucket(2, 3600), "k") for _ in range(3)]
    made = [type(decision)(*decision) for decision in decisions]
    print(table.binding, [one.allowed for one in decisions], len({*decisions, *made}))
"""


@pytest.mark.parametrize("python", list(pythons()))
@pytest.mark.parametrize("use", [("wheel", "", "builtin"), ("wheel", "0", "ctypes"), ("plain_wheel", "", "ctypes")])
def test_wheel_serves_this_python(
    request: pytest.FixtureRequest, use: tuple[str, str, str], python: str, name: str, tmp_path: Path
) -> None:
    """The same wheel counts under each Python that this machine has, with nothing else installed; as a builtin, or
    through ctypes where that isn't there or isn't wanted. A decision is one that this Python could have made.
    """
    built, refused, way = use
    zipfile.ZipFile(request.getfixturevalue(built)).extractall(tmp_path)
    done = run([python, "-I", "-c", USE, tmp_path, name], env={**os.environ, "SHMLIMIT_FAST": refused})
    assert done.stdout == f"{way} [True, True, False] 3\n", done.stderr


def test_builtin_uses_the_stable_abi_alone(wheel: Path, tmp_path: Path) -> None:
    """It refers to nothing of the interpreter that a later one may not have, and to nothing of the helper."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    symbols = run(["nm", "-D", "--undefined-only", tmp_path / "shmlimit/table/_fast.abi3.so"]).stdout.split()
    used = {symbol for symbol in symbols if symbol.startswith(("Py", "_Py"))}
    assert len(used) > 20
    assert not {symbol for symbol in used if symbol.startswith("_Py")} - {"_Py_Dealloc", "_Py_NoneStruct"}
    assert not [symbol for symbol in symbols if symbol.startswith("shmlimit")]


def test_editable_install_builds_both(tmp_path: Path) -> None:
    """As `make` installs it: library and builtin lie beside the sources."""
    source = sources(tmp_path)
    run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=source)
    assert sorted(path.name for path in (source / "shmlimit/table").glob("*.so")) == ["_fast.abi3.so", "_table.so"]
