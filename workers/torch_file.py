"""Open a torch file by its metadata: the object that was saved, and where in the file each storage lies.

Reads the directory and the pickle, no storage; torch is not needed and nothing of the file is executed. This module
must not interpret what was saved, nor read weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from workers.dtypes import ELEMENT_TYPES
from workers.errors import CorruptFile, GeometryMismatch
from workers.file_kinds import HEAD_BYTES, LEGACY_TORCH_MAGIC, not_expected
from workers.pickles import TensorRecord, load, paused_collector
from workers.torch_legacy import read_legacy
from workers.zip_directory import (
    LOCAL,
    Directory,
    check_no_overlap,
    damaged,
    derive_data_offsets,
    find_directory,
    read_local_header,
)

_TAIL_BYTES = 256 * 2**10
_LARGEST_PICKLE_BYTES = 2 * 2**30
_DEFAULT_ALIGNMENT = 64
_LARGEST_ALIGNMENT = 1 << 30
# A local header: 30 bytes and two fields, name and padding, of at most 64 KiB.
_LONGEST_HEADER = 30 + 2 * 0xFFFF
# Local headers that are read although they are known, to be sure of the rule that they are known by.
_SAMPLES = 4
_PICKLE, _BYTEORDER, _ALIGNMENT, _DATA = "data.pkl", "byteorder", ".storage_alignment", "data/"
_EXPECTED = "a torch file"


class StoredRange(NamedTuple):
    """Where a storage lies in its file; ``crc32`` is None when the file has no checksum of it."""

    offset: int
    length_bytes: int
    crc32: int | None


class ResolvedTensor(NamedTuple):
    """Where a tensor lies: the file offset of its first element, its strides in elements, and its storage."""

    offset: int
    strides: tuple[int, ...]
    stored: StoredRange


@dataclass(frozen=True, slots=True)
class TorchFile:
    """An opened torch file: ``root`` is what was saved, as plain data and records (see ``pickles``).

    Offsets in ``storages`` are absolute in the file at ``path``. ``directory_digest`` is the xxh3-128 of the
    directory, whose CRCs stand for the content, and of the pickle.
    """

    path: str
    size_bytes: int
    root: Any
    storages: dict[str, StoredRange]
    byteorder: str
    directory_digest: str


class Readable(Protocol):
    """What is asked of whoever holds the bytes: a ``Folder``, or a file that was decoded in memory."""

    def read(self, path: str, offset: int, length: int) -> bytes: ...

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[memoryview]: ...


def open_torch_file(
    folder: Readable, path: str, size_bytes: int, *, offset: int = 0, tail_bytes: int = _TAIL_BYTES
) -> TorchFile:
    """Open a file of ``torch.save``, zip or older; no weight is read.

    ``size_bytes`` is the size of the file, or of the torch file inside of it that begins at ``offset``. Takes one
    read of ``tail_bytes`` at the end and one or two more, whatever the number of tensors. Raises ``CorruptFile`` or
    ``UnsafePickle``.
    """
    if size_bytes == 0:
        raise not_expected(path, b"", 0, _EXPECTED)
    source = Source(folder, path, size_bytes, offset, tail_bytes)
    with paused_collector:
        directory = find_directory(source.tail, size_bytes, source.read, path)
        if directory is not None:
            return _open_zip(source, directory)
    head = source.read(0, min(size_bytes, HEAD_BYTES))
    if head.startswith(LEGACY_TORCH_MAGIC):
        legacy = read_legacy(source, path, size_bytes)
        storages = {key: StoredRange(offset + at, length, None) for key, (at, length) in legacy.storages.items()}
        return TorchFile(path, size_bytes, legacy.root, storages, "little", legacy.digest)
    if head.startswith(b"PK\x03\x04"):
        raise CorruptFile(
            f"{path}: truncated: a zip archive of {size_bytes} bytes without its directory, which comes last",
            file=path,
            expected="a zip directory at the end",
            found="none",
            hint="The file was not written or copied completely; fetch it again from where it was saved.",
        )
    raise not_expected(path, head, size_bytes, _EXPECTED)


def resolve(file: TorchFile, tensor: TensorRecord, *, name: str = "") -> ResolvedTensor:
    """Find the bytes of a tensor and check that its storage holds them all.

    ``name`` is the tensor's name for messages. Raises ``CorruptFile`` when the storage is missing or too short, and
    ``GeometryMismatch`` for an element type that safetensors has no name for, and for a tensor whose values are not
    what is stored but the conjugate or negative of it.
    """
    storage = tensor.storage
    stored = file.storages.get(storage.key)
    element = ELEMENT_TYPES.get(tensor.dtype)
    if element is None:
        raise GeometryMismatch(
            f"{file.path}: tensor {name} has the element type {tensor.dtype}, which no Hugging Face model can hold",
            file=file.path,
            tensor=name,
            found=tensor.dtype,
            hint="Leave the tensor out, or convert it to another type where it was saved.",
        )
    if tensor.conjugate or tensor.negative:
        raise GeometryMismatch(
            f"{file.path}: tensor {name} is the conjugate or negative of what is stored",
            file=file.path,
            tensor=name,
            expected="a tensor as it is stored",
            found="a lazy conjugate or negative",
            hint="Load the file with torch, call resolve_conj().resolve_neg() on the tensor, and save it again.",
        )
    if stored is None:
        raise _bad_tensor(file, name, f"a storage {storage.key}", "no such storage")
    width = element.size_bytes
    claimed = storage.numel * (1 if storage.dtype is None else width)
    if claimed != stored.length_bytes:
        raise _bad_tensor(file, name, f"a storage of {claimed} bytes", f"one of {stored.length_bytes}")
    first = storage.view_offset + tensor.storage_offset
    last = first
    if 0 in tensor.shape:
        last = -1
    else:
        for length, stride in zip(tensor.shape, tensor.stride, strict=True):
            last += (length - 1) * stride
    if (last + 1) * width > stored.length_bytes:
        found = f"{stored.length_bytes // width} in its storage"
        raise _bad_tensor(file, name, f"{last + 1} elements", found)
    return ResolvedTensor(stored.offset + (first * width if last >= 0 else 0), tensor.stride, stored)


class Source:
    """The bytes of a torch file, of which the last ones are at hand. Offsets count from the torch file's beginning."""

    def __init__(self, folder: Readable, path: str, size_bytes: int, base: int, tail_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.base = base
        self._folder = folder
        self._tail_offset = max(0, size_bytes - tail_bytes)
        self.tail = folder.read(path, base + self._tail_offset, size_bytes - self._tail_offset)

    def read(self, offset: int, length: int) -> bytes:
        """Read a range, from memory where possible."""
        return bytes(self.read_many([(offset, length)])[0])

    def read_many(self, ranges: list[tuple[int, int]]) -> list[bytes | memoryview]:
        """Read ranges, from memory where possible, the others together."""
        tail = memoryview(self.tail)
        found: list[bytes | memoryview] = [b""] * len(ranges)
        missing = []
        for index, (offset, length) in enumerate(ranges):
            if offset < 0 or offset + length > self.size_bytes:
                raise damaged(self.path, f"data inside of {self.size_bytes} bytes", f"{length} bytes at byte {offset}")
            if offset >= self._tail_offset:
                found[index] = tail[offset - self._tail_offset : offset - self._tail_offset + length]
            else:
                missing.append(index)
        wanted = [(self.base + ranges[index][0], ranges[index][1]) for index in missing]
        views = self._folder.read_ranges(self.path, wanted) if wanted else ()
        for index, view in zip(missing, views, strict=True):
            found[index] = view
        return found


def _open_zip(source: Source, directory: Directory) -> TorchFile:
    path = source.path
    prefix = _prefix(path, directory)
    small = _read_small_records(source, directory, prefix)
    pickled = small[prefix + _PICKLE]
    byteorder = bytes(small.get(prefix + _BYTEORDER, b"little"))
    if byteorder != b"little":
        raise CorruptFile(
            f"{path}: was saved in the byte order {byteorder[:20].decode('latin1')}, only little is supported",
            file=path,
            expected="little",
            found=byteorder[:20].decode("latin1"),
            hint="Load it with torch and save it again on a little-endian machine.",
        )
    has_checksums = _check_pickle(path, directory, prefix + _PICKLE, pickled)
    digest = xxhash.xxh3_128(directory.data)
    digest.update(pickled)
    # Before the storages are listed: what the unpickler holds while it works is the peak of memory.
    root = load(pickled, file=path)
    offsets = _data_offsets(source, directory, _alignment(small.get(prefix + _ALIGNMENT)))
    start = prefix + _DATA
    columns = (directory.names, offsets, directory.sizes.tolist(), directory.crcs.tolist())
    storages = {
        name[len(start) :]: StoredRange(source.base + at, size, crc if has_checksums else None)
        for name, at, size, crc in zip(*columns, strict=True)
        if name.startswith(start)
    }
    return TorchFile(path, source.size_bytes, root, storages, "little", digest.hexdigest())


def _prefix(path: str, directory: Directory) -> str:
    """The first part of all names, with its slash: torch takes it from the file's name, or writes "archive"."""
    names = directory.names
    found = [name[: -len(_PICKLE)] for name in names if name.endswith("/" + _PICKLE) and name.count("/") == 1]
    if len(found) != 1:
        some = ", ".join(names[:4]) or "nothing"
        raise CorruptFile(
            f"{path}: is a zip archive with {len(found)} data.pkl, not a torch file; it holds {some}",
            file=path,
            expected="one record NAME/data.pkl",
            found=some,
            hint="Give the folder or file that the training wrote, not another archive.",
        )
    prefix = found[0]
    if any(name == prefix + "constants.pkl" or name.startswith(prefix + "code/") for name in names):
        raise CorruptFile(
            f"{path}: is a TorchScript program (it has code/ or constants.pkl), not saved weights",
            file=path,
            expected="a state dict saved by torch.save",
            found="a TorchScript archive",
            hint="Save the state dict of the original model with torch.save.",
        )
    return prefix


def _read_small_records(source: Source, directory: Directory, prefix: str) -> dict[str, bytes]:
    """Read the pickle and torch's own notes, each together with its local header, in one go."""
    wanted = {prefix + _PICKLE: _LARGEST_PICKLE_BYTES, prefix + _BYTEORDER: 64, prefix + _ALIGNMENT: 64}
    rows = [row for row, name in enumerate(directory.names) if name in wanted]
    limits = directory.limits
    ranges = []
    for row in rows:
        name, size, offset = directory.names[row], int(directory.sizes[row]), int(directory.header_offsets[row])
        if size > wanted[name]:
            raise damaged(source.path, f"{name} of at most {wanted[name]} bytes", f"{size}")
        ranges.append((offset, min(int(limits[row]) - offset, size + _LONGEST_HEADER)))
    found = {}
    for row, (offset, _), data in zip(rows, ranges, source.read_many(ranges), strict=True):
        name, size = directory.names[row], int(directory.sizes[row])
        start = read_local_header(data[: LOCAL.size], directory, row, source.path) - offset
        if start + size > len(data):
            raise damaged(source.path, f"{name} of {size} bytes", f"{max(0, len(data) - start)}")
        found[name] = bytes(data[start : start + size])
    return found


def _check_pickle(path: str, directory: Directory, name: str, pickled: bytes) -> bool:
    """Check the pickle's CRC-32; False when the file was saved without checksums, which are then all 0."""
    claimed = int(directory.crcs[directory.names.index(name)])
    found = zlib.crc32(pickled)
    if claimed == found:
        return True
    if claimed == 0 and not directory.crcs.any():
        return False
    raise CorruptFile(
        f"{path}: {name} is damaged: its CRC-32 should be {claimed:08x} and is {found:08x}",
        file=path,
        expected=f"{claimed:08x}",
        found=f"{found:08x}",
        hint="Fetch the file again from where it was saved.",
    )


def _alignment(note: bytes | None) -> int:
    """What data are aligned to, by torch's note; files of before torch 2.7 have none and the usual 64."""
    if note is not None and note.isdigit() and 0 < int(note) <= _LARGEST_ALIGNMENT:
        return int(note)
    return _DEFAULT_ALIGNMENT


def _data_offsets(source: Source, directory: Directory, alignment: int) -> list[int]:
    """Where the data of each entry begin in the archive, asking as few local headers as possible."""
    offsets, known = derive_data_offsets(directory, alignment)
    sampled = ~known
    sampled[np.flatnonzero(known)[:: max(1, len(known) // _SAMPLES)]] = True
    asked = np.flatnonzero(sampled).tolist()
    headers = source.read_many([(int(directory.header_offsets[row]), LOCAL.size) for row in asked])
    for row, header in zip(asked, headers, strict=True):
        offsets[row] = read_local_header(header, directory, row, source.path)
    check_no_overlap(directory, offsets, source.path)
    return list(offsets.tolist())


def _bad_tensor(file: TorchFile, name: str, expected: str, found: str) -> CorruptFile:
    return CorruptFile(
        f"{file.path}: tensor {name} needs {expected}, found {found}",
        file=file.path,
        tensor=name,
        expected=expected,
        found=found,
        hint="The file is damaged or was not written completely; fetch it again from where it was saved.",
    )
