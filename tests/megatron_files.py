"""Write rank files as Megatron-LM and verl save them, from whole tensors: an own account of how each cut is made."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

HIDDEN = 4


@dataclass(frozen=True)
class Run:
    """A training run: its grid, and how many layers each stage has, virtual stages outermost."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    layers: tuple[tuple[int, ...], ...] = ((1,),)
    groups: int = 1
    experts: int = 0
    verl: bool = False

    @property
    def pipeline(self) -> int:
        return len(self.layers[0])

    @property
    def heads(self) -> int:
        """Two query heads for each group, and for each rank at least one."""
        return max(2 * self.groups, self.tensor)

    def folder(self, tensor: int, pipeline: int, expert: int) -> str:
        name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if self.pipeline > 1 else "")
        return name + (f"_{expert:03d}" if self.expert > 1 else "")

    def saved(self) -> set[tuple[int, int]]:
        """The (tensor, expert) ranks of a stage that save: those of data-parallel rank 0, dense or expert."""
        size = self.tensor * self.expert * self.expert_tensor
        ranks = [(r, r % self.tensor, r // self.expert_tensor % self.expert) for r in range(size)]
        experts = self.expert * self.expert_tensor
        return {(tensor, expert) for r, tensor, expert in ranks if r < self.tensor or r < experts}


def whole(run: Run, seed: int) -> dict[str, np.ndarray]:
    """All tensors of a model, under the names and in the layout of the checkpoint."""
    rng = np.random.default_rng(seed)
    made: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        made[name] = rng.standard_normal(shape).astype(np.float32)

    inner = 3 * run.tensor
    rows = 2 * (run.heads + 2 * run.groups)
    embedding, layers, norm, head = NAMES[run.verl]
    add(f"{embedding}.weight", 5 * run.tensor, HIDDEN)
    for layer in range(sum(map(sum, run.layers))):
        at = f"{layers}.{layer}"
        if run.verl:
            add(f"{at}.self_attn.qkv_proj.weight", rows, HIDDEN)
            add(f"{at}.self_attn.o_proj.weight", HIDDEN, 2 * run.heads)
            add(f"{at}.mlp.gate_up_proj.weight", 2 * inner, HIDDEN)
            add(f"{at}.mlp.down_proj.weight", HIDDEN, inner)
            add(f"{at}.input_layernorm.weight", HIDDEN)
            continue
        add(f"{at}.self_attention.linear_qkv.weight", rows * run.tensor, HIDDEN)
        add(f"{at}.self_attention.linear_qkv.bias", rows * run.tensor)
        add(f"{at}.self_attention.linear_qkv.layer_norm_weight", HIDDEN)
        add(f"{at}.self_attention.linear_proj.weight", HIDDEN, 2 * run.tensor)
        if not run.experts:
            add(f"{at}.mlp.linear_fc1.weight", 2 * inner, HIDDEN)
            add(f"{at}.mlp.linear_fc2.weight", HIDDEN, inner)
        else:
            add(f"{at}.mlp.router.weight", run.experts, HIDDEN)
        for expert in range(run.experts):
            add(f"{at}.mlp.experts.local_experts.{expert}.linear_fc1.weight", 2 * inner, HIDDEN)
            add(f"{at}.mlp.experts.local_experts.{expert}.linear_fc2.weight", HIDDEN, inner)
    add(f"{norm}.weight", HIDDEN)
    add(f"{head}.weight", 5 * run.tensor, HIDDEN)
    return made


NAMES = {
    False: ("embedding.word_embeddings", "decoder.layers", "decoder.final_layernorm", "output_layer"),
    True: ("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
}


def shard(run: Run, name: str, values: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """What one of the ranks holds of a tensor."""
    if "qkv_proj" in name:
        q, k, v = np.split(values, [2 * run.heads, 2 * (run.heads + run.groups)])
        copies = max(ranks // run.groups, 1)
        mine = [np.array_split(q, ranks)[rank]]
        mine += [np.array_split(part, max(ranks // copies, 1))[rank // copies] for part in (k, v)]
        return np.concatenate(mine)
    if "linear_fc1" in name or "gate_up_proj" in name:
        return np.concatenate([np.split(half, ranks)[rank] for half in np.split(values, 2)])
    if "linear_proj" in name or "linear_fc2" in name or "o_proj" in name or "down_proj" in name:
        return np.split(values, ranks, axis=1)[rank]
    if "norm" in name or "router" in name:
        return values
    return np.split(values, ranks)[rank]


def stages(run: Run, tensors: dict[str, np.ndarray], tensor: int, pipeline: int, expert: int) -> Iterator[OrderedDict]:
    """The state dicts of one rank's virtual stages, with local numbers."""
    embedding, layers, _, _ = NAMES[run.verl]
    last = len(run.layers) - 1, run.pipeline - 1
    first = 0
    for number, counts in enumerate(run.layers):
        begin = first + sum(counts[:pipeline])
        first += sum(counts)
        made = OrderedDict()
        for name, values in tensors.items():
            local = name
            if name.startswith(f"{layers}."):
                layer = int(name.split(".")[2])
                if not begin <= layer < begin + counts[pipeline]:
                    continue
                local = name.replace(f"{layers}.{layer}.", f"{layers}.{layer - begin}.")
            elif (number, pipeline) != ((0, 0) if name.startswith(embedding) else last):
                continue
            rank, ranks = tensor, run.tensor
            if ".local_experts." in name:
                which = int(name.split(".local_experts.")[1].split(".")[0])
                per_rank = run.experts // run.expert
                if which // per_rank != expert:
                    continue
                local = local.replace(f"local_experts.{which}.", f"local_experts.{which - expert * per_rank}.")
                rank, ranks = tensor % run.expert_tensor, run.expert_tensor
            made[local] = torch.from_numpy(shard(run, name, values, rank, ranks).copy())
            made[local.rpartition(".")[0] + "._extra_state"] = None
        yield made


def write_run(folder: Path, run: Run, tensors: dict[str, np.ndarray]) -> None:
    """Write every rank file."""
    for pipeline in range(run.pipeline):
        for tensor, expert in sorted(run.saved()):
            place = folder / run.folder(tensor, pipeline, expert)
            place.mkdir(parents=True)
            made = list(stages(run, tensors, tensor, pipeline, expert))
            if run.verl:
                torch.save(made, place / "model.pt")
            else:
                torch.save(megatron_lm(run, made), place / "model_optim_rng.pt")


def megatron_lm(run: Run, made: list[OrderedDict]) -> dict:
    arguments = Namespace(
        tensor_model_parallel_size=run.tensor,
        pipeline_model_parallel_size=run.pipeline,
        expert_model_parallel_size=run.expert,
        expert_tensor_parallel_size=run.expert_tensor,
    )
    models = {"model": made[0]} if len(made) == 1 else {f"model{n}": stage for n, stage in enumerate(made)}
    return {"args": arguments, "checkpoint_version": 3.0, "iteration": 7, **models}
