"""Mergers: make the parts of a plan. They read the byte ranges that a part needs, apply its operations, digest it.

A merger knows nothing of threads, actors or destinations: it is given a sink, which lends memory for each block
and takes it back full.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from workers.arithmetic import Arithmetic
from workers.checkpoint import NO_CHECKSUM, PLAIN, Checkpoint, SourceFile
from workers.checksums import RangeChecksum, crc32
from workers.dtypes import ELEMENT_TYPES
from workers.errors import CorruptFile, InternalError
from workers.geometry import Shape, contiguous_strides, flat_range_boxes, intersect
from workers.layout import PartTable, step_elements
from workers.mapping import Target
from workers.storage import Folder, FolderAddress, open_folder

Elements = NDArray[Any]

BLOCK_BYTES = 1 << 20
"""Elements are moved in blocks of about this size: read, checked, digested and written while in a core's cache."""

SPARSE_FACTOR = 4
"""Strided elements are read as one enclosing range when that is at most this many times their own bytes."""

SMALL_SPAN_BYTES = 1 << 18
"""An enclosing range below this is read whole whatever its share: a request costs more than the bytes."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What mergers need of a plan, put once where every worker finds it."""

    checkpoint: Checkpoint
    targets: tuple[Target, ...]
    parts: PartTable


@dataclass(frozen=True, slots=True)
class PartResult:
    """A finished part: its digest, what was read for it, and what its values look like."""

    part: int
    digest: bytes
    """xxh3-128 of the part's bytes."""
    checksums: tuple[RangeChecksum, ...]
    bytes_read: int
    seconds: float
    infinite_targets: tuple[int, ...] = ()
    nonzero_targets: tuple[int, ...] = ()
    """Targets that have something other than zeros in this part."""


class Sink(Protocol):
    """Where a merger's blocks go."""

    def lend(self, offset: int, length: int) -> memoryview:
        """Writable memory for ``length`` bytes that belong at byte ``offset`` of the output file."""

    def take(self, offset: int, block: memoryview) -> None:
        """The block that was lent is full."""


@dataclass(slots=True)
class SourceReader:
    """Reads boxes of source tensors out of their pieces (the ``Context`` that expressions are filled in)."""

    checkpoint: Checkpoint
    folder: Folder
    arithmetic: Arithmetic
    checksums: list[RangeChecksum] = field(default_factory=list)
    bytes_read: int = 0
    prefetched: dict[tuple[int, int, int], memoryview] = field(default_factory=dict)
    """(file, offset, length) -> bytes that were fetched ahead, for sources where a request is dear."""
    folders: Callable[[FolderAddress], Folder] = field(default_factory=lambda: cache(open_folder))
    """Opens the folders of files that lie elsewhere, once each: a client of a store for every read would be dear."""
    decoded: dict[int, memoryview] = field(default_factory=dict)
    """The compressed storage that was read last, decoded; readers that follow each other share it."""

    def read(self, tensor: int, offsets: Shape, out: Elements) -> None:
        """Fill ``out`` with the box of a tensor that begins at ``offsets``."""
        missing = out.size
        for run in self.runs(tensor, offsets, out.shape):
            missing -= prod(run.sizes)
            # The dots keep the view of a scalar a view.
            window: Any = (*(slice(a, a + n) for a, n in zip(run.at, run.sizes, strict=True)), ...)
            self._read_run(run, out[window])
        if missing:
            raise InternalError(f"{missing} elements of {self.checkpoint.tensors[tensor].name} are in no piece")

    def runs(self, tensor: int, offsets: Shape, sizes: Shape) -> Iterator[Run]:
        """The reads that a box of a tensor takes, piece by piece."""
        pieces, storages = self.checkpoint.pieces, self.checkpoint.storages
        info = self.checkpoint.tensors[tensor]
        width = ELEMENT_TYPES[info.dtype].size_bytes
        dimensions = len(info.shape)
        for row in self._touched(tensor, offsets, sizes):
            piece_offsets = tuple(pieces.offsets[row, :dimensions].tolist())
            shared = intersect(offsets, sizes, piece_offsets, tuple(pieces.sizes[row, :dimensions].tolist()))
            if shared is None:
                continue
            strides = tuple(pieces.strides[row, :dimensions].tolist())
            begin = sum((a - b) * s for a, b, s in zip(shared[0], piece_offsets, strides, strict=True))
            storage = int(pieces.storage[row])
            whole = Run(
                storage=storage,
                file=int(storages.file[storage]),
                start=int(pieces.start[row]) + begin * width,
                at=tuple(a - b for a, b in zip(shared[0], offsets, strict=True)),
                sizes=shared[1],
                strides=strides,
                width=width,
            )
            yield from whole.dense_enough()

    def _touched(self, tensor: int, offsets: Shape, sizes: Shape) -> list[int]:
        rows = self.checkpoint.pieces.rows(tensor)
        if len(rows) == 1 or not sizes:
            return list(rows)
        pieces = self.checkpoint.pieces
        begins = pieces.offsets[rows.start : rows.stop, : len(sizes)]
        ends = begins + pieces.sizes[rows.start : rows.stop, : len(sizes)]
        starts = np.array(offsets)
        hit = ((begins < starts + sizes) & (ends > starts)).all(axis=1)
        touched: list[int] = (np.flatnonzero(hit) + rows.start).tolist()
        return touched

    def _read_run(self, run: Run, out: Elements) -> None:
        if run.is_dense and out.flags.c_contiguous:
            self._read_bytes(run, out.reshape(-1).view(np.uint8).data)
            return
        scratch = np.empty(run.span_bytes, dtype=np.uint8)
        self._read_bytes(run, scratch.data)
        elements = scratch.view(out.dtype)
        steps = tuple(stride * run.width for stride in run.strides)
        out[...] = np.lib.stride_tricks.as_strided(elements, run.sizes, steps, writeable=False)

    def _read_bytes(self, run: Run, buffer: memoryview) -> None:
        if self.checkpoint.storages.encoding[run.storage] != PLAIN:
            start = run.start - int(self.checkpoint.storages.offset[run.storage])
            buffer[:] = self._decoded(run.storage)[start : start + len(buffer)]
            return
        source = self.checkpoint.files[run.file]
        ahead = self.prefetched.get((run.file, run.start, len(buffer)))
        if ahead is not None:
            buffer[:] = ahead
        else:
            self.folder_of(source).read_into(source.path, run.start, buffer, version=source.version or None)
        self.bytes_read += len(buffer)
        storages = self.checkpoint.storages
        if storages.crc32[run.storage] != NO_CHECKSUM:
            start = run.start - int(storages.offset[run.storage])
            self.checksums.append((run.storage, start, len(buffer), crc32(buffer)))

    def folder_of(self, source: SourceFile) -> Folder:
        """Where a file is read from."""
        return self.folder if source.folder is None else self.folders(source.folder)

    def _decoded(self, storage: int) -> memoryview:
        """A compressed storage as it was before; it has no ranges, so it is read whole and kept for its neighbours."""
        if storage not in self.decoded:
            storages = self.checkpoint.storages
            source = self.checkpoint.files[storages.file[storage]]
            offset, length = int(storages.offset[storage]), int(storages.length[storage])
            data = self.folder_of(source).read(source.path, offset, length, version=source.version or None)
            self.bytes_read += length
            if storages.crc32[storage] != NO_CHECKSUM:
                self.checksums.append((storage, 0, length, crc32(data)))
            self.decoded.clear()  # one at a time: its tensors follow each other
            self.decoded[storage] = decompress_zstd(data, int(storages.decoded_length[storage]), source.path)
        return self.decoded[storage]


def decompress_zstd(data: bytes, decoded_length: int, path: str) -> memoryview:
    """Decode zstandard frames that must give ``decoded_length`` bytes; raises ``CorruptFile``."""
    import zstandard  # noqa: PLC0415 - few sources are compressed

    try:
        reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
        decoded = reader.read(decoded_length + 1)
    except zstandard.ZstdError as error:
        raise CorruptFile(
            f"{path}: compressed data are damaged: {error}", file=path, hint="Copy the file from its origin again."
        ) from error
    if len(decoded) != decoded_length:
        raise CorruptFile(
            f"{path}: compressed data have another size than announced",
            file=path,
            expected=f"{decoded_length} bytes",
            found=f"{len(decoded)} bytes" if len(decoded) < decoded_length else "more",
            hint="Copy the file from its origin again.",
        )
    return memoryview(decoded)


@dataclass(frozen=True, slots=True)
class Run:
    """One read: elements of a box that lie in a byte range of one storage."""

    storage: int
    file: int
    start: int
    """Byte offset in the file of the first element."""
    at: Shape
    """Where the box lies in the box that was asked for."""
    sizes: Shape
    strides: Shape
    width: int

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to the end of the last element."""
        return (sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) + 1) * self.width

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie in the file without gaps and in row-major order."""
        expected = contiguous_strides(self.sizes)
        return all(n == 1 or a == b for n, a, b in zip(self.sizes, self.strides, expected, strict=True))

    def dense_enough(self) -> Iterator[Run]:
        """This run, or slices of it along its widest stride where one read would fetch mostly other bytes."""
        wanted = prod(self.sizes) * self.width
        if self.span_bytes <= max(SPARSE_FACTOR * wanted, SMALL_SPAN_BYTES):
            yield self
            return
        dim = max((d for d, n in enumerate(self.sizes) if n > 1), key=lambda d: self.strides[d])
        for index in range(self.sizes[dim]):
            yield from Run(
                storage=self.storage,
                file=self.file,
                start=self.start + index * self.strides[dim] * self.width,
                at=(*self.at[:dim], self.at[dim] + index, *self.at[dim + 1 :]),
                sizes=(*self.sizes[:dim], 1, *self.sizes[dim + 1 :]),
                strides=self.strides,
                width=self.width,
            ).dense_enough()


class Merger:
    """Makes parts of one recipe. Not thread-safe: each worker has its own."""

    def __init__(self, recipe: Recipe, folder: Folder, arithmetic: Arithmetic) -> None:
        self._recipe = recipe
        self._folder = folder
        self._arithmetic = arithmetic
        self._others: dict[FolderAddress, Folder] = {}
        self._decoded: dict[int, memoryview] = {}

    def _other_folder(self, address: FolderAddress) -> Folder:
        if address not in self._others:
            self._others[address] = open_folder(address)
        return self._others[address]

    def make(self, part: int, sink: Sink) -> PartResult:
        """Make one part block by block, handing each to ``sink`` in order."""
        began = time.perf_counter()
        reader = SourceReader(
            self._recipe.checkpoint, self._folder, self._arithmetic, folders=self._other_folder, decoded=self._decoded
        )
        if not self._folder.is_local:
            reader.prefetched = self._fetch_ahead(part, reader)
        digest = xxhash.xxh3_128()
        infinite: set[int] = set()
        nonzero: set[int] = set()
        for block in blocks_of(self._recipe, part):
            expression = self._recipe.targets[block.target].expression
            kind = ELEMENT_TYPES[expression.dtype]
            memory = sink.lend(block.file_offset, prod(block.sizes) * kind.size_bytes)
            out = np.frombuffer(memory, dtype=kind.numpy_type).reshape(block.sizes)
            expression.fill(out, block.offsets, reader)
            digest.update(memory)
            if block.target not in nonzero and out.any():
                nonzero.add(block.target)
            if kind.floating and block.target not in infinite and holds_infinite(out, expression.dtype):
                infinite.add(block.target)
            sink.take(block.file_offset, memory)
        return PartResult(
            part=part,
            digest=digest.digest(),
            checksums=tuple(reader.checksums),
            bytes_read=reader.bytes_read,
            seconds=time.perf_counter() - began,
            infinite_targets=tuple(sorted(infinite)),
            nonzero_targets=tuple(sorted(nonzero)),
        )

    def _fetch_ahead(self, part: int, reader: SourceReader) -> dict[tuple[int, int, int], memoryview]:
        """Fetch all ranges of a part at once, near ones together: each request to a store costs a round trip."""
        wanted: dict[int, dict[tuple[int, int], None]] = {}
        for block in blocks_of(self._recipe, part):
            for need in self._recipe.targets[block.target].expression.requires(block.offsets, block.sizes):
                for run in reader.runs(need.tensor, need.offsets, need.sizes):
                    if self._recipe.checkpoint.storages.encoding[run.storage] != PLAIN:
                        continue
                    wanted.setdefault(run.file, {})[run.start, run.span_bytes] = None
        fetched: dict[tuple[int, int, int], memoryview] = {}
        for file, ranges in wanted.items():
            source = self._recipe.checkpoint.files[file]
            views = reader.folder_of(source).read_ranges(source.path, list(ranges), version=source.version or None)
            for (start, length), view in zip(ranges, views, strict=True):
                fetched[file, start, length] = view
        return fetched


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a target that is contiguous in its output file and small enough to be made at once."""

    target: int
    offsets: Shape
    sizes: Shape
    file_offset: int


def blocks_of(recipe: Recipe, part: int) -> Iterator[Block]:
    """The blocks of a part, in the order of its bytes."""
    parts = recipe.parts
    position = int(parts.offset[part])
    for segment in range(int(parts.first_segment[part]), int(parts.first_segment[part + 1])):
        target = int(parts.target[segment])
        expression = recipe.targets[target].expression
        width = ELEMENT_TYPES[expression.dtype].size_bytes
        begin, end = int(parts.begin[segment]), int(parts.end[segment])
        step = step_elements(expression, BLOCK_BYTES)
        for start, stop in _steps(begin, end, step):
            for offsets, sizes in flat_range_boxes(expression.shape, start, stop):
                yield Block(target, offsets, sizes, position)
                position += prod(sizes) * width


def _steps(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) at multiples of ``step`` counted from zero."""
    while begin < end:
        stop = min(end, (begin // step + 1) * step)
        yield begin, stop
        begin = stop


_INFINITY = {"F64": 0x7FF0000000000000, "F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}
"""Bits of infinity: patterns from there on, without their sign, are infinite or no numbers."""


def holds_infinite(elements: Elements, dtype: str) -> bool:
    """Whether any element is infinite or not a number."""
    if not elements.size or dtype not in _INFINITY:
        return False
    kind = elements.dtype.type
    magnitude = elements & kind(2 ** (8 * elements.itemsize - 1) - 1)
    return bool(magnitude.max() >= kind(_INFINITY[dtype]))
