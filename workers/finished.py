"""Whether a destination holds the model of a plan already, so that nothing is left to do."""

from __future__ import annotations

import json
from typing import Any

from workers.destination import Destination, open_destination
from workers.manifest import DIGEST_PREFIX, digest, version_of_files
from workers.plan import Plan
from workers.storage import FolderAddress, open_folder
from workers.tokenizer_files import content_of


def is_made(made: Plan, destination: str) -> bool:
    """Whether the destination holds the model of this very plan, whole. Reads no weights."""
    address = FolderAddress(destination, made.options.destination_profile)
    return finished_manifest(made, open_destination(address), destination) is not None


def finished_manifest(made: Plan, target: Destination, destination: str) -> dict[str, Any] | None:
    """The manifest of a model at the destination that was made by this very plan, if its files are all there."""
    if made.options.overwrite or not made.options.resume:
        return None
    try:
        manifest: Any = json.loads(target.manifest() or b"null")
        if manifest is None or manifest["plan"] != made.fingerprint:
            return None
        # Metadata of files without checksums is the same for other weights of the same shapes.
        if manifest["source"]["version"] != version_of_files(made.checkpoint.files):
            return None
        wanted = {entry["path"]: entry["size_bytes"] for entry in (*manifest["weights"], *manifest["files"])}
        digests = {entry["path"]: entry["digest"] for entry in manifest["files"]}
    except (ValueError, TypeError, KeyError):
        return None
    folder = open_folder(FolderAddress(destination, made.options.destination_profile))
    present = {file.path: file.size_bytes for file in folder.list()}
    is_whole = all(present.get(path) == size for path, size in wanted.items())
    return dict(manifest) if is_whole and _has_side_files_of(made, digests) else None


def _has_side_files_of(made: Plan, digests: dict[str, str]) -> bool:
    """Whether the files beside the weights are the source's of today; a plan knows only their sizes."""
    own = open_folder(made.checkpoint.address)
    try:
        return all(
            digests.get(side.target_path) == DIGEST_PREFIX + digest(content_of(side, own))
            for side in made.mapping.side_files
        )
    finally:
        own.close()
