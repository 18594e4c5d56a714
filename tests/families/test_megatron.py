"""Megatron's tables: random models of every family go to the hub's names and come back as they were."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.families.test_operations import values
from tests.test_expressions import Memory
from workers.errors import GeometryMismatch, UnmappedTensor
from workers.families import find_tables
from workers.families.checks import check_counts
from workers.families.megatron import NAMING, TABLES, VERL_NAMING
from workers.families.operations import Facts
from workers.families.registry import ANY_MODEL
from workers.families.rules import apply_rules

FAMILIES = [(table, kind) for table in TABLES if ANY_MODEL not in table.model_types for kind in table.model_types]
H = 4
BIASED = ("qwen2", "qwen2_moe", "glm4", "glm4_moe", "gpt_oss")
NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "glm4_moe")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe", "gpt_oss")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
GEMMA = ("gemma2", "gemma3_text")


@dataclass(frozen=True)
class Sizes:
    layers: int
    dense_layers: int
    groups: int
    ratio: int
    head: int
    inner: int
    experts: int
    next_layers: int
    vocabulary: int

    @property
    def facts(self) -> Facts:
        return Facts(
            {
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.groups * self.ratio,
                "num_key_value_heads": self.groups,
                "head_dim": self.head,
                "hidden_size": H,
                "vocab_size": self.vocabulary,
                "q_lora_rank": 5,
                "kv_lora_rank": 3,
                "qk_rope_head_dim": 2,
                "num_experts": self.experts,
            }
        )


SIZES = st.builds(
    Sizes,
    layers=st.integers(1, 3),
    dense_layers=st.integers(0, 1),
    groups=st.integers(1, 3),
    ratio=st.integers(1, 3),
    head=st.integers(1, 3),
    inner=st.integers(1, 3),
    experts=st.integers(1, 3),
    next_layers=st.integers(0, 2),
    vocabulary=st.integers(2, 5),
)


def attention(kind: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    heads = sizes.groups * sizes.ratio
    if kind in LATENT:
        return {
            "input_layernorm.weight": (H,),
            "self_attention.linear_q_down_proj.weight": (5, H),
            "self_attention.linear_q_up_proj.layer_norm_weight": (5,),
            "self_attention.linear_q_up_proj.weight": (heads * 3, 5),
            "self_attention.linear_kv_down_proj.weight": (5, H),
            "self_attention.linear_kv_up_proj.layer_norm_weight": (3,),
            "self_attention.linear_kv_up_proj.weight": (heads * 4, 3),
            "self_attention.linear_proj.weight": (H, heads),
        }
    rows = (heads + 2 * sizes.groups) * sizes.head
    found = {
        "self_attention.linear_qkv.layer_norm_weight": (H,),
        "self_attention.linear_qkv.weight": (rows, H),
        "self_attention.linear_proj.weight": (H, heads * sizes.head),
    }
    if kind in BIASED:
        found["self_attention.linear_qkv.bias"] = (rows,)
    if kind in NORMED:
        found |= {f"self_attention.{name}_layernorm.weight": (sizes.head,) for name in "qk"}
    if kind == "gpt_oss":
        found |= {"self_attention.linear_proj.bias": (H,), "self_attention.core_attention.softmax_offset": (heads,)}
    if kind in GEMMA:
        found["self_attention.linear_proj.post_layernorm.weight"] = (H,)
    return found


def dense(kind: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    found = {
        "mlp.linear_fc1.layer_norm_weight": (H,),
        "mlp.linear_fc1.weight": (2 * sizes.inner, H),
        "mlp.linear_fc2.weight": (H, sizes.inner),
    }
    if kind in GEMMA:
        found["mlp.linear_fc2.post_layernorm.weight"] = (H,)
    if kind == "glm4":
        found |= {f"post_{name}_layernorm.weight": (H,) for name in ("self_attn", "mlp")}
    return found


def mixture(kind: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    found = {"pre_mlp_layernorm.weight": (H,), "mlp.router.weight": (sizes.experts, H)}
    if kind == "gpt_oss":
        found["mlp.router.bias"] = (sizes.experts,)
    for expert in range(sizes.experts):
        module = f"mlp.experts.local_experts.{expert}"
        found |= {f"{module}.linear_fc1.weight": (2 * sizes.inner, H), f"{module}.linear_fc2.weight": (H, sizes.inner)}
        if kind == "gpt_oss":
            found |= {f"{module}.linear_fc1.bias": (2 * sizes.inner,), f"{module}.linear_fc2.bias": (H,)}
    if kind in (*LATENT, "glm4_moe", "qwen2_moe"):
        found |= {"mlp.shared_experts.linear_fc1.weight": (4, H), "mlp.shared_experts.linear_fc2.weight": (H, 2)}
    if kind == "qwen2_moe":
        found["mlp.shared_experts.gate_weight"] = (1, H)
    if kind in (*LATENT, "glm4_moe"):
        found["mlp.router.expert_bias"] = (sizes.experts,)
    return found


def verl_layer(kind: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    rows = sizes.groups * (sizes.ratio + 2) * sizes.head
    found = {
        "input_layernorm.weight": (H,),
        "self_attn.qkv_proj.weight": (rows, H),
        "self_attn.o_proj.weight": (H, sizes.groups * sizes.ratio * sizes.head),
        "mlp.gate_up_proj.weight": (2 * sizes.inner, H),
        "mlp.down_proj.weight": (H, sizes.inner),
        "post_attention_layernorm.weight": (H,),
    }
    return found | ({"self_attn.qkv_proj.bias": (rows,)} if kind in BIASED else {})


def model(naming: str, kind: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """A model's tensors in the framework's naming: as its layer specs make them."""
    verl = naming == VERL_NAMING
    ends = ("model.embed_tokens", "model.norm", "lm_head") if verl else None
    embedding, norm, head = ends or ("embedding.word_embeddings", "decoder.final_layernorm", "output_layer")
    found = {f"{embedding}.weight": (sizes.vocabulary, H)}
    has_dense = kind in (*LATENT, "glm4_moe", "qwen2_moe", "qwen3_moe")
    for layer in range(sizes.layers):
        is_mixture = kind in MIXTURES and not (has_dense and layer < sizes.dense_layers)
        parts = verl_layer(kind, sizes) if verl else attention(kind, sizes)
        if not verl:
            parts |= mixture(kind, sizes) if is_mixture else dense(kind, sizes)
        prefix = "model" if verl else "decoder"
        found |= {f"{prefix}.layers.{layer}.{name}": shape for name, shape in parts.items()}
    if kind in (*LATENT, "glm4_moe"):
        for layer in range(sizes.next_layers):
            found |= {f"mtp.layers.{layer}.{name}.weight": (H,) for name in ("enorm", "hnorm", "final_layernorm")}
            found[f"mtp.layers.{layer}.eh_proj.weight"] = (H, 2 * H)
            inner = attention(kind, sizes) | mixture(kind, sizes)
            found |= {f"mtp.layers.{layer}.transformer_layer.{name}": shape for name, shape in inner.items()}
    return found | {f"{norm}.weight": (H,), f"{head}.weight": (sizes.vocabulary, H)}


@pytest.mark.parametrize(("table", "kind"), FAMILIES, ids=lambda value: getattr(value, "name", value))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=SIZES)
def test_a_model_comes_back_from_the_hubs_names_as_it_was(table, kind, sizes):
    memory = Memory()
    entries = [(name, memory.source(shape)) for name, shape in model(table.naming, kind, sizes).items()]
    forth = apply_rules(table.rules, entries, sizes.facts)
    assert not forth.unmatched
    assert not forth.dropped
    assert all(name.startswith(("model.", "lm_head.")) for name, _ in forth.entries)
    back = apply_rules(table.inverse_rules((9, 9)), forth.entries, sizes.facts)
    assert not back.unmatched
    found = dict(back.entries)
    assert sorted(found) == sorted(name for name, _ in entries)
    for name, source in entries:
        assert found[name].shape == source.shape, name
        assert (values(found[name], memory) == memory.tensors[source.tensor]).all(), name


def test_the_local_layer_spec_has_other_names_for_the_same_norms():
    table = next(table for table in TABLES if table.name == "megatron_llama")
    memory = Memory()
    names = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    found = apply_rules(table.rules, [(f"decoder.layers.2.{name}", memory.source((3,))) for name in names], Facts())
    assert [name for name, _ in found.entries] == [
        "model.layers.2.input_layernorm.weight",
        "model.layers.2.post_attention_layernorm.weight",
    ]


def stored(names_and_shapes: dict[str, tuple[int, ...]]) -> tuple[list[str], Memory, list]:
    """What the tables for stored keys make of them."""
    memory = Memory()
    entries = [(name, memory.source(shape)) for name, shape in names_and_shapes.items()]
    for table in TABLES:
        if ANY_MODEL in table.model_types:
            entries = apply_rules(table.rules, entries, Facts()).entries
    return [name for name, _ in entries], memory, [expression for _, expression in entries]


def test_stacked_layers_and_experts_come_apart_in_the_order_of_their_axes():
    names, memory, made = stored({"decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 3, 4, 5)})
    assert names == [
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
        for layer in range(2)
        for expert in range(3)
    ]
    for number, expression in enumerate(made):
        assert (values(expression, memory) == memory.tensors[0][number // 3, number % 3]).all()


def test_layers_that_are_stored_one_by_one_keep_their_numbers():
    names, _, _ = stored(
        {
            "decoder.layers.7.mlp.experts.experts.linear_fc2.weight": (2, 3, 4),
            "decoder.layers.7.mlp.router.weight": (2, 3),
        }
    )
    assert names == [
        *(f"decoder.layers.7.mlp.experts.local_experts.{expert}.linear_fc2.weight" for expert in range(2)),
        "decoder.layers.7.mlp.router.weight",
    ]


def test_gate_and_up_that_are_stored_apart_are_joined():
    names, memory, made = stored(
        {f"decoder.layers.0.mlp.experts.experts.1.linear_fc1.weight_{half}": (2, 3) for half in "wv"}
    )
    assert names == ["decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"]
    assert (values(made[0], memory)[:2] == memory.tensors[0]).all()
    assert (values(made[0], memory)[2:] == memory.tensors[1]).all()


def test_layers_and_experts_are_counted():
    (table,) = [table for table in find_tables(NAMING, {"model_type": "mixtral"}) if table.name == "megatron_mixtral"]
    names = [f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight" for expert in range(2)]
    check_counts(names, table.counts, Facts({"num_hidden_layers": 1, "num_local_experts": 2}))
    with pytest.raises(GeometryMismatch, match="num_hidden_layers is 2, but the checkpoint holds 1 layers; number 1"):
        check_counts(names, table.counts, Facts({"num_hidden_layers": 2, "num_local_experts": 2}))
    with pytest.raises(GeometryMismatch, match=r"num_local_experts is 3.*holds 2 experts in layer 0; number 2"):
        check_counts(names, table.counts, Facts({"num_hidden_layers": 1, "num_local_experts": 3}))


def test_a_language_model_inside_of_another_has_no_table():
    config = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}}
    with pytest.raises(UnmappedTensor, match="the model family mistral3"):
        find_tables(NAMING, config)


def test_an_unknown_model_type_is_told_with_those_that_are_known():
    with pytest.raises(UnmappedTensor) as caught:
        find_tables(VERL_NAMING, {"model_type": "mixtral"})
    assert "llama, qwen2" in caught.value.hint
