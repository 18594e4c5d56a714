"""Open a safetensors file by its header, and build the header of one.

Reads no tensor. Every rule of the format is checked, and one more: two tensors of one name are refused, where the
reference implementation keeps one of them silently.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from workers.dtypes import ELEMENT_TYPES, size_bytes
from workers.errors import CorruptFile
from workers.file_kinds import HEAD_BYTES, kind_of, not_expected
from workers.geometry import MOST_DIMENSIONS
from workers.storage import Folder

LARGEST_HEADER_BYTES = 100_000_000
"""The reference implementation refuses longer headers."""

_LENGTH = struct.Struct("<Q")
_FIRST_READ_BYTES = 256 * 2**10
_ALIGNMENT = 8
_LARGEST_NUMBER = (1 << 63) - 1
_EXPECTED = "a safetensors file"


class StoredTensor(NamedTuple):
    """One tensor: its safetensors dtype and shape, and where its bytes lie, row-major, in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An opened safetensors file. ``tensors`` are in the header's order; ``header`` is its JSON text as it stands."""

    path: str
    size_bytes: int
    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]
    header: bytes

    @property
    def header_bytes(self) -> int:
        """Where the tensors' bytes begin: the length of the header and of the number before it."""
        return _LENGTH.size + len(self.header)


def open_safetensors(folder: Folder, path: str, size_bytes: int, *, offset: int = 0) -> SafetensorsFile:
    """Open a safetensors file of ``size_bytes`` bytes; ``offset`` is where it begins inside of a larger file.

    Takes one read, or two when the header is longer than 256 KiB. Raises ``CorruptFile``.
    """
    head = folder.read(path, offset, min(size_bytes, _FIRST_READ_BYTES)) if size_bytes else b""
    begins_as_one = kind_of(head[:HEAD_BYTES]) in {"a safetensors file", "zeros"} or head[8:9] == b"{"
    if not begins_as_one and not _plausible(head, size_bytes):
        raise not_expected(path, head[:HEAD_BYTES], size_bytes, _EXPECTED)
    length = _LENGTH.unpack_from(head)[0] if len(head) >= _LENGTH.size else LARGEST_HEADER_BYTES + 1
    if length > LARGEST_HEADER_BYTES:
        raise _damaged(path, f"a header of at most {LARGEST_HEADER_BYTES} bytes", f"{length}")
    if _LENGTH.size + length > size_bytes:
        raise _damaged(path, f"a header of {length} bytes", f"{size_bytes} bytes in all: the file is truncated")
    header = head[_LENGTH.size : _LENGTH.size + length]
    if len(header) < length:
        header += folder.read(path, offset + len(head), _LENGTH.size + length - len(head))
    return _parse(path, header, size_bytes, offset)


def build_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Build the length and the header of a file that holds (name, dtype, shape) tensors one after the other.

    The tensors' bytes follow in the order given, without gaps. For the same order this is byte for byte what the
    ``safetensors`` library writes. Raises ``ValueError`` for equal names and for headers that no reader accepts.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        if name in header or name == "__metadata__":
            raise ValueError(f"the tensor name {name!r} is taken")
        end = position + size_bytes(dtype, tuple(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > LARGEST_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes is more than the {LARGEST_HEADER_BYTES} that readers accept")
    return _LENGTH.pack(len(text)) + text


def _plausible(head: bytes, size_bytes: int) -> bool:
    """Whether a file could be one whose header begins with a blank: readers accept that."""
    return len(head) > _LENGTH.size and _LENGTH.unpack_from(head)[0] <= min(size_bytes, LARGEST_HEADER_BYTES)


def _parse(path: str, header: bytes, file_size: int, base: int) -> SafetensorsFile:
    try:
        fields = json.loads(header, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "a header of JSON", str(error)[:300]) from None
    if not isinstance(fields, dict):
        raise _damaged(path, "a JSON object", type(fields).__name__)
    metadata = fields.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "metadata from text to text", str(metadata)[:80])
    start = _LENGTH.size + len(header)
    tensors = {name: _tensor(path, name, entry, base + start) for name, entry in fields.items()}
    _check_layout(path, tensors, base + start, base + file_size)
    return SafetensorsFile(path, file_size, metadata, tensors, header)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the name {twice!r} twice")
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is not JSON")


def _tensor(path: str, name: str, entry: Any, start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _damaged(path, "dtype, shape and data_offsets", str(entry)[:80], name)
    dtype, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in ELEMENT_TYPES:
        raise _damaged(path, f"one of the element types {', '.join(ELEMENT_TYPES)}", str(dtype)[:40], name)
    if shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(path, "a shape and two data_offsets", str(entry)[:120], name)
    if len(shape) > MOST_DIMENSIONS:
        raise _damaged(path, f"at most {MOST_DIMENSIONS} dimensions", f"{len(shape)}", name)
    length = size_bytes(dtype, shape)
    if offsets[1] - offsets[0] != length:
        raise _damaged(path, f"{length} bytes for {dtype} {list(shape)}", f"{offsets[1] - offsets[0]}", name)
    return StoredTensor(dtype, shape, start + offsets[0], length)


def _counts(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST_NUMBER for item in value):
        return tuple(value)
    return None


def _check_layout(path: str, tensors: dict[str, StoredTensor], start: int, end: int) -> None:
    """The tensors must fill the file without holes and overlaps."""
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].length_bytes)):
        if tensor.offset != position:
            what = "a hole" if tensor.offset > position else "an overlap"
            raise _damaged(path, f"data from byte {position}", f"{what}: they begin at byte {tensor.offset}", name)
        position += tensor.length_bytes
    if position != end:
        what = "the file is truncated" if position > end else "other data follow"
        raise _damaged(path, f"{position - start} bytes of tensors", f"{end - start}: {what}")


def _damaged(path: str, expected: str, found: str, tensor: str | None = None) -> CorruptFile:
    where = f"{path}: tensor {tensor}" if tensor is not None else path
    return CorruptFile(
        f"{where}: expected {expected}, found {found}",
        file=path,
        tensor=tensor,
        expected=expected,
        found=found,
        hint="The file is damaged or was not written completely; fetch it again from where it was saved.",
    )
