"""Megatron-Core's names of language models, and those of verl's own Megatron modules of before verl 0.4.

The left side has one tensor per layer and expert under its global number, ``linear_fc1`` as [gate; up] and
``linear_qkv`` in groups by key-value head: what ``dist_checkpointing`` holds whole, and what rank files have when put
together. Names of the local layer spec and of the TransformerEngine spec are both known; backwards the latter is made.
Sources: Megatron-Core 0.16 and 0.19 (``gpt_layer_specs.py``, ``transformer_layer.py``, ``multi_token_prediction.py``),
mbridge 0.15, Megatron-Bridge 0.3 (``models/conversion``), verl 0.3 (``models/llama/megatron``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from workers.families.fused_experts import LLAMA_NAMES, MIXTRAL_NAMES
from workers.families.operations import Concatenate, Split, Stack, Transpose, Unstack
from workers.families.registry import ANY_MODEL
from workers.families.row_operations import CutRows, ExpectRows, Interleave, SplitGroups, SplitHeads
from workers.families.rules import Count, Drop, Rule, Table, rename

NAMING = "megatron"
VERL_NAMING = "verl-megatron"

EXPERT = "mlp.experts.local_experts.{expert}"
"""An expert by its global number, as SequentialMLP names it."""

_LEFT, _RIGHT = "decoder.layers.{layer}.", "model.layers.{layer}."
_NEXT_LEFT, _NEXT_RIGHT = "mtp.layers.{layer}.", "model.layers.{layer+num_hidden_layers}."
# The second is what Megatron-Core calls it since 2026.
_NEXT_INNER = ("transformer_layer.", "mtp_model_layer.")

_LAYERS = Count("decoder.layers.{layer}.{rest}", "layer", ("num_hidden_layers",), "layers")
_EXPERTS = Count(
    f"decoder.layers.{{layer}}.{EXPERT}.linear_fc1.weight",
    "expert",
    ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts",
)


def ends(left: str = "", right: str = "model.", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    """Rules for the embedding, the last norm and the head of a language model below these prefixes."""
    return (
        Rule((f"{left}embedding.word_embeddings.weight",), (f"{right}embed_tokens.weight",), (CutRows("vocab_size"),)),
        rename(f"{left}decoder.final_layernorm.weight", f"{right}norm.weight"),
        Rule((f"{left}output_layer.weight",), (head,), (CutRows("vocab_size", or_single=True),)),
    )


def glu(left: str, names: tuple[str, str, str], leaves: tuple[str, ...] = ("weight",)) -> tuple[Rule, ...]:
    """Rules for a gated MLP: ``left.linear_fc1`` and ``left.linear_fc2``."""
    gate, up, down = names
    return tuple(
        rule
        for leaf in leaves
        for rule in (
            Rule((f"{left}.linear_fc1.{leaf}",), (f"{gate}.{leaf}", f"{up}.{leaf}"), (Split(0, 2),)),
            rename(f"{left}.linear_fc2.{leaf}", f"{down}.{leaf}"),
        )
    )


def _below(module: str, names: tuple[str, str, str] = LLAMA_NAMES) -> tuple[str, str, str]:
    gate, up, down = (f"{module}.{name}" for name in names)
    return gate, up, down


_QUERY_KEY_VALUE = tuple(
    Rule(
        (f"self_attention.linear_qkv.{leaf}",),
        tuple(f"self_attn.{name}_proj.{leaf}" for name in "qkv"),
        (SplitGroups(),),
    )
    for leaf in ("weight", "bias")
)
ATTENTION = (
    *_QUERY_KEY_VALUE,
    rename("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    rename("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    rename("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
BEFORE_ATTENTION = (
    rename("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    rename("input_layernorm.weight", "input_layernorm.weight"),
)
BEFORE_MLP = (
    rename("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    rename("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
_MLP = glu("mlp", _below("mlp"))
DENSE = (*BEFORE_ATTENTION, *ATTENTION, *BEFORE_MLP, *_MLP)


def _mixture(gate: str, experts: str, names: tuple[str, str, str] = LLAMA_NAMES) -> tuple[Rule, ...]:
    """Rules for the router, the experts and the norm before them; ``gate`` is the router on the right side."""
    return (
        replace(BEFORE_MLP[1], back_beside=f"{gate}.weight"),
        rename("mlp.router.weight", f"{gate}.weight"),
        rename("mlp.router.expert_bias", f"{gate}.e_score_correction_bias"),
        *glu(EXPERT, _below(f"{experts}.{{expert}}", names)),
    )


_QWEN_MIXTURE = _mixture("mlp.gate", "mlp.experts")
_SHARED = glu("mlp.shared_experts", _below("mlp.shared_experts"))
_SHARED_WITH_GATE = (
    *glu("mlp.shared_experts", _below("mlp.shared_expert")),
    rename("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
)
# No rows change places: Megatron-Core takes DeepSeek's rotary order as it is.
_LATENT_ATTENTION = (
    rename("input_layernorm.weight", "input_layernorm.weight"),
    rename("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    Rule(
        ("self_attention.linear_q_down_proj.weight",),
        ("self_attn.q_a_proj.weight",),
        (ExpectRows(("q_lora_rank",)),),
    ),
    rename("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight"),
    rename("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    rename("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    Rule(
        ("self_attention.linear_kv_down_proj.weight",),
        ("self_attn.kv_a_proj_with_mqa.weight",),
        (ExpectRows(("kv_lora_rank", "qk_rope_head_dim")),),
    ),
    rename("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight"),
    rename("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    rename("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    rename("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
GEMMA = (
    *BEFORE_ATTENTION,
    *ATTENTION,
    rename("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"),
    rename("mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight"),
    rename("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"),
    rename("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
    *_MLP,
)
_GLM4 = (
    *BEFORE_ATTENTION,
    *ATTENTION,
    *BEFORE_MLP,
    rename("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight"),
    rename("post_mlp_layernorm.weight", "post_mlp_layernorm.weight"),
    rename("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight"),
    rename("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
# The hub has the experts stacked and transposed, gate and up in turns on the last dimension.
_GPT_OSS = (
    *BEFORE_ATTENTION,
    *ATTENTION,
    rename("self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
    rename("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
    replace(BEFORE_MLP[1], back_beside="mlp.router.weight"),
    BEFORE_MLP[0],
    rename("mlp.router.weight", "mlp.router.weight"),
    rename("mlp.router.bias", "mlp.router.bias"),
    Rule(
        (f"{EXPERT}.linear_fc1.weight",),
        ("mlp.experts.gate_up_proj",),
        (Stack(0), Interleave(1, 2), Transpose(1, 2)),
    ),
    Rule((f"{EXPERT}.linear_fc1.bias",), ("mlp.experts.gate_up_proj_bias",), (Stack(0), Interleave(1, 2))),
    Rule((f"{EXPERT}.linear_fc2.weight",), ("mlp.experts.down_proj",), (Stack(0), Transpose(1, 2))),
    Rule((f"{EXPERT}.linear_fc2.bias",), ("mlp.experts.down_proj_bias",), (Stack(0),)),
)


def placed(rules: Iterable[Rule], left: str, right: str) -> tuple[Rule, ...]:
    """The rules of a layer for layers that stand below these prefixes."""
    return tuple(
        replace(
            rule,
            sources=tuple(left + name for name in rule.sources),
            targets=tuple(right + name for name in rule.targets),
            back_beside=right + rule.back_beside if rule.back_beside else "",
        )
        for rule in rules
    )


def _next_token(layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Rules for layers that predict further tokens (MTP); the hub counts them after the model's own."""
    own = (
        *(rename(f"{name}.weight", f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")),
        rename("final_layernorm.weight", "shared_head.norm.weight"),
    )
    inner = (rule for name in _NEXT_INNER for rule in placed(layer, _NEXT_LEFT + name, _NEXT_RIGHT))
    return (*placed(own, _NEXT_LEFT, _NEXT_RIGHT), *inner)


def _table(
    name: str, model_types: tuple[str, ...], layer: tuple[Rule, ...], *, experts: bool = False, mtp: bool = False
) -> Table:
    # Layers after the model's own come first: to them the pattern of any layer would fit as well.
    rules = (*(_next_token(layer) if mtp else ()), *ends(), *placed(layer, _LEFT, _RIGHT))
    counts = (_LAYERS, _EXPERTS) if experts else (_LAYERS,)
    return Table(name, model_types, rules, NAMING, counts=counts, inside=False)


_MIXTRAL = (
    *BEFORE_ATTENTION,
    *ATTENTION,
    *_mixture("block_sparse_moe.gate", "block_sparse_moe.experts", MIXTRAL_NAMES),
    BEFORE_MLP[0],
)
_QWEN3_MOE = (*BEFORE_ATTENTION, *ATTENTION, *_QWEN_MIXTURE, *BEFORE_MLP[:1], *_MLP)

_VERL_LAYER = (
    *(
        Rule(
            (f"self_attn.qkv_proj.{leaf}",),
            tuple(f"self_attn.{name}_proj.{leaf}" for name in "qkv"),
            (SplitHeads(),),
        )
        for leaf in ("weight", "bias")
    ),
    Rule(("mlp.gate_up_proj.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), (Split(0, 2),)),
    *(
        rename(f"{name}.weight", f"{name}.weight")
        for name in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    ),
)
_VERL_ENDS = (
    Rule(("model.embed_tokens.weight",), ("model.embed_tokens.weight",), (CutRows("vocab_size"),)),
    rename("model.norm.weight", "model.norm.weight"),
    Rule(("lm_head.weight",), ("lm_head.weight",), (CutRows("vocab_size", or_single=True),)),
    # verl 0.1 and 0.2 call the head of a value model so.
    rename("reward_head.weight", "lm_head.weight"),
    Drop("{module}.rotary_emb.inv_freq", "made anew from the config"),
)

# What dist_checkpointing stores together: layers, then experts, or in halves.
_STORED = (
    Table(
        "megatron_stacked_layers",
        (ANY_MODEL,),
        (
            *(
                rule
                for part in ("", "language_model.", "vision_model.")
                for rule in (
                    rename(f"{part}decoder.layers.{{layer}}.{{rest}}", f"{part}decoder.layers.{{layer}}.{{rest}}"),
                    Rule(
                        (f"{part}decoder.layers.{{rest}}",),
                        (f"{part}decoder.layers.{{layer}}.{{rest}}",),
                        (Unstack(0),),
                    ),
                )
            ),
        ),
        NAMING,
    ),
    Table(
        "megatron_stacked_experts",
        (ANY_MODEL,),
        (
            rename("{module}.mlp.experts.experts.{expert}.{rest}", f"{{module}}.{EXPERT}.{{rest}}"),
            Rule(("{module}.mlp.experts.experts.{rest}",), (f"{{module}}.{EXPERT}.{{rest}}",), (Unstack(0),)),
        ),
        NAMING,
    ),
    Table(
        "megatron_gate_and_up",
        (ANY_MODEL,),
        (
            *(
                Rule(
                    (f"{{module}}.linear_fc1.{leaf}_w", f"{{module}}.linear_fc1.{leaf}_v"),
                    (f"{{module}}.linear_fc1.{leaf}",),
                    (Concatenate(0, 2),),
                )
                for leaf in ("weight", "bias")
            ),
        ),
        NAMING,
    ),
)

TABLES = (
    *_STORED,
    _table("megatron_llama", ("llama", "mistral", "qwen2", "qwen3", "gemma"), DENSE),
    _table("megatron_mixtral", ("mixtral",), _MIXTRAL, experts=True),
    _table("megatron_qwen2_moe", ("qwen2_moe",), (*_QWEN3_MOE, *_SHARED_WITH_GATE), experts=True),
    _table("megatron_qwen3_moe", ("qwen3_moe",), _QWEN3_MOE, experts=True),
    _table(
        "megatron_deepseek",
        ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        (*_LATENT_ATTENTION, *_QWEN_MIXTURE, *_SHARED, *BEFORE_MLP[:1], *_MLP),
        experts=True,
        mtp=True,
    ),
    _table("megatron_glm4_moe", ("glm4_moe",), (*_QWEN3_MOE, *_SHARED), experts=True, mtp=True),
    _table("megatron_gemma", ("gemma2", "gemma3_text"), GEMMA),
    _table("megatron_glm4", ("glm4",), _GLM4),
    _table("megatron_gpt_oss", ("gpt_oss",), _GPT_OSS, experts=True),
    Table(
        "verl_megatron",
        ("llama", "qwen2"),
        (*_VERL_ENDS, *placed(_VERL_LAYER, _RIGHT, _RIGHT)),
        VERL_NAMING,
        counts=(Count("model.layers.{layer}.{rest}", "layer", ("num_hidden_layers",), "layers"),),
        inside=False,
    ),
)
