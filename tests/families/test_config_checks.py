"""Configs against tensors: right models of every kind pass, in several shapes, and what contradicts is told."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from tests.families.tiny_models import tiny_model
from workers.errors import GeometryMismatch, InvalidOption
from workers.expressions import Source
from workers.families.config_checks import CHECKED, check_config, check_used
from workers.families.config_file import corrected_sizes
from workers.families.sum_checks import LATENT
from workers.options import ConvertOptions

SHAPES = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"head_dim": 4},
    {"num_hidden_layers": 3, "hidden_size": 32},
)
LATENT_SHAPES = (
    {"q_lora_rank": None},
    {"v_head_dim": 6, "kv_lora_rank": 12, "qk_nope_head_dim": 12, "qk_head_dim": 16, "n_shared_experts": 3},
    {"num_attention_heads": 2, "q_lora_rank": 20, "first_k_dense_replace": 2},
)
OWN_SHAPES = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT_SHAPES),
    "glm4_moe_lite": LATENT_SHAPES[1:],
    "glm4_moe": ({"n_shared_experts": 2}, {"use_qk_norm": True}, {"attention_bias": True}),
    "gpt_oss": ({"num_local_experts": 3, "intermediate_size": 10},),
    "qwen2_moe": ({"shared_expert_intermediate_size": 20},),
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["full_attention"] * 2, "head_dim": 16, "num_key_value_heads": 1},
        {"layer_types": ["linear_attention"] * 2, "linear_num_value_heads": 8, "linear_key_head_dim": 6},
        {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 10},
    ),
}
UNBUILT = {"kimi_k2"}  # of DeepSeek-V3's modules, in code of its own
NONE = ConvertOptions()
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def entries(**shapes):
    names = {"q": QUERY, "k": KEY, "o": "model.layers.0.self_attn.o_proj.weight", "e": "model.embed_tokens.weight"}
    return [(names.get(name, name), Source(0, "BF16", shape)) for name, shape in shapes.items()]


@pytest.mark.parametrize("kind", sorted(CHECKED - UNBUILT))
def test_a_right_model_passes(kind, tmp_path):
    compared = set()
    for number, shape in enumerate((*SHAPES, *OWN_SHAPES.get(kind, ()))):
        folder = tmp_path / str(number)
        tiny_model(kind, **shape).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "pt") as file:
            found = [(name, Source(0, "F32", tuple(file.get_slice(name).get_shape()))) for name in file.keys()]  # noqa: SIM118 - no dict
        compared |= check_config(found, config, NONE)
    groups = set() if kind in LATENT else {"num_key_value_heads"}
    assert {"hidden_size", "num_attention_heads", "vocab_size", *groups} <= compared


def test_right_shapes_pass_and_say_what_was_compared():
    found = check_config(entries(q=(16, 16), k=(8, 16), o=(16, 16), e=(9, 16)), LLAMA, NONE)
    assert found == {"hidden_size", "num_attention_heads", "num_key_value_heads"}


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (
            {"num_key_value_heads": 1},
            {},
            f"num_key_value_heads is 1, but tensor {KEY} [8, 16] has 2 heads of 4 rows (hidden_size 16 / num_at",
        ),
        (
            {"head_dim": 3},
            {},
            f"num_attention_heads is 4, but tensor {QUERY} [16, 16] has 16 rows, no whole number of heads of 3 rows",
        ),
        (
            {},
            {"head_dim": 999},
            f"the option head_dim says that head_dim is 999, but tensor {QUERY} [16, 16] has 16 rows",
        ),
        ({}, {"num_key_value_heads": 4}, "the option num_key_value_heads says that num_key_value_heads is 4, but"),
        (
            {},
            {"hidden_size": 8},
            f"the option hidden_size says that hidden_size is 8, but tensor {QUERY} [16, 16] has 16",
        ),
        (
            {"num_hidden_layers": 2},
            {},
            "num_hidden_layers is 2, but the tensors are those of 1 layers; number 1 is the",
        ),
        (
            {"num_key_value_heads": None},
            {},
            f"num_attention_heads is 4, but tensor {KEY} [8, 16] has 2 heads of 4 rows",
        ),
        ({"num_key_value_heads": [2]}, {}, "num_key_value_heads is [2], which is no size"),
    ],
)
def test_a_contradiction_names_both_values_and_who_says_what(config, options, words):
    with pytest.raises(GeometryMismatch) as caught:
        check_config(entries(q=(16, 16), k=(8, 16)), LLAMA | config, ConvertOptions(**options))
    assert words in caught.value.message
    assert caught.value.hint.startswith("Leave the option out" if options else "The config")


def test_heads_of_a_size_that_nothing_tells_are_of_one_size():
    config = LLAMA | {"model_type": "gemma2"}  # whose class has a head_dim of its own
    assert "num_key_value_heads" in check_config(entries(q=(40, 16), k=(20, 16)), config, NONE)
    with pytest.raises(
        GeometryMismatch, match=r"num_key_value_heads is 2, but tensor .*k_proj.* has 10 rows beside 40"
    ):
        check_config(entries(q=(40, 16), k=(10, 16)), config, NONE)


LATENT_CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "kv_lora_rank": 6,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
LATENT_TENSORS = {
    "q_proj.weight": (40, 16),
    "kv_a_proj_with_mqa.weight": (8, 16),
    "kv_a_layernorm.weight": (6,),
    "kv_b_proj.weight": (52, 6),
    "o_proj.weight": (16, 20),
}
PHI = {"model_type": "phi3", "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 12}
PHI_TENSORS = {"self_attn.qkv_proj.weight": (32, 16), "mlp.gate_up_proj.weight": (24, 16)}
NEXT = {
    "model_type": "qwen3_next",
    "head_dim": 8,
    "num_attention_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 3,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 5,
}
NEXT_TENSORS = {"self_attn.q_proj.weight": (32, 16), "linear_attn.in_proj_qkvz.weight": (52, 16)}


def layer(tensors, module=""):
    return [(f"model.layers.0.{module}{name}", Source(0, "BF16", shape)) for name, shape in tensors.items()]


@pytest.mark.parametrize(
    ("config", "changes", "tensors", "words"),
    [
        (LATENT_CONFIG, {}, layer(LATENT_TENSORS, "self_attn."), None),
        (
            LATENT_CONFIG,
            {"v_head_dim": 4},
            layer(LATENT_TENSORS, "self_attn."),
            r"\* v_head_dim is 48, but .*kv_b.* 52",
        ),
        (
            LATENT_CONFIG,
            {"kv_lora_rank": 7},
            layer(LATENT_TENSORS, "self_attn."),
            "kv_lora_rank .* is 9, but .* has 8",
        ),
        (
            LATENT_CONFIG,
            {"num_attention_heads": 2},
            layer(LATENT_TENSORS, "self_attn."),
            "is 20, but .*q_proj.* has 40",
        ),
        (LATENT_CONFIG, {"qk_nope_head_dim": 6}, layer(LATENT_TENSORS, "self_attn."), "is 32, but .*q_proj.* has 40"),
        (PHI, {"num_key_value_heads": 2}, layer(PHI_TENSORS), None),
        (PHI, {}, layer(PHI_TENSORS), r"2 \* num_key_value_heads \* head_dim is 48, but .*qkv_proj.* has 32"),
        (PHI, {"num_key_value_heads": 2, "intermediate_size": 9}, layer(PHI_TENSORS), "intermediate_size is 18, but"),
        (NEXT, {}, layer(NEXT_TENSORS), None),
        (NEXT, {"linear_num_value_heads": 3}, layer(NEXT_TENSORS), "is 42, but .*in_proj_qkvz.* has 52"),
        (NEXT, {"num_attention_heads": 4}, layer(NEXT_TENSORS), "is 64, but .*q_proj.* has 32"),
    ],
)
def test_sizes_that_several_keys_make_are_compared(config, changes, tensors, words):
    if words is None:
        assert "num_attention_heads" in check_config(tensors, config | changes, NONE)
        return
    with pytest.raises(GeometryMismatch, match=words) as caught:
        check_config(tensors, config | changes, NONE)
    assert caught.value.file == "config.json"


def test_the_last_dimension_of_fused_experts_and_of_their_biases_is_compared():
    config = {"model_type": "gpt_oss", "num_local_experts": 3, "intermediate_size": 5}
    for shape, fits in (((3, 4, 10), True), ((3, 10), True), ((), True), ((3, 4, 8), False), ((3, 8), False)):
        tensors = layer({"mlp.experts.gate_up_proj" + ("_bias" if len(shape) == 2 else ""): shape})
        if fits:
            assert check_config(tensors, config, NONE)
        else:
            with pytest.raises(GeometryMismatch, match=r"2 \* intermediate_size is 10, but .* has 8"):
                check_config(tensors, config, NONE)


def test_an_option_that_makes_a_sum_wrong_is_named():
    tensors = layer(LATENT_TENSORS, "self_attn.")
    with pytest.raises(GeometryMismatch, match=r"the option num_attention_heads says .* is 20, but") as caught:
        check_config(tensors, LATENT_CONFIG, ConvertOptions(num_attention_heads=2))
    assert caught.value.hint.startswith("Leave the option out")


@pytest.mark.parametrize(
    ("kind", "passes"), [("deepseek_v3", True), ("glm4_moe", True), ("deepseek_v2", False), ("qwen3_moe", False)]
)
def test_layers_after_the_models_own_are_known_of_those_that_predict_further_tokens(kind, passes):
    config = {"model_type": kind, "num_hidden_layers": 1, "hidden_size": 16}
    tensors = [(f"model.layers.{n}.input_layernorm.weight", Source(0, "BF16", (16,))) for n in range(2)]
    if passes:
        assert check_config(tensors, config, NONE) == {"hidden_size"}
        tensors = tensors[1:]
    with pytest.raises(GeometryMismatch, match="num_hidden_layers is 1, but"):
        check_config(tensors, config, NONE)


def test_experts_are_those_that_the_config_counts():
    config = {"model_type": "mixtral", "num_local_experts": 3}
    names = [f"model.layers.0.block_sparse_moe.experts.{number}.w1.weight" for number in (0, 2)]
    with pytest.raises(
        GeometryMismatch, match=r"num_local_experts is 3, but .* 2 experts in layer 0; number 1 is the"
    ):
        check_config([(name, Source(0, "F32", (4, 4))) for name in names], config, NONE)


@pytest.mark.parametrize(("kind", "is_certain"), [("llama", True), ("mistral", False), ("mixtral", False)])
def test_key_value_heads_that_are_not_told_are_those_of_the_class(kind, is_certain):
    untold = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"model_type": kind}
    grouped = entries(q=(16, 16), k=(8, 16))
    if is_certain:
        with pytest.raises(GeometryMismatch, match=r"num_attention_heads is 4, but tensor .*k_proj"):
            check_config(grouped, untold, NONE)
    else:
        assert "num_attention_heads" in check_config(grouped, untold, NONE)
    with pytest.raises(GeometryMismatch, match=r"num_attention_heads is 4, but tensor .*k_proj"):
        check_config(grouped, untold | {"num_key_value_heads": None}, NONE)


def test_what_is_not_certain_is_not_compared():
    wrong = entries(q=(5, 7), k=(3, 7), e=(2, 2))
    assert check_config(wrong, LLAMA | {"model_type": "falcon"}, NONE) == set()
    packed = [(QUERY, Source(0, "U8", (128, 1)))]
    assert check_config(packed, LLAMA, NONE) == set()
    pruned = check_config(entries(q=(12, 16)), LLAMA | {"pruned_heads": {"0": [1]}}, NONE)
    assert pruned == {"hidden_size"}


def test_a_size_that_nothing_asks_for_is_refused_by_name():
    check_used(ConvertOptions(head_dim=3), {"head_dim"})
    with pytest.raises(InvalidOption, match="the option head_dim changes nothing"):
        check_used(ConvertOptions(head_dim=3, hidden_size=2), {"hidden_size"})


@pytest.mark.parametrize(
    ("config", "options", "corrected"),
    [
        ({"head_dim": 8}, {"head_dim": 4}, {"head_dim": 4}),
        ({}, {"head_dim": 4}, {}),
        ({}, {"head_dim": 5}, {"head_dim": 5}),
        ({}, {"num_attention_heads": 4}, {}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 4}, {}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 2}, {"num_key_value_heads": 2}),
    ],
)
def test_the_config_is_corrected_only_where_it_is_untrue(config, options, corrected):
    assert corrected_sizes(LLAMA | config, ConvertOptions(**options)) == corrected
