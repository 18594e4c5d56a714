"""The interface of a folder of files, and the records that go with it.

Nothing here touches a disk or a network: ``local`` and ``object_store`` do.
"""

from __future__ import annotations

import builtins
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

from workers.errors import DestinationError, InputError, InternalError
from workers.storage.addresses import FolderAddress

Buffer = bytes | bytearray | memoryview
Item = TypeVar("Item")


class WriteConflict(DestinationError):
    """A conditional write found something else than it was told to expect; nothing was written."""

    code = "write-conflict"


class AlreadyExists(WriteConflict):
    """``write(..., if_absent=True)`` found a file of that name."""

    code = "already-exists"


class VersionMismatch(WriteConflict):
    """``write(..., if_version=...)`` found another version of the file, or none."""

    code = "version-mismatch"


class TooManyFiles(InputError):
    """A folder holds more files than whoever lists it can do anything with."""

    code = "too-many-found"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file below a folder.

    ``path`` is relative to the folder and '/'-separated. ``etag`` is the store's own, and None on a local disk.
    ``version`` is an opaque token that differs after any change of the content: the ETag in a store; size, time of
    modification and inode on a disk. Compare it only with tokens of the same folder. ``modified_at`` is in seconds
    since 1970 by the clock of the disk or store, None for a file that was just written to a store.
    """

    path: str
    size_bytes: int
    etag: str | None = None
    version: str = ""
    modified_at: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Usage:
    """What was asked of a folder and its subfolders since it was opened: requests as a store bills them, and bytes.

    On a local disk a request is one read, write or listing. Retries inside a request are not seen.
    """

    gets: int = 0
    puts: int = 0
    heads: int = 0
    lists: int = 0
    deletes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class UsageMeter:
    """Thread-safe counters behind ``Folder.usage``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((count.name for count in fields(Usage)), 0)

    def read(self, size_bytes: int) -> None:
        """Count one GET and what it brought."""
        with self._lock:
            self._counts["gets"] += 1
            self._counts["bytes_read"] += size_bytes

    def wrote(self, size_bytes: int, requests: int = 1) -> None:
        """Count a finished write."""
        with self._lock:
            self._counts["puts"] += requests
            self._counts["bytes_written"] += size_bytes

    def add(self, kind: str, requests: int = 1) -> None:
        """Count requests that carry no payload; ``kind`` is a field of ``Usage``."""
        with self._lock:
            self._counts[kind] += requests

    def snapshot(self) -> Usage:
        """The counts so far."""
        with self._lock:
            return Usage(**self._counts)


class Folder(ABC):
    """A folder of a file system or a prefix of an object store; safe to use from several threads.

    Paths are relative, '/'-separated and checked: '..', absolute paths, backslashes and control characters are an
    ``InvalidOption``. Opening sends no request. A folder pickles as its address and is opened anew where it
    arrives, so that no credential travels; its ``usage`` starts from nothing there.

    Reading raises ``IncompleteCheckpoint`` for a file that is not there, ``CorruptFile`` for one that is shorter
    than asked or no longer the ``version`` asked for, and ``StorageError`` when the disk or the store fails.
    """

    address: FolderAddress
    _meter: UsageMeter

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """Whether files can be opened by ``local_path``."""

    @abstractmethod
    def local_path(self, path: str = "") -> str | None:
        """The absolute path in the file system of a file or of the folder itself; None in a store."""

    @abstractmethod
    def subfolder(self, path: str) -> Folder:
        """The folder below this one; it shares this one's connections and ``usage``."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the folder is there: a directory, or at least one object under the prefix.

        In a store this is one cheap request that also finds wrong credentials, endpoints and buckets.
        """

    def __reduce__(self) -> tuple[object, ...]:
        from workers.storage import open_folder  # noqa: PLC0415 - which imports this module

        return (open_folder, (self.address,))

    def usage(self) -> Usage:
        """The requests and bytes so far."""
        return self._meter.snapshot()

    def close(self) -> None:  # noqa: B027 - most folders hold nothing
        """Let go of the files that are kept open below; the folder stays usable. Call it when a job is done."""

    # --- reading -------------------------------------------------------------------------------------------
    @abstractmethod
    def list(self, prefix: str = "", *, recursive: bool = True, most: int | None = None) -> list[FileEntry]:
        """The files below the subfolder ``prefix``, sorted by path; empty when there is no such folder.

        Links to files count as files; links to folders are not entered (they may form circles). Files that are
        being written do not show. ``TooManyFiles`` as soon as more than ``most`` are found.
        """

    @abstractmethod
    def subfolders(self, prefix: str = "") -> builtins.list[str]:
        """The names of the folders directly below ``prefix``, sorted; links to folders are among them.

        A ``StorageError`` where a store does not tell them in time, as it does not when millions of objects lie there.
        """

    @abstractmethod
    def stat(self, path: str) -> FileEntry | None:
        """Size and version of a file, None when it is not there."""

    @abstractmethod
    def read(self, path: str, offset: int = 0, length: int | None = None, *, version: str | None = None) -> bytes:
        """Exactly ``length`` bytes from ``offset``, or all that follow it when None."""

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview, *, version: str | None = None) -> None:
        """Fill ``buffer`` (writable, contiguous bytes) from ``offset``.

        After an error its content is undefined, but nothing writes to it any more.
        """

    @abstractmethod
    def read_ranges(
        self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None
    ) -> Sequence[memoryview]:
        """The bytes of (offset, length) pairs, in the order asked for, in any order and overlapping as you like.

        Near ranges are read together. The views share memory: copy what is to outlive the rest.
        """

    # --- writing -------------------------------------------------------------------------------------------
    @abstractmethod
    def write(self, path: str, data: Buffer, *, if_absent: bool = False, if_version: str | None = None) -> FileEntry:
        """Write a whole small file; others see all of it or nothing, and on a disk it is synced.

        ``if_absent`` raises ``AlreadyExists`` when the file is there: of several writers exactly one succeeds.
        ``if_version`` raises ``VersionMismatch`` unless the file is of that version.
        """

    @abstractmethod
    def write_stream(self, path: str, chunks: Iterable[Buffer], size_bytes: int) -> FileEntry:
        """Write a large file from consecutive chunks that add up to ``size_bytes``, replacing what is there.

        The file appears whole at the end; when ``chunks`` raises, or adds up to anything else, nothing of it
        appears and the error is passed on. A chunk is borrowed until this call returns: do not change it after
        it was handed over.
        """

    @abstractmethod
    def stream_window_bytes(self, size_bytes: int) -> int:
        """How much of the chunks ``write_stream`` keeps borrowed at most, besides two chunks: its memory need."""

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> None:
        """Delete files; those that are not there are no error."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> None:
        """Delete everything below the subfolder ``prefix``; links are removed, not followed."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes that an unprivileged user may still write here; None where that has no limit to tell (a store)."""


def exactly(chunks: Iterable[Buffer], size_bytes: int, path: str) -> Iterator[memoryview]:
    """Pass chunks on as flat byte views; raise before the end unless they add up to ``size_bytes``."""
    total = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        total += len(view)
        if total > size_bytes:
            break
        yield view
    if total != size_bytes:
        raise InternalError(
            f"the stream for {path} does not have the announced size",
            file=path,
            expected=f"{size_bytes} bytes",
            found=f"{total} bytes" if total < size_bytes else f"at least {total} bytes",
        )


def at_most(most: int | None, found: Iterable[Item], url: str) -> Iterator[Item]:
    """Pass on what is found in a folder; ``TooManyFiles`` at the first that is one too many."""
    for number, item in enumerate(found):
        if number == most:
            raise TooManyFiles(
                f"{url} holds more than {most:,} files",
                hint="Name a folder that holds one checkpoint, or a pattern that only such folders fit.",
                file=url,
                expected=f"at most {most:,} files",
                found=f"more than {most:,}",
            )
        yield item


class Source:
    """Chunks on their way to a writer; remembers what their producer raised, to tell it from the writer's failures."""

    def __init__(self, chunks: Iterator[memoryview]) -> None:
        self._chunks = chunks
        self.failure: BaseException | None = None

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> memoryview:
        try:
            return next(self._chunks)
        except StopIteration:
            raise
        except BaseException as error:
            self.failure = error
            raise
