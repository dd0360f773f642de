"""The exception tree.

A denial is a value (`Decision.allowed` is false), never an exception. What is raised is either a mistake in the
configuration or a store that could not answer; every message says what to do.
"""

from __future__ import annotations


class ShmlimitError(Exception):
    """The root of everything that this package raises on purpose."""


class ConfigError(ShmlimitError, ValueError):
    """A setting that can't work: names the field, what was given and the bound."""


class StoreError(ShmlimitError):
    """A store could not answer. Whether the request then passes is the guard's `fail_open`."""


class ContentionError(StoreError):
    """The bound on lost swaps was reached: nothing was charged, and trying again is safe."""


class LayoutError(ShmlimitError):
    """A segment of another version or shape, or one that is not to be trusted.

    Attributes: `found` and `expected`, texts that say what was there and what should have been.
    """

    def __init__(self, message: str, *, found: str, expected: str) -> None:
        super().__init__(f"{message}: found {found}, expected {expected}")
        self.found = found
        self.expected = expected


class TableExistsError(ShmlimitError, FileExistsError):
    """`SharedTable.create` of a name that is taken."""


class TableNotFoundError(ShmlimitError, FileNotFoundError):
    """`SharedTable.attach` to a name that nobody made."""
