"""What torch's distributed tensors mean: from inert records to boxes of global tensors.

Reads ``DTensor``, ``ShardedTensor`` and plain tensors as ``workers.pickles`` hands them over. It checks what one
process's file says against itself; what processes say of each other is for the formats to compare.
Sources: torch ``distributed/tensor/_api.py``, ``_dtensor_spec.py``; ``distributed/_shard/sharded_tensor``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from workers.errors import GeometryMismatch
from workers.formats._mesh import (
    Mesh,
    as_sizes,
    cut_order,
    placement_text,
    read_mesh,
    read_placement,
    split_factor_expected,
)
from workers.geometry import Placement, Replicate, Shape, StridedShard, local_box
from workers.pickles import DType, Record, TensorRecord
from workers.shown import shown


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a global tensor is cut, the same for all processes. Empty: each has the whole tensor."""

    mesh_sizes: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    order: tuple[int, ...] = ()
    """Mesh dimensions in the order in which they cut."""
    explicit: bool = False
    """Offsets are written down for each piece (``ShardedTensor``)."""

    def __str__(self) -> str:
        if self.explicit:
            return "ShardedTensor"
        if not self.placements:
            return "not cut"
        return f"({', '.join(map(placement_text, self.placements))}) on a mesh of {list(self.mesh_sizes)}"


WHOLE = Sharding()
EXPLICIT = Sharding(explicit=True)


class Cut:
    """What this process must hold of tensors of one dtype, shape and sharding: one object for all of them.

    ``sizes`` is None for a process outside of the mesh. ``kind`` and ``places`` are notes of whoever collects
    pieces: they spare it to look things up by their values.
    """

    __slots__ = ("dtype", "kind", "offsets", "places", "shape", "sharding", "sizes")

    def __init__(self, dtype: str, shape: Shape, sharding: Sharding, box: tuple[Shape, Shape | None]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.sharding = sharding
        self.offsets, self.sizes = box
        self.kind: int | None = None
        self.places: dict[tuple[Shape, Shape, Shape], tuple[int, int, int]] = {}


class Share(NamedTuple):
    """What one process holds of a tensor: how it is cut, and the local pieces with their offsets in the whole."""

    cut: Cut
    pieces: Sequence[tuple[TensorRecord, Shape]]


class Group(NamedTuple):
    """Size of, and rank in, the group of processes that a ``ShardedTensor`` was spread over."""

    size: int
    rank: int


class RankReader:
    """Interprets the values of one process's file; what repeats is interpreted once.

    ``meshes`` and ``groups`` are those met so far.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._meshes: dict[int, Mesh] = {}
        self._cuts: dict[tuple[Any, ...], Cut] = {}
        self.groups: set[Group] = set()

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The device meshes met so far."""
        return tuple(self._meshes.values())

    def read(self, name: str, value: Any) -> Share | None:
        """Interpret one value of a state dict; None when it is no tensor at all.

        Raises ``GeometryMismatch`` for what contradicts itself and for partial sums.
        """
        if type(value) is TensorRecord:
            cut = self._cut(value.dtype, value.shape, WHOLE)
            return Share(cut, ((value, cut.offsets),))
        if not isinstance(value, Record):
            return None
        kind = type(value).kind
        if kind == "DTensor":
            cut, local = self.read_dtensor(name, value)
            return Share(cut, ((local, cut.offsets),) if cut.sizes is not None else ())
        if kind == "ShardedTensor":
            return self._read_sharded_tensor(name, value)
        return self._refuse(name, "a plain tensor, a DTensor or a ShardedTensor", f"a {type(value).origin}")

    def read_dtensor(self, name: str, value: Record) -> tuple[Cut, TensorRecord]:
        """Interpret a DTensor: how it is cut and the local tensor, which has the size that the cut asks for.

        This runs once for each piece of a checkpoint: what it looks up decides how fast planning is.
        """
        try:
            local, spec = value.state["_local_tensor"], value.state["_spec"].state
            shape, _, dtype = spec["tensor_meta"].args
            order = spec.get("shard_order")
            key = (
                id(spec["mesh"]),
                id(dtype),
                shape,
                tuple([(type(p).kind, *p.state.values()) if p.state else type(p).kind for p in spec["placements"]]),
                order and tuple([entry.args for entry in order]),
            )
            cut = self._cuts.get(key)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._refuse(name, "a DTensor as torch saves it", f"one whose record makes no sense ({error!r})")
        if cut is None:
            cut = self._cuts[key] = self._interpret(name, spec)
        if type(local) is not TensorRecord or local.dtype != cut.dtype:
            self._refuse(name, f"a local tensor of {cut.dtype}", shown(local, 200))
        if local.shape != cut.sizes and (cut.sizes is not None or 0 not in local.shape):
            raise self._wrong_size(name, cut, local.shape)
        return cut, local

    def _cut(self, dtype: str, shape: Shape, sharding: Sharding) -> Cut:
        """The cut of a tensor that is no DTensor."""
        key = dtype, shape, sharding
        if key not in self._cuts:
            self._cuts[key] = Cut(dtype, shape, sharding, ((0,) * len(shape), shape))
        return self._cuts[key]

    def _interpret(self, name: str, spec: Mapping[str, Any]) -> Cut:
        shape, dtype = as_sizes(spec["tensor_meta"].args[0]), spec["tensor_meta"].args[2]
        mesh = self._meshes.get(id(spec["mesh"])) or read_mesh(spec["mesh"])
        if shape is None or mesh is None or type(dtype) is not DType:
            self._refuse(name, "a global shape, a dtype and a device mesh", "a record of them that contradicts itself")
        self._meshes[id(spec["mesh"])] = mesh
        placements = tuple(self._placement(name, record, len(shape)) for record in spec["placements"])
        if len(placements) != len(mesh.sizes):
            self._refuse(name, f"a placement for each of {len(mesh.sizes)} mesh dimensions", f"{len(placements)}")
        for index, placement in enumerate(placements):
            factor = split_factor_expected(mesh.sizes, placements, index)
            if isinstance(placement, StridedShard) and placement.split_factor != factor:
                expected = f"a split factor of {factor}, the shards to its right on a mesh of {list(mesh.sizes)}"
                self._refuse(name, expected, placement_text(placement))
        order = cut_order(placements, spec.get("shard_order"))
        if order is None:
            self._refuse(name, "an order of cuts that fits its placements", shown(spec.get("shard_order"), 200))
        sharding = Sharding(mesh.sizes, placements, tuple(order))
        if mesh.coordinate is None:
            return Cut(dtype.name, shape, sharding, ((0,) * len(shape), None))
        return Cut(dtype.name, shape, sharding, local_box(shape, mesh.sizes, placements, mesh.coordinate, order))

    def _placement(self, name: str, record: Any, dimensions: int) -> Placement:
        placement = read_placement(record)
        if placement is None:
            kind = type(record).kind if isinstance(record, Record) else shown(record, 60)
            raise GeometryMismatch(
                f"{self._file}: tensor {name} has the placement {kind}: each process holds a term of a sum, or "
                "something unknown, and not a part of the tensor",
                file=self._file,
                tensor=name,
                expected="Shard, _StridedShard or Replicate",
                found=kind,
                hint="Save the weights once they are reduced, as trainers' own checkpoints are.",
            )
        if not isinstance(placement, Replicate) and not 0 <= placement.dim < dimensions:
            self._refuse(name, f"a cut along one of its {dimensions} dimensions", placement_text(placement))
        return placement

    def _read_sharded_tensor(self, name: str, value: Record) -> Share:
        try:
            shards, metadata, group, *_ = value.state
            properties = metadata.get("tensor_properties").state
            dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
            shape = as_sizes(metadata.get("size"))
            held = [(shard.get("tensor"), shard.get("metadata")) for shard in shards]
            pieces = [
                (local, as_sizes(at.get("shard_offsets")), as_sizes(at.get("shard_sizes"))) for local, at in held
            ]
            size, rank = group.get("global_world_size"), group.get("global_rank")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            self._refuse(name, "a ShardedTensor as torch saves it", f"one whose record makes no sense ({error!r})")
        if shape is None or type(dtype) is not DType or type(size) is not int or type(rank) is not int:
            self._refuse(name, "a shape, a dtype, and a group of processes", shown((shape, dtype, rank), 200))
        self.groups.add(Group(size, rank))
        checked = [(local, self._checked(name, shape, local, (at, sizes))) for local, at, sizes in pieces]
        if any(local.dtype != dtype.name for local, _ in checked):
            self._refuse(name, f"shards of {dtype.name}", ", ".join(local.dtype for local, _ in checked))
        return Share(self._cut(dtype.name, shape, EXPLICIT), checked)

    def _checked(self, name: str, shape: Shape, local: Any, box: tuple[Shape | None, Shape | None]) -> Shape:
        """The offsets of a shard that has the size that is claimed and lies inside of its tensor."""
        offsets, sizes = box
        if type(local) is not TensorRecord or offsets is None or len(offsets) != len(shape):
            self._refuse(name, "shards that are tensors with offsets", f"{shown(local)} at {shown(offsets)}")
        ends = map(int.__add__, offsets, local.shape)
        if local.shape != sizes or any(end > length for end, length in zip(ends, shape, strict=True)):
            self._refuse(name, f"a shard of {sizes} inside of {list(shape)}", f"{local.shape} at {list(offsets)}")
        return offsets

    def _wrong_size(self, name: str, cut: Cut, found: Shape) -> GeometryMismatch:
        expected = "nothing" if cut.sizes is None else f"{list(cut.sizes)} from {list(cut.offsets)}"
        return GeometryMismatch(
            f"{self._file}: tensor {name} {list(cut.shape)} is cut as {cut.sharding}, of which this file must hold "
            f"{expected}, and it holds {list(found)}",
            file=self._file,
            tensor=name,
            expected=expected,
            found=str(list(found)),
            hint="The file was saved by another run or is damaged; bring together the files of one checkpoint.",
        )

    def _refuse(self, name: str, expected: str, found: str) -> NoReturn:
        raise GeometryMismatch(
            f"{self._file}: tensor {name}: expected {expected}, found {found}",
            file=self._file,
            tensor=name,
            expected=expected,
            found=found,
            hint="The file was written by an unknown version of torch or is damaged.",
        )
