"""Rank files of random training runs give the whole tensors back, and broken runs are refused by name."""

from __future__ import annotations

import json
import tempfile
from collections import OrderedDict
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.formats.evaluator import Evaluator
from tests.megatron_files import HIDDEN, Run, megatron_lm, stages, whole, write_run
from workers.convert import convert
from workers.errors import (
    CorruptFile,
    GeometryMismatch,
    IncompleteCheckpoint,
    InvalidOption,
    UnmappedTensor,
    UnshardError,
)
from workers.families import map_checkpoint
from workers.families.operations import Facts
from workers.formats import open_checkpoint
from workers.formats.megatron_legacy.cuts import Cut, cut_of, segments
from workers.options import ConvertOptions
from workers.storage import open_folder

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def opened(folder, **options):
    return open_checkpoint(open_folder(str(folder)), ConvertOptions(**options))


def write_config(folder: Path, run: Run, **more) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "head_dim": 2,
        "num_attention_heads": run.heads,
        "num_key_value_heads": run.groups,
        "num_hidden_layers": sum(map(sum, run.layers)),
        "vocab_size": 5 * run.tensor,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config | more))


@st.composite
def runs(draw):
    tensor = draw(st.sampled_from([1, 2, 3, 4]))
    pipeline, virtual = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    layers = tuple(tuple(draw(st.integers(1, 2)) for _ in range(pipeline)) for _ in range(virtual))
    kind = draw(st.sampled_from(["dense", "experts", "verl"]))
    if kind == "verl":
        groups = draw(st.sampled_from([n for n in range(1, 5) if n % tensor == 0 or tensor % n == 0]))
        heads_fit = max(2 * groups, tensor) % tensor == 0
        return Run(tensor, layers=layers, groups=groups if heads_fit else tensor, verl=True)
    if kind == "dense":
        return Run(tensor, layers=layers)
    expert = draw(st.sampled_from([1, 2]))
    expert_tensor = draw(st.sampled_from([n for n in (1, 2, 4) if tensor % n == 0]))
    experts = expert * draw(st.integers(1, 2))
    return Run(tensor, expert, expert_tensor, layers, experts=experts)


@SLOW
@given(runs(), st.integers(0, 99))
def test_the_rank_files_of_any_run_hold_the_whole_tensors(run, seed):
    tensors = whole(run, seed)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), run, tensors)
        write_config(Path(folder), run)
        checkpoint = opened(folder)
        evaluator = Evaluator(checkpoint)
        assert sorted(tensor.name for tensor in checkpoint.tensors) == sorted(tensors)
        for number, tensor in enumerate(checkpoint.tensors):
            found = evaluator.whole(number).view(np.float32)
            np.testing.assert_array_equal(found, tensors[tensor.name], err_msg=tensor.name)


def test_experts_in_one_weight_are_read_from_its_memory_transposed(tmp_path):
    run = Run(expert=2, layers=((1,),), experts=4)
    rng = np.random.default_rng(0)
    for expert in range(2):
        weights = {"weight1": rng.standard_normal((HIDDEN, 12)), "weight2": rng.standard_normal((6, HIDDEN))}
        made = OrderedDict(
            (f"decoder.layers.0.mlp.experts.{name}", torch.from_numpy(values.astype(np.float32)))
            for name, values in weights.items()
        )
        place = tmp_path / run.folder(0, 0, expert)
        place.mkdir()
        torch.save(megatron_lm(run, [made]), place / "model_optim_rng.pt")
    write_config(tmp_path, run, num_local_experts=4)
    checkpoint = opened(tmp_path)
    evaluator = Evaluator(checkpoint)
    last = checkpoint.index
    name = "decoder.layers.0.mlp.experts.local_experts.3"
    first = evaluator.whole(last[f"{name}.linear_fc1.weight"]).view(np.float32)
    second = evaluator.whole(last[f"{name}.linear_fc2.weight"]).view(np.float32)
    np.testing.assert_array_equal(first, weights["weight1"].astype(np.float32).reshape(2, HIDDEN, 6)[1].T)
    np.testing.assert_array_equal(second, weights["weight2"].astype(np.float32).reshape(2, 3, HIDDEN)[1].T)


def test_names_of_before_megatron_core_are_known(tmp_path):
    old = {
        "language_model": {
            "embedding": {"word_embeddings": {"weight": torch.ones(5, HIDDEN)}},
            "encoder": {
                "layers.0.self_attention.query_key_value.weight": torch.ones(8, HIDDEN),
                "layers.0.self_attention.dense.weight": torch.ones(HIDDEN, 4),
                "layers.0.mlp.dense_h_to_4h.weight": torch.ones(6, HIDDEN),
                "layers.0.mlp.dense_4h_to_h.weight": torch.ones(HIDDEN, 3),
                "layers.0.input_norm.weight": torch.ones(HIDDEN),
                "layers.0.post_attention_norm.weight": torch.ones(HIDDEN),
                "final_norm.weight": torch.ones(HIDDEN),
            },
            "output_layer": {"weight": torch.ones(5, HIDDEN)},
        }
    }
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(megatron_lm(Run(), [OrderedDict(old)]), tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    assert {tensor.name for tensor in opened(tmp_path).tensors} == {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }


def refusal(folder, kind, **options) -> UnshardError:
    with pytest.raises(kind) as caught:
        opened(folder, **options)
    assert caught.value.hint
    return caught.value


def save(folder: Path, content, name: str = "mp_rank_00") -> None:
    (folder / name).mkdir(exist_ok=True)
    torch.save(content, folder / name / "model_optim_rng.pt")


def test_each_missing_rank_is_named(tmp_path):
    run = Run(2, 2, 1, ((1, 1),), experts=2)
    write_run(tmp_path, run, whole(run, 0))
    write_config(tmp_path, run)
    for name in sorted(path.name for path in tmp_path.glob("mp_rank_*")):
        (tmp_path / name).rename(tmp_path / "elsewhere")
        missing = refusal(tmp_path, IncompleteCheckpoint).file
        assert fnmatch(name, missing)
        assert missing.count("*") == 1
        (tmp_path / "elsewhere").rename(tmp_path / name)


@pytest.mark.parametrize(
    ("told", "gated"), [({}, True), ({"swiglu": True}, True), ({"swiglu": False}, False),
                        ({"swiglu": False, "quick_geglu": True}, True)],
)  # fmt: skip
def test_the_first_matrix_of_an_mlp_is_put_together_as_the_arguments_say(tmp_path, told, gated):
    name, rows = "decoder.layers.0.mlp.linear_fc1.weight", torch.arange(32.0).reshape(8, 4)
    for rank in range(2):
        part = torch.cat([half.chunk(2)[rank] for half in rows.chunk(2)]) if gated else rows.chunk(2)[rank]
        content = megatron_lm(Run(2), [OrderedDict({name: part.clone()})])
        vars(content["args"]).update(told)
        save(tmp_path, content, f"mp_rank_{rank:02d}")
    checkpoint = opened(tmp_path)
    found = Evaluator(checkpoint).whole(checkpoint.index[name]).view(np.float32)
    np.testing.assert_array_equal(found, rows.numpy())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_that_one_rank_of_a_stage_lacks_is_named(tmp_path, rank):
    tensors = OrderedDict({"decoder.final_layernorm.weight": torch.ones(4)})
    for number in range(2):
        more = {"decoder.layers.0.input_layernorm.weight": torch.ones(4)} if number == rank else {}
        save(tmp_path, megatron_lm(Run(2), [OrderedDict({**tensors, **more})]), f"mp_rank_{number:02d}")
    error = refusal(tmp_path, GeometryMismatch)
    assert error.tensor == "decoder.layers.0.input_layernorm.weight"
    assert error.file == f"mp_rank_{1 - rank:02d}/model_optim_rng.pt"


def test_dicts_without_end_are_refused(tmp_path):
    itself: dict[str, object] = {"x.weight": torch.ones(1)}
    itself["again"] = itself
    save(tmp_path, megatron_lm(Run(), [OrderedDict(itself)]))
    assert "nested" in refusal(tmp_path, CorruptFile).message
    again: dict[str, object] = {"weight": torch.ones(1)}
    for _ in range(12):
        again = {f"part{number}": again for number in range(20)}
    save(tmp_path, megatron_lm(Run(), [OrderedDict(again)]))
    assert "again and again" in refusal(tmp_path, CorruptFile).message


def test_a_file_with_and_without_virtual_stages_is_refused(tmp_path):
    stage = OrderedDict({"decoder.final_layernorm.weight": torch.ones(4)})
    save(tmp_path, megatron_lm(Run(), [stage]) | {"model0": stage})
    assert "model, model0" in refusal(tmp_path, CorruptFile).message


def test_an_old_order_of_rows_is_refused(tmp_path):
    for version in (1.0, "3", None):
        save(tmp_path, megatron_lm(Run(), []) | {"checkpoint_version": version, "model": {}})
        assert "checkpoint_version" in refusal(tmp_path, GeometryMismatch).message


def test_content_of_another_kind_is_refused(tmp_path):
    save(tmp_path, {"optimizer": {}})
    assert "model0" in refusal(tmp_path, CorruptFile).message
    save(tmp_path, 7)
    assert "found a int" in refusal(tmp_path, CorruptFile).message
    save(tmp_path, megatron_lm(Run(), [OrderedDict({"decoder.layers.0.x": 5})]))
    assert refusal(tmp_path, GeometryMismatch).tensor == "decoder.layers.0.x"
    save(tmp_path, megatron_lm(Run(), [OrderedDict()]))
    assert "no tensors" in refusal(tmp_path, CorruptFile).message


def test_a_parameter_that_no_rule_cuts_is_named(tmp_path):
    save(tmp_path, megatron_lm(Run(), [OrderedDict({"vision_model.conv1.weight": torch.ones(2, 2)})]))
    assert refusal(tmp_path, UnmappedTensor).tensor == "vision_model.conv1.weight"


def test_folders_of_two_runs_are_told_apart(tmp_path):
    content = megatron_lm(Run(2), [OrderedDict()])
    save(tmp_path, content)
    save(tmp_path, content, "mp_rank_00_001")
    assert "one form" in refusal(tmp_path, GeometryMismatch).message
    (tmp_path / "mp_rank_00_001").rename(tmp_path / "mp_rank_02")
    assert "mp_rank_02" in refusal(tmp_path, GeometryMismatch).message


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_on_the_last_stage_is_left_out_when_it_is_the_embedding_padding_or_not(tmp_path, tied):
    run = Run(2, layers=((1, 1),))
    tensors = whole(run, 0)
    if tied:
        tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"]
    for layer in (0, 1):
        tensors[f"decoder.layers.{layer}.self_attention.linear_proj.weight"] = np.ones((HIDDEN, 6 * 2), np.float32)
    write_run(tmp_path, run, tensors)
    # The heads whose queries, keys and values have as many rows as linear_qkv: (6 + 2) * 2.
    write_config(tmp_path, run, vocab_size=7, tie_word_embeddings=True, num_attention_heads=6, num_key_value_heads=1)
    checkpoint = opened(tmp_path)
    if not tied:
        with pytest.raises(GeometryMismatch, match="tie_word_embeddings is true, but"):
            map_checkpoint(checkpoint, ConvertOptions(), Evaluator(checkpoint))
        return
    mapped = map_checkpoint(checkpoint, ConvertOptions(), Evaluator(checkpoint))
    shapes = {target.name: target.expression.shape for target in mapped.targets}
    assert shapes["model.embed_tokens.weight"] == (7, HIDDEN)
    assert "lm_head.weight" not in shapes


@pytest.mark.parametrize(("rows", "expected"), [(6, Cut.WHOLE), (3, Cut.ROWS), (2, None)])
def test_down_projections_of_latent_attention_are_whole_or_cut_as_their_rows_say(rows, expected):
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    facts = Facts({"q_lora_rank": 6})
    assert cut_of(name, (rows, 4)) is Cut.LATENT
    if expected is None:
        with pytest.raises(GeometryMismatch, match=r"6 rows on each rank, or on all 2 together \(q_lora_rank\)"):
            segments(name, (rows, 4), Cut.LATENT, (1, 2), facts)
        return
    share = segments(name, (rows, 4), Cut.LATENT, (1, 2), facts)
    assert share == (None if expected is Cut.WHOLE else segments(name, (rows, 4), Cut.ROWS, (1, 2), facts))


@pytest.mark.parametrize(
    ("name", "shape", "cut"),
    [
        ("mtp.layers.0.eh_proj.weight", (4, 8), Cut.ROWS),
        ("mtp.layers.0.enorm.weight", (4,), Cut.WHOLE),
        ("decoder.layers.0.self_attention.core_attention.softmax_offset", (4,), Cut.ROWS),
        ("decoder.layers.0.mlp.router.expert_bias", (4,), Cut.WHOLE),
        ("decoder.layers.0.mlp.shared_experts.gate_weight", (1, 4), Cut.WHOLE),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", (4, 4), Cut.GATE_AND_UP),
        ("decoder.layers.0.mlp.linear_fc2.bias", (4,), Cut.WHOLE),
        ("output_layer.weight", (1, 4), Cut.WHOLE),
        ("output_layer.weight", (2, 4), Cut.ROWS),
        ("decoder.layers.0.mixer.A_log", (4,), None),
    ],
)
def test_parameters_are_cut_as_their_modules_are(name, shape, cut):
    assert cut_of(name, shape) is cut


def test_files_of_two_steps_are_told_apart(tmp_path):
    run = Run(2)
    tensors = whole(run, 0)
    write_run(tmp_path, run, tensors)
    write_config(tmp_path, run)
    late = megatron_lm(run, list(stages(run, tensors, 1, 0, 0))) | {"iteration": 8}
    torch.save(late, tmp_path / "mp_rank_01" / "model_optim_rng.pt")
    assert "mp_rank_01/model_optim_rng.pt has the iteration 8" in refusal(tmp_path, GeometryMismatch).message


def test_stages_with_gaps_in_their_layers_are_refused(tmp_path):
    weights = {f"decoder.layers.{n}.input_layernorm.weight": torch.ones(2) for n in (0, 2)}
    save(tmp_path, megatron_lm(Run(), [OrderedDict(weights)]))
    assert "layers 0, 2" in refusal(tmp_path, GeometryMismatch).message


def test_copies_that_differ_between_ranks_are_not_published(tmp_path):
    run = Run(2)
    tensors = whole(run, 0)
    source = tmp_path / "source"
    write_run(source, run, tensors)
    write_config(source, run)
    (made,) = stages(run, tensors, 1, 0, 0)
    made["decoder.final_layernorm.weight"][0] += 1
    torch.save(megatron_lm(run, [made]), source / "mp_rank_01" / "model_optim_rng.pt")
    with pytest.raises(GeometryMismatch, match=r"final_layernorm.*differ"):
        convert(str(source), str(tmp_path / "out"), ConvertOptions(family="none", config_dir=str(source)))
    assert not (tmp_path / "out").exists()


def test_a_step_or_role_that_the_folder_is_not_of_is_refused(tmp_path):
    save(tmp_path, megatron_lm(Run(), [OrderedDict()]))
    assert "step 4" in refusal(tmp_path, InvalidOption, step=4).message
    assert "role critic" in refusal(tmp_path, InvalidOption, role="critic").message


def test_verls_modules_need_a_config(tmp_path):
    run = Run(2, groups=2, verl=True)
    write_run(tmp_path, run, whole(run, 0))
    assert "config.json" in refusal(tmp_path, IncompleteCheckpoint).message


def test_the_tracker_decides_between_steps_and_the_release(tmp_path):
    for name in ("iter_0000003", "iter_0000010", "release"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, megatron_lm(Run(), [OrderedDict({f"decoder.{name}norm.weight": torch.ones(1)})]))
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, options, expected in (
        ("3", {}, "iter_0000003"),
        ("3", {"step": 10}, "iter_0000010"),
        ("release", {}, "release"),
        ("release", {"step": 3}, "iter_0000003"),
    ):
        tracker.write_text(text)
        assert opened(tmp_path, **options).tensors[0].name == f"decoder.{expected}norm.weight"
    tracker.write_text("4")
    assert "iter_0000004" in refusal(tmp_path, IncompleteCheckpoint).message


def test_the_actor_is_taken_from_a_step_of_verl_unless_the_critic_is_asked_for(tmp_path):
    for role, name in (("actor", "model.norm.weight"), ("critic", "lm_head.weight")):
        place = tmp_path / "global_step_5" / role / "model" / "mp_rank_00"
        place.mkdir(parents=True)
        torch.save([OrderedDict({name: torch.ones(1, 2)})], place / "model.pt")
    assert [tensor.name for tensor in opened(tmp_path).tensors] == ["model.norm.weight"]
    assert [tensor.name for tensor in opened(tmp_path, role="critic").tensors] == ["lm_head.weight"]
    assert opened(tmp_path).files[0].path == "global_step_5/actor/model/mp_rank_00/model.pt"
    (tmp_path / "global_step_5" / "actor" / "model" / "mp_rank_00" / "model.pt").unlink()
    assert refusal(tmp_path, IncompleteCheckpoint).expected == "weights in actor/"
