"""Small DeepSpeed checkpoints of any geometry, written by torch from numpy values as DeepSpeed would lay them out.

Follows ``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` step by step and shares nothing with the reader.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import torch

Values = dict[str, np.ndarray]


def values_of(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Values:
    """Different numbers for all elements, as float32."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def tensor(values: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def model_states(path: Path, module: dict[str, torch.Tensor], groups: list[Values], **more: object) -> None:
    """Write a file of model states."""
    path.parent.mkdir(parents=True, exist_ok=True)
    states = {
        "module": module,
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(value.shape) for name, value in group.items()} for group in groups],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "ds_version": "0.19.8",
    }
    torch.save({**states, **more}, path)


def half(groups: list[Values]) -> dict[str, torch.Tensor]:
    """The module's 16-bit weights."""
    return {name: tensor(value, torch.bfloat16) for group in groups for name, value in group.items()}


def placeholders(groups: list[Values]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(0, dtype=torch.bfloat16) for group in groups for name in group}


def stage_1_or_2(
    folder: Path,
    groups: list[Values],
    world: int,
    *,
    mp: int = 0,
    gap: int = 0,
    keep_tail: bool = False,
    **more: object,
) -> None:
    """Write the files of one model-parallel rank; ``gap`` elements of padding follow each parameter."""
    model_states(folder / f"mp_rank_{mp:02d}_model_states.pt", half(groups), groups, **more)
    pieces: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for group in groups:
        flat = np.concatenate([np.pad(value.reshape(-1), (0, gap), constant_values=7) for value in group.values()])
        used = len(flat)
        flat = np.pad(flat, (0, -used % (2 * world)), constant_values=9)
        share = len(flat) // world
        for rank in range(world):
            end = (rank + 1) * share if keep_tail else min((rank + 1) * share, max(used, rank * share))
            pieces[rank].append(tensor(flat[rank * share : end]))
    for rank in range(world):
        state = {
            "single_partition_of_fp32_groups": pieces[rank],
            "zero_stage": 1,
            "partition_count": [world] * len(groups),
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(3)}}},
        }
        if gap:
            state["param_alignment_paddings"] = [[gap] * len(group) for group in groups]
        torch.save({"optimizer_state_dict": state}, folder / optimizer_name(rank, mp))


def stage_3(folder: Path, groups: list[Values], world: int, frozen: Values | None = None, **more: object) -> None:
    """Write the files of all ranks; frozen parameters are cut as the others and stay in 16 bits."""
    folder.mkdir(parents=True, exist_ok=True)
    frozen = frozen or {}
    for rank in range(world):
        states = {
            "frozen_param_shapes": {name: torch.Size(value.shape) for name, value in frozen.items()},
            "frozen_param_fragments": {n: tensor(cut(v, world)[rank], torch.bfloat16) for n, v in frozen.items()},
            **more,
        }
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        model_states(path, placeholders([*groups, frozen]), groups, **states)
        flat = [tensor(np.concatenate([cut(value, world)[rank] for value in group.values()])) for group in groups]
        state = {"zero_stage": 3, "partition_count": world, "fp32_flat_groups": flat}
        torch.save({"optimizer_state_dict": state}, folder / optimizer_name(rank))


def cut(value: np.ndarray, world: int) -> np.ndarray:
    """Equal pieces of a parameter, with padding at the end."""
    share = -(-prod(value.shape) // world)
    return np.pad(value.reshape(-1), (0, share * world - value.size), constant_values=5).reshape(world, share)


def optimizer_name(rank: int, mp: int = 0) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of values rounded to bfloat16."""
    return tensor(values, torch.bfloat16).view(torch.uint16).numpy()
