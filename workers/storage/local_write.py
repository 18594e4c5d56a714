"""Atomic, synced writes on a local or shared file system, and the conditional ones that object stores offer.

Every write goes to a hidden file in the same folder and appears by one rename or link.
"""

# Paths are plain text here: a pathlib object per call costs more than the call itself.
# ruff: noqa: PTH102, PTH104, PTH108, PTH112, PTH116, PTH118, PTH120

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from workers.storage.folder import AlreadyExists, Buffer, VersionMismatch

_HIDDEN = re.compile(r"\.[0-9a-f]{16}\.unshard-(partial|lock)|\..*\.unshard-lock")
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


def is_bookkeeping(name: str) -> bool:
    """Whether a file name is that of a half-written file or of a lock, which listings leave out."""
    return name.endswith(("-partial", "-lock")) and _HIDDEN.fullmatch(name) is not None


def version_of(status: os.stat_result) -> str:
    """The version token of a file: size, modification time and inode."""
    return f"{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ino:x}"


def write_file(target: str, chunks: Iterable[Buffer], *, if_absent: bool, if_version: str | None) -> os.stat_result:
    """Write a file whole, sync it and its folder, and return its state. Nothing is left behind after an error."""
    folder = os.path.dirname(target)
    make_folder(folder)
    partial = os.path.join(folder, f".{secrets.token_hex(8)}.unshard-partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for chunk in chunks:
                _write_all(descriptor, memoryview(chunk).cast("B"))
            status = _publish(descriptor, partial, target, if_absent=if_absent, if_version=if_version)
        finally:
            os.close(descriptor)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)
    sync_folder(folder)
    return status


def make_folder(path: str) -> None:
    """Create a folder and its parents, each synced into the folder above it."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
        sync_folder(parent)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable; file systems that cannot sync a folder are left alone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _publish(descriptor: int, partial: str, target: str, *, if_absent: bool, if_version: str | None) -> os.stat_result:
    if not if_absent and if_version is None:
        _outdate(descriptor, target)
        os.fsync(descriptor)
        os.rename(partial, target)
        return os.fstat(descriptor)
    with _locked(target):
        current = _version_at(target)
        if if_absent and current is not None:
            raise AlreadyExists(f"{target} exists already", file=target)
        if if_version is not None and current != if_version:
            found = current or "no file"
            raise VersionMismatch(f"{target} was changed", file=target, expected=if_version, found=found)
        _outdate(descriptor, target)
        os.fsync(descriptor)
        if if_absent:
            _link_or_rename(partial, target)
        else:
            os.rename(partial, target)
        return os.fstat(descriptor)


def _link_or_rename(partial: str, target: str) -> None:
    try:
        os.link(partial, target)  # unlike a rename it fails when someone without our lock was faster
    except FileExistsError:
        raise AlreadyExists(f"{target} exists already", file=target) from None
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.rename(partial, target)


def _version_at(path: str) -> str | None:
    try:
        return version_of(os.stat(path))
    except FileNotFoundError:
        return None


def _outdate(descriptor: int, target: str) -> None:
    """Give the new file a later time than the old one, since clock ticks and inodes alone may repeat."""
    with suppress(FileNotFoundError):
        later = max(time.time_ns(), os.stat(target).st_mtime_ns + 1)
        os.utime(descriptor, ns=(later, later))


@contextmanager
def _locked(target: str) -> Iterator[None]:
    """Exclude other threads, processes and, where the file system carries locks, machines."""
    folder, name = os.path.split(target)
    path = os.path.join(folder, f".{name[:200]}.unshard-lock")
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_same_file(descriptor, path):
                continue  # the one before us removed the lock file while we waited for it
            try:
                yield
            finally:
                os.unlink(path)
            return
        finally:
            os.close(descriptor)


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
