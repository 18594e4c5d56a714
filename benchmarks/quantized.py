"""Quantised results against loading, quantising with torch and saving in one process.

``python -m benchmarks.quantized SCHEME SOURCE OUT`` is that other way: what a script for a model in memory does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.measure import Series, copy_and_sync, interleave, run_command

SCRATCH = Path(".bench")
UNSHARD = str(Path(sys.executable).parent / "unshard")
SCHEMES = ("fp8-block-128", "fp8-dynamic", "int8-w8a8", "int4-w4a16-g128")


def measure(checkpoint: Path, arguments: argparse.Namespace) -> tuple[list[Series], float]:
    """The rows of all schemes for a bfloat16 model made of the checkpoint, and the model's size in GB."""
    model = SCRATCH / "model-bfloat16"
    command = [UNSHARD, "convert", str(checkpoint), str(model), "--dtype", "bfloat16", "--overwrite"]
    subprocess.run(command, check=True, capture_output=True)
    runs: dict[str, Callable[[Path], tuple[float, int]]] = {
        "cp -r, fsync": lambda out: (copy_and_sync(model, out), 0),
        "unshard convert": _unshard(model),
    }
    for scheme in SCHEMES:
        runs[f"unshard, {scheme}"] = _unshard(model, "--quantization", scheme)
        runs[f"torch, {scheme}"] = _torch(model, scheme)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return interleave(runs, SCRATCH, arguments.repetitions), size / 10**9


def _unshard(model: Path, *options: str) -> Callable[[Path], tuple[float, int]]:
    return lambda out: run_command([UNSHARD, "convert", str(model), str(out), *options])


def _torch(model: Path, scheme: str) -> Callable[[Path], tuple[float, int]]:
    return lambda out: run_command([sys.executable, "-m", "benchmarks.quantized", scheme, str(model), str(out)])


def quantized(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales of a matrix, whole tensors at a time."""
    if scheme == "fp8-block-128":
        blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))  # rows of blocks, 128, columns, 128
        factors = 448.0 / blocks.abs().amax(dim=(1, 3), keepdim=True)
        return (blocks * factors).clamp(-448, 448).reshape(weight.shape).to(torch.float8_e4m3fn), 1 / factors
    if scheme == "int4-w4a16-g128":
        groups = weight.unflatten(1, (-1, 128))
        scale = groups.abs().amax(2, keepdim=True) / 7.5
        numbers = ((groups / scale).clamp(-8, 7).round().to(torch.int32) + 8).reshape(len(weight), -1, 8)
        words = torch.zeros(numbers.shape[:2], dtype=torch.int32)
        for place in range(8):
            words |= numbers[:, :, place] << (4 * place)
        return words, scale.squeeze(2)
    limit, low, high = (448.0, -448, 448) if scheme == "fp8-dynamic" else (127.5, -128, 127)
    scale = weight.abs().amax(1, keepdim=True) / limit
    scaled = (weight / scale).clamp(low, high)
    return (scaled.to(torch.float8_e4m3fn) if limit == 448.0 else scaled.round().to(torch.int8)), scale


def main(scheme: str, source: str, destination: str) -> None:
    """Load every weight, quantise the linear layers', save."""
    out = Path(destination)
    out.mkdir(parents=True)
    for path in sorted(Path(source).glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(path).items():
            if name.endswith("_proj.weight"):
                tensors[name], tensors[f"{name}_scale"] = quantized(tensor, scheme)
            else:
                tensors[name] = tensor
        save_file(tensors, out / path.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
