"""What a checkpoint format is to the rest of unshard: a name, how it is recognised, and how it is opened.

A format is one module (or package) beside this one that has a ``FORMAT``; nothing else needs to know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.checkpoint import Checkpoint
from workers.errors import CorruptFile
from workers.options import ConvertOptions
from workers.storage import FileEntry, Folder

LARGEST_NOTE_BYTES = 64 << 10
"""Trackers and the like hold the number or name of a step."""


class Listing:
    """The names and sizes in a folder, one level at a time and each level asked for once."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._files: dict[str, dict[str, FileEntry]] = {}
        self._folders: dict[str, tuple[str, ...]] = {}

    def files(self, prefix: str = "") -> dict[str, FileEntry]:
        """The files directly in a subfolder by their names there; ``FileEntry.path`` counts from the folder."""
        if prefix not in self._files:
            entries = self.folder.list(prefix, recursive=False)
            self._files[prefix] = {entry.path.rpartition("/")[2]: entry for entry in entries}
        return self._files[prefix]

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        """The names of the folders directly in a subfolder."""
        if prefix not in self._folders:
            self._folders[prefix] = tuple(self.folder.subfolders(prefix))
        return self._folders[prefix]

    def file(self, path: str) -> FileEntry | None:
        """The entry of a file, None when it is not there."""
        prefix, _, name = path.rpartition("/")
        return self.files(prefix).get(name)

    def read(self, path: str) -> bytes | None:
        """The content of a file of some words, None when it is not there; ``CorruptFile`` when it is larger."""
        entry = self.file(path)
        if entry is None:
            return None
        if entry.size_bytes > LARGEST_NOTE_BYTES:
            raise CorruptFile(
                f"{entry.path} has {entry.size_bytes} bytes, and should hold a few words",
                file=entry.path,
                expected=f"at most {LARGEST_NOTE_BYTES} bytes",
                found=f"{entry.size_bytes} bytes",
                hint="The file is damaged or is another one of that name: fetch it again from where it was saved.",
            )
        return self.folder.read(entry.path)


@dataclass(frozen=True, slots=True)
class Detection:
    """That a folder holds a format: by which evidence, in plain words."""

    evidence: tuple[str, ...]
    generic: bool = False
    """Only the kind of file was recognised: yields to every format that recognises more."""


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """A format for people."""

    name: str
    title: str
    signs: str


@dataclass(frozen=True, slots=True)
class Format:
    """One checkpoint format. ``detect`` looks at names only; ``open`` reads metadata and may raise any input error."""

    name: str
    title: str
    signs: str
    """What it is recognised by, to complete "looked for ..."."""
    detect: Callable[[Listing], Detection | None]
    open: Callable[[Listing, ConvertOptions], Checkpoint]
    options: frozenset[str] = frozenset()
    """Options that it reads beside those that every format does."""

    @property
    def info(self) -> FormatInfo:
        return FormatInfo(self.name, self.title, self.signs)


def join(prefix: str, name: str) -> str:
    """The path of a name below a subfolder; "" is the folder itself."""
    return f"{prefix}/{name}" if prefix and name else prefix or name
