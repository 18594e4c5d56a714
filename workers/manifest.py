"""What a finished model says of itself, and what an unfinished one remembers.

``unshard.json`` is written last and is the commit point. Until then a journal holds one ``FileRecord`` for each
output file that is whole, so that a later attempt at the same plan keeps it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from workers.checkpoint import SourceFile
from workers.checksums import RangeChecksum

MANIFEST_NAME = "unshard.json"
SCHEMA = 1
DIGEST_PREFIX = "xxh3-128:"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An output file that is whole: enough to prove it later without the source."""

    path: str
    size_bytes: int
    header_digest: str
    part_digests: tuple[str, ...]
    """xxh3-128 of each part, hexadecimal, in the order of the file."""
    etag: str | None = None
    source_version: str = ""
    """Digest of the versions of the source's files: a record holds only while none of them was changed."""
    checksums: tuple[RangeChecksum, ...] = ()
    """Ranges of source storages that were read for this file and aren't part of a proved whole yet."""
    infinite_tensors: tuple[str, ...] = ()
    zero_tensors: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of the file: that of the list of its header's and parts' digests."""
        return digest_of_list((self.header_digest, *self.part_digests))

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> FileRecord:
        """Raises ``ValueError``, ``TypeError`` or ``KeyError`` for anything that isn't a record."""
        values = json.loads(data)
        for name in ("part_digests", "infinite_tensors", "zero_tensors"):
            values[name] = tuple(values[name])
        values["checksums"] = tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in values["checksums"])
        return cls(**values)


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_list(digests: Iterable[str]) -> str:
    """The digest that stands for a list of digests."""
    return digest("\n".join(digests).encode())


def version_of_files(files: Iterable[SourceFile]) -> str:
    """A digest that changes when any of a source's files is written anew, whether its metadata shows it or not."""
    return digest_of_list(f"{file.path}\t{file.version}" for file in files)


def program_version() -> str:
    """The installed version of unshard."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - inspecting needs no version

    try:
        return version("unshard")
    except PackageNotFoundError:
        return "0+unknown"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A small file that was written beside the weights."""

    path: str
    size_bytes: int
    digest: str


def build_manifest(
    plan_summary: Mapping[str, Any],
    weights: Sequence[tuple[FileRecord, Sequence[tuple[int, int]]]],
    small_files: Sequence[WrittenFile],
    attempt: str,
) -> dict[str, Any]:
    """The manifest of a finished model. ``weights`` pairs each record with its parts' (offset, length) in bytes."""
    return {
        "schema": SCHEMA,
        "unshard": program_version(),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "attempt": attempt,
        "plan": plan_summary["fingerprint"],
        "source": plan_summary["source"],
        "options": plan_summary["options"],
        **({"mapping": DIGEST_PREFIX + plan_summary["mapping"]} if plan_summary["mapping"] else {}),
        "tensors": plan_summary["tensors"],
        "bytes_total": plan_summary["bytes_total"],
        "weights": [_weights_entry(record, parts) for record, parts in weights],
        "files": [
            {"path": file.path, "size_bytes": file.size_bytes, "digest": DIGEST_PREFIX + file.digest}
            for file in small_files
        ],
        "dropped": plan_summary["dropped"],
        "notes": plan_summary["notes"],
        "warnings": value_warnings([record for record, _ in weights]),
    }


def _weights_entry(record: FileRecord, parts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {
        "path": record.path,
        "size_bytes": record.size_bytes,
        "digest": DIGEST_PREFIX + record.digest,
        "header_digest": record.header_digest,
        "parts": [
            {"offset": offset, "length": length, "digest": part}
            for (offset, length), part in zip(parts, record.part_digests, strict=True)
        ],
    }


def value_warnings(records: Iterable[FileRecord]) -> list[str]:
    """What a user should know of the weights' values."""
    warnings = []
    for record in records:
        warnings += [f"tensor {name} in {record.path} holds infinities or NaN" for name in record.infinite_tensors]
        warnings += [f"tensor {name} in {record.path} is all zeros" for name in record.zero_tensors]
    return warnings
