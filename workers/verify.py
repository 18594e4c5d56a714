"""Prove results: a model against its manifest, its own index and config."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from workers.destination import MODEL_FILES
from workers.errors import Cancelled, CorruptFile, IncompleteCheckpoint, UnshardError
from workers.manifest import DIGEST_PREFIX, MANIFEST_NAME, FileRecord, digest
from workers.safetensors_file import open_safetensors
from workers.storage import Folder, FolderAddress, check_path, open_folder

READ_BYTES = 4 << 20
INDEX_NAME = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
DOCUMENTATION = re.compile(r"(?:^|/)(?:LICENSE[^/]*|README\.md|\.gitattributes)$")


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found. ``problems`` is empty when everything is as it should be."""

    problems: tuple[str, ...]
    tensors: int
    bytes: int
    checks: tuple[str, ...] = ()
    """What was checked, in words."""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "equal": self.equal,
            "problems": list(self.problems),
            "tensors": self.tensors,
            "bytes": self.bytes,
            "checks": list(self.checks),
            **self.details,
        }


def prove_record(
    folder: Folder, record: FileRecord, parts: Sequence[tuple[int, int]], *, cancel: threading.Event | None = None
) -> None:
    """Read an output file again and compare the digest of its header and of each part.

    ``parts`` are (offset, length) in bytes. Raises ``CorruptFile`` for the first that differs.
    """
    header_bytes = parts[0][0] if parts else record.size_bytes
    ranges = [(0, header_bytes), *parts]
    digests = [record.header_digest, *record.part_digests]
    for (offset, length), expected in zip(ranges, digests, strict=True):
        if cancel is not None and cancel.is_set():
            raise Cancelled("stopped while verifying")
        found = _digest_of_range(folder, record.path, offset, length)
        if found != expected:
            raise CorruptFile(
                f"{record.path} is damaged: bytes {offset} to {offset + length} are not those that were written",
                file=record.path,
                expected=f"xxh3-128 {expected}",
                found=found,
                hint="Convert again; a disk or a transfer changed the file.",
            )


def _digest_of_range(folder: Folder, path: str, offset: int, length: int) -> str:
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(length, READ_BYTES)))
    for start in range(offset, offset + length, READ_BYTES):
        view = buffer[: min(READ_BYTES, offset + length - start)]
        folder.read_into(path, start, view)
        state.update(view)
    return state.hexdigest()


def verify_model(model: str, *, profile: str | None = None) -> Report:
    """Check one model folder: its manifest's digests where it has one, its index, headers and config."""
    folder = open_folder(FolderAddress(model, profile))
    try:
        if not folder.exists():
            raise _nothing_at(folder, model)
        return _Model(folder).verify()
    finally:
        folder.close()


def _files(number: int, kind: str) -> str:
    return f"{number} {kind} file{'s' * (number != 1)}"


def _nothing_at(folder: Folder, model: str) -> IncompleteCheckpoint:
    path = folder.local_path()
    if path is not None and Path(path).exists():
        return IncompleteCheckpoint(
            f"{model} is a file, not a folder", file=model, found="a file", hint="Give the folder of the model."
        )
    return IncompleteCheckpoint(f"there is nothing at {model}", file=model, hint="Check the path.")


def _may_be_loaded(path: str) -> bool:
    """Whether programs that load a model would read a file, if they found it there."""
    return path.endswith(WEIGHT_SUFFIXES) or bool(MODEL_FILES.fullmatch(path) and not DOCUMENTATION.search(path))


def _fill_the_rest(parts: Sequence[tuple[int, int]], size_bytes: int) -> bool:
    """Whether parts (offset, length) follow on each other up to the end of a file."""
    ends = [offset + length for offset, length in parts]
    return not parts or ([offset for offset, _ in parts[1:]] == ends[:-1] and ends[-1] == size_bytes)


class _Model:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._problems: list[str] = []
        self._checks: list[str] = []

    def verify(self) -> Report:
        paths = {file.path: file.size_bytes for file in self._folder.list()}
        weights = {path: size for path, size in paths.items() if path.endswith(".safetensors")}
        if not weights:
            self._problems.append("there is no .safetensors file")
        tensors = self._headers(weights)
        self._index(paths, tensors)
        self._config(paths)
        if MANIFEST_NAME in paths:
            self._manifest(paths)
        else:
            self._checks.append(f"no {MANIFEST_NAME}: digests could not be compared")
        return Report(
            tuple(self._problems), sum(map(len, tensors.values())), sum(weights.values()), tuple(self._checks)
        )

    def _headers(self, weights: dict[str, int]) -> dict[str, list[str]]:
        tensors: dict[str, list[str]] = {}
        for path, size in weights.items():
            try:
                tensors[path] = list(open_safetensors(self._folder, path, size).tensors)
            except UnshardError as error:
                self._problems.append(error.message)
        self._checks.append(f"headers of {_files(len(weights), 'weight')}")
        return tensors

    def _index(self, paths: dict[str, int], tensors: dict[str, list[str]]) -> None:
        root = {path: names for path, names in tensors.items() if "/" not in path}
        if len(root) > 1 and INDEX_NAME not in paths:
            self._problems.append(f"there are {len(root)} weight files but no {INDEX_NAME}")
        for index in [path for path in paths if path == INDEX_NAME or path.endswith(f"/{INDEX_NAME}")]:
            folder = index.removesuffix(INDEX_NAME)
            here = {path: names for path, names in tensors.items() if path.rpartition("/")[0] == folder[:-1]}
            self._indexed(index, {path.removeprefix(folder): names for path, names in here.items()})

    def _indexed(self, index: str, tensors: dict[str, list[str]]) -> None:
        """Compare an index with the tensors of the weight files beside it."""
        where = self._json(index).get("weight_map")
        if not isinstance(where, dict):
            self._problems.append(f"{index} has no weight_map")
            return
        found: dict[str, list[str]] = {}
        for path, names in tensors.items():
            for name in names:
                found.setdefault(name, []).append(path)
        for tensor in sorted(where.keys() | found.keys()):
            files = found.get(tensor, ["no file"])
            if files != [where.get(tensor)]:
                self._problems.append(
                    f"tensor {tensor}: {index} says {where.get(tensor, 'nothing')}, it is in {' and in '.join(files)}"
                )
        self._problems += [
            f"{path} is not in {index}; programs that load every weight file would read it"
            for path in sorted(tensors.keys() - {path for path in where.values() if isinstance(path, str)})
        ]
        self._checks.append(f"{index}: {len(where)} tensors")

    def _config(self, paths: dict[str, int]) -> None:
        if "config.json" not in paths:
            if "adapter_config.json" not in paths:
                self._problems.append("there is no config.json")
            return
        config = self._json("config.json")
        if not config.get("model_type"):
            self._problems.append("config.json names no model_type")
        self._checks.append("config.json")

    def _manifest(self, paths: dict[str, int]) -> None:
        manifest = self._json(MANIFEST_NAME)
        try:
            for entry in manifest["weights"]:
                self._weights_entry(entry, paths)
            for entry in manifest["files"]:
                self._file_entry(entry, paths)
            named = {entry["path"] for entry in (*manifest["weights"], *manifest["files"])}
        except (KeyError, TypeError, ValueError) as error:
            self._problems.append(f"{MANIFEST_NAME} is not a manifest: {error}")
            return
        self._problems += [
            f"{path} was not written by the conversion: {MANIFEST_NAME} does not name it"
            for path in sorted(paths.keys() - named - {MANIFEST_NAME})
            if _may_be_loaded(path)
        ]
        self._checks.append(
            f"digests of {_files(len(manifest['weights']), 'weight')} and {_files(len(manifest['files']), 'other')}"
        )

    def _weights_entry(self, entry: dict[str, Any], paths: dict[str, int]) -> None:
        path = check_path(entry["path"])
        parts = [(int(part["offset"]), int(part["length"])) for part in entry["parts"]]
        record = FileRecord(
            path, int(entry["size_bytes"]), entry["header_digest"], tuple(part["digest"] for part in entry["parts"])
        )
        if paths.get(path) != record.size_bytes:
            self._problems.append(f"{path}: expected {record.size_bytes} bytes, found {paths.get(path, 'no file')}")
        elif entry["digest"] != DIGEST_PREFIX + record.digest:
            self._problems.append(f"{MANIFEST_NAME} contradicts itself on {path}")
        elif not _fill_the_rest(parts, record.size_bytes):
            self._problems.append(f"{MANIFEST_NAME} has no digest for some bytes of {path}")
        else:
            try:
                prove_record(self._folder, record, parts)
            except CorruptFile as error:
                self._problems.append(error.message)

    def _file_entry(self, entry: dict[str, Any], paths: dict[str, int]) -> None:
        path = check_path(entry["path"])
        if path not in paths:
            self._problems.append(f"{path} is missing")
        elif DIGEST_PREFIX + digest(self._folder.read(path)) != entry["digest"]:
            self._problems.append(f"{path} was changed after the conversion")

    def _json(self, path: str) -> dict[str, Any]:
        try:
            content = json.loads(self._folder.read(path))
        except ValueError as error:
            self._problems.append(f"{path} is not JSON: {error}")
            return {}
        return content if isinstance(content, dict) else {}
