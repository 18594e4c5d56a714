"""A framework of one's own, from its files to a Hugging Face model, against numpy's picture of the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from workers.compare import compare_sources
from workers.convert import convert, plan
from workers.errors import GeometryMismatch, InvalidOption
from workers.manifest import DIGEST_PREFIX, digest
from workers.options import ConvertOptions

HEADS, GROUPS, SIZE, HIDDEN, INNER, LAYERS, VOCABULARY, EXPERTS = 4, 2, 4, 16, 12, 3, 40, 2
QKV = (HEADS + 2 * GROUPS) * SIZE
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.{layer}."
RULES = [
    {
        "source": "tok.weight",
        "target": "model.embed_tokens.weight",
        "operations": [{"op": "trim", "dim": 0, "size": "vocab_size"}],
    },
    *(
        {"source": f"stack.{own}", "target": f"{LAYER}{hub}.weight", "operations": [{"op": "unstack", "dim": 0}]}
        for own, hub in (("ln1", "input_layernorm"), ("ln2", "post_attention_layernorm"), ("route", "mlp.gate"))
    ),
    {
        "source": "stack.qkv",
        "targets": [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"],
        "operations": [{"op": "unstack", "dim": 0}, {"op": "split_groups"}],
    },
    {
        "source": "blk.{layer}.proj",
        "target": f"{LAYER}self_attn.o_proj.weight",
        "operations": [{"op": "transpose", "dims": [0, 1]}],
    },
    {
        "source": "blk.{layer}.experts.w13",
        "targets": [f"{LAYER}mlp.experts.{{expert}}.{x}_proj.weight" for x in ("gate", "up")],
        "operations": [
            {"op": "unstack", "dim": 0},
            {"op": "deinterleave", "dim": 0, "parts": 2},
            {"op": "split", "dim": 0, "parts": 2},
        ],
    },
    {
        "source": "blk.{layer}.experts.w2",
        "target": f"{LAYER}mlp.experts.{{expert}}.down_proj.weight",
        "operations": [{"op": "reshape", "shape": [EXPERTS, "hidden_size", -1]}, {"op": "unstack", "dim": 0}],
    },
    {"source": "norm", "target": "model.norm.weight"},
    {"keep": "lm_head.weight"},
    {"drop": "rope.{rest}", "reason": "computed"},
]
MAPPING = {"schema": 1, "name": "mine", "extends": "none", "rules": RULES}


def own_tensors():
    random = np.random.default_rng(7)

    def some(*shape):
        return random.standard_normal(shape).astype(np.float32)

    stacked = {
        "stack.ln1": some(LAYERS, HIDDEN),
        "stack.ln2": some(LAYERS, HIDDEN),
        "stack.route": some(LAYERS, EXPERTS, HIDDEN),
        "stack.qkv": some(LAYERS, QKV, HIDDEN),
    }
    layers = {}
    for layer in range(LAYERS):
        layers[f"blk.{layer}.proj"] = some(HEADS * SIZE, HIDDEN)
        layers[f"blk.{layer}.experts.w13"] = some(EXPERTS, 2 * INNER, HIDDEN)
        layers[f"blk.{layer}.experts.w2"] = some(EXPERTS * HIDDEN * INNER)
    ends = {"tok.weight": some(48, HIDDEN), "norm": some(HIDDEN), "lm_head.weight": some(VOCABULARY, HIDDEN)}
    return {**stacked, **layers, **ends, "rope.cos": some(3)}


def hub_tensors(own):
    """What the model must be, said without a rule."""
    made = {
        "model.embed_tokens.weight": own["tok.weight"][:VOCABULARY],
        "model.norm.weight": own["norm"],
        "lm_head.weight": own["lm_head.weight"],
    }
    for layer in range(LAYERS):
        place = f"model.layers.{layer}."
        made[f"{place}input_layernorm.weight"] = own["stack.ln1"][layer]
        made[f"{place}post_attention_layernorm.weight"] = own["stack.ln2"][layer]
        made[f"{place}mlp.gate.weight"] = own["stack.route"][layer]
        grouped = own["stack.qkv"][layer].reshape(GROUPS, -1, SIZE, HIDDEN)
        for name, rows in (("q", grouped[:, :-2]), ("k", grouped[:, -2]), ("v", grouped[:, -1])):
            made[f"{place}self_attn.{name}_proj.weight"] = rows.reshape(-1, HIDDEN)
        made[f"{place}self_attn.o_proj.weight"] = own[f"blk.{layer}.proj"].T
        for expert in range(EXPERTS):
            below = f"{place}mlp.experts.{expert}."
            both = own[f"blk.{layer}.experts.w13"][expert]
            made[f"{below}gate_proj.weight"], made[f"{below}up_proj.weight"] = both[::2], both[1::2]
            down = own[f"blk.{layer}.experts.w2"].reshape(EXPERTS, HIDDEN, INNER)
            made[f"{below}down_proj.weight"] = down[expert]
    return made


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    save_file(own_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def loaded(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("shard", ["5GB", "4KB"])
def test_every_bit_is_where_the_mapping_says(source, tmp_path, shard):
    (tmp_path / "m.json").write_text(json.dumps(MAPPING))
    options = ConvertOptions(mapping=str(tmp_path / "m.json"), max_shard_size=shard)
    convert(str(source), str(tmp_path / "model"), options)
    found, expected = loaded(tmp_path / "model"), hub_tensors(own_tensors())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].view(np.uint32), np.ascontiguousarray(values).view(np.uint32), name)


def test_the_manifest_holds_the_mapping_so_that_the_model_can_be_verified_without_the_file(source, tmp_path):
    file = tmp_path / "m.json"
    file.write_text(json.dumps(MAPPING, indent=1))
    result = convert(str(source), str(tmp_path / "model"), ConvertOptions(mapping=str(file)))
    text = result.manifest["options"]["mapping"]
    assert json.loads(text) == MAPPING
    assert result.manifest["mapping"] == DIGEST_PREFIX + digest(text.encode())
    assert result.manifest["dropped"][0] == {"name": "rope.cos", "reason": "computed"}
    assert result.manifest["source"]["family"] == "mine (mapping)"
    file.unlink()
    report = compare_sources(str(source), str(tmp_path / "model"))
    assert report.equal
    assert "with the options of unshard.json: mapping" in report.checks


def test_a_model_is_verified_whose_source_says_nothing_without_the_mapping(source, tmp_path):
    own = load_file(source / "model.safetensors")
    own["model.embed_tokens.weight"] = own.pop("tok.weight")  # a name of the hub, in a shape that the config denies
    save_file(own, source / "model.safetensors")
    rules = [{**RULES[0], "source": "model.embed_tokens.weight"}, *RULES[1:]]
    options = ConvertOptions(mapping=json.dumps({**MAPPING, "rules": rules}))
    convert(str(source), str(tmp_path / "model"), options)
    with pytest.raises(GeometryMismatch, match="vocab_size is 40"):
        plan(str(source), str(tmp_path / "other"))
    assert compare_sources(str(source), str(tmp_path / "model")).equal


def test_a_mapping_is_part_of_the_fingerprint_and_its_file_is_not(source, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(MAPPING, indent=3))
    other = {**MAPPING, "rules": [*RULES, {"keep": "nothing"}]}
    made = [
        plan(str(source), str(tmp_path / "model"), ConvertOptions(mapping=option)).fingerprint
        for option in (str(tmp_path / "m.json"), json.dumps(MAPPING), json.dumps(other))
    ]
    assert made[0] == made[1] != made[2]


def test_a_familys_rules_follow_those_of_the_file(source, tmp_path):
    """The family of megatron-like names is not what this source has: names of the hub are left as they are."""
    renamed = {**MAPPING, "rules": RULES[:-3]}
    del renamed["extends"]
    summary = plan(str(source), str(tmp_path / "model"), ConvertOptions(mapping=json.dumps(renamed))).table()
    assert {"norm", "lm_head.weight", "rope.cos"} < {row["name"] for row in summary}


def test_a_url_is_read_like_a_path(source, tmp_path):
    (tmp_path / "m.yaml").write_text(json.dumps(MAPPING))
    made = plan(str(source), str(tmp_path / "model"), ConvertOptions(mapping=f"file://{tmp_path}/m.yaml"))
    assert json.loads(made.options.mapping) == MAPPING


def test_an_object_is_taken_as_its_text_and_nothing_else_is():
    assert json.loads(ConvertOptions.from_dict({"mapping": MAPPING}).mapping) == MAPPING
    with pytest.raises(InvalidOption, match="option mapping: 3 is not one of: a text, null, an object"):
        ConvertOptions.from_dict({"mapping": 3})
