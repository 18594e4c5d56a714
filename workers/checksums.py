"""Proof that what was read is what was written: CRC-32 of whole storages, put together from pieces read apart.

Each file records a CRC-32 for every storage. Mergers read a storage in pieces, by different workers, in any order;
they note the CRC-32 of each range, and the ledger combines neighbours until a storage is whole and can be compared.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from isal import isal_zlib

from workers.checkpoint import NO_CHECKSUM, Checkpoint
from workers.errors import CorruptFile

crc32 = isal_zlib.crc32
"""CRC-32 with the processor's own instructions: a plain one would cost more than the copy."""

RangeChecksum = tuple[int, int, int, int]
"""(storage, start within it, length, CRC-32) of bytes that were read. Start and length in bytes."""


@dataclass(slots=True)
class _Run:
    start: int
    end: int
    crc: int


class ChecksumLedger:
    """Collects the checksums of ranges and compares each storage when it is whole. Not thread-safe."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._runs: dict[int, list[_Run]] = {}
        self._proved: set[int] = set()

    def add(self, ranges: Iterable[RangeChecksum]) -> None:
        """Note ranges that were read; raises ``CorruptFile`` when a storage is whole and differs.

        A storage that is read whole is compared each time. Of ranges that overlap the first one counts: files
        that change between two reads are found by their version.
        """
        storages = self._checkpoint.storages
        for storage, start, length, crc in ranges:
            if storages.crc32[storage] == NO_CHECKSUM or not length:
                continue
            if start == 0 and length == storages.length[storage]:
                self._runs.pop(storage, None)
                self._compare(storage, crc)
            elif storage not in self._proved:
                self._insert(storage, _Run(start, start + length, crc))

    def is_proved(self, storage: int) -> bool:
        """Whether a storage was read whole and has the checksum that its file records, or records none."""
        return storage in self._proved or bool(self._checkpoint.storages.crc32[storage] == NO_CHECKSUM)

    def unproved(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Storages of which only parts were read, and the (start, end) gaps that are left to read."""
        for storage, runs in sorted(self._runs.items()):
            length = int(self._checkpoint.storages.length[storage])
            ends = [0, *(run.end for run in runs)]
            starts = [*(run.start for run in runs), length]
            yield storage, [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def _insert(self, storage: int, new: _Run) -> None:
        runs = self._runs.setdefault(storage, [])
        position = bisect.bisect_right(runs, new.start, key=lambda run: run.end)
        if position < len(runs) and runs[position].start < new.end:
            return  # these bytes were read before (a retried part, or a tensor that is used twice)
        runs.insert(position, new)
        if position + 1 < len(runs) and runs[position + 1].start == new.end:
            _join(runs, position)
        if position > 0 and runs[position - 1].end == new.start:
            _join(runs, position - 1)
        if len(runs) == 1 and runs[0].start == 0 and runs[0].end == self._checkpoint.storages.length[storage]:
            self._compare(storage, self._runs.pop(storage)[0].crc)

    def _compare(self, storage: int, found: int) -> None:
        self._proved.add(storage)
        expected = int(self._checkpoint.storages.crc32[storage])
        if found != expected:
            raise damaged_storage(self._checkpoint, storage, expected, found)


def _join(runs: list[_Run], position: int) -> None:
    left, right = runs[position], runs.pop(position + 1)
    left.crc = isal_zlib.crc32_combine(left.crc, right.crc, right.end - right.start)
    left.end = right.end


def damaged_storage(checkpoint: Checkpoint, storage: int, expected: int, found: int) -> CorruptFile:
    """The error for a storage whose bytes are not those that were written."""
    storages = checkpoint.storages
    file = checkpoint.files[storages.file[storage]].path
    offset, length = int(storages.offset[storage]), int(storages.length[storage])
    holds = checkpoint.pieces.tensor[checkpoint.pieces.storage == storage]
    tensor = checkpoint.tensors[holds[0]].name if len(holds) else None
    return CorruptFile(
        f"{file} is damaged: the {length} bytes at offset {offset}"
        + (f", which hold tensor {tensor}," if tensor else "")
        + " don't have the checksum that the file records for them",
        file=file,
        tensor=tensor,
        expected=f"CRC-32 {expected:08x}",
        found=f"{found:08x}",
        hint="Copy the file from where it was saved again; a disk or a transfer changed it.",
    )
