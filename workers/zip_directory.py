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

import numpy as np
import numpy.typing as npt

from workers.errors import CorruptFile

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LENGTHS = struct.Struct("<3H")
_LOCATOR64 = struct.Struct("<4sIQI")
LOCAL = struct.Struct("<4s5H3I2H")
_LONGEST_END = _END.size + 0xFFFF
_UNKNOWN = 0xFFFFFFFF
_HUGE = 1 << 62

Read = Callable[[int, int], bytes]
Column = npt.NDArray[np.int64]


# A central entry, without the fields that nothing here asks for.
_CENTRAL = np.dtype(
    {
        "names": ["signature", "flags", "method", "crc", "packed", "plain", "name", "extra", "comment", "offset"],
        "formats": ["S4", "<u2", "<u2", "<u4", "<u4", "<u4", "<u2", "<u2", "<u2", "<u4"],
        "offsets": [0, 8, 10, 16, 20, 24, 28, 30, 32, 42],
        "itemsize": 46,
    }
)


@dataclass(frozen=True, slots=True)
class Directory:
    """The central directory, in columns, in the order of the records' data.

    ``header_offsets`` are where the local headers begin; ``offset`` is where the directory itself does, and ``data``
    its bytes. All numbers are such that the records could lie before the directory.
    """

    names: list[str]
    header_offsets: Column
    sizes: Column
    crcs: Column
    flags: Column
    name_bytes: Column
    offset: int
    data: bytes

    @property
    def limits(self) -> Column:
        """Where each record has to end: at the next one's header."""
        return np.append(self.header_offsets[1:], self.offset)


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
    if offset + length != end_offset or count * _CENTRAL.itemsize > length:
        raise damaged(
            file,
            f"a zip directory that ends at byte {end_offset}",
            f"one of {count} entries and {length} bytes at byte {offset}",
        )
    data = read(offset, length)
    return _parse(data, count, offset, file)


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


def _parse(data: bytes, count: int, limit: int, file: str) -> Directory:
    positions = _positions(data, count, file)
    table = np.frombuffer(data, np.uint8)[positions[:, None] + np.arange(_CENTRAL.itemsize)].view(_CENTRAL)[:, 0]
    plain, packed, offset, flags, name_bytes, crcs = (
        table[column].astype(np.int64) for column in ("plain", "packed", "offset", "flags", "name", "crc")
    )
    names_start = positions + _CENTRAL.itemsize
    for row in np.flatnonzero((plain == _UNKNOWN) | (packed == _UNKNOWN) | (offset == _UNKNOWN)).tolist():
        start = int(names_start[row] + name_bytes[row])
        extra = data[start : start + int(table["extra"][row])]
        plain[row], packed[row], offset[row] = _read_extra64(extra, (plain[row], packed[row], offset[row]))
    order = np.argsort(offset, kind="stable")
    names = [
        data[start : start + length].decode("utf-8", "backslashreplace")
        for start, length in zip(names_start[order].tolist(), name_bytes[order].tolist(), strict=True)
    ]
    if len(set(names)) != count:
        raise damaged(file, "each record once", "records of equal names")
    packed_again = (table["method"] != 0) | (flags & 1 != 0) | (packed != plain)
    for row in np.flatnonzero(packed_again[order]).tolist():
        raise _refuse_packed(file, names[row], encrypted=bool(flags[order[row]] & 1))
    directory = Directory(
        names=names,
        header_offsets=offset[order],
        sizes=plain[order],
        crcs=crcs[order],
        flags=flags[order],
        name_bytes=name_bytes[order],
        offset=limit,
        data=data,
    )
    _check_inside(directory, file)
    return directory


def _positions(data: bytes, count: int, file: str) -> Column:
    """Where each entry begins."""
    positions: list[int] = []
    position = 0
    for _ in range(count):
        if not data.startswith(b"PK\x01\x02", position) or position + _CENTRAL.itemsize > len(data):
            raise damaged(file, f"{count} directory entries", f"damage after {len(positions)}")
        positions.append(position)
        name, extra, comment = _LENGTHS.unpack_from(data, position + 28)
        position += _CENTRAL.itemsize + name + extra + comment
    if position != len(data):
        raise damaged(file, f"a directory of {len(data)} bytes", f"{count} entries of {position} bytes")
    return np.array(positions, np.int64)


def _check_inside(directory: Directory, file: str) -> None:
    room = directory.offset - LOCAL.size - directory.name_bytes - directory.header_offsets
    for row in np.flatnonzero((directory.sizes > room) | (room < 0)).tolist():
        found = f"{directory.names[row]} of {directory.sizes[row]} bytes at byte {directory.header_offsets[row]}"
        raise damaged(file, f"records before byte {directory.offset}", found)


def _read_extra64(extra: bytes, fields: tuple[int, int, int]) -> tuple[int, ...]:
    """Replace sizes and offsets that do not fit 32 bits by those of the zip64 extra field, where it has them."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        body = extra[position + 4 : position + 4 + length]
        if kind == 1:
            values = iter(min(int.from_bytes(body[i : i + 8], "little"), _HUGE) for i in range(0, len(body) - 7, 8))
            return tuple(next(values, field) if field == _UNKNOWN else field for field in fields)
        position += 4 + length
    return fields


def _refuse_packed(file: str, name: str, *, encrypted: bool) -> CorruptFile:
    found = "encrypted" if encrypted else "compressed"
    return CorruptFile(
        f"{file}: its record {name} is {found}; torch stores records as they are",
        file=file,
        expected="stored records",
        found=f"{found} records",
        hint="The archive was packed again by another program: load it and save it with torch.save.",
    )


def derive_data_offsets(directory: Directory, alignment: int) -> tuple[Column, npt.NDArray[np.bool_]]:
    """Where the data of each entry begin, as far as that follows from the directory alone: (offsets, known).

    The local header has an extra field of unknown length, but torch's writer leaves two tracks. It pads so that the
    data begin at the next multiple of ``alignment`` after the shortest possible header; and behind the data follow
    only a data descriptor of known size and the next header. Where both tracks meet, the offset is known (and the
    record's CRC proves it when the data are read); elsewhere the local header has to be asked.
    """
    offsets, sizes = directory.header_offsets, directory.sizes
    big, far = sizes >= _UNKNOWN, offsets >= _UNKNOWN
    shortest = offsets + LOCAL.size + directory.name_bytes + 4 + 4 * (big | far) + 16 * big + 8 * far
    forward = -(-shortest // alignment) * alignment
    descriptors = np.where(directory.flags & 8 != 0, np.where(big | far, 24, 16), 0)
    backward = directory.limits - sizes - descriptors
    return forward, forward == backward


def read_local_header(header: bytes | memoryview, directory: Directory, row: int, file: str) -> int:
    """Where a record's data begin, from the first 30 bytes of its local header."""
    offset = int(directory.header_offsets[row])
    fields = LOCAL.unpack(header) if len(header) == LOCAL.size else (b"",)
    if fields[0] != b"PK\x03\x04" or fields[9] != directory.name_bytes[row]:
        raise damaged(file, f"the record {directory.names[row]} at byte {offset}", "something else")
    return int(offset + LOCAL.size + fields[9] + fields[10])


def check_no_overlap(directory: Directory, data_offsets: Column, file: str) -> None:
    """Refuse records that reach into the next one or into the directory."""
    limits = directory.limits
    for row in np.flatnonzero(data_offsets + directory.sizes > limits).tolist():
        expected = f"the record {directory.names[row]} to end before byte {limits[row]}"
        raise damaged(file, expected, f"{directory.sizes[row]} bytes at byte {data_offsets[row]}")


def damaged(file: str, expected: str, found: str) -> CorruptFile:
    """Build the error for an archive that contradicts itself or the size of its file."""
    return CorruptFile(
        f"{file}: damaged zip archive: expected {expected}, found {found}",
        file=file,
        expected=expected,
        found=found,
        hint="The file is truncated or damaged; fetch it again from where it was saved.",
    )
