"""Folders of files, local or in object storage, behind one small interface.

This is the only module that talks to obstore and the only one that knows URLs. It knows nothing of checkpoints.
Readers ask a ``Folder`` for names, sizes and byte ranges; collectors write through it. Endpoints and credentials
come from a named server-side profile or from the environment, never from a job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file below a folder: its path relative to the folder ('/' separated), size and, in a store, its ETag."""

    path: str
    size_bytes: int
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class FolderAddress:
    """Where a folder is, without any secret: what an actor needs to open it for itself."""

    url: str
    profile: str | None = None


class Folder(ABC):
    """A folder or an object-store prefix."""

    address: FolderAddress

    @property
    @abstractmethod
    def is_local(self) -> bool: ...

    @abstractmethod
    def list(self, prefix: str = "", *, recursive: bool = True) -> list[FileEntry]: ...

    @abstractmethod
    def stat(self, path: str) -> FileEntry | None: ...

    @abstractmethod
    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes: ...

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview) -> None: ...

    @abstractmethod
    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[bytes | memoryview]: ...

    @abstractmethod
    def subfolder(self, path: str) -> Folder: ...

    # --- writing -------------------------------------------------------------------------------------------
    @abstractmethod
    def write(self, path: str, data: bytes, *, if_absent: bool = False, if_etag: str | None = None) -> FileEntry: ...

    @abstractmethod
    def write_stream(self, path: str, chunks: Iterable[bytes | memoryview], size_bytes: int) -> FileEntry: ...

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> None: ...


def open_folder(address: FolderAddress | str) -> Folder:
    """Open a folder by path or URL."""
    raise NotImplementedError
