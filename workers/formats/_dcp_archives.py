"""The zip archives of many DCP items at once: their directories compared with that of one, in columns.

All items of a file were written by one torch, so their directories differ in sizes, offsets and checksums only.
What an item's directory says is read from its end, and the pickle of its tensor from its beginning; an item that is
in any way different is left to ``torch_file``, which says what is wrong with it, if anything is.
Source of the layout: APPNOTE.TXT of zip; torch ``caffe2/serialize/inline_container.cc``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from workers.checkpoint import NO_CHECKSUM
from workers.errors import InputError
from workers.geometry import IntArray
from workers.pickles import TensorRecord, load
from workers.storage import Folder
from workers.zip_directory import LOCAL, Directory, find_directory

TAIL_BYTES = 704
"""The directory of one tensor and what ends it take 561 bytes as torch 2.13 writes them, and fewer before."""
HEAD_BYTES = 384
"""The pickle of one tensor begins at byte 64 and takes 190 bytes or fewer, at most 5 more for each dimension."""

_ALIGNMENT = 64
_DESCRIPTOR_BYTES = 16
_FIELDS = {"flags": (8, "<u2"), "method": (10, "<u2"), "crc": (16, "<u4"), "packed": (20, "<u4"), "plain": (24, "<u4")}
_FIELDS |= {"offset": (42, "<u4")}
_ENTRY_BYTES, _END_BYTES, _END_OFFSET = 46, 22, 16
_HUGE = 0xFFFFFFFF

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Archives:
    """Items of one file, in columns; where ``usual`` is false, the other columns mean nothing."""

    usual: NDArray[np.bool_]
    start: IntArray
    """Where a storage begins, counted from the item's beginning."""
    length: IntArray
    crc32: IntArray
    """CRC-32 of the storage, or ``NO_CHECKSUM``."""
    pickles: list[TensorRecord | None]
    digest: str
    """xxh3-128 of all directories and pickles."""


class _Record(NamedTuple):
    """A record of the archive that the others are compared with: its name and where its entry begins."""

    name: bytes
    at: int


def read_archives(folder: Folder, path: str, offsets: IntArray, lengths: IntArray) -> Archives | None:
    """Read the directories and pickles of items at ``offsets`` of a file; None when the first is not usual."""
    heads, tails, digest = _read_ends(folder, path, offsets, lengths)
    first = _directory(tails[0].tobytes(), int(lengths[0]), path)
    size = int(lengths[0]) - first.offset if first is not None else 0
    records = _records(first) if first is not None and size <= TAIL_BYTES else None
    if records is None:
        return None
    ends = tails[:, TAIL_BYTES - size :]
    usual = _same_form(ends, records, lengths, size)
    columns = {name: np.stack([_field(ends, record, name) for record in records], axis=1) for name in _FIELDS}
    data = next(number for number, record in enumerate(records) if record.name.endswith(b"/data/0"))
    limits = np.concatenate((columns["offset"][:, 1:], (lengths - size)[:, None]), axis=1)
    starts = columns["offset"][:, data] + LOCAL.size + len(records[data].name) + 4
    starts = -(-starts // _ALIGNMENT) * _ALIGNMENT
    stored = columns["plain"][:, data]
    descriptor = np.where(columns["flags"][:, data] & 8 != 0, _DESCRIPTOR_BYTES, 0)
    np.logical_and(usual, starts == limits[:, data] - stored - descriptor, out=usual)
    np.logical_and(usual, lengths < _HUGE, out=usual)
    checksums = columns["crc"].sum(axis=1) != 0
    pickles = _pickles(heads, columns["plain"][:, 0], (columns["crc"][:, 0], checksums), path)
    usual &= np.array([record is not None for record in pickles], dtype=bool)
    crc32 = np.where(checksums, columns["crc"][:, data], NO_CHECKSUM)
    return Archives(usual, starts, stored, crc32, pickles, digest)


def _directory(tail: bytes, length: int, path: str) -> Directory | None:
    """The directory at the end of the first item, to compare the others with."""
    begin = length - TAIL_BYTES
    if begin < 0:
        return None
    try:
        return find_directory(tail, length, lambda at, count: tail[max(at - begin, 0) :][:count], path)
    except InputError:
        return None  # read again by itself, it gives the error with the tensor's name


def _read_ends(folder: Folder, path: str, offsets: IntArray, lengths: IntArray) -> tuple[Bytes, Bytes, str]:
    """The first and last bytes of each item, filled up with zeros where an item is shorter."""
    heads, tails = np.minimum(lengths, HEAD_BYTES), np.minimum(lengths, TAIL_BYTES)
    ranges = list(zip(offsets.tolist(), heads.tolist(), strict=True))
    ranges += zip((offsets + lengths - tails).tolist(), tails.tolist(), strict=True)
    found = folder.read_ranges(path, ranges)
    count = len(offsets)
    digest = xxhash.xxh3_128()
    head = b"".join(bytes(view).ljust(HEAD_BYTES, b"\0") for view in found[:count])
    tail = b"".join(bytes(view).rjust(TAIL_BYTES, b"\0") for view in found[count:])
    digest.update(head)
    digest.update(tail)
    shaped = (np.frombuffer(part, np.uint8).reshape(count, -1) for part in (head, tail))
    return next(shaped), next(shaped), digest.hexdigest()


def _records(directory: Directory) -> list[_Record] | None:
    """The records in the order of the directory, which must be that of their data, the pickle first."""
    records, at = [], 0
    for name in directory.names:
        records.append(_Record(name.encode(), at))
        at += _ENTRY_BYTES + len(name.encode())
    names = [record.name.rpartition(b"/")[2] for record in records]
    in_order = all(directory.data[r.at + _ENTRY_BYTES :].startswith(r.name) for r in records)
    usual = in_order and at == len(directory.data) and names[:1] == [b"data.pkl"]
    return records if usual and sum(record.name.endswith(b"/data/0") for record in records) == 1 else None


def _same_form(ends: Bytes, records: list[_Record], lengths: IntArray, size: int) -> NDArray[np.bool_]:
    """Which directories have the same records, stored as they are, and are where their end says."""
    usual: NDArray[np.bool_] = lengths >= TAIL_BYTES
    for record in records:
        name = np.frombuffer(record.name, np.uint8)
        begin = record.at + _ENTRY_BYTES
        usual &= (ends[:, record.at : record.at + 4] == np.frombuffer(b"PK\x01\x02", np.uint8)).all(axis=1)
        usual &= (ends[:, begin : begin + len(name)] == name).all(axis=1)
        # Lengths of name, extra field and comment, then disk and attributes.
        usual &= (ends[:, record.at + 28 : record.at + 42] == ends[0, record.at + 28 : record.at + 42]).all(axis=1)
        usual &= (_field(ends, record, "method") == 0) & (_field(ends, record, "flags") & 1 == 0)
        usual &= _field(ends, record, "packed") == _field(ends, record, "plain")
        if record.name.endswith(b"/byteorder"):
            usual &= _field(ends, record, "plain") == len(b"little")
    end = ends[:, -_END_BYTES:]
    usual &= (end[:, :_END_OFFSET] == end[0, :_END_OFFSET]).all(axis=1)
    begins = np.ascontiguousarray(end[:, _END_OFFSET : _END_OFFSET + 4]).view("<u4")[:, 0].astype(np.int64)
    usual &= begins == lengths - size
    return usual


def _field(ends: Bytes, record: _Record, name: str) -> IntArray:
    at, kind = _FIELDS[name]
    begin = record.at + at
    width = np.dtype(kind).itemsize
    column: Any = np.ascontiguousarray(ends[:, begin : begin + width]).view(kind)[:, 0]
    found: IntArray = column.astype(np.int64)
    return found


def _pickles(
    heads: Bytes, sizes: IntArray, checks: tuple[IntArray, NDArray[np.bool_]], path: str
) -> list[TensorRecord | None]:
    """What the pickles at the beginning hold; equal ones are read once. None for whatever is unusual."""
    known: dict[bytes, TensorRecord | None] = {}
    found: list[TensorRecord | None] = []
    crcs, checked = checks[0].tolist(), checks[1].tolist()
    data = heads.tobytes()
    for row, size in enumerate(sizes.tolist()):
        begin = row * HEAD_BYTES + _ALIGNMENT
        pickled = data[begin : begin + size] if size <= HEAD_BYTES - _ALIGNMENT else b""
        if checked[row] and zlib.crc32(pickled) != crcs[row]:
            found.append(None)
            continue
        if pickled not in known:
            known[pickled] = _loaded(pickled, path)
        found.append(known[pickled])
    return found


def _loaded(pickled: bytes, path: str) -> TensorRecord | None:
    try:
        root = load(pickled, file=path)
    except InputError:
        return None  # read again by itself, it gives the error with the tensor's name
    plain = isinstance(root, TensorRecord) and root.storage.key == "0" and not (root.conjugate or root.negative)
    return root if plain else None
