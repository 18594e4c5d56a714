"""Megatron-Core's distributed checkpoints that are not finished, of another backend or without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from tests.formats.cases import CASES
from workers.errors import CorruptFile, IncompleteCheckpoint, InvalidOption, UnshardError
from workers.formats import detect, open_checkpoint
from workers.formats._format import Listing
from workers.options import ConvertOptions
from workers.storage import open_folder

ACTOR = CASES / "megatron" / "verl-qwen3-tied-pp2" / "input"
RUN = CASES / "megatron" / "mlm-dist-optimizer-llama-tied-dp2" / "input"


def opened(folder: Path, **options):
    return open_checkpoint(open_folder(str(folder)), ConvertOptions(**options))


def refusal(folder: Path, kind: type[UnshardError], **options) -> UnshardError:
    with pytest.raises(kind) as caught:
        opened(folder, **options)
    assert caught.value.hint
    return caught.value


@pytest.fixture
def actor(tmp_path):
    shutil.copytree(ACTOR, tmp_path / "actor")
    return tmp_path / "actor"


@pytest.mark.parametrize("place", ["", "dist_ckpt"])
def test_an_actor_and_its_inner_folder_are_recognised_alike(place):
    listing = Listing(open_folder(str(ACTOR / place)))
    assert list(detect(listing)) == ["megatron-dist"]


def test_a_run_of_verl_is_searched_for_the_step_and_the_role(actor, tmp_path):
    run = tmp_path / "run"
    for step in (3, 4):
        shutil.copytree(actor, run / f"global_step_{step}" / "actor")
        shutil.copytree(actor, run / f"global_step_{step}" / "critic")
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    checkpoint = opened(run)
    assert {file.path.rpartition("/")[0] for file in checkpoint.files} == {"global_step_3/actor/dist_ckpt"}
    assert checkpoint.config_path == "global_step_3/actor/huggingface/config.json"
    assert opened(run, step=4, role="critic").files[0].path.startswith("global_step_4/critic/")
    assert "critic" in refusal(run, IncompleteCheckpoint, role="reference").message


def test_optimizer_state_is_left_out_by_name():
    checkpoint = opened(RUN)
    left = [name for name, _ in checkpoint.left_out]
    assert "optimizer.state.exp_avg.output_layer.weight" not in left  # the model is tied
    assert any(name.startswith("optimizer.state.param.") for name in left)
    assert not any("optimizer" in tensor.name for tensor in checkpoint.tensors)


def test_another_backend_is_named(actor):
    (actor / "dist_ckpt" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert "'zarr'" in refusal(actor, CorruptFile).message


def test_a_save_that_was_not_finished_is_told_from_one_whose_dot_file_is_lost(actor):
    (actor / "dist_ckpt" / "metadata.json").rename(actor / "kept.json")
    assert "writes it last" in refusal(actor, IncompleteCheckpoint).message
    (actor / "kept.json").rename(actor / "dist_ckpt" / "metadata.json")
    (actor / "dist_ckpt" / ".metadata").unlink()
    assert "begin with a dot" in refusal(actor, IncompleteCheckpoint).message


def test_a_step_that_a_folder_is_not_of_is_refused(actor):
    assert "step 7" in refusal(actor, InvalidOption, step=7).message


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_optimizer_state_alone_points_to_the_weights(tmp_path):
    state = {"optimizer.state.exp_avg.output_layer.weight": torch.ones(3)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dist_ckpt", no_dist=True)
    (tmp_path / "dist_ckpt" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert "no weight" in refusal(tmp_path, IncompleteCheckpoint).message
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "model.safetensors").write_bytes(b"")
    assert "huggingface/ has the weights" in refusal(tmp_path, IncompleteCheckpoint).message


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plain_dcp_folder_with_megatrons_names_is_mapped_by_megatrons_tables(tmp_path):
    shapes = {
        "embedding.word_embeddings.weight": (6, 4),
        "decoder.layers.0.self_attention.linear_qkv.weight": (8, 4),
        "decoder.layers.0.mlp.linear_fc1.weight_w": (3, 4),
        "decoder.layers.0.mlp.linear_fc1.weight_v": (3, 4),
        "output_layer.weight": (6, 4),
    }
    state = {"model": {f"module.{name}": torch.ones(shape) for name, shape in shapes.items()}, "iteration": 3}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    checkpoint = opened(tmp_path)
    assert (checkpoint.format, checkpoint.naming) == ("dcp", "megatron")
    assert {tensor.name: tensor.shape for tensor in checkpoint.tensors} == shapes
