"""Collectors: own output files. Header, order, back-pressure, digests, completion.

Two kinds of destination, two ways: on a file system, mergers write blocks in place into a file of the final size
(``LocalOutput``); for an object store, finished parts wait in a window bounded in bytes until the one multipart
upload of their file takes them, in order (``StreamOutput``). ``workers.collection`` keeps the account for both.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workers.errors import Cancelled, StorageError
from workers.layout import OutputFile
from workers.storage.space import is_full, no_space

STAT_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, by stat(2)."""

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
