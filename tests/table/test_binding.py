"""`take` as a builtin, and through ctypes: the way that was chosen is the one in use, and nobody can tell from outside.

What a table promises is tested in the other files of this directory, each test both ways (conftest.py).
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from shmlimit import Decision, FixedWindow, SharedTable, TokenBucket
from shmlimit.table import native
from tests.bindings import bound

MINUTE = TokenBucket(10, 60)


@pytest.fixture
def both(name: str) -> Iterator[dict[str, SharedTable]]:
    """One table, opened both ways."""
    with bound("builtin"):
        builtin = SharedTable.create(name, 4096)
    with bound("ctypes"), builtin, SharedTable.attach(name) as through_ctypes:
        yield {"builtin": builtin, "ctypes": through_ctypes}


# ---- which way -------------------------------------------------------------------------------------------------------


def test_each_run_goes_its_own_way(table: SharedTable, binding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table says which way it goes, and goes it: the builtin enters no function of Python, the other way no C but
    the helper's.
    """
    assert table.binding == binding
    assert isinstance(table.take, types.BuiltinMethodType) is (binding == "builtin")
    table.take(MINUTE, "k")
    entered: list[str] = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        table.take(MINUTE, "k")
        table.take(MINUTE, b"k")
        table.take(MINUTE, "k", 2)
        table.take(MINUTE, "k", now_us=None)
    finally:
        sys.setprofile(None)
    assert entered == ([] if binding == "builtin" else ["take"] * 4)


@pytest.mark.parametrize(("value", "way"), [("0", "ctypes"), ("1", "builtin"), ("", "builtin"), (None, "builtin")])
def test_environment_refuses_the_builtin(name: str, monkeypatch: pytest.MonkeyPatch, value: str, way: str) -> None:
    """SHMLIMIT_FAST=0 as the first table is opened, and nothing else; it is read once."""
    with bound("builtin"):
        monkeypatch.delenv("SHMLIMIT_FAST")
        if value is not None:
            monkeypatch.setenv("SHMLIMIT_FAST", value)
        native.builtins.cache_clear()
        with SharedTable.create(name, 64) as table:
            assert table.binding == way
        monkeypatch.setenv("SHMLIMIT_FAST", "1" if value == "0" else "0")
        with SharedTable.attach(name) as table:
            assert table.binding == way


def test_builtin_of_another_version_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is left of another version knows another `struct call`."""
    with bound("builtin"):
        native.helper()
        native.builtins.cache_clear()
        monkeypatch.setattr(native, "ABI", native.ABI + 1)
        with SharedTable.create(name, 64) as table:
            assert table.binding == "ctypes"


def test_python_without_a_gil_goes_through_ctypes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builtin relies on the GIL, which such a build has even where it has no use for it."""
    with bound("builtin"):
        native.builtins.cache_clear()
        monkeypatch.setattr(sys, "abiflags", "t")
        with SharedTable.create(name, 64) as table:
            assert table.binding == "ctypes"


def test_missing_builtin_is_no_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it couldn't be built, ctypes does it."""
    with bound("builtin"):
        native.builtins.cache_clear()
        monkeypatch.setitem(sys.modules, "shmlimit.table._fast", None)  # which makes an import fail
        with SharedTable.create(name, 64) as table:
            assert table.binding == "ctypes"
            assert table.take(MINUTE, "k").allowed


def test_take_of_a_subclass_is_its_own(name: str, binding: str) -> None:
    """A `take` that a subclass defines isn't hidden; a subclass without one has the builtin."""

    class Counting(SharedTable):
        taken = 0

        def take(self, *arguments: Any, **named: Any) -> Decision:
            self.taken += 1
            return super().take(*arguments, **named)

    class Plain(SharedTable):
        pass

    with Counting.create(name, 64) as table, Plain.attach(name) as plain:
        assert table.take(MINUTE, "k").remaining == 9
        assert (table.taken, table.binding) == (1, "ctypes")
        assert (plain.take(MINUTE, "k").remaining, plain.binding) == (8, binding)


# ---- nobody can tell -------------------------------------------------------------------------------------------------


class Text(str):
    """Text of another class."""

    __slots__ = ()


class Raw(bytes):
    """Bytes of another class."""

    __slots__ = ()


KEYS = ["", "k", "a\0b", "a", "ключ", "😀", "\ud800", Text("sub"), b"", b"\0", b"\xff" * 300, Raw(b"raw"), "x" * 5000]


@pytest.mark.parametrize("key", KEYS, ids=[ascii(key)[:20] for key in KEYS])
def test_a_key_is_one_key_both_ways(both: dict[str, SharedTable], key: str | bytes) -> None:
    """What one way takes the other finds, whatever the key is made of; a `str` is its UTF-8."""
    raw = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else bytes(key)
    for number, form in enumerate([key, raw, key, raw]):
        for at, table in enumerate(both.values()):
            assert both["ctypes"].peek(MINUTE, raw).remaining == 10 - 2 * number - at
            assert table.take(MINUTE, form).remaining == 9 - 2 * number - at


COSTS = [0, 1, 2, 10, 11, 2**30 - 1, 2**30, 2**31, 2**32 + 1, 2**63, 2**64 + 1, 10**30]


@pytest.mark.parametrize("cost", COSTS)
def test_a_cost_is_one_cost_both_ways(both: dict[str, SharedTable], cost: int) -> None:
    """The same six fields, of the same classes, for a fresh key and for one that is half spent."""
    policy = FixedWindow(10, 10**6)  # its answers for one window differ by the time alone
    answers = {}
    for way, table in both.items():
        fresh = table.take(policy, f"{way} {cost}", cost)
        table.take(policy, f"{way} half", 5)
        answers[way] = [fresh, table.take(policy, f"{way} half", cost)]
    for one, other in zip(answers["builtin"], answers["ctypes"], strict=True):
        assert one[:3] == other[:3]
        assert [type(field) for field in one] == [type(field) for field in other]
        assert type(one) is type(other) is Decision


def test_a_decision_of_the_builtin_is_like_any(table: SharedTable) -> None:
    """Equal to one that Python made, with the same hash."""
    policy = TokenBucket(1, 3600)
    table.take(policy, "k", now_us=10**15)
    for decision in (table.take(policy, "fresh", 0), table.take(policy, "fresh", 2), table.take(policy, "other")):
        made = Decision(*decision)
        assert (decision, hash(decision), repr(decision)) == (made, hash(made), repr(made))
        assert len({decision, made}) == 1
        assert decision._replace(limit=7).limit == 7
    assert table.take(policy, "third").allowed is True
    assert table.take(policy, "third").allowed is False


WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((MINUTE,), {}),
    ((MINUTE, "k", 1, 2), {}),
    ((MINUTE, "k"), {"nothing": 1}),
    ((MINUTE, "k"), {"policy": MINUTE}),
    ((MINUTE, "k"), {"nothing": None}),
    ((MINUTE, "k"), {"cost": None}),
    ((MINUTE, "k"), {"cost": -1}),
    ((MINUTE, "k"), {"cost": True}),
    ((MINUTE, "k"), {"now_us": -1}),
    ((MINUTE, "k"), {"now_us": None, "cost": "1"}),
    ((MINUTE, 7), {}),
    ((MINUTE, None), {"now_us": None}),
    ((MINUTE, "k", 1.0), {}),
    ((MINUTE, "k", True), {}),
    (("10/minute", "k"), {}),
    ((None, "k"), {}),
    (([], "k"), {}),
    ((TokenBucket(1, 10**9), "k"), {}),
]


@pytest.mark.parametrize(("arguments", "named"), WRONG)
def test_what_is_wrong_is_told_in_the_same_words(
    both: dict[str, SharedTable], arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """The same class of error, the same message, and nothing is charged."""
    told = []
    for table in both.values():
        with pytest.raises((TypeError, ValueError)) as caught:
            table.take(*arguments, **named)
        told.append((type(caught.value), str(caught.value)))
    assert told[0] == told[1]
    assert both["ctypes"].used() == 0


def test_key_that_is_too_long_is_refused(table: SharedTable) -> None:
    """A length that a C int can't hold isn't cut off: zeros, which are memory that nobody touches."""
    with pytest.raises(ValueError, match="less than 1 GiB"):
        table.take(MINUTE, bytes(2**30))
    assert table.used() == 0


def test_arguments_by_name(table: SharedTable) -> None:
    """Any of them may be given by name."""
    assert table.take(policy=MINUTE, key="k").remaining == 9
    assert table.take(MINUTE, key="k", cost=2).remaining == 7
    assert table.take(MINUTE, "k", cost=2, now_us=None).remaining == 5
    assert table.take(MINUTE, "k", now_us=None).remaining == 4
    assert table.take(MINUTE, "k", 2, now_us=None).remaining == 2
    assert table.take(MINUTE, "at its time", now_us=10**15).reset_us == 6_000_000
    assert not table.take(MINUTE, "at its time", 10, now_us=10**15)


def test_signature_is_the_same(both: dict[str, SharedTable]) -> None:
    """Tools that ask for parameters find them."""
    parameters = {
        way: [(p.name, p.kind, p.default) for p in inspect.signature(table.take).parameters.values()]
        for way, table in both.items()
    }
    assert parameters["builtin"] == parameters["ctypes"]


# ---- policies --------------------------------------------------------------------------------------------------------


def test_many_policies_are_not_mixed_up(table: SharedTable) -> None:
    """More policies than the builtin has places for, in turn: each decides by its own numbers, and none is let go of
    while it is known.
    """
    policies = [TokenBucket(number, 3600) for number in range(1, 1001)]
    for turn in range(3):
        for number, policy in enumerate(policies, 1):
            decision = table.take(policy, "k")
            assert (decision.limit, decision.remaining) == (number, max(number - turn - 1, 0))


def test_policy_that_is_gone_is_not_taken_for_another(table: SharedTable) -> None:
    """The next object may lie where the last one lay."""
    for number in range(1, 2000):
        policy = TokenBucket(number, 3600)
        assert table.take(policy, "k").limit == number
        del policy


def test_known_policy_is_kept_once(table: SharedTable) -> None:
    """A table holds one reference to a policy that it takes again and again (and one as the key of a dict)."""
    policy = TokenBucket(7, 3600)
    table.take(policy, "k")
    before = sys.getrefcount(policy)
    for _ in range(100):
        table.take(policy, "k")
    assert sys.getrefcount(policy) == before
    table.close()
    assert sys.getrefcount(policy) < before


def test_what_is_prepared_of_a_policy_is_let_go_of(name: str) -> None:
    """A builtin holds a `struct policy` until its table is closed, and no longer."""
    with bound("builtin"), SharedTable.create(name, 64) as table:
        for _ in range(100):
            table.take(MINUTE, "k")
        policy = weakref.ref(table._told[MINUTE][1])
        table._told.clear()
        assert policy() is not None
        table.take(MINUTE, "k")
        table.close()
        assert policy() is None


def fails(table: SharedTable, policy: Any, key: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        table.take(policy, key)


@pytest.mark.parametrize(
    "take",
    [
        lambda table: table.take(MINUTE, "k"),
        lambda table: table.take(MINUTE, b"bytes", 0, now_us=None),
        lambda table: table.take(TokenBucket(5, 3600), "new policy"),
        lambda table: table.take(MINUTE, "k", 11),
        lambda table: table.take(MINUTE, "k", cost=0, now_us=10**15),
        lambda table: fails(table, MINUTE, 7),
        lambda table: fails(table, None, "k"),
    ],
    ids=["plain", "bytes", "a policy made anew", "never", "by name", "bad key", "bad policy"],
)
def test_nothing_is_left_behind(table: SharedTable, take: Callable[[SharedTable], object]) -> None:
    """Thousands of decisions of each sort leave no object behind."""
    for _ in range(600):  # until every place that a policy may take is taken
        take(table)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(2000):
        take(table)
    gc.collect()
    assert sys.getallocatedblocks() - before < 200


# ---- the builtin itself ----------------------------------------------------------------------------------------------


@pytest.fixture
def module() -> Any:
    """The extension module."""
    with bound("builtin"):
        return native.builtins()


class Odd(tuple):  # noqa: SLOT001
    """A tuple whose hash depends on how it was made: Python's way comes first."""

    hashes: ClassVar[list[int]] = []

    def __hash__(self) -> int:
        self.hashes.append(len(self.hashes))
        return len(self.hashes)


def test_decisions_are_made_by_python_where_they_would_differ(table: SharedTable, module: Any) -> None:
    """The short way to a decision is taken only if it makes the same; the long way's decisions are as good."""
    address = native.ctypes.cast(table._take, native.ctypes.c_void_p).value
    Odd.hashes.clear()
    binding = module.Binding(address, Odd, table._tell, None, None)
    decision = binding.take(MINUTE, "k")
    assert len(Odd.hashes) == 2  # it was compared
    assert type(decision) is Odd
    assert list(decision[:3]) == [True, 10, 9]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (1,),
        ("1", Decision, None, None, None),
        (1, int, None, None, None),
        (1, 2, None, None, None),
        (0, Decision) + (None,) * 3,
    ],
)
def test_builtin_refuses_what_it_can_not_call(module: Any, arguments: tuple[Any, ...]) -> None:
    """An address that is none, or a class that is no tuple, would be followed blindly."""
    with pytest.raises((TypeError, ValueError)):
        module.Binding(*arguments)
    with pytest.raises(TypeError):
        module.Binding(1, Decision, None, None, None, more=1)


@pytest.mark.parametrize("told", [None, 7, (), (7,), ("7", None), (0, None)])
def test_builtin_refuses_what_python_must_not_tell(table: SharedTable, module: Any, told: Any) -> None:
    """What isn't an address and what keeps it is an error, and not followed."""
    address = native.ctypes.cast(table._take, native.ctypes.c_void_p).value
    binding = module.Binding(address, Decision, lambda _: told, None, None)
    own = isinstance(told, tuple) and told  # others are held by the whole interpreter
    held = sys.getrefcount(told)
    with pytest.raises((TypeError, IndexError, SystemError)):
        binding.take(MINUTE, "k")
    assert not own or sys.getrefcount(told) == held
