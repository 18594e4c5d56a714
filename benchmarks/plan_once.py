"""Plan or inspect one checkpoint and print as JSON what it took.

Usage: ``python -m benchmarks.plan_once FOLDER plan|inspect``.

Imports nothing that planning does not, since memory is counted from where this begins.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path


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
