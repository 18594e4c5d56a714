"""Arithmetic on a GPU, with the same bytes as on the CPU: casts are the same integer operations.

Only actors that were given a GPU import this module, and with it torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.arithmetic import NumpyArithmetic
from workers.errors import InsufficientResources

Elements = NDArray[Any]

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class TorchArithmetic:
    """Arithmetic on one torch device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._cpu = NumpyArithmetic()

    @classmethod
    def on_gpu(cls) -> TorchArithmetic:
        """On the GPU that this process was given."""
        if not torch.cuda.is_available():
            raise InsufficientResources(
                "a worker was given a GPU, but its torch finds none",
                hint="Install a CUDA build of torch on the workers, or run them with num_gpus=0.",
            )
        return cls("cuda")

    def cast(self, values: Elements, source: str, out: Elements, target: str) -> None:
        """See ``Arithmetic.cast``. float32 to bfloat16 runs on the device; rarer casts are left to the CPU."""
        if (source, target) != ("F32", "BF16"):
            self._cpu.cast(values, source, out, target)
            return
        bits = self._to_device(values).to(torch.int64) & 0xFFFFFFFF
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = torch.where(is_nan, ((bits >> 16) & 0x8000) | 0x7FC0, rounded)
        out[...] = rounded.to(torch.int32).cpu().numpy().astype(np.uint16)

    def add_lora(
        self,
        operands: tuple[tuple[Elements, str], tuple[Elements, str], tuple[Elements, str]],
        scale: float,
        out: Elements,
        target: str,
    ) -> None:
        """See ``Arithmetic.add_lora``; the product is made on the device in full float32 precision."""
        base, a, b = (
            torch.from_numpy(self._cpu.as_float32(values, dtype)).to(self._device) for values, dtype in operands
        )
        merged = torch.addmm(base, b, a, alpha=scale).cpu().numpy()
        self._cpu.cast(np.ascontiguousarray(merged).view(np.uint32), "F32", out, target)

    def multiply(
        self, values: tuple[Elements, str], factors: tuple[Elements, str], out: Elements, target: str
    ) -> None:
        """See ``Arithmetic.multiply``: one product of two floats has the same bits everywhere, so the CPU makes it."""
        self._cpu.multiply(values, factors, out, target)

    def _to_device(self, values: Elements) -> torch.Tensor:
        signed = np.ascontiguousarray(values).view(_SIGNED[values.dtype.itemsize])
        return torch.from_numpy(signed).to(self._device)
