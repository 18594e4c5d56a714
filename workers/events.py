"""What a running conversion tells whoever watches: the command line, the service, a test.

Events are plain records. An observer is called from whichever thread has something to tell, one call at a time;
it must return quickly and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan is made; ``summary`` is its printable, JSON-ready form (``Plan.summary``), ``table`` makes its rows."""

    summary: dict[str, Any]
    table: Callable[[], Iterator[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Started:
    """The destination is claimed; ``kept_files`` were proved finished by an earlier attempt's journal."""

    attempt: str
    kept_files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the weights are; sent at most twice a second and once for each file that is whole.

    What was read and merged is the work of this attempt: what an earlier one finished is not in it, and a part that is
    made again, because its worker was lost, counts again.
    """

    bytes_done: int
    """Bytes of output that are written: in place, or taken by the upload; with those of an earlier attempt."""
    bytes_total: int
    bytes_read: int
    """Bytes of the source, of parts that are made."""
    bytes_merged: int
    """Bytes of output that mergers have made. To a file system they are written as they are made; parts for an object
    store may wait for their upload, and then more are merged than written."""
    tensors_done: int
    tensors_total: int
    files_done: int
    files_total: int
    workers: dict[str, str] = field(default_factory=dict)
    """Worker name -> what it does now."""
    written: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Output file under way -> the byte ranges of it that are done, in order; of very many some are left out."""


@dataclass(frozen=True, slots=True)
class FileCompleted:
    """An output file is whole at the destination (not yet committed)."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that does not stop the conversion but that its user should know."""

    message: str


@dataclass(frozen=True, slots=True)
class Retried:
    """A part is made again because a worker or a node was lost."""

    part: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verifying:
    """All bytes are written; checksums, replicas and, when asked, the written files are being compared."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The manifest is written: the model is finished at ``location``."""

    location: str
    manifest: dict[str, Any]


Event = Planned | Started | Progress | FileCompleted | Warned | Retried | Verifying | Committed
Observer = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """The observer of whoever does not want to know."""
