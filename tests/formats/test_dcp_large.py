"""Large DCP metadata: the reader without objects says what the ordinary one says, or leaves the work to it."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.dcp_files import DcpFolder, DcpSaved
from workers.errors import InputError
from workers.formats._dcp_metadata import read_dcp_metadata
from workers.formats._dcp_records import DcpRecords, read_large_records, read_records
from workers.formats._format import Listing
from workers.storage import open_folder


def metadata(tensors: int, ranks: int, *, rank: int = 2, objects: int = 1, shared_names: bool = False) -> Metadata:
    """Metadata as a large run has them: each rank's items come unpickled from another process."""
    rows = 300
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(tensors)]
    rest = (64,) * (rank - 1)
    entries = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=torch.bfloat16),
            torch.Size((ranks * rows, *rest)),
            [
                ChunkStorageMetadata(torch.Size((rows * part, *(0,) * (rank - 1))), torch.Size((rows, *rest)))
                for part in range(ranks)
            ],
        )
        for name in names
    }
    stored = {}
    for part in range(ranks):
        results = [
            (
                MetadataIndex(name, torch.Size((rows * part, *(0,) * (rank - 1))), part),
                _StorageInfo(f"__{part}_0.distcp", number * 70_000 + (1 << 33) * (number % 3), 40_000),
            )
            for number, name in enumerate(names)
        ]
        stored |= dict(results if shared_names else pickle.loads(pickle.dumps(results)))
    for number in range(objects):
        entries[f"lr.{number}"] = BytesStorageMetadata()
        stored[MetadataIndex(f"lr.{number}")] = _StorageInfo("__0_0.distcp", 0, 10)
    return Metadata(entries, {name: ("model", name[6:]) for name in names}, stored)


def rows(records: DcpRecords) -> tuple:
    chunks = sorted((tensor, *records.boxes[box]) for tensor, box in records.chunks.tolist())
    items = sorted(
        (tensor, records.item_offsets[offset], records.files[file], at, length, records.transforms[transform])
        for tensor, offset, file, at, length, transform in records.items.tolist()
    )
    return list(records.tensors.values()), chunks, items, records.objects, records.paths


def assert_same(data: bytes) -> None:
    large = read_large_records(bytearray(data), ".metadata")
    assert large is not None
    assert rows(large) == rows(read_records(data, ".metadata"))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 12),
    st.integers(0, 5),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from((4, 5)),
)
def test_both_readers_say_the_same(tensors, ranks, rank, objects, shared_names, protocol):
    made = metadata(tensors, ranks, rank=rank, objects=objects, shared_names=shared_names)
    assert_same(pickle.dumps(made, protocol=protocol))


def test_metadata_over_many_frames_take_few_objects():
    data = pickle.dumps(metadata(400, 40))
    assert len(data) > 1 << 20
    assert_same(data)


def test_names_with_bytes_that_end_texts_are_read():
    folder = DcpFolder()
    for number in range(5):
        folder.add(f"layers.{number}.Ŕ\x94.weight", DcpSaved(torch.ones(4), [[2]]))
    assert_same(pickle.dumps(folder.metadata))


@pytest.mark.parametrize("protocol", [2, 3])
def test_older_protocols_are_left_to_the_ordinary_reader(protocol):
    data = pickle.dumps(metadata(2, 2), protocol=protocol)
    assert read_large_records(bytearray(data), ".metadata") is None


LARGE = pickle.dumps(metadata(4, 4))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(LARGE) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_damaged_metadata_are_left_alone_or_understood_as_the_ordinary_reader_does(changes):
    data = bytearray(LARGE)
    for position, value in changes:
        data[position] = value

    try:
        large = read_large_records(bytearray(data), ".metadata")
    except InputError:
        return
    if large is None:
        return
    try:
        ordinary = read_records(bytes(data), ".metadata")
    except InputError:
        return
    assert rows(large)[:3] == rows(ordinary)[:3]


def test_a_large_file_is_read_through_its_folder(tmp_path: Path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(700, 64)))
    assert (tmp_path / ".metadata").stat().st_size > 4 << 20
    found = read_dcp_metadata(Listing(open_folder(str(tmp_path))))
    assert len(found.tensors) == 700
    assert (np.diff(found.chunks.first) == 64).all()
    assert found.objects == ("lr.0",)
