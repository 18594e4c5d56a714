"""Checkpoints to look at: a run on a mesh of eight ranks, one of which a file is missing, and a very large one."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from torch.distributed.tensor.placement_types import Replicate, Shard

from tests.rank_files import Saved, write_rank_files

MESH = (2, 4)
HIDDEN = 64


def write_run(folder: Path, *, lost: int | None = None) -> Path:
    """A small dense model, cut over two dimensions of a mesh; ``lost``: the rank whose file is not there."""
    rows, both, columns = (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0))
    tensors = {"model.embed_tokens.weight": Saved((512, HIDDEN), both)}
    for layer in range(6):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = Saved((HIDDEN,), (Replicate(), Shard(0)))
        for part, length in (("q", 64), ("k", 32), ("v", 32)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = Saved((length, HIDDEN), rows)
        tensors[prefix + "self_attn.o_proj.weight"] = Saved((HIDDEN, 64), columns)
        for part in ("gate", "up"):
            tensors[f"{prefix}mlp.{part}_proj.weight"] = Saved((192, HIDDEN), both)
        tensors[prefix + "mlp.down_proj.weight"] = Saved((HIDDEN, 192), both)
        tensors[prefix + "post_attention_layernorm.weight"] = Saved((HIDDEN,), (Replicate(), Shard(0)))
    tensors["model.norm.weight"] = Saved((HIDDEN,), (Replicate(), Replicate()))
    tensors["lm_head.weight"] = Saved((512, HIDDEN), both)
    write_rank_files(folder, tensors, MESH)
    if lost is not None:
        (folder / f"model_world_size_8_rank_{lost}.pt").unlink()
    return folder


def write_large(folder: Path, layers: int = 94, experts: int = 142) -> int:
    """A folder of safetensors with the names of a large mixture of experts, each of a few bytes; how many tensors."""
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        names += [f"{prefix}self_attn.{part}_proj.weight" for part in "qkvo"]
        names += [prefix + "input_layernorm.weight", prefix + "mlp.gate.weight"]
        for expert in range(experts):
            names += [f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
    header: dict[str, object] = {}
    end = 0
    for number, name in enumerate(names):
        size = 4 + 2 * (number % 3)
        header[name] = {"dtype": "BF16", "shape": [1, size // 2], "data_offsets": [end, end + size]}
        end += size
    spelled = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(spelled)) + spelled + bytes(end))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]})
    )
    return len(names)
