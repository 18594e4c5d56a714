"""The config of a Hugging Face Llama 4 from Meta's params.json.

Sources: llama-models ``models/llama4/{args,ffn,moe}.py``, ``models/llama4/vision/encoder.py``; transformers
``convert_llama4_weights_to_hf.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.formats._meta_config import PARAMS, Params, feed_forward_width

_LENGTH_WITH_SCALING, _LENGTH = 10485760, 1048576
"""max_position_embeddings of Scout, whose rotary embeddings are scaled, and of Maverick."""

Shapes = Mapping[str, tuple[int, ...]]


def llama4_config(params: Params, shapes: Shapes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json of a Llama 4, and what was assumed."""
    text, notes = _text(params, shapes)
    config: dict[str, Any] = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": text,
        "tie_word_embeddings": False,
    }
    vision = params.values.get("vision_args")
    if isinstance(vision, dict):
        config["vision_config"] = _vision(Params(vision))
    else:
        config |= {**text, "architectures": ["Llama4ForCausalLM"]}
        del config["text_config"]
    return config, notes


def _text(params: Params, shapes: Shapes) -> tuple[dict[str, Any], tuple[str, ...]]:
    hidden, heads, layers = params.whole("dim"), params.whole("n_heads"), params.whole("n_layers")
    inner = params.values.get("moe_args")
    moe = Params(inner if isinstance(inner, dict) else {})
    step = moe.whole("interleave_moe_layer_step", 1)
    experts = moe.whole("num_experts", 1)
    divisor = moe.number("capacity_factor", 1.0) + 1 if moe.values.get("auto_scale_F", True) else 1.0
    expert_width = feed_forward_width(params, int(2 * int(params.number("ffn_exp", 4.0) * hidden) / 3), divisor)
    dense_width = feed_forward_width(params, int(2 * 4 * hidden / 3))
    notes = []
    for name, index, told in (
        ("feed_forward.experts.moe_w_in_eD_F", 1, expert_width),
        ("feed_forward.w1.weight", 0, dense_width),
    ):
        found = next((shape[index] for key, shape in shapes.items() if key.endswith(name) and len(shape) == 2), None)
        if found is not None and found != told:
            notes.append(
                f"{PARAMS} gives {told} columns of {name}, the weights have {found}: the weights are believed"
            )
            expert_width, dense_width = (found, dense_width) if index else (expert_width, found)
    vocabulary = shapes.get("tok_embeddings.weight", (0,))[0]
    interval = params.whole("nope_layer_interval", 4)
    scaled = bool(params.values.get("use_scaled_rope"))
    return {
        "attention_bias": False,
        "attention_chunk_size": params.whole("attention_chunk_size", 8192),
        "attn_temperature_tuning": bool(params.values.get("attn_temperature_tuning", False)),
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "interleave_moe_layer_step": step,
        "intermediate_size": expert_width,
        "intermediate_size_mlp": dense_width,
        "max_position_embeddings": _LENGTH_WITH_SCALING if scaled else _LENGTH,
        "model_type": "llama4_text",
        "moe_layers": list(range(step - 1, layers, step)),
        "no_rope_layers": [int((layer + 1) % interval != 0) for layer in range(layers)],
        "num_attention_heads": heads,
        "num_experts_per_tok": moe.whole("top_k", 1),
        "num_hidden_layers": layers,
        "num_key_value_heads": params.key_value_heads,
        "num_local_experts": experts,
        "rms_norm_eps": params.number("norm_eps", 1e-5),
        "rope_scaling": _scaling(params) if scaled else None,
        "rope_theta": params.number("rope_theta", 500000.0),
        "tie_word_embeddings": False,
        "use_qk_norm": bool(params.values.get("use_qk_norm", False)),
        "vocab_size": vocabulary,
    }, tuple(notes)


def _scaling(params: Params) -> dict[str, Any]:
    return {
        "factor": params.number("rope_scaling_factor", 16.0),
        "high_freq_factor": params.number("rope_high_freq_factor", 1.0),
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def _vision(args: Params) -> dict[str, Any]:
    width = args.whole("dim")
    ratio = args.number("pixel_shuffle_ratio", 0.5)
    output = args.whole("output_dim")
    return {
        "hidden_act": "gelu",
        "hidden_size": width,
        "image_size": _side(args, "image_size"),
        "intermediate_size": int(width * args.number("mlp_ratio", 4.0)),
        "model_type": "llama4_vision_model",
        "num_attention_heads": args.whole("n_heads"),
        "num_channels": 3,
        "num_hidden_layers": args.whole("n_layers"),
        "patch_size": _side(args, "patch_size"),
        "pixel_shuffle_ratio": ratio,
        "projector_input_dim": output,
        "projector_output_dim": output,
        "rope_theta": 10000,
        "vision_output_dim": output,
    }


def _side(args: Params, key: str) -> int:
    value = args.values.get(key)
    return Params(value).whole("height") if isinstance(value, dict) else args.whole(key)
