"""For tests of code that uses shmlimit, and of stores of one's own.

    from shmlimit.testing import FakeClock, StoreContract

    clock = FakeClock()
    store = MemoryStore(clock=clock)        # time in the test's hands: clock.advance(59.5)

    class TestMyStore(StoreContract):       # what every store promises, run over one of your own
        make_store = MyStore

The contract needs pytest and hypothesis, and is loaded at its first use; the doubles need nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmlimit.testing.doubles import FailingStore, FakeClock, ToldStore

if TYPE_CHECKING:
    from shmlimit.testing.contract import StoreContract

__all__ = ["FailingStore", "FakeClock", "StoreContract", "ToldStore"]

_TESTS = ("_hooks", "_model", "_decisions", "_written", "_keys", "_joint", "_together", "contract")


def __getattr__(name: str) -> object:
    """`StoreContract` is loaded at its first use, and its asserts then show both sides like those of a test file."""
    if name == "StoreContract":
        import pytest

        pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _TESTS))
        from shmlimit.testing.contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
