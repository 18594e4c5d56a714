"""DeepSpeed checkpoints of random geometry, written here: every element comes back, and broken ones are refused."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests import deepspeed_files as write
from tests.formats.evaluator import Evaluator
from workers.errors import (
    AmbiguousSource,
    CorruptFile,
    GeometryMismatch,
    IncompleteCheckpoint,
    InvalidOption,
    UnmappedTensor,
)
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
GROUPS = st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=3)
SMALL = {"a.weight": (6, 5), "b.bias": (7,), "c.weight": (3, 2, 2)}


def named(groups) -> list[write.Values]:
    """Values for groups of shapes; all parameters have names of their own."""
    return [
        write.values_of({f"group{g}.p{i}.weight": shape for i, shape in enumerate(shapes)}, seed=g)
        for g, shapes in enumerate(groups)
    ]


def opened(folder: Path, **options):
    checkpoint = open_checkpoint(open_folder(str(folder)), ConvertOptions.from_dict(options))
    return checkpoint, Evaluator(checkpoint)


def assert_holds(folder: Path, expected: dict[str, np.ndarray], **options):
    checkpoint, evaluator = opened(folder, **options)
    assert sorted(checkpoint.index) == sorted(expected)
    for name, values in expected.items():
        found = evaluator.whole(checkpoint.index[name])
        bits = values.view(np.uint32) if values.dtype == np.float32 else values
        assert found.shape == values.shape, name
        assert (found == bits).all(), name
    return checkpoint


def joined(groups) -> write.Values:
    return {name: value for group in groups for name, value in group.items()}


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS, world=st.integers(1, 5), gap=st.integers(0, 3), keep_tail=st.booleans())
def test_flat_groups_of_stage_1_and_2_come_back_element_by_element(groups, world, gap, keep_tail):
    values = named(groups)
    with tempfile.TemporaryDirectory() as folder:
        write.stage_1_or_2(Path(folder), values, world, gap=gap, keep_tail=keep_tail)
        assert_holds(Path(folder), joined(values))


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS, world=st.integers(1, 9))
def test_parameters_of_stage_3_come_back_element_by_element(groups, world):
    values = named(groups)
    frozen = write.values_of({"frozen.weight": (3, 5), "frozen.bias": (2,)}, seed=9)
    with tempfile.TemporaryDirectory() as folder:
        write.stage_3(Path(folder), values, world, frozen)
        assert_holds(Path(folder), joined(values) | {name: write.bfloat16(value) for name, value in frozen.items()})


def test_the_modules_weights_are_taken_when_exactly_their_dtype_is_asked_for(tmp_path):
    values = named([[(4, 3)], [(5,)]])
    write.stage_1_or_2(tmp_path, values, 2)
    expected = {name: write.bfloat16(value) for name, value in joined(values).items()}
    checkpoint = assert_holds(tmp_path, expected, dtype="bfloat16")
    assert any("2 tensors are the module's bfloat16 weights" in note for note in checkpoint.notes)
    assert_holds(tmp_path, joined(values), dtype="float16")


def test_without_optimizer_files_the_modules_weights_are_taken_with_a_note(tmp_path):
    values = named([[(4, 3)]])
    write.stage_1_or_2(tmp_path, values, 2)
    for path in tmp_path.glob("*optim_states.pt"):
        path.unlink()
    checkpoint = assert_holds(tmp_path, {name: write.bfloat16(value) for name, value in joined(values).items()})
    assert any("no fp32 weights" in note for note in checkpoint.notes)


def test_aliases_are_copies_of_the_fp32_weights(tmp_path):
    values = named([[(4, 3)]])
    name = "group0.p0.weight"
    write.stage_1_or_2(tmp_path, values, 2, shared_params={"lm_head.weight": name})
    assert_holds(tmp_path, {**joined(values), "lm_head.weight": values[0][name]})


def test_names_lose_what_wrappers_put_into_them(tmp_path):
    write.stage_3(tmp_path, [write.values_of({"_orig_mod.model.a.weight": (4,)})], 2)
    assert list(opened(tmp_path)[0].index) == ["model.a.weight"]


def test_ranks_are_counted_as_numbers(tmp_path):
    values = [write.values_of(SMALL)]
    write.stage_1_or_2(tmp_path, values, 12)
    assert_holds(tmp_path, joined(values))


# --- tensor parallelism ------------------------------------------------------------------------------------------

FULL = {
    "rows.weight": (6, 4),
    "columns.weight": (4, 6),
    "columns.bias": (4,),
    "norm.weight": (5,),
    "embed.weight": (8, 3),
    "gate_up.weight": (8, 3),
    "qkv.weight": (12, 2),
}


def shards(full: write.Values) -> list[write.Values]:
    """Two tensor-parallel ranks' parts, cut as the patterns below say."""
    ranks: list[write.Values] = []
    for rank in (0, 1):
        part = {"rows.weight": full["rows.weight"][[slice(0, 4), slice(4, 6)][rank]]}
        part["columns.weight"] = np.split(full["columns.weight"], 2, axis=1)[rank]
        part["columns.bias"], part["norm.weight"] = full["columns.bias"], full["norm.weight"]
        padded = np.pad(full["embed.weight"], ((0, 2), (0, 0)), constant_values=3)
        part["embed.weight"] = np.split(padded, 2)[rank]
        halves = np.split(full["gate_up.weight"], 2)
        part["gate_up.weight"] = np.concatenate([np.split(half, 2)[rank] for half in halves])
        q, k, v = np.split(full["qkv.weight"], [6, 8])
        widths = [(4, 2), (1, 1), (2, 2)]
        part["qkv.weight"] = np.concatenate(
            [np.split(x, [w[0]])[rank] for x, w in zip((q, k, v), widths, strict=True)]
        )
        ranks.append(part)
    return ranks


PATTERNS = {
    "universal_checkpoint_version": 0.4,
    "tp_replicated_parameter_patterns": [r"^norm\.weight$", r".*bias"],
    "parameter_with_row_parallelism_patterns": [r"^columns\.weight$"],
    "vocabulary_parameter_patterns": [r"embed\.w"],
    "parameter_with_2_sub_params_cat_dim_0": [r"^gate_up\.weight$"],
    "parameter_with_sub_params": [
        {
            "patterns": [r"^qkv\.weight$"],
            "shape": ((6, 2, 4), 2),
            "partition_dim": 0,
            "sub_param_shard_widths": [[4, 2], [1, 1], [2, 2]],
        }
    ],
    "original_vocab_size": 8,
}


def write_shards(folder: Path, info: dict, world: int, ranks: list[write.Values]) -> None:
    for mp, part in enumerate(ranks):
        write.stage_1_or_2(folder, [part], world, mp=mp, universal_checkpoint_info=info, mp_world_size=2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards_are_put_together_by_the_patterns_of_the_checkpoint(tmp_path, world):
    full = write.values_of(FULL)
    write_shards(tmp_path, PATTERNS, world, shards(full))
    assert_holds(tmp_path, full)
    assert_holds(tmp_path, {name: write.bfloat16(value) for name, value in full.items()}, dtype="bfloat16")


def views(name: str, full: np.ndarray, parts: list[np.ndarray]) -> dict:
    """An affine map with one piece for each run of a shard's elements in the full tensor."""
    order = {value: index for index, value in enumerate(full.reshape(-1).tolist())}
    ranks = {}
    for rank, part in enumerate(parts):
        where = [order[value] for value in part.reshape(-1).tolist()]
        pieces, start = [], 0
        for index in range(1, len(where) + 1):
            if index == len(where) or where[index] != where[index - 1] + 1:
                piece = {"shape": [index - start], "source": [where[start], [1]], "dest": [start, [1]]}
                pieces.append({**piece, "locations": [rank]})
                start = index
        ranks[rank] = {"shard_shape": list(part.shape), "pieces": pieces}
    return {rf"^{name}$": {"logical_shape": list(full.shape), "ranks": ranks}}


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(2, 6), inner=SHAPES, world=st.integers(1, 3), seed=st.integers(0, 99))
def test_an_affine_map_overrules_the_patterns_whatever_the_cut(rows, inner, world, seed):
    generator = np.random.default_rng(seed)
    full = write.values_of({"x": (rows, *inner)}, seed)["x"]
    order = generator.permutation(rows)
    parts = [full[np.sort(order[: rows // 2])], full[np.sort(order[rows // 2 :])]]
    info = {"affine_map": {"version": 1, "params": views("x", full, parts)}, "tp_replicated_parameter_patterns": ["x"]}
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), info, world, [{"x": part} for part in parts])
        assert_holds(Path(folder), {"x": full})


def test_a_strided_piece_of_an_affine_map_is_a_box(tmp_path):
    full = write.values_of({"x": (4, 6)})["x"]
    parts = np.split(full, 2, axis=1)
    ranks = {
        rank: {
            "shard_shape": [4, 3],
            "pieces": [{"shape": [4, 3], "source": [3 * rank, [6, 1]], "dest": [0, [3, 1]], "locations": [rank]}],
        }
        for rank in (0, 1)
    }
    info = {"affine_map": {"version": 1, "params": {r"^x$": {"logical_shape": [4, 6], "ranks": ranks}}}}
    write_shards(tmp_path, info, 1, [{"x": part} for part in parts])
    assert len(assert_holds(tmp_path, {"x": full}).pieces) == 2
    row = ranks[0]["pieces"][0] | {"shape": [1, 3]}  # the first row of the shard, given out again for each other one
    ranks[0]["pieces"] = [row | {"source": [6 * number, [6, 1]]} for number in range(4)]
    write_shards(tmp_path, info, 1, [{"x": part} for part in parts])
    refused(GeometryMismatch, tmp_path, "a gap or an overlap")


def test_replicas_of_tensor_parallel_ranks_are_compared(tmp_path):
    full = write.values_of(FULL)
    write_shards(tmp_path, PATTERNS, 1, shards(full))
    assert len(opened(tmp_path)[0].replicas) == 2


def refused(kind, folder: Path, match: str, **options):
    with pytest.raises(kind, match=match) as caught:
        opened(folder, **options)
    assert caught.value.hint
    assert caught.value.exit_status == 1
    return caught.value


def test_shards_without_a_word_of_how_they_were_cut_are_refused(tmp_path):
    full = write.values_of(FULL)
    write_shards(tmp_path, {}, 1, shards(full))
    refused(GeometryMismatch, tmp_path, "no universal_checkpoint_info")


def test_a_scaled_bias_is_refused(tmp_path):
    piece = {"shape": [4], "source": [0, [1]], "dest": [0, [1]], "locations": [0, 1], "scale": 0.5}
    ranks = {rank: {"shard_shape": [4], "pieces": [piece]} for rank in (0, 1)}
    info = {"affine_map": {"version": 1, "params": {"^x$": {"logical_shape": [4], "ranks": ranks}}}}
    write_shards(tmp_path, info, 1, [write.values_of({"x": (4,)})] * 2)
    refused(GeometryMismatch, tmp_path, "factor 0.5")


def test_a_pattern_that_could_take_forever_is_refused(tmp_path):
    info = {**PATTERNS, "vocabulary_parameter_patterns": ["(a+)+$"]}
    write_shards(tmp_path, info, 1, shards(write.values_of(FULL)))
    refused(CorruptFile, tmp_path, "no simple pattern")


def test_a_missing_tensor_parallel_rank_is_named(tmp_path):
    write_shards(tmp_path, PATTERNS, 1, shards(write.values_of(FULL)))
    for path in tmp_path.glob("*mp_rank_01*"):
        path.unlink()
    assert refused(IncompleteCheckpoint, tmp_path, "mp_world_size 2").file == "mp_rank_01_model_states.pt"


# --- broken ones -------------------------------------------------------------------------------------------------


def test_a_tensor_that_a_tensor_parallel_rank_lacks_is_named(tmp_path):
    parts = [{"up.weight": (3, 4), "gate.weight": (3, 4)}, {"up.weight": (3, 4)}]
    for rank, shapes in enumerate(parts):
        group = write.values_of(shapes, rank)
        write.stage_1_or_2(tmp_path / "zero", [group], 2, mp=rank, universal_checkpoint_info={"affine_map": {}})
        (tmp_path / "pipe").mkdir(exist_ok=True)
        torch.save(write.half([group]), tmp_path / "pipe" / f"layer_03-model_{rank:02d}-model_states.pt")
    error = refused(GeometryMismatch, tmp_path / "zero", "has a part of tensor gate.weight")
    assert error.file == "mp_rank_01_model_states.pt"
    error = refused(GeometryMismatch, tmp_path / "pipe", "has a part of tensor 3.gate.weight", family="none")
    assert error.file == "layer_03-model_01-model_states.pt"


def test_what_is_no_tensor_in_a_module_is_said(tmp_path):
    module = {"a.weight": torch.ones(2), "layer": {"_extra_state": None}}
    write.model_states(tmp_path / "mp_rank_00_model_states.pt", module, [])
    assert opened(tmp_path)[0].left_out == (("layer._extra_state", "no tensor"),)


def test_a_file_left_over_from_more_ranks_is_refused(tmp_path):
    write.stage_3(tmp_path, [write.values_of(SMALL)], 2)
    (tmp_path / write.optimizer_name(0)).with_name(write.optimizer_name(2)).write_bytes(
        (tmp_path / write.optimizer_name(0)).read_bytes()
    )
    refused(GeometryMismatch, tmp_path, "2 partitions .*also .*zero_pp_rank_2_")


def test_a_model_parallel_rank_left_over_from_a_larger_run_is_refused(tmp_path):
    info = {"tp_replicated_parameter_patterns": [r".*norm.*"]}
    for rank, size in ((0, 1), (1, 2)):
        group = write.values_of(SMALL, seed=rank)
        write.stage_1_or_2(tmp_path, [group], 2, mp=rank, mp_world_size=size, universal_checkpoint_info=info)
    error = refused(GeometryMismatch, tmp_path, "says mp_world_size 1, but there is also")
    assert error.file == "mp_rank_01_model_states.pt"


def test_partitions_of_another_size_are_refused(tmp_path):
    values = [write.values_of(SMALL)]
    write.stage_1_or_2(tmp_path, values, 2)
    write.model_states(tmp_path / "mp_rank_00_model_states.pt", write.half(values), [write.values_of({"a": (200,)})])
    refused(GeometryMismatch, tmp_path, "hold 49 elements of group 0, but the parameters .* need 200")


def test_groups_of_another_number_are_refused(tmp_path):
    values = named([[(3,)], [(4,)]])
    write.stage_1_or_2(tmp_path, values, 2)
    write.model_states(tmp_path / "mp_rank_00_model_states.pt", write.half(values), values[:1])
    refused(GeometryMismatch, tmp_path, "has 2 groups .* describes 1")


def test_partitions_of_different_runs_are_refused(tmp_path):
    write.stage_1_or_2(tmp_path, named([[(3,)], [(4,)]]), 2)
    other = tmp_path / "other"
    write.stage_1_or_2(other, named([[(3,)]]), 2)
    (other / write.optimizer_name(1)).rename(tmp_path / write.optimizer_name(1))
    refused(GeometryMismatch, tmp_path, "1 groups, but .* 2 groups")


def test_placeholders_without_the_partitions_are_refused(tmp_path):
    write.stage_3(tmp_path, [write.values_of(SMALL)], 2)
    for path in tmp_path.glob("*optim_states.pt"):
        path.unlink()
    assert refused(IncompleteCheckpoint, tmp_path, "only a placeholder").tensor == "a.weight"


def test_a_missing_part_of_frozen_weights_is_named(tmp_path):
    write.stage_3(tmp_path, [write.values_of(SMALL)], 3, write.values_of({"frozen": (4,)}))
    (tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    refused(IncompleteCheckpoint, tmp_path, "zero_pp_rank_1_mp_rank_00_model_states.pt is missing")


def test_model_states_of_other_ranks_are_not_needed_without_frozen_weights(tmp_path):
    values = [write.values_of(SMALL)]
    write.stage_3(tmp_path, values, 3)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert_holds(tmp_path, joined(values))


def test_a_weight_that_is_no_plain_tensor_is_named(tmp_path):
    module = {"a.weight": torch.ones(2), "b": {"weight": torch.eye(3).to_sparse()}}
    write.model_states(tmp_path / "mp_rank_00_model_states.pt", module, [])
    assert refused(GeometryMismatch, tmp_path, "is a sparse tensor").tensor == "b.weight"


def test_modules_that_hold_each_other_again_and_again_are_refused(tmp_path):
    module: dict[str, object] = {"weight": torch.ones(1)}
    for _ in range(12):
        module = {f"part{number}": module for number in range(20)}
    write.model_states(tmp_path / "mp_rank_00_model_states.pt", module, [])
    refused(CorruptFile, tmp_path, "again and again")


def test_experts_in_files_of_their_own_are_refused(tmp_path):
    write.stage_1_or_2(tmp_path, [write.values_of(SMALL)], 1)
    torch.save({}, tmp_path / "layer_0_expert_3_mp_rank_00_model_states.pt")
    refused(UnmappedTensor, tmp_path, "mixture of experts")


def test_several_tags_and_nothing_that_decides_are_refused(tmp_path):
    for tag in ("global_step2", "global_step10"):
        write.stage_1_or_2(tmp_path / tag, [write.values_of(SMALL)], 1)
    refused(AmbiguousSource, tmp_path, "global_step10, global_step2")
    refused(IncompleteCheckpoint, tmp_path, "no tag is of step 3", step=3)
    assert opened(tmp_path, step=10)[0].files[0].path.startswith("global_step10/")
    refused(InvalidOption, tmp_path / "global_step2", "step 10 is asked for", step=10)


def test_a_file_that_should_name_a_tag_and_is_huge_is_not_read(tmp_path):
    write.stage_1_or_2(tmp_path / "global_step1", [write.values_of(SMALL)], 2)
    with (tmp_path / "latest").open("wb") as latest:
        latest.truncate(1 << 40)
    assert refused(CorruptFile, tmp_path, str(1 << 40)).file == "latest"


def test_a_run_folder_of_the_trainer_gives_one_of_its_checkpoints(tmp_path):
    for step in (2, 10):
        write.stage_1_or_2(tmp_path / f"checkpoint-{step}" / f"global_step{step}", [write.values_of(SMALL)], 1)
        (tmp_path / f"checkpoint-{step}" / "latest").write_text(f"global_step{step}")
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text('{"model_type": "x"}')
    refused(AmbiguousSource, tmp_path, "the steps 2, 10")
    checkpoint = opened(tmp_path, step=2)[0]
    assert checkpoint.files[0].path == "checkpoint-2/global_step2/mp_rank_00_model_states.pt"
    assert checkpoint.config_path == "checkpoint-2/config.json"


def test_files_of_a_store_are_read_several_at_a_time(tmp_path, monkeypatch):
    values = named([[(4, 3), (5,)], [(2, 2)]])
    write.stage_3(tmp_path, values, 11)
    folder = open_folder(str(tmp_path))
    monkeypatch.setattr(type(folder), "is_local", property(lambda _: False))
    assert_holds(tmp_path, joined(values))


def test_weights_beside_the_states_leave_the_choice_to_the_user(tmp_path):
    write.stage_1_or_2(tmp_path / "global_step1", [write.values_of(SMALL)], 1)
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    assert "source_format" in refused(AmbiguousSource, tmp_path, "deepspeed-zero").hint
    assert opened(tmp_path, source_format="deepspeed-zero")[0].format == "deepspeed-zero"


def test_an_empty_file_is_named(tmp_path):
    write.stage_1_or_2(tmp_path, [write.values_of(SMALL)], 1)
    (tmp_path / write.optimizer_name(0)).write_bytes(b"")
    assert refused(CorruptFile, tmp_path, "is empty").file == write.optimizer_name(0)


def test_two_files_for_one_rank_are_refused(tmp_path):
    write.stage_1_or_2(tmp_path, [write.values_of(SMALL)], 1)
    name = write.optimizer_name(0)
    (tmp_path / name.removeprefix("bf16_")).write_bytes((tmp_path / name).read_bytes())
    refused(GeometryMismatch, tmp_path, "are both files of")


# --- universal checkpoints ---------------------------------------------------------------------------------------


def write_universal(folder: Path, values: write.Values, *, flat: bool) -> None:
    for name, value in values.items():
        (folder / "zero" / name).mkdir(parents=True)
        saved = write.tensor(value)
        torch.save(saved.reshape(-1) if flat else {"param": saved, "cat_dim": 0}, folder / "zero" / name / "fp32.pt")


def test_a_universal_checkpoint_of_stage_3_gets_its_shapes_from_the_model_states(tmp_path):
    values = write.values_of(SMALL)
    write_universal(tmp_path / "step", values, flat=True)
    refused(IncompleteCheckpoint, tmp_path, "no model states say what shape")
    module = write.placeholders([values]) | {"buffer": torch.arange(3)}
    path = tmp_path / "step" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    write.model_states(path, module, [values], buffer_names=["buffer"])
    checkpoint = assert_holds(tmp_path, {**values, "buffer": np.arange(3).astype(np.uint64)})
    assert checkpoint.format == "deepspeed-universal"


def test_a_universal_checkpoint_without_model_states_has_its_parameters(tmp_path):
    values = write.values_of(SMALL)
    write_universal(tmp_path, values, flat=False)
    assert_holds(tmp_path, values)


@pytest.mark.parametrize("lost", [0, 3])
def test_frozen_weights_of_a_universal_checkpoint_need_the_ranks_before_the_last(tmp_path, lost):
    values, frozen = write.values_of(SMALL), write.values_of({"frozen.weight": (9,)}, seed=9)
    write_universal(tmp_path, values, flat=True)
    write.stage_3(tmp_path, [values], 8, frozen)
    expected = values | {name: write.bfloat16(value) for name, value in frozen.items()}
    assert_holds(tmp_path, expected)
    (tmp_path / "zero_pp_rank_7_mp_rank_00_model_states.pt").unlink()  # nothing but padding
    assert_holds(tmp_path, expected)
    name = f"zero_pp_rank_{lost}_mp_rank_00_model_states.pt"
    (tmp_path / name).unlink()
    assert refused(IncompleteCheckpoint, tmp_path, "frozen parameters").file == name


def test_a_universal_checkpoint_has_the_model_states_of_all_ranks_or_of_none(tmp_path):
    values = write.values_of({"a.weight": (6, 4)})
    write_universal(tmp_path, values, flat=False)
    info = {"tp_replicated_parameter_patterns": [r".*norm.*"]}
    for rank, part in enumerate(np.split(values["a.weight"], 3)):
        module = write.half([{"a.weight": part}])
        path = tmp_path / f"mp_rank_{rank:02d}_model_states.pt"
        write.model_states(path, module, [], universal_checkpoint_info=info, mp_world_size=3)
    assert_holds(tmp_path, {"a.weight": write.bfloat16(values["a.weight"])}, dtype="bfloat16")
    for rank in (1, 2):
        (tmp_path / f"mp_rank_{rank:02d}_model_states.pt").rename(tmp_path / "elsewhere")
        refused(IncompleteCheckpoint, tmp_path, f"mp_rank_{rank:02d}_model_states.pt is missing", dtype="bfloat16")
        (tmp_path / "elsewhere").rename(tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    for path in tmp_path.glob("mp_rank_*"):
        path.unlink()
    assert_holds(tmp_path, values)


def test_a_parameter_folder_without_weights_is_named(tmp_path):
    write_universal(tmp_path, write.values_of(SMALL), flat=False)
    (tmp_path / "zero" / "b.bias" / "fp32.pt").rename(tmp_path / "zero" / "b.bias" / "exp_avg.pt")
    assert refused(IncompleteCheckpoint, tmp_path, "is missing").file == "zero/b.bias/fp32.pt"


def test_a_flat_parameter_of_another_size_is_refused(tmp_path):
    write_universal(tmp_path, write.values_of(SMALL), flat=True)
    path = tmp_path / "mp_rank_00_model_states.pt"
    write.model_states(path, {}, [write.values_of({**SMALL, "b.bias": (9,)})])
    refused(GeometryMismatch, tmp_path, r"b.bias has 7 elements, but its shape is \[9\]")


# --- the pipeline engine -----------------------------------------------------------------------------------------

LAYERS = {0: {"weight": (8, 4)}, 2: {"a.weight": (4, 4)}, 3: {"a.weight": (4, 4)}, 5: {"weight": (8, 4)}}
PREFIXES = json.dumps({"0": "embed", "2-4": "layers.{}.", "5": "head"})
PIPELINE_NAMES = {0: "embed.weight", 2: "layers.0.a.weight", 3: "layers.1.a.weight", 5: "head.weight"}


def write_pipeline(folder: Path, *, fp32: bool) -> dict[int, np.ndarray]:
    """Two stages; layers 0 and 5 are one tied module."""
    folder.mkdir(exist_ok=True)
    values = {layer: next(iter(write.values_of(shapes, layer).values())) for layer, shapes in LAYERS.items()}
    values[5] = values[0]
    for layer, shapes in LAYERS.items():
        saved = {next(iter(shapes)): write.tensor(values[layer], torch.bfloat16)}
        torch.save(saved, folder / f"layer_{layer:02d}-model_states.pt")
    if fp32:
        stages = [{"tied_modules.embed.weight": values[0], "2.a.weight": values[2]}, {"3.a.weight": values[3]}]
        for stage, group in enumerate(stages):
            write.stage_1_or_2(folder, [group], 2, mp=stage)
    return values


@pytest.mark.parametrize("fp32", [True, False])
def test_layer_files_become_a_model_by_the_prefixes_of_the_user(tmp_path, fp32):
    values = write_pipeline(tmp_path / "global_step1", fp32=fp32)
    halves = {PIPELINE_NAMES[layer]: write.bfloat16(value) for layer, value in values.items()}
    checkpoint = assert_holds(tmp_path, halves, layer_prefixes=PREFIXES, dtype="bfloat16")
    assert checkpoint.format == "deepspeed-pipeline"
    full = {PIPELINE_NAMES[layer]: value for layer, value in values.items()}
    assert_holds(tmp_path, full if fp32 else halves, layer_prefixes=PREFIXES)


def test_a_module_that_stages_share_is_taken_from_its_fp32_weights(tmp_path):
    values = write_pipeline(tmp_path, fp32=False)
    embedding = {"tied_modules.embed.weight": values[0]}
    for stage, group in enumerate([embedding | {"2.a.weight": values[2]}, {"3.a.weight": values[3]} | embedding]):
        write.stage_1_or_2(tmp_path, [group], 2, mp=stage, mp_world_size=2)
    full = {PIPELINE_NAMES[layer]: value for layer, value in values.items()}
    assert_holds(tmp_path, full, layer_prefixes=PREFIXES)


def test_what_is_missing_of_a_pipeline_is_named(tmp_path):
    write_pipeline(tmp_path, fp32=True)
    layer = tmp_path / "layer_03-model_states.pt"
    layer.rename(tmp_path / "elsewhere")
    error = refused(IncompleteCheckpoint, tmp_path, "layer 3 has the parameter a.weight", layer_prefixes=PREFIXES)
    assert error.file == layer.name
    (tmp_path / "elsewhere").rename(layer)
    (tmp_path / "mp_rank_00_model_states.pt").unlink()
    refused(IncompleteCheckpoint, tmp_path, "mp_rank_00_model_states.pt is missing", layer_prefixes=PREFIXES)
    write_pipeline(tmp_path, fp32=True)
    for rank in range(2):
        (tmp_path / write.optimizer_name(rank, 1)).unlink()
    refused(IncompleteCheckpoint, tmp_path, f"{write.optimizer_name(0, 1)} is missing", layer_prefixes=PREFIXES)


def test_fp32_weights_of_some_tensor_parallel_ranks_are_not_enough(tmp_path):
    (value,) = write.values_of({"mlp.up.weight": (6, 4)}).values()
    for rank, part in enumerate(np.split(value, 2)):
        saved = {"mlp.up.weight": write.tensor(part, torch.bfloat16)}
        torch.save(saved, tmp_path / f"layer_03-model_{rank:02d}-model_states.pt")
        write.stage_1_or_2(tmp_path, [{"3.mlp.up.weight": part}], 2, mp=rank)
    assert_holds(tmp_path, {"h.mlp.up.weight": value}, layer_prefixes='{"3": "h"}')
    for path in tmp_path.glob("*mp_rank_01*"):
        path.unlink()
    error = refused(IncompleteCheckpoint, tmp_path, "fp32 weights of 1", layer_prefixes='{"3": "h"}')
    assert error.tensor == "3.mlp.up.weight"


def test_without_prefixes_the_layers_are_shown(tmp_path):
    write_pipeline(tmp_path, fp32=False)
    assert "layer 2: a.weight [4, 4]" in refused(InvalidOption, tmp_path, "nothing says").found
    for option in ({"family": "none"}, {"mapping": '{"schema": 1, "rules": []}'}):
        assert "2.a.weight" in opened(tmp_path, **option)[0].index
    refused(InvalidOption, tmp_path, "does not say what layer 5", layer_prefixes='["e", null, "x", "y"]')
    refused(InvalidOption, tmp_path, "does not say what layers", layer_prefixes="embed")


@pytest.mark.parametrize("gated", [True, False])
def test_tensor_parallel_layer_files_of_gated_mlps_are_put_together_half_by_half(tmp_path, gated):
    rows = 12 if gated else 6
    shapes = {"mlp.dense_h_to_4h.weight": (rows, 4), "mlp.dense_h_to_4h.bias": (rows,)}
    full = write.values_of(shapes | {"mlp.dense_4h_to_h.weight": (4, 6)})
    for rank in (0, 1):
        halves = 2 if gated else 1
        part = {
            name: np.concatenate([np.split(half, 2)[rank] for half in np.split(value, halves)])
            for name, value in full.items()
            if name in shapes
        }
        part["mlp.dense_4h_to_h.weight"] = np.split(full["mlp.dense_4h_to_h.weight"], 2, axis=1)[rank]
        saved = {name: write.tensor(value) for name, value in part.items()}
        torch.save(saved, tmp_path / f"layer_03-model_{rank:02d}-model_states.pt")
    assert_holds(tmp_path, {f"h.{name}": value for name, value in full.items()}, layer_prefixes='{"3": "h"}')


def test_tensor_parallel_layer_files_are_put_together_as_megatron_cuts_them(tmp_path):
    full = write.values_of(
        {"self_attention.dense.weight": (4, 6), "mlp.up.weight": (6, 4), "input_layernorm.bias": (4,)}
    )
    for rank in (0, 1):
        part = {name: np.split(value, 2, axis=int("dense" in name))[rank] for name, value in full.items()}
        part["input_layernorm.bias"] = full["input_layernorm.bias"]
        saved = {name: write.tensor(value) for name, value in part.items()}
        torch.save(saved, tmp_path / f"layer_03-model_{rank:02d}-model_states.pt")
    assert_holds(tmp_path, {f"h.{name}": value for name, value in full.items()}, layer_prefixes='{"3": "h"}')
    (tmp_path / "layer_04-model_00-model_states.pt").write_bytes(
        (tmp_path / "layer_03-model_00-model_states.pt").read_bytes()
    )
    error = refused(IncompleteCheckpoint, tmp_path, "is missing", layer_prefixes='{"3-4": "h"}')
    assert error.file == "layer_04-model_01-model_states.pt"
