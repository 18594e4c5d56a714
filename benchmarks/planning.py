"""Planning alone, at the size of the largest runs: many tensors, many ranks, no weights on the disk."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from torch.distributed.tensor.placement_types import Shard

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


def main(folder: str) -> None:
    """Plan a checkpoint and print seconds, pieces and peak memory as JSON."""
    from workers.convert import plan_source
    from workers.inspect import inspect
    from workers.options import ConvertOptions

    before = _peak_bytes()
    began, cpu = time.perf_counter(), time.process_time()
    plan = plan_source(folder, ConvertOptions())
    planned = time.perf_counter() - began
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = time.process_time() - cpu + children.ru_utime + children.ru_stime
    pieces = len(plan.checkpoint.pieces)
    peak = _peak_bytes() - before
    del plan
    began = time.perf_counter()
    inspect(folder)
    print(
        json.dumps(
            {
                "pieces": pieces,
                "seconds": planned,
                "cpu_seconds": cpu,
                "peak_bytes": peak,
                "inspect_seconds": time.perf_counter() - began,
            }
        )
    )


def _peak_bytes() -> int:
    """Most memory that this process held so far; unlike getrusage's, it starts anew with each program."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main(sys.argv[1])
