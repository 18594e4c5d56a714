"""Write DCP folders of any size whose weights are zeros that take no room: sparse files, true metadata.

Each item is what ``torch.save`` writes of its chunk, with a hole where its zeros are; so the folder is a valid
checkpoint to torch, too. Metadata are pickled as a run has them: what each rank tells comes from another process.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from benchmarks.deepseek import Saved, Shape


class _Items:
    """Items as torch saves them, in two parts: what comes before the zeros and what comes after."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Shape], tuple[bytes, int, bytes]] = {}

    def parts(self, dtype: str, shape: Shape) -> tuple[bytes, int, bytes]:
        key = dtype, shape
        if key not in self._known:
            stream = io.BytesIO()
            tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            torch.save(tensor, stream)
            size = prod(shape) * tensor.itemsize
            with zipfile.ZipFile(stream) as archive:
                entry = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
            view = stream.getbuffer()
            at = entry.header_offset
            begin = at + 30 + int.from_bytes(view[at + 26 : at + 28], "little")
            begin += int.from_bytes(view[at + 28 : at + 30], "little")
            self._known[key] = bytes(view[:begin]), size, bytes(view[begin + size :])
        return self._known[key]


def write_sparse(folder: Path, tensors: Iterable[Saved]) -> int:
    """Write a folder; returns the number of its chunks."""
    folder.mkdir(parents=True)
    described: dict[str, TensorStorageMetadata] = {}
    by_rank: dict[int, list[tuple[str, Shape, int, str, Shape]]] = {}
    count = 0
    for saved in tensors:
        boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in saved.chunks]
        properties = TensorProperties(dtype=getattr(torch, saved.dtype))
        described[saved.name] = TensorStorageMetadata(properties, torch.Size(saved.shape), boxes)
        for number, chunk in enumerate(saved.chunks):
            row = saved.name, chunk.offsets, number, saved.dtype, chunk.sizes
            by_rank.setdefault(chunk.rank, []).append(row)
            count += 1
    items = _Items()
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for rank, rows in sorted(by_rank.items()):
        results = _write_file(folder / f"__{rank}_0.distcp", rows, items)
        stored |= pickle.loads(pickle.dumps(results))
    planner_data = {name: (name,) for name in described}
    with (folder / ".metadata").open("wb") as out:
        pickle.dump(Metadata(described, planner_data, stored), out)
    return count


def _write_file(
    path: Path, rows: list[tuple[str, Shape, int, str, Shape]], items: _Items
) -> dict[MetadataIndex, _StorageInfo]:
    found = {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        position, before, written = 0, b"", 0
        for name, offsets, number, dtype, sizes in rows:
            head, hole, tail = items.parts(dtype, sizes)
            os.pwrite(descriptor, before + head, position - len(before))
            written = len(head) + hole + len(tail)
            info = _StorageInfo(path.name, position, written)
            found[MetadataIndex(name, torch.Size(offsets), number)] = info
            position += written
            before = tail
        os.pwrite(descriptor, before, position - len(before))
    finally:
        os.close(descriptor)
    return found
