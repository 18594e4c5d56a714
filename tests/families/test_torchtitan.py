"""torchtitan's tables: there and back, names of both generations, and the rotary rows of llama 3."""

from __future__ import annotations

import numpy as np
import pytest

from tests.families.test_operations import values
from tests.test_expressions import Memory
from workers.errors import GeometryMismatch
from workers.families.operations import Facts
from workers.families.rotary import HalvesToPairs, PairsToHalves
from workers.families.rules import apply_rules
from workers.families.torchtitan import TABLES
from workers.formats._state_dict import naming_of
from workers.options import ConvertOptions

H, HEAD, QUERIES, GROUPS, INNER, EXPERTS = 8, 4, 6, 2, 10, 3
FACTS = Facts(
    {
        "num_hidden_layers": 2,
        "num_attention_heads": QUERIES,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "hidden_size": H,
    }
)
DENSE = {
    "attention.wo.weight": (H, QUERIES * HEAD),
    "attention_norm.weight": (H,),
    "ffn_norm.weight": (H,),
    "feed_forward.w1.weight": (INNER, H),
    "feed_forward.w2.weight": (H, INNER),
    "feed_forward.w3.weight": (INNER, H),
}
MIXTURE = {
    "attention.wo.weight": (H, QUERIES * HEAD),
    "attention_norm.weight": (H,),
    "ffn_norm.weight": (H,),
    "moe.router.gate.weight": (EXPERTS, H),
    "moe.routed_experts.inner_experts.w1_EFD": (EXPERTS, INNER, H),
    "moe.routed_experts.inner_experts.w2_EDF": (EXPERTS, H, INNER),
    "moe.routed_experts.inner_experts.w3_EFD": (EXPERTS, INNER, H),
}
NORMS = {"attention.q_norm.weight": (HEAD,), "attention.k_norm.weight": (HEAD,)}
LATENT = {
    "attention.wkv_a.weight": (5, H),
    "attention.kv_norm.weight": (3,),
    "attention.wkv_b.weight": (12, 3),
    "attention.wq_a.weight": (7, H),
    "attention.q_norm.weight": (7,),
    "attention.wq_b.weight": (14, 7),
    "moe.shared_experts.w1.weight": (INNER, H),
    "moe.shared_experts.w2.weight": (H, INNER),
    "moe.shared_experts.w3.weight": (INNER, H),
    "moe.expert_bias_E": (EXPERTS,),
}
GPT_OSS = {
    "attention.wo.weight": (H, QUERIES * HEAD),
    "attention.wo.bias": (H,),
    "attention.sinks": (QUERIES,),
    "attention_norm.weight": (H,),
    "ffn_norm.weight": (H,),
    "moe.router.gate.weight": (EXPERTS, H),
    "moe.router.gate.bias": (EXPERTS,),
    "moe.routed_experts.inner_experts.mlp1_weight": (EXPERTS, 2 * INNER, H),
    "moe.routed_experts.inner_experts.mlp1_bias": (EXPERTS, 2 * INNER),
    "moe.routed_experts.inner_experts.mlp2_weight": (EXPERTS, H, INNER),
    "moe.routed_experts.inner_experts.mlp2_bias": (EXPERTS, H),
}
LAYERS = {
    "torchtitan_llama3": DENSE,
    "torchtitan_qwen3": DENSE | NORMS,
    "torchtitan_qwen3_moe": MIXTURE | NORMS,
    "torchtitan_deepseek": MIXTURE | LATENT,
    "torchtitan_gpt_oss": GPT_OSS,
    "torchtitan_llama4": DENSE | MIXTURE,
}
BY_NAME = {table.name: table for table in TABLES}


def projections(module: str) -> dict[str, tuple[int, ...]]:
    rows = {"q": QUERIES * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
    return {f"{module}.w{name}.weight": (count, H) for name, count in rows.items()}


def model(memory: Memory, name: str, module: str = "attention.qkv_linear"):
    layer = LAYERS[name] | ({} if name == "torchtitan_deepseek" else projections(module))
    shapes = {f"layers.{number}.{part}": shape for number in range(2) for part, shape in layer.items()}
    shapes |= {"tok_embeddings.weight": (9, H), "norm.weight": (H,), "lm_head.weight": (9, H)}
    return [(tensor, memory.source(shape)) for tensor, shape in shapes.items()]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_model_goes_to_the_hubs_names_and_back(name):
    memory, table = Memory(), BY_NAME[name]
    before = model(memory, name)
    there = apply_rules(table.rules, before, FACTS)
    assert not there.unmatched
    assert not there.dropped
    back = apply_rules(table.inverse_rules((5, 0)), there.entries, FACTS)
    assert not back.unmatched
    found = dict(back.entries)
    assert sorted(found) == sorted(tensor for tensor, _ in before)
    for tensor, expression in before:
        assert (values(found[tensor], memory) == values(expression, memory)).all(), tensor


def test_names_of_the_older_generation_become_the_same():
    newer, older = Memory(), Memory()
    table = BY_NAME["torchtitan_llama3"]
    before = [(name.replace("lm_head", "output"), tensor) for name, tensor in model(older, table.name, "attention")]
    one = [name for name, _ in apply_rules(table.rules, model(newer, table.name), FACTS).entries]
    assert one == [name for name, _ in apply_rules(table.rules, before, FACTS).entries]


def test_experts_are_taken_apart_and_counters_dropped():
    memory, table = Memory(), BY_NAME["torchtitan_qwen3_moe"]
    extra = [("layers.0.moe.tokens_per_expert_E", memory.source((EXPERTS,)))]
    applied = apply_rules(table.rules, [*model(memory, table.name), *extra], FACTS)
    assert [name for name, _ in applied.dropped] == ["layers.0.moe.tokens_per_expert_E"]
    names = {name for name, _ in applied.entries}
    assert {f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(EXPERTS)} <= names


@pytest.mark.parametrize(("projection", "heads"), [("query", QUERIES), ("key", GROUPS)])
def test_rotary_pairs_become_halves_as_transformers_own_script_has_it(projection, heads):
    memory = Memory()
    source = memory.source((heads * HEAD, H))
    ((found,),) = PairsToHalves(projection).apply(((source,),), FACTS)
    plain = values(source, memory)
    expected = plain.reshape(heads, HEAD // 2, 2, H).swapaxes(1, 2).reshape(heads * HEAD, H)
    assert (values(found, memory) == expected).all()
    ((back,),) = HalvesToPairs(projection).apply(((found,),), FACTS)
    assert np.array_equal(values(back, memory), plain)
    with pytest.raises(GeometryMismatch, match="heads"):
        PairsToHalves(projection).apply(((memory.source((heads * HEAD + 2, H)),),), FACTS)


def test_torchtitans_output_head_has_the_hubs_name_and_no_other_tensor_may():
    names = ["tok_embeddings.weight", "layers.0.attention_norm.weight", "norm.weight", "lm_head.weight"]
    assert naming_of(names, ConvertOptions()) == "torchtitan"
    with pytest.raises(GeometryMismatch, match="mixes names"):
        naming_of([*names, "model.layers.1.input_layernorm.weight"], ConvertOptions())
