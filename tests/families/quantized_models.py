"""Small models for tests of quantisation, as Hugging Face folders, and what becomes of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.quantized_weights import unpacked

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def save_model(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a model with random weights."""
    transformers.set_seed(0)
    sizes = SIZES | changes
    known = AutoConfig.for_model(model_type).to_dict()
    config = AutoConfig.for_model(model_type, **{key: value for key, value in sizes.items() if key in known})
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that a quantised model stands for, from the formats' descriptions; those of blocks in bfloat16."""
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name, tensor in tensors.items():
        if f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0)[: len(tensor)]
            wide = scale.repeat_interleave(128, 1)[:, : tensor.shape[1]]
            values[name] = (tensor.float() * wide).to(torch.bfloat16)
        elif f"{name}_scale" in tensors:
            scale = tensors[f"{name}_scale"]
            values[name] = tensor.to(scale.dtype) * scale
        elif name.endswith("_packed"):
            plain = name.removesuffix("_packed")
            scale, shape = tensors[f"{plain}_scale"], tensors[f"{plain}_shape"].tolist()
            numbers = unpacked(tensor, shape[1]).to(scale.dtype).unflatten(1, (-1, 128))
            values[plain] = (numbers * scale[..., None]).reshape(shape)
        elif not name.endswith(("_scale", "_scale_inv", "_shape")):
            values[name] = tensor
    return values
