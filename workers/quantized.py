"""Expressions of quantised weights: the small numbers, and their scales. ``workers.quantization`` has the arithmetic.

Both are made from the weight: its largest magnitudes are found anew for each, so that a weight is read twice. No part
has to wait for another then, and a worker holds no more than the groups it works on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.dtypes import ELEMENT_TYPES
from workers.errors import InvalidOption
from workers.expressions import Context, Expression, Need
from workers.geometry import Shape
from workers.quantization import Scheme, first_not_finite

Elements = NDArray[Any]

CHUNK_ELEMENTS = 1 << 20
"""Weights whose scales are made at a time."""


@dataclass(frozen=True, slots=True)
class Quantize:
    """The numbers of a weight [out, in] under a scheme: [out, in], or [out, in / 8] where eight lie in a word.

    Whole rows of groups are read: 128 rows for FP8 in blocks, else one. Filling raises ``InvalidOption``, with the
    name of the weight, for one that holds an infinity or NaN: no scale stands for these.
    """

    weight: Expression
    scheme: Scheme
    name: str

    @property
    def dtype(self) -> str:
        return self.scheme.dtype

    @property
    def shape(self) -> Shape:
        return self.weight.shape[0], self.weight.shape[1] // self.scheme.per_word

    @property
    def inputs_per_element(self) -> int:
        return self.scheme.per_word

    @property
    def unit_elements(self) -> int:
        return _unit_rows(self.weight, self.scheme) * self.shape[1]

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        yield from self.weight.requires(*self._region(offsets, sizes))

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        begin, sizes = self._region(offsets, out.shape)
        weight = _finite(self, begin, sizes, context)
        numbers = context.arithmetic.quantize(weight, self.weight.dtype, self.scheme)
        row, column = offsets[0] - begin[0], offsets[1] - begin[1] // self.scheme.per_word
        out[...] = numbers[row : row + out.shape[0], column : column + out.shape[1]]

    def _region(self, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape]:
        """The box of the weight with every group that a box touches."""
        columns = self.scheme.columns(self.weight.shape[1])
        low = offsets[0] // self.scheme.group[0], offsets[1] * self.scheme.per_word // columns
        last = offsets[0] + sizes[0], (offsets[1] + sizes[1]) * self.scheme.per_word
        high = -(-last[0] // self.scheme.group[0]), -(-last[1] // columns)
        return _groups_region(self.weight.shape, self.scheme, low, high)


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a weight [out, in] under a scheme: a number for each group, as many rows and columns as these."""

    weight: Expression
    scheme: Scheme
    name: str

    @property
    def dtype(self) -> str:
        return self.scheme.scale_dtype(self.weight.dtype)

    @property
    def shape(self) -> Shape:
        return self.scheme.grid(self.weight.shape)

    @property
    def inputs_per_element(self) -> int:
        return self.scheme.group[0] * self.scheme.columns(self.weight.shape[1])

    @property
    def unit_elements(self) -> int:
        return _unit_rows(self.weight, self.scheme) // self.scheme.group[0] * self.shape[1]

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        yield from self.weight.requires(*self._region(offsets, sizes))

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        region = self._region(offsets, (1, out.shape[1]))[1]
        step = max(1, CHUNK_ELEMENTS // max(1, region[0] * region[1]))
        for row in range(0, out.shape[0], step):
            window = out[row : row + step]
            weight = _finite(self, *self._region((offsets[0] + row, offsets[1]), window.shape), context)
            window[...] = context.arithmetic.scales(weight, self.weight.dtype, self.scheme)

    def _region(self, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape]:
        low = offsets[0], offsets[1]
        return _groups_region(self.weight.shape, self.scheme, low, (low[0] + sizes[0], low[1] + sizes[1]))


@dataclass(frozen=True, slots=True)
class Constant:
    """Whole numbers that no source holds, such as the shape of a packed weight."""

    values: tuple[int, ...]
    dtype: str = "I64"
    unit_elements: int = 1

    @property
    def shape(self) -> Shape:
        return (len(self.values),)

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:  # noqa: ARG002 - as the protocol has it
        return iter(())

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:  # noqa: ARG002 - as the protocol has it
        out[...] = np.array(self.values[offsets[0] : offsets[0] + len(out)], dtype=np.int64).astype(out.dtype)


def _unit_rows(weight: Expression, scheme: Scheme) -> int:
    """Rows of a weight that are made at once: whole groups, and as many as the weight itself wants to be cut at."""
    rows, columns = weight.shape
    wanted = -(-weight.unit_elements // max(1, columns))
    whole_groups = -(-rows // scheme.group[0]) * scheme.group[0]
    return min(lcm(scheme.group[0], wanted), whole_groups)


def _groups_region(shape: Shape, scheme: Scheme, low: tuple[int, int], high: tuple[int, int]) -> tuple[Shape, Shape]:
    """The box of a matrix that the groups [low, high) cover."""
    size = scheme.group[0], scheme.columns(shape[1])
    begin = low[0] * size[0], low[1] * size[1]
    end = min(high[0] * size[0], shape[0]), min(high[1] * size[1], shape[1])
    return begin, (end[0] - begin[0], end[1] - begin[1])


def _finite(node: Quantize | Scales, offsets: Shape, sizes: Shape, context: Context) -> Elements:
    """A box of the weight; raises ``InvalidOption`` when it holds an infinity or NaN."""
    weight = np.empty(sizes, dtype=ELEMENT_TYPES[node.weight.dtype].numpy_type)
    node.weight.fill(weight, offsets, context)
    found = first_not_finite(weight, node.weight.dtype)
    if found is None:
        return weight
    index = [offset + at for offset, at in zip(offsets, found, strict=True)]
    module = node.name.rpartition(".")[0]
    raise InvalidOption(
        f"{node.name} can't be quantised: it holds an infinity or NaN at {index}",
        tensor=node.name,
        expected="finite weights",
        found=f"an infinity or NaN at {index}",
        hint="Training may have diverged: take an earlier checkpoint. To keep the weight as it is, name its module "
        f"with ignore: {module}.",
    )
