"""Mixtures of experts that transformers 5 keeps fused in the module and the hub keeps one by one.

E experts, I their inner size, H the hidden size: ``gate_up_proj`` [E, 2I, H] holds gate above up, ``down_proj``
[E, H, I]. Models whose hub files are fused as well (gpt_oss, llama4, qwen3_5_moe) have no table: their names stay.
transformers 4 has a module per expert, whose names are the hub's and fit no rule here.
Source: transformers 5 ``conversion_mapping.py``.
"""

from __future__ import annotations

from workers.families.operations import Split, Unstack
from workers.families.rules import Rule, Table, rename

FUSED_SINCE = (5, 0)


def per_expert(module: str, hub: str, names: tuple[str, str, str]) -> tuple[Rule, Rule]:
    """Rules for fused experts under ``module``, named one by one under ``hub`` with these names for gate, up, down."""
    gate, up, down = (f"{hub}.{{expert}}.{name}.weight" for name in names)
    return (
        Rule((f"{module}.gate_up_proj",), (gate, up), (Split(1, 2), Unstack(0)), FUSED_SINCE),
        Rule((f"{module}.down_proj",), (down,), (Unstack(0),), FUSED_SINCE),
    )


LLAMA_NAMES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ("w1", "w3", "w2")

_QWEN2_MOE = per_expert("{module}.mlp.experts", "{module}.mlp.experts", LLAMA_NAMES)
_MIXTRAL = per_expert("{module}.mlp.experts", "{module}.block_sparse_moe.experts", MIXTRAL_NAMES)
_BIAS = "e_score_correction_bias"

TABLES = (
    Table(
        "qwen2_moe",
        (
            "afmoe",
            "cohere2_moe",
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "glm_moe_dsa",
            "hunyuan_v1_moe",
            "longcat_flash",
            "mellum",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_omni_moe",
            "qwen3_omni_moe_thinker",
            "solar_open",
        ),
        _QWEN2_MOE,
    ),
    Table(
        "ernie4_5_moe",
        ("ernie4_5_moe",),
        (
            *_QWEN2_MOE,
            rename(f"{{module}}.mlp.gate.moe_statics.{_BIAS}", f"{{module}}.mlp.moe_statics.{_BIAS}", FUSED_SINCE),
        ),
        keep_float32=(".mlp.gate.weight",),
    ),
    Table(
        "exaone_moe",
        ("exaone_moe",),
        (*_QWEN2_MOE, rename(f"{{module}}.mlp.gate.{_BIAS}", f"{{module}}.mlp.{_BIAS}", FUSED_SINCE)),
    ),
    Table(
        "laguna",
        ("laguna",),
        (
            *_QWEN2_MOE,
            rename(f"{{module}}.mlp.gate.{_BIAS}", f"{{module}}.mlp.experts.{_BIAS}", FUSED_SINCE),
            rename("{module}.mlp.shared_experts.{rest}", "{module}.mlp.shared_expert.{rest}", FUSED_SINCE),
        ),
    ),
    Table(
        "hy_v3",
        ("hy_v3",),
        (
            *_QWEN2_MOE,
            rename("{module}.mlp.gate.weight", "{module}.mlp.router.gate.weight", FUSED_SINCE),
            rename(f"{{module}}.mlp.{_BIAS}", "{module}.mlp.expert_bias", FUSED_SINCE),
            rename("{module}.mlp.shared_experts.{rest}", "{module}.mlp.shared_mlp.{rest}", FUSED_SINCE),
        ),
    ),
    Table(
        "mixtral",
        ("mixtral", "minimax", "minimax_m2"),
        (
            *_MIXTRAL,
            rename("{module}.mlp.gate.weight", "{module}.block_sparse_moe.gate.weight", FUSED_SINCE),
            rename(f"{{module}}.mlp.{_BIAS}", f"{{module}}.block_sparse_moe.{_BIAS}", FUSED_SINCE),
        ),
    ),
    Table(
        "phimoe",
        ("phimoe",),
        (*_MIXTRAL, rename("{module}.mlp.router.weight", "{module}.block_sparse_moe.gate.weight", FUSED_SINCE)),
    ),
    Table(
        "lfm2_moe",
        ("lfm2_moe",),
        per_expert("{module}.feed_forward.experts", "{module}.feed_forward.experts", MIXTRAL_NAMES),
    ),
    Table(
        "jamba",
        ("jamba",),
        per_expert("{module}.feed_forward.experts", "{module}.feed_forward.experts", LLAMA_NAMES),
    ),
)
