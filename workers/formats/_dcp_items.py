"""The items of a DCP folder: where inside of each the elements of its chunk lie.

An item is a torch file of one tensor inside of a ``.distcp`` file, perhaps compressed; with torch's safetensors
serialisation all tensor items of a file are one safetensors blob. Adds what it finds to a ``CheckpointBuilder``.
Source: torch ``distributed/checkpoint/filesystem.py`` (``_write_item``, ``_write_files_from_queue``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workers.checkpoint import PLAIN, SourceFile, TensorInfo
from workers.checkpoint_builder import CheckpointBuilder
from workers.dtypes import ELEMENT_TYPES, size_bytes
from workers.errors import CorruptFile, GeometryMismatch, IncompleteCheckpoint
from workers.formats._dcp_archives import read_archives
from workers.formats._dcp_compressed import open_compressed
from workers.formats._dcp_metadata import DcpMetadata
from workers.formats._format import Listing, join
from workers.geometry import IntArray, Shape, contiguous_strides
from workers.pickles import TensorRecord, paused_collector
from workers.safetensors_file import open_safetensors
from workers.storage import FileEntry, Folder
from workers.tolerance import refuse
from workers.torch_file import TorchFile, open_torch_file, resolve

ITEMS_AT_ONCE = 32
"""Items asked of an object store at the same time."""

_ITEM_TAIL_BYTES = 1024
"""The zip directory of one tensor takes 560 bytes as torch 2.13 writes it, and 300 before 2.3."""

_WORTH_COLUMNS = 4
"""Items of a file from which on reading them together is faster than one by one."""

_REFETCH = "Fetch the file again from where it was saved; it was not written or copied completely."


class Item(NamedTuple):
    """One chunk and where it is stored."""

    name: str
    """The tensor's name in the metadata, for messages."""
    tensor: TensorInfo
    offsets: Shape
    sizes: Shape
    offset: int
    length: int
    encoding: int


class Located(NamedTuple):
    """Where the elements of a chunk lie: a storage, the first element's byte and the strides in elements."""

    offset: int
    length: int
    crc32: int | None
    start: int
    strides: Shape
    decoded_length: int | None = None


@dataclass(frozen=True, slots=True)
class _File:
    """One file and the wanted items in it."""

    entry: FileEntry
    rows: list[int]


def add_tensors(
    builder: CheckpointBuilder, listing: Listing, prefix: str, metadata: DcpMetadata, names: Mapping[str, str]
) -> None:
    """Add tensors of the DCP folder at ``prefix``; ``names`` goes from names there to names in the checkpoint.

    Refuses with ``IncompleteCheckpoint`` files that are missing or too short. Raises ``CorruptFile`` for items that
    are no tensors, and ``GeometryMismatch`` for those that are others than the metadata say.
    """
    numbers: dict[int, int] = {}
    for number, tensor in enumerate(metadata.tensors):
        if tensor.name in names:
            _check_dtype(tensor, metadata)
            numbers[number] = builder.add_tensor(names[tensor.name], tensor.dtype, tensor.shape)
    owners = np.full(len(metadata.tensors), -1, dtype=np.int64)
    owners[list(numbers)] = list(numbers.values())
    boxes = _Boxes(builder, metadata)
    with paused_collector:
        for file in _files(listing, prefix, metadata, numbers):
            _add_file(builder, listing.folder, file, boxes, owners)


def _add_file(builder: CheckpointBuilder, folder: Folder, file: _File, boxes: _Boxes, owners: IntArray) -> None:
    """Add the items of a file: most in columns, what is unusual one by one."""
    metadata, entry = boxes.metadata, file.entry
    chunks, rows = metadata.chunks, np.array(file.rows, dtype=np.int64)
    found = None
    apart = len(rows) >= _WORTH_COLUMNS and bool((np.diff(chunks.offset[rows]) > 0).all())
    if apart and (chunks.encoding[rows] == PLAIN).all():
        found = read_archives(folder, entry.path, chunks.offset[rows], chunks.length[rows])
    digest = found.digest if found is not None else ""
    number = builder.add_file(SourceFile(entry.path, entry.size_bytes, _rank(entry.path), digest, entry.version))
    if found is not None:
        places = [
            boxes.place(row, record, length) if record is not None and fine else None
            for row, record, length, fine in zip(
                file.rows, found.pickles, found.length.tolist(), found.usual.tolist(), strict=True
            )
        ]
        usual = np.array([place is not None for place in places], dtype=bool)
        kept = np.array([place for place in places if place is not None], dtype=np.int64).reshape(-1, 2)
        begins = chunks.offset[rows][usual] + found.start[usual]
        first = builder.add_storages(number, np.column_stack((begins, found.length[usual], found.crc32[usual])))
        storages = np.arange(first, first + len(begins))
        owner = owners[chunks.tensor[rows][usual]]
        builder.add_pieces(np.column_stack((owner, storages, begins + kept[:, 0], kept[:, 1])))
        rows = rows[~usual]
    items = [_item(metadata, row) for row in rows.tolist()]
    pieces = []
    for row, place in zip(rows.tolist(), _locate(folder, entry, items), strict=True):
        storage = builder.add_storage(
            number, place.offset, place.length, place.crc32, zstd_decoded_length=place.decoded_length
        )
        box = boxes.number(int(metadata.chunks.box[row]), place.strides)
        pieces.append((int(owners[metadata.chunks.tensor[row]]), storage, place.start, box))
    builder.add_pieces(np.array(pieces, dtype=np.int64).reshape(-1, 4))


class _Boxes:
    """Numbers of boxes in the builder: few boxes and pickles serve very many chunks."""

    def __init__(self, builder: CheckpointBuilder, metadata: DcpMetadata) -> None:
        self.metadata = metadata
        self._builder = builder
        self._numbers: dict[tuple[int, Shape], int] = {}
        self._places: dict[tuple[TensorRecord, int, str, int], tuple[int, int] | None] = {}

    def number(self, box: int, strides: Shape) -> int:
        """The builder's number of a box whose elements lie in these strides."""
        key = box, strides
        if key not in self._numbers:
            self._numbers[key] = self._builder.add_box(*self.metadata.boxes[box], strides)
        return self._numbers[key]

    def place(self, row: int, record: TensorRecord, length: int) -> tuple[int, int] | None:
        """Where in its storage a chunk begins, in bytes, and the number of its box; None when it is not this chunk."""
        chunks = self.metadata.chunks
        box, dtype = int(chunks.box[row]), self.metadata.tensors[chunks.tensor[row]].dtype
        key = record, box, dtype, length
        if key not in self._places:
            self._places[key] = self._checked(record, box, dtype, length)
        return self._places[key]

    def _checked(self, record: TensorRecord, box: int, dtype: str, length: int) -> tuple[int, int] | None:
        sizes = self.metadata.boxes[box][1]
        width = ELEMENT_TYPES[dtype].size_bytes
        storage = record.storage
        first = storage.view_offset + record.storage_offset
        last = first + sum((size - 1) * stride for size, stride in zip(record.shape, record.stride, strict=True))
        claimed = storage.numel * (1 if storage.dtype is None else width)
        if (record.dtype, record.shape) != (dtype, sizes) or claimed != length or (last + 1) * width > length:
            return None
        return first * width, self.number(box, record.stride)


def _check_dtype(tensor: TensorInfo, metadata: DcpMetadata) -> None:
    if tensor.dtype not in ELEMENT_TYPES:
        raise GeometryMismatch(
            f"tensor {tensor.name} has the element type {tensor.dtype}, which no Hugging Face model can hold",
            file=metadata.sources[0],
            tensor=tensor.name,
            found=tensor.dtype,
            hint="Leave the tensor out, or convert it to another type where it was saved.",
        )


def _files(listing: Listing, prefix: str, metadata: DcpMetadata, numbers: Mapping[int, int]) -> Iterator[_File]:
    """The files that hold wanted chunks, in the order of their names, each with its rows in the order of offsets."""
    chunks = metadata.chunks
    wanted = np.flatnonzero(np.isin(chunks.tensor, np.array(list(numbers), dtype=np.int64)))
    order = wanted[np.lexsort((chunks.offset[wanted], chunks.file[wanted]))]
    borders = np.flatnonzero(np.diff(chunks.file[order])) + 1
    groups = [group for group in np.split(order, borders) if len(group)]
    found = {metadata.files[int(chunks.file[group[0]])]: group for group in groups}
    entries = {name: listing.file(join(prefix, name)) for name in found}
    missing = sorted(name for name, entry in entries.items() if entry is None)
    if missing:
        first = metadata.tensors[int(chunks.tensor[found[missing[0]][0]])].name
        error = IncompleteCheckpoint(
            f"{metadata.sources[0]} names {len(found)} files, of which {', '.join(missing[:8])} "
            f"{'is' if len(missing) == 1 else 'are'} missing; there is for example a part of tensor {first}",
            file=join(prefix, missing[0]),
            tensor=first,
            expected=missing[0],
            found="no such file",
            hint="Without a shared disk each node saves only its own ranks: copy all files together.",
        )
        refuse(error)
    for name in sorted(found):
        entry = entries[name]
        if entry is not None:
            yield _File(entry, _inside(metadata, entry, found[name]).tolist())


def _inside(metadata: DcpMetadata, entry: FileEntry, rows: IntArray) -> IntArray:
    """The rows whose items end inside of the file; others are refused."""
    chunks = metadata.chunks
    ends = chunks.offset[rows] + chunks.length[rows]
    beyond = rows[np.flatnonzero(ends > entry.size_bytes)]
    if len(beyond):
        tensor = metadata.tensors[int(chunks.tensor[beyond[0]])]
        error = IncompleteCheckpoint(
            f"{entry.path} is truncated: it has {entry.size_bytes} bytes, and {len(beyond)} items end behind them, up "
            f"to byte {int(ends.max())}; the first is a part of tensor {tensor.name}",
            file=entry.path,
            tensor=tensor.name,
            expected=f"at least {int(ends.max())} bytes",
            found=f"{entry.size_bytes} bytes",
            hint=_REFETCH,
        )
        refuse(error)
    return rows[ends <= entry.size_bytes]


def _item(metadata: DcpMetadata, row: int) -> Item:
    chunks = metadata.chunks
    tensor = metadata.tensors[chunks.tensor[row]]
    offsets, sizes = metadata.boxes[chunks.box[row]]
    place = int(chunks.offset[row]), int(chunks.length[row]), int(chunks.encoding[row])
    return Item(tensor.name, tensor, offsets, sizes, *place)


def _rank(path: str) -> int | None:
    """The rank that wrote ``__R_N.distcp``."""
    parts = path.rpartition("/")[2].split("_")
    return int(parts[2]) if len(parts) == 4 and parts[2].isdigit() else None


def _locate(folder: Folder, entry: FileEntry, items: Sequence[Item]) -> Iterable[Located]:
    if not items:
        return ()
    if _is_blob(folder, entry, items):
        return _in_blob(folder, entry, items)
    if folder.is_local or len(items) == 1:
        with paused_collector:
            return [_in_torch_file(folder, entry, item) for item in items]
    with ThreadPoolExecutor(ITEMS_AT_ONCE, thread_name_prefix="items") as pool:
        return list(pool.map(lambda item: _in_torch_file(folder, entry, item), items))


def _is_blob(folder: Folder, entry: FileEntry, items: Sequence[Item]) -> bool:
    """Whether the items are in one safetensors blob: then all have the blob's beginning as their offset."""
    if len({item.offset for item in items}) > 1 or items[0].encoding != PLAIN:
        return False
    head = folder.read(entry.path, items[0].offset, min(9, entry.size_bytes - items[0].offset))
    return head[8:9] == b"{"


def _in_blob(folder: Folder, entry: FileEntry, items: Sequence[Item]) -> Iterator[Located]:
    base = items[0].offset
    blob = open_safetensors(folder, entry.path, entry.size_bytes - base, offset=base)
    for item in items:
        stored = blob.tensors.get(item.name)
        if stored is None or (stored.dtype, stored.shape) != (item.tensor.dtype, item.sizes):
            found = "no such tensor" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise _other_item(entry.path, item, found)
        yield Located(stored.offset, stored.length_bytes, None, stored.offset, contiguous_strides(item.sizes))


def _in_torch_file(folder: Folder, entry: FileEntry, item: Item) -> Located:
    if item.encoding != PLAIN:
        decoded = open_compressed(folder, entry, (item.offset, item.length), _most_bytes(item), item.name)
        place = _in_opened(decoded.file, item)
        decoded.check(place.offset, place.length, place.crc32, item.name)
        return Located(item.offset, item.length, None, item.offset + place.start, place.strides, decoded.size_bytes)
    try:
        opened = open_torch_file(folder, entry.path, item.length, offset=item.offset, tail_bytes=_ITEM_TAIL_BYTES)
    except CorruptFile as error:
        error.message = f"{error.message} (in the item of tensor {item.name} at byte {item.offset})"
        error.tensor = item.name
        raise
    return _in_opened(opened, item)


def _most_bytes(item: Item) -> int:
    """More than a torch file of this chunk can have: its elements and an archive around them."""
    return size_bytes(item.tensor.dtype, item.sizes) + (1 << 16)


def _in_opened(opened: TorchFile, item: Item) -> Located:
    root = opened.root
    if not isinstance(root, TensorRecord):
        raise _other_item(opened.path, item, "no tensor")
    if (root.dtype, root.shape) != (item.tensor.dtype, item.sizes):
        raise _other_item(opened.path, item, f"{root.dtype} {list(root.shape)}")
    place = resolve(opened, root, name=item.name)
    return Located(*place.stored, place.offset, place.strides)


def _other_item(path: str, item: Item, found: str) -> GeometryMismatch:
    expected = f"{item.tensor.dtype} {list(item.sizes)}"
    return GeometryMismatch(
        f"{path}: the item at byte {item.offset} should be the chunk {expected} of tensor {item.name}, but is {found}",
        file=path,
        tensor=item.name,
        expected=expected,
        found=found,
        hint="Metadata and files are of different checkpoints: bring together those of one.",
    )
