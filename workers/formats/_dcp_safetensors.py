"""DCP's Hugging Face output: each rank's chunks in safetensors files, with their offsets in the files' own metadata.

The full shape of a tensor is written nowhere: it is where its chunks reach to. So files that are missing at the end
are known only by their numbers.
Source: torch ``distributed/checkpoint/hf_storage.py`` and ``_consolidate_hf_safetensors.py``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import xxhash

from workers.checkpoint import SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import CorruptFile, GeometryMismatch, IncompleteCheckpoint
from workers.formats._format import Listing
from workers.formats._reading import read_ahead
from workers.geometry import Shape, contiguous_strides
from workers.pickle_records import is_count
from workers.safetensors_file import SafetensorsFile, StoredTensor, open_safetensors
from workers.storage import FileEntry

SHARDING = "DCP_SHARDING_INFO"
SHARD = re.compile(r"shard-(?P<rank>\d{5})-model-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
"""Rank (from 1), number of the file among those of the rank (from 1), and the highest such number."""


@dataclass(slots=True)
class _Chunk:
    file: int
    path: str
    offsets: Shape
    stored: StoredTensor


def sharded_files(listing: Listing, prefix: str = "") -> dict[str, FileEntry]:
    """The files of such an output in a subfolder, by name."""
    return {name: entry for name, entry in listing.files(prefix).items() if SHARD.fullmatch(name)}


def add_sharded_tensors(
    builder: CheckpointBuilder, listing: Listing, prefix: str, files: dict[str, FileEntry]
) -> tuple[str, ...]:
    """Add the tensors of all files; returns notes. Raises ``IncompleteCheckpoint`` where a file is missing."""
    _check_complete(files, prefix)
    chunks: dict[str, list[_Chunk]] = {}

    def open_file(name: str) -> tuple[SafetensorsFile, str]:
        return open_safetensors(listing.folder, files[name].path, files[name].size_bytes), name

    with read_ahead(listing.folder, sorted(files), open_file) as coming:
        for opened, name in coming:
            _add_file(builder, chunks, opened, (files[name], int(name.split("-")[1]) - 1))
    for tensor, pieces in chunks.items():
        _add(builder, tensor, pieces)
    notes = ["shapes of tensors are those that their chunks reach to: this format does not write them down"]
    matches = [match for name in files if (match := SHARD.fullmatch(name))]
    count, numbers = int(matches[0]["count"]), {int(match["number"]) for match in matches}
    absent = [number for number in range(1, count + 1) if number not in numbers]
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (" ..." if absent[8:] else "")
        notes.append(f"no rank has a file numbered {shown} of {count}: where one was written, its tensors are missing")
    return tuple(notes)


def _add_file(
    builder: CheckpointBuilder, chunks: dict[str, list[_Chunk]], opened: SafetensorsFile, of: tuple[FileEntry, int]
) -> None:
    """Add a file, and its chunks to those of each tensor; ``of`` is its entry and rank."""
    entry, rank = of
    digest = xxhash.xxh3_128_hexdigest(opened.header)
    file = builder.add_file(SourceFile(entry.path, entry.size_bytes, rank, digest, entry.version))
    offsets = _offsets(opened)
    for tensor, stored in opened.tensors.items():
        begins = offsets.get(tensor, (0,) * len(stored.shape))
        if len(begins) != len(stored.shape):
            raise _bad_offsets(entry.path, tensor, f"{len(stored.shape)} offsets", str(list(begins)))
        chunks.setdefault(tensor, []).append(_Chunk(file, entry.path, begins, stored))


def _check_complete(files: dict[str, FileEntry], prefix: str) -> None:
    found = [match for name in files if (match := SHARD.fullmatch(name))]
    counts = {match["count"] for match in found}
    if len(counts) > 1:
        raise GeometryMismatch(
            f"the files are of different saves: some are one of {', '.join(sorted(counts))}",
            file=min(files),
            expected="files of one save",
            found=", ".join(sorted(counts)),
            hint="Bring together the files of one checkpoint, in a folder of their own.",
        )
    ranks = {int(match["rank"]) for match in found}
    absent = [rank for rank in range(1, max(ranks) + 1) if rank not in ranks]
    if absent:
        names = [f"shard-{rank:05d}-model-*-of-{next(iter(counts))}.safetensors" for rank in absent]
        raise IncompleteCheckpoint(
            f"files of ranks are missing in {prefix or 'the folder'}: {', '.join(names[:8])}",
            file=names[0],
            expected=f"files of ranks 1 to {max(ranks)}",
            found=f"files of {len(ranks)} ranks",
            hint="Without a shared disk each node saves only its own ranks: copy them together.",
        )


def _offsets(opened: SafetensorsFile) -> dict[str, Shape]:
    text = opened.metadata.get(SHARDING)
    if text is None:
        raise _bad_offsets(opened.path, None, f"{SHARDING} in the header's metadata", "none")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_offsets(opened.path, None, f"{SHARDING} as JSON", str(error)[:200]) from None
    offsets = {}
    for name, entry in told.items() if isinstance(told, dict) else ():
        values = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(values, list) or not all(map(is_count, values)):
            raise _bad_offsets(opened.path, name, "saved_offsets", str(values)[:80])
        offsets[name] = tuple(values)
    return offsets


def _add(builder: CheckpointBuilder, name: str, chunks: list[_Chunk]) -> None:
    dimensions = {len(chunk.offsets) for chunk in chunks}
    if len(dimensions) > 1:
        raise _bad_offsets(chunks[-1].path, name, "chunks of as many dimensions", f"{sorted(dimensions)}")
    shape = tuple(
        max(chunk.offsets[dim] + chunk.stored.shape[dim] for chunk in chunks) for dim in range(dimensions.pop())
    )
    number = builder.add_tensor(name, chunks[0].stored.dtype, shape)
    for chunk in chunks:
        stored = chunk.stored
        if stored.dtype != chunks[0].stored.dtype:
            raise _bad_offsets(chunk.path, name, f"chunks of {chunks[0].stored.dtype}", stored.dtype)
        storage = builder.add_storage(chunk.file, stored.offset, stored.length_bytes, None)
        box = chunk.offsets, stored.shape
        builder.add_piece(number, storage, stored.offset, box, contiguous_strides(stored.shape))


def _bad_offsets(path: str, tensor: str | None, expected: str, found: str) -> CorruptFile:
    what = f" for tensor {tensor}" if tensor is not None else ""
    return CorruptFile(
        f"{path}: expected {expected}{what}, found {found}",
        file=path,
        tensor=tensor,
        expected=expected,
        found=found,
        hint="The file is damaged or no output of torch's HuggingFaceStorageWriter; fetch it again.",
    )
