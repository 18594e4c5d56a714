"""Planning alone, at the size of the largest runs: many tensors, many ranks, no weights on the disk."""

from __future__ import annotations

import json
import resource
import sys
import time
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


def main(folder: str, what: str) -> None:
    """Plan or inspect a checkpoint and print seconds, pieces and peak memory as JSON."""
    from workers.convert import plan_source
    from workers.inspect import inspect
    from workers.options import ConvertOptions

    before = _peak_bytes()
    began, cpu = time.perf_counter(), time.process_time()
    plan = plan_source(folder, ConvertOptions()) if what == "plan" else None
    checkpoint = inspect(folder).checkpoint if plan is None else plan.checkpoint
    seconds = time.perf_counter() - began
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {
        "pieces": len(checkpoint.pieces),
        "targets": 0 if plan is None else len(plan.targets),
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu + children.ru_utime + children.ru_stime,
        "peak_bytes": _peak_bytes() - before,
    }
    print(json.dumps(found))


def _peak_bytes() -> int:
    """Most memory that this process held so far; unlike getrusage's, it starts anew with each program."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
