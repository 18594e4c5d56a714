"""Sizes of tensors that several sizes of a config make together: heads times their parts, gate and up in one matrix.

For model types whose layers are not those that ``config_checks`` compares name by name.
Sources: transformers 5 ``modeling_deepseek_v2.py``, ``modeling_deepseek_v3.py``, ``modeling_glm4_moe_lite.py``,
``modeling_phi3.py``, ``modeling_glm4.py``, ``modeling_qwen3_next.py``, ``modeling_gpt_oss.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

LATENT = frozenset(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"))
"""Model types with multi-head latent attention, whose projections do not have the rows that others have."""

GATED = frozenset(("qwen3_next",))
"""Model types whose q_proj holds a gate beside each head's queries."""

FURTHER_LAYERS = (LATENT - {"deepseek_v2"}) | {"glm4_moe"}
"""Model types whose files may hold layers after the model's own, which predict further tokens."""

_LAYER = r"(?:model\.language_model\.|language_model\.model\.|model\.)layers\.\d+\."
_HEADS, _GROUPS, _SIZE = "num_attention_heads", "num_key_value_heads", "head_dim"

Term = tuple[str | int, ...]
"""Keys of the config, and numbers, that are multiplied."""


@dataclass(frozen=True, slots=True)
class SumCheck:
    """That dimension ``dim`` of the tensors whose names fit is the sum of these products; -1 is the last."""

    names: re.Pattern[str]
    dim: int
    terms: tuple[Term, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the config that make the size."""
        return tuple(dict.fromkeys(key for term in self.terms for key in term if isinstance(key, str)))

    @property
    def formula(self) -> str:
        """The sum as text."""
        return " + ".join(" * ".join(map(str, term)) for term in self.terms)

    def expected(self, sizes: Mapping[str, int]) -> int | None:
        """The size; None where a key is not told."""
        if not sizes.keys() >= set(self.keys):
            return None
        return sum(prod(sizes[key] if isinstance(key, str) else key for key in term) for term in self.terms)


def _check(name: str, dim: int, *terms: Term) -> SumCheck:
    return SumCheck(re.compile(_LAYER + name), dim, terms)


_LATENT_ATTENTION = (
    _check(r"self_attn\.q_a_proj\.weight", 0, ("q_lora_rank",)),
    _check(r"self_attn\.(q_a|kv_a)_proj(_with_mqa)?\.weight", 1, ("hidden_size",)),
    _check(r"self_attn\.q_a_layernorm\.weight", 0, ("q_lora_rank",)),
    _check(r"self_attn\.q_b_proj\.weight", 1, ("q_lora_rank",)),
    _check(r"self_attn\.(q|q_b)_proj\.weight", 0, (_HEADS, "qk_nope_head_dim"), (_HEADS, "qk_rope_head_dim")),
    _check(r"self_attn\.kv_a_proj_with_mqa\.weight", 0, ("kv_lora_rank",), ("qk_rope_head_dim",)),
    _check(r"self_attn\.kv_a_layernorm\.weight", 0, ("kv_lora_rank",)),
    _check(r"self_attn\.kv_b_proj\.weight", 0, (_HEADS, "qk_nope_head_dim"), (_HEADS, "v_head_dim")),
    _check(r"self_attn\.kv_b_proj\.weight", 1, ("kv_lora_rank",)),
    _check(r"self_attn\.o_proj\.weight", 1, (_HEADS, "v_head_dim")),
)
_SHARED = (
    _check(r"mlp\.shared_experts\.(gate|up)_proj\.weight", 0, ("n_shared_experts", "moe_intermediate_size")),
    _check(r"mlp\.shared_experts\.down_proj\.weight", 1, ("n_shared_experts", "moe_intermediate_size")),
)
_SHARED_EXPERT = (
    _check(r"mlp\.shared_expert\.(gate|up)_proj\.weight", 0, ("shared_expert_intermediate_size",)),
    _check(r"mlp\.shared_expert\.down_proj\.weight", 1, ("shared_expert_intermediate_size",)),
)
_GATE_AND_UP = (_check(r"mlp\.gate_up_proj\.weight", 0, (2, "intermediate_size")),)
_JOINED_HEADS = (_check(r"self_attn\.qkv_proj\.weight", 0, (_HEADS, _SIZE), (2, _GROUPS, _SIZE)),)
_OUTPUT = (_check(r"self_attn\.o_proj\.weight", 1, (_HEADS, _SIZE)),)

_KEYS, _VALUES = ("linear_num_key_heads", "linear_key_head_dim"), ("linear_num_value_heads", "linear_value_head_dim")
_LINEAR_ATTENTION = (
    _check(r"linear_attn\.in_proj_qkvz\.weight", 0, (2, *_KEYS), (2, *_VALUES)),
    _check(r"linear_attn\.in_proj_ba\.weight", 0, (2, "linear_num_value_heads")),
    _check(r"linear_attn\.conv1d\.weight", 0, (2, *_KEYS), _VALUES),
    _check(r"linear_attn\.(A_log|dt_bias)", 0, ("linear_num_value_heads",)),
    _check(r"linear_attn\.norm\.weight", 0, ("linear_value_head_dim",)),
    _check(r"linear_attn\.out_proj\.weight", 1, _VALUES),
)
_GATED_HEADS = (
    _check(r"self_attn\.q_proj\.weight", 0, (2, _HEADS, _SIZE)),
    _check(r"self_attn\.[kv]_proj\.weight", 0, (_GROUPS, _SIZE)),
    *_OUTPUT,
)
_FUSED_EXPERTS = (
    _check(r"mlp\.experts\.(gate_up|down)_proj", 0, ("num_local_experts",)),
    _check(r"mlp\.experts\.gate_up_proj(_bias)?", -1, (2, "intermediate_size")),
    _check(r"mlp\.experts\.down_proj", 1, ("intermediate_size",)),
    _check(r"mlp\.router\.weight", 0, ("num_local_experts",)),
    _check(r"self_attn\.sinks", 0, (_HEADS,)),
)

_BY_KIND: dict[str, tuple[SumCheck, ...]] = {
    **dict.fromkeys(LATENT, (*_LATENT_ATTENTION, *_SHARED)),
    "glm4": _GATE_AND_UP,
    "glm4_moe": _SHARED,
    "gpt_oss": _FUSED_EXPERTS,
    "phi3": (*_JOINED_HEADS, *_OUTPUT, *_GATE_AND_UP),
    "qwen2_moe": _SHARED_EXPERT,
    "qwen3_next": (*_GATED_HEADS, *_LINEAR_ATTENTION, *_SHARED_EXPERT),
}


def sum_checks(model_type: str) -> tuple[SumCheck, ...]:
    """What is compared for a language model of this type."""
    return _BY_KIND.get(model_type, ())
