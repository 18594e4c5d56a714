"""The closed vocabulary in which families say how tensors of one naming come from those of another.

An operation turns a ``Group`` of expressions into another and knows the operation that undoes it, so that a rule
made of operations works in both directions. Operations look at shapes and at facts from the config, never at values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.expressions import Concatenate as ConcatenateExpression
from workers.expressions import Expression, Select, Slice
from workers.expressions import Stack as StackExpression
from workers.expressions import Transpose as TransposeExpression

Version = tuple[int, int]
Group = tuple[tuple[Expression, ...], ...]
"""Columns, one per name pattern of a rule; a column has one entry, or one per value of the stacked placeholder."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the config says of a model, as far as operations ask."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Whole numbers of the config by key; those of the text model where a model has several parts."""
    transformers: Version = (0, 0)
    """Version of transformers that wrote the config, and so of the modules that were saved; (0, 0) is unknown."""
    lists: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Lists of numbers of layers, by their keys in the config and as ``layer_lists`` derives them."""

    def numbers(self, key: str) -> tuple[int, ...]:
        """A list of numbers by its key; ``IncompleteCheckpoint`` when the config does not have it."""
        if key not in self.lists:
            raise IncompleteCheckpoint(
                f"config.json does not say {key}, which is needed to map the tensors",
                file="config.json",
                expected=key,
                hint="Give the model's full config with the option config_dir.",
            )
        return self.lists[key]

    def size(self, key: str) -> int:
        """A size by its config key; ``IncompleteCheckpoint`` when the config does not have it."""
        if key not in self.sizes:
            raise IncompleteCheckpoint(
                f"config.json does not say {key}, which is needed to map the tensors",
                file="config.json",
                expected=key,
                hint="Give the model's full config with the option config_dir.",
            )
        return self.sizes[key]


NO_FACTS = Facts()


class Operation(Protocol):
    """One step from tensors of one naming to those of another."""

    def apply(self, group: Group, facts: Facts) -> Group:
        """The group after the step; ``GeometryMismatch`` when the shapes do not allow it."""

    @property
    def inverse(self) -> Operation:
        """The operation that undoes this one."""


@dataclass(frozen=True, slots=True)
class Split:
    """One column becomes ``parts`` columns: equal slices along a dimension, in order."""

    dim: int
    parts: int

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        (column,) = group
        return tuple(tuple(self._part(entry, part) for entry in column) for part in range(self.parts))

    def _part(self, entry: Expression, part: int) -> Expression:
        length = _length(entry, self.dim)
        if length % self.parts:
            raise GeometryMismatch(
                f"a tensor of shape {list(entry.shape)} cannot be cut into {self.parts} equal parts along dimension "
                f"{self.dim}",
                expected=f"a multiple of {self.parts}",
                found=str(length),
            )
        size = length // self.parts
        return Slice(entry, self.dim, part * size, (part + 1) * size)

    @property
    def inverse(self) -> Operation:
        return Concatenate(self.dim, self.parts)


@dataclass(frozen=True, slots=True)
class Concatenate:
    """``parts`` columns become one: their entries joined along a dimension."""

    dim: int
    parts: int

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return (tuple(self._joined(entries) for entries in zip(*group, strict=True)),)

    def _joined(self, entries: tuple[Expression, ...]) -> Expression:
        if len({(entry.dtype, entry.shape) for entry in entries}) != 1:
            raise _unequal("join", entries)
        _length(entries[0], self.dim)
        return ConcatenateExpression(entries, self.dim)

    @property
    def inverse(self) -> Operation:
        return Split(self.dim, self.parts)


@dataclass(frozen=True, slots=True)
class Unstack:
    """Each entry becomes one entry per index of a dimension, which disappears."""

    dim: int

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return tuple(self._entries(*column) for column in group)

    def _entries(self, entry: Expression) -> tuple[Expression, ...]:
        return tuple(Select(entry, self.dim, index) for index in range(_length(entry, self.dim)))

    @property
    def inverse(self) -> Operation:
        return Stack(self.dim)


@dataclass(frozen=True, slots=True)
class Stack:
    """The entries of each column become one entry, with a new dimension that counts them."""

    dim: int

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return tuple((self._stacked(column),) for column in group)

    def _stacked(self, column: tuple[Expression, ...]) -> Expression:
        if len({(entry.dtype, entry.shape) for entry in column}) != 1:
            raise _unequal("stack", column)
        if self.dim > len(column[0].shape):  # a new dimension may come after the last, but no further
            _length(column[0], self.dim - 1)
        return StackExpression(column, self.dim)

    @property
    def inverse(self) -> Operation:
        return Unstack(self.dim)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Each entry with two dimensions exchanged."""

    dim_a: int
    dim_b: int

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return tuple(tuple(_transposed(entry, self.dim_a, self.dim_b) for entry in column) for column in group)

    @property
    def inverse(self) -> Operation:
        return self


@dataclass(frozen=True, slots=True)
class Orient:
    """Each entry with two dimensions exchanged, unless dimension ``dim`` has the size of a config key already.

    For weights whose orientation changed between versions of transformers: ``since`` is the first version whose
    modules have the exchanged form, which decides where both dimensions have that size. Undone, it gives the form
    of the version that wrote the config.
    """

    dim: int
    other: int
    size_key: str
    since: Version

    def apply(self, group: Group, facts: Facts) -> Group:
        return tuple(tuple(self._oriented(entry, facts) for entry in column) for column in group)

    def _oriented(self, entry: Expression, facts: Facts) -> Expression:
        size = facts.size(self.size_key)
        lengths = _length(entry, self.dim), _length(entry, self.other)
        if size not in lengths:
            raise GeometryMismatch(
                f"a tensor of shape {list(entry.shape)} has {self.size_key} = {size} in neither dimension {self.dim} "
                f"nor {self.other}",
                expected=str(size),
                found=" and ".join(map(str, lengths)),
            )
        exchanged = lengths[0] != size if lengths[0] != lengths[1] else facts.transformers >= self.since
        return _transposed(entry, self.dim, self.other) if exchanged else entry

    @property
    def inverse(self) -> Operation:
        return Disorient(self)


@dataclass(frozen=True, slots=True)
class Disorient:
    """The inverse of ``Orient``: back to the form of the version of transformers that wrote the config."""

    forward: Orient

    def apply(self, group: Group, facts: Facts) -> Group:
        if facts.transformers < self.forward.since:
            return group
        return Transpose(self.forward.dim, self.forward.other).apply(group, facts)

    @property
    def inverse(self) -> Operation:
        return self.forward


def _transposed(entry: Expression, dim_a: int, dim_b: int) -> Expression:
    _length(entry, max(dim_a, dim_b))
    if isinstance(entry, TransposeExpression) and {entry.dim_a, entry.dim_b} == {dim_a, dim_b}:
        return entry.inner
    return TransposeExpression(entry, dim_a, dim_b)


def _length(entry: Expression, dim: int) -> int:
    if dim >= len(entry.shape):
        raise GeometryMismatch(
            f"a tensor of shape {list(entry.shape)} has no dimension {dim}, which its rule needs",
            expected=f"at least {dim + 1} dimensions",
            found=str(len(entry.shape)),
        )
    return entry.shape[dim]


def _unequal(verb: str, entries: tuple[Expression, ...]) -> GeometryMismatch:
    kinds = sorted({f"{entry.dtype} {list(entry.shape)}" for entry in entries})
    return GeometryMismatch(
        f"cannot {verb} tensors of different kinds: {', '.join(kinds)}",
        expected="one dtype and shape",
        found=", ".join(kinds),
    )
