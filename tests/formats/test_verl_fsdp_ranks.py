"""Rank files of random shapes, meshes and placements, and rank files that contradict each other."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from tests.formats.evaluator import CASES, Evaluator
from tests.rank_files import Saved, write_rank_file, write_rank_files
from workers.errors import CorruptFile, GeometryMismatch, IncompleteCheckpoint, UnshardError
from workers.formats import open_checkpoint
from workers.formats.verl_fsdp import reading
from workers.formats.verl_fsdp.ranks import clean_name
from workers.options import ConvertOptions
from workers.storage import open_folder


def opened(folder, **options):
    return open_checkpoint(open_folder(str(folder)), ConvertOptions(**options))


def numbers(shape, start=0):
    return np.arange(start, start + prod(shape), dtype=np.float32).reshape(shape)


@st.composite
def runs(draw):
    """A mesh and a few tensors cut on it in any way, some of them whole."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    tensors = {}
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        kinds = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
        placements = tuple(draw(kinds) for _ in mesh) if draw(st.booleans()) else ()
        tensors[f"w{index}"] = Saved(shape, placements, values=numbers(shape, 100 * index))
    if len(mesh) == 2 and draw(st.booleans()):
        shape = (mesh[0] * mesh[1] * draw(st.integers(1, 3)), 2)
        placements = _StridedShard(0, split_factor=mesh[1]), Shard(0)
        tensors["strided"] = Saved(shape, placements, values=numbers(shape))
    return mesh, tensors


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs())
def test_what_any_mesh_saved_is_read_back_whole(run):
    mesh, tensors = run
    with tempfile.TemporaryDirectory() as folder:
        write_rank_files(Path(folder), tensors, mesh)
        checkpoint = opened(folder)
        evaluator = Evaluator(checkpoint)
        assert [tensor.name for tensor in checkpoint.tensors] == list(tensors)
        for number, saved in enumerate(tensors.values()):
            assert (evaluator.whole(number).view(np.float32) == saved.values).all()
        held = len(checkpoint.pieces) + len(checkpoint.replicas)
        assert held <= len(tensors) * prod(mesh)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.permutations([0, 1]))
def test_cuts_in_another_order_are_undone_in_that_order(rows, mesh, order):
    saved = Saved((rows, 2), (Shard(0), Shard(0)), values=numbers((rows, 2)), order=tuple(order))
    with tempfile.TemporaryDirectory() as folder:
        write_rank_files(Path(folder), {"w": saved}, mesh)
        assert (Evaluator(opened(folder)).whole(0).view(np.float32) == saved.values).all()


def test_an_order_of_cuts_that_makes_no_sense_is_refused(tmp_path):
    saved = Saved((4, 2), (Shard(0), Replicate()), values=numbers((4, 2)), order=(1, 0))
    write_rank_files(tmp_path, {"w": saved}, (2, 2))
    assert "order of cuts" in refused(tmp_path, GeometryMismatch).message


def test_a_strided_shard_that_is_not_fsdp_over_tensor_parallelism_is_refused(tmp_path):
    saved = Saved((12, 2), (_StridedShard(0, split_factor=3), Shard(0)))
    write_rank_files(tmp_path, {"w": saved}, (2, 2))
    error = refused(tmp_path, GeometryMismatch)
    assert error.found == "_StridedShard(0, 3)"
    assert "split factor of 2" in error.expected


def simple(rows=6, mesh=2):
    return {"a": Saved((rows, 3), (Shard(0),)), "b": Saved((rows,), (Shard(0),)), "buffer": Saved((4,))}, (mesh,)


def refused(folder, kind, **options):
    with pytest.raises(kind) as caught:
        opened(folder, **options)
    assert caught.value.hint
    return caught.value


def overwrite(folder, tensors, mesh, rank):
    write_rank_file(folder / f"model_world_size_{prod(mesh)}_rank_{rank}.pt", tensors, mesh, rank)


def test_a_name_that_one_rank_lacks_is_told_with_both_files(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    overwrite(tmp_path, {name: saved for name, saved in tensors.items() if name != "b"}, mesh, 1)
    error = refused(tmp_path, GeometryMismatch)
    assert error.tensor == "b"
    assert error.file == "model_world_size_2_rank_1.pt"
    assert "is in model_world_size_2_rank_0.pt but not in model_world_size_2_rank_1.pt" in error.message


def test_a_name_that_only_a_later_rank_has_is_told_too(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    overwrite(tmp_path, {**tensors, "extra": Saved((2,))}, mesh, 1)
    assert refused(tmp_path, GeometryMismatch).tensor == "extra"


def test_another_order_of_names_is_no_fault(tmp_path):
    tensors, mesh = simple()
    tensors = {name: replace(saved, values=numbers(saved.shape)) for name, saved in tensors.items()}
    write_rank_files(tmp_path, tensors, mesh)
    overwrite(tmp_path, dict(reversed(tensors.items())), mesh, 1)
    evaluator = Evaluator(opened(tmp_path))
    for number, saved in enumerate(tensors.values()):
        assert (evaluator.whole(number).view(np.float32) == saved.values).all()


@pytest.mark.parametrize(
    ("other", "expected", "found"),
    [
        (Saved((6, 4), (Shard(0),)), "F32 [6, 3]", "F32 [6, 4]"),
        (Saved((6, 3), (Shard(0),), torch.bfloat16), "F32", "BF16"),
        (Saved((6, 3), (Shard(1),)), "Shard(0)", "Shard(1)"),
        (Saved((6, 3), (Replicate(),)), "Shard(0)", "Replicate"),
        (Saved((6, 3)), "Shard(0)", "not cut"),
    ],
)
def test_ranks_that_disagree_about_a_tensor_are_told_with_both_views(tmp_path, other, expected, found):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    overwrite(tmp_path, {**tensors, "a": other}, mesh, 1)
    error = refused(tmp_path, GeometryMismatch)
    assert error.tensor == "a"
    assert error.file == "model_world_size_2_rank_1.pt"
    assert expected in error.expected
    assert found in error.found


def test_a_partial_placement_is_refused_by_name(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, {**tensors, "a": Saved((6, 3), (Partial(),))}, mesh)
    error = refused(tmp_path, GeometryMismatch)
    assert "Partial" in error.message
    assert error.tensor == "a"


def test_a_file_of_another_world_size_says_both(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    write_rank_file(tmp_path / "model_world_size_2_rank_1.pt", tensors, (4,), 1)
    error = refused(tmp_path, GeometryMismatch)
    assert (error.expected, error.found) == ("2 processes", "4 processes")
    assert "(rank 1)" in error.message


def test_a_file_of_a_smaller_world_is_no_part_of_a_larger_one(tmp_path):
    tensors, _ = simple()
    write_rank_files(tmp_path, tensors, (4,))
    write_rank_file(tmp_path / "model_world_size_4_rank_1.pt", tensors, (2,), 1)
    assert refused(tmp_path, GeometryMismatch).found == "2 processes"


def test_a_renamed_file_says_whose_it_is(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    write_rank_file(tmp_path / "model_world_size_2_rank_1.pt", tensors, mesh, 0)
    error = refused(tmp_path, GeometryMismatch)
    assert (error.expected, error.found) == ("rank 1", "rank 0")


def test_a_piece_that_the_rule_does_not_give_is_refused(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    path = tmp_path / "model_world_size_2_rank_1.pt"
    # Rank 1 must hold rows 3 to 5: give its local tensor two rows of the three.
    data = path.read_bytes().replace(b"K\x03K\x03\x86", b"K\x02K\x03\x86", 1)
    path.write_bytes(data)
    with pytest.raises(UnshardError) as caught:
        opened(tmp_path)
    assert caught.value.file == path.name


def test_an_empty_file_may_be_under_way(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    (tmp_path / "model_world_size_2_rank_1.pt").write_bytes(b"")
    error = refused(tmp_path, CorruptFile)
    assert "(rank 1) is empty" in error.message
    assert "may be writing" in error.hint


def test_a_truncated_file_may_be_under_way(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    path = tmp_path / "model_world_size_2_rank_0.pt"
    path.write_bytes(path.read_bytes()[:-50])
    error = refused(tmp_path, CorruptFile)
    assert error.file == path.name
    assert "may be writing" in error.hint


def test_a_file_without_a_state_dict_is_refused(tmp_path):
    torch.save([1, 2], tmp_path / "model_world_size_1_rank_0.pt")
    assert "a state dict" in refused(tmp_path, CorruptFile).message


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "model_world_size_1_rank_0.pt")
    assert "no tensors" in refused(tmp_path, CorruptFile).message


def test_values_that_are_no_tensors_are_left_out_and_said(tmp_path):
    torch.save({"w": torch.ones(2), "epoch": 3}, tmp_path / "model_world_size_1_rank_0.pt")
    checkpoint = opened(tmp_path)
    assert [tensor.name for tensor in checkpoint.tensors] == ["w"]
    assert any("epoch" in note for note in checkpoint.notes)


def test_names_are_cleaned_of_wrappers_wherever_they_stand(tmp_path):
    raw = "_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp._fsdp_wrapped_module.up._orig_mod.weight"
    assert clean_name(raw) == "model.layers.0.mlp.up.weight"
    torch.save({"_fsdp_wrapped_module.w": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
    assert [tensor.name for tensor in opened(tmp_path).tensors] == ["w"]


def test_names_that_become_equal_when_cleaned_are_refused(tmp_path):
    state = {"w": torch.ones(2), "_orig_mod.w": torch.ones(2)}
    torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    assert refused(tmp_path, GeometryMismatch).tensor == "w"


def test_a_transposed_tensor_is_read_with_its_strides(tmp_path):
    values = torch.arange(6.0).reshape(2, 3).T
    torch.save({"w": values}, tmp_path / "model_world_size_1_rank_0.pt")
    evaluator = Evaluator(opened(tmp_path))
    assert (evaluator.whole(0).view(np.float32) == values.numpy()).all()


def test_tensors_that_share_a_storage_share_it_here(tmp_path):
    base = torch.arange(6.0)
    torch.save({"whole": base, "part": base[2:5]}, tmp_path / "model_world_size_1_rank_0.pt")
    checkpoint = opened(tmp_path)
    assert len(checkpoint.storages) == 1
    assert Evaluator(checkpoint).whole(1).view(np.float32).tolist() == [2, 3, 4]


def test_a_negative_view_is_refused(tmp_path):
    values = torch._neg_view(torch.ones(2))
    torch.save({"w": values}, tmp_path / "model_world_size_1_rank_0.pt")
    assert "negative" in refused(tmp_path, GeometryMismatch).message


def test_missing_ranks_that_leave_a_hole_are_told_by_name(tmp_path):
    tensors, mesh = simple(rows=8, mesh=4)
    write_rank_files(tmp_path, tensors, mesh)
    for rank in (1, 2):
        (tmp_path / f"model_world_size_4_rank_{rank}.pt").unlink()
    error = refused(tmp_path, IncompleteCheckpoint)
    assert "model_world_size_4_rank_1.pt to model_world_size_4_rank_2.pt are missing" in error.message
    assert "each node saves only its own ranks" in error.hint


def test_either_replica_of_a_hybrid_mesh_is_enough(tmp_path):
    tensors = {"w": Saved((4, 2), (Replicate(), Shard(0)), values=numbers((4, 2)))}
    write_rank_files(tmp_path, tensors, (2, 2))
    for rank in (0, 3):
        (tmp_path / f"model_world_size_4_rank_{rank}.pt").unlink()
    checkpoint = opened(tmp_path)
    assert (Evaluator(checkpoint).whole(0).view(np.float32) == numbers((4, 2))).all()
    assert len(checkpoint.missing) == 2


def test_optimizer_and_extra_state_are_never_opened(tmp_path):
    tensors, mesh = simple()
    write_rank_files(tmp_path, tensors, mesh)
    for rank in range(2):
        (tmp_path / f"optim_world_size_2_rank_{rank}.pt").write_bytes(b"anything")
        (tmp_path / f"extra_state_world_size_2_rank_{rank}.pt").symlink_to("/nonexistent")
    assert [file.path for file in opened(tmp_path).files] == [f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)]


def test_helper_processes_give_what_one_process_gives(tmp_path, monkeypatch):
    tensors, mesh = simple(rows=12, mesh=6)
    tensors = {name: replace(saved, values=numbers(saved.shape)) for name, saved in tensors.items()}
    write_rank_files(tmp_path, tensors, mesh)
    alone = opened(tmp_path)
    monkeypatch.setattr(reading, "PIECES_WORTH_PROCESSES", 0)
    monkeypatch.setattr(reading, "available_processes", lambda: 2)
    together = opened(tmp_path)
    assert together.tensors == alone.tensors
    assert together.files == alone.files
    for name in together.pieces.__slots__:
        assert (getattr(together.pieces, name) == getattr(alone.pieces, name)).all()


def test_helper_processes_import_nothing_from_the_folder_they_are_started_in(tmp_path, monkeypatch):
    tensors, mesh = simple(rows=12, mesh=6)
    write_rank_files(tmp_path, tensors, mesh)
    for name in ("numpy", "pickle", "workers", "zlib"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path('executed').touch(); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reading, "PIECES_WORTH_PROCESSES", 0)
    monkeypatch.setattr(reading, "available_processes", lambda: 2)
    assert len(opened(tmp_path).files) == 6
    assert not (tmp_path / "executed").exists()


def test_an_error_in_a_helper_process_is_the_callers_error(tmp_path, monkeypatch):
    tensors, mesh = simple(rows=12, mesh=6)
    write_rank_files(tmp_path, tensors, mesh)
    path = tmp_path / "model_world_size_6_rank_4.pt"
    path.write_bytes(path.read_bytes()[:-50])
    monkeypatch.setattr(reading, "PIECES_WORTH_PROCESSES", 0)
    monkeypatch.setattr(reading, "available_processes", lambda: 2)
    assert refused(tmp_path, CorruptFile).file == path.name


def test_lora_settings_are_collected_and_contradictions_told(tmp_path):
    source = CASES / "lora-actor-fsdp2-ws2-train-meta" / "input"
    for path in source.iterdir():
        if path.name != "lora_train_meta.json":
            (tmp_path / path.name).symlink_to(path)
    assert opened(tmp_path).adapter.lora_alpha is None
    assert opened(tmp_path, lora_alpha=8).adapter.alpha_source == "the option lora_alpha"
    (tmp_path / "lora_adapter").mkdir()
    (tmp_path / "lora_adapter" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 32, "use_rslora": True}))
    adapter = opened(tmp_path).adapter
    assert (adapter.lora_alpha, adapter.settings["use_rslora"]) == (32, True)
    meta = {"r": 4, "lora_alpha": 0, "task_type": "TaskType.CAUSAL_LM"}
    (tmp_path / "lora_train_meta.json").write_text(json.dumps(meta))
    adapter = opened(tmp_path).adapter
    assert (adapter.lora_alpha, adapter.settings["task_type"]) == (32, "CAUSAL_LM")
    with pytest.raises(UnshardError, match=r"lora_alpha says 8, but .* says 32"):
        opened(tmp_path, lora_alpha=8)


def test_a_config_folder_of_its_own_gives_config_and_side_files(tmp_path):
    folder = CASES / "llama-gqa-fsdp2-ws2" / "input" / "huggingface"
    checkpoint = opened(CASES / "error-missing-config-json" / "input", config_dir=str(folder))
    assert checkpoint.config["model_type"] == "llama"
    assert {file.target_path for file in checkpoint.side_files} == {"tokenizer.json", "tokenizer_config.json"}
    assert all(file.folder.url == str(folder) for file in checkpoint.side_files)
    refused(CASES / "error-missing-config-json" / "input", IncompleteCheckpoint, config_dir=str(tmp_path))
