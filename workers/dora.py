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
from workers.expressions import AddLora, Context, Expression, Need
from workers.geometry import Shape


@dataclass(frozen=True, slots=True)
class AddDora:
    """``magnitude * sum`` with each row of the sum divided by its norm, rounded to the base's dtype.

    sum [out, in], magnitude [out]; computed in float32, so that the sum is not rounded between.
    """

    sum: AddLora
    magnitude: Expression

    @property
    def dtype(self) -> str:
        return self.sum.dtype

    @property
    def shape(self) -> Shape:
        return self.sum.shape

    @property
    def unit_elements(self) -> int:
        return self.sum.unit_elements

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        yield from self.sum.requires((offsets[0], 0), (sizes[0], self.shape[1]))
        yield from self.magnitude.requires(offsets[:1], sizes[:1])

    def fill(self, out: NDArray[Any], offsets: Shape, context: Context) -> None:
        arithmetic = NumpyArithmetic()
        operands = self.sum.operands((offsets[0], 0), (out.shape[0], self.shape[1]), context)
        base, a, b = (arithmetic.as_float32(*operand) for operand in operands)
        merged = b @ a
        merged *= np.float32(self.sum.scale)
        np.add(base, merged, out=merged)
        magnitude = np.empty(out.shape[:1], dtype=ELEMENT_TYPES[self.magnitude.dtype].numpy_type)
        self.magnitude.fill(magnitude, offsets[:1], context)
        with np.errstate(divide="ignore", invalid="ignore"):  # a row of zeros becomes no number, as in peft
            factor = arithmetic.as_float32(magnitude, self.magnitude.dtype) / np.linalg.norm(merged, axis=1)
            merged *= factor[:, None]
        result = np.ascontiguousarray(merged[:, offsets[1] : offsets[1] + out.shape[1]])
        context.arithmetic.cast(result.view(np.uint32), "F32", out, self.dtype)
