"""PEFT's own folders: merged into a base they equal ``merge_and_unload``, kept apart they are as they were."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from tests.families.runs import Result
from tests.families.tiny_models import tiny_model
from tests.formats.evaluator import Evaluator
from workers.errors import IncompleteCheckpoint, InvalidOption, UnmappedTensor
from workers.families import map_checkpoint
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


def saved(folder, **settings):
    """A base and an adapter of it as transformers and peft save them; the model."""
    base = tiny_model("llama")
    base.save_pretrained(folder / "base")
    model = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 24, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name or (settings.get("bias") and name.endswith("bias")):
                parameter.normal_()
    model.save_pretrained(folder / "adapter")
    return model


def converted(folder, **options) -> Result:
    asked = ConvertOptions(**options)
    checkpoint = open_checkpoint(open_folder(str(folder)), asked)
    assert checkpoint.format == "peft"
    evaluator = Evaluator(checkpoint)
    return Result(map_checkpoint(checkpoint, asked, evaluator), evaluator)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "use_rslora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
        {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 3}},
        {"target_modules": ["q_proj", "o_proj"], "alpha_pattern": {r"^model\.layers\.\d+\..*(q|k)_proj": 5}},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    ],
    ids=["linear", "rslora", "modules_to_save", "dora", "patterns", "expressions", "one_layer"],
)
def test_an_adapter_is_merged_as_peft_merges_it(tmp_path, settings):
    expected = saved(tmp_path, **settings).merge_and_unload().state_dict()
    found = converted(tmp_path / "adapter", base=str(tmp_path / "base"), lora="merge").tensors()
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("way", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_of_a_base_that_peft_changed_first_is_kept_apart_and_not_merged(tmp_path, way):
    saved(tmp_path, target_modules=["q_proj"], init_lora_weights=way)
    base = str(tmp_path / "base")
    assert converted(tmp_path / "adapter", base=base).json("lora_adapter/adapter_config.json")
    with pytest.raises(InvalidOption, match=f"init_lora_weights {way}"):
        converted(tmp_path / "adapter", base=base, lora="merge")


@pytest.mark.parametrize("settings", [{"use_qalora": True}, {"layer_replication": [[0, 1], [0, 1]]}])
def test_an_adapter_that_is_no_plain_sum_is_not_merged(tmp_path, settings):
    saved(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(InvalidOption, match=next(iter(settings))):
        converted(tmp_path / "adapter", base=str(tmp_path / "base"), lora="merge")


@pytest.mark.parametrize("patterns", [{"(q+)+_proj": 3}, {".*.*.*_proj": 3}, {"q_proj(": 3}, {"q_proj": "3"}])
def test_patterns_that_could_take_forever_or_mean_nothing_are_refused(tmp_path, patterns):
    saved(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"alpha_pattern": patterns}))
    with pytest.raises(InvalidOption, match="alpha_pattern"):
        converted(tmp_path / "adapter", base=str(tmp_path / "base"), lora="merge")


@pytest.mark.parametrize("modules", [None, ["lm_head"]])
def test_an_adapter_is_kept_apart_as_it_was(tmp_path, modules):
    saved(tmp_path, target_modules=["q_proj"], modules_to_save=modules)
    expected = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for options in ({}, {"target_format": "peft"}, {"target_format": "peft", "base": str(tmp_path / "base")}):
        found = converted(tmp_path / "adapter", **options)
        tensors = found.tensors()
        assert sorted(tensors) == sorted(expected)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        settings = found.json("adapter_config.json")
        assert (settings["r"], settings["lora_alpha"], settings["modules_to_save"]) == (4, 24, modules)


def test_with_a_base_both_are_written(tmp_path):
    model = saved(tmp_path, target_modules=["q_proj"])
    found = converted(tmp_path / "adapter", base=str(tmp_path / "base"))
    base = load_file(tmp_path / "base/model.safetensors")
    assert sorted(found.tensors()) == sorted(base)
    assert len(found.tensors("lora_adapter")) == 2 * len(model.base_model.model.model.layers)


def test_merging_needs_a_base_and_says_which_the_config_names(tmp_path):
    saved(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "org/model"}))
    with pytest.raises(IncompleteCheckpoint, match=r"no base model.*org/model"):
        converted(tmp_path / "adapter", lora="merge")


def test_another_method_is_refused_by_name(tmp_path):
    saved(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_type": "IA3"}))
    with pytest.raises(UnmappedTensor, match="IA3"):
        converted(tmp_path / "adapter")


def test_an_alpha_that_contradicts_the_config_is_refused(tmp_path):
    saved(tmp_path, target_modules=["q_proj"])
    with pytest.raises(InvalidOption, match=r"lora_alpha says 8.*says 24"):
        converted(tmp_path / "adapter", lora_alpha=8.0)


@pytest.mark.parametrize("asked", [{"target_format": "peft"}, {"lora": "merge"}, {"lora_alpha": 8.0}])
def test_a_model_without_an_adapter_is_no_adapter(tmp_path, asked):
    saved(tmp_path, target_modules=["q_proj"])
    options = ConvertOptions(**asked)
    checkpoint = open_checkpoint(open_folder(str(tmp_path / "base")), options)
    with pytest.raises(InvalidOption, match="holds no adapter"):
        map_checkpoint(checkpoint, options, Evaluator(checkpoint))


def test_an_adapter_that_is_merged_and_stays_one_is_a_contradiction():
    with pytest.raises(InvalidOption, match=r"lora=merge .* target_format=peft"):
        ConvertOptions(lora="merge", target_format="peft")


def test_torchtunes_own_export_is_doubted(tmp_path):
    saved(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter/adapter_config.json"
    own = {key: json.loads(path.read_text())[key] for key in ("r", "lora_alpha", "target_modules", "peft_type")}
    path.write_text(json.dumps(own))
    checkpoint = open_checkpoint(open_folder(str(tmp_path / "adapter")), ConvertOptions())
    assert any("torchtune's own export" in note for note in checkpoint.notes)
