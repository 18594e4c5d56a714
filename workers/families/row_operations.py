"""Operations on rows: attention heads in groups, halves that alternate, vocabularies with padding.

Part of the closed vocabulary of ``operations``. Each knows its inverse; cutting padding is lossy, and its canonical
inverse pads with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from workers.errors import GeometryMismatch
from workers.expressions import Concatenate, Expression, Reshape, Slice, Transpose, Zeros
from workers.families.operations import Facts, Group, Operation

PAD_VOCABULARY_TO = "pad_vocab_to"
"""Among the sizes of ``Facts``: rows that a vocabulary is padded to."""

_WRONG_CONFIG = "The config belongs to another model: name the right one with the option config_dir."


class Heads(NamedTuple):
    """Attention heads of a model, and the rows of one."""

    queries: int
    groups: int
    """Heads of keys, and as many of values: each serves a group of query heads."""
    size: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """Rows of q, k and v."""
        return self.queries * self.size, self.groups * self.size, self.groups * self.size


def attention_heads(facts: Facts) -> Heads:
    """The heads that the config tells; ``GeometryMismatch`` when they can't be put into groups.

    The size of a head is ``head_dim`` where the config has it: heads times size need not be the hidden size.
    """
    queries = facts.size("num_attention_heads")
    groups = facts.sizes.get("num_key_value_heads", queries)
    if groups < 1 or queries % groups:
        raise GeometryMismatch(
            f"num_attention_heads is {queries}, which is not divisible by num_key_value_heads {groups}: query heads "
            "come in as many equal groups as there are key and value heads",
            file="config.json",
            expected=f"a multiple of {groups}",
            found=str(queries),
            hint=_WRONG_CONFIG,
        )
    size = facts.sizes.get("head_dim")
    if size is None:
        hidden = facts.size("hidden_size")
        if hidden % queries:
            raise GeometryMismatch(
                f"hidden_size {hidden} is not divisible by num_attention_heads {queries}, and there is no head_dim",
                file="config.json",
                expected=f"a multiple of {queries}",
                found=str(hidden),
                hint="Give the size of a head with the option head_dim.",
            )
        size = hidden // queries
    return Heads(queries, groups, size)


@dataclass(frozen=True, slots=True)
class SplitGroups:
    """Rows grouped by key-value head, [queries of the group, key, value] each, become q, k and v.

    Source: Megatron-Core ``attention.py`` (``get_query_key_value_tensors``).
    """

    def apply(self, group: Group, facts: Facts) -> Group:
        (column,) = group
        heads = attention_heads(facts)
        return tuple(zip(*(self._parts(entry, heads) for entry in column), strict=True))

    def _parts(self, entry: Expression, heads: Heads) -> tuple[Expression, ...]:
        _check_rows(entry, heads)
        rest = entry.shape[1:]
        row, group = heads.size, heads.queries // heads.groups
        grouped = Reshape(entry, (heads.groups, (group + 2) * row, *rest))
        borders = (0, group * row, (group + 1) * row, (group + 2) * row)
        return tuple(
            Reshape(Slice(grouped, 1, start, stop), (heads.groups * (stop - start), *rest))
            for start, stop in pairwise(borders)
        )

    @property
    def inverse(self) -> Operation:
        return JoinGroups()


@dataclass(frozen=True, slots=True)
class JoinGroups:
    """The inverse of ``SplitGroups``: q, k and v in groups by key-value head."""

    def apply(self, group: Group, facts: Facts) -> Group:
        heads = attention_heads(facts)
        return (tuple(self._joined(parts, heads) for parts in zip(*group, strict=True)),)

    def _joined(self, parts: tuple[Expression, ...], heads: Heads) -> Expression:
        _check_parts(parts, heads)
        rest = parts[0].shape[1:]
        grouped = tuple(Reshape(part, (heads.groups, part.shape[0] // heads.groups, *rest)) for part in parts)
        return Reshape(Concatenate(grouped, 1), (sum(heads.rows), *rest))

    @property
    def inverse(self) -> Operation:
        return SplitGroups()


@dataclass(frozen=True, slots=True)
class SplitHeads:
    """All rows of q, then those of k, then those of v become three tensors."""

    def apply(self, group: Group, facts: Facts) -> Group:
        (column,) = group
        heads = attention_heads(facts)
        return tuple(zip(*(self._parts(entry, heads) for entry in column), strict=True))

    def _parts(self, entry: Expression, heads: Heads) -> tuple[Expression, ...]:
        _check_rows(entry, heads)
        q, k, v = heads.rows
        return Slice(entry, 0, 0, q), Slice(entry, 0, q, q + k), Slice(entry, 0, q + k, q + k + v)

    @property
    def inverse(self) -> Operation:
        return JoinHeads()


@dataclass(frozen=True, slots=True)
class JoinHeads:
    """The inverse of ``SplitHeads``."""

    def apply(self, group: Group, facts: Facts) -> Group:
        heads = attention_heads(facts)
        return (tuple(self._joined(parts, heads) for parts in zip(*group, strict=True)),)

    def _joined(self, parts: tuple[Expression, ...], heads: Heads) -> Expression:
        _check_parts(parts, heads)
        return Concatenate(parts, 0)

    @property
    def inverse(self) -> Operation:
        return SplitHeads()


@dataclass(frozen=True, slots=True)
class Interleave:
    """Rows of the first of ``parts`` equal blocks along ``dim``, then of the second ..., come to alternate."""

    dim: int
    parts: int

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return tuple(tuple(_regrouped(entry, self.dim, self.parts) for entry in column) for column in group)

    @property
    def inverse(self) -> Operation:
        return Deinterleave(self.dim, self.parts)


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """The inverse of ``Interleave``: every ``parts``-th row comes into one block."""

    dim: int
    parts: int

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return tuple(tuple(self._sorted(entry) for entry in column) for column in group)

    def _sorted(self, entry: Expression) -> Expression:
        length = entry.shape[self.dim] if self.dim < len(entry.shape) else 0
        return _regrouped(entry, self.dim, length // self.parts if length % self.parts == 0 else self.parts)

    @property
    def inverse(self) -> Operation:
        return Interleave(self.dim, self.parts)


@dataclass(frozen=True, slots=True)
class CutRows:
    """The first rows, as many as a size of the config; what follows them is padding. Lossy.

    ``or_single`` lets a tensor of one row pass: the head of a value model in place of one for tokens.
    """

    key: str
    or_single: bool = False

    def apply(self, group: Group, facts: Facts) -> Group:
        size = facts.size(self.key)
        return tuple(tuple(self._cut(entry, size) for entry in column) for column in group)

    def _cut(self, entry: Expression, size: int) -> Expression:
        rows = entry.shape[0] if entry.shape else 0
        if rows == size or (rows == 1 and self.or_single):
            return entry
        if rows < size:
            raise GeometryMismatch(
                f"config.json says that {self.key} is {size}, but the tensor has only {rows} rows: only rows beyond "
                f"{self.key} can be padding",
                expected=f"at least {size} rows",
                found=str(rows),
                hint=_WRONG_CONFIG,
            )
        return Slice(entry, 0, 0, size)

    @property
    def inverse(self) -> Operation:
        return PadRows(self.key, self.or_single)


@dataclass(frozen=True, slots=True)
class PadRows:
    """The canonical inverse of ``CutRows``: rows of zeros up to what ``PAD_VOCABULARY_TO`` says."""

    key: str
    or_single: bool = False

    def apply(self, group: Group, facts: Facts) -> Group:
        size = facts.sizes.get(PAD_VOCABULARY_TO, 0)
        return tuple(tuple(self._padded(entry, size) for entry in column) for column in group)

    def _padded(self, entry: Expression, size: int) -> Expression:
        missing = size - entry.shape[0]
        if missing <= 0 or (entry.shape[0] == 1 and self.or_single):
            return entry
        return Concatenate((entry, Zeros(entry.dtype, (missing, *entry.shape[1:]))), 0)

    @property
    def inverse(self) -> Operation:
        return CutRows(self.key, self.or_single)


@dataclass(frozen=True, slots=True)
class ExpectRows:
    """Nothing changes, but the rows must be as many as sizes of the config say together."""

    keys: tuple[str, ...]

    def apply(self, group: Group, facts: Facts) -> Group:
        size = sum(map(facts.size, self.keys))
        for entry in (entry for column in group for entry in column):
            if entry.shape[0] != size:
                raise GeometryMismatch(
                    f"config.json says that {' + '.join(self.keys)} is {size}, but the tensor has "
                    f"{entry.shape[0]} rows",
                    expected=f"{size} rows",
                    found=str(entry.shape[0]),
                    hint=_WRONG_CONFIG,
                )
        return group

    @property
    def inverse(self) -> Operation:
        return self


def _regrouped(entry: Expression, dim: int, blocks: int) -> Expression:
    """Read dimension ``dim`` as [blocks, rest] and exchange the two."""
    shape = entry.shape
    if dim >= len(shape) or shape[dim] % blocks:
        raise GeometryMismatch(
            f"a tensor of shape {list(shape)} has no {blocks} equal blocks along dimension {dim}",
            expected=f"a multiple of {blocks}",
            found=str(list(shape)),
        )
    apart = (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    return Reshape(Transpose(Reshape(entry, apart), dim, dim + 1), shape)


def _check_rows(entry: Expression, heads: Heads) -> None:
    expected = sum(heads.rows)
    found = entry.shape[0] if entry.shape else prod(entry.shape)
    if found != expected:
        raise GeometryMismatch(
            f"config.json or the options tell {heads.queries} query heads and {heads.groups} key-value heads of "
            f"{heads.size} rows, so {expected} rows of queries, keys and values, but the tensor has {found}",
            expected=f"{expected} rows",
            found=str(found),
            hint=f"{_WRONG_CONFIG} Or set num_attention_heads, num_key_value_heads or head_dim.",
        )


def _check_parts(parts: tuple[Expression, ...], heads: Heads) -> None:
    found = tuple(part.shape[0] if part.shape else 0 for part in parts)
    if found != heads.rows or len({(part.dtype, part.shape[1:]) for part in parts}) != 1:
        raise GeometryMismatch(
            f"q, k and v have {', '.join(map(str, found))} rows, but config.json or the options tell "
            f"{', '.join(map(str, heads.rows))}",
            expected=f"{list(heads.rows)} rows, of one dtype and width",
            found=", ".join(f"{part.dtype} {list(part.shape)}" for part in parts),
            hint=_WRONG_CONFIG,
        )
