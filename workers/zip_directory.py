"""The directory of a zip archive as torch writes it: where each record lies, without reading the records.

The archive is untrusted: every size and offset is checked against the file before it is used. Compressed and
encrypted archives are refused; nothing is ever inflated. This module knows zip, and what torch's writer does with
alignment, but nothing of pickles or tensors.

Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, and torch's ``caffe2/serialize/inline_container``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np

from workers.errors import CorruptFile

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
LOCAL = struct.Struct("<4s5H3I2H")
_LONGEST_END = _END.size + 0xFFFF
_UNKNOWN = 0xFFFFFFFF

Read = Callable[[int, int], bytes]


class Entry(NamedTuple):
    """One record: where its local header begins, its size and the CRC-32 that the directory claims."""

    name: str
    header_offset: int
    size_bytes: int
    crc32: int
    flags: int
    name_bytes: int


@dataclass(frozen=True, slots=True)
class Directory:
    """The central directory: its entries in the order of their data, where it begins, and its bytes."""

    entries: list[Entry]
    offset: int
    data: bytes


def find_directory(tail: bytes, size_bytes: int, read: Read, file: str) -> Directory | None:
    """Find and check the central directory from the last bytes of an archive; None when there is no end record.

    ``read(offset, length)`` fetches what the tail does not hold. Offsets count from the beginning of the archive.
    """
    end = _find_end_record(tail)
    if end < 0:
        return None
    _, disk, first_disk, _, count, length, offset, _ = _END.unpack_from(tail, end)
    end_offset = size_bytes - len(tail) + end
    if end_offset >= _LOCATOR64.size:
        locator = read(end_offset - _LOCATOR64.size, _LOCATOR64.size)
        if locator.startswith(b"PK\x06\x07"):
            end_offset = _LOCATOR64.unpack(locator)[2]
            disk, first_disk, count, length, offset = _read_end64(read, end_offset, size_bytes, file)
    if disk or first_disk:
        raise damaged(file, "one archive", f"part {disk} of a split zip archive")
    if offset + length != end_offset or count * _CENTRAL.size > length:
        raise damaged(
            file,
            f"a zip directory that ends at byte {end_offset}",
            f"one of {count} entries and {length} bytes at byte {offset}",
        )
    data = read(offset, length)
    entries = _entries(data, count, offset, file)
    return Directory(sorted(entries, key=attrgetter("header_offset")), offset, data)


def _find_end_record(tail: bytes) -> int:
    position = len(tail)
    lowest = max(0, len(tail) - _LONGEST_END)
    while (position := tail.rfind(b"PK\x05\x06", lowest, position)) >= 0:
        if position + _END.size <= len(tail):
            comment = int.from_bytes(tail[position + 20 : position + 22], "little")
            if position + _END.size + comment == len(tail):
                return position
    return -1


def _read_end64(read: Read, offset: int, size_bytes: int, file: str) -> tuple[int, int, int, int, int]:
    if offset + _END64.size > size_bytes:
        raise damaged(file, f"an end record inside of {size_bytes} bytes", f"one at byte {offset}")
    signature, _, _, _, disk, first_disk, _, count, length, start = _END64.unpack(read(offset, _END64.size))
    if signature != b"PK\x06\x06":
        raise damaged(file, f"a zip64 end record at byte {offset}", "something else")
    return disk, first_disk, count, length, start


def _entries(data: bytes, count: int, limit: int, file: str) -> list[Entry]:
    entries: list[Entry] = []
    position = 0
    for _ in range(count):
        if position + _CENTRAL.size > len(data):
            raise damaged(file, f"{count} directory entries", f"room for {len(entries)}")
        fields = _CENTRAL.unpack_from(data, position)
        signature, _, _, flags, method, _, _, crc, packed, plain, name_bytes, extra_bytes, comment_bytes = fields[:13]
        offset = fields[16]
        name_start = position + _CENTRAL.size
        extra_start = name_start + name_bytes
        position = extra_start + extra_bytes + comment_bytes
        if signature != b"PK\x01\x02" or position > len(data):
            raise damaged(file, f"{count} directory entries", f"damage after {len(entries)}")
        name = data[name_start:extra_start].decode("utf-8", "backslashreplace")
        if _UNKNOWN in (plain, packed, offset):
            extra = data[extra_start : extra_start + extra_bytes]
            plain, packed, offset = _read_extra64(extra, (plain, packed, offset))
        if method or flags & 1 or packed != plain:
            raise _refuse_packed(file, name, flags)
        if offset + LOCAL.size + name_bytes + plain > limit:
            raise damaged(file, f"records before byte {limit}", f"{name} of {plain} bytes at byte {offset}")
        entries.append(_new_entry(Entry, (name, offset, plain, crc, flags, name_bytes)))
    if position != len(data):
        raise damaged(file, f"a directory of {len(data)} bytes", f"{count} entries of {position} bytes")
    if len({entry.name for entry in entries}) != count:
        raise damaged(file, "each record once", "records of equal names")
    return entries


# Named tuples spend half of their construction on sorting out keyword arguments.
_new_entry = cast("Callable[[type[Entry], tuple[Any, ...]], Entry]", tuple.__new__)


def _read_extra64(extra: bytes, fields: tuple[int, int, int]) -> tuple[int, ...]:
    """Replace sizes and offsets that do not fit 32 bits by those of the zip64 extra field, where it has them."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        body = extra[position + 4 : position + 4 + length]
        if kind == 1:
            values = iter(int.from_bytes(body[i : i + 8], "little") for i in range(0, len(body) - 7, 8))
            return tuple(next(values, field) if field == _UNKNOWN else field for field in fields)
        position += 4 + length
    return fields


def _refuse_packed(file: str, name: str, flags: int) -> CorruptFile:
    found = "encrypted" if flags & 1 else "compressed"
    return CorruptFile(
        f"{file}: its record {name} is {found}; torch stores records as they are",
        file=file,
        expected="stored records",
        found=f"{found} records",
        hint="The archive was packed again by another program: load it and save it with torch.save.",
    )


def derive_data_offsets(directory: Directory, alignment: int) -> tuple[Any, Any]:
    """Where the data of each entry begin, as far as that follows from the directory alone: (offsets, known).

    The local header has an extra field of unknown length, but torch's writer leaves two tracks. It pads so that the
    data begin at the next multiple of ``alignment`` after the shortest possible header; and behind the data follow
    only a data descriptor of known size and the next header. Where both tracks meet, the offset is known (and the
    record's CRC proves it when the data are read); elsewhere the local header has to be asked.
    """
    entries = directory.entries
    offsets = np.array([entry.header_offset for entry in entries], np.int64)
    sizes = np.array([entry.size_bytes for entry in entries], np.int64)
    names = np.array([entry.name_bytes for entry in entries], np.int64)
    described = np.array([entry.flags & 8 != 0 for entry in entries], np.bool_)
    big, far = sizes >= _UNKNOWN, offsets >= _UNKNOWN
    shortest = offsets + LOCAL.size + names + 4 + 4 * (big | far) + 16 * big + 8 * far
    forward = -(-shortest // alignment) * alignment
    ends = np.append(offsets[1:], directory.offset)
    backward = ends - sizes - np.where(described, np.where(big | far, 24, 16), 0)
    return forward, forward == backward


def read_local_header(header: bytes | memoryview, entry: Entry, file: str) -> int:
    """Where an entry's data begin, from the first 30 bytes of its local header."""
    fields = LOCAL.unpack(header) if len(header) == LOCAL.size else (b"",)
    if fields[0] != b"PK\x03\x04" or fields[9] != entry.name_bytes:
        raise damaged(file, f"the record {entry.name} at byte {entry.header_offset}", "something else")
    return int(entry.header_offset + LOCAL.size + fields[9] + fields[10])


def check_no_overlap(directory: Directory, data_offsets: Any, file: str) -> None:
    """Refuse records that reach into the next one or into the directory."""
    entries = directory.entries
    sizes = np.array([entry.size_bytes for entry in entries], np.int64)
    limits = np.append(np.array([entry.header_offset for entry in entries[1:]], np.int64), directory.offset)
    wrong = np.flatnonzero(data_offsets + sizes > limits)
    if len(wrong):
        entry = entries[int(wrong[0])]
        raise damaged(
            file,
            f"the record {entry.name} to end before byte {int(limits[wrong[0]])}",
            f"{entry.size_bytes} bytes at byte {int(data_offsets[wrong[0]])}",
        )


def damaged(file: str, expected: str, found: str) -> CorruptFile:
    """Build the error for an archive that contradicts itself or the size of its file."""
    return CorruptFile(
        f"{file}: damaged zip archive: expected {expected}, found {found}",
        file=file,
        expected=expected,
        found=found,
        hint="The file is truncated or damaged; fetch it again from where it was saved.",
    )
