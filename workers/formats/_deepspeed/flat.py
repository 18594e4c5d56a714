"""Which elements of which parameter a rank's flat partition holds. Pure geometry: no file, no name of a format.

Source: DeepSpeed ``utils/zero_to_fp32.py`` (``_zero2_merge_trainable_params``, ``_zero3_merge_trainable_params``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from workers.geometry import Shape

ALIGNMENT_PER_RANK = 2
"""A flat group of stages 1 and 2 is padded to a multiple of this many elements for each rank (NCCL's alignment)."""


class Fragment(NamedTuple):
    """Elements [start, stop) of a parameter, row-major, that lie from ``position`` on in a rank's partition."""

    name: str
    rank: int
    position: int
    start: int
    stop: int


class DoesNotFitError(Exception):
    """Parameters and partitions of a group disagree about its size."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed = needed
        self.available = available


def split_group(
    shapes: Mapping[str, Shape], lengths: Sequence[int], paddings: Sequence[int] | None = None
) -> Iterator[Fragment]:
    """Stages 1 and 2: the parameters one after the other, cut into the ranks' partitions wherever these end.

    ``lengths`` are the partitions' elements by rank; ``paddings`` what follows each parameter. Parameters straddle
    partitions, and the last partition may end with padding or without.
    """
    gaps = paddings or [0] * len(shapes)
    needed = sum(prod(shape) for shape in shapes.values()) + sum(gaps[: len(shapes)])
    needed_without_last = needed - (gaps[len(shapes) - 1] if shapes else 0)
    available = sum(lengths)
    if not needed_without_last <= available < needed + ALIGNMENT_PER_RANK * max(1, len(lengths)):
        raise DoesNotFitError(needed, available)
    rank = position = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=False):
        done, numel = 0, prod(shape)
        while done < numel:
            while position >= lengths[rank]:
                position -= lengths[rank]
                rank += 1
            count = min(numel - done, lengths[rank] - position)
            yield Fragment(name, rank, position, done, done + count)
            done += count
            position += count
        position += gap


def split_each(shapes: Mapping[str, Shape], lengths: Sequence[int]) -> Iterator[Fragment]:
    """Stage 3: each parameter is cut into equal pieces, one for each rank; the last ones end with padding."""
    world_size = len(lengths)
    shares = {name: -(-prod(shape) // world_size) for name, shape in shapes.items()}
    needed = sum(shares.values())
    for length in lengths:
        if length != needed:
            raise DoesNotFitError(needed, length)
    position = 0
    for name, shape in shapes.items():
        numel, share = prod(shape), shares[name]
        for rank in range(world_size):
            start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
            if start < stop:
                yield Fragment(name, rank, position, start, stop)
        position += share
