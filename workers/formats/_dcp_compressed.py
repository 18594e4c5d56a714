"""Compressed items of a DCP folder: decoded once while planning, since nothing says how long they are.

Source: torch ``distributed/checkpoint/_extension.py`` (``ZStandard``): one zstd stream per item, around a torch file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isal import isal_zlib

from workers.errors import CorruptFile
from workers.storage import FileEntry, Folder
from workers.torch_file import TorchFile, open_torch_file


@dataclass(frozen=True, slots=True)
class DecodedItem:
    """A compressed torch file; offsets in ``file`` count from the beginning of what was decoded."""

    file: TorchFile
    data: memoryview

    @property
    def size_bytes(self) -> int:
        """Bytes after decoding."""
        return len(self.data)

    def check(self, offset: int, length: int, crc32: int | None, name: str) -> None:
        """Compare a storage with its checksum: later its bytes are seen only as part of a compressed range."""
        found = isal_zlib.crc32(self.data[offset : offset + length])
        if crc32 is not None and found != crc32:
            raise CorruptFile(
                f"{self.file.path} is damaged: tensor {name} doesn't have the checksum that was recorded for it",
                file=self.file.path,
                tensor=name,
                expected=f"CRC-32 {crc32:08x}",
                found=f"{found:08x}",
                hint="Copy the file from where it was saved again; a disk or a transfer changed it.",
            )


class _Memory:
    """Decoded bytes, read as a file is."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read(self, path: str, offset: int, length: int) -> bytes:  # noqa: ARG002 - as files are read
        return bytes(self._data[offset : offset + length])

    def read_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> Sequence[memoryview]:  # noqa: ARG002
        return [self._data[offset : offset + length] for offset, length in ranges]


def open_compressed(
    folder: Folder, entry: FileEntry, place: tuple[int, int], most_bytes: int, name: str
) -> DecodedItem:
    """Decode the item at ``place`` (offset, length), of at most ``most_bytes``, and open the torch file in it."""
    import zstandard  # noqa: PLC0415 - few sources are compressed

    offset, length = place
    packed = folder.read(entry.path, offset, length)
    try:
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        data = reader.read(most_bytes + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise _damaged(entry.path, offset, name, "one zstd stream", str(error)[:200]) from None
    if len(data) > most_bytes:
        raise _damaged(entry.path, offset, name, f"at most {most_bytes} bytes after decoding", "more")
    return DecodedItem(open_torch_file(_Memory(memoryview(data)), entry.path, len(data)), memoryview(data))


def _damaged(path: str, offset: int, name: str, expected: str, found: str) -> CorruptFile:
    return CorruptFile(
        f"{path}: the compressed item of tensor {name} at byte {offset} is damaged: expected {expected}, "
        f"found {found}",
        file=path,
        tensor=name,
        expected=expected,
        found=found,
        hint="Fetch the file again from where it was saved.",
    )
