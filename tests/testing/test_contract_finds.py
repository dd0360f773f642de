"""The contract can fail: stores that are each broken in one way are found, by the test that is about it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shmlimit.testing import StoreContract
from tests.testing import broken_answers, broken_identities
from tests.testing.sound import BROKEN, ForgetsByItself, SoundContract

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]

CLASSES = """
from tests.testing import broken_answers, broken_identities
from tests.testing.sound import BROKEN, SharedContract, SoundContract

for name, (store, _) in BROKEN.items():
    contract = SharedContract if hasattr(store, "open") else SoundContract
    globals()["Test" + name] = type("Test" + name, (contract,), {"make_store": store})
"""

# What hypothesis finds first is enough: nobody needs the simplest example of it. And by which exceptions tests fail: a
# store that raises what it shouldn't may be found, too, but that is no proof that the test looks at the answer.
CONFTEST = """
import json
import pytest
from hypothesis import Phase, settings

settings.register_profile("first find", phases=[Phase.generate], database=None, derandomize=True)
settings.load_profile("first find")
failed = []

def pytest_runtest_makereport(item, call):
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        asserts = call.excinfo.errisinstance((AssertionError, pytest.fail.Exception))
        failed.append((item.cls.__name__, item.originalname, "" if asserts else call.excinfo.exconly()))

def pytest_sessionfinish():
    with open("failed.json", "w") as file:
        json.dump(failed, file)
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes load this package."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class TestSound(SoundContract):
    """The control: without its break the store passes."""


class TestForgetsByItself(StoreContract):
    """The other control: a server's expiry is no break, where it is told."""

    make_store = ForgetsByItself
    lasts_us = 0


def test_every_broken_store_is_found(pytester: pytest.Pytester) -> None:
    """For each way to be wrong a test of the contract goes red, by a failed assertion."""
    pytester.makeconftest(CONFTEST)
    path = pytester.makepyfile(test_broken=CLASSES)
    asked = [f"{path}::Test{name}::{test}" for name, (_, test) in BROKEN.items()]
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-q", "--tb=no", *asked)
    failed = json.loads((pytester.path / "failed.json").read_text())
    red = {(name, test) for name, test, _ in failed}
    assert {name: test for name, (_, test) in BROKEN.items() if (f"Test{name}", test) not in red} == {}
    assert [(name, error) for name, _, error in failed if error and name != "TestClosesOnce"] == []


def test_every_test_finds_something() -> None:
    """No test of the contract is there that no broken store fails, and all that are in the files are noted."""
    modules = vars(broken_answers) | vars(broken_identities)
    assert {name for name, store in BROKEN.items() if modules.get(name) is store[0]} == set(BROKEN)
    tests = {name for name in dir(StoreContract) if name.startswith("test_")}
    assert tests - {test for _, test in BROKEN.values()} == set()


def test_two_lines_are_enough(pytester: pytest.Pytester) -> None:
    """A store of one's own is tested by a class of two lines, and what fails shows both sides."""
    pytester.makepyfile("""
        from shmlimit.testing import StoreContract
        from tests.testing.broken_answers import PeekTakes

        class TestMyStore(StoreContract):
            make_store = PeekTakes
    """)
    ran = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "peek_writes or test_own_clock")
    ran.assert_outcomes(failed=5, passed=5)
    ran.stdout.fnmatch_lines(["*assert 1 == 3*", "*TestMyStore*"])


def test_a_class_without_a_store(pytester: pytest.Pytester) -> None:
    """The two lines without the second say what is missing."""
    pytester.makepyfile("""
        from shmlimit.testing import StoreContract

        class TestMyStore(StoreContract):
            pass
    """)
    ran = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-k", "with_closes")
    ran.assert_outcomes(errors=1)
    ran.stdout.fnmatch_lines(["*TestMyStore needs make_store*"])


def test_doubles_need_no_test_framework() -> None:
    """`shmlimit.testing` is imported, and its doubles work, where there is neither pytest nor hypothesis."""
    code = """
import sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
from shmlimit.testing import FailingStore, FakeClock, ToldStore
import shmlimit.testing
try:
    shmlimit.testing.StoreContract
except ImportError as error:
    print(error.name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("pytest\n", 0), done.stderr
