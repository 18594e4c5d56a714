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
from workers.options import ConvertOptions

SHAPES = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"head_dim": 4},
    {"num_hidden_layers": 3, "hidden_size": 32},
)
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


@pytest.mark.parametrize("kind", sorted(CHECKED))
def test_a_right_model_passes(kind, tmp_path):
    compared = set()
    for number, shape in enumerate(SHAPES):
        folder = tmp_path / str(number)
        tiny_model(kind, **shape).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "pt") as file:
            found = [(name, Source(0, "F32", tuple(file.get_slice(name).get_shape()))) for name in file.keys()]  # noqa: SIM118 - no dict
        compared |= check_config(found, config, NONE)
    assert {"hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"} <= compared


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
    assert check_config(wrong, LLAMA | {"model_type": "deepseek_v3"}, NONE) == set()
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
