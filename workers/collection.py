"""The account of a conversion: which parts are made and written, which files are whole, what was proved of the source.

Engines tell it, whichever way the bytes go; it tells whoever watches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from workers.checksums import ChecksumLedger, RangeChecksum
from workers.events import Event, FileCompleted, Observer, Progress
from workers.layout import OutputFile
from workers.manifest import FileRecord, digest, version_of_files
from workers.merge import PartResult, Recipe

PROGRESS_EVERY_S = 0.5
MOST_FILES_TOLD = 64
MOST_RANGES_TOLD = 64
"""Ranges of each file in the news of progress, which must stay small whatever the plan is."""


@dataclass(slots=True)
class _Account:
    """What is known of an output file under way."""

    digests: dict[int, str] = field(default_factory=dict)
    """Part -> digest, of those that are made."""
    written: set[int] = field(default_factory=set)
    checksums: list[RangeChecksum] = field(default_factory=list)
    infinite: set[int] = field(default_factory=set)
    nonzero: set[int] = field(default_factory=set)


class Collection:
    """The account of a conversion: which parts and files are done, what was proved of the source. Thread-safe."""

    def __init__(self, recipe: Recipe, files: tuple[OutputFile, ...], observer: Observer) -> None:
        self._recipe = recipe
        self.source_version = version_of_files(recipe.checkpoint.files)
        self._files = files
        self._observer = observer
        self._lock = threading.Lock()
        self._accounts = [_Account() for _ in files]
        self.ledger = ChecksumLedger(recipe.checkpoint)
        self.records: dict[int, FileRecord] = {}
        self._last_progress = 0.0
        self._bytes_done = self._bytes_read = self._bytes_merged = self._tensors_done = 0
        self._workers: dict[str, str] = {}

    def keep(self, record: FileRecord, file: int) -> None:
        """Take over a file that an earlier attempt finished."""
        self.ledger.add(record.checksums)
        self.records[file] = record
        output = self._files[file]
        self._bytes_done += output.size_bytes
        self._tensors_done += output.stop_target - output.first_target

    def part_done(self, result: PartResult, worker: str) -> bool:
        """Note a part that was made in place; True when it was the last of its file. Raises as ``part_merged``."""
        file = int(self._recipe.parts.file[result.part])
        with self._lock:
            is_new = self._note_merged(result, worker)
            self._note_written(result.part)
            self._tell_progress(force=False)
            return is_new and len(self._accounts[file].digests) == self._parts_of(file)

    def part_merged(self, result: PartResult, worker: str) -> None:
        """Note a part on its way to the upload of its file. Raises ``CorruptFile`` for damaged sources."""
        with self._lock:
            self._note_merged(result, worker)
            self._tell_progress(force=False)

    def part_written(self, part: int) -> None:
        """Note that the upload has taken a part."""
        with self._lock:
            self._note_written(part)
            self._tell_progress(force=False)

    def file_done(self, file: int, etag: str | None = None) -> FileRecord:
        """The record of a file whose parts are all done and which is whole at the destination."""
        account, output = self._accounts[file], self._files[file]
        with self._lock:
            for part in range(output.first_part, output.stop_part):
                self._note_written(part)  # an upload's own answer may overtake those of its last parts
            pending = tuple(row for row in account.checksums if not self.ledger.is_proved(row[0]))
            account.checksums.clear()
            tested = self._tested_targets(output)
            record = FileRecord(
                path=output.path,
                size_bytes=output.size_bytes,
                header_digest=digest(output.header),
                part_digests=tuple(account.digests[part] for part in range(output.first_part, output.stop_part)),
                etag=etag,
                source_version=self.source_version,
                checksums=pending,
                infinite_tensors=tuple(self._recipe.targets[number].name for number in sorted(account.infinite)),
                zero_tensors=tuple(self._recipe.targets[n].name for n in tested if n not in account.nonzero),
            )
            self.records[file] = record
            self._bytes_done += len(output.header)
            self._tell_progress(force=True)
            self._observer(FileCompleted(record.path, record.size_bytes, record.digest))
            return record

    def forget(self, parts: Iterable[int]) -> None:
        """Undo what was noted of parts whose bytes were lost: they will be made again."""
        with self._lock:
            for part in parts:
                account = self._accounts[int(self._recipe.parts.file[part])]
                account.digests.pop(part, None)
                if part in account.written:
                    account.written.remove(part)
                    self._bytes_done -= int(self._recipe.parts.length[part])
                    self._tensors_done -= self._finished_targets(part)

    def tell(self, event: Event) -> None:
        """Pass an event on to the observer."""
        with self._lock:
            self._observer(event)

    def _note_merged(self, result: PartResult, worker: str) -> bool:
        """Take in what a merger tells of a part; False for one made twice, because a worker was thought lost."""
        file = int(self._recipe.parts.file[result.part])
        account = self._accounts[file]
        if result.part in account.digests:
            return False
        account.digests[result.part] = result.digest.hex()
        account.checksums += result.checksums
        account.infinite.update(result.infinite_targets)
        account.nonzero.update(result.nonzero_targets)
        self.ledger.add(result.checksums)
        self._bytes_read += result.bytes_read
        self._bytes_merged += int(self._recipe.parts.length[result.part])
        self._workers[worker] = self._files[file].path
        return True

    def _note_written(self, part: int) -> None:
        written = self._accounts[int(self._recipe.parts.file[part])].written
        if part not in written:
            written.add(part)
            self._bytes_done += int(self._recipe.parts.length[part])
            self._tensors_done += self._finished_targets(part)

    def _parts_of(self, file: int) -> int:
        return self._files[file].stop_part - self._files[file].first_part

    def _finished_targets(self, part: int) -> int:
        """Targets whose last segment lies in the part."""
        parts = self._recipe.parts
        rows = slice(int(parts.first_segment[part]), int(parts.first_segment[part + 1]))
        ends = zip(parts.target[rows].tolist(), parts.end[rows].tolist(), strict=True)
        return sum(end == int(np.prod(self._recipe.targets[t].expression.shape, dtype=np.int64)) for t, end in ends)

    def _tested_targets(self, output: OutputFile) -> list[int]:
        """Targets with elements; biases and other vectors may well be zeros, so only matrices are looked at."""
        return [
            number
            for number in range(output.first_target, output.stop_target)
            if len(shape := self._recipe.targets[number].expression.shape) > 1 and 0 not in shape
        ]

    def _tell_progress(self, *, force: bool) -> None:
        now = time.monotonic()
        if not force and now - self._last_progress < PROGRESS_EVERY_S:
            return
        self._last_progress = now
        self._observer(
            Progress(
                bytes_done=self._bytes_done,
                bytes_total=sum(file.size_bytes for file in self._files),
                bytes_read=self._bytes_read,
                bytes_merged=self._bytes_merged,
                tensors_done=self._tensors_done,
                tensors_total=len(self._recipe.targets),
                files_done=len(self.records),
                files_total=len(self._files),
                workers=dict(self._workers),
                written=self._written(),
            )
        )

    def _written(self) -> dict[str, list[tuple[int, int]]]:
        """Byte ranges that are done, of the files under way."""
        begun = [file for file, account in enumerate(self._accounts) if account.written and file not in self.records]
        return {self._files[file].path: self._ranges(file) for file in begun[:MOST_FILES_TOLD]}

    def _ranges(self, file: int) -> list[tuple[int, int]]:
        parts = self._recipe.parts
        ranges: list[tuple[int, int]] = []
        for part in sorted(self._accounts[file].written):
            start = int(parts.offset[part])
            stop = start + int(parts.length[part])
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            elif len(ranges) < MOST_RANGES_TOLD:
                ranges.append((start, stop))
        return ranges

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @property
    def bytes_merged(self) -> int:
        return self._bytes_merged
