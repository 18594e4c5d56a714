"""Tiny models of any architecture of transformers, for comparison with what transformers itself saves."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "expert_ffn_hidden_size": 12,
    "ffn_hidden_size": 24,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 0,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "qk_head_dim": 8,  # the two above together
    "v_head_dim": 4,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 16,
    "embed_dim": 16,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "projection_dim": 16,
}
# Lists with one entry per layer, which follow from the number of layers when they are left out.
PER_LAYER = ("layer_types", "mlp_layer_types", "rope_parameters", "rope_scaling")


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A model with random weights; ``changes`` are made to the config, or to its text part if it has one."""
    transformers.set_seed(0)
    large = AutoConfig.for_model(model_type)
    fields = _shrink(large.to_dict(), TEXT)
    fields.pop("model_type")
    fields.get("text_config", fields).update(changes)
    config = type(large)(**fields)
    auto = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config)
    return model


def _shrink(fields: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    for key, value in list(fields.items()):
        if isinstance(value, dict) and "model_type" in value:
            _shrink(value, VISION if "vision" in key else TEXT)
        elif key in PER_LAYER:
            del fields[key]
        elif key in sizes:
            fields[key] = sizes[key]
    return fields
