"""Where a result goes, seen from the conversion that writes it.

A ``Destination`` keeps everything out of sight until ``commit``: whoever looks before sees either what was there
before or nothing that loads as a model. It also remembers which files are whole, for a later attempt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from workers.manifest import FileRecord, WrittenFile
from workers.storage import Folder, FolderAddress, open_folder

INDEX_SUFFIX = ".safetensors.index.json"
COMMIT_LAST = ("config.json",)


@dataclass(frozen=True, slots=True)
class Intent:
    """What is about to be written: enough to decide whether a destination may be used."""

    fingerprint: str
    attempt: str
    paths: frozenset[str]
    """All files of the result, below the destination."""
    size_bytes: int
    overwrite: bool
    resume: bool


class Destination(ABC):
    """A place for one result. The calls come in the order in which they stand here, from one thread."""

    @abstractmethod
    def check(self, intent: Intent) -> None:
        """Look, without changing anything, whether the result could be written.

        Raises ``DestinationNotEmpty``, ``InsufficientResources`` or ``StorageError``.
        """

    @abstractmethod
    def claim(self, intent: Intent) -> None:
        """Take the destination for this attempt, or raise ``DestinationBusy``; then repeat the check."""

    @abstractmethod
    def finished(self) -> list[FileRecord]:
        """The journal of earlier attempts at the same plan; each file is there with its recorded size."""

    @property
    @abstractmethod
    def staging(self) -> FolderAddress:
        """Where output files are written: their paths below it are those of the result."""

    @abstractmethod
    def record(self, record: FileRecord) -> None:
        """Remember that an output file is whole."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> WrittenFile:
        """Write a small file of the result."""

    @abstractmethod
    def commit(self, manifest: bytes) -> None:
        """Write the manifest and make the result visible: after this returns, and not before, it is finished."""

    @abstractmethod
    def release(self, *, discard: bool) -> None:
        """Give the claim back after a failure; ``discard`` also removes what was written so far."""


def open_destination(address: FolderAddress | str) -> Destination:
    """The destination of that path or URL; nothing is touched yet."""
    folder = open_folder(address)
    if folder.is_local:
        from workers.local_destination import LocalDestination  # noqa: PLC0415 - it builds on this module

        return LocalDestination(folder)
    from workers.store_destination import StoreDestination  # noqa: PLC0415 - it builds on this module

    return StoreDestination(folder)


def order_of_writing(paths: Collection[str]) -> list[str]:
    """Small files in the order in which they may appear: indexes, then what makes a loader believe, come last."""

    def rank(path: str) -> tuple[int, str]:
        name = path.rpartition("/")[2]
        late = 2 if name in COMMIT_LAST else 1 if name.endswith(INDEX_SUFFIX) else 0
        return late, path

    return sorted(paths, key=rank)


def describe(folder: Folder) -> str:
    """How a message names a destination: a path on a disk, a URL in a store."""
    return folder.local_path() or folder.address.url
