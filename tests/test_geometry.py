"""Boxes against torch's own arithmetic of distributed tensors, and exact cover against counting."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as torch_placements
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from workers.geometry import (
    Replicate,
    Shard,
    StridedShard,
    chunk,
    contiguous_strides,
    cover_faults,
    flat_range_boxes,
    intersect,
    local_box,
    same_box_as_previous,
)

shapes = st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def shardings(draw):
    """A shape, a mesh and plain placements on it; uneven cuts and empty parts included."""
    shape, mesh = draw(shapes), draw(meshes)
    kinds = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


@st.composite
def fsdp_over_tensor_parallel(draw):
    """FSDP over tensor parallelism on one dimension, evenly: the only way FSDP2 takes it."""
    fsdp, tp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dim = draw(st.integers(0, 1))
    shape = [draw(st.integers(1, 5)), draw(st.integers(1, 5))]
    shape[dim] *= fsdp * tp
    return tuple(shape), (fsdp, tp), (StridedShard(dim, tp), Shard(dim))


def as_torch(placement):
    match placement:
        case Shard(dim):
            return torch_placements.Shard(dim)
        case StridedShard(dim, factor):
            return torch_placements._StridedShard(dim, split_factor=factor)
    return torch_placements.Replicate()


def coordinates(mesh):
    return list(product(*map(range, mesh)))


def elements(shape, box):
    """The row-major numbers of the elements in a box."""
    offsets, sizes = box
    numbers = np.arange(prod(shape)).reshape(shape)
    return numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


@given(shardings())
def test_a_ranks_box_is_what_torch_computes(sharding):
    shape, mesh, placements = sharding
    cuts = [as_torch(placement) for placement in placements]
    for coordinate in coordinates(mesh):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), cuts)
        found_offsets, found_sizes = local_box(shape, mesh, placements, coordinate)
        assert found_sizes == tuple(sizes)
        if 0 not in found_sizes:
            assert found_offsets == tuple(offsets)


@given(fsdp_over_tensor_parallel())
def test_a_strided_shard_is_cut_after_the_shards_to_its_right(sharding):
    shape, mesh, placements = sharding
    cuts = [as_torch(placement) for placement in placements]
    for coordinate in coordinates(mesh):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), cuts)
        assert local_box(shape, mesh, placements, coordinate) == (tuple(offsets), tuple(sizes))


@given(fsdp_over_tensor_parallel())
def test_strided_shards_hold_what_sharding_twice_leaves(sharding):
    shape, (fsdp, tp), placements = sharding
    dim = placements[1].dim
    whole = torch.arange(prod(shape)).reshape(shape)
    for f, t in coordinates((fsdp, tp)):
        expected = whole.chunk(tp, dim)[t].chunk(fsdp, dim)[f]
        found = elements(shape, local_box(shape, (fsdp, tp), placements, (f, t)))
        assert (found == expected.numpy()).all()


@given(shapes, st.integers(1, 4), st.integers(1, 4))
def test_an_order_of_cuts_can_be_told(shape, first, second):
    placements = Shard(0), Shard(0)
    for a, b in coordinates((first, second)):
        told = local_box(shape, (first, second), placements, (a, b), order=(1, 0))
        assert told == local_box(shape, (second, first), placements, (b, a))


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(length, parts):
    pieces = torch.arange(length).chunk(parts)
    for index in range(parts):
        start, size = chunk(length, parts, index)
        expected = pieces[index] if index < len(pieces) else torch.arange(0)
        assert size == len(expected)
        assert not size or start == expected[0]


@given(shardings())
def test_the_boxes_of_all_ranks_cover_a_tensor_once_per_replica(sharding):
    shape, mesh, placements = sharding
    counts = np.zeros(shape, dtype=int)
    for coordinate in coordinates(mesh):
        offsets, sizes = local_box(shape, mesh, placements, coordinate)
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    replicas = prod(size for size, placement in zip(mesh, placements, strict=True) if placement == Replicate())
    assert (counts == replicas).all()


@given(shapes, st.data())
def test_a_flat_range_is_tiled_in_order_by_few_boxes(shape, data):
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = list(flat_range_boxes(shape, start, stop))
    found = [number for box in boxes for number in elements(shape, box).ravel()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_a_flat_range_of_a_scalar_is_the_scalar():
    assert list(flat_range_boxes((), 0, 1)) == [((), ())]


@given(shapes, st.data())
def test_an_intersection_is_what_two_boxes_share(shape, data):
    one, two = (data.draw(boxes_in(shape)) for _ in range(2))
    shared = intersect(*one, *two)
    expected = set(elements(shape, one).ravel()) & set(elements(shape, two).ravel())
    found = set(elements(shape, shared).ravel()) if shared else set()
    assert found == expected


@st.composite
def boxes_in(draw, shape):
    offsets = [draw(st.integers(0, length - 1)) for length in shape]
    sizes = [draw(st.integers(1, length - offset)) for length, offset in zip(shape, offsets, strict=True)]
    return tuple(offsets), tuple(sizes)


@given(shapes)
def test_contiguous_strides_are_torchs(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()


# --- exact cover -------------------------------------------------------------------------------------------


@st.composite
def tilings(draw, shape):
    """Boxes that tile a shape: cut again and again at random places, along random dimensions."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[index]
        dim = draw(st.integers(0, len(shape) - 1))
        if sizes[dim] < 2:
            continue
        at = draw(st.integers(1, sizes[dim] - 1))
        low = (*sizes[:dim], at, *sizes[dim + 1 :])
        high = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
        boxes[index] = offsets, low
        boxes.append(((*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), high))
    return boxes


@st.composite
def flat_tilings(draw, shape):
    """Boxes that tile a shape: its row-major elements cut at random places, as flat partitions leave them."""
    cuts = sorted({0, prod(shape), *draw(st.lists(st.integers(0, prod(shape)), max_size=5))})
    return [box for start, stop in pairwise(cuts) for box in flat_range_boxes(shape, start, stop)]


@st.composite
def tiled_tensors(draw):
    kinds = st.sampled_from((tilings, flat_tilings))
    return [(shape, draw(draw(kinds)(shape))) for shape in draw(st.lists(shapes, min_size=1, max_size=4))]


def faults_of(tensors):
    """Faults of (shape, boxes) pairs, and the sorted rows they speak of."""
    rows = sorted((number, *box) for number, (_, boxes) in enumerate(tensors) for box in boxes)
    owner = np.array([row[0] for row in rows], dtype=np.int32)
    offsets, sizes = (
        np.array([pad(row[part], fill) for row in rows], dtype=np.int64).reshape(-1, 3)
        for part, fill in ((1, 0), (2, 1))
    )
    whole = np.array([pad(shape, 1) for shape, _ in tensors], dtype=np.int64).reshape(-1, 3)
    return list(cover_faults(owner, offsets, sizes, whole)), rows


def pad(values, fill):
    return (*values, *(fill,) * (3 - len(values)))


@given(tiled_tensors())
def test_no_fault_is_found_in_a_tiling(tensors):
    assert faults_of(tensors)[0] == []


@given(tiled_tensors(), st.data())
def test_every_missing_box_is_found(tensors, data):
    number = data.draw(st.integers(0, len(tensors) - 1))
    shape, boxes = tensors[number]
    gone = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    faults, _ = faults_of([*tensors[:number], (shape, boxes), *tensors[number + 1 :]])
    assert [(fault.owner, fault.missing_elements) for fault in faults] == [(number, prod(gone[1]))]
    assert faults[0].overlapping_rows is None


@given(tiled_tensors(), st.data())
def test_every_overlap_is_found_even_when_the_volumes_add_up(tensors, data):
    number = data.draw(st.integers(0, len(tensors) - 1))
    shape, boxes = tensors[number]
    extra = data.draw(boxes_in(shape))
    assume(extra not in boxes)
    index = data.draw(st.integers(0, len(boxes) - 1))
    replaced = data.draw(st.booleans())
    boxes = [*boxes[:index], *([boxes[index]] if not replaced else []), *boxes[index + 1 :], extra]
    counts = np.zeros(shape, dtype=int)
    for offsets, sizes in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    faults, rows = faults_of([*tensors[:number], (shape, boxes), *tensors[number + 1 :]])
    if (counts == 1).all():
        assert faults == []
        return
    (fault,) = faults
    assert fault.owner == number
    if (counts > 1).any():
        assert fault.overlapping_rows is not None
        one, two = (rows[row][1:] for row in fault.overlapping_rows)
        assert intersect(*one, *two)
    else:
        assert fault.missing_elements == (counts == 0).sum()


@pytest.mark.parametrize("count", [0, 1])
def test_tensors_without_pieces_lack_all_their_elements(count):
    pieces = [((0, 0), (2, 3))][:count]
    faults, _ = faults_of([((2, 3), pieces), ((4,), [])])
    assert [(fault.owner, fault.missing_elements) for fault in faults][-1] == (1, 4)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 2)), max_size=12))
def test_repeats_are_the_rows_that_equal_the_one_before(rows):
    rows = sorted(rows)
    owner, offsets, sizes = (np.array([row[part] for row in rows], dtype=np.int64) for part in range(3))
    repeat = same_box_as_previous(owner, offsets.reshape(-1, 1), sizes.reshape(-1, 1))
    assert repeat.tolist() == [index > 0 and rows[index] == rows[index - 1] for index in range(len(rows))]
