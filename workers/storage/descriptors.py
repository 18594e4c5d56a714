"""A bounded cache of open file descriptors, shared by all folders and threads of a process."""

# Paths are plain text here: a pathlib object per call costs more than the call itself.
# ruff: noqa: PTH116

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from workers.errors import CorruptFile


@dataclass(slots=True)
class OpenFile:
    """A file that is open for reading."""

    descriptor: int
    device: int
    inode: int
    users: int = 0
    cached: bool = False


class DescriptorCache:
    """Keeps the ``capacity`` most recently used files open for reading.

    A descriptor that is in use is never closed: one that is pushed out is closed by its last user, so more than
    ``capacity`` can be open only while that many threads read at once. A file that was replaced under its name is
    opened anew, which costs one ``stat`` per read.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._files: OrderedDict[str, OpenFile] = OrderedDict()

    def borrow(self, path: str) -> tuple[OpenFile, os.stat_result]:
        """Lend a regular file, open, with its state at this moment; the borrower must ``give_back`` it."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            self.forget(path)
            raise
        opened = self._take(path, status)
        return (opened, status) if opened is not None else self._open(path)

    def give_back(self, opened: OpenFile) -> None:
        """End a loan."""
        with self._lock:
            opened.users -= 1
            if not opened.users and not opened.cached:
                _close(opened)

    def forget(self, path: str) -> None:
        """Let go of a file that is about to be replaced or deleted."""
        with self._lock:
            self._drop(path)

    def forget_below(self, folder: str) -> None:
        """Let go of all files below a folder, so that the space of deleted ones becomes free."""
        with self._lock:
            for path in [path for path in self._files if path.startswith(f"{folder}/")]:
                self._drop(path)

    def __len__(self) -> int:
        return len(self._files)

    def _take(self, path: str, status: os.stat_result) -> OpenFile | None:
        with self._lock:
            opened = self._files.get(path)
            if opened is None:
                return None
            if (opened.device, opened.inode) != (status.st_dev, status.st_ino):
                self._drop(path)
                return None
            self._files.move_to_end(path)
            opened.users += 1
            return opened

    def _open(self, path: str) -> tuple[OpenFile, os.stat_result]:
        # O_NONBLOCK: opening a named pipe for reading would otherwise wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = _status_of_regular_file(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        opened = OpenFile(descriptor, status.st_dev, status.st_ino, users=1, cached=True)
        with self._lock:
            self._drop(path)
            self._files[path] = opened
            while len(self._files) > self._capacity:
                self._drop(next(iter(self._files)))
        return opened, status

    def _drop(self, path: str) -> None:
        opened = self._files.pop(path, None)
        if opened is not None:
            opened.cached = False
            if not opened.users:
                _close(opened)


def _status_of_regular_file(descriptor: int, path: str) -> os.stat_result:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{path} is a folder")
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFile(f"{path} is not a regular file", file=path)
    return status


def _close(opened: OpenFile) -> None:
    with suppress(OSError):  # a network file system reports old write errors here; this one was only read
        os.close(opened.descriptor)


# A quarter of the usual limit of 1,024 open files of a process.
DESCRIPTORS = DescriptorCache(256)
