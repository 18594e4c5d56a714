"""How readers make the tables of a ``Checkpoint``: they add what they find; that nothing is missing is proved here."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from workers.checkpoint import (
    NO_CHECKSUM,
    PLAIN,
    ZSTD,
    IntArray,
    PieceTable,
    SourceFile,
    StorageTable,
    TensorInfo,
    padded_shapes,
)
from workers.dtypes import ELEMENT_TYPES
from workers.errors import GeometryMismatch, IncompleteCheckpoint
from workers.geometry import CoverFault, cover_faults, same_box_as_previous
from workers.tolerance import refuse

MAX_DIMENSIONS = 8
"""Most dimensions a tensor may have; models use up to five, convolutions included."""

MOST_ELEMENTS = 1 << 46
"""Elements of a tensor: many times those of the largest model. A file can claim any number, by strides of 0."""

LARGEST_NUMBER = (1 << 62) - 1
"""For lengths, offsets, strides and positions: the sum of two is a 64-bit number still."""

MOST_REPEATED_BYTES = 16 << 30
"""Bytes of a piece beyond which its storage must hold a share of them: small ones repeat elements, as masks do."""
LEAST_SHARE = 64
"""One part in so many."""

STORAGE_COLUMNS = 6


class CheckpointBuilder:
    """Collects tensors, storages and pieces from a reader, then proves that the pieces tile the tensors."""

    def __init__(self) -> None:
        self.files: list[SourceFile] = []
        self.tensors: list[TensorInfo] = []
        self._numbers: dict[str, int] = {}
        self._storages = array("q")
        self._pieces = array("q")
        self._boxes = array("q")

    def add_file(self, file: SourceFile) -> int:
        self.files.append(file)
        return len(self.files) - 1

    def add_tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """The number of the tensor of that name; a second dtype or shape for a name is an error."""
        number = self._numbers.get(name)
        if number is None:
            if len(shape) > MAX_DIMENSIONS:
                raise GeometryMismatch(
                    f"tensor {name} has {len(shape)} dimensions, more than the {MAX_DIMENSIONS} that are supported",
                    tensor=name,
                )
            _check_numbers(shape, f"the shape of tensor {name}", name)
            if prod(shape) > MOST_ELEMENTS:
                raise GeometryMismatch(
                    f"tensor {name} {list(shape)} has {prod(shape)} elements, more than a model can have",
                    tensor=name,
                    expected=f"at most {MOST_ELEMENTS} elements",
                    found=f"{prod(shape)} elements",
                    hint="The file that tells of it is damaged, or was made to exhaust whoever reads it.",
                )
            self._numbers[name] = number = len(self.tensors)
            self.tensors.append(TensorInfo(name, dtype, shape))
        elif (known := self.tensors[number]).shape != shape or known.dtype != dtype:
            raise GeometryMismatch(
                f"tensor {name} is {dtype} {list(shape)} in {self.files[-1].path}, but {known.dtype} "
                f"{list(known.shape)} in the files before it",
                tensor=name,
                file=self.files[-1].path,
                expected=f"{known.dtype} {list(known.shape)}",
                found=f"{dtype} {list(shape)}",
                hint="The files belong to different runs or steps; bring together the files of one checkpoint.",
            )
        return number

    def add_storage(
        self, file: int, offset: int, length: int, crc32: int | None, *, zstd_decoded_length: int | None = None
    ) -> int:
        """Add a byte range; with ``zstd_decoded_length`` it is compressed and has that many bytes when decoded."""
        checksum = NO_CHECKSUM if crc32 is None else crc32
        encoded = zstd_decoded_length is not None
        decoded = zstd_decoded_length if zstd_decoded_length is not None else length
        self._storages.extend((file, offset, length, checksum, ZSTD if encoded else PLAIN, decoded))
        return len(self._storages) // STORAGE_COLUMNS - 1

    def add_storages(self, file: int, rows: IntArray) -> int:
        """Add many storages of one file, rows of (offset, length, CRC-32 or ``NO_CHECKSUM``): the first's number."""
        first = len(self._storages) // STORAGE_COLUMNS
        plain = np.full(len(rows), PLAIN)
        columns = np.column_stack((np.full(len(rows), file), rows, plain, rows[:, 1])).astype(np.int64)
        self._storages.frombytes(columns.tobytes())
        return first

    def add_box(
        self, offsets: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...], tensor: str | None = None
    ) -> int:
        """A number for a box and its strides, for ``add_pieces``: few boxes serve very many pieces.

        Raises ``GeometryMismatch``, of ``tensor`` where it is given, for numbers that no file can mean.
        """
        _check_numbers((*offsets, *sizes, *strides), f"a piece of tensor {tensor}" if tensor else "a piece", tensor)
        rest = MAX_DIMENSIONS - len(sizes)
        self._boxes.extend((*offsets, *(0,) * rest, *sizes, *(1,) * rest, *strides, *(0,) * rest))
        return len(self._boxes) // (3 * MAX_DIMENSIONS) - 1

    def add_piece(
        self,
        tensor: int,
        storage: int,
        start: int,
        box: tuple[tuple[int, ...], tuple[int, ...]],
        strides: tuple[int, ...],
    ) -> None:
        """Add a box (offsets, sizes) of a tensor whose first element lies at byte ``start`` of the storage's file."""
        if 0 not in box[1]:
            name = self.tensors[tensor].name
            if not 0 <= start <= LARGEST_NUMBER:
                _check_numbers((start,), f"a piece of tensor {name}", name)
            self._pieces.extend((tensor, storage, start, self.add_box(*box, strides, name)))

    def add_pieces(self, rows: IntArray) -> None:
        """Add many pieces, rows of (tensor, storage, start, box); none of their boxes is empty."""
        self._pieces.frombytes(np.ascontiguousarray(rows, dtype=np.int64).tobytes())

    def tables(
        self, explain: Callable[[IncompleteCheckpoint], IncompleteCheckpoint] = lambda gap: gap
    ) -> tuple[StorageTable, PieceTable, PieceTable]:
        """Storages, pieces that tile every tensor exactly, and their replicas.

        Refuses with ``IncompleteCheckpoint`` where elements of a tensor are in no piece, of which ``explain`` may say
        more, and with ``GeometryMismatch`` where pieces overlap in part; see ``workers.tolerance``.
        """
        storages = _columns(self._storages, STORAGE_COLUMNS)
        columns = _columns(self._pieces, 4)
        dimensions = max((len(tensor.shape) for tensor in self.tensors), default=1) or 1
        boxes = [part[:, :dimensions] for part in np.split(_columns(self._boxes, 3 * MAX_DIMENSIONS), 3, axis=1)]
        columns = columns[_sorted_rows(columns, *boxes[:2])]
        table = _Rows(columns, *(part[columns[:, 3]] for part in boxes))
        repeat = same_box_as_previous(table.columns[:, 0], table.offsets, table.sizes)
        pieces, replicas = (table.select(rows).table(len(self.tensors)) for rows in (~repeat, repeat))
        self._check_inside(pieces, storages)
        self._check_held(pieces, storages)
        for fault in cover_faults(
            pieces.tensor, pieces.offsets, pieces.sizes, padded_shapes(self.tensors, dimensions)
        ):
            overlap = fault.overlapping_rows
            refuse(self._overlap(pieces, storages, overlap) if overlap else explain(self._gap(pieces, fault)))
        return _storage_table(storages), pieces, replicas

    def _check_inside(self, pieces: PieceTable, storages: IntArray) -> None:
        ends = pieces.offsets + pieces.sizes
        shapes = padded_shapes(self.tensors, pieces.offsets.shape[1])
        outside = np.flatnonzero(((pieces.offsets < 0) | (ends > shapes[pieces.tensor])).any(axis=1))
        if len(outside):
            row = int(outside[0])
            tensor = self.tensors[pieces.tensor[row]]
            file = self.files[storages[pieces.storage[row], 0]].path
            raise GeometryMismatch(
                f"{file} holds {_box_text(pieces, row, len(tensor.shape))} of tensor {tensor.name}, which has only "
                f"the shape {list(tensor.shape)}",
                tensor=tensor.name,
                file=file,
                expected=f"a box inside of {list(tensor.shape)}",
                found=_box_text(pieces, row, len(tensor.shape)),
                hint="The file was written by another run, or its metadata is damaged.",
            )

    def _check_held(self, pieces: PieceTable, storages: IntArray) -> None:
        """Refuse pieces that claim to be far larger than what their storages hold."""
        kinds = (ELEMENT_TYPES.get(tensor.dtype) for tensor in self.tensors)
        widths = np.array([kind.size_bytes if kind else 0 for kind in kinds], dtype=np.int64)
        claimed = pieces.sizes.prod(axis=1) * widths[pieces.tensor]
        held = storages[pieces.storage, 5]
        beyond = np.flatnonzero((claimed > MOST_REPEATED_BYTES) & (claimed // LEAST_SHARE > held))
        if len(beyond):
            row = int(beyond[0])
            tensor, file = self.tensors[pieces.tensor[row]], self.files[storages[pieces.storage[row], 0]].path
            raise GeometryMismatch(
                f"{file}: tensor {tensor.name} {list(tensor.shape)} has {claimed[row]} bytes, which repeat the "
                f"{held[row]} of its storage",
                tensor=tensor.name,
                file=file,
                expected=f"at most {MOST_REPEATED_BYTES} bytes, or {LEAST_SHARE} times those of the storage",
                found=f"{claimed[row]} bytes",
                hint="The tensor was expanded, and is no weight: leave it out where the checkpoint is saved.",
            )

    def _overlap(self, pieces: PieceTable, storages: IntArray, rows: tuple[int, int]) -> GeometryMismatch:
        tensor = self.tensors[pieces.tensor[rows[0]]]
        boxes = [_box_text(pieces, row, len(tensor.shape)) for row in rows]
        files = [self.files[storages[pieces.storage[row], 0]].path for row in rows]
        return GeometryMismatch(
            f"pieces of tensor {tensor.name} {list(tensor.shape)} overlap: {boxes[0]} in {files[0]} and "
            f"{boxes[1]} in {files[1]}",
            tensor=tensor.name,
            file=files[1],
            hint="The files belong to different runs or world sizes; bring together those of one checkpoint.",
        )

    def _gap(self, pieces: PieceTable, fault: CoverFault) -> IncompleteCheckpoint:
        tensor = self.tensors[fault.owner]
        return IncompleteCheckpoint(
            f"{fault.missing_elements} of the {prod(tensor.shape)} elements of tensor {tensor.name} "
            f"{list(tensor.shape)} are in no file",
            tensor=tensor.name,
            expected=f"pieces that cover {list(tensor.shape)}",
            found=", ".join(_box_text(pieces, row, len(tensor.shape)) for row in pieces.rows(fault.owner)[:8])
            or "no piece",
            hint="A rank's file is missing from the folder or was written by another run.",
        )


def _check_numbers(numbers: tuple[int, ...], what: str, tensor: str | None = None) -> None:
    """Refuse numbers that no file can mean, before they are put into 64 bits and wrap around."""
    if numbers and not (min(numbers) >= 0 and max(numbers) <= LARGEST_NUMBER):
        wrong = next(number for number in numbers if not 0 <= number <= LARGEST_NUMBER)
        raise GeometryMismatch(
            f"{what} has the number {wrong}, which is no length or position",
            tensor=tensor,
            expected=f"numbers from 0 to {LARGEST_NUMBER}",
            found=str(wrong),
            hint="The file that tells of it is damaged, or was made to exhaust whoever reads it.",
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    columns: IntArray
    offsets: IntArray
    sizes: IntArray
    strides: IntArray

    def select(self, rows: NDArray[np.bool_]) -> _Rows:
        return _Rows(self.columns[rows], self.offsets[rows], self.sizes[rows], self.strides[rows])

    def table(self, tensors: int) -> PieceTable:
        owner = self.columns[:, 0].astype(np.int32)
        first = np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=tensors)))).astype(np.int64)
        storage, start = self.columns[:, 1].astype(np.int32), self.columns[:, 2].copy()
        return PieceTable(owner, storage, start, self.offsets, self.sizes, self.strides, first)


def _sorted_rows(columns: IntArray, offsets: IntArray, sizes: IntArray) -> IntArray:
    """The order of pieces by tensor, then offsets, then sizes; boxes are ranked first, since they are few."""
    by_place = np.lexsort((*sizes.T[::-1], *offsets.T[::-1]))
    rank = np.empty(len(by_place), dtype=np.int64)
    rank[by_place] = np.arange(len(by_place))
    return np.lexsort((rank[columns[:, 3]], columns[:, 0]))


def _storage_table(rows: IntArray) -> StorageTable:
    return StorageTable(
        file=rows[:, 0].astype(np.int32),
        offset=rows[:, 1].copy(),
        length=rows[:, 2].copy(),
        crc32=rows[:, 3].copy(),
        encoding=rows[:, 4].astype(np.int8),
        decoded_length=rows[:, 5].copy(),
    )


def _columns(values: array[int], width: int) -> IntArray:
    return np.frombuffer(values, dtype=np.int64).reshape(-1, width) if values else np.zeros((0, width), dtype=np.int64)


def _box_text(pieces: PieceTable, row: int, dimensions: int) -> str:
    spans = (
        f"{offset}:{offset + size}"
        for offset, size in zip(pieces.offsets[row, :dimensions], pieces.sizes[row, :dimensions], strict=True)
    )
    return f"[{', '.join(spans)}]"
