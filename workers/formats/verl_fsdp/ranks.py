"""Read one rank file: names, kinds and pieces in columns, checked against themselves.

The unpickled records of a file are many and large; what is kept of them is a ``RankTable``, which is small, compares
fast with that of another rank and travels between processes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from workers.errors import CorruptFile, GeometryMismatch, InputError
from workers.formats._distributed import Group, RankReader, Sharding, Share
from workers.formats._mesh import Mesh
from workers.formats.verl_fsdp.folders import STILL_WRITING
from workers.geometry import Shape
from workers.pickles import TensorRecord, paused_collector
from workers.storage import FileEntry, Folder
from workers.torch_file import StoredRange, TorchFile, open_torch_file, resolve

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
    try:
        file = open_torch_file(folder, entry.path, entry.size_bytes)
    except CorruptFile as error:
        if STILL_WRITING not in error.hint:
            error.hint = f"{error.hint} {STILL_WRITING}".strip()
        raise
    if not isinstance(file.root, dict):
        _refuse(entry.path, "a state dict: names and their tensors", f"a {type(file.root).__name__}")
    with paused_collector:
        return _Tabulation(file, entry).run(rank)


class _Tabulation:
    """The work of turning one file's state dict into columns."""

    def __init__(self, file: TorchFile, entry: FileEntry) -> None:
        self._file = file
        self._entry = entry
        self._reader = RankReader(entry.path)
        self._kinds: dict[Kind, int] = {}
        self._boxes: dict[Box, int] = {}
        self._storages: dict[StoredRange, int] = {}
        self._pieces = array("q")

    def run(self, rank: int) -> RankTable:
        names: list[str] = []
        kind_of_name = array("q")
        ignored: list[str] = []
        for raw, value in self._file.root.items():
            name = clean_name(raw) if isinstance(raw, str) else None
            if name is None:
                _refuse(self._entry.path, "names that are texts", f"the name {raw!r}"[:120])
            share = self._reader.read(name, value)
            if share is None:
                ignored.append(name)
                continue
            kind = Kind(share.dtype, share.shape, share.sharding)
            kind_of_name.append(self._kinds.setdefault(kind, len(self._kinds)))
            self._add_pieces(name, len(names), share)
            names.append(name)
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            _refuse(self._entry.path, "each name once, when wrappers are taken off", f"{twice} twice", twice)
        return RankTable(
            self._entry,
            rank,
            self._file.directory_digest,
            names,
            kind_of_name,
            list(self._kinds),
            array("q", (n for s in self._storages for n in (s[0], s[1], -1 if s[2] is None else s[2]))),
            self._pieces,
            list(self._boxes),
            self._reader.meshes,
            tuple(sorted(self._reader.groups)),
            tuple(ignored),
        )

    def _add_pieces(self, name: str, number: int, share: Share) -> None:
        for local, offsets in share.pieces:
            where, strides, stored = resolve(self._file, local, name=name)
            if local.negative or local.conjugate:
                self._refuse_view(name, local)
            if 0 in local.shape:
                continue
            storage = self._storages.setdefault(stored, len(self._storages))
            box = Box(offsets, local.shape, strides)
            self._pieces.extend((number, storage, where, self._boxes.setdefault(box, len(self._boxes))))

    def _refuse_view(self, name: str, local: TensorRecord) -> NoReturn:
        what = "negative" if local.negative else "conjugate"
        _refuse(self._entry.path, "a tensor as it is stored", f"{name}, which is the {what} of what is stored", name)


def clean_name(name: str) -> str:
    """A tensor's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        if wrapper in name:
            name = name.replace(wrapper, "")
    return name


def _refuse(path: str, expected: str, found: str, tensor: str | None = None) -> NoReturn:
    kind: type[InputError] = GeometryMismatch if tensor else CorruptFile
    raise kind(f"{path}: expected {expected}, found {found}", file=path, tensor=tensor, expected=expected, found=found)


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
