"""Folders of files, local or in object storage, behind one small interface.

This package is the only one that talks to obstore and the only one that knows URLs. It knows nothing of
checkpoints. Readers ask a ``Folder`` for names, sizes and byte ranges; collectors write through it. Endpoints and
credentials come from a named server-side profile or from the environment, never from a job.
"""

from __future__ import annotations

from dataclasses import replace

from workers.storage.addresses import FolderAddress, Location, check_path
from workers.storage.bounds import bounded, current_roots
from workers.storage.folder import (
    AlreadyExists,
    FileEntry,
    Folder,
    TooManyFiles,
    Usage,
    VersionMismatch,
    WriteConflict,
)
from workers.storage.local import LocalFolder
from workers.storage.profiles import environment_profile, find_profile, load_profiles

__all__ = [
    "AlreadyExists",
    "FileEntry",
    "Folder",
    "FolderAddress",
    "TooManyFiles",
    "Usage",
    "VersionMismatch",
    "WriteConflict",
    "bounded",
    "check_path",
    "load_profiles",
    "open_folder",
]


def open_folder(address: FolderAddress | str) -> Folder:
    """Open a folder by path or URL; no request is sent and nothing is created.

    ``InvalidOption`` for an unknown scheme or profile, a malformed URL, or one that the profile does not allow.
    """
    if isinstance(address, str):
        address = FolderAddress(address)
    location = Location.parse(address.url)
    if address.profile is not None:
        profile = find_profile(address.profile, location)
    else:
        profile = environment_profile(location.scheme)
    canonical = FolderAddress(location.url, address.profile)
    if location.scheme == "file":
        canonical = replace(canonical, roots=address.roots or current_roots())
        return LocalFolder(canonical, roots=tuple(prefix.path for prefix in profile.prefixes))
    # Late, because local work need not pay for loading obstore.
    from workers.storage.object_store import open_object_folder  # noqa: PLC0415

    return open_object_folder(canonical, location, profile)
