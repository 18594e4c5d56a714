"""The pickle of DCP metadata as columns: tensors, chunks and items, as they are written down.

Knows torch's classes and nothing of files or folders; ``_dcp_metadata`` brings chunks and items together.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import numpy as np

from workers.checkpoint import TensorInfo
from workers.errors import CorruptFile
from workers.formats._dcp_opcodes import UnusualError
from workers.formats._dcp_stream import MetadataStream, Numbers
from workers.geometry import MOST_DIMENSIONS, IntArray, Shape
from workers.pickle_records import is_count
from workers.pickles import DType, Record, load
from workers.shown import shown

ITEM_COLUMNS = 6

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class DcpRecords:
    """What one metadata pickle says."""

    tensors: dict[str, TensorInfo]
    chunks: IntArray
    """Rows of (tensor, box)."""
    boxes: list[tuple[Shape, Shape]]
    items: IntArray
    """Rows of (tensor, offsets, file, byte offset, length in bytes, transform), numbers of the lists below."""
    item_offsets: list[Shape]
    files: list[str]
    transforms: list[tuple[str, ...]]
    objects: list[str] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    def joined(self, other: DcpRecords) -> DcpRecords:
        """Both records together; ``tensors`` must have those of ``other`` already."""
        numbers = {name: number for number, name in enumerate(self.tensors)}
        tensor = np.array([numbers[name] for name in other.tensors], dtype=np.int64)
        boxes, box = _merged(self.boxes, other.boxes)
        offsets, offset = _merged(self.item_offsets, other.item_offsets)
        files, file = _merged(self.files, other.files)
        transforms, transform = _merged(self.transforms, other.transforms)
        chunks, items = other.chunks.copy(), other.items.copy()
        chunks[:, 0], chunks[:, 1] = tensor[chunks[:, 0]], box[chunks[:, 1]]
        items[:, 0], items[:, 1] = tensor[items[:, 0]], offset[items[:, 1]]
        items[:, 2], items[:, 5] = file[items[:, 2]], transform[items[:, 5]]
        return replace(
            self,
            chunks=np.concatenate((self.chunks, chunks)),
            boxes=boxes,
            items=np.concatenate((self.items, items)),
            item_offsets=offsets,
            files=files,
            transforms=transforms,
            objects=list(dict.fromkeys((*self.objects, *other.objects))),
            paths=self.paths | other.paths,
        )


def _merged(first: list[_Value], second: list[_Value]) -> tuple[list[_Value], IntArray]:
    """Both lists as one without repeats, and the numbers in it of the second's values."""
    numbers = {value: number for number, value in enumerate(first)}
    places = [numbers.setdefault(value, len(numbers)) for value in second]
    return list(numbers), np.array(places, dtype=np.int64)


def read_records(data: bytes, path: str) -> DcpRecords:
    """Read the pickle of a metadata file. Raises ``UnsafePickle`` or ``CorruptFile``."""
    return _Columns(path).read(load(data, file=path))


def read_large_records(data: bytearray, path: str) -> DcpRecords | None:
    """Read a large pickle with little memory, changing ``data``; None when it is not of the usual form."""
    stream = MetadataStream(data)
    try:
        root = stream.read()
    except UnusualError:
        return None
    data.clear()
    return _Columns(path, stream).read(root)


class _Columns:
    """Collects the columns of one metadata pickle."""

    def __init__(self, path: str, stream: MetadataStream | None = None) -> None:
        self._path = path
        self._stream = stream or MetadataStream(bytearray())
        self._runs: list[tuple[int, int, int]] = []
        self._tensors: dict[str, TensorInfo] = {}
        self._numbers: dict[str, int] = {}
        self._objects: list[str] = []
        self._chunks = array("q")
        self._items = array("q")
        self._boxes, self._offsets, self._files = self._stream.boxes, self._stream.offsets, self._stream.files
        self._transforms = Numbers()

    def read(self, root: Any) -> DcpRecords:
        if not isinstance(root, Record) or type(root).kind != "Metadata" or not isinstance(root.state, dict):
            _damaged(self._path, "torch's Metadata", type(root).__name__)
        entries, stored = root.get("state_dict_metadata"), root.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(stored, dict):
            _damaged(self._path, "state_dict_metadata and storage_data", "none")
        for name, entry in entries.items():
            self._add_entry(name, entry)
        for index, info in stored.items():
            self._add_item(index, info)
        return DcpRecords(
            tensors=self._tensors,
            chunks=self._all_chunks(),
            boxes=list(self._boxes),
            items=self._all_items(),
            item_offsets=list(self._offsets),
            files=list(self._files),
            transforms=list(self._transforms),
            objects=self._objects,
            paths=_paths(root.get("planner_data")),
        )

    def _add_entry(self, name: Any, entry: Any) -> None:
        if type(name) is not str or not isinstance(entry, Record):
            _damaged(self._path, "names of tensors", shown(name, 80))
        if type(entry).kind == "BytesStorageMetadata":
            self._objects.append(name)
            return
        shape, chunks = entry.get("size"), entry.get("chunks")
        dtype = _dtype(entry.get("properties"))
        if not _is_shape(shape) or dtype is None or not isinstance(chunks, list):
            _damaged(self._path, f"dtype, shape and chunks of tensor {name}", type(entry).kind, name)
        number = self._numbers[name] = len(self._tensors)
        self._tensors[name] = TensorInfo(name, dtype, shape)
        self._runs.extend((number, *run) for run in getattr(chunks, "runs", ()))
        for chunk in chunks:
            offsets, sizes = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Record) else (None, None)
            if not _is_shape(offsets) or not _is_shape(sizes):
                _damaged(self._path, f"offsets and sizes of the chunks of tensor {name}", shown(chunk, 80), name)
            self._chunks.extend((number, self._boxes[offsets, sizes]))

    def _all_chunks(self) -> IntArray:
        """The chunks that are records, and those that the stream took into its columns."""
        boxes = np.frombuffer(self._stream.chunks, dtype=np.int32)
        taken = np.array(self._runs, dtype=np.int64).reshape(-1, 3)
        rows = np.empty((len(self._chunks) // 2 + int((taken[:, 2] - taken[:, 1]).sum()), 2), dtype=np.int64)
        rows[: len(self._chunks) // 2] = _rows(self._chunks, 2)
        at = len(self._chunks) // 2
        for tensor, first, last in self._runs:
            rows[at : at + last - first, 0] = tensor
            rows[at : at + last - first, 1] = boxes[first:last]
            at += last - first
        return rows

    def _all_items(self) -> IntArray:
        if not self._stream.items:
            return _rows(self._items, ITEM_COLUMNS)
        numbers = np.array([self._numbers.get(name, -1) for name in self._stream.names], dtype=np.int64)
        plain = self._transforms[()]
        taken = np.frombuffer(self._stream.items, dtype=np.int64).reshape(-1, ITEM_COLUMNS - 1)
        owner = numbers[taken[:, 0]]
        known = np.flatnonzero(owner >= 0)
        rows = np.empty((len(known) + len(self._items) // ITEM_COLUMNS, ITEM_COLUMNS), dtype=np.int64)
        rows[: len(known), 0], rows[: len(known), -1] = owner[known], plain
        for column in range(1, ITEM_COLUMNS - 1):
            rows[: len(known), column] = taken[known, column]
        rows[len(known) :] = _rows(self._items, ITEM_COLUMNS)
        return rows

    def _add_item(self, index: Any, info: Any) -> None:
        if not isinstance(index, Record) or not isinstance(info, Record):
            _damaged(self._path, "an index and a place for each item", shown(index, 80))
        name, offsets = index.get("fqn"), index.get("offset")
        number = self._numbers.get(name) if type(name) is str else None
        if number is None or offsets is None:
            return  # an object: nobody looks into it
        file, offset, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        transform = info.get("transform_descriptors") or ()
        if not _is_shape(offsets) or type(file) is not str or not is_count(offset) or not is_count(length):
            _damaged(self._path, f"file, offset and length of an item of tensor {name}", shown(file, 80), name)
        if not all(type(step) is str for step in transform):
            _damaged(self._path, f"names of transforms of an item of tensor {name}", shown(transform, 80), name)
        columns = (self._offsets[offsets], self._files[file], offset, length, self._transforms[tuple(transform)])
        self._items.extend((number, *columns))


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and len(value) <= MOST_DIMENSIONS and all(map(is_count, value))


def _dtype(properties: Any) -> str | None:
    """The dtype among a tensor's properties: a tuple since torch 1.13, a dict of attributes before."""
    if not isinstance(properties, Record):
        return None
    state = properties.state
    value = state[0] if isinstance(state, tuple) and state else properties.get("dtype")
    return value.name if isinstance(value, DType) else None


def _paths(planned: Any) -> dict[str, tuple[str | int, ...]]:
    """Where names stood in nested dicts, as the planner noted it; anything else in its place is left out."""
    if not isinstance(planned, dict):
        return {}
    return {name: path for name, path in planned.items() if type(name) is str and _is_path(path)}


def _is_path(value: Any) -> bool:
    return type(value) is tuple and len(value) > 0 and all(type(part) in (str, int) for part in value)


def _rows(values: array[int], columns: int) -> IntArray:
    return np.frombuffer(values, dtype=np.int64).reshape(-1, columns) if values else np.zeros((0, columns), np.int64)


def _damaged(path: str, expected: str, found: str, tensor: str | None = None) -> NoReturn:
    raise CorruptFile(
        f"{path}: damaged DCP metadata: expected {expected}, found {found}",
        file=path,
        tensor=tensor,
        expected=expected,
        found=found,
        hint="The file is damaged or is no metadata of torch.distributed.checkpoint; fetch it again.",
    )
