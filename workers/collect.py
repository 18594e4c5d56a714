"""Collectors: own output files. Header, order, back-pressure, digests, completion.

Two kinds of destination, two ways: on a file system, mergers write blocks in place into a file of the final size
(``LocalOutput``); for an object store, finished parts wait in a window bounded in bytes until the one multipart
upload of their file takes them, in order (``StreamOutput``). ``Collection`` keeps the account for both.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workers.checksums import ChecksumLedger, RangeChecksum
from workers.errors import Cancelled, StorageError
from workers.events import Event, FileCompleted, Observer, Progress
from workers.layout import OutputFile
from workers.manifest import FileRecord, digest, version_of_files
from workers.merge import PartResult, Recipe
from workers.storage.space import is_full, no_space

PROGRESS_EVERY_S = 0.5
STAT_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, by stat(2)."""

MOST_FILES_TOLD = 64
MOST_RANGES_TOLD = 64
"""Ranges of each file in the news of progress, which must stay small whatever the plan is."""

SYNC_FILE_RANGE_WRITE = 2
"""Flag of Linux's sync_file_range(2): begin to write dirty pages, don't wait."""


def _find_sync_file_range() -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()


class LocalOutput:
    """An output file on a file system, open for blocks at any position. Thread-safe."""

    def __init__(self, root: str, file: OutputFile) -> None:
        """Make the file of its final size and write its header."""
        self.path = str(Path(root, file.path))
        if not Path(root).is_dir():
            raise StorageError(
                f"{root} isn't there on this machine",
                file=root,
                hint="All nodes must mount the destination's file system at the same path; or convert to a bucket.",
            )
        with _told(self.path):
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with _told(self.path, self.descriptor):
                os.ftruncate(self.descriptor, file.size_bytes)
            self.write(0, memoryview(file.header))
        except BaseException:
            os.close(self.descriptor)
            raise

    @classmethod
    def join(cls, root: str, file: OutputFile) -> LocalOutput:
        """Open a file that somebody else has made."""
        output = cls.__new__(cls)
        output.path = str(Path(root, file.path))
        with _told(output.path):
            output.descriptor = os.open(output.path, os.O_RDWR | os.O_CLOEXEC)
        return output

    def write(self, offset: int, block: memoryview) -> None:
        """Write a block at a byte offset."""
        with _told(self.path, self.descriptor):
            while block:
                written = os.pwrite(self.descriptor, block, offset)
                block, offset = block[written:], offset + written

    def begin_writeback(self, offset: int, length: int) -> None:
        """Let the kernel start to write a range to the disk, without waiting: the last sync finds little to do.

        Without this, hundreds of megabytes wait in memory until the sync, and disk and processor work in turns.
        """
        if _sync_file_range is not None:
            _sync_file_range(self.descriptor, offset, length, SYNC_FILE_RANGE_WRITE)

    def close(self, *, sync: bool) -> None:
        """Close the file, and before that make it durable when it is whole."""
        try:
            if sync:
                with _told(self.path, self.descriptor):
                    os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)


class LocalSink:
    """Lends one block of memory again and again and writes it to a local file."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(0))
        self.output: LocalOutput

    def lend(self, offset: int, length: int) -> memoryview:
        """Memory for a block; what was lent before is overwritten."""
        del offset
        if len(self._memory) < length:
            self._memory = np.empty(length, dtype=np.uint8).data
        return self._memory[:length]

    def take(self, offset: int, block: memoryview) -> None:
        """Write the block."""
        self.output.write(offset, block)


class PartSink:
    """Collects a part in memory of its own, which then belongs to whoever sends it on."""

    def __init__(self, offset: int, length: int) -> None:
        self._offset = offset
        self.payload = np.empty(length, dtype=np.uint8)

    def lend(self, offset: int, length: int) -> memoryview:
        """The block's place in the part."""
        start = offset - self._offset
        return self.payload.data[start : start + length]

    def take(self, offset: int, block: memoryview) -> None:
        """Nothing to do: the block is where it belongs."""


class StreamOutput:
    """The bytes of one output file in order, while its parts arrive in any order."""

    def __init__(self, file: OutputFile, done: Callable[[int], None]) -> None:
        self._file = file
        self._done = done
        self._waiting: dict[int, memoryview] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def put(self, part: int, payload: memoryview) -> None:
        """Hand over a finished part."""
        with self._changed:
            self._waiting[part] = payload
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the stream raise instead of waiting for parts that will not come."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def chunks(self) -> Iterator[memoryview]:
        """The file from its first byte to its last; ``done`` is told each part when the next one is asked for."""
        yield memoryview(self._file.header)
        for part in range(self._file.first_part, self._file.stop_part):
            with self._changed:
                while part not in self._waiting and self._failure is None:
                    self._changed.wait()
                if self._failure is not None:
                    raise self._failure
                payload = self._waiting.pop(part)
            yield payload
            del payload
            self._done(part)


class Window:
    """A budget of bytes that parts under way may hold; reserved in the order of writing.

    The part at the head of the streams has always been reserved before any later one, so waiting for it can't
    deadlock. A part larger than the whole budget passes when nothing else is under way.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._held = 0
        self._changed = threading.Condition()
        self._closed = False

    def reserve(self, size_bytes: int) -> None:
        """Wait until there is room; raises ``Cancelled`` once the window is closed."""
        with self._changed:
            while not self._closed and self._held and self._held + size_bytes > self._budget:
                self._changed.wait()
            if self._closed:
                raise Cancelled("stopped")
            self._held += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give room back."""
        with self._changed:
            self._held -= size_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody who waits, for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(slots=True)
class _Account:
    """What is known of an output file under way."""

    digests: dict[int, str] = field(default_factory=dict)
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
        self._bytes_done = self._bytes_read = self._tensors_done = 0
        self._workers: dict[str, str] = {}

    def keep(self, record: FileRecord, file: int) -> None:
        """Take over a file that an earlier attempt finished."""
        self.ledger.add(record.checksums)
        self.records[file] = record
        output = self._files[file]
        self._bytes_done += output.size_bytes
        self._tensors_done += output.stop_target - output.first_target

    def part_done(self, result: PartResult, worker: str) -> bool:
        """Note a finished part; True when it was the last of its file. Raises ``CorruptFile`` for damaged sources."""
        file = int(self._recipe.parts.file[result.part])
        account, output = self._accounts[file], self._files[file]
        with self._lock:
            if result.part in account.digests:
                return False  # made twice, because a worker was thought lost
            account.digests[result.part] = result.digest.hex()
            account.checksums += result.checksums
            account.infinite.update(result.infinite_targets)
            account.nonzero.update(result.nonzero_targets)
            self.ledger.add(result.checksums)
            self._bytes_done += int(self._recipe.parts.length[result.part])
            self._bytes_read += result.bytes_read
            self._tensors_done += self._finished_targets(result.part)
            self._workers[worker] = output.path
            self._tell_progress(force=False)
            return len(account.digests) == output.stop_part - output.first_part

    def file_done(self, file: int, etag: str | None = None) -> FileRecord:
        """The record of a file whose parts are all done and which is whole at the destination."""
        account, output = self._accounts[file], self._files[file]
        with self._lock:
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
                if account.digests.pop(part, None) is not None:
                    self._bytes_done -= int(self._recipe.parts.length[part])
                    self._tensors_done -= self._finished_targets(part)

    def tell(self, event: Event) -> None:
        """Pass an event on to the observer."""
        with self._lock:
            self._observer(event)

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
        begun = [file for file, account in enumerate(self._accounts) if account.digests and file not in self.records]
        return {self._files[file].path: self._ranges(file) for file in begun[:MOST_FILES_TOLD]}

    def _ranges(self, file: int) -> list[tuple[int, int]]:
        parts = self._recipe.parts
        ranges: list[tuple[int, int]] = []
        for part in sorted(self._accounts[file].digests):
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


def _missing_bytes(descriptor: int | None) -> int | None:
    """Bytes of a file of its final size that no block of the disk has been found for yet."""
    if descriptor is None:
        return None
    status = os.fstat(descriptor)
    return max(0, status.st_size - status.st_blocks * STAT_BLOCK_BYTES)


class _told:  # noqa: N801 - reads as a phrase where it is used
    """Turn an ``OSError`` on an output file into a ``StorageError`` that names it."""

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        self._path = path
        self._descriptor = descriptor

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and is_full(error):
            raise no_space(self._path, _missing_bytes(self._descriptor)) from error
        if isinstance(error, OSError):
            raise StorageError(
                f"cannot write {self._path}: {error.strerror or error}",
                file=self._path,
                hint="Check the disk, then run the same command again: finished files are kept.",
            ) from error
