"""Write DCP folders by torch's own metadata classes, with any chunks in any files: what no single trainer would."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import zstandard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


@dataclass
class DcpSaved:
    """A tensor to save: its values, where each dimension is cut, and whether chunks are stored transposed."""

    values: torch.Tensor
    cuts: Sequence[Sequence[int]] = ()
    transposed: bool = False

    def chunks(self) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        spans = []
        for dim, length in enumerate(self.values.shape):
            inner = sorted(self.cuts[dim]) if dim < len(self.cuts) else []
            borders = [0, *(min(cut, length) for cut in inner), length]
            spans.append(list(itertools.pairwise(borders)))
        found = []
        for spot in itertools.product(*spans):
            part = self.values[tuple(slice(*span) for span in spot)].clone()
            if self.transposed and part.dim() == 2:  # rows and columns
                part = part.t().contiguous().t()
            found.append((tuple(span[0] for span in spot), part))
        return found


@dataclass
class DcpFolder:
    """The parts of a DCP folder before they are written, so that tests can break them."""

    metadata: Metadata = field(default_factory=lambda: Metadata({}, {}, {}))
    files: dict[str, bytearray] = field(default_factory=dict)

    def add(self, name: str, saved: DcpSaved, *, ranks: int = 1, zstd: bool = False, path=None) -> None:
        chunks = saved.chunks()
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(
            TensorProperties(dtype=saved.values.dtype),
            saved.values.shape,
            [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in chunks],
        )
        self.metadata.planner_data[name] = path or (name,)
        for number, (offsets, part) in enumerate(chunks):
            file = f"__{number % ranks}_0.distcp"
            stream = io.BytesIO()
            torch.save(part, stream)
            data = zstandard.ZstdCompressor().compress(stream.getvalue()) if zstd else stream.getvalue()
            content = self.files.setdefault(file, bytearray())
            info = _StorageInfo(file, len(content), len(data), ["stream.zstd/1"] if zstd else None)
            self.metadata.storage_data[MetadataIndex(name, torch.Size(offsets), number)] = info
            content += data

    def add_object(self, name: str, path=None) -> None:
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
        self.metadata.planner_data[name] = path or (name,)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".metadata").write_bytes(pickle.dumps(self.metadata))
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder


def write_dcp(folder: Path, tensors: Mapping[str, torch.Tensor], *, ranks: int = 2) -> DcpFolder:
    """Write tensors cut in two along their first dimension."""
    saved = DcpFolder()
    for name, values in tensors.items():
        cuts = [[values.shape[0] // 2]] if values.dim() and values.shape[0] > 1 else []
        saved.add(name, DcpSaved(values, cuts), ranks=ranks)
    saved.write(folder)
    return saved
