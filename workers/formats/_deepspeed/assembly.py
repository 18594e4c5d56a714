"""Put the tensors of a DeepSpeed checkpoint together: from records in files to pieces of full tensors.

Knows where elements lie and nothing of how DeepSpeed came to put them there; the formats say which of several copies
of a parameter counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from workers.checkpoint import SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.dtypes import ELEMENT_TYPES
from workers.errors import GeometryMismatch
from workers.formats._deepspeed.states import StateFile
from workers.formats._deepspeed.tags import ONE_CHECKPOINT
from workers.formats._deepspeed.tensor_parallel import Segment, Share, TensorParallelism, whole
from workers.formats._state_dict import clean_names
from workers.geometry import Shape, contiguous_strides, flat_range_boxes
from workers.options import ConvertOptions
from workers.pickles import TensorRecord
from workers.torch_file import resolve


class Run(NamedTuple):
    """Elements [start, stop) of a tensor, row-major and one after the other from a byte of a file on."""

    storage: int
    offset: int
    start: int
    stop: int


class Strided(NamedTuple):
    """A whole tensor whose elements lie apart."""

    storage: int
    offset: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter as one model-parallel rank has it, in runs of its flat partitions or whole."""

    dtype: str
    shape: Shape
    runs: list[Run] = field(default_factory=list)
    strided: Strided | None = None

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Where the runs begin and end."""
        return tuple((run.start, run.stop) for run in self.runs)


class Assembly:
    """Collects files, tensors and pieces."""

    def __init__(self) -> None:
        self.builder = CheckpointBuilder()
        self.notes: list[str] = []
        self._files: dict[str, int] = {}
        self._storages: dict[tuple[str, str], int] = {}

    def add_file(self, file: StateFile) -> int:
        """The number of a file that something is taken from, or that says how."""
        number = self._files.get(file.path)
        if number is None:
            entry = file.entry
            number = self.builder.add_file(
                SourceFile(entry.path, entry.size_bytes, file.rank[1], file.torch.directory_digest, entry.version)
            )
            self._files[file.path] = number
        return number

    def place(self, file: StateFile, record: TensorRecord, name: str) -> Strided:
        """Find a tensor's bytes. Raises what ``torch_file.resolve`` raises."""
        resolved = resolve(file.torch, record, name=name)
        key = file.path, record.storage.key
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = self.builder.add_storage(self.add_file(file), *resolved.stored)
        return Strided(storage, resolved.offset, resolved.strides)

    def local(self, file: StateFile, record: TensorRecord, name: str, shape: Shape | None = None) -> Local:
        """A tensor that a file has whole; ``shape`` is the true one of a tensor that was saved flat."""
        placed = self.place(file, record, name)
        shape = record.shape if shape is None else shape
        numel = prod(shape)
        if numel != prod(record.shape):
            raise GeometryMismatch(
                f"{file.path}: tensor {name} has {prod(record.shape)} elements, but its shape is {list(shape)}",
                file=file.path,
                tensor=name,
                expected=f"{numel} elements",
                found=f"{prod(record.shape)}",
                hint=ONE_CHECKPOINT,
            )
        if _is_contiguous(record.shape, placed.strides):
            return Local(record.dtype, shape, [Run(placed.storage, placed.offset, 0, numel)] if numel else [])
        return Local(record.dtype, record.shape, strided=placed)

    def add_all(
        self,
        by_rank: Sequence[Mapping[str, Local]],
        parallel: TensorParallelism | None,
        options: ConvertOptions,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """Add the tensors of all model-parallel ranks; ``parallel`` says how the ranks cut a tensor between them.

        ``renamed`` has the names in the model where they are others.
        """
        names = renamed or clean_names(dict.fromkeys(name for tensors in by_rank for name in tensors), options)
        for name, final in names.items():
            parts = [tensors[name] for tensors in by_rank if name in tensors]
            if len(parts) == 1:
                self._add(final, parts, [whole(parts[0].shape)])
            elif parallel is not None and parallel.is_known:
                self._add(final, parts, parallel.shares(name, [part.shape for part in parts]))
            else:
                raise _unknown_cut(name, parts)

    def _add(self, name: str, parts: Sequence[Local], shares: Sequence[Share]) -> None:
        dtypes, shapes = {part.dtype for part in parts}, {share.shape for share in shares}
        if len(dtypes) > 1 or len(shapes) > 1:
            raise _differing_ranks(name, parts)
        number = self.builder.add_tensor(name, parts[0].dtype, shares[0].shape)
        seen: dict[tuple[Shape, Shape], object] = {}
        for part, share in zip(parts, shares, strict=True):
            for segment in share.segments:
                box = segment.offsets, segment.sizes
                cuts: object = None if len(parts) == 1 else (segment.start, part.cuts, part.strided is None)
                # A copy that is cut otherwise can't be compared piece by piece; one of them is enough.
                if seen.setdefault(box, cuts) == cuts:
                    self._add_segment(number, part, segment)

    def _add_segment(self, number: int, part: Local, segment: Segment) -> None:
        if part.strided is not None:
            if segment.start or segment.sizes != part.shape:
                name = self.builder.tensors[number].name
                raise GeometryMismatch(
                    f"tensor {name} is cut between tensor-parallel ranks and not stored row by row",
                    tensor=name,
                    expected="shards as DeepSpeed saves them",
                    found=f"strides {list(part.strided.strides)}",
                    hint="Save the shards after contiguous().",
                )
            box = segment.offsets, segment.sizes
            self.builder.add_piece(number, part.strided.storage, part.strided.offset, box, part.strided.strides)
            return
        width = ELEMENT_TYPES[part.dtype].size_bytes
        strides = contiguous_strides(segment.sizes)
        for run in part.runs:
            start, stop = max(run.start, segment.start), min(run.stop, segment.stop)
            position = run.offset + (start - run.start) * width
            for offsets, sizes in flat_range_boxes(segment.sizes, start - segment.start, stop - segment.start):
                at = tuple(a + b for a, b in zip(segment.offsets, offsets, strict=True))
                self.builder.add_piece(number, run.storage, position, (at, sizes), strides)
                position += prod(sizes) * width


def check_same_names(by_rank: Sequence[Mapping[str, Local]], file_of: Callable[[str, int], str]) -> None:
    """Refuse a tensor that some tensor-parallel ranks have and others don't: it would be taken for whole.

    ``file_of(name, rank)`` is the file in which a rank has, or should have, the tensor.
    """
    for rank, tensors in enumerate(by_rank):
        for name in sorted(tensors.keys() ^ by_rank[0].keys())[:1]:
            has, lacks = (0, rank) if name in by_rank[0] else (rank, 0)
            raise GeometryMismatch(
                f"{file_of(name, has)} has a part of tensor {name}, which {file_of(name, lacks)} does not have",
                file=file_of(name, lacks),
                tensor=name,
                expected="a part on each tensor-parallel rank",
                found="no such tensor",
                hint=ONE_CHECKPOINT,
            )


def _is_contiguous(shape: Shape, strides: Shape) -> bool:
    usual = contiguous_strides(shape)
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, strides, usual, strict=True))


def _unknown_cut(name: str, parts: Iterable[Local]) -> GeometryMismatch:
    shapes = ", ".join(str(list(part.shape)) for part in parts)
    return GeometryMismatch(
        f"tensor {name} is cut between model-parallel ranks ({shapes}), and the checkpoint does not say how: its "
        "model states have no universal_checkpoint_info",
        tensor=name,
        expected="universal_checkpoint_info",
        found=f"shards {shapes}",
        hint="Save with a DeepSpeed version that records it (0.19 for AutoTP), or save the gathered 16-bit weights "
        "(gather_16bit_weights_on_model_save).",
    )


def _differing_ranks(name: str, parts: Iterable[Local]) -> GeometryMismatch:
    shown = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
    return GeometryMismatch(
        f"tensor {name} differs between model-parallel ranks: {shown}",
        tensor=name,
        expected="shards of one tensor",
        found=shown,
        hint=ONE_CHECKPOINT,
    )
