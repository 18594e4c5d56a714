"""Llama 3.2 Vision (mllama) under Meta's and torchtune's names.

Both count layers of cross-attention apart, which the hub weaves into the others; only q and k of self-attention have
rotary rows, in pairs.
Sources: llama-models ``models/llama3/multimodal/model.py``; torchtune
``models/llama3_2_vision/_convert_weights.py``; transformers ``convert_mllama_weights_to_hf.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from workers.families import meta, torchtune
from workers.families.layer_lists import CROSS, FUSION, SELF
from workers.families.operations import Operation
from workers.families.rules import Drop, Rule, Table, rename
from workers.families.torchtune import PAIRS, Linear, linear_rules
from workers.families.vision_operations import FirstElement, JoinRows, TilesToRatios, Unflatten

_HUB = "language_model.model."
_HUB_SELF = f"{_HUB}layers.{{layer@{SELF}}}."
_HUB_CROSS = f"{_HUB}layers.{{layer@{CROSS}}}."
_PATCHES = ("vision_config.num_channels", "vision_config.patch_size")
_LEAVES = ("weight", "bias")

_Names = Iterable[tuple[str, str]]
_GATES: tuple[tuple[str, str], ...] = (("gate_attn", "cross_attn_attn_gate"), ("gate_ffwd", "cross_attn_mlp_gate"))


def _placed(names: _Names, own: str, hub: str) -> tuple[Rule, ...]:
    return tuple(rename(own + left, hub + right) for left, right in names)


def _operated(names: _Names, own: str, hub: str, operation: Operation) -> tuple[Rule, ...]:
    return tuple(Rule((own + left,), (hub + right,), (operation,)) for left, right in names)


def _both(names: _Names) -> tuple[tuple[str, str], ...]:
    """Names of modules with weight and bias."""
    return tuple((f"{left}.{leaf}", f"{right}.{leaf}") for left, right in names for leaf in _LEAVES)


def _embedding(vocabulary: str, more: str) -> Rule:
    return Rule((vocabulary, more), (f"{_HUB}embed_tokens.weight",), (JoinRows("vocab_size"),))


_CROSS_LINEAR = tuple((f"{x}_proj", f"cross_attn.{x}_proj") for x in "qkv")
_META_CROSS = "text_model.cross_attention_layers.{layer}."
_META_SELF = "text_model.layers.{layer}."
_META_TEXT: tuple[Rule | Drop, ...] = (
    *meta.ROTARY,
    _embedding("text_model.tok_embeddings.weight", "text_model.learnable_embedding.weight"),
    rename("text_model.norm.weight", f"{_HUB}norm.weight"),
    *linear_rules(
        (
            Linear("text_model.output", "language_model.lm_head"),
            *meta.attention(PAIRS, _META_SELF, _HUB_SELF),
            *meta.mlp(f"{_META_SELF}feed_forward.", f"{_HUB_SELF}mlp."),
            *(Linear(f"{_META_CROSS}attention.w{x}", f"{_HUB_CROSS}cross_attn.{x}_proj") for x in "qkvo"),
            *meta.mlp(f"{_META_CROSS}feed_forward.", f"{_HUB_CROSS}mlp."),
        )
    ),
    *meta.norms(_META_SELF, _HUB_SELF),
    *meta.norms(_META_CROSS, _HUB_CROSS),
    *_placed(((f"attention.{x}_norm.weight", f"cross_attn.{x}_norm.weight") for x in "qk"), _META_CROSS, _HUB_CROSS),
    *_operated(_GATES, _META_CROSS, _HUB_CROSS, FirstElement()),
)


def _meta_blocks(own: str, hub: str) -> tuple[Rule, ...]:
    linear = _placed(((f"attn.w{x}.weight", f"self_attn.{x}_proj.weight") for x in "qkvo"), own, hub)
    rest = (("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2"), *_BLOCK_NORMS_META)
    return (*linear, *_placed(_both(rest), own, hub))


_BLOCK_NORMS_META = (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm"))
_META_TOWER = "vision_model.vision_encoder."
_META_VISION: tuple[Rule, ...] = (
    Rule((f"{_META_TOWER}conv1._linear.weight",), ("vision_model.patch_embedding.weight",), (Unflatten(1, _PATCHES),)),
    *_placed(
        (
            ("class_embedding", "class_embedding"),
            *_both((f"ln_{x}", f"layernorm_{x}") for x in ("pre", "post")),
            ("positional_embedding", "gated_positional_embedding.embedding"),
            ("gated_positional_embedding_gate", "gated_positional_embedding.gate"),
            *((f"{x}_tile_pos_embed.gate", f"{x}_tile_positional_embedding.gate") for x in ("pre", "post")),
        ),
        _META_TOWER,
        "vision_model.",
    ),
    *_operated(
        (
            ("gated_positional_embedding", "gated_positional_embedding.tile_embedding.weight"),
            *(
                (f"{x}_tile_pos_embed.embedding", f"{x}_tile_positional_embedding.embedding.weight")
                for x in ("pre", "post")
            ),
        ),
        _META_TOWER,
        "vision_model.",
        TilesToRatios(),
    ),
    *_meta_blocks(f"{_META_TOWER}transformer.resblocks.{{layer}}.", "vision_model.transformer.layers.{layer}."),
    *_meta_blocks(
        f"{_META_TOWER}global_transformer.resblocks.{{layer}}.", "vision_model.global_transformer.layers.{layer}."
    ),
    *_operated(
        (("gate_attn", "gate_attn"), ("gate_ffn", "gate_ffn")),
        f"{_META_TOWER}global_transformer.resblocks.{{layer}}.",
        "vision_model.global_transformer.layers.{layer}.",
        FirstElement(),
    ),
    *_placed(_both((("vision_projection", "multi_modal_projector"),)), "vision_model.", ""),
)

_TUNE_SELF = "decoder.layers.{layer}."
_TUNE_CROSS = f"decoder.layers.{{layer@{FUSION}}}.fusion_layer."
_TUNE_TEXT: tuple[Rule | Drop, ...] = (
    torchtune.MADE_ANEW,
    _embedding("decoder.tok_embeddings.weight", "decoder.tok_embeddings.fusion_embedding.weight"),
    rename("decoder.norm.scale", f"{_HUB}norm.weight"),
    *linear_rules(
        (
            Linear("decoder.output", "language_model.lm_head"),
            *torchtune.attention(PAIRS, _TUNE_SELF, _HUB_SELF),
            *torchtune.mlp(f"{_TUNE_SELF}mlp.", f"{_HUB_SELF}mlp."),
            *(Linear(f"{_TUNE_CROSS}attn.{left}", f"{_HUB_CROSS}{right}") for left, right in _CROSS_LINEAR),
            Linear(f"{_TUNE_CROSS}attn.output_proj", f"{_HUB_CROSS}cross_attn.o_proj"),
            *torchtune.mlp(f"{_TUNE_CROSS}mlp.", f"{_HUB_CROSS}mlp."),
        )
    ),
    *_placed(
        (("sa_norm.scale", "input_layernorm.weight"), ("mlp_norm.scale", "post_attention_layernorm.weight")),
        _TUNE_SELF,
        _HUB_SELF,
    ),
    *_placed(
        (
            ("ca_norm.scale", "input_layernorm.weight"),
            ("mlp_norm.scale", "post_attention_layernorm.weight"),
            *((f"attn.{x}_norm.scale", f"cross_attn.{x}_norm.weight") for x in "qk"),
            ("ca_scale.scale", "cross_attn_attn_gate"),
            ("mlp_scale.scale", "cross_attn_mlp_gate"),
        ),
        _TUNE_CROSS,
        _HUB_CROSS,
    ),
)


def _tune_blocks(own: str, hub: str) -> tuple[Rule, ...]:
    linear = linear_rules(
        (
            *(Linear(f"{own}attn.{x}_proj", f"{hub}self_attn.{x}_proj") for x in "qkv"),
            Linear(f"{own}attn.output_proj", f"{hub}self_attn.o_proj"),
            *(Linear(f"{own}mlp.w{n}", f"{hub}mlp.fc{n}", (), _LEAVES) for n in (1, 2)),
        )
    )
    return (
        *linear,
        *_placed(_both((("sa_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))), own, hub),
    )


_TUNE_GLOBAL = "encoder.projection.layers.{layer}.", "vision_model.global_transformer.layers.{layer}."
_TUNE_VISION: tuple[Rule, ...] = (
    *_placed(
        (
            ("conv.weight", "patch_embedding.weight"),
            ("cls_token_embedding.weight", "class_embedding"),
            *_both((f"ln_{x}", f"layernorm_{x}") for x in ("pre", "post")),
            ("token_pos_embedding.local_token_positional_embedding", "gated_positional_embedding.embedding"),
            ("token_pos_embedding.gate", "gated_positional_embedding.gate"),
            *((f"{x}_tile_pos_embed.gate", f"{x}_tile_positional_embedding.gate") for x in ("pre", "post")),
        ),
        "encoder.clip.",
        "vision_model.",
    ),
    *_operated(
        (
            (
                "token_pos_embedding.global_token_positional_embedding",
                "gated_positional_embedding.tile_embedding.weight",
            ),
            *(
                (f"{x}_tile_pos_embed.embedding", f"{x}_tile_positional_embedding.embedding.weight")
                for x in ("pre", "post")
            ),
        ),
        "encoder.clip.",
        "vision_model.",
        TilesToRatios(),
    ),
    *_tune_blocks("encoder.clip.layers.{layer}.", "vision_model.transformer.layers.{layer}."),
    *_tune_blocks(*_TUNE_GLOBAL),
    *_placed((("sa_scale.scale", "gate_attn"), ("mlp_scale.scale", "gate_ffn")), *_TUNE_GLOBAL),
    *linear_rules((Linear("encoder.projection.output", "multi_modal_projector", (), _LEAVES),)),
)

TABLES = (
    Table(
        "meta_llama_vision",
        ("mllama",),
        (*_META_TEXT, *_META_VISION, torchtune.ALREADY_ON_THE_HUB),
        meta.NAMING,
        required=("text_model.tok_embeddings.weight", "text_model.norm.weight"),
    ),
    Table(
        "torchtune_llama_vision",
        ("mllama",),
        (*_TUNE_TEXT, *_TUNE_VISION, torchtune.ALREADY_ON_THE_HUB),
        torchtune.NAMING,
        required=("decoder.tok_embeddings.weight", "decoder.norm.scale"),
    ),
)
