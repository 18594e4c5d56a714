"""Llama 4 under Meta's and torchtune's names. No rows are permuted, in neither tower.

What Meta's files fuse for each rank (q, k and v; w1 and w3) the reader takes apart.
Sources: llama-models ``models/llama4/{model,moe,ffn,vision/encoder}.py``; torchtune
``models/llama4/_convert_weights.py``; transformers ``convert_llama4_weights_to_hf.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.families import meta, torchtune
from workers.families.operations import Concatenate, Transpose
from workers.families.rules import Drop, Rule, Table, rename
from workers.families.torchtune import HALVES, Linear, linear_rules
from workers.families.vision_operations import Flatten, Unflatten

_HUB = "language_model.model."
_HUB_LAYER = f"{_HUB}layers.{{layer}}."
_HUB_MOE = f"{_HUB_LAYER}feed_forward."
_EXPERTS = ("num_local_experts",)
_PATCHES = ("vision_config.num_channels", "vision_config.patch_size")
_LEAVES = ("weight", "bias")
_MODEL_TYPES = ("llama4", "llama4_text")


def _placed(names: Iterable[tuple[str, str]], own: str, hub: str) -> tuple[Rule, ...]:
    return tuple(rename(own + left, hub + right) for left, right in names)


def _both(names: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((f"{left}.{leaf}", f"{right}.{leaf}") for left, right in names for leaf in _LEAVES)


_META_MOE = f"{meta.LAYER}feed_forward."
_STATISTICS = ("global_gate_stats_3E", "running_gate_stats_3E", "expert_activation_DE")
_META_TEXT: tuple[Rule | Drop, ...] = (
    *meta.ROTARY,
    *(Drop(f"{{module}}.{name}", "statistics of the training's router") for name in _STATISTICS),
    rename("tok_embeddings.weight", f"{_HUB}embed_tokens.weight"),
    rename("norm.weight", f"{_HUB}norm.weight"),
    rename("output.weight", "language_model.lm_head.weight"),
    *linear_rules(meta.attention(HALVES, hub=_HUB_LAYER)),
    *linear_rules(meta.mlp(hub=_HUB_MOE)),
    *meta.norms(hub=_HUB_LAYER),
    rename(f"{meta.LAYER}attention.wqkv.layer_norm_weight", f"{_HUB_LAYER}input_layernorm.weight"),
    rename(f"{_META_MOE}norm.weight", f"{_HUB_LAYER}post_attention_layernorm.weight"),
    rename(f"{_META_MOE}mlp.layer_norm_weight", f"{_HUB_LAYER}post_attention_layernorm.weight"),
    rename(f"{_META_MOE}mlp.fc2_weight", f"{_HUB_MOE}down_proj.weight"),
    Rule((f"{_META_MOE}router_DE",), (f"{_HUB_MOE}router.weight",), (Transpose(0, 1),)),
    Rule(
        (f"{_META_MOE}experts.moe_w_in_eD_F", f"{_META_MOE}experts.moe_w_swiglu_eD_F"),
        (f"{_HUB_MOE}experts.gate_up_proj",),
        (Unflatten(0, _EXPERTS), Concatenate(2, 2)),
    ),
    Rule((f"{_META_MOE}experts.moe_w_out_eF_D",), (f"{_HUB_MOE}experts.down_proj",), (Unflatten(0, _EXPERTS),)),
    *_placed(
        (
            ("w_in_shared_FD.weight", "shared_expert.gate_proj.weight"),
            ("w_swiglu_FD.weight", "shared_expert.up_proj.weight"),
            ("w_out_shared_DF.weight", "shared_expert.down_proj.weight"),
        ),
        _META_MOE,
        _HUB_MOE,
    ),
)

_META_TOWER = "vision_embeddings.vision_encoder."
_META_BLOCK = f"{_META_TOWER}transformer.resblocks.{{layer}}."
_HUB_BLOCK = "vision_model.model.layers.{layer}."
_META_VISION: tuple[Rule, ...] = (
    rename(f"{_META_TOWER}conv1._linear.weight", "vision_model.patch_embedding.linear.weight"),
    *_placed(
        (
            ("class_embedding", "class_embedding"),
            ("positional_embedding_vlm", "positional_embedding_vlm"),
            *_both((f"ln_{x}", f"layernorm_{x}") for x in ("pre", "post")),
        ),
        _META_TOWER,
        "vision_model.",
    ),
    *_placed(
        _both(
            (
                *((f"attn.w{x}", f"self_attn.{x}_proj") for x in "qkvo"),
                ("mlp.c_fc", "mlp.fc1"),
                ("mlp.c_proj", "mlp.fc2"),
                ("ln_1", "input_layernorm"),
                ("ln_2", "post_attention_layernorm"),
            )
        ),
        _META_BLOCK,
        _HUB_BLOCK,
    ),
    rename("vision_embeddings.vision_adapter.mlp.c_fc.weight", "vision_model.vision_adapter.mlp.fc1.weight"),
    rename("vision_embeddings.vision_adapter.mlp.c_proj.weight", "vision_model.vision_adapter.mlp.fc2.weight"),
    rename("vision_projection.weight", "multi_modal_projector.linear_1.weight"),
)

_TUNE_LAYER = "decoder.layers.{layer}."
_TUNE_TEXT: tuple[Rule | Drop, ...] = (
    torchtune.MADE_ANEW,
    rename("decoder.tok_embeddings.weight", f"{_HUB}embed_tokens.weight"),
    rename("decoder.norm.scale", f"{_HUB}norm.weight"),
    *linear_rules(
        (
            Linear("decoder.output", "language_model.lm_head"),
            *torchtune.attention(HALVES, _TUNE_LAYER, _HUB_LAYER),
            *torchtune.mlp(f"{_TUNE_LAYER}mlp.", _HUB_MOE),
            *torchtune.mlp(f"{_TUNE_LAYER}mlp.shared_expert.", f"{_HUB_MOE}shared_expert."),
        )
    ),
    rename(f"{_TUNE_LAYER}sa_norm.scale", f"{_HUB_LAYER}input_layernorm.weight"),
    rename(f"{_TUNE_LAYER}mlp_norm.scale", f"{_HUB_LAYER}post_attention_layernorm.weight"),
    rename(f"{_TUNE_LAYER}mlp.router.gate.weight", f"{_HUB_MOE}router.weight"),
    Rule(
        (f"{_TUNE_LAYER}mlp.experts.gate_proj", f"{_TUNE_LAYER}mlp.experts.up_proj"),
        (f"{_HUB_MOE}experts.gate_up_proj",),
        (Concatenate(2, 2),),
    ),
    rename(f"{_TUNE_LAYER}mlp.experts.down_proj", f"{_HUB_MOE}experts.down_proj"),
    Drop("{module}.running_gate_stats", "statistics of the training's router"),
    Drop("{module}.global_gate_stats", "statistics of the training's router"),
)

_TUNE_TOWER = "encoders.vision.clip."
_TUNE_BLOCK = f"{_TUNE_TOWER}layers.{{layer}}."
_PROJECTION = "encoders.vision.projection.output."
_TUNE_VISION: tuple[Rule, ...] = (
    Rule((f"{_TUNE_TOWER}conv.weight",), ("vision_model.patch_embedding.linear.weight",), (Flatten(1, _PATCHES),)),
    *_placed(
        (
            ("cls_token_embedding.weight", "class_embedding"),
            ("token_pos_embedding.positional_embedding", "positional_embedding_vlm"),
            *_both((f"ln_{x}", f"layernorm_{x}") for x in ("pre", "post")),
        ),
        _TUNE_TOWER,
        "vision_model.",
    ),
    *_placed(
        _both(
            (
                *((f"attn.{x}_proj", f"self_attn.{x}_proj") for x in "qkv"),
                ("attn.output_proj", "self_attn.o_proj"),
                ("mlp.w1", "mlp.fc1"),
                ("mlp.w2", "mlp.fc2"),
                ("sa_norm", "input_layernorm"),
                ("mlp_norm", "post_attention_layernorm"),
            )
        ),
        _TUNE_BLOCK,
        _HUB_BLOCK,
    ),
    rename(f"{_PROJECTION}0.weight", "vision_model.vision_adapter.mlp.fc1.weight"),
    rename(f"{_PROJECTION}2.weight", "vision_model.vision_adapter.mlp.fc2.weight"),
    rename(f"{_PROJECTION}4.weight", "multi_modal_projector.linear_1.weight"),
)

_REQUIRED = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight", "attn.output_proj.weight")

TABLES = (
    Table(
        "meta_llama4",
        _MODEL_TYPES,
        (*_META_TEXT, *_META_VISION),
        meta.NAMING,
        required=(
            "tok_embeddings.weight",
            "norm.weight",
            *(f"{meta.LAYER}attention.w{x}.weight" for x in "qkvo"),
        ),
    ),
    Table(
        "torchtune_llama4",
        _MODEL_TYPES,
        (*_TUNE_TEXT, *_TUNE_VISION, torchtune.ALREADY_ON_THE_HUB),
        torchtune.NAMING,
        required=(
            "decoder.tok_embeddings.weight",
            "decoder.norm.scale",
            *(f"{_TUNE_LAYER}{name}" for name in (*_REQUIRED, "sa_norm.scale", "mlp_norm.scale")),
        ),
    ),
)
