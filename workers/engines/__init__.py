"""Engines drive the parts of a plan through mergers and collectors. There are two: threads and Ray actors.

Both are given the same ``Work`` and must leave the same bytes at its staging place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workers.collection import Collection
from workers.layout import OutputFile
from workers.merge import Recipe
from workers.storage import FolderAddress


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be made, and whom to tell."""

    recipe: Recipe
    files: tuple[OutputFile, ...]
    pending: tuple[int, ...]
    """Numbers of the files to make, in the order of writing; the others are finished already."""
    source: FolderAddress
    staging: FolderAddress
    memory_bytes: int
    """Budget for parts under way, the uploaders' buffers included."""
    worker_bytes: int
    """What one worker holds at most while it makes a part block by block."""
    fetched_bytes: int
    """What is read at most for one part; of a remote source a worker holds all of it beside that."""
    collection: Collection
    before_file: Callable[[], None]
    """Called before each file is begun; raises when this attempt has lost the destination."""
    file_finished: Callable[[int, str | None], None]
    """Called once for each file that is whole and durable, with its number and ETag; from any thread."""
    cancel: threading.Event
    attempt: str = ""
    """Whose work it is, for people who look at the workers."""


class Engine(Protocol):
    """Runs work to its end."""

    name: str

    def run(self, work: Work) -> None:
        """Make all pending files, or raise an ``UnshardError`` after everything under way has stopped.

        ``Cancelled`` within a second after ``work.cancel`` is set.
        """
