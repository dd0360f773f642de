"""The format: told once in a docstring, and the same in numpy, in the docstring and in C."""

from __future__ import annotations

import ctypes
import re

import pytest

from shmlimit import ConfigError, FixedWindow, Gcra, Policy, SharedTable, SlidingCounter, TokenBucket
from shmlimit.table import layout, native


def test_docstring_tells_the_dtype() -> None:
    """The table of header fields in the docstring is the numpy dtype, field by field."""
    told = re.findall(r"^\|\s+(\d+) \| (\w+)\s+\| (\S+(?: u8)?)\s*\|", layout.__doc__ or "", re.MULTILINE)
    header = layout.header_dtype()
    sizes = {"u8": 8, "u4": 4, "i8": 8, "2 u8": 16, "60×128": 60 * 128}
    assert [(int(offset), field, sizes[kind]) for offset, field, kind in told] == [
        (header.fields[field][1], field, header.fields[field][0].itemsize) for field in header.names
    ]


def test_c_agrees_with_the_dtype() -> None:
    """Sizes and offsets in the C helper are those of the dtype."""
    out = (ctypes.c_uint64 * 32)()
    count = native.helper().layout(out)
    header = layout.header_dtype()
    assert list(out[:count]) == [
        header.itemsize,
        layout.slot_dtype().itemsize,
        layout.BUCKET_SLOTS,
        layout.CANDIDATES,
        layout.LANES,
        header["lanes"].base.itemsize,
        *(header.fields[field][1] for field in header.names),
    ]


def test_header_struct_agrees_with_the_dtype() -> None:
    """What `write_header` packs lies where the dtype says."""
    header = layout.header_dtype()
    packed = bytearray(layout.HEADER_BYTES)
    layout._HEADER.pack_into(packed, 0, 1, 2, 3, 4, 5, bytes(range(16)), -7)
    import numpy as np

    read = np.frombuffer(packed, header)[0]
    assert [int(read[field]) for field in ("magic", "version", "header_bytes", "slots", "spare_slots")] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert read["secret"].tobytes() == bytes(range(16))
    assert read["clock_offset_us"] == -7


@pytest.mark.parametrize(("asked", "slots"), [(1, 24), (24, 24), (25, 32), (65536, 65536), (65537, 65544)])
def test_slots_are_rounded_up_to_whole_buckets(asked: int, slots: int) -> None:
    """A table has whole buckets, and at least one for each candidate."""
    assert layout.round_slots(asked) == slots


@pytest.mark.parametrize("asked", [0, -1, 2**30 + 1, True, 1.5, "8", None])
def test_slots_out_of_range_are_refused(asked: object) -> None:
    """A number of slots that can't be is a ConfigError that names the bound."""
    with pytest.raises(ConfigError, match=r"slots must be .* within 1 and 1073741824"):
        layout.round_slots(asked)  # type: ignore[arg-type]


def test_second_region_is_small() -> None:
    """The region for sharing is 1/64 of the slots, at least 1,024."""
    assert layout.spare_slots(24) == 1024
    assert layout.spare_slots(2**20) == 2**14
    assert layout.segment_bytes(65536) == 8192 + 16 * (65536 + 1024)


T0 = 1_767_225_600_123_456
WORDS = [
    # policy, cost, prefix, then (bits, value) from high to low
    (TokenBucket(3, 0.001, burst=1), 1, "1", [(52, T0 + 333), (11, 1)]),
    (Gcra(1, 60), 1, "1", [(52, T0 + 60 * 10**6), (11, 0)]),
    (FixedWindow(10, 60), 3, "010", [(42, (T0 // 60_000_000 + 1) * 60_000), (19, 3)]),
    (FixedWindow(10, 0.0015), 3, "010", [(42, -(-(T0 // 1_500 + 1) * 1_500 // 1_000)), (19, 3)]),
    (FixedWindow(10**6, 7), 600_000, "011", [(30, -(-(T0 // 7_000_000 + 1) * 7 // 4)), (31, 600_000)]),
    (SlidingCounter(10, 60), 3, "0010", [(42, (T0 // 60_000_000 + 2) * 60_000), (9, 0), (9, 3)]),
    (SlidingCounter(1_000, 1.5), 700, "0011", [(32, -(-(T0 // 1_500_000 + 2) * 3 // 2)), (14, 0), (14, 700)]),
]


@pytest.mark.parametrize(("policy", "cost", "prefix", "fields"), WORDS, ids=lambda value: str(value)[:30])
def test_state_words_are_as_told(
    table: SharedTable, policy: Policy, cost: int, prefix: str, fields: list[tuple[int, int]]
) -> None:
    """Every kind of word has the prefix, the units and the widths that the docstring gives."""
    assert table.take(policy, "k", cost, now_us=T0).allowed
    slots = table.slots
    (state,) = slots["state"][slots["fingerprint"] != 0]
    assert f"{int(state):064b}" == prefix + "".join(f"{value:0{bits}b}" for bits, value in fields)
    assert f"`{prefix}`" in (layout.__doc__ or "")
