"""Vision-language models of Qwen and Gemma under Megatron's names: towers of Megatron's layers, or the hub's own.

mbridge, and Megatron-Bridge for Qwen3-VL, build the tower of Megatron's layers: ``linear_qkv`` in groups by head,
where the hub's ``attn.qkv`` has all queries, all keys, all values. Megatron-Bridge keeps the hub's own modules for
Qwen2.5-VL and Gemma 3, and at first for Qwen3-VL. Backwards Megatron's layers are made.
Sources: mbridge 0.15 ``models/qwen2_5_vl``, ``models/qwen3_vl``; Megatron-Bridge 0.2 to 0.4 ``models/qwen_vl``,
``models/gemma_vl``.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.families.megatron import (
    ATTENTION,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    DENSE,
    EXPERT,
    GEMMA,
    NAMING,
    ends,
    glu,
    placed,
)
from workers.families.operations import Stack, Transpose
from workers.families.rules import Count, Rule, Table, rename
from workers.families.vision_operations import ExpectShape, HeadsToParts

LANGUAGE = "language_model."
TOWER = "vision_model."
LAYER = "decoder.layers.{layer}."
_LEAVES = ("weight", "bias")
_HEADS = "vision_config.num_heads"
# A merger reads so many patches at once.
_MERGED = ("vision_config.hidden_size", "vision_config.spatial_merge_size", "vision_config.spatial_merge_size")

_LAYERS = Count(f"{LANGUAGE}{LAYER}{{rest}}", "layer", ("num_hidden_layers",), "layers")
_BLOCKS = Count(f"{TOWER}{LAYER}{{rest}}", "layer", ("vision_config.depth",), "layers of the vision tower")
_EXPERTS = Count(
    f"{LANGUAGE}{LAYER}{EXPERT}.linear_fc1.weight",
    "expert",
    ("num_experts", "num_local_experts"),
    "experts of the language model",
)


def _both(names: Iterable[tuple[str, str]]) -> tuple[Rule, ...]:
    """Renaming of modules with weight and bias."""
    return tuple(rename(f"{left}.{leaf}", f"{right}.{leaf}") for left, right in names for leaf in _LEAVES)


_TOWER_ATTENTION = (
    *(
        Rule((f"self_attention.linear_qkv.{leaf}",), (f"attn.qkv.{leaf}",), (HeadsToParts(_HEADS),))
        for leaf in _LEAVES
    ),
    *_both((("self_attention.linear_proj", "attn.proj"),)),
)
_TOWER_NORMS = tuple(
    rule
    for layer, own, hub in (
        ("self_attention.linear_qkv", "input_layernorm", "norm1"),
        ("mlp.linear_fc1", "pre_mlp_layernorm", "norm2"),
    )
    for leaf in _LEAVES
    for rule in (rename(f"{layer}.layer_norm_{leaf}", f"{hub}.{leaf}"), rename(f"{own}.{leaf}", f"{hub}.{leaf}"))
)
_GATED_BLOCK = (
    *_TOWER_ATTENTION,
    *_TOWER_NORMS,
    *glu("mlp", ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), leaves=_LEAVES),
)
_PLAIN_BLOCK = (
    *_TOWER_ATTENTION,
    *_TOWER_NORMS,
    *_both((f"mlp.linear_fc{n}", f"mlp.linear_fc{n}") for n in (1, 2)),
)


def _merger(left: str, right: str, norm: str, layers: tuple[str, str]) -> tuple[Rule, ...]:
    """A merger of patches, whose linear layers have to be whole: some writers save one rank's part of them."""
    return (
        *_both(((f"{left}{norm}", f"{right}norm"),)),
        *_linear(left, right, tuple(zip(("linear_fc1", "linear_fc2"), layers, strict=True))),
    )


def _linear(left: str, right: str, names: tuple[tuple[str, str], ...]) -> tuple[Rule, ...]:
    (first, first_hub), (second, second_hub) = names
    shapes = (
        (f"{first}.weight", f"{first_hub}.weight", (_MERGED, _MERGED)),
        (f"{first}.bias", f"{first_hub}.bias", (_MERGED,)),
        (f"{second}.weight", f"{second_hub}.weight", ((), _MERGED)),
        (f"{second}.bias", f"{second_hub}.bias", ((),)),
    )
    return tuple(Rule((left + own,), (right + hub,), (ExpectShape(keys),)) for own, hub, keys in shapes)


_QWEN3_PARTS = ("linear_fc1", "linear_fc2")
_QWEN3_TOWER = (
    *placed(_PLAIN_BLOCK, f"{TOWER}{LAYER}", "model.visual.blocks.{layer}."),
    *_merger(f"{TOWER}merger.", "model.visual.merger.", "patch_norm", _QWEN3_PARTS),
    *_merger(
        f"{TOWER}decoder.deepstack_merger_list.{{layer}}.",
        "model.visual.deepstack_merger_list.{layer}.",
        "patch_norm",
        _QWEN3_PARTS,
    ),
    *_both(((f"{TOWER}patch_embed.proj", "model.visual.patch_embed.proj"),)),
    rename(f"{TOWER}pos_embed.weight", "model.visual.pos_embed.weight"),
    # The hub's own modules.
    *_merger(f"{TOWER}merger.", "model.visual.merger.", "norm", _QWEN3_PARTS)[:2],
    rename(f"{TOWER}blocks.{{rest}}", "model.visual.blocks.{rest}"),
    rename(f"{TOWER}deepstack_merger_list.{{rest}}", "model.visual.deepstack_merger_list.{rest}"),
)
_QWEN2_5_TOWER = (
    *placed(_GATED_BLOCK, f"{TOWER}{LAYER}", "visual.blocks.{layer}."),
    rename(f"{TOWER}decoder.final_layernorm.weight", "visual.merger.ln_q.weight"),
    *_linear(
        f"{TOWER}projection.encoder.",
        "visual.merger.",
        (("linear_fc1", "mlp.0"), ("linear_fc2", "mlp.2")),
    ),
    rename(f"{TOWER}patch_embed.proj.weight", "visual.patch_embed.proj.weight"),
    rename("visual.{rest}", "visual.{rest}"),
)

# The hub has the experts stacked and transposed, gate before up on the last dimension.
_QWEN3_MIXTURE = (
    *BEFORE_ATTENTION,
    *ATTENTION,
    BEFORE_MLP[1],
    rename("mlp.router.weight", "mlp.gate.weight"),
    Rule((f"{EXPERT}.linear_fc1.weight",), ("mlp.experts.gate_up_proj",), (Stack(0), Transpose(1, 2))),
    Rule((f"{EXPERT}.linear_fc2.weight",), ("mlp.experts.down_proj",), (Stack(0), Transpose(1, 2))),
)


# transformers 5 leaves "vision_model" out of the tower's names, which the hub's have.
_GEMMA_TOWER = (
    rename("vision_tower.vision_model.{rest}", "vision_tower.vision_model.{rest}"),
    *(
        rename(f"vision_tower.{part}.{{rest}}", f"vision_tower.vision_model.{part}.{{rest}}")
        for part in ("embeddings", "encoder", "post_layernorm", "head")
    ),
    rename("multi_modal_projector.mm_soft_embed_norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
    Rule(
        ("multi_modal_projector.proj.weight",),
        ("multi_modal_projector.mm_input_projection_weight",),
        (Transpose(0, 1),),
    ),
)
_GEMMA_RIGHT = "language_model.model."


def _table(
    name: str, model_type: str, right: str, layer: tuple[Rule, ...], tower: tuple[Rule, ...], *more: Count
) -> Table:
    language = (*ends(LANGUAGE, right), *placed(layer, f"{LANGUAGE}{LAYER}", f"{right}layers.{{layer}}."))
    return Table(name, (model_type,), (*language, *tower), NAMING, counts=(_LAYERS, _BLOCKS, *more), inside=False)


TABLES = (
    Table(
        "megatron_gemma3",
        ("gemma3",),
        (
            *ends(LANGUAGE, _GEMMA_RIGHT, "language_model.lm_head.weight"),
            *placed(GEMMA, f"{LANGUAGE}{LAYER}", f"{_GEMMA_RIGHT}layers.{{layer}}."),
            *_GEMMA_TOWER,
        ),
        NAMING,
        counts=(_LAYERS,),
        inside=False,
    ),
    _table("megatron_qwen2_5_vl", "qwen2_5_vl", "model.", DENSE, _QWEN2_5_TOWER),
    _table("megatron_qwen3_vl", "qwen3_vl", "model.language_model.", DENSE, _QWEN3_TOWER),
    _table("megatron_qwen3_vl_moe", "qwen3_vl_moe", "model.language_model.", _QWEN3_MIXTURE, _QWEN3_TOWER, _EXPERTS),
)
