"""One checkpoint of two: an adapter and its base model, whose files lie in folders of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from workers.checkpoint import Checkpoint, PieceTable, StorageTable
from workers.geometry import IntArray


def combine(first: Checkpoint, second: Checkpoint, prefix: str) -> Checkpoint:
    """One checkpoint with the tensors of both; those of ``second`` get ``prefix`` before their names.

    Everything but tensors, files and pieces is the first one's. Meant for an adapter and its base model.
    """
    files = tuple(replace(file, folder=file.folder or first.address) for file in first.files)
    files += tuple(replace(file, folder=file.folder or second.address) for file in second.files)
    tensors = first.tensors + tuple(replace(tensor, name=prefix + tensor.name) for tensor in second.tensors)
    storages = _joined_storages(first, second)
    return replace(
        first,
        files=files,
        tensors=tensors,
        storages=storages,
        pieces=_joined_pieces(first, first.pieces, second.pieces),
        replicas=_joined_pieces(first, first.replicas, second.replicas),
    )


def _joined_storages(first: Checkpoint, second: Checkpoint) -> StorageTable:
    a, b = first.storages, second.storages
    return StorageTable(
        file=np.concatenate((a.file, b.file + len(first.files))).astype(np.int32),
        offset=np.concatenate((a.offset, b.offset)),
        length=np.concatenate((a.length, b.length)),
        crc32=np.concatenate((a.crc32, b.crc32)),
        encoding=np.concatenate((a.encoding, b.encoding)),
        decoded_length=np.concatenate((a.decoded_length, b.decoded_length)),
    )


def _joined_pieces(first: Checkpoint, a: PieceTable, b: PieceTable) -> PieceTable:
    width = max(a.offsets.shape[1], b.offsets.shape[1])

    def padded(values: IntArray, fill: int) -> IntArray:
        return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=fill)

    return PieceTable(
        tensor=np.concatenate((a.tensor, b.tensor + len(first.tensors))).astype(np.int32),
        storage=np.concatenate((a.storage, b.storage + len(first.storages))).astype(np.int32),
        start=np.concatenate((a.start, b.start)),
        offsets=np.concatenate((padded(a.offsets, 0), padded(b.offsets, 0))),
        sizes=np.concatenate((padded(a.sizes, 1), padded(b.sizes, 1))),
        strides=np.concatenate((padded(a.strides, 0), padded(b.strides, 0))),
        first=np.concatenate((a.first, b.first[1:] + len(a))),
    )
