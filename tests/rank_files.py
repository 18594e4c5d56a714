"""Write rank files as torch would save them, from plain descriptions and without any process group.

For property tests of readers (small, with values) and for benchmarks of planning (many tensors, zeros). The pickles
name torch's real classes, so that torch itself decides how they are spelt.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
}


@dataclass(frozen=True)
class Saved:
    """A tensor to save: cut by ``placements`` on a mesh, or whole on every rank when there are none.

    ``values`` are the whole tensor's raw elements; None stands for zeros. ``order`` names mesh dimensions that cut
    dimension 0 in another order than left to right, as torch 2.11 and later can.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...] = ()
    dtype: torch.dtype = torch.float32
    values: np.ndarray | None = None
    order: tuple[int, ...] = ()


@dataclass
class _Archive:
    """Storages of one file as they are named while its pickle is written."""

    sizes: dict[str, bytes | int] = field(default_factory=dict)

    def add(self, data: bytes | int) -> str:
        key = str(len(self.sizes))
        self.sizes[key] = data
        return key


class _Reduced:
    """Anything that pickles as a call."""

    def __init__(self, function, *args) -> None:
        self._reduced = function, args

    def __reduce__(self):
        return self._reduced


class _StorageRef:
    """Stands for a storage, which a pickle names by a persistent id."""

    def __init__(self, *pid) -> None:
        self.pid = ("storage", *pid)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.pid if isinstance(obj, _StorageRef) else None


def coordinates(mesh: Sequence[int]) -> list[tuple[int, ...]]:
    """The coordinate of every rank of a mesh, row-major."""
    return list(product(*map(range, mesh)))


def write_rank_files(folder: Path, tensors: Mapping[str, Saved], mesh: Sequence[int]) -> None:
    """Write one file per rank of a mesh, and fsdp_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    world_size = prod(mesh)
    for rank in range(world_size):
        write_rank_file(folder / f"model_world_size_{world_size}_rank_{rank}.pt", tensors, mesh, rank)
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))


def write_rank_file(path: Path, tensors: Mapping[str, Saved], mesh: Sequence[int], rank: int) -> None:
    """Write the file of one rank."""
    archive = _Archive()
    device_mesh = _mesh(archive, mesh, rank)
    state = OrderedDict(
        (name, _dtensor(archive, saved, device_mesh) if saved.placements else _plain(archive, saved))
        for name, saved in tensors.items()
    )
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(state)
    _write_zip(path, stream.getvalue(), archive.sizes)


def _mesh(archive: _Archive, sizes: Sequence[int], rank: int) -> DeviceMesh:
    """A mesh with the attributes of torch 2.9 and before, which need no process group to be made."""
    mesh = DeviceMesh.__new__(DeviceMesh)
    ranks = np.arange(prod(sizes), dtype=np.int32)
    mesh.__dict__.update(
        device_type="cuda",
        mesh=_tensor(archive, torch.int32, tuple(sizes), ranks.tobytes()),
        mesh_dim_names=tuple(f"dim{index}" for index in range(len(sizes))),
        _flatten_mesh_list=tuple(ranks.tolist()),
        _coordinate_on_dim=list(coordinates(sizes)[rank]),
    )
    return mesh


def _tensor(archive: _Archive, dtype: torch.dtype, shape: tuple[int, ...], data: bytes | int) -> _Reduced:
    """A plain tensor on a storage of its own; ``data`` are its bytes, or how many zeros."""
    reference = _StorageRef(STORAGES[dtype], archive.add(data), "cuda:0", _length(data) // dtype.itemsize)
    strides = tuple(prod(shape[index + 1 :]) for index in range(len(shape)))
    return _Reduced(torch._utils._rebuild_tensor_v2, reference, 0, shape, strides, False, OrderedDict())


def _plain(archive: _Archive, saved: Saved) -> _Reduced:
    data = prod(saved.shape) * saved.dtype.itemsize if saved.values is None else saved.values.tobytes()
    return _tensor(archive, saved.dtype, saved.shape, data)


def _dtensor(archive: _Archive, saved: Saved, mesh: DeviceMesh) -> _Reduced:
    coordinate, sizes = mesh.__dict__["_coordinate_on_dim"], mesh.__dict__["mesh"]._reduced[1][2]
    if saved.values is None:
        shape, _ = _compute_local_shape_and_global_offset(saved.shape, sizes, coordinate, saved.placements, True)
        data: bytes | int = prod(shape) * saved.dtype.itemsize
    else:
        local = local_values(saved, sizes, coordinate)
        shape, data = local.shape, local.tobytes()
    strides = tuple(prod(saved.shape[index + 1 :]) for index in range(len(saved.shape)))
    meta = TensorMeta(torch.Size(saved.shape), strides, saved.dtype)
    spec = DTensorSpec.__new__(DTensorSpec)
    spec.__dict__.update(mesh=mesh, placements=tuple(map(_copy, saved.placements)), tensor_meta=meta)
    if saved.order:
        spec.__dict__["shard_order"] = (ShardOrderEntry(0, saved.order),)
    state = None, {"_local_tensor": _tensor(archive, saved.dtype, tuple(shape), data), "_spec": spec}
    args = DTensor, saved.dtype, tuple(saved.shape), strides, 0, torch.strided, torch.device("cuda:0"), False
    return _Reduced(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_wrapper_subclass, DTensor, args, state)


def _copy(placement: Placement) -> Placement:
    """A placement of its own, as every parameter has one in a real model."""
    return pickle.loads(pickle.dumps(placement))


def local_values(saved: Saved, sizes: Sequence[int], coordinate: Sequence[int]) -> np.ndarray:
    """What a rank holds of a tensor, by torch's own rules."""
    if saved.order:
        part = torch.from_numpy(saved.values)
        for mesh_dim in saved.order:
            pieces = [*part.chunk(sizes[mesh_dim]), *[part[:0]] * sizes[mesh_dim]]
            part = pieces[coordinate[mesh_dim]]
        return part.numpy()
    cut = _compute_local_shape_and_global_offset(saved.shape, sizes, list(coordinate), saved.placements)
    return saved.values[tuple(slice(o, o + s) for s, o in zip(*cut, strict=True))]


def _length(data: bytes | int) -> int:
    return data if isinstance(data, int) else len(data)


def _write_zip(path: Path, pickled: bytes, storages: Mapping[str, bytes | int]) -> None:
    """Write an archive as torch does: stored, data aligned to 64 bytes by padding in the local headers."""
    directory, position, count = [], 0, 0
    with path.open("wb") as out:
        for name, data in _records(path.stem, pickled, storages):
            encoded, size = name.encode(), _length(data)
            content = bytes(data) if isinstance(data, int) else data
            crc = zlib.crc32(content)
            padding = -(position + 30 + len(encoded) + 4) % 64
            extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
            facts = struct.pack("<HHHHHIII", 20, 0, 0, 0, 0, crc, size, size)
            header = b"PK\x03\x04" + facts + struct.pack("<HH", len(encoded), len(extra)) + encoded + extra
            out.write(header + content)
            tail = struct.pack("<HHHHHII", len(encoded), 0, 0, 0, 0, 0, position)
            directory.append(b"PK\x01\x02" + struct.pack("<H", 20) + facts + tail + encoded)
            position += len(header) + size
            count += 1
        central = b"".join(directory)
        out.write(central + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, len(central), position, 0))


def _records(stem: str, pickled: bytes, storages: Mapping[str, bytes | int]) -> Iterator[tuple[str, bytes | int]]:
    yield f"{stem}/data.pkl", pickled
    yield f"{stem}/byteorder", b"little"
    for key, data in storages.items():
        yield f"{stem}/data/{key}", data
    yield f"{stem}/version", b"3\n"
