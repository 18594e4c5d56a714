"""Qwen's vision-language models.

Since transformers 4.52 their modules have names that the hub's files do not: the older names pass unchanged.
Qwen3-VL and later keep the module names on the hub; of them only the fused experts of Qwen3-VL-MoE differ, whose
orientation on the hub is that of transformers 4: [E, H, 2I] and [E, I, H].
Source: transformers 5 ``conversion_mapping.py`` ("Qwen2VLForConditionalGeneration", "qwen3_vl_moe").
"""

from __future__ import annotations

from workers.families.operations import Orient
from workers.families.rules import Rule, Table, rename

TABLES = (
    Table(
        "qwen2_vl",
        ("qwen2_vl", "qwen2_5_vl"),
        (
            rename("model.visual.{rest}", "visual.{rest}", (4, 52)),
            rename("model.language_model.{rest}", "model.{rest}", (4, 52)),
        ),
    ),
    Table(
        "qwen3_vl_moe",
        ("qwen3_vl_moe",),
        (
            Rule(
                ("{module}.mlp.experts.gate_up_proj",),
                ("{module}.mlp.experts.gate_up_proj",),
                (Orient(1, 2, "hidden_size", since=(5, 0)),),
            ),
            Rule(
                ("{module}.mlp.experts.down_proj",),
                ("{module}.mlp.experts.down_proj",),
                (Orient(2, 1, "hidden_size", since=(5, 0)),),
            ),
        ),
    ),
)
