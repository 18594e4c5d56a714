"""State dicts in torch files: whole tensors, perhaps in nested dicts beside what is no weight.

Finds the tensors of files by their pickles and adds those of the model to a builder. Which part is the model is for
``_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from workers.checkpoint import PackedTensor, SourceFile, TensorInfo
from workers.checkpoint_builder import CheckpointBuilder
from workers.dtypes import ELEMENT_TYPES
from workers.errors import CorruptFile, GeometryMismatch, IncompleteCheckpoint
from workers.formats._nested import leaves, no_plain_tensor, other_weights
from workers.formats._nf4_records import KIND as NF4
from workers.formats._nf4_records import nf4_parts
from workers.formats._state_dict import ModelPart, Path, choose_model
from workers.nf4 import PARTS, part_name
from workers.options import ConvertOptions
from workers.pickles import Record, TensorRecord, paused_collector
from workers.shown import shown
from workers.storage import FileEntry, Folder
from workers.torch_file import StoredRange, TorchFile, open_torch_file, resolve

_BIG_STORAGE_BYTES = 1 << 20
"""A storage larger than this is not read whole for its checksum when the model uses less than half of it."""


@dataclass(slots=True)
class StateDicts:
    """The tensors of one or several torch files of a model."""

    infos: list[TensorInfo] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)
    found: dict[str, tuple[int, TensorRecord]] = field(default_factory=dict)
    """Number of the file and the record of each tensor."""
    others: dict[str, tuple[str, str]] = field(default_factory=dict)
    """File of what holds weights, but not as a plain tensor, and what it is in words."""
    files: list[tuple[TorchFile, FileEntry]] = field(default_factory=list)
    packed: list[PackedTensor] = field(default_factory=list)
    """Tensors in NF4, whose parts are among the others."""

    def add(self, opened: TorchFile, entry: FileEntry) -> None:
        """Add the tensors of a file. Raises ``CorruptFile`` for what is no dict, ``GeometryMismatch`` for repeats."""
        if not isinstance(opened.root, dict):
            raise _no_state_dict(entry.path, opened.root)
        self.files.append((opened, entry))
        for path, value in _weights(opened.root, entry.path):
            name = ".".join(map(str, path))
            if name in self.paths:
                other = self.files[self.found[name][0]][1].path if name in self.found else entry.path
                raise GeometryMismatch(
                    f"tensor {name} is in {other} and in {entry.path}, and nothing says which counts",
                    file=entry.path,
                    tensor=name,
                    expected="one tensor of each name",
                    found="two",
                    hint="Files of different models are mixed: fetch the folder again.",
                )
            self.paths[name] = path
            if isinstance(value, TensorRecord):
                self._add_tensor(name, path, value)
            elif isinstance(value, Record) and type(value).kind == NF4:
                packed, parts = nf4_parts(value, name, entry.path)
                self.packed.append(packed)
                for part, record in parts.items():
                    self._add_tensor(part_name(name, part), (*path[:-1], part_name(str(path[-1]), part)), record)
            else:
                self.others[name] = entry.path, value if isinstance(value, str) else str(other_weights(value))

    def refuse_others(self, names: Iterable[str]) -> None:
        """Raise ``GeometryMismatch`` for the first of some names among ``others``."""
        for name in names:
            file, what = self.others[name]
            raise no_plain_tensor(file, name, what)

    def _add_tensor(self, name: str, path: Path, record: TensorRecord) -> None:
        self.paths[name] = path
        self.infos.append(TensorInfo(name, record.dtype, record.shape))
        self.found[name] = len(self.files) - 1, record


def read_state_dicts(folder: Folder, entries: Sequence[FileEntry]) -> StateDicts:
    """Open the files of a model by their metadata."""
    dicts = StateDicts()
    for entry in entries:
        with paused_collector:
            dicts.add(open_torch_file(folder, entry.path, entry.size_bytes), entry)
    return dicts


def add_model(builder: CheckpointBuilder, dicts: StateDicts, options: ConvertOptions) -> ModelPart:
    """Choose the model among the tensors and add it. Raises what ``choose_model`` does.

    Raises ``IncompleteCheckpoint`` for placeholders of partitioned weights, ``GeometryMismatch`` for weights that are
    no plain tensors.
    """
    where = ", ".join(entry.path for _, entry in dicts.files[:2])
    if not dicts.infos and dicts.others:
        dicts.refuse_others(dicts.others)
    part = choose_model(dicts.infos, dicts.paths, options, where)
    chosen = {dicts.paths[name][:-1] for name in part.names}
    dicts.refuse_others(name for name in dicts.others if dicts.paths[name][:-1] in chosen)
    _check_no_placeholders(dicts, part)
    numbers = [
        builder.add_file(SourceFile(entry.path, entry.size_bytes, None, opened.directory_digest, entry.version))
        for opened, entry in dicts.files
    ]
    storages: dict[tuple[int, str], int] = {}
    used = _used_bytes(dicts, part)
    for name, short in part.names.items():
        file, record = dicts.found[name]
        opened = dicts.files[file][0]
        place = resolve(opened, record, name=name)
        key = file, record.storage.key
        if key not in storages:
            stored = place.stored
            crc = stored.crc32 if _worth_checking(stored, used[key]) else None
            storages[key] = builder.add_storage(numbers[file], stored.offset, stored.length_bytes, crc)
        number = builder.add_tensor(short, record.dtype, record.shape)
        box = (0,) * len(record.shape), record.shape
        builder.add_piece(number, storages[key], place.offset, box, place.strides)
    left_out = (*part.left_out, *_beside(dicts, chosen))
    return replace(part, packed=tuple(_packed(dicts, part)), left_out=left_out)


def _beside(dicts: StateDicts, chosen: set[Path]) -> Iterator[tuple[str, str]]:
    """Names and kinds of what is no tensor in the model's dicts, and of weights elsewhere that are no plain ones."""
    for name, (_, what) in dicts.others.items():
        if dicts.paths[name][:-1] not in chosen:
            yield name, what
    for opened, _ in dicts.files:
        for path in sorted(chosen, key=str):
            for key, value in _dict_at(opened.root, path).items():
                if type(value) is not TensorRecord and not isinstance(value, (dict, list, tuple)):
                    name = ".".join(map(str, (*path, key)))
                    if name not in dicts.paths:
                        yield name, f"no tensor: {value.origin if isinstance(value, Record) else type(value).__name__}"


def _dict_at(root: Any, path: Path) -> dict[Any, Any]:
    try:
        for key in path:
            root = root[key]
    except (IndexError, KeyError, TypeError):
        return {}  # another file of the model has it
    return root if isinstance(root, dict) else {}


def _packed(dicts: StateDicts, part: ModelPart) -> Iterator[PackedTensor]:
    """The tensors in NF4 that are of the model, under the names that they have there."""
    for packed in dicts.packed:
        short = part.names.get(part_name(packed.name, PARTS[0]))
        if short is not None:
            yield replace(packed, name=short.removesuffix(part_name("", PARTS[0])))


def _weights(root: dict[Any, Any], file: str) -> Iterator[tuple[Path, TensorRecord | Record | str]]:
    """What holds weights below a state dict, in its order, each with its keys: a text says why it can't be read."""
    for keys, value in leaves(root, file, lambda _, value: isinstance(value, dict) or type(value) in (list, tuple)):
        if type(value) is not TensorRecord and other_weights(value) is None:
            continue
        if all(type(key) in (str, int) for key in keys):
            yield keys, value
        else:
            path = tuple(key if type(key) in (str, int) else shown(key, 80) for key in keys)
            yield path, "a tensor whose key is no text"


def _no_state_dict(path: str, root: Any) -> CorruptFile:
    found = "one tensor" if isinstance(root, TensorRecord) else f"a {type(root).__name__}"
    if isinstance(root, Record):
        found = f"an object of the class {type(root).origin}"
    return CorruptFile(
        f"{path} holds {found}, not a state dict of names and tensors",
        file=path,
        expected="a state dict",
        found=found,
        hint="Save model.state_dict() with torch.save, not the model itself.",
    )


def _check_no_placeholders(dicts: StateDicts, part: ModelPart) -> None:
    """Under ZeRO-3 a module's own state dict has tensors without elements in place of its weights."""
    shapes = [dicts.found[name][1].shape for name in part.names]
    empty = [name for name, shape in zip(part.names, shapes, strict=True) if shape == (0,)]
    if not empty or len(empty) < len(shapes):
        return
    file = dicts.files[dicts.found[empty[0]][0]][1].path
    raise IncompleteCheckpoint(
        f"all {len(empty)} tensors of {file} have the shape [0], such as {empty[0]}: these are ZeRO-3's placeholders, "
        "not weights",
        file=file,
        tensor=empty[0],
        expected="weights",
        found="tensors of shape [0]",
        hint="The weights are in DeepSpeed's own folder global_stepN of the same run: convert that, with its files of "
        "optimizer states.",
    )


def _used_bytes(dicts: StateDicts, part: ModelPart) -> dict[tuple[int, str], int]:
    """How much of each storage the model's tensors take."""
    used: dict[tuple[int, str], int] = {}
    for name in part.names:
        file, record = dicts.found[name]
        element = ELEMENT_TYPES.get(record.dtype)
        key = file, record.storage.key
        used[key] = used.get(key, 0) + prod(record.shape) * (element.size_bytes if element else 0)
    return used


def _worth_checking(stored: StoredRange, used_bytes: int) -> bool:
    """A storage must be read whole for its checksum, which a small view of a big one is not worth."""
    return stored.length_bytes <= _BIG_STORAGE_BYTES or 2 * used_bytes >= stored.length_bytes
