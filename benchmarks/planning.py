"""Checkpoints of the size of the largest runs to plan: many tensors, many ranks, no weights on the disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.distributed.tensor.placement_types import Shard

from benchmarks.deepseek import CONFIG, hub_tensors, megatron_tensors
from benchmarks.sparse_dcp import write_sparse
from tests.rank_files import Saved, write_rank_file


def make_metadata(folder: Path, tensors: int, ranks: int) -> None:
    """Rank files of tiny tensors: planning looks at their metadata alone, which is as large as any model's."""
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text(
        json.dumps({"model_type": "benchmark", "architectures": ["None"]})
    )
    saved = {f"model.layers.{n // 12}.part{n % 12}.weight": Saved((ranks, 4), (Shard(0),)) for n in range(tensors)}
    for rank in range(ranks):
        write_rank_file(folder / f"model_world_size_{ranks}_rank_{rank}.pt", saved, (ranks,), rank)
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))


def make_hub_run(folder: Path) -> None:
    """Make DeepSeek-V3 as torch DCP saves it: experts over 64 groups of 8 ranks, everything else over all 512."""
    _made(write_sparse(folder, hub_tensors(expert_groups=64, shards=8)), folder)


def make_megatron_run(folder: Path) -> None:
    """Make DeepSeek-V3 as Megatron-Core saves it: 4 tensor-parallel, 64 expert-parallel, 8 pipeline ranks."""
    _made(write_sparse(folder, megatron_tensors(tensor_ranks=4, expert_ranks=64, pipeline_ranks=8)), folder)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backend | {"common_backend_version": 1}))


def _made(chunks: int, folder: Path) -> None:
    print(f"{folder}: {chunks:,} chunks", file=sys.stderr)
    (folder / "config.json").write_text(json.dumps(CONFIG))
