"""The metadata of a torch DCP folder: which tensors there are, how they are cut, and where each chunk is stored.

Reads ``.metadata`` (or ``__R.metadata`` of every rank) and nothing else. What lies at a chunk's place is for
``_dcp_items`` to find out. Names are as they were saved; what they mean is for the formats.
Sources: torch ``distributed/checkpoint/metadata.py``, ``filesystem.py``, ``planner_helpers.py`` (1.13 to 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import xxhash
from numpy.typing import NDArray

from workers.checkpoint import PLAIN, ZSTD, TensorInfo
from workers.dtypes import ELEMENT_TYPES
from workers.errors import AmbiguousSource, CorruptFile, GeometryMismatch, IncompleteCheckpoint
from workers.formats._dcp_records import DcpRecords, read_large_records, read_records
from workers.formats._format import Listing, join
from workers.geometry import IntArray, Shape

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__(?P<rank>\d+)\.metadata")
"""Written instead of ``.metadata`` by ``dcp.save(use_collectives=False)``: each rank's chunks only."""

LARGE_BYTES = 4 << 20
"""From here on the pickle is read in the way that makes no object for each chunk."""

LARGEST_BYTES = 8 << 30
"""About ten times what a trillion parameters on a thousand ranks take."""

TRANSFORMS = {(): PLAIN, ("stream.zstd/1",): ZSTD}
"""Encodings by torch's transform descriptors (``_extension.py``)."""

_STILL_WRITING = "If the training still runs, it may be writing this checkpoint: try again when it is done."


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunks and their items, one row each by tensor, in the order of saving. Empty chunks are left out."""

    tensor: NDArray[np.int32]
    box: NDArray[np.int32]
    """Number of the chunk's place in ``DcpMetadata.boxes``."""
    file: NDArray[np.int32]
    offset: IntArray
    length: IntArray
    encoding: NDArray[np.int8]
    """``PLAIN`` or ``ZSTD``, as in ``StorageTable``."""
    first: IntArray
    """[tensors + 1]: the rows of tensor t are first[t] to first[t + 1]."""

    def __len__(self) -> int:
        return len(self.tensor)

    def rows(self, tensor: int) -> range:
        """The rows of a tensor."""
        return range(int(self.first[tensor]), int(self.first[tensor + 1]))


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What the metadata of a DCP folder say."""

    sources: tuple[str, ...]
    """Paths of the metadata files."""
    tensors: tuple[TensorInfo, ...]
    """In the order of saving; ``dtype`` is a safetensors name, or torch's own where safetensors has none."""
    objects: tuple[str, ...]
    """Names of what is no tensor: pickled Python objects, which nobody looks into."""
    paths: Mapping[str, tuple[str | int, ...]]
    """Where each name stood in the nested dicts that were saved; empty when the planner did not note it."""
    boxes: tuple[tuple[Shape, Shape], ...]
    """Places of chunks: offsets and sizes. The chunks of many tensors share one."""
    files: tuple[str, ...]
    """Names of the files that the items lie in, relative to the folder of the metadata."""
    chunks: ChunkTable
    digest: str
    """xxh3-128 of the metadata files."""


def has_metadata(listing: Listing, prefix: str = "") -> bool:
    """Whether a subfolder holds the metadata of a finished DCP save."""
    names = listing.files(prefix)
    return METADATA in names or any(map(RANK_METADATA.fullmatch, names))


def read_dcp_metadata(listing: Listing, prefix: str = "") -> DcpMetadata:
    """Read the metadata of the DCP folder at ``prefix``.

    Raises ``UnsafePickle``, ``CorruptFile``, ``GeometryMismatch`` for chunks outside of their tensors, and
    ``IncompleteCheckpoint`` where a rank's metadata or a chunk's item are missing.
    """
    digest = xxhash.xxh3_128()
    gathered: DcpRecords | None = None
    sources = _sources(listing, prefix)
    for path in sources:
        records = _read(listing, path, digest)
        gathered = records if gathered is None else _union(gathered, records, path)
    assert gathered is not None  # noqa: S101 - there is at least one source
    return _assemble(gathered, sources, digest.hexdigest())


def _read(listing: Listing, path: str, digest: xxhash.xxh3_128) -> DcpRecords:
    entry = listing.file(path)
    size = entry.size_bytes if entry is not None else 0
    if size > LARGEST_BYTES:
        raise CorruptFile(
            f"{path} has {size} bytes, more than the metadata of any checkpoint",
            file=path,
            expected=f"at most {LARGEST_BYTES} bytes",
            found=f"{size} bytes",
            hint="The file is damaged; fetch it again from where it was saved.",
        )
    if size >= LARGE_BYTES:
        data = bytearray(size)
        listing.folder.read_into(path, 0, memoryview(data))
        digest.update(data)
        records = read_large_records(data, path)
        if records is not None:
            return records
    content = listing.folder.read(path)
    digest.update(content)
    return read_records(content, path)


def _sources(listing: Listing, prefix: str) -> tuple[str, ...]:
    names = listing.files(prefix)
    ranks = {int(found["rank"]): entry for name, entry in names.items() if (found := RANK_METADATA.fullmatch(name))}
    if METADATA in names and ranks:
        raise AmbiguousSource(
            f"{prefix or 'the folder'} holds {METADATA} and {ranks[min(ranks)].path}, which are of two saves: one "
            "wrote over files of the other",
            expected=f"{METADATA}, or __R.metadata of the ranks",
            found="both",
            hint="Save again into an empty folder. If one of the two is known to be the older, move it elsewhere.",
        )
    if METADATA in names:
        return (names[METADATA].path,)
    if not ranks:
        raise IncompleteCheckpoint(
            f"{prefix or 'the folder'} has no {METADATA}, which is written last: the save was not finished",
            file=join(prefix, METADATA),
            expected=METADATA,
            found="none",
            hint=f"Take another checkpoint of the run, or copy the missing file, too. {_STILL_WRITING}",
        )
    absent = (rank for rank in range(max(ranks)) if rank not in ranks)
    missing = [f"__{rank}.metadata" for rank in islice(absent, 8)]
    if missing:
        raise IncompleteCheckpoint(
            f"metadata of ranks are missing: {', '.join(missing)}",
            file=join(prefix, missing[0]),
            expected=f"__0.metadata to __{max(ranks)}.metadata",
            found=f"{len(ranks)} file{'s' if len(ranks) != 1 else ''}",
            hint="Without a shared disk each node saves only its own ranks: copy them together.",
        )
    return tuple(entry.path for _, entry in sorted(ranks.items()))


def _union(first: DcpRecords, second: DcpRecords, path: str) -> DcpRecords:
    """Put together what ranks wrote down separately: same tensors, each with its own chunks."""
    for name, tensor in second.tensors.items():
        known = first.tensors.setdefault(name, tensor)
        if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
            raise GeometryMismatch(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)} in {path}, but {known.dtype} "
                f"{list(known.shape)} in the files of other ranks",
                file=path,
                tensor=name,
                expected=f"{known.dtype} {list(known.shape)}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
                hint="The files are of different runs or steps: bring together those of one checkpoint.",
            )
    return first.joined(second)


def _assemble(records: DcpRecords, sources: tuple[str, ...], digest: str) -> DcpMetadata:
    """Bring chunks and items together: torch finds an item by its tensor's name and its chunk's offsets."""
    tensors = tuple(records.tensors.values())
    path = ", ".join(sources[:2])
    _check_boxes(records, tensors, path)
    wanted = _distinct_chunks(records)
    item = _items_of(records, wanted, tensors, path)
    encodings = np.array([_encoding(transform, path) for transform in records.transforms], dtype=np.int8)
    owner = wanted[:, 0].astype(np.int32)
    counts = np.bincount(owner, minlength=len(tensors))
    table = ChunkTable(
        tensor=owner,
        box=wanted[:, 1].astype(np.int32),
        file=records.items[item, 2].astype(np.int32),
        offset=records.items[item, 3],
        length=records.items[item, 4],
        encoding=encodings[records.items[item, 5]] if len(item) else np.zeros(0, dtype=np.int8),
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
    )
    return DcpMetadata(
        sources=sources,
        tensors=tensors,
        objects=tuple(records.objects),
        paths=records.paths,
        boxes=tuple(records.boxes),
        files=tuple(_checked_file(name, path) for name in records.files),
        chunks=table,
        digest=digest,
    )


def _check_boxes(records: DcpRecords, tensors: Sequence[TensorInfo], path: str) -> None:
    """Chunks must have the dimensions of their tensor and lie inside of it."""
    pairs = np.unique(records.chunks, axis=0) if len(records.chunks) < _FEW else records.chunks
    shapes = [tensor.shape for tensor in tensors]
    seen: set[tuple[Shape, int]] = set()
    for number, box in pairs.tolist():
        shape = shapes[number]
        if (shape, box) in seen:
            continue
        offsets, sizes = records.boxes[box]
        inside = len(offsets) == len(sizes) == len(shape) and all(
            offset + size <= length for offset, size, length in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise GeometryMismatch(
                f"{path}: a chunk at {list(offsets)} with sizes {list(sizes)} does not lie in tensor "
                f"{tensors[number].name} {list(shape)}",
                file=path,
                tensor=tensors[number].name,
                expected=f"a part of {list(shape)}",
                found=f"offsets {list(offsets)}, sizes {list(sizes)}",
                hint="The metadata are damaged; fetch them again from where they were saved.",
            )
        seen.add((shape, box))


_FEW = 100_000


def _distinct_chunks(records: DcpRecords) -> IntArray:
    """Chunks that hold anything, by tensor; each box of a tensor once."""
    empty = np.array([0 in sizes for _, sizes in records.boxes], dtype=bool)
    chunks = records.chunks[~empty[records.chunks[:, 1]]] if len(records.chunks) else records.chunks
    order = np.argsort(chunks[:, 0], kind="stable")
    return chunks[order]


def _items_of(records: DcpRecords, chunks: IntArray, tensors: Sequence[TensorInfo], path: str) -> IntArray:
    """For each chunk the row of its item."""
    places: dict[Shape, int] = {}
    for offsets in (*(box[0] for box in records.boxes), *records.item_offsets):
        places.setdefault(offsets, len(places))
    place_of_box = np.array([places[offsets] for offsets, _ in records.boxes], dtype=np.int64)
    place_of_item = np.array([places[offsets] for offsets in records.item_offsets], dtype=np.int64)
    wanted = chunks[:, 0] * len(places) + place_of_box[chunks[:, 1]]
    there = records.items[:, 0] * len(places) + place_of_item[records.items[:, 1]]
    order = np.argsort(there, kind="stable")
    position = np.searchsorted(there, wanted, sorter=order) + _repeats(wanted)
    found = order[np.minimum(position, len(order) - 1)] if len(order) else np.zeros(len(wanted), dtype=np.int64)
    lost = np.flatnonzero(there[found] != wanted) if len(order) else np.arange(len(wanted))
    if len(lost):
        tensor, box = chunks[lost[0]].tolist()
        offsets, sizes = records.boxes[box]
        raise IncompleteCheckpoint(
            f"{path}: no file is named for the chunk at {list(offsets)} with sizes {list(sizes)} of tensor "
            f"{tensors[tensor].name}",
            file=path,
            tensor=tensors[tensor].name,
            expected=f"an item for {len(wanted)} chunks",
            found=f"{len(lost)} chunks without",
            hint="The save was not finished or the metadata are damaged; take another checkpoint of the run.",
        )
    return found


def _repeats(keys: IntArray) -> IntArray:
    """How often each key occurred before its place: ranks that wrote metadata apart may hold the same chunk."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    repeats = np.empty(len(keys), dtype=np.int64)
    repeats[order] = np.arange(len(keys)) - np.searchsorted(ordered, ordered)
    return repeats


def _encoding(descriptors: tuple[str, ...], path: str) -> int:
    if descriptors not in TRANSFORMS:
        raise CorruptFile(
            f"{path}: items were stored through {', '.join(descriptors)}, which unshard does not know",
            file=path,
            expected="plain items, or stream.zstd/1",
            found=", ".join(descriptors),
            hint="Load the checkpoint with the extension that saved it, and save it without.",
        )
    return TRANSFORMS[descriptors]


def _checked_file(name: str, path: str) -> str:
    """A name inside of the folder: metadata are not to be trusted with paths."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or "\x00" in name or not {"", ".", ".."}.isdisjoint(parts):
        _refuse_file(name, path)
    return name


def _refuse_file(name: str, path: str) -> NoReturn:
    raise CorruptFile(
        f"{path} names the file {name!r}, which is no file of its folder",
        file=path,
        expected="a file beside the metadata, such as __0_0.distcp",
        found=name[:200],
        hint="Do not use metadata that lead out of their folder.",
    )


def is_convertible(tensor: TensorInfo) -> bool:
    """Whether a Hugging Face model can hold a tensor of this element type."""
    return tensor.dtype in ELEMENT_TYPES


def nesting(metadata: DcpMetadata, name: str) -> tuple[Any, ...]:
    """Where a name stood in the nested dicts that were saved; the name itself when nobody noted it."""
    return metadata.paths.get(name, (name,))
