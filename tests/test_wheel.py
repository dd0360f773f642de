"""The wheel: one for every Python of a platform, with the helper in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from a copy of the sources, without a network."""
    source = tmp_path_factory.mktemp("source")
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    shutil.copytree(ROOT / "shmlimit", source / "shmlimit", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.iterdir()
    return wheel


def pythons() -> Iterator[str]:
    """The interpreters of this machine that the wheel is for, this one first."""
    yield sys.executable
    for minor in range(10, 16):
        found = shutil.which(f"python3.{minor}")
        if found and minor != sys.version_info.minor:
            works = subprocess.run([found, "-c", ""], capture_output=True, timeout=60, check=False)
            if works.returncode == 0:  # a version manager's shim may stand for nothing
                yield found


def test_wheel_is_for_every_python_of_the_platform(wheel: Path) -> None:
    """Its tag names the platform and no version of Python."""
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


def test_wheel_has_what_is_needed(wheel: Path) -> None:
    """The library, the marker for type checkers, the license; nothing of tests or bench."""
    names = zipfile.ZipFile(wheel).namelist()
    scripts = {f"shmlimit/stores/lua/{file.name}" for file in (ROOT / "shmlimit/stores/lua").iterdir()}
    assert len(scripts) > 5
    assert {"shmlimit/table/_table.so", "shmlimit/py.typed", *scripts} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"shmlimit"}


@pytest.mark.parametrize("python", list(pythons()))
def test_wheel_serves_this_python(wheel: Path, python: str, name: str, tmp_path: Path) -> None:
    """The same wheel counts under each Python that this machine has, with nothing else installed."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from shmlimit import SharedTable, TokenBucket\n"
        "with SharedTable.open(sys.argv[2], 64) as table:\n"
        "    print([table.take(TokenBucket(2, 3600), 'k').allowed for _ in range(3)])\n"
    )
    command = [python, "-I", "-c", code, str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[True, True, False]\n", done.stderr
