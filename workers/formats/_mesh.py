"""Device meshes and placements: from the inert records of any torch generation to plain geometry.

Sources: torch ``distributed/device_mesh.py``, ``distributed/_mesh_layout.py``,
``distributed/tensor/placement_types.py`` of 2.4, 2.7, 2.9, 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from workers.geometry import (
    MOST_DIMENSIONS,
    Placement,
    Replicate,
    Shape,
    Shard,
    StridedShard,
    application_order,
)
from workers.pickle_records import is_count
from workers.pickles import Record, TensorRecord


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh and where this process stands in it."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    """Labels only: never decide by them."""
    coordinate: tuple[int, ...] | None
    """None when the process is no part of the mesh."""
    total_ranks: int
    """Processes of the run; only those of this mesh when ``is_part``."""
    is_part: bool
    """Whether the mesh may be a part of a larger one: torch before 2.11 does not say."""
    rank: int | None
    """The process's rank in the run, where the mesh tells."""


def read_mesh(record: Any) -> Mesh | None:
    """Read a ``DeviceMesh``; None when its parts contradict each other.

    Up to torch 2.9 it holds its own ranks as a tensor ``mesh`` and flat as ``_flatten_mesh_list``; from 2.11 on a
    layout over the ranks of the whole run. Other attributes come and go.
    """
    if not isinstance(record, Record):
        return None
    layout = record.get("_layout")
    sizes = _shape_of(record.get("mesh")) if layout is None else _layout_sizes(layout)
    coordinate = record.get("_coordinate_on_dim")
    position = None if coordinate is None else as_sizes(coordinate)
    if sizes is None or (coordinate is not None and not _is_inside(position, sizes)):
        return None
    told = record.get("mesh_dim_names" if layout is None else "_mesh_dim_names")
    names = tuple(name for name in told if type(name) is str) if isinstance(told, (list, tuple)) else ()
    if layout is None:
        rank = _rank_at(as_sizes(record.get("_flatten_mesh_list")), sizes, position)
        return Mesh(sizes, names, position, prod(sizes), is_part=True, rank=rank)
    everyone = _shape_of(record.get("_rank_map"))
    rank = record.get("_rank")
    total = prod(sizes) if everyone is None else prod(everyone)
    return Mesh(sizes, names, position, total, is_part=False, rank=rank if type(rank) is int else None)


def read_placement(record: Any) -> Placement | None:
    """Read a placement; None for ``Partial`` and anything else that is no part of a tensor."""
    kind = type(record).kind if isinstance(record, Record) else ""
    if kind == "Replicate":
        return Replicate()
    dim = record.get("dim") if kind in ("Shard", "_StridedShard") else None
    if type(dim) is not int:
        return None
    if kind == "Shard":
        return Shard(dim)
    factor = record.get("split_factor")
    return StridedShard(dim, factor) if type(factor) is int and factor > 0 else None


def placement_text(placement: Placement) -> str:
    """A placement as torch's own text has it."""
    match placement:
        case Shard(dim):
            return f"Shard({dim})"
        case StridedShard(dim, factor):
            return f"_StridedShard({dim}, {factor})"
    return "Replicate"


def split_factor_expected(mesh_sizes: Sequence[int], placements: Sequence[Placement], index: int) -> int:
    """The split factor of a strided shard that stands for FSDP over tensor parallelism: what lies to its right."""
    strided = placements[index]
    factor = 1
    for size, placement in zip(mesh_sizes[index + 1 :], placements[index + 1 :], strict=True):
        if not isinstance(placement, Replicate) and not isinstance(strided, Replicate):
            factor *= size if placement.dim == strided.dim else 1
    return factor


def is_unusual_order(shard_order: Any) -> bool:
    """Whether a ``shard_order`` cuts some dimension otherwise than left to right."""
    entries = _order_entries(shard_order)
    return entries is None or any(list(mesh_dims) != sorted(mesh_dims) for mesh_dims in entries)


def cut_order(placements: Sequence[Placement], shard_order: Any) -> list[int] | None:
    """Mesh dimensions in the order in which they cut; None when ``shard_order`` makes no sense.

    ``shard_order`` (torch 2.11 on) lists for each tensor dimension the mesh dimensions that cut it, in order; where
    it is absent or the usual one, strided shards come after the others.
    """
    if not shard_order or not is_unusual_order(shard_order):
        return application_order(placements)
    told = [mesh_dim for mesh_dims in _order_entries(shard_order) or () for mesh_dim in mesh_dims]
    plain = all(not isinstance(placement, StridedShard) for placement in placements)
    shards = [index for index, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    return told if plain and sorted(told) == shards else None


def as_sizes(value: Any) -> Shape | None:
    """A list or tuple of sizes, offsets or ranks as a tuple; None when it is anything else."""
    return tuple(value) if isinstance(value, (list, tuple)) and all(map(is_count, value)) else None


def _order_entries(shard_order: Any) -> list[Shape] | None:
    entries = []
    for entry in shard_order if isinstance(shard_order, (list, tuple)) else (None,):
        args = entry.args if isinstance(entry, Record) else entry
        mesh_dims = as_sizes(args[1]) if isinstance(args, tuple) and len(args) == 2 else None
        if mesh_dims is None:
            return None
        entries.append(mesh_dims)
    return entries


def _layout_sizes(layout: Any) -> Shape | None:
    """Mesh sizes of a ``_MeshLayout``: plain sizes (2.11), or axes each with a shape of its own (2.13)."""
    if not isinstance(layout, Record):
        return None
    axes = layout.get("axes")
    shapes = layout.get("shape") if axes is None else axes
    if type(shapes) is int:
        return (shapes,)
    if not isinstance(shapes, (list, tuple)) or len(shapes) > MOST_DIMENSIONS:
        return None
    sizes = [as_sizes(shape.get("shape") if isinstance(shape, Record) else _tuple(shape)) for shape in shapes]
    if any(size is None or len(size) > MOST_DIMENSIONS for size in sizes):
        return None
    return tuple(prod(size) for size in sizes if size is not None)


def _tuple(value: Any) -> Any:
    return (value,) if type(value) is int else value


def _shape_of(tensor: Any) -> Shape | None:
    return tensor.shape if type(tensor) is TensorRecord else None


def _is_inside(position: Shape | None, sizes: Shape) -> bool:
    return position is not None and len(position) == len(sizes) and all(map(int.__lt__, position, sizes))


def _rank_at(ranks: Shape | None, sizes: Shape, position: Shape | None) -> int | None:
    if ranks is None or position is None or len(ranks) != prod(sizes):
        return None
    index = 0
    for size, coordinate in zip(sizes, position, strict=True):
        index = index * size + coordinate
    return ranks[index]
