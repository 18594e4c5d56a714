"""Looking into sources that are not whole: what is there, and where the gaps are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.dcp_files import write_dcp
from workers.checkpoint import SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.convert import plan_source
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InvalidOption
from workers.geometry import uncovered_boxes
from workers.inspect import inspect
from workers.options import ConvertOptions
from workers.tolerance import has_refused, tolerated

CASE = Path(__file__).parent / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A checkpoint of two ranks, of which one's file was not copied."""
    folder = tmp_path / "half"
    shutil.copytree(CASE, folder)
    next(folder.rglob("model_world_size_2_rank_1.pt")).unlink()
    return folder


def test_what_is_uncovered_is_cut_into_boxes_that_do_not_overlap():
    assert uncovered_boxes((4, 6), [((0, 0), (4, 6))]) == []
    assert uncovered_boxes((4, 6), []) == [((0, 0), (4, 6))]
    assert uncovered_boxes((), [((), ())]) == []
    assert uncovered_boxes((0, 6), []) == []
    left = uncovered_boxes((4, 6), [((1, 2), (2, 3)), ((0, 0), (1, 6))])
    covered = torch.zeros(4, 6, dtype=torch.int64)
    for (row, column), (rows, columns) in [*left, ((1, 2), (2, 3)), ((0, 0), (1, 6))]:
        covered[row : row + rows, column : column + columns] += 1
    assert (covered == 1).all()


def test_an_incomplete_checkpoint_is_refused_unless_one_only_looks(half):
    with pytest.raises(IncompleteCheckpoint):
        inspect(str(half))
    with pytest.raises(IncompleteCheckpoint):
        plan_source(str(half), ConvertOptions())
    told = inspect(str(half), partial=True).to_dict("model.embed_tokens.weight", table=True)
    assert "model_world_size_2_rank_1.pt is missing (rank 1 of 2" in told["problems"][0]["message"]
    assert told["problems"][0]["type"] == "incomplete-checkpoint"
    assert not any("not needed" in note for note in told["notes"])
    rows, columns = told["tensor"]["shape"]
    assert told["tensor"]["uncovered"] == [{"offsets": [rows // 2, 0], "sizes": [rows // 2, columns]}]
    assert told["tensor"]["overlaps"] == []
    faults = {told["table"]["names"][fault["tensor"]]: fault for fault in told["table"]["faults"]}
    assert faults["model.embed_tokens.weight"]["missing_elements"] == rows * columns // 2
    with pytest.raises(IncompleteCheckpoint):
        plan_source(str(half), ConvertOptions())


def test_a_whole_checkpoint_has_neither_problems_nor_gaps():
    told = inspect(str(CASE), partial=True).to_dict("lm_head.weight", table=True)
    assert (told["problems"], told["table"]["faults"], told["tensor"]["uncovered"]) == ([], [], [])
    table = told["table"]
    assert len(table["names"]) == len(table["kind"]) == len(table["pieces"]) == told["tensors"]
    assert sum(table["pieces"]) == told["pieces"]
    assert sum(table["kinds"][kind]["size_bytes"] for kind in table["kind"]) == told["bytes"]
    with pytest.raises(InvalidOption) as nearest:
        inspect(str(CASE)).to_dict("lm_head.weights")
    assert "lm_head.weight" in nearest.value.hint


def test_a_dcp_folder_without_one_of_its_files_shows_what_the_others_hold(tmp_path):
    values = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    write_dcp(tmp_path, {"a.weight": values, "b.weight": values.clone()})
    files = sorted(path.name for path in tmp_path.glob("*.distcp"))
    assert len(files) == 2
    whole = inspect(str(tmp_path)).to_dict("a.weight")["tensor"]["pieces"]
    (tmp_path / files[1]).unlink()
    with pytest.raises(IncompleteCheckpoint):
        inspect(str(tmp_path))
    found = inspect(str(tmp_path), partial=True)
    told = found.to_dict("a.weight", table=True)
    assert files[1] in told["problems"][0]["message"]
    assert told["tensors"] == 2
    lost = [piece for piece in whole if piece["file"] == files[1]]
    assert sorted((box["offsets"], box["sizes"]) for box in told["tensor"]["uncovered"]) == sorted(
        (piece["offsets"], piece["sizes"]) for piece in lost
    )
    assert sum(fault["missing_elements"] for fault in told["table"]["faults"]) == 24


def test_overlaps_are_shown_where_they_are():
    builder = CheckpointBuilder()
    file = builder.add_file(SourceFile("one.pt", 100))
    tensor = builder.add_tensor("a", "F32", (4, 2))
    storage = builder.add_storage(file, 0, 100, None)
    builder.add_piece(tensor, storage, 0, ((0, 0), (3, 2)), (2, 1))
    builder.add_piece(tensor, storage, 24, ((2, 0), (2, 2)), (2, 1))
    with pytest.raises(GeometryMismatch):
        builder.tables()
    with tolerated() as found:
        _, pieces, _ = builder.tables()
        assert has_refused()
    assert not has_refused()
    assert [type(error) for error in found] == [GeometryMismatch]
    assert len(pieces) == 2
