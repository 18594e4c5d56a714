"""Where a result goes, seen from the conversion that writes it.

A ``Destination`` keeps everything out of sight until ``commit``: whoever looks before sees either what was there
before or nothing that loads as a model. It also remembers which files are whole, for a later attempt.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from workers.errors import DestinationNotEmpty, UnshardError
from workers.manifest import MANIFEST_NAME, FileRecord, WrittenFile
from workers.storage import Folder, FolderAddress, open_folder

INDEX_SUFFIX = ".safetensors.index.json"
COMMIT_LAST = ("config.json",)

MODEL_FILES = re.compile(
    r"(?:[\w.-]+/)?(?:"
    r"(?:model|adapter_model)[\w.-]*\.safetensors|[\w.-]*\.safetensors\.index\.json"
    r"|(?:adapter_|generation_|preprocessor_|processor_|video_preprocessor_|image_processor_)?config\.json"
    r"|tokenizer[\w.-]*|special_tokens_map\.json|added_tokens\.json|vocab\.(?:json|txt)|merges\.txt"
    r"|chat_template[\w.-]*|[\w.-]+\.(?:model|tiktoken|jinja)|(?:modeling|configuration|tokenization)_\w+\.py"
    r"|LICENSE[\w.-]*|README\.md|\.gitattributes"
    r")"
)
"""Files that a model folder consists of. Overwriting takes away these and what the old manifest names, no more."""


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
    """A place for one result. The calls come in the order in which they stand here, from one thread at a time."""

    on_lost: Callable[[], None] = staticmethod(lambda: None)
    """Called, from any thread, when somebody else has taken the destination over."""

    def lost(self) -> UnshardError | None:
        """Why this attempt may not go on, when somebody else has taken the destination over."""
        return None

    @abstractmethod
    def manifest(self) -> bytes | None:
        """The manifest of a finished model that is there."""

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

    def keep(self) -> None:
        """See that the destination is still this attempt's; raises ``DestinationBusy`` when it isn't."""
        return

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
    def clear(self, fingerprint: str) -> None:
        """Take away what attempts at a plan that won't be finished have left: only what is provably theirs.

        Raises ``DestinationBusy`` when somebody is at work here.
        """

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


def check_replaceable(where: str, present: Mapping[str, int], manifest: bytes | None) -> None:
    """Refuse to overwrite anything but a model: ``present`` are the files there (path -> size in bytes).

    Raises ``DestinationNotEmpty`` that names the first file which is no part of a model.
    """
    known = _named_in(manifest)
    strangers = sorted(path for path in present if path not in known and not MODEL_FILES.fullmatch(path))
    has_weights = any(path.endswith(".safetensors") for path in present)
    if has_weights and not strangers:
        return
    what = f"{strangers[0]}, which is no part of a model" if strangers else "no model"
    raise DestinationNotEmpty(
        f"{where} won't be overwritten: it holds {what}",
        file=where,
        hint="overwrite replaces a folder that holds a model and nothing else; move the rest away first.",
    )


def _named_in(manifest: bytes | None) -> set[str]:
    """The files that a manifest names, itself included; nothing when it is no manifest."""
    with suppress(ValueError, TypeError, KeyError):
        content = json.loads(manifest or b"")
        return {entry["path"] for entry in (*content["weights"], *content["files"])} | {MANIFEST_NAME}
    return set()


def describe(folder: Folder) -> str:
    """How a message names a destination: a path on a disk, a URL in a store."""
    return folder.local_path() or folder.address.url
