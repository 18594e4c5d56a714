"""torchtitan's own names of language models, as its DCP checkpoints have them.

Names of 0.3 stand before those of 0.2 and older, so that backwards the newer are made. Experts are stacked on the
left side, each slice being the hub's matrix. Only llama 3 has its rotary rows in pairs.
Sources: torchtitan 0.1 to 0.3, ``models/*/state_dict_adapter.py`` (``from_hf_map``).
"""

from __future__ import annotations

from workers.families.fused_experts import LLAMA_NAMES
from workers.families.operations import Concatenate, Operation, Transpose, Unstack
from workers.families.rotary import PairsToHalves
from workers.families.rules import Count, Drop, Rule, Table, rename

NAMING = "torchtitan"

_LEFT, _RIGHT = "layers.{layer}.", "model.layers.{layer}."
_ATTENTION = ("attention.qkv_linear", "attention")
_EXPERTS = (("moe.routed_experts.inner_experts.", ("_EFD", "_EFD", "_EDF")), ("moe.experts.", ("", "", "")))
_OWN = ("w1", "w3", "w2")
_LAYERS = Count("layers.{layer}.{rest}", "layer", ("num_hidden_layers",), "layers")

_Names = tuple[tuple[str, str], ...]
"""Left and right side of rules that change names and nothing else."""

_MADE_ANEW = (
    Drop("freqs_cis", "rotary tables are made anew from the config"),
    Drop("{module}.freqs_cis", "rotary tables are made anew from the config"),
    Drop("rope.cache", "rotary tables are made anew from the config"),
    Drop("rope_cache", "rotary tables are made anew from the config"),
    Drop("{module}.rope.cache", "rotary tables are made anew from the config"),
    Drop("{module}.tokens_per_expert", "a counter of the training"),
    Drop("{module}.tokens_per_expert_E", "a counter of the training"),
)


def _ends(prefix: str = "model.", head: str = "lm_head.weight") -> tuple[Rule, ...]:
    return (
        rename("tok_embeddings.weight", f"{prefix}embed_tokens.weight"),
        rename("norm.weight", f"{prefix}norm.weight"),
        rename("lm_head.weight", head),
        rename("output.weight", head),
    )


def _placed(rules: _Names, left: str = _LEFT, right: str = _RIGHT) -> tuple[Rule, ...]:
    return tuple(rename(left + source, right + target) for source, target in rules)


_NORMS: _Names = (
    ("attention_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
)
_MLP: _Names = tuple(
    (f"feed_forward.{own}.weight", f"mlp.{hub}.weight") for own, hub in zip(_OWN, LLAMA_NAMES, strict=True)
)
_OUTPUT: _Names = tuple((f"attention.wo.{leaf}", f"self_attn.o_proj.{leaf}") for leaf in ("weight", "bias"))
_HEAD_NORMS: _Names = tuple((f"attention.{name}.weight", f"self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
_ROUTER: _Names = (
    ("moe.router.gate.weight", "mlp.gate.weight"),
    ("moe.expert_bias_E", "mlp.gate.e_score_correction_bias"),
    ("moe.expert_bias", "mlp.gate.e_score_correction_bias"),
)
_SHARED: _Names = tuple(
    (f"moe.shared_experts.{own}.weight", f"mlp.shared_experts.{hub}.weight")
    for own, hub in zip(_OWN, LLAMA_NAMES, strict=True)
)
_LATENT_ATTENTION: _Names = (
    ("attention.wkv_a.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight"),
    ("attention.wkv_b.weight", "self_attn.kv_b_proj.weight"),
    ("attention.wq_a.weight", "self_attn.q_a_proj.weight"),
    ("attention.q_norm.weight", "self_attn.q_a_layernorm.weight"),
    ("attention.wq_b.weight", "self_attn.q_b_proj.weight"),
    ("attention.wq.weight", "self_attn.q_proj.weight"),
)


def _projections(right: str = _RIGHT, *, pairs: bool = False) -> tuple[Rule, ...]:
    """Rules for q, k and v; ``pairs`` where rotary rows are in pairs."""
    moves: dict[str, tuple[Operation, ...]] = {"q": (), "k": (), "v": ()}
    if pairs:
        moves |= {"q": (PairsToHalves("query"),), "k": (PairsToHalves("key"),)}
    return tuple(
        Rule((f"{_LEFT}{module}.w{name}.{leaf}",), (f"{right}self_attn.{name}_proj.{leaf}",), moves[name])
        for module in _ATTENTION
        for name in "qkv"
        for leaf in ("weight", "bias")
    )


def _stacked_experts(left: str = _LEFT, right: str = _RIGHT) -> tuple[Rule, ...]:
    return tuple(
        Rule((f"{left}{module}{own}{end}",), (f"{right}mlp.experts.{{expert}}.{hub}.weight",), (Unstack(0),))
        for module, ends in _EXPERTS
        for own, end, hub in zip(_OWN, ends, LLAMA_NAMES, strict=True)
    )


_DEEPSEEK_LAYER = (*_LATENT_ATTENTION, *_NORMS, *_OUTPUT[:1], *_MLP, *_ROUTER, *_SHARED)
_MTP_LEFT, _MTP_RIGHT = "mtp_layers.{layer}.", "model.layers.{layer+num_hidden_layers}."
_MTP_OWN = (
    *((f"{name}.weight", f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")),
    ("mtp_norm.weight", "shared_head.norm.weight"),
)
_DEEPSEEK = (
    *_placed((*_MTP_OWN, *_DEEPSEEK_LAYER), _MTP_LEFT, _MTP_RIGHT),
    *_stacked_experts(_MTP_LEFT, _MTP_RIGHT),
    *_placed(_DEEPSEEK_LAYER),
    *_stacked_experts(),
)

# torchtitan's own export calls full-precision experts "_blocks", which is the hub's name for MXFP4: no model loads it.
_GPT_OSS: tuple[Rule | Drop, ...] = (
    *_projections(),
    *_placed(
        (
            *_NORMS,
            *_OUTPUT,
            ("attention.sinks", "self_attn.sinks"),
            ("moe.router.gate.weight", "mlp.router.weight"),
            ("moe.router.gate.bias", "mlp.router.bias"),
        )
    ),
    *(
        Rule((f"{_LEFT}{module}{own}",), (f"{_RIGHT}mlp.experts.{hub}",), operations)
        for module, _ in _EXPERTS
        for own, hub, operations in (
            ("mlp1_weight", "gate_up_proj", (Transpose(1, 2),)),
            ("mlp1_bias", "gate_up_proj_bias", ()),
            ("mlp2_weight", "down_proj", (Transpose(1, 2),)),
            ("mlp2_bias", "down_proj_bias", ()),
        )
    ),
    Drop("{module}.expert_bias", "the hub's gpt_oss has no bias of experts"),
    Drop("{module}.expert_bias_E", "the hub's gpt_oss has no bias of experts"),
)

_LLAMA4_RIGHT = "language_model.model.layers.{layer}."
_LLAMA4: tuple[Rule | Drop, ...] = (
    *_projections(_LLAMA4_RIGHT),
    *_placed(
        (
            *_NORMS,
            *_OUTPUT[:1],
            *((left, right.replace("mlp.", "feed_forward.", 1)) for left, right in _MLP),
            ("moe.router.gate.weight", "feed_forward.router.weight"),
            *(
                (left, right.replace("mlp.shared_experts.", "feed_forward.shared_expert.", 1))
                for left, right in _SHARED
            ),
        ),
        _LEFT,
        _LLAMA4_RIGHT,
    ),
    *(
        rule
        for module, ends in _EXPERTS
        for rule in (
            Rule(
                (f"{_LEFT}{module}w1{ends[0]}", f"{_LEFT}{module}w3{ends[1]}"),
                (f"{_LLAMA4_RIGHT}feed_forward.experts.gate_up_proj",),
                (Transpose(1, 2), Concatenate(2, 2)),
            ),
            Rule(
                (f"{_LEFT}{module}w2{ends[2]}",),
                (f"{_LLAMA4_RIGHT}feed_forward.experts.down_proj",),
                (Transpose(1, 2),),
            ),
        )
    ),
    Drop("{module}.expert_bias", "the hub's llama4 has no bias of experts"),
    Drop("{module}.expert_bias_E", "the hub's llama4 has no bias of experts"),
)


def _table(name: str, model_types: tuple[str, ...], *layer: Rule | Drop) -> Table:
    return Table(name, model_types, (*_MADE_ANEW, *_ends(), *layer), NAMING, counts=(_LAYERS,))


TABLES = (
    _table("torchtitan_llama3", ("llama",), *_projections(pairs=True), *_placed((*_NORMS, *_OUTPUT, *_MLP))),
    _table("torchtitan_qwen3", ("qwen3",), *_projections(), *_placed((*_NORMS, *_OUTPUT, *_HEAD_NORMS, *_MLP))),
    _table(
        "torchtitan_qwen3_moe",
        ("qwen3_moe",),
        *_projections(),
        *_placed((*_NORMS, *_OUTPUT, *_HEAD_NORMS, *_MLP, _ROUTER[0])),
        *_stacked_experts(),
        Drop("{module}.expert_bias", "the hub's qwen3_moe has no bias of experts"),
        Drop("{module}.expert_bias_E", "the hub's qwen3_moe has no bias of experts"),
    ),
    _table("torchtitan_deepseek", ("deepseek_v3", "deepseek_v2"), *_DEEPSEEK),
    _table("torchtitan_gpt_oss", ("gpt_oss",), *_GPT_OSS),
    Table(
        "torchtitan_llama4",
        ("llama4", "llama4_text"),
        (*_MADE_ANEW, *_ends("language_model.model.", "language_model.lm_head.weight"), *_LLAMA4),
        NAMING,
        counts=(_LAYERS,),
    ),
)
