"""Ties, casts, config.json and cross-checks: the steps around the names."""

from __future__ import annotations

import pytest
import torch

from tests.families.runs import Run
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InvalidOption
from workers.families.config_file import main_dtype
from workers.families.registry import transformers_version

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "transformers_version": "5.10.4"}


def embedding(rows=6, start=0.0):
    return torch.arange(start, start + rows * 4).reshape(rows, 4)


def state(*, tied=True, embed=EMBED, **more):
    return {
        embed: embedding(),
        "model.norm.weight": torch.ones(4),
        HEAD: embedding(start=0.0 if tied else 1.0),
        **more,
    }


# --- tied embeddings ---------------------------------------------------------------------------------------


def test_a_head_that_repeats_the_embedding_is_left_out(tmp_path):
    found = Run(tmp_path, state(), LLAMA | {"tie_word_embeddings": True}).convert()
    assert list(found.tensors()) == [EMBED, "model.norm.weight"]
    assert found.dropped == [HEAD]
    assert found.json()["tie_word_embeddings"] is True


def test_a_head_that_differs_is_kept_and_the_config_corrected(tmp_path):
    config = LLAMA | {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}
    found = Run(tmp_path, state(tied=False), config).convert()
    assert HEAD in found.tensors()
    assert found.json()["tie_word_embeddings"] is False
    assert found.json()["text_config"]["tie_word_embeddings"] is False
    assert any("differ" in note for note in found.mapping.notes)


def test_an_untied_model_keeps_its_head_even_when_equal(tmp_path):
    found = Run(tmp_path, state(), LLAMA | {"tie_word_embeddings": False}).convert()
    assert HEAD in found.tensors()
    assert found.json()["tie_word_embeddings"] is False


def test_a_flag_that_only_the_language_model_has_is_raised_to_the_top(tmp_path):
    config = {"model_type": "qwen2_5_vl", "text_config": {"tie_word_embeddings": True}, "architectures": ["X"]}
    found = Run(tmp_path, state(embed="model.language_model.embed_tokens.weight"), config).convert()
    assert list(found.tensors()) == [EMBED, "model.norm.weight"]
    assert found.json()["tie_word_embeddings"] is True


def test_the_flag_is_raised_even_where_training_saved_no_head(tmp_path):
    tensors = state(embed="model.language_model.embed_tokens.weight")
    del tensors[HEAD]
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {"tie_word_embeddings": True},
    }
    assert Run(tmp_path, tensors, config).convert().json()["tie_word_embeddings"] is True


@pytest.mark.parametrize(("version", "dropped"), [("4.48.3", [HEAD]), ("5.10.4", []), (None, [])])
def test_a_missing_flag_means_tied_where_transformers_4_wrote_the_config(tmp_path, version, dropped):
    found = Run(tmp_path, state(), {"model_type": "llama", "transformers_version": version}).convert()
    assert found.dropped == dropped
    assert found.json().get("tie_word_embeddings") is (True if dropped else None)


def test_a_wish_to_tie_what_differs_is_refused_with_both_names(tmp_path):
    run = Run(tmp_path, state(tied=False), LLAMA | {"tie_word_embeddings": False})
    with pytest.raises(GeometryMismatch) as caught:
        run.convert(tie_word_embeddings=True)
    assert HEAD in caught.value.message
    assert EMBED in caught.value.message


def test_a_wish_to_tie_what_is_equal_is_granted(tmp_path):
    found = Run(tmp_path, state(), LLAMA | {"tie_word_embeddings": False}).convert(tie_word_embeddings=True)
    assert found.dropped == [HEAD]
    assert found.json()["tie_word_embeddings"] is True


def test_a_wish_to_untie_writes_the_head(tmp_path):
    tensors = state()
    del tensors[HEAD]
    found = Run(tmp_path, tensors, LLAMA | {"tie_word_embeddings": True}).convert(tie_word_embeddings=False)
    assert torch.equal(found.tensors()[HEAD], found.tensors()[EMBED])
    assert found.json()["tie_word_embeddings"] is False


def test_a_language_model_without_a_head_is_said(tmp_path):
    tensors = state()
    del tensors[HEAD]
    found = Run(tmp_path, tensors, LLAMA | {"tie_word_embeddings": False}).convert()
    assert any("no output head" in note for note in found.mapping.notes)


def test_a_critic_needs_no_head(tmp_path):
    tensors = state(**{"score.weight": torch.ones(1, 4)})
    del tensors[HEAD]
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForTokenClassification"], "tie_word_embeddings": True}
    found = Run(tmp_path, tensors, config).convert()
    assert found.mapping.notes == ()
    assert found.json()["tie_word_embeddings"] is True


# --- names -------------------------------------------------------------------------------------------------


def test_a_value_head_keeps_its_name_and_loses_the_wrappers(tmp_path):
    tensors = {"pretrained_model.model.norm.weight": torch.ones(4), "v_head.summary.weight": torch.ones(1, 4)}
    found = Run(tmp_path, tensors, LLAMA).convert()
    assert list(found.tensors()) == ["model.norm.weight", "v_head.summary.weight"]
    assert found.mapping.family == "trl_value_head"


def test_older_names_of_vision_models_pass_unchanged(tmp_path):
    tensors = {"visual.blocks.0.norm1.weight": torch.ones(4), "model.norm.weight": torch.ones(4)}
    assert list(Run(tmp_path, tensors, {"model_type": "qwen2_vl"}).convert().tensors()) == list(tensors)


def test_names_of_both_kinds_that_meet_are_refused(tmp_path):
    tensors = {"model.visual.x": torch.ones(4), "visual.x": torch.ones(4)}
    with pytest.raises(GeometryMismatch, match=r"two tensors .* visual\.x"):
        Run(tmp_path, tensors, {"model_type": "qwen2_vl"}).convert()


def test_an_unknown_model_keeps_its_names_and_says_so_of_fused_experts(tmp_path):
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 3)}
    found = Run(tmp_path, tensors, {"model_type": "brand_new"}).convert()
    assert list(found.tensors()) == list(tensors)
    assert found.mapping.family == "names kept"
    assert any("experts stay fused" in note for note in found.mapping.notes)


def test_a_family_can_be_asked_for_or_none(tmp_path):
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 3)}
    run = Run(tmp_path, tensors, {"model_type": "brand_new"})
    assert len(run.convert(family="qwen2_moe").tensors()) == 4
    assert list(run.convert(family="none").tensors()) == list(tensors)
    with pytest.raises(InvalidOption, match="no family 'x'"):
        run.convert(family="x")


def test_experts_of_qwen3_vl_are_turned_to_the_hubs_orientation(tmp_path):
    fused = torch.arange(2 * 6 * 4.0).reshape(2, 6, 4)
    down = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    names = [f"model.language_model.layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down")]
    config = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 4}, "transformers_version": "5.1.0"}
    found = Run(tmp_path, dict(zip(names, (fused, down), strict=True)), config).convert().tensors()
    assert torch.equal(found[names[0]], fused.transpose(1, 2))
    assert torch.equal(found[names[1]], down.transpose(1, 2))
    (tmp_path / "four").mkdir()
    turned = {names[0]: fused.transpose(1, 2).contiguous(), names[1]: down.transpose(1, 2).contiguous()}
    again = Run(tmp_path / "four", turned, config | {"transformers_version": "4.57.1"}).convert().tensors()
    assert all(torch.equal(again[name], found[name]) for name in names)


# --- casts and config.json ---------------------------------------------------------------------------------


def test_floating_weights_are_cast_and_nothing_else(tmp_path):
    tensors = {
        "w": torch.randn(3, 5),
        "half": torch.randn(2).half(),
        "ids": torch.arange(3),
        "mlp.gate.e_score_correction_bias": torch.randn(4),
    }
    run = Run(tmp_path, {k: v for k, v in tensors.items() if k != "ids"}, {"model_type": "x"})
    found = run.convert(dtype="bfloat16").tensors()
    assert torch.equal(found["w"], tensors["w"].bfloat16())
    assert torch.equal(found["half"], tensors["half"].bfloat16())
    assert torch.equal(found["mlp.gate.e_score_correction_bias"], tensors["mlp.gate.e_score_correction_bias"])


def test_integers_stay_as_they_are(tmp_path):
    run = Run(tmp_path, {"ids": torch.arange(3), "flags": torch.tensor([True])}, {"model_type": "x"})
    kinds = [target.expression.dtype for target in run.convert(dtype="float16").mapping.targets]
    assert kinds == ["I64", "BOOL"]


def test_what_stays_in_float32_is_still_widened_to_it(tmp_path):
    run = Run(tmp_path, {"g.e_score_correction_bias": torch.ones(2).bfloat16()}, {"model_type": "x"})
    assert run.convert(dtype="float32").tensors()["g.e_score_correction_bias"].dtype == torch.float32
    assert run.convert(dtype="float16").tensors()["g.e_score_correction_bias"].dtype == torch.bfloat16


def test_the_router_of_ernie_stays_in_float32(tmp_path):
    tensors = {"model.layers.0.mlp.gate.weight": torch.randn(4, 2), "model.norm.weight": torch.randn(2)}
    found = Run(tmp_path, tensors, {"model_type": "ernie4_5_moe"}).convert(dtype="bfloat16").tensors()
    assert [tensor.dtype for tensor in found.values()] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}),
        ({"dtype": None, "torch_dtype": "float16"}, {"dtype": "float32", "torch_dtype": "float32"}),
        ({"transformers_version": "4.48.3"}, {"torch_dtype": "float32"}),
        ({"transformers_version": "4.57.6"}, {"dtype": "float32"}),
        ({"transformers_version": "5.0.0.dev0"}, {"dtype": "float32"}),
        ({}, {"torch_dtype": "float32"}),
    ],
)
def test_the_dtype_of_most_weights_goes_under_the_key_that_fits(tmp_path, config, expected):
    tensors = {"w": torch.ones(9), "buffer": torch.ones(8).bfloat16()}
    found = Run(tmp_path, tensors, {"model_type": "x"} | config).convert().json()
    assert {key: value for key, value in found.items() if "dtype" in key} == expected


def test_parts_of_the_config_are_corrected_but_get_no_new_key(tmp_path):
    config = {
        "model_type": "x",
        "dtype": "float16",
        "text_config": {"model_type": "t", "dtype": "float16"},
        "vision_config": {"model_type": "v"},
    }
    found = Run(tmp_path, {"w": torch.ones(9)}, config).convert().json()
    assert found["text_config"]["dtype"] == "float32"
    assert "dtype" not in found["vision_config"]


def test_everything_else_in_the_config_stays_in_its_order(tmp_path):
    config = {"z": 1e-06, "model_type": "x", "dtype": "float32", "a": {"ü": [1, None]}}
    result = Run(tmp_path, {"w": torch.ones(9)}, config).convert()
    assert list(result.json().items()) == list(config.items())
    text = dict(result.mapping.files)["config.json"].decode()
    assert '"z": 1e-06' in text
    assert "ü" in text


def test_a_model_without_floating_weights_has_no_main_dtype():
    assert main_dtype([]) is None


@pytest.mark.parametrize(
    ("text", "version"), [("4.57.6", (4, 57)), ("5.0.0.dev0", (5, 0)), (None, (0, 0)), ("next", (0, 0))]
)
def test_versions_of_transformers_are_read_leniently(text, version):
    assert transformers_version({"transformers_version": text}) == version
    assert transformers_version({}) == (0, 0)


def test_a_checkpoint_without_a_config_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(IncompleteCheckpoint) as caught:
        Run(tmp_path, {"w": torch.ones(2)}).convert()
    assert caught.value.file == "config.json"
    assert "huggingface/ and the folder itself" in caught.value.message
    assert "config_dir" in caught.value.hint


# --- cross-checks ------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 6,
    "hidden_size": 4,
    "intermediate_size": 3,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}


def llama_state():
    layers = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        layers |= {f"{prefix}.{part}_proj.weight": torch.ones(3, 4) for part in ("gate", "up")}
        layers[f"{prefix}.down_proj.weight"] = torch.ones(4, 3)
    return state() | layers


def test_a_config_that_fits_is_no_matter(tmp_path):
    assert len(Run(tmp_path, llama_state(), LLAMA | SIZES).convert().tensors()) == 9


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_config_that_contradicts_the_tensors_is_told_with_both_values(tmp_path, key):
    run = Run(tmp_path, llama_state(), LLAMA | SIZES | {key: 7})
    with pytest.raises(GeometryMismatch) as caught:
        run.convert()
    assert caught.value.expected == f"{key} = 7"
    assert caught.value.found == str(SIZES[key])
    assert caught.value.file == "config.json"
    assert run.convert(family="none").tensors()


def test_models_whose_config_may_mean_something_else_are_not_checked(tmp_path):
    config = LLAMA | SIZES | {"model_type": "brand_new", "vocab_size": 7}
    assert Run(tmp_path, llama_state(), config).convert().tensors()
