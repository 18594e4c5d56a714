"""The files of before torch 1.6, and of ``_use_new_zipfile_serialization=False``: pickles in a row, then storages.

Five pickles: a magic number, the protocol, facts about the machine, the object, and the keys of the storages in
their order. Then for each key its number of elements (8 bytes) and its elements: no padding and no checksum. Where
a storage lies follows from the sizes of those before it, so that none is read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from workers.dtypes import ELEMENT_TYPES
from workers.errors import CorruptFile
from workers.pickle_scan import EndsTooEarly
from workers.pickles import Loaded, Mapping, Storage, load_at
from workers.shown import shown

_FIRST_READ_BYTES = 2**20
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COUNT = struct.Struct("<q")
_CHECKED_COUNTS = 256
_OTHER_WIDTHS = {"complex128": 16, "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1}


class Source(Protocol):
    """What this module asks of ``torch_file.Source``."""

    def read(self, offset: int, length: int) -> bytes: ...

    def read_many(self, ranges: list[tuple[int, int]]) -> list[bytes | memoryview]: ...


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """The saved object, (offset, length in bytes) of each storage by key, and the xxh3-128 of the pickles."""

    root: Any
    storages: dict[str, tuple[int, int]]
    digest: str


def read_legacy(source: Source, path: str, size_bytes: int) -> LegacyFile:
    """Read the pickles of a file of the old layout and compute where its storages lie."""
    head, pickles = _read_pickles(source, path, size_bytes)
    magic, protocol, machine, saved, keys = (loaded.root for loaded in pickles)
    if magic != _MAGIC_NUMBER or protocol != _PROTOCOL:
        raise _damaged(path, f"protocol {_PROTOCOL}", f"protocol {shown(protocol, 40)}")
    if not isinstance(machine, (dict, Mapping)) or machine.get("little_endian") is not True:
        raise CorruptFile(
            f"{path}: was saved on a machine of big-endian byte order, which is not supported",
            file=path,
            expected="little-endian data",
            found="big-endian data",
            hint="Load it with torch and save it again on a little-endian machine.",
        )
    if type(keys) is not list or not all(type(key) is str for key in keys) or len(set(keys)) != len(keys):
        raise _damaged(path, "a list of storage keys", "something else")
    storages, counts = _lay_out(path, keys, pickles[3].storages, pickles[4].end, size_bytes)
    _check_counts(source, path, counts)
    return LegacyFile(saved, storages, xxhash.xxh3_128_hexdigest(head[: pickles[4].end]))


def _read_pickles(source: Source, path: str, size_bytes: int) -> tuple[bytes, list[Loaded]]:
    """Read from the beginning, twice as much each time, until the five pickles are complete."""
    length = min(size_bytes, _FIRST_READ_BYTES)
    while True:
        head = source.read(0, length)
        try:
            return head, _load_pickles(head, path)
        except EndsTooEarly:
            if length == size_bytes:
                raise
        length = min(size_bytes, 2 * length)


def _load_pickles(head: bytes, path: str) -> list[Loaded]:
    pickles: list[Loaded] = []
    end = 0
    for _ in range(5):
        pickles.append(load_at(head, end, file=path))
        end = pickles[-1].end
    return pickles


def _lay_out(
    path: str, keys: list[str], known: dict[str, Storage], start: int, size_bytes: int
) -> tuple[dict[str, tuple[int, int]], list[tuple[int, int]]]:
    """Where each storage lies, and (offset, value) of the counts before them."""
    storages: dict[str, tuple[int, int]] = {}
    counts: list[tuple[int, int]] = []
    position = start
    for key in keys:
        storage = known.get(key)
        if storage is None:
            raise _damaged(path, "keys of storages that the object refers to", f"the key {key[:40]}")
        length = storage.numel * _width(storage.dtype)
        counts.append((position, storage.numel))
        storages[key] = (position + _COUNT.size, length)
        position += _COUNT.size + length
        if position > size_bytes:
            raise _damaged(path, f"at least {position} bytes (storage {key[:40]})", f"{size_bytes}: it is truncated")
    return storages, counts


def _width(dtype: str | None) -> int:
    if dtype is None:
        return 1
    known = ELEMENT_TYPES.get(dtype)
    return known.size_bytes if known else _OTHER_WIDTHS.get(dtype, 1)


def _check_counts(source: Source, path: str, counts: list[tuple[int, int]]) -> None:
    """Compare counts in the file with the pickle's: evenly spread ones and the last, since a shift would carry on."""
    chosen = counts[:: max(1, len(counts) // _CHECKED_COUNTS)] + counts[-1:]
    found = source.read_many([(offset, _COUNT.size) for offset, _ in chosen])
    for (offset, expected), data in zip(chosen, found, strict=True):
        (count,) = _COUNT.unpack(data)
        if count != expected:
            raise _damaged(path, f"a storage of {expected} elements at byte {offset}", f"{count}")


def _damaged(path: str, expected: str, found: str) -> CorruptFile:
    return CorruptFile(
        f"{path}: damaged torch file of the old layout: expected {expected}, found {found}",
        file=path,
        expected=expected,
        found=found,
        hint="The file is truncated or damaged; fetch it again from where it was saved.",
    )
