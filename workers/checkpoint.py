"""``Checkpoint``: the one picture of any source. Names, shapes and where each byte lies; not one weight.

Readers build it through ``checkpoint_builder``; everything after them sees nothing else of the source. Pieces are
kept in columns (``PieceTable``), since a large run has millions of them; ``Piece`` is the view of one row for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.dtypes import ELEMENT_TYPES, size_bytes
from workers.storage import FolderAddress

NO_CHECKSUM = -1

PLAIN = 0
ZSTD = 1
"""Encodings of a storage: as it is, or one or more zstandard frames (torch DCP's ``ZStandard`` extension)."""

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the checkpoint: its name there, safetensors dtype and global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor that is stored as several others (``nf4.part_name``), of which its values are computed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    block_size: int
    scaler_block_size: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that holds weights. ``version`` changes when the file does, ``digest`` is that of its metadata."""

    path: str
    size_bytes: int
    rank: int | None = None
    digest: str = ""
    version: str = ""
    folder: FolderAddress | None = None
    """Where it lies when that isn't the checkpoint's own folder (the base model of an adapter)."""


@dataclass(frozen=True, slots=True)
class SideFile:
    """A small file that belongs to the model (tokenizer, generation config, code) and is carried over as it is."""

    source_path: str
    target_path: str
    size_bytes: int
    folder: FolderAddress | None = None
    """Where it is read from when that isn't the checkpoint's own folder."""
    conversion: str = ""
    """How ``tokenizer_files`` makes its content of what is read; "" copies it."""


@dataclass(frozen=True, slots=True)
class StorageTable:
    """Byte ranges of files that were written, and are checksummed, as a whole. One row each."""

    file: NDArray[np.int32]
    offset: IntArray
    length: IntArray
    crc32: IntArray
    """CRC-32 of the range as its file records it, or ``NO_CHECKSUM``."""
    encoding: NDArray[np.int8]
    """``PLAIN``, or how the range must be decoded; pieces of such a storage count ``start`` in its decoded bytes,
    as if these began at the storage's ``offset``."""
    decoded_length: IntArray

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Boxes of tensors and where they lie, one row each by tensor, then offsets; unused dimensions are 0 / 1."""

    tensor: NDArray[np.int32]
    storage: NDArray[np.int32]
    start: IntArray
    """Byte offset in the file of the piece's first element."""
    offsets: IntArray
    """[pieces, dimensions]: where the box begins in the global tensor."""
    sizes: IntArray
    strides: IntArray
    """[pieces, dimensions]: distance in elements between neighbours in the file."""
    first: IntArray
    """[tensors + 1]: the rows of tensor t are first[t] to first[t + 1]."""

    def __len__(self) -> int:
        return len(self.tensor)

    def rows(self, tensor: int) -> range:
        return range(int(self.first[tensor]), int(self.first[tensor + 1]))


@dataclass(frozen=True, slots=True)
class Piece:
    """One row of the piece table, for people and tests."""

    rank: int | None
    file: str
    offset: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is known of a LoRA adapter that a checkpoint holds beside its base weights."""

    lora_alpha: float | None
    alpha_source: str
    """Where the alpha comes from (a file's name, an option), or what was looked at in vain."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys for adapter_config.json (``task_type``, ``use_rslora`` ...)."""
    needs_alpha: bool = False
    """Whether an adapter without a known alpha is refused even where it is kept apart."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that planning needs to know of a source."""

    address: FolderAddress
    format: str
    naming: str
    """Whose tensor names these are: ``transformers`` (module names), or a framework's own."""
    files: tuple[SourceFile, ...]
    tensors: tuple[TensorInfo, ...]
    storages: StorageTable
    pieces: PieceTable
    replicas: PieceTable
    """Further copies of boxes that ``pieces`` has already; they are compared, not converted."""
    config: Mapping[str, Any] | None = None
    config_path: str | None = None
    side_files: tuple[SideFile, ...] = ()
    adapter: Adapter | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    """How training was laid out, for people: world_size, mesh, placements."""
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    """Tensors of the files that are no part of the model, and why; the plan lists them."""
    packed: tuple[PackedTensor, ...] = ()
    """Tensors in NF4, whose parts are among ``tensors``."""
    made_files: tuple[tuple[str, bytes], ...] = ()
    """Small files that the source lacks and that follow from it: paths below the destination, and contents."""
    replica_tolerance: float = 0.0
    """How much replicas may differ: up to this, the first is taken and the difference is told."""
    strict_ties: bool = False
    """Whether tensors that contradict what the config says of tied embeddings are refused unless the user decides."""

    @property
    def index(self) -> dict[str, int]:
        """Tensor name -> its number."""
        return {tensor.name: number for number, tensor in enumerate(self.tensors)}

    def pieces_of(self, tensor: int, *, replicas: bool = False) -> Iterator[Piece]:
        """The pieces of a tensor as records."""
        table = self.replicas if replicas else self.pieces
        dimensions = len(self.tensors[tensor].shape)
        width = ELEMENT_TYPES[self.tensors[tensor].dtype].size_bytes
        for row in table.rows(tensor):
            file = self.files[self.storages.file[table.storage[row]]]
            sizes = tuple(map(int, table.sizes[row, :dimensions]))
            yield Piece(
                rank=file.rank,
                file=file.path,
                offset=int(table.start[row]),
                length=width * prod(sizes),
                offsets=tuple(map(int, table.offsets[row, :dimensions])),
                sizes=sizes,
                strides=tuple(map(int, table.strides[row, :dimensions])),
            )


def padded_shapes(tensors: Sequence[TensorInfo], dimensions: int) -> IntArray:
    """[tensors, dimensions]: their shapes, filled up with ones."""
    shapes = np.ones((len(tensors), dimensions), dtype=np.int64)
    for number, tensor in enumerate(tensors):
        shapes[number, : len(tensor.shape)] = tensor.shape
    return shapes
