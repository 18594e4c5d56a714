"""A folder of a local or shared file system.

Links: a link to a file is read like the file, since caches of models are made of links; a link to a folder is
entered only when a path names it. Writing and deleting replace or remove the link itself. A profile that confines
local folders also confines where links may lead.
"""

# Paths are plain text here: a pathlib object per call costs more than the call itself.
# ruff: noqa: PTH108, PTH110, PTH112, PTH114, PTH115, PTH116, PTH118, PTH120

from __future__ import annotations

import builtins
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypedDict

from workers.errors import CorruptFile, IncompleteCheckpoint, StorageError, UnshardError
from workers.storage.addresses import FolderAddress, check_file_path, check_path, is_portable
from workers.storage.bounds import admits, refusal
from workers.storage.descriptors import DESCRIPTORS
from workers.storage.folder import Buffer, FileEntry, Folder, Source, UsageMeter, at_most, exactly
from workers.storage.local_write import is_bookkeeping, version_of, write_file
from workers.storage.ranges import coalesce, pick, scatter
from workers.storage.space import is_full, no_space

# Reading over a gap of this size costs about as much as another system call and seek on an SSD.
_MAX_GAP_BYTES = 32 * 2**10
_MAX_SPAN_BYTES = 16 * 2**20


class LocalFolder(Folder):
    """A folder by its absolute path; ``roots`` and the address's, where given, are the only trees for links."""

    def __init__(self, address: FolderAddress, roots: tuple[str, ...] = (), meter: UsageMeter | None = None) -> None:
        self.address = address
        self._root = address.url
        self._base = address.url.rstrip("/")
        self._roots = roots
        self._bounds = tuple(trees for trees in (roots, address.roots) if trees)
        self._meter = meter or UsageMeter()

    def __repr__(self) -> str:
        return f"LocalFolder({self.address.url!r})"

    @property
    def is_local(self) -> bool:
        return True

    def local_path(self, path: str = "") -> str:
        target = os.path.join(self._root, check_path(path)) if path else self._root
        return self._confine(target) if self._bounds else target

    def subfolder(self, path: str) -> LocalFolder:
        return LocalFolder(self.address.child(path), self._roots, self._meter)

    def exists(self) -> bool:
        with _told(self.address.url):
            return os.path.isdir(self._root)

    # --- reading -------------------------------------------------------------------------------------------
    def list(self, prefix: str = "", *, recursive: bool = True, most: int | None = None) -> list[FileEntry]:
        prefix = check_path(prefix)
        with _told(self.local_path(prefix)):
            found = at_most(most, self._scan(prefix, recursive=recursive), self.address.url)
            return sorted(found, key=lambda entry: entry.path)

    def subfolders(self, prefix: str = "") -> builtins.list[str]:
        self._meter.add("lists")
        with _told(self.local_path(prefix)):
            return sorted(item.name for item in _items(self.local_path(prefix)) if item.is_dir())

    def stat(self, path: str) -> FileEntry | None:
        self._meter.add("heads")
        target = self._file(path)
        with _told(target), suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(target)
            return _entry(path, status) if stat.S_ISREG(status.st_mode) else None
        return None

    def read(self, path: str, offset: int = 0, length: int | None = None, *, version: str | None = None) -> bytes:
        with self._reading(path, version) as (descriptor, status):
            there = max(status.st_size - offset, 0)
            wanted = status.st_size - offset if length is None else length
            if not 0 <= wanted <= there:  # before anything is allocated: a damaged header may ask for terabytes
                raise _short(self._file(path), offset, max(wanted, 0), there)
            data = os.pread(descriptor, wanted, offset)
            if len(data) < wanted:  # one call reads at most 2 GiB
                whole = bytearray(wanted)
                whole[: len(data)] = data
                _fill(self._file(path), descriptor, offset, memoryview(whole), done=len(data))
                data = bytes(whole)
        self._meter.read(wanted)
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview, *, version: str | None = None) -> None:
        with self._reading(path, version) as (descriptor, _):
            _fill(self._file(path), descriptor, offset, buffer)
        self._meter.read(buffer.nbytes)

    def read_ranges(
        self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None
    ) -> Sequence[memoryview]:
        spans = coalesce(ranges, max_gap=_MAX_GAP_BYTES, max_length=_MAX_SPAN_BYTES)
        picked = []
        with self._reading(path, version) as (descriptor, status):
            for span in spans:
                if span.offset + span.length > status.st_size:
                    raise _short(self._file(path), span.offset, span.length, max(status.st_size - span.offset, 0))
                view = memoryview(bytearray(span.length))
                _fill(self._file(path), descriptor, span.offset, view)
                self._meter.read(span.length)
                picked.append(pick(span, view, ranges))
        return scatter(spans, picked, len(ranges))

    # --- writing -------------------------------------------------------------------------------------------
    def write(self, path: str, data: Buffer, *, if_absent: bool = False, if_version: str | None = None) -> FileEntry:
        view = memoryview(data)
        conditions: _Conditions = {"if_absent": if_absent, "if_version": if_version}
        return self._write(path, Source(iter((view,))), view.nbytes, conditions)

    def write_stream(self, path: str, chunks: Iterable[Buffer], size_bytes: int) -> FileEntry:
        return self._write(path, Source(exactly(chunks, size_bytes, path)), size_bytes, PLAIN)

    def stream_window_bytes(self, size_bytes: int) -> int:  # noqa: ARG002 - each chunk is written before the next
        return 0

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            target = self._file(path)
            self._meter.add("deletes")
            DESCRIPTORS.forget(target)
            with _told(target), suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(target)

    def delete_prefix(self, prefix: str) -> None:
        target = self._file(prefix)
        self._meter.add("deletes")
        with _told(target), suppress(FileNotFoundError, NotADirectoryError):
            if os.path.islink(target):
                os.unlink(target)
            else:
                DESCRIPTORS.forget_below(target)
                shutil.rmtree(target)

    def close(self) -> None:
        DESCRIPTORS.forget_below(self._root)

    def free_bytes(self) -> int | None:
        path = self._root
        while not os.path.exists(path):
            path = os.path.dirname(path)
        with _told(path):
            status = os.statvfs(path)
            return status.f_bavail * status.f_frsize

    # -------------------------------------------------------------------------------------------------------
    def _file(self, path: str) -> str:
        target = f"{self._base}/{check_file_path(path)}"
        return self._confine(target) if self._bounds else target

    def _scan(self, prefix: str, *, recursive: bool) -> Iterator[FileEntry]:
        self._meter.add("lists")
        for item in _items(self.local_path(prefix)):
            path = f"{prefix}/{item.name}" if prefix else item.name
            if item.is_dir(follow_symlinks=False):
                if recursive:
                    yield from self._scan(path, recursive=True)
            elif item.is_file() and not is_bookkeeping(item.name):
                with suppress(FileNotFoundError):  # deleted since
                    yield _entry(path, item.stat())

    def _confine(self, target: str) -> str:
        """Refuse a path whose links lead out of the bounds; ``_Reading`` looks again at what is open then."""
        self._require_inside(target, os.path.realpath(target))
        return target

    def _require_inside(self, target: str, real_path: str) -> None:
        for trees in self._bounds:
            if not admits(trees, real_path):
                raise refusal(target, self.address.profile if trees is self._roots else None)

    def _reading(self, path: str, version: str | None) -> _Reading:
        return _Reading(self._file(path), version, self._require_inside if self._bounds else None)

    def _write(self, path: str, chunks: Source, size_bytes: int, conditions: _Conditions) -> FileEntry:
        target = self._file(path)
        DESCRIPTORS.forget(target)
        try:
            status = write_file(target, chunks, **conditions)
        except OSError as error:
            if error is chunks.failure:
                raise
            raise _translate(error, target, writing=True, needed_bytes=size_bytes) from error
        self._meter.wrote(status.st_size)
        return _entry(path, status)


class _Conditions(TypedDict):
    if_absent: bool
    if_version: str | None


PLAIN: _Conditions = {"if_absent": False, "if_version": None}


class _Reading:
    """A loan of an open file whose failures are told as ours. A class, since a generator costs more than a read."""

    __slots__ = ("_opened", "_require", "_target", "_version")

    def __init__(self, target: str, version: str | None, require: Callable[[str, str], None] | None) -> None:
        self._target = target
        self._version = version
        self._require = require

    def __enter__(self) -> tuple[int, os.stat_result]:
        try:
            self._opened, status = DESCRIPTORS.borrow(self._target)
        except OSError as error:
            raise _translate(error, self._target) from error
        if self._require is not None:
            # What is open now, whatever the name stood for when it was looked at: links can be swapped in between.
            try:
                self._require(self._target, os.readlink(f"/proc/self/fd/{self._opened.descriptor}"))
            except BaseException:
                DESCRIPTORS.give_back(self._opened)
                raise
        if self._version is not None and self._version != version_of(status):
            DESCRIPTORS.give_back(self._opened)
            raise CorruptFile(
                f"{self._target} changed since it was first looked at",
                file=self._target,
                expected=self._version,
                found=version_of(status),
                hint="Wait until nothing writes to the checkpoint, then start again.",
            )
        return self._opened.descriptor, status

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        DESCRIPTORS.give_back(self._opened)
        if isinstance(error, OSError):
            raise _translate(error, self._target) from error


def _fill(path: str, descriptor: int, offset: int, buffer: memoryview, done: int = 0) -> None:
    total = buffer.nbytes
    while done < total:
        count = os.preadv(descriptor, [buffer[done:] if done else buffer], offset + done)
        if not count:
            raise _short(path, offset, total, done)
        done += count


def _entry(path: str, status: os.stat_result) -> FileEntry:
    return FileEntry(path, status.st_size, None, version_of(status), status.st_mtime)


def _items(folder: str) -> builtins.list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return [item for item in found if is_portable(item.name)]
    except FileNotFoundError:
        return []


def _short(path: str, offset: int, expected: int, found: int) -> CorruptFile:
    return CorruptFile(
        f"{path} changed or is truncated: expected {expected} bytes at offset {offset}, found {found}",
        file=path,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
        hint="Copy the file again, or wait until the trainer has finished writing it.",
    )


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Turn what the operating system says into our errors."""
    try:
        yield
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: str, *, writing: bool = False, needed_bytes: int | None = None) -> UnshardError:
    if is_full(error):
        return no_space(path, needed_bytes)
    if isinstance(error, FileNotFoundError) and not writing:
        hint = "Check the path, and that the checkpoint was copied completely."
        return IncompleteCheckpoint(f"{path} is missing", file=path, hint=hint)
    if isinstance(error, NotADirectoryError | IsADirectoryError | FileExistsError):
        return StorageError(f"{path}: there is a folder where a file is needed, or the other way round", file=path)
    hint = "Check who owns the folder and its permissions." if isinstance(error, PermissionError) else ""
    verb = "written" if writing else "read"
    return StorageError(f"{path} could not be {verb}: {error.strerror or error}", file=path, hint=hint)
