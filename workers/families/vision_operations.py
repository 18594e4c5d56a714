"""Operations that models with a vision tower need: tables of tiles, flattened patches, rows of two tables in one.

Part of the closed vocabulary of ``operations``. Each knows its inverse; what is lossy says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from workers.errors import GeometryMismatch
from workers.expressions import Concatenate, Expression, Reshape, Select, Slice, Stack, Transpose, Zeros
from workers.families.operations import Facts, Group, Operation

_WRONG_CONFIG = "The config belongs to another model: name the right one with the option config_dir."
_TILES = "vision_config.max_num_tiles"
_WIDTH = "vision_config.hidden_size"


@dataclass(frozen=True, slots=True)
class Unflatten:
    """Dimension ``dim`` becomes one dimension for each size of ``keys``, and one for what remains."""

    dim: int
    keys: tuple[str, ...]

    def apply(self, group: Group, facts: Facts) -> Group:
        sizes = tuple(map(facts.size, self.keys))
        return tuple(tuple(self._apart(entry, sizes) for entry in column) for column in group)

    def _apart(self, entry: Expression, sizes: tuple[int, ...]) -> Expression:
        shape, unit = entry.shape, prod(sizes)
        if self.dim >= len(shape) or unit < 1 or shape[self.dim] % unit:
            raise GeometryMismatch(
                f"config.json tells {' x '.join(map(str, sizes))} ({', '.join(self.keys)}), but the tensor has shape "
                f"{list(shape)}",
                expected=f"a multiple of {unit} in dimension {self.dim}",
                found=str(list(shape)),
                hint=_WRONG_CONFIG,
            )
        return Reshape(entry, (*shape[: self.dim], *sizes, shape[self.dim] // unit, *shape[self.dim + 1 :]))

    @property
    def inverse(self) -> Operation:
        return Flatten(self.dim, self.keys)


@dataclass(frozen=True, slots=True)
class Flatten:
    """The inverse of ``Unflatten``: as many dimensions as there are ``keys``, and one more, become one."""

    dim: int
    keys: tuple[str, ...]

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return tuple(tuple(self._joined(entry) for entry in column) for column in group)

    def _joined(self, entry: Expression) -> Expression:
        end = self.dim + len(self.keys) + 1
        if len(entry.shape) < end:
            raise GeometryMismatch(
                f"a tensor of shape {list(entry.shape)} has no {end} dimensions, which its rule needs",
                expected=f"at least {end} dimensions",
                found=str(list(entry.shape)),
            )
        return Reshape(entry, (*entry.shape[: self.dim], prod(entry.shape[self.dim : end]), *entry.shape[end:]))

    @property
    def inverse(self) -> Operation:
        return Unflatten(self.dim, self.keys)


@dataclass(frozen=True, slots=True)
class JoinRows:
    """The rows of a second column follow those of the first, which has as many as a size of the config."""

    key: str

    def apply(self, group: Group, facts: Facts) -> Group:
        size = facts.size(self.key)
        return (tuple(self._joined(first, second, size) for first, second in zip(*group, strict=True)),)

    def _joined(self, first: Expression, second: Expression, size: int) -> Expression:
        if first.shape[:1] != (size,) or (first.dtype, first.shape[1:]) != (second.dtype, second.shape[1:]):
            raise GeometryMismatch(
                f"tensors of shapes {list(first.shape)} and {list(second.shape)} don't make one with {self.key} = "
                f"{size} rows from the first",
                expected=f"{size} rows, of one dtype and width",
                found=f"{first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}",
                hint=_WRONG_CONFIG,
            )
        return Concatenate((first, second), 0)

    @property
    def inverse(self) -> Operation:
        return SplitRows(self.key)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The inverse of ``JoinRows``: the first rows, as many as a size of the config, and the rest."""

    key: str

    def apply(self, group: Group, facts: Facts) -> Group:
        (column,) = group
        size = facts.size(self.key)
        for entry in column:
            if not entry.shape or entry.shape[0] <= size:
                raise GeometryMismatch(
                    f"config.json says that {self.key} is {size}, and the tensor has shape {list(entry.shape)}: no "
                    "rows are left for the second part",
                    expected=f"more than {size} rows",
                    found=str(list(entry.shape)),
                    hint=_WRONG_CONFIG,
                )
        heads = tuple(Slice(entry, 0, 0, size) for entry in column)
        return heads, tuple(Slice(entry, 0, size, entry.shape[0]) for entry in column)

    @property
    def inverse(self) -> Operation:
        return JoinRows(self.key)


@dataclass(frozen=True, slots=True)
class FirstElement:
    """The first element of a vector, which repeats it. Lossy: its canonical inverse changes nothing."""

    def apply(self, group: Group, facts: Facts) -> Group:  # noqa: ARG002 - as the protocol has it
        return tuple(tuple(_first(entry) for entry in column) for column in group)

    @property
    def inverse(self) -> Operation:
        return FirstElement()


def _first(entry: Expression) -> Expression:
    if len(entry.shape) != 1 or entry.shape[0] < 1:
        raise GeometryMismatch(
            f"a gate has shape {list(entry.shape)}", expected="one dimension", found=str(list(entry.shape))
        )
    return entry if entry.shape == (1,) else Slice(entry, 0, 0, 1)


def aspect_ratios(tiles: int) -> list[tuple[int, int]]:
    """The arrangements of at most so many tiles, in the order of their numbers from 1.

    Source: transformers ``image_processing_mllama.py`` (``get_all_supported_aspect_ratios``).
    """
    return [(a, b) for a in range(1, tiles + 1) for b in range(1, tiles + 1) if a * b <= tiles]


@dataclass(frozen=True, slots=True)
class TilesToRatios:
    """A table [T, T, n, width] by places of tiles becomes one row for each arrangement of tiles, after one of zeros.

    Lossy: places that no arrangement reaches are not kept, and come back as zeros.
    Source: transformers ``convert_mllama_weights_to_hf.py`` (``pre_compute_positional_embedding``).
    """

    def apply(self, group: Group, facts: Facts) -> Group:
        tiles = facts.size(_TILES)
        return tuple(tuple(self._rows(entry, tiles) for entry in column) for column in group)

    def _rows(self, table: Expression, tiles: int) -> Expression:
        if len(table.shape) != 4 or table.shape[:2] != (tiles, tiles):  # tiles, tiles, patches, width
            raise GeometryMismatch(
                f"config.json tells {tiles} tiles, but the table of tiles has shape {list(table.shape)}",
                expected=f"[{tiles}, {tiles}, patches, width]",
                found=str(list(table.shape)),
                hint=_WRONG_CONFIG,
            )
        length = tiles * prod(table.shape[2:])
        rows: list[Expression] = [Zeros(table.dtype, (1, length))]
        rows += [Reshape(_arranged(table, ratio), (1, length)) for ratio in aspect_ratios(tiles)]
        return Concatenate(tuple(rows), 0)

    @property
    def inverse(self) -> Operation:
        return RatiosToTiles()


def _arranged(table: Expression, ratio: tuple[int, int]) -> Expression:
    a, b = ratio
    parts: list[Expression] = [Slice(Select(table, 0, row), 0, 0, b) for row in range(a)]
    free = table.shape[0] - a * b
    if free:
        parts.append(Zeros(table.dtype, (free, *table.shape[2:])))
    return Concatenate(tuple(parts), 0)


@dataclass(frozen=True, slots=True)
class RatiosToTiles:
    """The canonical inverse of ``TilesToRatios``, from the arrangements that use all tiles."""

    def apply(self, group: Group, facts: Facts) -> Group:
        tiles, width = facts.size(_TILES), facts.size(_WIDTH)
        return tuple(tuple(self._table(entry, tiles, width) for entry in column) for column in group)

    def _table(self, rows: Expression, tiles: int, width: int) -> Expression:
        ratios = aspect_ratios(tiles)
        if len(rows.shape) != 2 or rows.shape[0] != len(ratios) + 1 or rows.shape[1] % (tiles * width):  # 2: a matrix
            raise GeometryMismatch(
                f"config.json tells {tiles} tiles of width {width}, but the tensor has shape {list(rows.shape)}",
                expected=f"[{len(ratios) + 1}, a multiple of {tiles * width}]",
                found=str(list(rows.shape)),
                hint=_WRONG_CONFIG,
            )
        patches = rows.shape[1] // (tiles * width)
        places: dict[tuple[int, int], Expression] = {}
        for number, (a, b) in enumerate(ratios, 1):
            if a * b == tiles:
                row = Reshape(Slice(rows, 0, number, number + 1), (tiles, patches, width))
                places |= {(i, j): Select(row, 0, i * b + j) for i in range(a) for j in range(b)}
        empty = Zeros(rows.dtype, (patches, width))
        return Stack(tuple(Stack(tuple(places.get((i, j), empty) for j in range(tiles)), 0) for i in range(tiles)), 0)

    @property
    def inverse(self) -> Operation:
        return TilesToRatios()


@dataclass(frozen=True, slots=True)
class HeadsToParts:
    """Rows in groups by attention head, [query, key, value] each, become all queries, all keys, all values.

    For towers whose q, k and v are one matrix on either side; ``heads`` is the key of their number in the config.
    """

    heads: str

    def apply(self, group: Group, facts: Facts) -> Group:
        return _exchanged(group, facts.size(self.heads), heads_first=True)

    @property
    def inverse(self) -> Operation:
        return PartsToHeads(self.heads)


@dataclass(frozen=True, slots=True)
class PartsToHeads:
    """The inverse of ``HeadsToParts``: the query, key and value of each head come together."""

    heads: str

    def apply(self, group: Group, facts: Facts) -> Group:
        return _exchanged(group, facts.size(self.heads), heads_first=False)

    @property
    def inverse(self) -> Operation:
        return HeadsToParts(self.heads)


def _exchanged(group: Group, heads: int, *, heads_first: bool) -> Group:
    def exchanged(entry: Expression) -> Expression:
        shape = entry.shape
        if not shape or heads < 1 or shape[0] % (3 * heads):
            raise GeometryMismatch(
                f"config.json tells {heads} heads of the vision tower, but the tensor of queries, keys and values has "
                f"shape {list(shape)}",
                expected=f"a multiple of {3 * heads} rows",
                found=str(list(shape)),
                hint=_WRONG_CONFIG,
            )
        apart = (heads, 3) if heads_first else (3, heads)
        parts = Reshape(entry, (*apart, shape[0] // (3 * heads), *shape[1:]))
        return Reshape(Transpose(parts, 0, 1), shape)

    return tuple(tuple(map(exchanged, column)) for column in group)


@dataclass(frozen=True, slots=True)
class ExpectShape:
    """Nothing changes, but each dimension must be the product of sizes of the config; of none, it may be any."""

    keys: tuple[tuple[str, ...], ...]

    def apply(self, group: Group, facts: Facts) -> Group:
        wanted = [prod(map(facts.size, keys)) if keys else None for keys in self.keys]
        for entry in (entry for column in group for entry in column):
            if len(entry.shape) != len(wanted) or any(
                size not in (None, found) for size, found in zip(wanted, entry.shape, strict=True)
            ):
                told = " x ".join("any" if size is None else str(size) for size in wanted)
                names = ", ".join(dict.fromkeys(key for keys in self.keys for key in keys))
                raise GeometryMismatch(
                    f"config.json tells a shape of {told} ({names}), but the tensor has shape {list(entry.shape)}",
                    expected=told,
                    found=str(list(entry.shape)),
                    hint=f"{_WRONG_CONFIG} Or only the part of one tensor-parallel rank was saved: then save again "
                    "without tensor parallelism, or as a Hugging Face model.",
                )
        return group

    @property
    def inverse(self) -> Operation:
        return self
