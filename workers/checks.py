"""Comparisons that need bytes: are two tensors equal, do replicas agree, is what was never read still whole.

Equal recorded checksums of equally long storages decide without reading; bytes are compared only where they don't.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from workers.arithmetic import NumpyArithmetic
from workers.checkpoint import NO_CHECKSUM, Checkpoint, PieceTable, SourceFile
from workers.checksums import ChecksumLedger, crc32
from workers.dtypes import ELEMENT_TYPES
from workers.errors import Cancelled, CorruptFile, GeometryMismatch
from workers.geometry import Shape, flat_range_boxes
from workers.merge import SourceReader
from workers.storage import Folder, open_folder

COMPARED_BYTES = 8 << 20
"""How much is read at a time to compare or to check."""

STATS_AT_ONCE = 16
"""Source files that a store is asked about at a time; a large run has thousands."""


class ByteProbe:
    """Answers questions about weights while planning (``workers.mapping.Probe``)."""

    def __init__(self, checkpoint: Checkpoint, folder: Folder) -> None:
        self._checkpoint = checkpoint
        self._folder = folder

    def equal(self, tensor_a: int, tensor_b: int) -> bool:
        """Whether two tensors of one dtype and shape hold the same elements."""
        a, b = self._checkpoint.tensors[tensor_a], self._checkpoint.tensors[tensor_b]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if self._same_checksums(tensor_a, tensor_b):
            return True
        readers = [(n, SourceReader(self._checkpoint, self._folder, NumpyArithmetic())) for n in (tensor_a, tensor_b)]
        return all(_same_bytes(readers, a.dtype, offsets, sizes) for offsets, sizes in _windows(a.dtype, a.shape))

    def _same_checksums(self, tensor_a: int, tensor_b: int) -> bool:
        pieces = self._checkpoint.pieces
        rows_a, rows_b = pieces.rows(tensor_a), pieces.rows(tensor_b)
        if len(rows_a) != len(rows_b):
            return False
        a, b = slice(rows_a.start, rows_a.stop), slice(rows_b.start, rows_b.stop)
        same_box = (pieces.offsets[a] == pieces.offsets[b]).all() and (pieces.sizes[a] == pieces.sizes[b]).all()
        same = _same_content(self._checkpoint, (pieces, np.array(rows_a)), (pieces, np.array(rows_b)))
        return bool(same_box and same.all())


def _same_bytes(readers: list[tuple[int, SourceReader]], dtype: str, offsets: Shape, sizes: Shape) -> bool:
    """Whether a box holds the same elements in two tensors, each with a reader of its own."""
    values = []
    for tensor, reader in readers:
        out = np.empty(sizes, dtype=ELEMENT_TYPES[dtype].numpy_type)
        reader.read(tensor, offsets, out)
        values.append(out)
    return bool((values[0] == values[1]).all())


def _windows(dtype: str, shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    step = COMPARED_BYTES // ELEMENT_TYPES[dtype].size_bytes
    total = prod(shape)
    for start in range(0, total, step):
        yield from flat_range_boxes(shape, start, min(start + step, total))


def _same_content(
    checkpoint: Checkpoint,
    a: tuple[PieceTable, np.ndarray[tuple[int], np.dtype[np.int64]]],
    b: tuple[PieceTable, np.ndarray[tuple[int], np.dtype[np.int64]]],
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which pairs of pieces are known to hold equal bytes without reading them."""
    storages = checkpoint.storages
    storage_a, storage_b = a[0].storage[a[1]], b[0].storage[b[1]]
    start_a = a[0].start[a[1]] - storages.offset[storage_a]
    start_b = b[0].start[b[1]] - storages.offset[storage_b]
    same_view = (start_a == start_b) & (a[0].strides[a[1]] == b[0].strides[b[1]]).all(axis=1)
    recorded = storages.crc32[storage_a] != NO_CHECKSUM
    equal = (storages.crc32[storage_a] == storages.crc32[storage_b]) & (
        storages.length[storage_a] == storages.length[storage_b]
    )
    result: np.ndarray[tuple[int], np.dtype[np.bool_]] = same_view & ((storage_a == storage_b) | (recorded & equal))
    return result


@dataclass(frozen=True, slots=True)
class ReplicaPair:
    """Two pieces that claim to hold the same box: rows of ``pieces`` and of ``replicas``."""

    piece: int
    replica: int


def doubtful_replicas(checkpoint: Checkpoint) -> list[ReplicaPair]:
    """Replicas whose recorded checksums don't prove them equal to the piece that is converted."""
    replicas, pieces = checkpoint.replicas, checkpoint.pieces
    if not len(replicas):
        return []
    partner = _partners(replicas, pieces)
    rows = np.arange(len(replicas))
    same = _same_content(checkpoint, (replicas, rows), (pieces, partner))
    return [ReplicaPair(int(partner[row]), int(row)) for row in np.flatnonzero(~same)]


def _partners(replicas: PieceTable, pieces: PieceTable) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each replica the row of the piece with the same box. Both tables are sorted alike."""

    def keys(table: PieceTable) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        columns = np.column_stack((table.tensor.astype(np.int64), table.offsets, table.sizes))
        return np.ascontiguousarray(columns).view([("", np.int64)] * columns.shape[1]).reshape(-1)

    found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.searchsorted(keys(pieces), keys(replicas))
    return found


def compare_replicas(
    checkpoint: Checkpoint, folder: Folder, pairs: list[ReplicaPair], cancel: threading.Event
) -> list[str]:
    """Compare replicas byte by byte; raises ``GeometryMismatch`` for the first that differs.

    Where the checkpoint's format tolerates small differences, what was found is returned in words.
    """
    differing: dict[str, float] = {}
    for pair in pairs:
        stop_if_cancelled(cancel)
        tensor = checkpoint.tensors[checkpoint.pieces.tensor[pair.piece]]
        dimensions = len(tensor.shape)
        sizes = tuple(checkpoint.pieces.sizes[pair.piece, :dimensions].tolist())
        views = [
            _only(checkpoint, checkpoint.pieces, pair.piece),
            _only(checkpoint, checkpoint.replicas, pair.replica),
        ]
        readers = [SourceReader(view, folder, NumpyArithmetic()) for view in views]
        for offsets, window in _windows(tensor.dtype, sizes):
            read = []
            for reader in readers:
                out = np.empty(window, dtype=ELEMENT_TYPES[tensor.dtype].numpy_type)
                reader.read(0, offsets, out)
                read.append(out)
            if not (read[0] == read[1]).all():
                difference = _largest_difference(read, tensor.dtype)
                if not difference <= checkpoint.replica_tolerance:
                    raise _differing_replicas(checkpoint, pair, tensor.name)
                differing[tensor.name] = max(difference, differing.get(tensor.name, 0.0))
    return _differences_in_words(checkpoint, differing)


def _largest_difference(values: list[np.ndarray[Any, Any]], dtype: str) -> float:
    """The largest difference of two boxes' values; infinite where these are no numbers that can be compared."""
    if dtype not in ("F32", "BF16", "F16"):
        return np.inf
    a, b = (NumpyArithmetic().as_float32(part, dtype) for part in values)
    return float(np.abs(a - b).max(initial=0.0))


def _differences_in_words(checkpoint: Checkpoint, differing: dict[str, float]) -> list[str]:
    if not differing:
        return []
    worst = max(differing, key=lambda name: differing[name])
    first = checkpoint.files[0].path
    said = f"{len(differing)} tensors that all files should have alike differ between them, most of all {worst}, by "
    return [f"{said}up to {differing[worst]:.3g}: those of {first} are taken"]


def _only(checkpoint: Checkpoint, table: PieceTable, row: int) -> Checkpoint:
    """A checkpoint that holds one piece, as a tensor of its own."""
    sizes = table.sizes[row : row + 1]
    tensor = checkpoint.tensors[table.tensor[row]]
    shape = tuple(sizes[0, : len(tensor.shape)].tolist())
    alone = PieceTable(
        tensor=np.zeros(1, dtype=np.int32),
        storage=table.storage[row : row + 1],
        start=table.start[row : row + 1],
        offsets=np.zeros_like(sizes),
        sizes=sizes,
        strides=table.strides[row : row + 1],
        first=np.array([0, 1], dtype=np.int64),
    )
    return Checkpoint(
        address=checkpoint.address,
        format=checkpoint.format,
        naming=checkpoint.naming,
        files=checkpoint.files,
        tensors=(type(tensor)(tensor.name, tensor.dtype, shape),),
        storages=checkpoint.storages,
        pieces=alone,
        replicas=alone,
    )


def _differing_replicas(checkpoint: Checkpoint, pair: ReplicaPair, name: str) -> GeometryMismatch:
    storages = checkpoint.storages
    first = checkpoint.files[storages.file[checkpoint.pieces.storage[pair.piece]]]
    second = checkpoint.files[storages.file[checkpoint.replicas.storage[pair.replica]]]
    return GeometryMismatch(
        f"tensor {name} should be the same in {first.path} and {second.path}, but its values differ",
        tensor=name,
        file=second.path,
        expected=f"the bytes of {first.path}",
        found=f"other bytes in {second.path}",
        hint="The files were saved at different steps or one is damaged; bring together the files of one checkpoint.",
    )


def stop_if_cancelled(cancel: threading.Event) -> None:
    """Raise ``Cancelled`` once ``cancel`` is set."""
    if cancel.is_set():
        raise Cancelled("the conversion was stopped", hint="Run the same command again to resume it.")


def finish_checksums(checkpoint: Checkpoint, folder: Folder, ledger: ChecksumLedger, cancel: threading.Event) -> int:
    """Read what is left of storages that were read in part, so that each is compared whole; returns bytes read."""
    total = 0
    others = cache(open_folder)
    for storage, gaps in list(ledger.unproved()):
        source = checkpoint.files[checkpoint.storages.file[storage]]
        base = int(checkpoint.storages.offset[storage])
        for start, end in gaps:
            for begin in range(start, end, COMPARED_BYTES):
                length = min(COMPARED_BYTES, end - begin)
                stop_if_cancelled(cancel)
                where = folder if source.folder is None else others(source.folder)
                data = where.read(source.path, base + begin, length, version=source.version or None)
                ledger.add([(storage, begin, length, crc32(data))])
                total += length
    return total


def refuse_changed_files(checkpoint: Checkpoint, folder: Folder, cancel: threading.Event) -> None:
    """Raise ``CorruptFile`` for the first source file that is another one than when it was opened, or gone."""
    others = cache(open_folder)

    def is_changed(file: SourceFile) -> bool:
        stop_if_cancelled(cancel)
        entry = (folder if file.folder is None else others(file.folder)).stat(file.path)
        return entry is None or entry.version != file.version

    known = [file for file in checkpoint.files if file.version]
    pool = ThreadPoolExecutor(STATS_AT_ONCE, thread_name_prefix="unshard-stat")
    try:
        for file, changed in zip(known, pool.map(is_changed, known), strict=True):
            if changed:
                raise CorruptFile(
                    f"{file.path} was changed while it was being converted",
                    file=file.path,
                    hint="Wait until the trainer has finished writing, then run the same command again.",
                )
    finally:
        pool.shutdown(cancel_futures=True)
