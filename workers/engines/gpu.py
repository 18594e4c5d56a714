"""Arithmetic on a GPU, with the same bytes as on the CPU: the same operations, each rounded as IEEE 754 says.

Only actors that were given a GPU import this module, and with it torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.arithmetic import NumpyArithmetic
from workers.errors import InsufficientResources
from workers.quantization import EPSILON, LARGEST_FLOAT32, Scheme

Elements = NDArray[Any]

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
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

    def quantize(self, values: Elements, dtype: str, scheme: Scheme) -> Elements:
        """See ``Arithmetic.quantize``."""
        scaled = self._to_device(values).view(_TORCH[dtype]).float()
        spread = _spread(_scaling(scaled, dtype, scheme), scaled.shape, scheme)
        scaled = scaled * spread if scheme.in_float32 else (scaled / spread).to(_TORCH[dtype]).float()
        scaled = scaled.clamp(scheme.lowest, scheme.highest)
        if scheme.dtype == "F8_E4M3":
            return _raw(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
        numbers = scaled.round().to(torch.int32)
        if scheme.per_word == 1:
            return _raw(numbers.to(torch.int8))
        places = torch.arange(0, 32, 32 // scheme.per_word, device=numbers.device)
        halves = (numbers - int(scheme.lowest)).reshape(len(numbers), -1, scheme.per_word)
        words = (halves.long() << places).sum(dim=2)
        return _raw(torch.where(words >= 2**31, words - 2**32, words).to(torch.int32))

    def scales(self, values: Elements, dtype: str, scheme: Scheme) -> Elements:
        """See ``Arithmetic.scales``."""
        found = _scaling(self._to_device(values).view(_TORCH[dtype]).float(), dtype, scheme)
        return _raw(torch.ones_like(found) / found if scheme.in_float32 else found.to(_TORCH[dtype]))

    def _to_device(self, values: Elements) -> torch.Tensor:
        signed = np.ascontiguousarray(values).view(_SIGNED[values.dtype.itemsize])
        return torch.from_numpy(signed).to(self._device)


def _scaling(values: torch.Tensor, dtype: str, scheme: Scheme) -> torch.Tensor:
    """What each group is multiplied with or divided by, in float32 [grid]."""
    rows, columns = scheme.grid(tuple(values.shape))
    high, wide = scheme.group[0], scheme.columns(values.shape[1])
    # Zeros behind the last rows and columns don't change what is largest.
    filled = torch.nn.functional.pad(values.abs(), (0, columns * wide - values.shape[1], 0, rows * high - len(values)))
    largest = filled.reshape(rows, high, columns, wide).amax(dim=(1, 3))
    if scheme.in_float32:
        factors = (torch.ones_like(largest) / largest * scheme.limit).clamp(max=float(LARGEST_FLOAT32))
        return torch.where(largest > 0, factors, torch.ones_like(factors))
    steps = (largest / scheme.limit).to(_TORCH[dtype]).float()
    return torch.where(steps > 0, steps, torch.full_like(steps, EPSILON[dtype]))


def _spread(groups: torch.Tensor, shape: torch.Size, scheme: Scheme) -> torch.Tensor:
    """A value of each group for each of its elements."""
    wide = groups.repeat_interleave(scheme.group[0], 0)[: shape[0]]
    return wide.repeat_interleave(scheme.columns(shape[1]), 1)[:, : shape[1]]


def _raw(values: torch.Tensor) -> Elements:
    """The elements of a tensor, as unsigned numbers of their width."""
    width = values.element_size()
    signed = values.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[width]).cpu().numpy()
    raw: Elements = signed.view(np.dtype(f"u{width}"))
    return raw
