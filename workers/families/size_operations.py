"""Operations whose sizes are written down with them, as numbers or as keys of the config: for users' own mappings.

Part of the closed vocabulary of ``operations``. Each knows its inverse; what is lossy says so and names its canonical
inverse, and ``Shape`` has one only where the shape before is known.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import cast

from workers.dtypes import BY_TORCH_NAME, ELEMENT_TYPES
from workers.errors import GeometryMismatch, InvalidOption
from workers.expressions import Cast, Concatenate, Expression, Reshape, Slice, Zeros
from workers.families.operations import Facts, Group, Operation

Size = int | str
"""A whole number, or the key of one in the config."""

REST = -1
"""In a shape: whatever the other dimensions leave."""


def resolved(size: Size, facts: Facts) -> int:
    """The number that a size stands for; ``IncompleteCheckpoint`` when the config does not have its key."""
    if not isinstance(size, str):
        return size
    told = facts.size(size)
    if told < 1:
        raise GeometryMismatch(
            f"config.json says that {size} is {told}, which is no size",
            file="config.json",
            expected="a number above 0",
            found=str(told),
        )
    return told


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """One column becomes one column for each size: consecutive slices along a dimension, which they fill."""

    dim: int
    sizes: tuple[Size, ...]

    def apply(self, group: Group, facts: Facts) -> Group:
        (column,) = group
        sizes = [resolved(size, facts) for size in self.sizes]
        return tuple(zip(*(self._parts(entry, sizes) for entry in column), strict=True))

    def _parts(self, entry: Expression, sizes: list[int]) -> tuple[Expression, ...]:
        if self.dim >= len(entry.shape) or entry.shape[self.dim] != sum(sizes):
            raise GeometryMismatch(
                f"a tensor of shape {list(entry.shape)} cannot be cut into pieces of {_listed(sizes)} along dimension "
                f"{self.dim}",
                expected=f"{sum(sizes)} in dimension {self.dim}",
                found=str(list(entry.shape)),
            )
        borders = accumulate(sizes, initial=0)
        return tuple(Slice(entry, self.dim, start, stop) for start, stop in pairwise(borders))

    @property
    def inverse(self) -> Operation:
        return JoinSizes(self.dim, self.sizes)


@dataclass(frozen=True, slots=True)
class JoinSizes:
    """The inverse of ``SplitSizes``: columns of these sizes along a dimension, joined."""

    dim: int
    sizes: tuple[Size, ...]

    def apply(self, group: Group, facts: Facts) -> Group:
        sizes = [resolved(size, facts) for size in self.sizes]
        return (tuple(self._joined(parts, sizes) for parts in zip(*group, strict=True)),)

    def _joined(self, parts: tuple[Expression, ...], sizes: list[int]) -> Expression:
        found = [part.shape[self.dim] if self.dim < len(part.shape) else 0 for part in parts]
        rests = {(part.dtype, (*part.shape[: self.dim], *part.shape[self.dim + 1 :])) for part in parts}
        if found != sizes or len(rests) != 1:
            kinds = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
            raise GeometryMismatch(
                f"cannot join {kinds} along dimension {self.dim} as pieces of {_listed(sizes)}",
                expected=f"{_listed(sizes)} in dimension {self.dim}, of one dtype and alike in all others",
                found=kinds,
            )
        return Concatenate(parts, self.dim)

    @property
    def inverse(self) -> Operation:
        return SplitSizes(self.dim, self.sizes)


@dataclass(frozen=True, slots=True)
class Shape:
    """Each entry with its row-major elements in another shape, where one dimension may be ``REST``.

    ``before`` is the shape that the entries must have; without it nothing tells the way back.
    """

    after: tuple[Size, ...]
    before: tuple[Size, ...] | None = None

    def apply(self, group: Group, facts: Facts) -> Group:
        return tuple(tuple(self._reshaped(entry, facts) for entry in column) for column in group)

    def _reshaped(self, entry: Expression, facts: Facts) -> Expression:
        elements = prod(entry.shape)
        if self.before is not None:
            told = _filled(self.before, elements, facts)
            if told != entry.shape:
                raise _other_shape(entry, told or tuple(resolved(size, facts) for size in self.before))
        shape = _filled(self.after, elements, facts)
        if shape is None:
            wanted = [resolved(size, facts) for size in self.after]
            raise GeometryMismatch(
                f"the {elements} elements of a tensor of shape {list(entry.shape)} do not fill the shape {wanted}",
                expected=f"as many elements as {wanted} has",
                found=str(list(entry.shape)),
            )
        return entry if shape == entry.shape else Reshape(entry, shape)

    @property
    def inverse(self) -> Operation:
        if self.before is None:
            raise InvalidOption(
                f"reshaping to {list(self.after)} has no way back: the shape before is not known",
                hint="Say the shape before with the key from.",
            )
        return Shape(self.before, self.after)


@dataclass(frozen=True, slots=True)
class ExpectShape:
    """Nothing changes, but each entry must have this shape; ``REST`` stands for any size."""

    shape: tuple[Size, ...]

    def apply(self, group: Group, facts: Facts) -> Group:
        wanted = tuple(resolved(size, facts) for size in self.shape)
        for entry in (entry for column in group for entry in column):
            alike = [size in (found, REST) for size, found in zip(wanted, entry.shape, strict=False)]
            if len(wanted) != len(entry.shape) or not all(alike):
                raise _other_shape(entry, wanted)
        return group

    @property
    def inverse(self) -> Operation:
        return self


@dataclass(frozen=True, slots=True)
class Trim:
    """The first ``size`` along a dimension; what follows is padding. Lossy: the way back pads with zeros.

    ``padded`` is the size before, if it is known; the way back leaves everything as it is without it.
    """

    dim: int
    size: Size
    padded: Size | None = None

    def apply(self, group: Group, facts: Facts) -> Group:
        size = resolved(self.size, facts)
        before = None if self.padded is None else resolved(self.padded, facts)
        return tuple(tuple(self._cut(entry, size, before) for entry in column) for column in group)

    def _cut(self, entry: Expression, size: int, before: int | None) -> Expression:
        found = entry.shape[self.dim] if self.dim < len(entry.shape) else 0
        if found < size or before not in (None, found):
            expected = f"at least {size}" if before is None else str(before)
            raise GeometryMismatch(
                f"a tensor of shape {list(entry.shape)} cannot be cut to {size} along dimension {self.dim}",
                expected=f"{expected} in dimension {self.dim}",
                found=str(list(entry.shape)),
            )
        return entry if found == size else Slice(entry, self.dim, 0, size)

    @property
    def inverse(self) -> Operation:
        return Pad(self.dim, self.size if self.padded is None else self.padded, self.size)


@dataclass(frozen=True, slots=True)
class Pad:
    """Zeros after the end of a dimension, up to ``size``. ``unpadded`` is the size before, if it is known."""

    dim: int
    size: Size
    unpadded: Size | None = None

    def apply(self, group: Group, facts: Facts) -> Group:
        size = resolved(self.size, facts)
        before = None if self.unpadded is None else resolved(self.unpadded, facts)
        return tuple(tuple(self._padded(entry, size, before) for entry in column) for column in group)

    def _padded(self, entry: Expression, size: int, before: int | None) -> Expression:
        found = entry.shape[self.dim] if self.dim < len(entry.shape) else size + 1
        if found > size or before not in (None, found):
            expected = f"at most {size}" if before is None else str(before)
            raise GeometryMismatch(
                f"a tensor of shape {list(entry.shape)} cannot be padded to {size} along dimension {self.dim}",
                expected=f"{expected} in dimension {self.dim}",
                found=str(list(entry.shape)),
            )
        if found == size:
            return entry
        zeros = (*entry.shape[: self.dim], size - found, *entry.shape[self.dim + 1 :])
        return Concatenate((entry, Zeros(entry.dtype, zeros)), self.dim)

    @property
    def inverse(self) -> Operation:
        return Trim(self.dim, self.size if self.unpadded is None else self.unpadded, self.size)


@dataclass(frozen=True, slots=True)
class ToDtype:
    """Each entry rounded to a floating-point dtype (torch's name). Lossy: its canonical inverse changes nothing."""

    dtype: str

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return tuple(tuple(self._cast(entry) for entry in column) for column in group)

    def _cast(self, entry: Expression) -> Expression:
        kind = ELEMENT_TYPES[entry.dtype]
        if not kind.floating or kind.size_bytes == 1:
            raise GeometryMismatch(
                f"a tensor of dtype {entry.dtype} cannot be cast to {self.dtype}",
                expected="a floating-point dtype of two bytes or more",
                found=entry.dtype,
            )
        dtype = BY_TORCH_NAME[self.dtype].name
        return entry if entry.dtype == dtype else Cast(entry, dtype)

    @property
    def inverse(self) -> Operation:
        return KEEP


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Nothing changes: the canonical inverse of what can't be undone."""

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return group

    @property
    def inverse(self) -> Operation:
        return self


KEEP = Unchanged()


@dataclass(frozen=True, slots=True)
class WithSizes:
    """An operation that is told some sizes here, whatever the config says: those of a vision tower, say."""

    operation: Operation
    sizes: tuple[tuple[str, Size], ...]
    """By the keys under which the operation asks for them."""

    def apply(self, group: Group, facts: Facts) -> Group:
        told = {key: resolved(size, facts) for key, size in self.sizes}
        # A view, so that what is asked of the config's sizes is still seen.
        return self.operation.apply(group, replace(facts, sizes=ChainMap(told, cast("dict[str, int]", facts.sizes))))

    @property
    def inverse(self) -> Operation:
        return WithSizes(self.operation.inverse, self.sizes)


def _filled(shape: tuple[Size, ...], elements: int, facts: Facts) -> tuple[int, ...] | None:
    """A shape with ``REST`` worked out; None when so many elements do not fill it."""
    sizes = [resolved(size, facts) for size in shape]
    if REST in sizes:
        others = prod(size for size in sizes if size != REST)
        if others < 1 or elements % others:
            return None
        sizes[sizes.index(REST)] = elements // others
    return tuple(sizes) if prod(sizes) == elements else None


def _other_shape(entry: Expression, wanted: tuple[int, ...]) -> GeometryMismatch:
    told = str(["any" if size == REST else size for size in wanted]).replace("'", "")
    return GeometryMismatch(
        f"a tensor has the shape {list(entry.shape)}, and its rule expects {told}",
        expected=told,
        found=str(list(entry.shape)),
    )


def _listed(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes))
