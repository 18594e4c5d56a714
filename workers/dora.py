"""DoRA: a LoRA sum whose rows get the lengths that training found for them.

Source: peft ``tuners/lora/dora.py`` and ``tuners/lora/layer.py`` (``merge`` with ``use_dora``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.arithmetic import NumpyArithmetic
from workers.dtypes import ELEMENT_TYPES
from workers.expressions import LORA_UNIT_ROWS, Context, Expression, Need
from workers.geometry import Shape


@dataclass(frozen=True, slots=True)
class AddDora:
    """``magnitude * (base + scale * (b @ a))`` with each row divided by its norm, rounded to the base's dtype.

    base [out, in], b [out, r], a [r, in], magnitude [out]; computed in float32.
    """

    base: Expression
    a: Expression
    b: Expression
    magnitude: Expression
    scale: float

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> Shape:
        return self.base.shape

    @property
    def unit_elements(self) -> int:
        return max(self.shape[1] * min(LORA_UNIT_ROWS, self.shape[0]), self.base.unit_elements)

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        (row, _), (rows, _) = offsets, sizes
        yield from self.base.requires((row, 0), (rows, self.shape[1]))
        yield from self.b.requires((row, 0), (rows, self.b.shape[1]))
        yield from self.a.requires((0, 0), self.a.shape)
        yield from self.magnitude.requires((row,), (rows,))

    def fill(self, out: NDArray[Any], offsets: Shape, context: Context) -> None:
        row, rows = offsets[0], out.shape[0]
        base = _numbers(self.base, (row, 0), (rows, self.shape[1]), context)
        b = _numbers(self.b, (row, 0), (rows, self.b.shape[1]), context)
        a = _numbers(self.a, (0, 0), self.a.shape, context)
        magnitude = _numbers(self.magnitude, (row,), (rows,), context)
        merged = base + np.float32(self.scale) * (b @ a)
        factor = magnitude / np.linalg.norm(merged, axis=1)
        result = np.ascontiguousarray((factor[:, None] * merged)[:, offsets[1] : offsets[1] + out.shape[1]])
        context.arithmetic.cast(result.view(np.uint32), "F32", out, self.dtype)


def _numbers(expression: Expression, offsets: Shape, sizes: Shape, context: Context) -> NDArray[np.float32]:
    values = np.empty(sizes, dtype=ELEMENT_TYPES[expression.dtype].numpy_type)
    expression.fill(values, offsets, context)
    return NumpyArithmetic().as_float32(values, expression.dtype)
