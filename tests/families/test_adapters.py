"""LoRA checkpoints against peft: kept apart they load, merged they equal ``merge_and_unload``."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from tests.families.runs import Run
from tests.families.tiny_models import tiny_model
from workers.errors import (
    AmbiguousSource,
    GeometryMismatch,
    IncompleteCheckpoint,
    InvalidOption,
    UnmappedTensor,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}


def peft_model(**settings):
    model = get_peft_model(tiny_model("llama"), LoraConfig(**{"r": 4, "lora_alpha": 24, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_()
    return model


def saved(folder, model, meta=True, **config):
    """A run of one process as verl leaves it: the module's state dict, config and what it notes of the adapter."""
    run = Run(folder, model.state_dict(), model.get_base_model().config.to_dict() | CONFIG | config)
    settings = model.peft_config["default"]
    if meta:
        noted = {"r": settings.r, "lora_alpha": settings.lora_alpha, "task_type": "CAUSAL_LM"}
        (folder / "lora_train_meta.json").write_text(json.dumps(noted))
    return run


def assert_close(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["embed_tokens", "v_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
        {"target_modules": r"model\.layers\.1\.self_attn\.q_proj"},
    ],
    ids=["linear", "embedding", "modules_to_save", "one_layer"],
)
def test_a_merged_adapter_equals_pefts_own_merge(tmp_path, settings):
    model = peft_model(**settings)
    run = saved(tmp_path, model)
    found = run.convert(lora="merge")
    merged = model.merge_and_unload()
    assert_close(found.tensors(), dict(merged.state_dict()))
    assert any("lora_alpha 24 (lora_train_meta.json)" in note for note in found.mapping.notes)


@pytest.mark.parametrize("settings", [{"use_rslora": True}, {"alpha_pattern": {"layers.1.self_attn.q_proj": 3}}])
def test_scales_that_the_adapters_settings_tell_are_used(tmp_path, settings):
    model = peft_model(target_modules=["q_proj", "v_proj"], **settings)
    run = saved(tmp_path, model, meta=False)
    (tmp_path / "lora_adapter").mkdir()
    told = {"lora_alpha": 24, "r": 4, **settings}
    (tmp_path / "lora_adapter" / "adapter_config.json").write_text(json.dumps(told))
    assert_close(run.convert(lora="merge").tensors(), dict(model.merge_and_unload().state_dict()))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": r"model\.layers\.1\.self_attn\.q_proj"},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}},
    ],
    ids=["linear", "modules_to_save", "dora", "embedding", "one_layer", "ranks"],
)
def test_an_adapter_kept_apart_is_what_peft_saves_and_loads(tmp_path, settings):
    torch.manual_seed(0)
    model = peft_model(**settings)
    found = saved(tmp_path, model).convert()
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    expected = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    adapter = found.tensors("lora_adapter")
    assert sorted(adapter) == sorted(expected)
    assert all(torch.equal(adapter[name], tensor) for name, tensor in expected.items())

    (tmp_path / "ours").mkdir()
    save_file(adapter, tmp_path / "ours" / "adapter_model.safetensors")
    (tmp_path / "ours" / "adapter_config.json").write_bytes(
        dict(found.mapping.files)["lora_adapter/adapter_config.json"]
    )
    base = tiny_model("llama")
    base.load_state_dict(found.tensors())
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "ours"))
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model.eval()(tokens).logits)


def test_merging_without_alpha_is_refused_and_says_where_it_was_looked_for(tmp_path):
    run = saved(tmp_path, peft_model(target_modules=["q_proj"]), meta=False)
    with pytest.raises(InvalidOption) as caught:
        run.convert(lora="merge")
    assert "lora_train_meta.json" in caught.value.message
    assert "lora_alpha" in caught.value.hint
    assert run.convert(lora="merge", lora_alpha=24.0).tensors()


def test_an_adapter_without_alpha_says_null_and_never_a_guess(tmp_path):
    found = saved(tmp_path, peft_model(target_modules=["q_proj"]), meta=False).convert()
    assert found.json("lora_adapter/adapter_config.json")["lora_alpha"] is None
    assert any("no lora_alpha" in note for note in found.mapping.notes)


def test_dora_is_merged_as_peft_merges_it(tmp_path):
    model = peft_model(target_modules=["q_proj", "down_proj"], use_dora=True)
    merged = saved(tmp_path, model).convert(lora="merge").tensors()
    expected = model.merge_and_unload().state_dict()
    for name in (f"model.layers.0.{module}.weight" for module in ("self_attn.q_proj", "mlp.down_proj")):
        torch.testing.assert_close(merged[name], expected[name])


def test_a_bias_of_b_is_not_merged_but_named(tmp_path):
    state = adapter_state() | {"base_model.model.l.lora_B.default.bias": torch.ones(3)}
    with pytest.raises(InvalidOption, match=r"lora_B\.bias.*at l"):
        Run(tmp_path, state, CONFIG).convert(lora="merge", lora_alpha=4.0, family="none")


def adapter_state(module="l", rows=3, columns=5, rank=2):
    return {
        f"base_model.model.{module}.base_layer.weight": torch.ones(rows, columns),
        f"base_model.model.{module}.lora_A.default.weight": torch.ones(rank, columns),
        f"base_model.model.{module}.lora_B.default.weight": torch.ones(rows, rank),
    }


def test_a_base_saved_the_other_way_round_is_merged_the_other_way_round(tmp_path):
    state = adapter_state() | {"base_model.model.l.base_layer.weight": torch.zeros(5, 3)}
    run = Run(tmp_path, state, CONFIG)
    with pytest.raises(GeometryMismatch, match="the adapter of l does not fit its base"):
        run.convert(lora="merge", lora_alpha=4.0)
    (tmp_path / "lora_adapter").mkdir()
    settings = json.dumps({"lora_alpha": 4, "fan_in_fan_out": True})
    (tmp_path / "lora_adapter" / "adapter_config.json").write_text(settings)
    assert torch.equal(run.convert(lora="merge").tensors()["l.weight"], torch.full((5, 3), 4.0))


def test_several_adapters_are_a_choice(tmp_path):
    state = adapter_state() | {"base_model.model.l.lora_A.other.weight": torch.ones(2, 5)}
    with pytest.raises(AmbiguousSource) as caught:
        Run(tmp_path, state, CONFIG).convert()
    assert caught.value.found == "default, other"


@pytest.mark.parametrize("part", ["ia3_l.default", "token_adapter.trainable_tokens_delta.default", "lora_A"])
def test_parts_of_other_methods_are_named(tmp_path, part):
    name = f"base_model.model.l.{part}"
    if part == "lora_A":
        name = "base_model.model..lora_"
    with pytest.raises(UnmappedTensor) as caught:
        Run(tmp_path, adapter_state() | {name: torch.ones(2)}, CONFIG).convert()
    assert caught.value.tensor == name


def test_an_adapter_alone_is_a_folder_of_its_own(tmp_path):
    state = {name: tensor for name, tensor in adapter_state("model.l").items() if "lora_" in name}
    run = Run(tmp_path, state)
    found = run.convert(lora_alpha=8.0)
    assert sorted(found.tensors()) == [f"base_model.model.model.l.lora_{part}.weight" for part in "AB"]
    assert [path for path, _ in found.mapping.files] == ["adapter_config.json"]
    settings = found.json("adapter_config.json")
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (2, 8, ["l"])
    with pytest.raises(IncompleteCheckpoint, match="no base weights"):
        run.convert(lora="merge", lora_alpha=8.0)


def test_an_adapter_of_something_without_a_weight_is_not_merged_but_named(tmp_path):
    state = adapter_state("mlp.experts")
    state["base_model.model.mlp.experts.base_layer.down_proj"] = state.pop(
        "base_model.model.mlp.experts.base_layer.weight"
    )
    with pytest.raises(UnmappedTensor) as caught:
        Run(tmp_path, state, CONFIG).convert(lora="merge", lora_alpha=4.0)
    assert caught.value.tensor == "mlp.experts.weight"


def test_a_rank_that_the_settings_contradict_is_told_with_both(tmp_path):
    run = Run(tmp_path, adapter_state(), CONFIG)
    (tmp_path / "lora_train_meta.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
    with pytest.raises(GeometryMismatch) as caught:
        run.convert()
    assert (caught.value.expected, caught.value.found) == ("r = 8", "2")


def test_full_names_are_written_where_short_ones_would_fit_other_modules(tmp_path):
    state = adapter_state("layers.0.l") | {"base_model.model.layers.1.l.weight": torch.ones(3, 5)}
    found = Run(tmp_path, state, CONFIG).convert()
    assert found.json("lora_adapter/adapter_config.json")["target_modules"] == ["layers.0.l"]


def test_a_classifiers_head_is_trained_as_a_whole_and_kept_either_way(tmp_path):
    state = adapter_state() | {
        "base_model.model.score.original_module.weight": torch.zeros(1, 3),
        "base_model.model.score.modules_to_save.default.weight": torch.ones(1, 3),
    }
    run = Run(tmp_path, state, CONFIG)
    apart = run.convert()
    assert apart.tensors()["score.weight"].sum() == 0
    assert apart.tensors("lora_adapter")["base_model.model.score.weight"].sum() == 3
    assert apart.json("lora_adapter/adapter_config.json")["modules_to_save"] == ["score"]
    merged = run.convert(lora="merge", lora_alpha=2.0)
    assert merged.tensors()["score.weight"].sum() == 3
    assert list(merged.tensors()) == ["l.weight", "score.weight"]
    assert merged.dropped == ["score.weight (before training)"]


@pytest.mark.parametrize("lora", ["separate", "merge"])
@pytest.mark.parametrize(
    ("kept", "other"),
    [
        ("base_model.model.model.norm.weight", "model.norm.weight"),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
            "base_model.model.model.layers.0.self_attn.q_proj.weight",
        ),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
            "model.layers.0.self_attn.q_proj.lora_A.default.weight",
        ),
    ],
    ids=["base", "wrapped", "adapter"],
)
def test_two_tensors_that_are_one_without_peft_are_named_and_none_is_lost(tmp_path, lora, kept, other):
    model = peft_model(target_modules=["q_proj"])
    state = dict(model.state_dict())
    state[other] = state[kept] + 1
    run = Run(tmp_path, state, model.get_base_model().config.to_dict() | CONFIG)
    noted = {"r": 4, "lora_alpha": 24, "task_type": "CAUSAL_LM"}
    (tmp_path / "lora_train_meta.json").write_text(json.dumps(noted))
    with pytest.raises(GeometryMismatch) as caught:
        run.convert(lora=lora)
    assert kept in caught.value.message
    assert other in caught.value.message
    assert caught.value.hint
