"""Pure geometry: boxes of a tensor, the chunk rule of distributed tensors, exact cover.

Nothing here knows of files or formats. Boxes are (offsets, sizes) in elements, one entry per tensor dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
IntArray = NDArray[np.int64]

MOST_DIMENSIONS = 64
"""No tensor of torch has more (ATen ``dim_bitset_size``); the product of a shape of millions takes hours to make."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Placement: the mesh dimension cuts tensor dimension ``dim`` into chunks."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Placement: like ``Shard``, but applied after the shards to its right (FSDP over tensor parallelism)."""

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Placement: every rank along the mesh dimension holds the same."""


Placement = Shard | StridedShard | Replicate


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of chunk ``index`` when ``length`` is cut as torch does it: ceil-sized chunks first.

    The last chunks may be shorter or empty. Source: ``torch.chunk`` and
    ``torch.distributed.tensor.placement_types.Shard.local_shard_size_and_offset``.
    """
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(start + size, length) - start


def local_box(
    shape: Shape,
    mesh_sizes: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    order: Sequence[int] | None = None,
) -> tuple[Shape, Shape]:
    """Offsets and sizes of what the rank at ``coordinate`` of a device mesh holds of a tensor of ``shape``.

    Mesh dimensions that cut the same tensor dimension are applied left to right, a ``StridedShard`` after the
    shards to its right whose sizes multiply to its split factor; ``order`` names another order of mesh dimensions.
    Source: ``torch.distributed.tensor._utils.compute_local_shape_and_global_offset``, whose result this equals
    wherever the local part is one box.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for mesh_dim in application_order(placements) if order is None else order:
        placement = placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        start, length = chunk(sizes[placement.dim], mesh_sizes[mesh_dim], coordinate[mesh_dim])
        offsets[placement.dim] += start
        sizes[placement.dim] = length
    return tuple(offsets), tuple(sizes)


def application_order(placements: Sequence[Placement]) -> list[int]:
    """Mesh dimensions in the order in which their cuts are applied: strided shards after the plain ones."""
    plain = [i for i, placement in enumerate(placements) if not isinstance(placement, StridedShard)]
    strided = [i for i, placement in enumerate(placements) if isinstance(placement, StridedShard)]
    return plain + strided[::-1]


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Strides in elements of a row-major tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def intersect(
    offsets_a: Sequence[int], sizes_a: Sequence[int], offsets_b: Sequence[int], sizes_b: Sequence[int]
) -> tuple[Shape, Shape] | None:
    """The box that two boxes share, or None."""
    starts, sizes = [], []
    for a, length_a, b, length_b in zip(offsets_a, sizes_a, offsets_b, sizes_b, strict=True):
        start = max(a, b)
        length = min(a + length_a, b + length_b) - start
        if length <= 0:
            return None
        starts.append(start)
        sizes.append(length)
    return tuple(starts), tuple(sizes)


def flat_range_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut the elements [start, stop) of a row-major tensor into boxes, in order.

    At most 2 * rank - 1 boxes; each is contiguous in the row-major order.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        yield from _inside_row(shape, first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from _inside_row(shape, first, start - first * row, row)
        first += 1
    whole = stop // row - first
    if whole > 0:
        yield (first,) + (0,) * (len(shape) - 1), (whole, *shape[1:])
    if stop % row:
        yield from _inside_row(shape, stop // row, 0, stop % row)


def _inside_row(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    if start == 0 and stop == prod(shape[1:]):
        yield (index,) + (0,) * (len(shape) - 1), (1, *shape[1:])
        return
    for offsets, sizes in flat_range_boxes(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)


def uncovered_boxes(
    shape: Shape, boxes: Iterable[tuple[Sequence[int], Sequence[int]]], *, most: int = 1000
) -> list[tuple[Shape, Shape]]:
    """Boxes (offsets, sizes) that make up what of a tensor of ``shape`` is in none of ``boxes``.

    They don't overlap. Cutting ends early once there are more than ``most`` of them: what is returned is then more
    than what is uncovered.
    """
    left = [((0,) * len(shape), tuple(shape))] if prod(shape) else []
    for offsets, sizes in boxes:
        if len(left) > most:
            break
        left = [rest for box in left for rest in _without(box, offsets, sizes)]
    return left


def _without(box: tuple[Shape, Shape], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[Shape, Shape]]:
    """What is left of a box without another one, cut dimension by dimension."""
    shared = intersect(*box, offsets, sizes)
    if shared is None:
        yield box
        return
    start, size = list(box[0]), list(box[1])
    for dim, (first, length) in enumerate(zip(*shared, strict=True)):
        end = start[dim] + size[dim]
        for begin, stop in ((start[dim], first), (first + length, end)):
            if stop > begin:
                yield (
                    (*start[:dim], begin, *start[dim + 1 :]),
                    (*size[:dim], stop - begin, *size[dim + 1 :]),
                )
        start[dim], size[dim] = first, length


def same_box_as_previous(owner: NDArray[Any], offsets: IntArray, sizes: IntArray) -> NDArray[np.bool_]:
    """For boxes sorted by (owner, offsets, sizes): which rows repeat the row before them."""
    repeat = np.zeros(len(owner), dtype=bool)
    if len(owner) > 1:
        repeat[1:] = (
            (owner[1:] == owner[:-1])
            & (offsets[1:] == offsets[:-1]).all(axis=1)
            & (sizes[1:] == sizes[:-1]).all(axis=1)
        )
    return repeat


@dataclass(frozen=True, slots=True)
class CoverFault:
    """Why boxes don't tile a tensor: the tensor's number, and either two overlapping rows or what is missing."""

    owner: int
    missing_elements: int
    overlapping_rows: tuple[int, int] | None = None


def cover_faults(owner: NDArray[Any], offsets: IntArray, sizes: IntArray, shapes: IntArray) -> Iterator[CoverFault]:
    """Find tensors whose boxes (sorted by owner, then offsets; no repeats) do not tile them exactly.

    ``shapes`` has one row per tensor, padded with ones. Boxes that run in a row along one dimension, which is
    what sharding on one dimension leaves, and boxes that follow on each other in row-major order, which is what flat
    partitions leave, are proved all at once; the others tensor by tensor.
    """
    counts = np.bincount(owner, minlength=len(shapes))
    volumes = np.bincount(owner, weights=sizes.prod(axis=1), minlength=len(shapes)).astype(np.int64)
    totals = shapes.prod(axis=1)
    missing = totals - volumes
    first = np.concatenate(([0], np.cumsum(counts)))
    doubtful = ~_all_by_owner(_in_line(owner, offsets, sizes), owner, len(shapes))
    if doubtful.any():
        rest = doubtful[owner]
        in_order = _in_row_major_order(owner[rest], offsets[rest], sizes[rest], shapes)
        doubtful &= ~_all_by_owner(in_order, owner[rest], len(shapes))
    for index in np.flatnonzero((missing != 0) | doubtful):
        rows = slice(int(first[index]), int(first[index + 1]))
        pair = _first_overlap(offsets[rows], sizes[rows])
        overlap = (rows.start + pair[0], rows.start + pair[1]) if pair else None
        if overlap or missing[index]:
            yield CoverFault(int(index), int(missing[index]), overlap)


def _in_line(owner: NDArray[Any], offsets: IntArray, sizes: IntArray) -> NDArray[np.bool_]:
    """Which rows begin beyond where the row before them ends along the one dimension in which they differ."""
    fine = np.ones(len(owner), dtype=bool)
    if len(owner) < 2:
        return fine
    same_owner = owner[1:] == owner[:-1]
    after = offsets[1:] >= offsets[:-1] + sizes[:-1]
    same = (offsets[1:] == offsets[:-1]) & (sizes[1:] == sizes[:-1])
    fine[1:] = ~same_owner | ((after | same).all(axis=1) & (after.sum(axis=1) == 1))
    # One line needs one direction: a change of direction is left to the thorough check.
    direction = np.where(same_owner, after.argmax(axis=1), -1)
    turned = (direction[1:] != direction[:-1]) & (direction[1:] >= 0) & (direction[:-1] >= 0)
    fine[2:] &= ~turned
    return fine


def _in_row_major_order(
    owner: NDArray[Any], offsets: IntArray, sizes: IntArray, shapes: IntArray
) -> NDArray[np.bool_]:
    """Which rows are boxes without gaps in row-major order, and begin where the row before them ends or beyond."""
    whole, single = sizes == shapes[owner], sizes == 1
    ones_before = np.ones_like(single)
    ones_before[:, 1:] = np.logical_and.accumulate(single[:, :-1], axis=1)
    whole_after = np.ones_like(whole)
    whole_after[:, :-1] = np.logical_and.accumulate(whole[:, :0:-1], axis=1)[:, ::-1]
    fine: NDArray[np.bool_] = (ones_before & whole_after).any(axis=1)
    strides = np.ones_like(shapes)
    strides[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    starts = (offsets * strides[owner]).sum(axis=1)
    ends = starts + sizes.prod(axis=1)
    fine[1:] &= (owner[1:] != owner[:-1]) | (starts[1:] >= ends[:-1])
    return fine


def _all_by_owner(flags: NDArray[np.bool_], owner: NDArray[Any], owners: int) -> NDArray[np.bool_]:
    bad = np.zeros(owners, dtype=bool)
    bad[owner[~flags]] = True
    return ~bad


def _first_overlap(offsets: IntArray, sizes: IntArray) -> tuple[int, int] | None:
    """The first two boxes that share an element. Memory stays bounded: one box against those after it."""
    ends = offsets + sizes
    if offsets.shape[1] == 0:
        return (0, 1) if len(offsets) > 1 else None
    for index in range(len(offsets) - 1):
        # Sorted by the first dimension: nothing that begins after this box's end there can touch it.
        limit = int(np.searchsorted(offsets[:, 0], ends[index, 0], side="left"))
        later = slice(index + 1, max(limit, index + 1))
        hits = (offsets[later] < ends[index]).all(axis=1) & (ends[later] > offsets[index]).all(axis=1)
        if hits.any():
            return index, index + 1 + int(hits.argmax())
    return None
