"""The builder of checkpoints: what it proves, and what it says when it can't."""

from __future__ import annotations

import numpy as np
import pytest

from workers.checkpoint import NO_CHECKSUM, Checkpoint, SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.storage import FolderAddress


def builder_with(*pieces, shape=(4, 6), name="w"):
    """A builder with one tensor; each piece is (rank, offsets, sizes) in a file of its own rank."""
    builder = CheckpointBuilder()
    for rank in range(max(piece[0] for piece in pieces) + 1):
        builder.add_file(SourceFile(f"rank_{rank}.pt", 1000, rank))
    tensor = builder.add_tensor(name, "F32", shape)
    for rank, offsets, sizes in pieces:
        storage = builder.add_storage(rank, 64, int(np.prod(sizes)) * 4, 7)
        builder.add_piece(tensor, storage, 64, (offsets, sizes), (sizes[1], 1))
    return builder


def checkpoint_of(builder):
    storages, pieces, replicas = builder.tables()
    address = FolderAddress("/nowhere")
    return Checkpoint(
        address, "test", "test", tuple(builder.files), tuple(builder.tensors), storages, pieces, replicas
    )


def test_pieces_come_sorted_whatever_the_order_they_were_added_in():
    checkpoint = checkpoint_of(builder_with((1, (2, 0), (2, 6)), (0, (0, 3), (2, 3)), (2, (0, 0), (2, 3))))
    assert [piece.offsets for piece in checkpoint.pieces_of(0)] == [(0, 0), (0, 3), (2, 0)]
    assert [piece.rank for piece in checkpoint.pieces_of(0)] == [2, 0, 1]
    assert checkpoint.index == {"w": 0}


def test_a_piece_for_people_knows_its_bytes():
    (first, second) = checkpoint_of(builder_with((0, (0, 0), (1, 6)), (1, (1, 0), (3, 6)))).pieces_of(0)
    assert (first.file, first.offset, first.length, first.strides) == ("rank_0.pt", 64, 24, (6, 1))
    assert second.length == 72


def test_a_box_that_is_there_twice_is_a_replica_of_the_first_rank_that_has_it():
    checkpoint = checkpoint_of(builder_with((0, (0, 0), (4, 6)), (1, (0, 0), (4, 6)), (2, (0, 0), (4, 6))))
    assert [piece.rank for piece in checkpoint.pieces_of(0)] == [0]
    assert [piece.rank for piece in checkpoint.pieces_of(0, replicas=True)] == [1, 2]


def test_empty_pieces_are_nothing():
    checkpoint = checkpoint_of(builder_with((0, (0, 0), (4, 6)), (1, (4, 0), (0, 6))))
    assert len(checkpoint.pieces) == 1


def test_a_gap_is_said_with_the_tensor_and_what_is_there():
    with pytest.raises(IncompleteCheckpoint) as caught:
        builder_with((0, (0, 0), (2, 6)), (1, (2, 0), (1, 6))).tables()
    assert "6 of the 24 elements of tensor w [4, 6]" in caught.value.message
    assert caught.value.found == "[0:2, 0:6], [2:3, 0:6]"


def test_an_overlap_is_said_with_both_files():
    with pytest.raises(GeometryMismatch) as caught:
        builder_with((0, (0, 0), (3, 6)), (1, (2, 0), (2, 6))).tables()
    assert "[0:3, 0:6] in rank_0.pt and [2:4, 0:6] in rank_1.pt" in caught.value.message


def test_a_tensor_without_pieces_is_a_gap():
    builder = builder_with((0, (0, 0), (4, 6)))
    builder.add_tensor("lonely", "BF16", (3,))
    with pytest.raises(IncompleteCheckpoint, match="3 of the 3 elements of tensor lonely"):
        builder.tables()


def test_scalars_and_empty_tensors_are_covered():
    builder = builder_with((0, (0, 0), (4, 6)))
    scalar = builder.add_tensor("scalar", "F32", ())
    builder.add_piece(scalar, 0, 64, ((), ()), ())
    builder.add_tensor("empty", "F32", (0, 5))
    checkpoint = checkpoint_of(builder)
    assert [piece.length for piece in checkpoint.pieces_of(scalar)] == [4]
    assert list(checkpoint.pieces_of(2)) == []


def test_a_second_shape_for_a_name_is_refused_with_both():
    builder = builder_with((0, (0, 0), (4, 6)))
    assert builder.add_tensor("w", "F32", (4, 6)) == 0
    with pytest.raises(GeometryMismatch) as caught:
        builder.add_tensor("w", "F32", (6, 4))
    assert (caught.value.expected, caught.value.found) == ("F32 [4, 6]", "F32 [6, 4]")
    with pytest.raises(GeometryMismatch, match="BF16"):
        builder.add_tensor("w", "BF16", (4, 6))


def test_more_dimensions_than_supported_are_refused():
    with pytest.raises(GeometryMismatch, match="9 dimensions"):
        CheckpointBuilder().add_tensor("deep", "F32", (1,) * 9)


def test_pieces_added_in_bulk_are_those_added_one_by_one():
    single = builder_with((0, (0, 0), (2, 6)), (1, (2, 0), (2, 6)))
    bulk = CheckpointBuilder()
    bulk.files = list(single.files)
    bulk.add_tensor("w", "F32", (4, 6))
    numbers = [bulk.add_storages(file, np.array([[64, 48, 7]])) for file in range(2)]
    boxes = [bulk.add_box((row, 0), (2, 6), (6, 1)) for row in (0, 2)]
    bulk.add_pieces(np.array([[0, number, 64, box] for number, box in zip(numbers, boxes, strict=True)]))
    one, other = checkpoint_of(single), checkpoint_of(bulk)
    assert list(one.pieces_of(0)) == list(other.pieces_of(0))
    assert other.storages.crc32.tolist() == [7, 7]


def test_a_storage_without_a_checksum_says_so():
    builder = CheckpointBuilder()
    file = builder.add_file(SourceFile("a", 10))
    builder.add_storage(file, 0, 4, None)
    tensor = builder.add_tensor("t", "F32", (1,))
    builder.add_piece(tensor, 0, 0, ((0,), (1,)), (1,))
    assert builder.tables()[0].crc32.tolist() == [NO_CHECKSUM]


def test_memory_of_the_tables_stays_within_the_budget_per_piece():
    """400 bytes a piece are the design's budget for planning; the tables are most of it."""
    builder = CheckpointBuilder()
    file, pieces = builder.add_file(SourceFile("a", 1 << 40)), 20_000
    builder.add_tensor("t", "F32", (pieces, 8, 8))
    rows = np.arange(pieces)
    boxes = np.array([builder.add_box((row, 0, 0), (1, 8, 8), (64, 8, 1)) for row in range(pieces)])
    builder.add_storages(file, np.stack([rows * 256, np.full(pieces, 256), np.zeros(pieces)], axis=1))
    builder.add_pieces(np.stack([np.zeros(pieces), rows, rows * 256, boxes], axis=1))
    storages, table, _ = builder.tables()
    used = sum(getattr(part, name).nbytes for part in (storages, table) for name in part.__slots__)
    assert used / pieces < 150


@pytest.mark.parametrize("number", [-1, 1 << 62, 1 << 63, 1 << 70])
@pytest.mark.parametrize("where", ["offset", "size", "stride", "start"])
def test_numbers_that_would_wrap_around_in_64_bits_are_refused(number, where):
    builder = CheckpointBuilder()
    tensor = builder.add_tensor("w", "F32", (4, 4))
    storage = builder.add_storage(builder.add_file(SourceFile("a", 64)), 0, 64, None)
    numbers = {"offset": 0, "size": 4, "stride": 4, "start": 0, where: number}
    box = (numbers["offset"], 0), (numbers["size"], 4)
    with pytest.raises(GeometryMismatch, match=f"a piece of tensor w has the number {number}"):
        builder.add_piece(tensor, storage, numbers["start"], box, (numbers["stride"], 1))


@pytest.mark.parametrize("shape", [(0, 1 << 70), (-2, -3)])
def test_a_shape_of_impossible_lengths_is_refused(shape):
    with pytest.raises(GeometryMismatch, match="the shape of tensor w has the number"):
        CheckpointBuilder().add_tensor("w", "F32", shape)
