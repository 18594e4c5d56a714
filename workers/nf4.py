"""NF4 weights as torchao's QLoRA keeps them: two elements in a byte, in blocks whose scales are quantised again.

Each step is rounded to the original dtype, as torchao computes it on the CPU; the table of values is the file's own.
Source: torchao 0.13 ``dtypes/nf4tensor.py`` (``get_original_weight``, ``dequantize_scalers``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.arithmetic import NumpyArithmetic
from workers.checkpoint import PackedTensor
from workers.dtypes import ELEMENT_TYPES
from workers.expressions import Context, Expression, Need, Reshape
from workers.geometry import Shape

PARTS = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
"""The tensors that an NF4 tensor consists of."""
VALUES = 16
"""Values that four bits can stand for."""

Floats = NDArray[np.float32]


def part_name(name: str, part: str) -> str:
    """What a part of a packed tensor is called among the checkpoint's tensors."""
    return f"{name}::{part}"


def unpacked(packed: PackedTensor, parts: Mapping[str, Expression]) -> Expression:
    """The tensor's values, from its parts by the names of ``PARTS``."""
    return Reshape(DequantizeNf4(packed, *(parts[part] for part in PARTS)), packed.shape)


@dataclass(frozen=True, slots=True)
class DequantizeNf4:
    """The elements of an NF4 tensor in row-major order: a table's value times the scale of its block.

    data U8 [elements / 2], the high half first; scalers I8 [blocks]; factors [blocks of scalers]; mean []; table [16].
    """

    packed: PackedTensor
    data: Expression
    scalers: Expression
    factors: Expression
    mean: Expression
    table: Expression

    @property
    def dtype(self) -> str:
        return self.packed.dtype

    @property
    def shape(self) -> Shape:
        return (prod(self.packed.shape),)

    @property
    def unit_elements(self) -> int:
        return self.packed.block_size

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        data, blocks, factors = self._ranges(offsets[0], sizes[0])
        for expression, (start, stop) in ((self.data, data), (self.scalers, blocks), (self.factors, factors)):
            yield from expression.requires((start,), (stop - start,))
        yield from self.mean.requires((), ())
        yield from self.table.requires((0,), (VALUES,))

    def fill(self, out: NDArray[Any], offsets: Shape, context: Context) -> None:
        start, count = offsets[0], out.shape[0]
        data, blocks, _ = self._ranges(start, count)
        pairs = _values(self.data, data, context)
        halves = np.stack((pairs >> 4, pairs & 15), axis=1).reshape(-1)[start - 2 * data[0] :][:count]
        values = _values(self.table, (0, VALUES), context)[halves]
        scales = self._scales(start, count, context)
        spread = np.repeat(scales, self.packed.block_size)[start - blocks[0] * self.packed.block_size :][:count]
        context.arithmetic.multiply((values, self.dtype), (spread, self.dtype), out, self.dtype)

    def _scales(self, start: int, count: int, context: Context) -> NDArray[Any]:
        """The scales of the blocks, dequantised themselves: round(scaler / factor) + mean, rounded again."""
        _, blocks, factors = self._ranges(start, count)
        scalers = _values(self.scalers, blocks, context).view(np.int8).astype(np.float32)
        known = NumpyArithmetic().as_float32(_values(self.factors, factors, context), self.dtype)
        own = known[np.arange(*blocks) // self.packed.scaler_block_size - factors[0]]
        mean = np.empty((), dtype=ELEMENT_TYPES[self.dtype].numpy_type)
        self.mean.fill(mean, (), context)
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = self._rounded(scalers / own)
        total = NumpyArithmetic().as_float32(quotient, self.dtype) + NumpyArithmetic().as_float32(
            mean.reshape(1), self.dtype
        )
        return self._rounded(total)

    def _rounded(self, values: Floats) -> NDArray[Any]:
        out = np.empty(values.shape, dtype=ELEMENT_TYPES[self.dtype].numpy_type)
        NumpyArithmetic().cast(values.view(np.uint32), "F32", out, self.dtype)
        return out

    def _ranges(self, start: int, count: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Which bytes, scalers and factors some elements need."""
        stop = start + count
        blocks = start // self.packed.block_size, -(-stop // self.packed.block_size)
        factors = blocks[0] // self.packed.scaler_block_size, -(-blocks[1] // self.packed.scaler_block_size)
        return (start // 2, -(-stop // 2)), blocks, factors


def _values(expression: Expression, span: tuple[int, int], context: Context) -> NDArray[Any]:
    out = np.empty(span[1] - span[0], dtype=ELEMENT_TYPES[expression.dtype].numpy_type)
    expression.fill(out, (span[0],), context)
    return out
