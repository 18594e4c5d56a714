"""Read one rank file: names, kinds and pieces in columns, checked against themselves.

The unpickled records of a file are many and large; what is kept of them is a ``RankTable``, which is small, compares
fast with that of another rank and travels between processes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from workers.dtypes import ELEMENT_TYPES
from workers.errors import CorruptFile, GeometryMismatch, InputError
from workers.formats._distributed import Cut, Group, RankReader, Sharding
from workers.formats._mesh import Mesh
from workers.formats._steps import STILL_WRITING
from workers.geometry import Shape
from workers.pickles import TensorRecord, paused_collector
from workers.shown import shown
from workers.storage import FileEntry, Folder
from workers.torch_file import TorchFile, open_torch_file, resolve

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What FSDP1, activation checkpointing and torch.compile add to the names of modules, wherever they stand."""


class Kind(NamedTuple):
    """What must be the same for a tensor on all ranks."""

    dtype: str
    shape: Shape
    sharding: Sharding


class Box(NamedTuple):
    """A place in a tensor and how its elements lie in the file."""

    offsets: Shape
    sizes: Shape
    strides: Shape


@dataclass(frozen=True, slots=True)
class RankTable:
    """What one rank file holds. Columns refer to ``kinds`` and ``boxes``, which repeat a lot."""

    entry: FileEntry
    rank: int
    digest: str
    names: list[str]
    kind_of_name: array[int]
    kinds: list[Kind]
    storages: array[int]
    """offset, length, CRC-32 or -1 of each storage, one after the other."""
    pieces: array[int]
    """name, storage, byte offset, box of each piece, one after the other."""
    boxes: list[Box]
    meshes: tuple[Mesh, ...]
    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    """Names of values that are no tensors."""

    def kind(self, index: int) -> Kind:
        """The kind of a tensor by its place among the names."""
        return self.kinds[self.kind_of_name[index]]


def read_rank(folder: Folder, entry: FileEntry, rank: int) -> RankTable:
    """Read a rank file's metadata. Raises what ``open_torch_file`` raises, and ``GeometryMismatch``."""
    with paused_collector:  # from the first record to the last: what is made here dies here
        return _tabulate(folder, entry, rank)


def _tabulate(folder: Folder, entry: FileEntry, rank: int) -> RankTable:
    try:
        file = open_torch_file(folder, entry.path, entry.size_bytes)
    except CorruptFile as error:
        error.hint = f"{error.hint} {STILL_WRITING}".strip()
        raise
    if not isinstance(file.root, dict):
        _refuse(entry.path, "a state dict: names and their tensors", f"a {type(file.root).__name__}")
    return _Tabulation(file, entry).run(rank)


class _Tabulation:
    """The work of turning one file's state dict into columns."""

    def __init__(self, file: TorchFile, entry: FileEntry) -> None:
        self._file = file
        self._entry = entry
        self._reader = RankReader(entry.path)
        self._kinds: dict[Kind, int] = {}
        self._boxes: dict[Box, int] = {}
        self._storages: dict[str, int] = {}
        self._pieces = array("q")

    def run(self, rank: int) -> RankTable:
        names: list[str] = []
        kind_of_name = array("q")
        ignored: list[str] = []
        for raw, value in self._file.root.items():
            if type(raw) is not str:
                _refuse(self._entry.path, "names that are texts", f"the name {shown(raw)}")
            name = clean_name(raw)
            if getattr(type(value), "kind", None) == "DTensor":  # the usual case, without the general one's records
                cut, local = self._reader.read_dtensor(name, value)
                if cut.sizes is not None:
                    self._add_piece(name, len(names), (cut, local, cut.offsets))
            else:
                share = self._reader.read(name, value)
                if share is None:
                    ignored.append(name)
                    continue
                cut, pieces = share
                for local, offsets in pieces:
                    self._add_piece(name, len(names), (cut, local, offsets))
            if cut.kind is None:
                kind = Kind(cut.dtype, cut.shape, cut.sharding)
                cut.kind = self._kinds.setdefault(kind, len(self._kinds))
            kind_of_name.append(cut.kind)
            names.append(name)
        if len(set(names)) != len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            _refuse(self._entry.path, "each name once, when wrappers are taken off", f"{twice} twice", twice)
        stored = [self._file.storages[key] for key in self._storages]
        return RankTable(
            self._entry,
            rank,
            self._file.directory_digest,
            names,
            kind_of_name,
            list(self._kinds),
            array("q", (n for at, length, crc in stored for n in (at, length, -1 if crc is None else crc))),
            self._pieces,
            list(self._boxes),
            self._reader.meshes,
            tuple(sorted(self._reader.groups)),
            tuple(ignored),
        )

    def _add_piece(self, name: str, number: int, piece: tuple[Cut, TensorRecord, Shape]) -> None:
        """Note where a local tensor lies. What cuts, strides and offsets repeat is worked out once."""
        cut, local, offsets = piece
        storage, storage_offset, shape, strides, _, conjugate, negative = local
        place = cut.places.get((offsets, shape, strides))
        if place is None:
            place = cut.places[offsets, shape, strides] = self._place(cut, Box(offsets, shape, strides))
        width, span, box = place
        stored = self._file.storages.get(storage.key)
        first = storage.view_offset + storage_offset
        if (
            stored is None
            or not width
            or storage.dtype is None
            or storage.numel * width != stored.length_bytes
            or first + span > storage.numel
            or conjugate
            or negative
        ):
            resolve(self._file, local, name=name)  # says what is wrong, if anything is
            stored = self._file.storages[storage.key]
        if span:
            known = self._storages.setdefault(storage.key, len(self._storages))
            self._pieces.extend((number, known, stored.offset + first * width, box))

    def _place(self, cut: Cut, box: Box) -> tuple[int, int, int]:
        """Bytes of an element, elements from the first to the last of a box (0 when empty), and the box's number."""
        element = ELEMENT_TYPES.get(cut.dtype)
        width = element.size_bytes if element else 0  # without a type, resolve refuses the tensor
        if 0 in box.sizes:
            return width, 0, -1
        span = 1 + sum((length - 1) * stride for length, stride in zip(box.sizes, box.strides, strict=True))
        return width, span, self._boxes.setdefault(box, len(self._boxes))


def clean_name(name: str) -> str:
    """A tensor's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        if wrapper in name:
            name = name.replace(wrapper, "")
    return name


def _refuse(path: str, expected: str, found: str, tensor: str | None = None) -> NoReturn:
    kind: type[InputError] = GeometryMismatch if tensor else CorruptFile
    raise kind(
        f"{path}: expected {expected}, found {found}",
        file=path,
        tensor=tensor,
        expected=expected,
        found=found,
        hint="This is not what FSDP trainers save: check that it is the weights' file, and of one training run.",
    )


def first_difference(table: RankTable, first: RankTable) -> tuple[str, Any, Any] | None:
    """The first tensor that two ranks disagree about, and what each says; None stands for "not there"."""
    if table.names == first.names and table.kinds == first.kinds and table.kind_of_name == first.kind_of_name:
        return None
    there = {name: table.kind(index) for index, name in enumerate(table.names)}
    for index, name in enumerate(first.names):
        if there.get(name) != first.kind(index):
            return name, there.get(name), first.kind(index)
    known = set(first.names)
    return next(((name, kind, None) for name, kind in there.items() if name not in known), None)
