"""Expressions: how the elements of a target tensor come from source tensors.

An expression is a tree of a few kinds of nodes over ``Source`` leaves. Each node can say which boxes of its inputs
a box of its output needs (``requires``), and fill such a box into memory (``fill``), handing its inputs views of
that same memory wherever it only moves elements, so that bytes go from the file to their final place in one step.
Elements are opaque integers of their width here; only ``Cast`` and ``AddLora`` know numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.arithmetic import Arithmetic
from workers.dtypes import ELEMENT_TYPES
from workers.geometry import Shape, contiguous_strides, flat_range_boxes

Elements = NDArray[Any]


class Context(Protocol):
    """What filling needs from its surroundings: bytes of source tensors, and who does arithmetic."""

    arithmetic: Arithmetic

    def read(self, tensor: int, offsets: Shape, out: Elements) -> None:
        """Read the box at ``offsets`` with ``out``'s shape of a source tensor into ``out`` (any strides)."""


@dataclass(frozen=True, slots=True)
class Need:
    """A box of a source tensor that some output box is made of."""

    tensor: int
    offsets: Shape
    sizes: Shape


class Expression(Protocol):
    """A tensor that can be computed box by box."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def unit_elements(self) -> int:
        """Cut the row-major elements only at multiples of this many: finer cuts would read inputs twice."""

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        """The boxes of source tensors that a box of this tensor is made of."""

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        """Compute the box at ``offsets`` with ``out``'s shape into ``out``."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, by its number."""

    tensor: int
    dtype: str
    shape: Shape
    unit_elements: int = 1

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        yield Need(self.tensor, offsets, sizes)

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        context.read(self.tensor, offsets, out)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [start, stop) of ``inner`` along one dimension."""

    inner: Expression
    dim: int
    start: int
    stop: int

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    @property
    def shape(self) -> Shape:
        return (*self.inner.shape[: self.dim], self.stop - self.start, *self.inner.shape[self.dim + 1 :])

    @property
    def unit_elements(self) -> int:
        return _unit_through(self.inner, self.shape)

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        return self.inner.requires(_shifted(offsets, self.dim, self.start), sizes)

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        self.inner.fill(out, _shifted(offsets, self.dim, self.start), context)


@dataclass(frozen=True, slots=True)
class Select:
    """Entry ``index`` of ``inner`` along one dimension, which disappears."""

    inner: Expression
    dim: int
    index: int

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    @property
    def shape(self) -> Shape:
        return (*self.inner.shape[: self.dim], *self.inner.shape[self.dim + 1 :])

    @property
    def unit_elements(self) -> int:
        return _unit_through(self.inner, self.shape)

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        return self.inner.requires(_inserted(offsets, self.dim, self.index), _inserted(sizes, self.dim, 1))

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        self.inner.fill(np.expand_dims(out, self.dim), _inserted(offsets, self.dim, self.index), context)


@dataclass(frozen=True, slots=True)
class Concatenate:
    """Inputs of one dtype joined along a dimension."""

    inputs: tuple[Expression, ...]
    dim: int

    @property
    def dtype(self) -> str:
        return self.inputs[0].dtype

    @property
    def shape(self) -> Shape:
        first = self.inputs[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.inputs), *first[self.dim + 1 :])

    @property
    def unit_elements(self) -> int:
        return max(_unit_through(part, self.shape) for part in self.inputs)

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        for part, begin, end in self._overlaps(offsets[self.dim], sizes[self.dim]):
            start = part[1]
            inner_offsets = _replaced(offsets, self.dim, begin - start)
            yield from part[0].requires(inner_offsets, _replaced(sizes, self.dim, end - begin))

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        for (part, start), begin, end in self._overlaps(offsets[self.dim], out.shape[self.dim]):
            window = (slice(None),) * self.dim + (slice(begin - offsets[self.dim], end - offsets[self.dim]),)
            part.fill(out[window], _replaced(offsets, self.dim, begin - start), context)

    def _overlaps(self, begin: int, length: int) -> Iterator[tuple[tuple[Expression, int], int, int]]:
        """The inputs that [begin, begin + length) touches, each with its own start, and the shared range."""
        ends = accumulate(part.shape[self.dim] for part in self.inputs)
        for part, end in zip(self.inputs, ends, strict=True):
            start = end - part.shape[self.dim]
            low, high = max(begin, start), min(begin + length, end)
            if low < high:
                yield (part, start), low, high


@dataclass(frozen=True, slots=True)
class Stack:
    """Inputs of one dtype and shape as the entries of a new dimension."""

    inputs: tuple[Expression, ...]
    dim: int

    @property
    def dtype(self) -> str:
        return self.inputs[0].dtype

    @property
    def shape(self) -> Shape:
        return _inserted(self.inputs[0].shape, self.dim, len(self.inputs))

    @property
    def unit_elements(self) -> int:
        return max(_unit_through(part, self.shape) for part in self.inputs)

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        inner_offsets, inner_sizes = _removed(offsets, self.dim), _removed(sizes, self.dim)
        for part in self.inputs[offsets[self.dim] : offsets[self.dim] + sizes[self.dim]]:
            yield from part.requires(inner_offsets, inner_sizes)

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        for position in range(out.shape[self.dim]):
            window: Any = (*(slice(None),) * self.dim, position, ...)  # the dots keep a view of one element a view
            self.inputs[offsets[self.dim] + position].fill(out[window], _removed(offsets, self.dim), context)


@dataclass(frozen=True, slots=True)
class Transpose:
    """``inner`` with two dimensions exchanged."""

    inner: Expression
    dim_a: int
    dim_b: int

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    @property
    def shape(self) -> Shape:
        return _swapped(self.inner.shape, self.dim_a, self.dim_b)

    @property
    def unit_elements(self) -> int:
        # A row of the output is a column of the input: read the exchanged dimensions whole.
        return max(prod(self.shape[min(self.dim_a, self.dim_b) :]), _unit_through(self.inner, self.shape))

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        return self.inner.requires(_swapped(offsets, self.dim_a, self.dim_b), _swapped(sizes, self.dim_a, self.dim_b))

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        self.inner.fill(np.swapaxes(out, self.dim_a, self.dim_b), _swapped(offsets, self.dim_a, self.dim_b), context)


@dataclass(frozen=True, slots=True)
class Reshape:
    """``inner`` with its row-major elements in another shape."""

    inner: Expression
    shape: Shape

    @property
    def dtype(self) -> str:
        return self.inner.dtype

    @property
    def unit_elements(self) -> int:
        return _unit_through(self.inner, self.shape)

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        for _, start, count in self._runs(offsets, sizes):
            for inner_offsets, inner_sizes in flat_range_boxes(self.inner.shape, start, start + count):
                yield from self.inner.requires(inner_offsets, inner_sizes)

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        for index, start, count in self._runs(offsets, out.shape):
            place: Any = (*index, ...)
            window = out[place]
            flat = window.reshape(-1) if window.flags.c_contiguous else np.empty(count, dtype=out.dtype)
            position = 0
            for inner_offsets, inner_sizes in flat_range_boxes(self.inner.shape, start, start + count):
                size = prod(inner_sizes)
                self.inner.fill(flat[position : position + size].reshape(inner_sizes), inner_offsets, context)
                position += size
            if not window.flags.c_contiguous:
                window[...] = flat.reshape(window.shape)

    def _runs(self, offsets: Shape, sizes: Shape) -> Iterator[tuple[Shape, int, int]]:
        """The stretches of a box that are contiguous in row-major order: index within the box, start, elements."""
        if 0 in sizes:
            return
        inner = len(sizes)
        while inner > 0 and (inner == len(sizes) or sizes[inner] == self.shape[inner]):
            inner -= 1
        strides = contiguous_strides(self.shape)
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        count = prod(sizes[inner:])
        for index in np.ndindex(*sizes[:inner]):
            yield index, first + sum(i * s for i, s in zip(index, strides, strict=False)), count


@dataclass(frozen=True, slots=True)
class Zeros:
    """Nothing but zeros: padding."""

    dtype: str
    shape: Shape

    @property
    def unit_elements(self) -> int:
        return 1

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:  # noqa: ARG002 - as the protocol has it
        return iter(())

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:  # noqa: ARG002 - as the protocol has it
        out[...] = 0


FP8_BLOCK = 128
"""Rows and columns that share a scale in block-wise FP8 (DeepSeek-V3's ``weight_block_size``)."""


@dataclass(frozen=True, slots=True)
class DequantizeBlocks:
    """FP8 weights times the scale of their block, as float32 rounded to ``dtype``.

    weight [out, in] F8_E4M3, scale [ceil(out / block), ceil(in / block)] F32.
    Source: DeepSeek-V3 ``inference/kernel.py`` ``weight_dequant``.
    """

    weight: Expression
    scale: Expression
    dtype: str
    block: Shape = (FP8_BLOCK, FP8_BLOCK)

    @property
    def shape(self) -> Shape:
        return self.weight.shape

    @property
    def unit_elements(self) -> int:
        return self.shape[1] * min(self.block[0], self.shape[0])

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        yield from self.weight.requires(offsets, sizes)
        yield from self.scale.requires(*self._scale_box(offsets, sizes))

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        weight = _evaluate(self.weight, offsets, out.shape, context)
        scale_offsets, scale_sizes = self._scale_box(offsets, out.shape)
        scale = _evaluate(self.scale, scale_offsets, scale_sizes, context)
        wide = scale
        for dim in (0, 1):
            begin = offsets[dim] - scale_offsets[dim] * self.block[dim]
            spread = np.repeat(wide, self.block[dim], axis=dim)
            wide = np.take(spread, range(begin, begin + out.shape[dim]), axis=dim)
        context.arithmetic.multiply((weight, self.weight.dtype), (wide, self.scale.dtype), out, self.dtype)

    def _scale_box(self, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape]:
        starts = tuple(offset // block for offset, block in zip(offsets, self.block, strict=True))
        ends = (-(-(o + n) // block) for o, n, block in zip(offsets, sizes, self.block, strict=True))
        return starts, tuple(end - start for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True)
class Cast:
    """``inner`` rounded to another floating-point dtype: to nearest, ties to even."""

    inner: Expression
    dtype: str

    @property
    def shape(self) -> Shape:
        return self.inner.shape

    @property
    def unit_elements(self) -> int:
        return self.inner.unit_elements

    def requires(self, offsets: Shape, sizes: Shape) -> Iterator[Need]:
        return self.inner.requires(offsets, sizes)

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        before = _evaluate(self.inner, offsets, out.shape, context)
        context.arithmetic.cast(before, self.inner.dtype, out, self.dtype)


LORA_UNIT_ROWS = 256
"""Rows of a LoRA sum made at once: A is read anew for each block, which this makes a small share."""


@dataclass(frozen=True, slots=True)
class AddLora:
    """``base + scale * (b @ a)``, computed in float32 and rounded to the base's dtype.

    base [out, in], b [out, r], a [r, in]. Source: peft ``Linear.get_delta_weight``.
    """

    base: Expression
    a: Expression
    b: Expression
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
        rank = self.a.shape[0]
        yield from self.base.requires(offsets, sizes)
        yield from self.b.requires((offsets[0], 0), (sizes[0], rank))
        yield from self.a.requires((0, offsets[1]), (rank, sizes[1]))

    def fill(self, out: Elements, offsets: Shape, context: Context) -> None:
        context.arithmetic.add_lora(self.operands(offsets, out.shape, context), self.scale, out, self.dtype)

    def operands(
        self, offsets: Shape, sizes: Shape, context: Context
    ) -> tuple[tuple[Elements, str], tuple[Elements, str], tuple[Elements, str]]:
        """What a box is made of: base, a and b, each with its dtype."""
        rank = self.a.shape[0]
        base = _evaluate(self.base, offsets, sizes, context)
        b = _evaluate(self.b, (offsets[0], 0), (sizes[0], rank), context)
        a = _evaluate(self.a, (0, offsets[1]), (rank, sizes[1]), context)
        return (base, self.base.dtype), (a, self.a.dtype), (b, self.b.dtype)


def inputs_of(expression: Expression) -> Iterator[Expression]:
    """The expressions that one is made of."""
    for name in _field_names(type(expression)):
        value = getattr(expression, name)
        for part in value if isinstance(value, tuple) else (value,):
            if hasattr(part, "requires"):
                yield part


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a kind of node; all are dataclasses."""
    return tuple(field.name for field in fields(kind))


def _evaluate(inner: Expression, offsets: Shape, sizes: Shape, context: Context) -> Elements:
    values = np.empty(sizes, dtype=ELEMENT_TYPES[inner.dtype].numpy_type)
    inner.fill(values, offsets, context)
    return values


def _unit_through(inner: Expression, shape: Shape) -> int:
    """The unit of a node that keeps its input's order of elements but not its strides: rows where that is enough.

    A unit of one stays one. A larger one covers trailing dimensions of the input; the output dimensions with the
    same names are cut no finer than the smallest group of trailing dimensions that holds as many elements.
    """
    unit = inner.unit_elements
    if unit == 1:
        return 1
    size = 1
    for length in reversed(shape):
        if size >= unit:
            break
        size *= length
    return size


def _shifted(offsets: Shape, dim: int, by: int) -> Shape:
    return _replaced(offsets, dim, offsets[dim] + by)


def _replaced(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def _inserted(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim:])


def _removed(values: Shape, dim: int) -> Shape:
    return (*values[:dim], *values[dim + 1 :])


def _swapped(values: Shape, dim_a: int, dim_b: int) -> Shape:
    swapped = list(values)
    swapped[dim_a], swapped[dim_b] = swapped[dim_b], swapped[dim_a]
    return tuple(swapped)
