"""Where a checkpoint lies when the folder that was given holds none: most often one level up or down."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workers.errors import UnshardError
from workers.formats._format import Detection, Listing, join
from workers.storage import FileEntry, open_folder

MOST_FOLDERS = 16
"""Folders that are looked into: each costs a store several requests."""

LEVELS = 2
"""How deep folders are looked into."""

MOST_NAMED = 4
"""Checkpoints that are named."""

Detect = Callable[[Listing], Mapping[str, Detection]]


def checkpoints_nearby(listing: Listing, detect: Detect) -> list[tuple[str, str]]:
    """The checkpoints in the folders below, or else in the folder that holds this one: each URL with its format.

    The folder above counts by its own files only: a run is found by the steps in it, of which this may be one.
    """
    level, left = [""], MOST_FOLDERS
    for _ in range(LEVELS):
        level = [join(prefix, name) for prefix in level for name in _folders(listing, prefix)[:left]][:left]
        left -= len(level)
        found = [told for path in level for told in _told(Listing(listing.folder.subfolder(path)), detect)]
        if found:
            return found[:MOST_NAMED]
    return _told(_above(listing), detect)


class _FilesOnly(Listing):
    """A folder without what lies below it."""

    def files(self, prefix: str = "") -> dict[str, FileEntry]:
        """The files directly in the folder, and none elsewhere."""
        return {} if prefix else super().files()

    def folders(self, prefix: str = "") -> tuple[str, ...]:  # noqa: ARG002 - whichever it is
        """None."""
        return ()


def _above(listing: Listing) -> Listing | None:
    try:
        return _FilesOnly(open_folder(listing.folder.address.split()[0]))
    except UnshardError:  # the root has none, and a service may read only some places
        return None


def _folders(listing: Listing, prefix: str) -> tuple[str, ...]:
    try:
        return listing.folders(prefix)
    except UnshardError:  # one that this user may not read
        return ()


def _told(listing: Listing | None, detect: Detect) -> list[tuple[str, str]]:
    """The folder with its one format; nothing where several or only a kind of file is recognised."""
    if listing is None:
        return []
    try:
        found = detect(listing)
    except UnshardError:
        return []
    certain = [name for name, detection in found.items() if not detection.generic]
    return [(listing.folder.address.url, certain[0])] if len(certain) == 1 else []
