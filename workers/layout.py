"""How target tensors are laid out in output files: the split into shards, headers, byte positions, parts.

Pure: it sees names, dtypes and shapes, and knows neither sources nor destinations.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from workers.dtypes import ELEMENT_TYPES, size_bytes
from workers.expressions import Expression, inputs_of
from workers.mapping import Target
from workers.safetensors_file import build_header

SMALLEST_PART_BYTES = 1 << 20
LARGEST_PART_BYTES = 32 << 20
PARTS_IN_BUDGET = 16
"""A part is at most this fraction of the memory budget, so that several are under way within it."""

WEIGHTS_NAME = "model"
ADAPTER_NAME = "adapter_model"


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the result that holds weights: literal first bytes, then the targets of a range, then nothing."""

    path: str
    header: bytes
    size_bytes: int
    first_target: int
    stop_target: int
    first_part: int
    stop_part: int


@dataclass(frozen=True, slots=True)
class PartTable:
    """Units of work, in the order of writing. A part is a byte range of one file and the segments that fill it."""

    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    first_segment: NDArray[np.int64]
    """[parts + 1]: the segments of part p are first_segment[p] to first_segment[p + 1]."""
    target: NDArray[np.int32]
    """[segments]: the target tensor, and the row-major elements [begin, end) of it that lie in the segment."""
    begin: NDArray[np.int64]
    end: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True)
class Layout:
    """Output files and parts of a plan; ``positions[t]`` is the byte offset of target t in its file."""

    files: tuple[OutputFile, ...]
    parts: PartTable
    positions: NDArray[np.int64]
    indexes: tuple[tuple[str, bytes], ...]
    """Index files by path, for folders whose weights are split."""


def shard_members(sizes: Sequence[int], max_shard_bytes: int) -> list[list[int]]:
    """Numbers of the tensors of each shard, as huggingface_hub's greedy rule deals them out.

    A shard is closed when the next tensor would make it larger than the limit; a tensor beyond the limit gets a
    shard of its own and leaves the one being filled open. Source: huggingface_hub
    ``split_state_dict_into_shards_factory``.
    """
    shards: list[list[int]] = []
    current: list[int] = []
    current_bytes = 0
    for number, size in enumerate(sizes):
        if size > max_shard_bytes:
            shards.append([number])
            continue
        if current and current_bytes + size > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(number)
        current_bytes += size
    if current:
        shards.append(current)
    return shards


def lay_out(
    targets: Sequence[Target], adapters: Collection[str], max_shard_bytes: int, part_bytes: int
) -> tuple[tuple[Target, ...], Layout]:
    """The targets in the order of writing, and their layout in Hugging Face's form.

    Weights are split by ``max_shard_bytes``, except those of the folders in ``adapters``: peft reads one file.
    """
    ordered: list[Target] = []
    shards: list[tuple[str, range]] = []
    indexes: list[tuple[str, bytes]] = []
    for folder in dict.fromkeys(target.folder for target in targets):
        members = [target for target in targets if target.folder == folder]
        sizes = [_size(target) for target in members]
        is_adapter = folder in adapters
        groups = [list(range(len(members)))] if is_adapter else shard_members(sizes, max_shard_bytes)
        paths = shard_paths(folder, ADAPTER_NAME if is_adapter else WEIGHTS_NAME, len(groups))
        for path, group in zip(paths, groups, strict=True):
            shards.append((path, range(len(ordered), len(ordered) + len(group))))
            ordered.extend(members[number] for number in group)
        if len(groups) > 1:
            indexes.append((_joined(folder, f"{WEIGHTS_NAME}.safetensors.index.json"), _index(members, groups, paths)))
    files, parts, positions = _cut(ordered, shards, part_bytes)
    return tuple(ordered), Layout(files, parts, positions, tuple(indexes))


def shard_paths(folder: str, stem: str, count: int) -> list[str]:
    """File names of ``count`` shards, as transformers spells them."""
    if count == 1:
        return [_joined(folder, f"{stem}.safetensors")]
    return [_joined(folder, f"{stem}-{number:05d}-of-{count:05d}.safetensors") for number in range(1, count + 1)]


def part_size(memory_bytes: int) -> int:
    """Bytes of a part under a memory budget; part of the plan, so it depends on nothing else."""
    return max(SMALLEST_PART_BYTES, min(LARGEST_PART_BYTES, memory_bytes // PARTS_IN_BUDGET))


def step_elements(expression: Expression, wanted_bytes: int) -> int:
    """Elements of an output of about ``wanted_bytes``, at a border that the expression allows."""
    return aligned_step(expression, max(1, wanted_bytes // bytes_per_element(expression)))


def bytes_per_element(expression: Expression) -> int:
    """Bytes that an element counts with when outputs are cut: its own, or more when it is made of many elements.

    Each element that it is made of counts as one byte, so that a block takes at most four times its size to make
    from 32-bit elements. A scale stands for a whole group of weights, which must be read for it.
    """
    return max(ELEMENT_TYPES[expression.dtype].size_bytes, inputs_per_element(expression))


def inputs_per_element(expression: Expression) -> int:
    """Elements that one element is made of: one, unless an expression says otherwise."""
    own: int = getattr(expression, "inputs_per_element", 1)
    inner = next(inputs_of(expression), None)
    return own if inner is None else own * inputs_per_element(inner)


def aligned_step(expression: Expression, wanted: int) -> int:
    """About ``wanted`` elements, at a border that the expression allows and, where one is near, at whole rows."""
    unit = max(1, expression.unit_elements)
    if unit == 1:
        for length in reversed(expression.shape):
            if length < 1 or unit * length > wanted:
                break
            unit *= length
    return max(unit, wanted // unit * unit)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _size(target: Target) -> int:
    return size_bytes(target.expression.dtype, target.expression.shape)


def _index(members: Sequence[Target], groups: list[list[int]], paths: list[str]) -> bytes:
    names = [path.rpartition("/")[2] for path in paths]
    where = {members[number].name: name for name, group in zip(names, groups, strict=True) for number in group}
    content = {"metadata": {"total_size": sum(map(_size, members))}, "weight_map": where}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _cut(
    targets: Sequence[Target], shards: Sequence[tuple[str, range]], part_bytes: int
) -> tuple[tuple[OutputFile, ...], PartTable, NDArray[np.int64]]:
    files: list[OutputFile] = []
    positions = np.zeros(len(targets), dtype=np.int64)
    rows: list[tuple[int, int, int, int]] = []
    segments: list[tuple[int, int, int]] = []
    for path, members in shards:
        described = [(targets[n].name, targets[n].expression.dtype, targets[n].expression.shape) for n in members]
        header = build_header(described, {"format": "pt"})
        end, first_part = len(header), len(rows)
        for number in members:
            positions[number] = end
            end += _size(targets[number])
        for part in _parts_of_file(targets, members, part_bytes):
            size = sum((stop - start) * _width(targets[number]) for number, start, stop in part)
            number, start, _ = part[0]
            rows.append((len(files), int(positions[number]) + start * _width(targets[number]), size, len(segments)))
            segments.extend(part)
        files.append(OutputFile(path, header, end, members.start, members.stop, first_part, len(rows)))
    return tuple(files), _part_table(rows, segments), positions


def _width(target: Target) -> int:
    return ELEMENT_TYPES[target.expression.dtype].size_bytes


def _parts_of_file(targets: Sequence[Target], members: range, part_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Segments (target, begin, end) of each part: small tensors together, large ones cut where they allow it."""
    part: list[tuple[int, int, int]] = []
    room = part_bytes
    for number in members:
        expression = targets[number].expression
        width, total = bytes_per_element(expression), prod(expression.shape)
        if part and total * width > room:
            yield part
            part, room = [], part_bytes
        step = step_elements(expression, part_bytes)
        begin = 0
        if part and total > step:
            yield part
            part, room = [], part_bytes
        while total - begin > step:
            yield [(number, begin, begin + step)]
            begin += step
        if begin < total:
            part.append((number, begin, total))
            room -= (total - begin) * width
    if part:
        yield part


def _part_table(rows: list[tuple[int, int, int, int]], segments: list[tuple[int, int, int]]) -> PartTable:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    cuts = np.array(segments, dtype=np.int64).reshape(-1, 3)
    first = np.concatenate((columns[:, 3], [len(cuts)])).astype(np.int64)
    return PartTable(
        file=columns[:, 0].astype(np.int32),
        offset=columns[:, 1].copy(),
        length=columns[:, 2].copy(),
        first_segment=first,
        target=cuts[:, 0].astype(np.int32),
        begin=cuts[:, 1].copy(),
        end=cuts[:, 2].copy(),
    )
