"""Disks that are full: which one, how much is missing, what the user can do."""

# Paths are plain text here, as everywhere in this package.
# ruff: noqa: PTH112, PTH120

from __future__ import annotations

import errno
import os
from contextlib import suppress

from workers.errors import InsufficientResources

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
HINT = "Free some space or allow more, then run it again: files that are finished are kept."


def is_full(error: OSError) -> bool:
    """Whether an error says that a disk, or what this user may have of it, is used up."""
    return error.errno in FULL


def no_space(path: str, needed_bytes: int | None = None) -> InsufficientResources:
    """The error for a write to ``path`` that found no room; ``needed_bytes`` is what was still to be written."""
    free = free_bytes(path)
    found = None if free is None else f"{free} bytes"
    needed = "" if needed_bytes is None else f"{needed_bytes} bytes more are needed"
    numbers = ", ".join(filter(None, (needed, f"{free} bytes are free" if free is not None else "")))
    return InsufficientResources(
        f"no space is left for {path}" + (f": {numbers}" if numbers else ""),
        file=path,
        expected=None if needed_bytes is None else f"{needed_bytes} bytes",
        found=found,
        hint=HINT,
    )


def free_bytes(path: str) -> int | None:
    """Free bytes of the disk that a path is on, or will be; None when that can't be found out."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    with suppress(OSError):
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
    return None
