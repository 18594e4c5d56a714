"""Where the shard of a tensor-parallel rank lies in the full tensor, from what the checkpoint says of it.

``affine_map`` (DeepSpeed 0.19) describes each shard as strided views of the full tensor and overrules everything
else; before it, lists of patterns sorted the parameters into a few kinds. Pure geometry and names.
Sources: DeepSpeed ``checkpoint/affine.py``, ``checkpoint/constants.py``, ``checkpoint/ds_to_universal.py``
(``merge_tp_slices``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from workers.errors import CorruptFile, GeometryMismatch
from workers.families.patterns import LONGEST_NAME, compiled
from workers.geometry import MOST_DIMENSIONS, Shape, contiguous_strides, flat_range_boxes
from workers.pickle_records import is_count
from workers.pickles import Record
from workers.shown import shown

MOST_SEGMENTS = 65_536
"""Boxes that one shard may fall into; a whole layer that is interleaved row by row has some thousands."""

_LITERAL = re.compile(r"\^?((?:\\\W|[\w\-])+)\$")

_AFFINE_VERSION = 1

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
TWO_PARTS = "parameter_with_2_sub_params_cat_dim_0"
PARTS = "parameter_with_sub_params"


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a shard, row-major, that fill a box of the full tensor in its row-major order."""

    start: int
    stop: int
    offsets: Shape
    sizes: Shape


@dataclass(frozen=True, slots=True)
class Share:
    """How one rank's shard relates to the full tensor."""

    shape: Shape
    segments: tuple[Segment, ...]


def whole(shape: Shape) -> Share:
    """The share of a rank that has the full tensor."""
    return Share(shape, (Segment(0, prod(shape), (0,) * len(shape), shape),))


class TensorParallelism:
    """What a checkpoint says of how its parameters are cut; ``file`` is where it says so."""

    def __init__(self, info: Mapping[Any, Any], file: str) -> None:
        self._file = file
        self._info = info
        self._lists = {key: _Patterns(_texts(info.get(key)), file) for key in (REPLICATED, AVERAGED, ROWS)}
        self._lists |= {key: _Patterns(_texts(info.get(key)), file) for key in (VOCABULARY, TWO_PARTS)}
        self._parts = [(_Patterns(_texts(_get(entry, "patterns")), file), entry) for entry in _items(info.get(PARTS))]
        affine = info.get("affine_map")
        self._version = affine.get("version") if isinstance(affine, dict) else _AFFINE_VERSION
        maps = affine.get("params") if isinstance(affine, dict) else None
        self._maps = dict(maps) if isinstance(maps, dict) else {}
        self._mapped = _Patterns([text for text in self._maps if type(text) is str], file)

    @property
    def is_known(self) -> bool:
        """Whether the checkpoint says anything of how it is cut."""
        return bool(self._maps) or any(key in self._info for key in (REPLICATED, ROWS, VOCABULARY, TWO_PARTS, PARTS))

    def shares(self, name: str, shapes: Sequence[Shape]) -> list[Share]:
        """The share of each rank, from the shapes of all ranks' shards of a parameter."""
        if len(set(map(len, shapes))) > 1:
            raise self._contradiction(name, "shards with equally many dimensions", str([*map(list, shapes)]))
        if self._version != _AFFINE_VERSION:
            raise self._contradiction(name, f"an affine_map of version {_AFFINE_VERSION}", shown(self._version, 40))
        pattern = self._mapped.match(name)
        if pattern is not None:
            return self._affine(name, self._maps[pattern], shapes)
        if self._lists[REPLICATED].match(name) or self._lists[AVERAGED].match(name) or shapes[0] == ():
            return [whole(shape) for shape in shapes]
        if self._lists[TWO_PARTS].match(name):
            return self._cut(name, shapes, 0, [tuple(shape[0] // 2 for shape in shapes)] * 2)
        for patterns, entry in self._parts:
            if patterns.match(name):
                return self._sub_params(name, shapes, entry)
        dim = 1 if self._lists[ROWS].match(name) and len(shapes[0]) > 1 else 0
        cut = self._cut(name, shapes, dim, [tuple(shape[dim] for shape in shapes)])
        return self._without_padding(cut) if self._lists[VOCABULARY].match(name) else cut

    def _sub_params(self, name: str, shapes: Sequence[Shape], entry: Any) -> list[Share]:
        """Fused parameters: each is cut by itself, and the shards are put together rank by rank."""
        dim, full = _get(entry, "partition_dim"), _get(entry, "shape")
        if type(dim) is not int or not isinstance(full, (list, tuple)) or not 0 <= dim < len(shapes[0]):
            raise self._contradiction(name, "a partition_dim and a shape of sub-parameters", shown((dim, full), 80))
        sizes = _counts(full[dim]) if dim < len(full) else None
        told = _items(_get(entry, "sub_param_shard_widths"))
        widths = [_counts(part) or () for part in told] or [
            (size // len(shapes),) * len(shapes) for size in sizes or ()
        ]
        if sizes is None or len(widths) != len(sizes) or any(len(part) != len(shapes) for part in widths):
            raise self._contradiction(name, "the width of each sub-parameter on each rank", shown(widths, 80))
        return self._cut(name, shapes, dim, widths)

    def _cut(self, name: str, shapes: Sequence[Shape], dim: int, parts: Sequence[Sequence[int]]) -> list[Share]:
        """Shards along one dimension; ``parts`` gives for each fused part its width on each rank."""
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        held = [sum(part[rank] for part in parts) for rank in range(len(shapes))]
        if len(others) > 1 or held != [shape[dim] for shape in shapes]:
            raise self._contradiction(name, f"shards that are cut along dimension {dim}", str([*map(list, shapes)]))
        full = (*shapes[0][:dim], sum(held), *shapes[0][dim + 1 :])
        strides = contiguous_strides(full)
        begins = [0, *accumulate(sum(part) for part in parts)]
        shares = []
        for rank, shape in enumerate(shapes):
            segments: list[Segment] = []
            local, own = 0, contiguous_strides(shape)
            for part, begin in zip(parts, begins, strict=False):
                view = (*shape[:dim], part[rank], *shape[dim + 1 :])
                at = (begin + sum(part[:rank])) * strides[dim], local * own[dim]
                segments += self._segments(name, full, _View(view, strides, own), at)
                local += part[rank]
            shares.append(Share(full, tuple(segments)))
        return shares

    def _without_padding(self, shares: list[Share]) -> list[Share]:
        """A vocabulary without the rows that only make it divisible."""
        rows = self._info.get("original_vocab_size")
        if type(rows) is not int or not 0 < rows < shares[0].shape[0]:
            return shares
        width = prod(shares[0].shape[1:])
        cut = []
        for share in shares:
            segments = []
            for segment in share.segments:
                count = max(0, min(segment.sizes[0], rows - segment.offsets[0]))
                sizes = (count, *segment.sizes[1:])
                segments += [Segment(segment.start, segment.start + count * width, segment.offsets, sizes)] * bool(
                    count
                )
            cut.append(Share((rows, *share.shape[1:]), tuple(segments)))
        return cut

    def _affine(self, name: str, told: Any, shapes: Sequence[Shape]) -> list[Share]:
        full = _counts(_get(told, "logical_shape"))
        ranks = _get(told, "ranks")
        if full is None or len(full) > MOST_DIMENSIONS or not isinstance(ranks, dict):
            raise self._contradiction(name, "logical_shape and ranks in affine_map", "neither")
        shares = []
        for rank, shape in enumerate(shapes):
            own = ranks.get(rank)
            if _counts(_get(own, "shard_shape")) != shape:
                raise self._contradiction(name, shown(_get(own, "shard_shape")), f"{list(shape)} on rank {rank}")
            segments: list[Segment] = []
            for piece in _items(_get(own, "pieces")):
                segments += self._affine_piece(name, piece, full, shape)
            spans = sorted((segment.start, segment.stop) for segment in segments)
            if [start for start, _ in spans] + [prod(shape)] != [0, *(stop for _, stop in spans)]:
                expected = f"pieces that make up {list(shape)} on rank {rank}, each element once"
                raise self._contradiction(name, expected, "a gap or an overlap")
            shares.append(Share(full, tuple(segments)))
        return shares

    def _affine_piece(self, name: str, piece: Any, full: Shape, shard: Shape) -> list[Segment]:
        sizes, source, dest = _counts(_get(piece, "shape")), _view(piece, "source"), _view(piece, "dest")
        if sizes is None or source is None or dest is None or not len(sizes) == len(source[1]) == len(dest[1]):
            raise self._contradiction(name, "pieces with shape, source and dest in affine_map", shown(piece, 80))
        if _get(piece, "scale", 1.0) != 1.0:
            raise GeometryMismatch(
                f"tensor {name} is stored divided by the number of tensor-parallel ranks ({self._file} gives the "
                f"factor {shown(_get(piece, 'scale'))}), which unshard does not undo",
                tensor=name,
                file=self._file,
                expected="weights as the model has them",
                found="a row-parallel bias, scaled",
                hint="Save the model with gather_16bit_weights_on_model_save, or convert with ds_to_universal first.",
            )
        for (offset, strides), shape in ((source, full), (dest, shard)):
            last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
            if 0 not in sizes and last >= prod(shape):
                raise self._contradiction(name, f"pieces inside of {list(shape)}", f"element {last}")
        return list(self._segments(name, full, _View(sizes, source[1], dest[1]), (source[0], dest[0])))

    def _segments(self, name: str, full: Shape, view: _View, at: tuple[int, int]) -> list[Segment]:
        found = []
        for segment in _cut_view(full, view.coalesced(), at):
            found.append(segment)
            if len(found) > MOST_SEGMENTS:
                raise self._contradiction(name, f"shards of at most {MOST_SEGMENTS} boxes", "more")
        return found

    def _contradiction(self, name: str, expected: str, found: str) -> GeometryMismatch:
        return GeometryMismatch(
            f"tensor {name}: {self._file} (universal_checkpoint_info) and the shards disagree: expected {expected}, "
            f"found {found}",
            tensor=name,
            file=self._file,
            expected=expected,
            found=found,
            hint="Bring together the files of one checkpoint.",
        )


@dataclass(frozen=True, slots=True)
class _View:
    """The same elements seen in the full tensor (``source``) and in the shard (``dest``): sizes and strides."""

    sizes: Shape
    source: Shape
    dest: Shape

    def coalesced(self) -> _View:
        """As few dimensions as possible: those that run on in both are one."""
        merged: list[tuple[int, int, int]] = []
        for size, source, dest in zip(self.sizes, self.source, self.dest, strict=True):
            if size == 1:
                continue
            if merged and merged[-1][1:] == (source * size, dest * size):
                merged[-1] = (merged[-1][0] * size, source, dest)
            else:
                merged.append((size, source, dest))
        sizes, sources, dests = zip(*merged, strict=True) if merged else ((), (), ())
        return _View(sizes, sources, dests)

    def without_first(self) -> _View:
        return _View(self.sizes[1:], self.source[1:], self.dest[1:])


def _cut_view(full: Shape, view: _View, at: tuple[int, int]) -> Iterator[Segment]:
    """Segments of a view: whole where it is a box of the full tensor, else its first dimension entry by entry."""
    source, dest = at
    count = prod(view.sizes)
    if count == 0:
        return
    if view.dest == contiguous_strides(view.sizes):
        box = _box(full, view, source)
        if box is not None:
            yield Segment(dest, dest + count, *box)
            return
        if len(view.sizes) == 1 and view.source == (1,):
            for offsets, sizes in flat_range_boxes(full, source, source + count):
                yield Segment(dest, dest + prod(sizes), offsets, sizes)
                dest += prod(sizes)
            return
    inner = view.without_first()
    for index in range(view.sizes[0]):
        yield from _cut_view(full, inner, (source + index * view.source[0], dest + index * view.dest[0]))


def _box(full: Shape, view: _View, start: int) -> tuple[Shape, Shape] | None:
    """The box of the full tensor that a view is, if it is one."""
    strides = contiguous_strides(full)
    offsets = []
    rest = start
    for stride in strides:
        offsets.append(rest // stride)
        rest %= stride
    sizes = [1] * len(full)
    after = 0
    for size, stride in zip(view.sizes, view.source, strict=True):
        axis = next((i for i in range(after, len(full)) if strides[i] == stride and full[i] > 1), None)
        if axis is None or offsets[axis] + size > full[axis]:
            return None
        sizes[axis] = size
        after = axis + 1
    return tuple(offsets), tuple(sizes)


class _Patterns:
    """Regular expressions of a checkpoint, matched from a name's beginning; most of them are plain names."""

    def __init__(self, texts: Sequence[str], file: str) -> None:
        self._names: dict[str, str] = {}
        self._expressions: list[tuple[str, re.Pattern[str]]] = []
        for text in texts:
            literal = _LITERAL.fullmatch(text)
            if literal:
                self._names.setdefault(re.sub(r"\\(.)", r"\1", literal[1]), text)
            else:
                self._expressions.append((text, _compiled(text, file)))

    def match(self, name: str) -> str | None:
        """The first pattern that fits a name; none fits a name that is longer than any model's."""
        if len(name) > LONGEST_NAME:
            return None
        known = self._names.get(name)
        return known or next((text for text, expression in self._expressions if expression.match(name)), None)


def _compiled(text: str, file: str) -> re.Pattern[str]:
    expression = compiled(text)
    if expression is not None:
        return expression
    raise CorruptFile(
        f"{file}: universal_checkpoint_info has the pattern {text[:80]!r}, which is no simple pattern of names",
        file=file,
        expected="patterns without groups",
        found=text[:80],
        hint="Convert the checkpoint with DeepSpeed's ds_to_universal in the training environment first.",
    )


def _get(value: Any, key: str, default: Any = None) -> Any:
    if isinstance(value, dict):
        return value.get(key, default)
    return value.get(key, default) if isinstance(value, Record) else default


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _texts(value: Any) -> list[str]:
    return [text for text in _items(value) if type(text) is str]


def _counts(value: Any) -> Shape | None:
    return tuple(value) if isinstance(value, (list, tuple)) and all(map(is_count, value)) else None


def _view(piece: Any, key: str) -> tuple[int, Shape] | None:
    value = _get(piece, key)
    if not isinstance(value, (list, tuple)) or len(value) != 2 or type(value[0]) is not int or value[0] < 0:
        return None
    strides = _counts(value[1])
    return None if strides is None else (value[0], strides)
