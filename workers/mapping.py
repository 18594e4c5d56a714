"""``Mapping``: what a conversion writes. Target tensors as expressions over source tensors, and the files beside them.

A family's table makes it from a ``Checkpoint``; the planner lays it out. It knows neither files of the source nor
byte positions of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workers.checkpoint import SideFile
from workers.expressions import Expression


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the result. ``folder`` is where its file lies below the destination: "" is the model itself."""

    name: str
    expression: Expression
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A source tensor that is left out on purpose, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Mapping:
    """The whole result of a conversion, before it is cut into output files."""

    family: str
    """Name of the table that gave the names, or ``names kept``."""
    targets: tuple[Target, ...]
    """In the order of writing, which is that of the source's state dict."""
    dropped: tuple[Dropped, ...]
    files: tuple[tuple[str, bytes], ...]
    """Small files with new content, by path below the destination: config.json, adapter_config.json ..."""
    side_files: tuple[SideFile, ...]
    """Small files that are carried over byte for byte."""
    notes: tuple[str, ...]


class Probe(Protocol):
    """A look at a few weights before planning ends; whoever reads bytes implements it."""

    def equal(self, tensor_a: int, tensor_b: int) -> bool:
        """Whether two tensors of the checkpoint, of one dtype and shape, hold the same elements."""
