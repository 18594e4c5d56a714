"""What a user runs to make a model of each format: the framework's own tool, or a script where it has none.

Usage: python -m benchmarks.peer_scripts NAME SOURCE DESTINATION. ``NAIVE`` has the scripts that stand in where no
package of the framework on PyPI reads the format without a GPU or a running job: load everything, put it together,
``save_file``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def dcp_to_torch_save(source: Path, destination: Path) -> None:
    """Call torch's own tool, which writes one torch file."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert

    destination.mkdir()
    convert(source, destination / "pytorch_model.bin")


def consolidate(source: Path, destination: Path) -> None:
    """Call torch's own tool for DCP's safetensors output."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    destination.mkdir()
    with safe_open(next(source.glob("shard-*.safetensors")), "pt") as file:
        names = list(file.keys())
    consolidate_safetensors_files(str(source), str(destination), dict.fromkeys(names, 1), num_threads=2)


def naive_meta(source: Path, destination: Path) -> None:
    """Concatenate the files' parts and put rows of q and k in the hub's order."""
    parts = [_load(path) for path in sorted(source.glob("consolidated.*.pth"))]
    sizes = json.loads((source / "params.json").read_text())
    whole = {}
    for name in list(parts[0]):
        pieces = [part.pop(name) for part in parts]
        dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
        whole[name] = pieces[0] if "norm" in name else torch.cat(pieces, dim)
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    _save(destination, _renamed(whole, "attention", "feed_forward", names, (sizes["n_heads"], sizes["n_kv_heads"])))


def naive_torchtune(source: Path, destination: Path) -> None:
    """Rename, and put rows of q and k in the hub's order."""
    config = json.loads((source / "config.json").read_text())
    names = {f"{x}_proj": f"{x}_proj" for x in "qkv"} | {"output_proj": "o_proj"}
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    _save(destination, _renamed(_load(source / "torchtune_model_0.pt"), "attn", "mlp", names, heads))


_MLP = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NORMS = {"attention_norm": "input_layernorm", "sa_norm": "input_layernorm"}
_NORMS |= dict.fromkeys(("ffn_norm", "mlp_norm"), "post_attention_layernorm")
_ENDS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}


def _renamed(
    tensors: Tensors, attention: str, mlp: str, projections: dict[str, str], heads: tuple[int, int]
) -> Tensors:
    made = {}
    for name in list(tensors):
        values, parts = tensors.pop(name), name.split(".")
        if parts[0] in _ENDS:
            made[f"{_ENDS[parts[0]]}.weight"] = values
        elif parts[2] == attention:
            new = projections[parts[3]]
            if new in ("q_proj", "k_proj"):
                count = heads[0] if new == "q_proj" else heads[1]
                values = values.view(count, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
            made[f"model.layers.{parts[1]}.self_attn.{new}.weight"] = values
        elif parts[2] == mlp:
            made[f"model.layers.{parts[1]}.mlp.{_MLP[parts[3]]}.weight"] = values
        else:
            made[f"model.layers.{parts[1]}.{_NORMS[parts[2]]}.weight"] = values
    return made


def naive_megatron_legacy(source: Path, destination: Path) -> None:
    """Concatenate tensor-parallel parts, then take qkv and gate and up apart."""
    parts = [_load(path)["model"] for path in sorted(source.glob("mp_rank_*/model_optim_rng.pt"))]
    whole = {}
    for name in list(parts[0]):
        pieces = [part.pop(name) for part in parts]
        if "norm" in name:
            whole[name] = pieces[0]
        elif "linear_fc1" in name:
            whole[name] = torch.cat([half for side in (0, 1) for half in [p.chunk(2)[side] for p in pieces]])
        else:
            whole[name] = torch.cat(pieces, 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)
    _save(destination, _from_megatron(whole, json.loads((source / "config.json").read_text())))


def naive_megatron_dist(source: Path, destination: Path) -> None:
    """Load with torch's DCP, which is what Megatron-Core does, then take qkv and gate and up apart."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: Tensors = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(source), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    _save(destination, _from_megatron(state, json.loads((source / "config.json").read_text())))


def _from_megatron(tensors: Tensors, config: dict[str, int]) -> Tensors:
    groups = config["num_key_value_heads"]
    ratio = config["num_attention_heads"] // groups
    ends = {"embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head"}
    ends["decoder.final_layernorm"] = "model.norm"
    made = {}
    for name in list(tensors):
        values, module = tensors.pop(name), name.removesuffix(".weight")
        if module in ends:
            made[f"{ends[module]}.weight"] = values
            continue
        layer, _, leaf = module.removeprefix("decoder.layers.").partition(".")
        at = f"model.layers.{layer}."
        if leaf == "self_attention.linear_qkv":
            head = values.shape[0] // (groups * (ratio + 2))
            cut = values.view(groups, -1, values.shape[1]).split([ratio * head, head, head], 1)
            for letter, part in zip("qkv", cut, strict=True):
                made[f"{at}self_attn.{letter}_proj.weight"] = part.reshape(-1, values.shape[1])
        elif leaf == "mlp.linear_fc1":
            gate, up = values.chunk(2)
            made |= {f"{at}mlp.gate_proj.weight": gate.clone(), f"{at}mlp.up_proj.weight": up.clone()}
        else:
            made[at + _MEGATRON[leaf]] = values
    return made


_MEGATRON = {
    "self_attention.linear_proj": "self_attn.o_proj.weight",
    "mlp.linear_fc2": "mlp.down_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}


def _load(path: Path) -> Tensors:
    from argparse import Namespace

    with torch.serialization.safe_globals([Namespace]):
        loaded: Tensors = torch.load(path, map_location="cpu", weights_only=True)
    return loaded


def _save(destination: Path, tensors: Tensors) -> None:
    destination.mkdir()
    made = {name: values.contiguous() for name, values in tensors.items()}
    save_file(made, destination / "model.safetensors", {"format": "pt"})


TOOLS: dict[str, Callable[[Path, Path], None]] = {"dcp_to_torch_save": dcp_to_torch_save, "consolidate": consolidate}
NAIVE: dict[str, Callable[[Path, Path], None]] = {
    "megatron-dist": naive_megatron_dist,
    "megatron-legacy": naive_megatron_legacy,
    "torchtune": naive_torchtune,
    "meta": naive_meta,
}

if __name__ == "__main__":
    (TOOLS | NAIVE)[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
