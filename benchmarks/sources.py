"""The same model as every framework saves it, written without starting any: random float32 values, any size.

Each writer spells one format in the framework's own terms, from the values alone; none shares code with a reader.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.generate import TOKENIZER, config_of, layers_for, shapes_of
from tests import deepspeed_files
from tests.dcp_files import DcpFolder, DcpSaved

Tensors = dict[str, torch.Tensor]
HIDDEN = 1024
HEADS, GROUPS = HIDDEN // 64, HIDDEN // 256
RANKS = 4


def hub_model(size_bytes: int) -> Tensors:
    """A Llama-like model of about that many bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = shapes_of(HIDDEN, layers_for(size_bytes, HIDDEN))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_source(kind: str, folder: Path, size_bytes: int) -> Path:
    """Write the model in one format, with its config; returns the folder that the framework's own tool takes."""
    tensors = hub_model(size_bytes)
    folder.mkdir(parents=True)
    place = WRITERS[kind](folder, tensors)
    if kind != "meta":
        layers = sum(name.endswith("o_proj.weight") for name in tensors)
        (folder / "config.json").write_text(json.dumps(config_of(HIDDEN, layers, shapes_of(HIDDEN, layers))))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / name, folder / name)
    return place


def _rows(values: torch.Tensor) -> list[int]:
    """Where ``Shard(0)`` over all ranks cuts."""
    step = -(-values.shape[0] // RANKS)
    return [step * rank for rank in range(1, RANKS)]


def _dcp(folder: Path, tensors: Tensors) -> Path:
    saved = DcpFolder()
    for name, values in tensors.items():
        saved.add(name, DcpSaved(values, [_rows(values)]), ranks=RANKS)
    return saved.write(folder)


def _accelerate(folder: Path, tensors: Tensors) -> Path:
    saved = DcpFolder()
    for name, values in tensors.items():
        saved.add(f"model.{name}", DcpSaved(values, [_rows(values)]), ranks=RANKS, path=("model", name))
    return saved.write(folder / "pytorch_model_fsdp_0")


def _dcp_safetensors(folder: Path, tensors: Tensors) -> Path:
    for rank in range(RANKS):
        parts, told = {}, {}
        for name, values in tensors.items():
            begin = rank * -(-values.shape[0] // RANKS)
            parts[name] = values.chunk(RANKS)[rank].contiguous()
            told[name] = {"saved_offsets": [begin] + [0] * (values.dim() - 1)}
        path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        save_file(parts, path, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0"})
    return folder


def _zero(stage: int) -> Callable[[Path, Tensors], Path]:
    def write(folder: Path, tensors: Tensors) -> Path:
        groups = [{name: values.numpy() for name, values in tensors.items()}]
        save = deepspeed_files.stage_3 if stage == 3 else deepspeed_files.stage_1_or_2
        save(folder / "global_step1", groups, RANKS)
        (folder / "latest").write_text("global_step1")
        return folder

    return write


def _megatron(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """Megatron-Core's names (TransformerEngine's layer spec), and the dimension that tensor parallelism cuts."""
    names = {"model.embed_tokens.weight": "embedding.word_embeddings.weight", "lm_head.weight": "output_layer.weight"}
    names["model.norm.weight"] = "decoder.final_layernorm.weight"
    for name, values in tensors.items():
        at, _, leaf = name.rpartition("layers.")[2].partition(".")
        prefix = f"decoder.layers.{at}."
        if name in names:
            yield names[name], values, None if "norm" in name else 0
        elif leaf == "self_attn.q_proj.weight":
            before = name.removesuffix("q_proj.weight")
            parts = [tensors[f"{before}{x}_proj.weight"].reshape(GROUPS, -1, HIDDEN) for x in "qkv"]
            yield f"{prefix}self_attention.linear_qkv.weight", torch.cat(parts, 1).reshape(-1, HIDDEN), 0
        elif leaf == "self_attn.o_proj.weight":
            yield f"{prefix}self_attention.linear_proj.weight", values, 1
        elif leaf == "mlp.gate_proj.weight":
            up = tensors[name.replace("gate_proj", "up_proj")]
            yield f"{prefix}mlp.linear_fc1.weight", torch.cat([values, up]), 0
        elif leaf == "mlp.down_proj.weight":
            yield f"{prefix}mlp.linear_fc2.weight", values, 1
        elif leaf == "input_layernorm.weight":
            yield f"{prefix}self_attention.linear_qkv.layer_norm_weight", values, None
        elif leaf == "post_attention_layernorm.weight":
            yield f"{prefix}mlp.linear_fc1.layer_norm_weight", values, None


def _megatron_dist(folder: Path, tensors: Tensors) -> Path:
    saved = DcpFolder()
    for name, values, dim in _megatron(tensors):
        parts = 0 if dim is None else RANKS * (2 if "linear_fc1" in name else 1)
        cuts = [values.shape[dim or 0] // parts * part for part in range(1, parts)] if parts else []
        saved.add(name, DcpSaved(values, [[]] * (dim or 0) + [cuts]), ranks=RANKS)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backend | {"common_backend_version": 1}))
    return saved.write(folder)


def _megatron_legacy(folder: Path, tensors: Tensors) -> Path:
    arguments = Namespace(
        tensor_model_parallel_size=RANKS,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
    )
    whole = list(_megatron(tensors))
    for rank in range(RANKS):
        model = {}
        for name, values, dim in whole:
            halves = values.chunk(2) if "linear_fc1.weight" in name else (values,)
            mine = values if dim is None else torch.cat([half.chunk(RANKS, dim)[rank] for half in halves])
            model[name] = mine.contiguous()
        place = folder / f"mp_rank_{rank:02d}"
        place.mkdir()
        content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 1, "model": model}
        torch.save(content, place / "model_optim_rng.pt")
    return folder


_TORCHTUNE = {
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.output_proj",
    "mlp.gate_proj": "mlp.w1",
    "mlp.up_proj": "mlp.w3",
    "mlp.down_proj": "mlp.w2",
    "input_layernorm": "sa_norm.scale",
    "post_attention_layernorm": "mlp_norm.scale",
}
_META = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def pairs_from_halves(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as Meta has them: the two rows that rotate together are neighbours."""
    return values.reshape(heads, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)


def _renamed(tensors: Tensors, leaves: dict[str, str], ends: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        if module in ends:
            yield ends[module], values
            continue
        layer, _, leaf = module.removeprefix("model.layers.").partition(".")
        turned = leaf.endswith(("q_proj", "k_proj"))
        new = f"layers.{layer}.{leaves[leaf]}"
        heads = HEADS if leaf.endswith("q_proj") else GROUPS
        yield (
            new if new.endswith(".scale") else f"{new}.weight",
            pairs_from_halves(values, heads).contiguous() if turned else values,
        )


def _torchtune(folder: Path, tensors: Tensors) -> Path:
    ends = {"model.embed_tokens": "tok_embeddings.weight", "model.norm": "norm.scale", "lm_head": "output.weight"}
    torch.save(dict(_renamed(tensors, _TORCHTUNE, ends)), folder / "torchtune_model_0.pt")
    return folder


def _meta(folder: Path, tensors: Tensors) -> Path:
    ends = {"model.embed_tokens": "tok_embeddings.weight", "model.norm": "norm.weight", "lm_head": "output.weight"}
    whole = dict(_renamed(tensors, _META, ends))
    inner = tensors["model.layers.0.mlp.gate_proj.weight"].shape[0]
    for rank in range(RANKS):
        parts = {}
        for name, values in whole.items():
            across = name.endswith(("wo.weight", "w2.weight"))
            parts[name] = values if "norm" in name else values.chunk(RANKS, 1 if across else 0)[rank].clone()
        torch.save(parts, folder / f"consolidated.{rank:02d}.pth")
    params = {
        "dim": HIDDEN,
        "n_layers": sum(name.endswith("wo.weight") for name in whole),
        "n_heads": HEADS,
        "n_kv_heads": GROUPS,
        "vocab_size": whole["output.weight"].shape[0],
        "norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "multiple_of": 1,
        "ffn_dim_multiplier": float(np.nextafter(inner / int(8 * HIDDEN / 3), 9)),
    }
    (folder / "params.json").write_text(json.dumps(params))
    return folder


WRITERS: dict[str, Callable[[Path, Tensors], Path]] = {
    "dcp": _dcp,
    "accelerate": _accelerate,
    "dcp-safetensors": _dcp_safetensors,
    "zero-2": _zero(2),
    "zero-3": _zero(3),
    "megatron-dist": _megatron_dist,
    "megatron-legacy": _megatron_legacy,
    "torchtune": _torchtune,
    "meta": _meta,
}
