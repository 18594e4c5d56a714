"""Every source format against its framework's own tool, side by side on the same checkpoint."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Measured, Series, copy_and_sync, interleave, run_command

SCRATCH = Path(".bench")

Run = Callable[[Path], Measured]


@dataclass(frozen=True)
class Peer:
    """A framework's tool: its name in the table and the command, in which SOURCE and OUT are replaced."""

    name: str
    command: tuple[str, ...]


def peers(arguments: argparse.Namespace) -> dict[str, Peer]:
    """The peer of each format that can run here."""
    scripts = (sys.executable, "-m", "benchmarks.peer_scripts")
    accelerate = str(Path(sys.executable).parent / "accelerate")
    found = {
        "dcp": Peer("dcp_to_torch_save", (*scripts, "dcp_to_torch_save", "SOURCE", "OUT")),
        "accelerate": Peer("accelerate merge-weights", (accelerate, "merge-weights", "SOURCE", "OUT")),
        "dcp-safetensors": Peer("consolidate_safetensors_files", (*scripts, "consolidate", "SOURCE", "OUT")),
    }
    if arguments.deepspeed_python:
        tool = (arguments.deepspeed_python, "-m", "deepspeed.utils.zero_to_fp32", "SOURCE", "OUT")
        found |= {
            kind: Peer("zero_to_fp32.py", (*tool, "--safe_serialization", "--max_shard_size", "100GB"))
            for kind in ("zero-2", "zero-3")
        }
    naive = ("megatron-dist", "megatron-legacy", "torchtune", "meta")
    return found | {kind: Peer("load, concatenate, save_file", (*scripts, kind, "SOURCE", "OUT")) for kind in naive}


def source(kind: str, size_gb: float) -> Path:
    """A generated checkpoint; made anew for each run, since those of all formats would fill a disk."""
    folder = SCRATCH / f"source-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    making = "import sys; from pathlib import Path; from benchmarks.sources import write_source as w; "
    making += "print(w(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))"
    command = [sys.executable, "-c", making, kind, str(folder), str(int(size_gb * 10**9))]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def measure(kind: str, arguments: argparse.Namespace) -> list[Series]:
    """The series of one format, after both sides made the same tensors."""
    folder = source(kind, arguments.size_gb)
    inner = folder / "pytorch_model_fsdp_0"
    place = inner if inner.exists() else folder
    unshard = str(Path(sys.executable).parent / "unshard")
    runs: dict[str, Run] = {
        "cp -r, fsync": lambda out: copy_and_sync(folder, out),
        "unshard convert": lambda out: run_command([unshard, "convert", str(folder), str(out)]),
    }
    peer = peers(arguments).get(kind)
    if peer is not None:
        replaced = {"SOURCE": str(place)}

        def tool(out: Path) -> Measured:
            return run_command([replaced.get(part, str(out) if part == "OUT" else part) for part in peer.command])

        runs[peer.name] = tool
        check_same_tensors(runs["unshard convert"], tool)
    series = interleave(runs, SCRATCH, arguments.repetitions)
    shutil.rmtree(folder)
    return series


def check_same_tensors(first: Run, second: Run) -> None:
    """Run both once and compare every element of every tensor: speed counts only where the results agree."""
    import torch

    loaded = []
    for name, run in (("a", first), ("b", second)):
        out = SCRATCH / f"same-{name}"
        shutil.rmtree(out, ignore_errors=True)
        run(out)
        loaded.append(dict(_tensors(out)))
    a, b = loaded
    same = a.keys() == b.keys() and all(torch.equal(values, b[name]) for name, values in a.items())
    for name in ("a", "b"):
        shutil.rmtree(SCRATCH / f"same-{name}")
    if not same:
        raise RuntimeError("the two results differ")


def _tensors(folder: Path) -> Iterator[tuple[str, object]]:
    import torch
    from safetensors.torch import load_file

    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            yield from load_file(path).items()
        elif path.suffix == ".bin":
            yield from torch.load(path, mmap=True, weights_only=True).items()


def table(arguments: argparse.Namespace) -> list[str]:
    """One row for each format: the median seconds and peak memory of each side."""
    rows = [
        f"### Every format, {arguments.size_gb:g} GB of float32 weights, 4 ranks, whole commands",
        "",
        "CPU s are seconds of processor, which other work on the machine hardly changes.",
        "",
        "| format | cp, fsync, s | unshard, s | x cp | CPU s | MiB | its own tool | s | CPU s | MiB | x our CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in arguments.formats.split(","):
        copy, ours, *others = measure(kind, arguments)
        peer = others[0] if others else None
        ratio = ours.median / copy.median
        row = f"| {kind} | {copy.median:.2f} | {ours.median:.2f} | {ratio:.2f} | {ours.cpu:.2f} | {ours.peak} | "
        if peer is not None:
            row += f"{peer.name} | {peer.median:.2f} | {peer.cpu:.2f} | {peer.peak} | {peer.cpu / ours.cpu:.1f} |"
        rows.append(row if peer is not None else f"{row}not at hand | | | | |")
        print(rows[-1], flush=True)
    return rows
