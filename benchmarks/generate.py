"""Make checkpoints to measure with: rank files as torch itself saves FSDP2 shards, random values, any size."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path

TOKENIZER = Path("tests/cases/verl-fsdp/llama-fsdp2-ws1/input/huggingface")
"""Some tools refuse a checkpoint without a tokenizer."""


def shapes_of(hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-like model with grouped-query attention."""
    inner = hidden * 11 // 4 // 64 * 64
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32_000, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}self_attn.k_proj.weight": (hidden // 4, hidden),
            f"{prefix}self_attn.v_proj.weight": (hidden // 4, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (32_000, hidden)}


def layers_for(size_bytes: int, hidden: int) -> int:
    """How many layers make a float32 model of about that size."""
    per_layer = 4 * sum(_elements(s) for n, s in shapes_of(hidden, 1).items() if ".layers." in n)
    rest = 4 * sum(_elements(s) for s in shapes_of(hidden, 0).values())
    return max(1, round((size_bytes - rest) / per_layer))


def make_checkpoint(folder: Path, size_bytes: int, *, world_size: int = 4, hidden: int = 2048) -> int:
    """Write a verl FSDP2 checkpoint of about that many bytes; returns the bytes of its weights."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layers = layers_for(size_bytes, hidden)
    shapes = shapes_of(hidden, layers)
    (folder / "huggingface").mkdir(parents=True)
    for rank in range(world_size):
        # A process group that talks to nobody: each rank's file can be made alone.
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
        generator = torch.Generator().manual_seed(rank)
        state = OrderedDict()
        for name, shape in shapes.items():
            chunk = -(-shape[0] // world_size)
            rows = max(0, min(chunk, shape[0] - rank * chunk))
            local = torch.randn((rows, *shape[1:]), generator=generator)
            stride = torch.empty(shape, device="meta").stride()
            state[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
        torch.save(state, folder / f"model_world_size_{world_size}_rank_{rank}.pt")
        dist.destroy_process_group()
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
    (folder / "huggingface" / "config.json").write_text(json.dumps(config_of(hidden, layers, shapes)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / "huggingface" / name)
    return 4 * sum(map(_elements, shapes.values()))


def config_of(hidden: int, layers: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, object]:
    """The config of such a model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": shapes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
