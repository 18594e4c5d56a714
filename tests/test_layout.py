"""The split into shards is huggingface_hub's, and parts tile every file."""

from __future__ import annotations

import json

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.dtypes import size_bytes
from workers.expressions import Source, Transpose
from workers.layout import lay_out, part_size
from workers.mapping import Target

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=20)


def targets(shapes: list[tuple[int, ...]], folder: str = "") -> list[Target]:
    return [Target(f"layer.{n}", Source(n, "F32", shape), folder) for n, shape in enumerate(shapes)]


@settings(deadline=None)
@given(shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1), limit=st.integers(1, 800))
def test_the_split_is_that_of_save_pretrained(shapes: list[tuple[int, ...]], limit: int) -> None:
    state = {f"layer.{n}": torch.zeros(shape) for n, shape in enumerate(shapes)}
    wanted = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    ordered, layout = lay_out(targets(shapes), (), limit, 1 << 20)
    found = {
        file.path: [target.name for target in ordered[file.first_target : file.stop_target]] for file in layout.files
    }
    assert found == wanted.filename_to_tensors
    if wanted.is_sharded:
        index = json.loads(layout.indexes[0][1])
        assert index["weight_map"] == wanted.tensor_to_filename
        assert index["metadata"]["total_size"] == wanted.metadata["total_size"]


@settings(deadline=None)
@given(shapes=SHAPES, limit=st.integers(1, 800), part=st.integers(4, 300))
def test_parts_tile_each_file_behind_its_header(shapes: list[tuple[int, ...]], limit: int, part: int) -> None:
    ordered, layout = lay_out(targets(shapes), (), limit, part)
    parts = layout.parts
    for number, file in enumerate(layout.files):
        position = len(file.header)
        for row in range(file.first_part, file.stop_part):
            assert (parts.file[row], parts.offset[row]) == (number, position)
            position += int(parts.length[row])
            segments = range(int(parts.first_segment[row]), int(parts.first_segment[row + 1]))
            assert sum(4 * int(parts.end[s] - parts.begin[s]) for s in segments) == parts.length[row]
        assert position == file.size_bytes
        assert len(file.header) % 8 == 0
    for number, target in enumerate(ordered):
        rows = np.flatnonzero(parts.target == number)
        assert list(parts.begin[rows][1:]) == list(parts.end[rows][:-1])
        shape = target.expression.shape
        assert sum(parts.end[rows] - parts.begin[rows]) * 4 == size_bytes("F32", shape)


def test_parts_are_cut_only_where_the_operation_allows_it() -> None:
    transposed = Target("t", Transpose(Source(0, "F32", (8, 16, 32)), 1, 2))
    _, layout = lay_out([transposed], (), 10**9, 1024)
    assert all(begin % (16 * 32) == 0 for begin in layout.parts.begin)
    assert len(layout.parts) == 8


def test_an_adapter_is_one_file_in_its_folder() -> None:
    made = [*targets([(4, 4)] * 3), *targets([(4, 4)] * 3, "lora_adapter")]
    _, layout = lay_out(made, {"lora_adapter"}, 100, 1 << 20)
    paths = [file.path for file in layout.files]
    assert paths[:3] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert paths[3:] == ["lora_adapter/adapter_model.safetensors"]


def test_a_part_fits_well_into_the_memory_budget() -> None:
    assert [part_size(budget) for budget in (64 << 20, 2 << 30, 1 << 40)] == [4 << 20, 32 << 20, 32 << 20]
