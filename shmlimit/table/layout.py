"""The format of the shared table, told once.

The segment is `header | slots | spare slots`, little-endian, made of 64-bit words.

Header, two pages (8,192 bytes):

| offset | field           | type  | what                                                                          |
|-------:|-----------------|-------|-------------------------------------------------------------------------------|
|      0 | magic           | u8    | `MAGIC`, written last; until then `MAKING`, before the segment has its size    |
|      8 | version         | u4    | of this layout                                                                |
|     12 | header_bytes    | u4    | 8,192                                                                         |
|     16 | slots           | u8    | slots of the main region, a multiple of 8                                     |
|     24 | spare_slots     | u8    | for keys that find no room among those: slots / 64, at least 1,024            |
|     32 | secret          | 2 u8  | random; keys every fingerprint                                                |
|     48 | clock_offset_us | i8    | table clock + this = Unix time, in microseconds                               |
|     64 | watermark_us    | u8    | the latest expiry of any state that was forgotten to make room                |
|    128 | spare_until_us  | u8    | until then spare slots are in use                                             |
|    512 | lanes           | 60×128| counters, a lane a process: `LANE_FIELDS`                                     |

A slot is the pair of words *(fingerprint, state)*, 16 bytes; 8 slots are a bucket, 128 bytes and aligned so. It is only
ever changed by a compare-and-swap of the whole pair. The fingerprint is a keyed hash of policy and key, and 0 where the
slot is empty. The state describes itself by a prefix code, from its highest bit on, so that anyone can tell whether it
has expired without knowing its policy:

| prefix | kind                             | payload, from high to low                                            |
|--------|----------------------------------|----------------------------------------------------------------------|
| `1`    | GCRA                             | 52 bits: µs of the theoretical arrival time; 11: fraction in 1/d µs  |
| `010`  | fixed window                     | 42: expiry in ms; 19: count                                          |
| `011`  | fixed window of 4 s or more      | 30: expiry in units of 4 s; 31: count                                |
| `0010` | sliding counter                  | 42: expiry in ms; 9 and 9: counts of the two windows                 |
| `0011` | sliding counter of 1 s or more   | 32: expiry in s; 14 and 14: counts                                   |
| `000`  | reserved (not all zero)          | 42: ms of the table clock when it was made; 19: nonce                |
| all 0  | empty                            |                                                                      |

All times are Unix times. For GCRA, d = limit / gcd(limit, period_us), at most 2048. A state has expired when its time
has come: for GCRA the µs, plus one where there is a fraction.
"""

from __future__ import annotations

import struct
from mmap import mmap
from typing import TYPE_CHECKING, Any

from shmlimit.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import numpy as np

MAGIC = int.from_bytes(b"shmlimit", "little")
MAKING_BYTES = b"shmlimi?"
MAKING = int.from_bytes(MAKING_BYTES, "little")
VERSION = 1
HEADER_BYTES = 8192
SLOT_BYTES = 16
BUCKET_SLOTS = 8
CANDIDATES = 3
LANES = 60
LANE_BYTES = 128
LANES_AT = 512

MIN_SLOTS = BUCKET_SLOTS * CANDIDATES
MAX_SLOTS = 2**30

COUNTERS = ("allowed", "denied", "shared", "full", "reclaimed", "contended")
LANE_FIELDS = ("owner", *COUNTERS, "nonces")

_MAGIC = struct.Struct("<Q")
_HEADER = struct.Struct("<QIIQQ16sq")  # the fields from magic to clock_offset_us
_LANE = struct.Struct(f"<{len(LANE_FIELDS)}Q")


def round_slots(slots: int) -> int:
    """`slots` rounded up to whole buckets, at least one for each candidate; a `ConfigError` out of range."""
    if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= MAX_SLOTS:
        raise ConfigError(f"slots must be an integer within 1 and {MAX_SLOTS} (16 bytes each), not {slots!r}")
    return max(MIN_SLOTS, -(-slots // BUCKET_SLOTS) * BUCKET_SLOTS)


def spare_slots(slots: int) -> int:
    """The size of the second region for a main region of `slots`."""
    return max(1024, round_slots(-(-slots // 64)))


def segment_bytes(slots: int) -> int:
    """The bytes of a segment for `slots` slots (rounded)."""
    return HEADER_BYTES + SLOT_BYTES * (slots + spare_slots(slots))


def write_header(mapping: mmap, slots: int, secret: bytes, clock_offset_us: int) -> None:
    """Makes a zeroed segment a table; the magic goes last, so that half a header is never taken for one."""
    _HEADER.pack_into(mapping, 0, MAKING, VERSION, HEADER_BYTES, slots, spare_slots(slots), secret, clock_offset_us)
    _MAGIC.pack_into(mapping, 0, MAGIC)


def read_secret(mapping: mmap) -> bytes:
    """The secret of the table in `mapping`: 16 bytes."""
    secret: bytes = _HEADER.unpack_from(mapping, 0)[5]
    return secret


def is_half_made(mapping: mmap) -> bool:
    """Whether a maker died before the header was complete. It had marked the segment before it gave it a size."""
    return mapping[: _MAGIC.size] == MAKING_BYTES


def read_slots(name: str, mapping: mmap) -> int:
    """The slots of the table in `mapping`, or a `LayoutError` where that is no table of this version and shape."""
    if len(mapping) < HEADER_BYTES:
        raise _wrong(name, f"{len(mapping)} bytes", f"at least {HEADER_BYTES}")
    magic, version, header_bytes, slots, spares, _, _ = _HEADER.unpack_from(mapping, 0)
    if magic != MAGIC:
        raise _wrong(name, f"a segment that begins with {mapping[:8]!r}", "a shmlimit table")
    if version != VERSION:
        raise _wrong(name, f"layout version {version}", f"version {VERSION}")
    sound = (
        header_bytes == HEADER_BYTES
        and MIN_SLOTS <= slots <= MAX_SLOTS
        and slots % BUCKET_SLOTS == 0
        and spares == spare_slots(slots)
        and len(mapping) >= segment_bytes(slots)
    )
    if not sound:
        raise _wrong(
            name,
            f"a header of {header_bytes} bytes, {slots} + {spares} slots in {len(mapping)} bytes",
            f"a header of {HEADER_BYTES} bytes and 16 bytes a slot",
        )
    return int(slots)


def _wrong(name: str, found: str, expected: str) -> LayoutError:
    message = f"shared memory {name!r} can't be used (choose another name, or remove it: python -m shmlimit rm {name})"
    return LayoutError(message, found=found, expected=expected)


def read_counters(mapping: mmap) -> dict[str, int]:
    """The counters, summed over the lanes."""
    lanes = [_LANE.unpack_from(mapping, LANES_AT + LANE_BYTES * i) for i in range(LANES)]
    return {name: sum(lane[at] for lane in lanes) for at, name in enumerate(COUNTERS, start=1)}


def slot_dtype() -> np.dtype[Any]:
    """A slot as a numpy dtype. numpy is imported here, not at the head: no decision needs it, and it takes 0.2 s."""
    import numpy as np

    return np.dtype([("fingerprint", "<u8"), ("state", "<u8")])


def header_dtype() -> np.dtype[Any]:
    """The header as a numpy dtype, for inspection."""
    import numpy as np

    lane = np.dtype({"names": list(LANE_FIELDS), "formats": ["<u8"] * len(LANE_FIELDS), "itemsize": LANE_BYTES})
    fields: list[tuple[str, Any, int]] = [
        ("magic", "<u8", 0),
        ("version", "<u4", 8),
        ("header_bytes", "<u4", 12),
        ("slots", "<u8", 16),
        ("spare_slots", "<u8", 24),
        ("secret", "(2,)<u8", 32),
        ("clock_offset_us", "<i8", 48),
        ("watermark_us", "<u8", 64),
        ("spare_until_us", "<u8", 128),
        ("lanes", (lane, (LANES,)), LANES_AT),
    ]
    names, formats, offsets = zip(*fields, strict=True)
    return np.dtype(
        {"names": list(names), "formats": list(formats), "offsets": list(offsets), "itemsize": HEADER_BYTES}
    )
