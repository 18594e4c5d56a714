"""Prove results: a model against its manifest, its own index and config; two models against each other.

Comparing is a plan whose parts are compared instead of written: the same blocks, the same readers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import xxhash

from workers.arithmetic import NumpyArithmetic
from workers.dtypes import ELEMENT_TYPES
from workers.errors import Cancelled, CorruptFile, IncompleteCheckpoint, UnshardError
from workers.manifest import DIGEST_PREFIX, MANIFEST_NAME, FileRecord, digest
from workers.merge import Block, SourceReader, blocks_of
from workers.plan import Plan
from workers.safetensors_file import open_safetensors
from workers.storage import Folder, FolderAddress, check_path, open_folder

READ_BYTES = 4 << 20
MOST_DIFFERENCES = 20
"""Differences that a report names one by one."""
THREADS = 2


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


# --- one model -------------------------------------------------------------------------------------------------
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
            raise IncompleteCheckpoint(f"there is nothing at {model}", file=model, hint="Check the path.")
        return _Model(folder).verify()
    finally:
        folder.close()


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
        self._checks.append(f"headers of {len(weights)} weight files")
        return tensors

    def _index(self, paths: dict[str, int], tensors: dict[str, list[str]]) -> None:
        name = "model.safetensors.index.json"
        root = {path: names for path, names in tensors.items() if "/" not in path}
        if name not in paths:
            if len(root) > 1:
                self._problems.append(f"there are {len(root)} weight files but no {name}")
            return
        where = self._json(name).get("weight_map")
        if not isinstance(where, dict):
            self._problems.append(f"{name} has no weight_map")
            return
        found = {tensor: path for path, names in root.items() for tensor in names}
        for tensor in sorted(where.keys() | found.keys()):
            if where.get(tensor) != found.get(tensor):
                self._problems.append(
                    f"tensor {tensor}: {name} says {where.get(tensor, 'nothing')}, "
                    f"it is in {found.get(tensor, 'no file')}"
                )
        self._problems += [
            f"{path} is not in {name}; programs that load every weight file would read it"
            for path in sorted(root.keys() - set(where.values()))
        ]
        self._checks.append(f"{name}: {len(where)} tensors")

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
        except (KeyError, TypeError, ValueError) as error:
            self._problems.append(f"{MANIFEST_NAME} is not a manifest: {error}")
            return
        self._checks.append(
            f"digests of {len(manifest['weights'])} weight files and {len(manifest['files'])} other files"
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


# --- two models ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Difference:
    target: int
    elements: int
    largest: float
    first: int
    """Row-major position of the first differing element."""
    first_values: tuple[float, float]


def compare_plans(a: Plan, b: Plan, *, atol: float = 0.0) -> Report:
    """Compare what two sources make of themselves: names, dtypes, shapes and every element.

    ``atol`` 0 means the same bits; otherwise floating-point elements may differ by that much.
    """
    problems = list(_structural_problems(a, b))
    numbers_b = {(target.folder, target.name): number for number, target in enumerate(b.targets)}
    shared = {
        number: numbers_b[key]
        for number, target in enumerate(a.targets)
        if (key := (target.folder, target.name)) in numbers_b and _kind(a, number) == _kind(b, numbers_b[key])
    }
    differences = _compare_values(a, b, shared, atol)
    problems += [_difference_text(a, difference) for difference in differences[:MOST_DIFFERENCES]]
    if len(differences) > MOST_DIFFERENCES:
        problems.append(f"… and {len(differences) - MOST_DIFFERENCES} more tensors differ")
    return Report(
        problems=tuple(problems),
        tensors=len(shared),
        bytes=sum(_bytes(a, number) for number in shared),
        checks=("names, dtypes and shapes", "every bit" if atol == 0 else f"values within {atol:g}"),
        details={"different_tensors": [a.targets[difference.target].name for difference in differences]},
    )


def _kind(plan: Plan, number: int) -> tuple[str, tuple[int, ...]]:
    return plan.targets[number].expression.dtype, plan.targets[number].expression.shape


def _bytes(plan: Plan, number: int) -> int:
    dtype, shape = _kind(plan, number)
    return ELEMENT_TYPES[dtype].size_bytes * prod(shape)


def _structural_problems(a: Plan, b: Plan) -> Iterator[str]:
    kinds = [{_full_name(plan, n): _kind(plan, n) for n in range(len(plan.targets))} for plan in (a, b)]
    for one, other, label in ((kinds[0], kinds[1], "second"), (kinds[1], kinds[0], "first")):
        missing = sorted(one.keys() - other.keys())
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            yield f"the {label} model lacks {len(missing)} tensors: {', '.join(missing[:5])}{more}"
    for name in sorted(kinds[0].keys() & kinds[1].keys()):
        (dtype_a, shape_a), (dtype_b, shape_b) = kinds[0][name], kinds[1][name]
        if (dtype_a, shape_a) != (dtype_b, shape_b):
            yield f"tensor {name}: {dtype_a} {list(shape_a)} in the first, {dtype_b} {list(shape_b)} in the second"


def _full_name(plan: Plan, number: int) -> str:
    target = plan.targets[number]
    return f"{target.folder}:{target.name}" if target.folder else target.name


def _compare_values(a: Plan, b: Plan, shared: dict[int, int], atol: float) -> list[_Difference]:
    found: dict[int, _Difference] = {}
    lock = threading.Lock()
    folders = [open_folder(plan.checkpoint.address) for plan in (a, b)]
    readers = [
        (plan, SourceReader(plan.checkpoint, folder, NumpyArithmetic()))
        for plan, folder in zip((a, b), folders, strict=True)
    ]

    def compare(part: int) -> None:
        for block in blocks_of(a.recipe, part):
            if block.target in shared and (difference := _compare_block(readers, block, shared, atol)):
                with lock:
                    found[block.target] = _merged(found.get(block.target), difference)

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(compare, range(len(a.layout.parts))):
                pass
    finally:
        for folder in folders:
            folder.close()
    return [found[number] for number in sorted(found)]


def _compare_block(
    readers: Sequence[tuple[Plan, SourceReader]], block: Block, shared: dict[int, int], atol: float
) -> _Difference | None:
    values = []
    for (plan, reader), target in zip(readers, (block.target, shared[block.target]), strict=True):
        expression = plan.targets[target].expression
        out = np.empty(block.sizes, dtype=ELEMENT_TYPES[expression.dtype].numpy_type)
        expression.fill(out, block.offsets, SourceReader(plan.checkpoint, reader.folder, reader.arithmetic))
        values.append(out.reshape(-1))
    unequal = values[0] != values[1]
    if not unequal.any():
        return None
    dtype, shape = _kind(readers[0][0], block.target)
    numbers = [_as_numbers(value[unequal], dtype) for value in values]
    with np.errstate(invalid="ignore"):
        distance = np.abs(numbers[0] - numbers[1])
    beyond = np.ones(distance.shape, dtype=bool) if atol == 0 else ~(distance <= atol)
    if not beyond.any():
        return None
    first = int(np.flatnonzero(unequal)[np.flatnonzero(beyond)[0]])
    start = int(np.ravel_multi_index(block.offsets, shape)) if shape else 0
    position = int(np.flatnonzero(beyond)[0])
    return _Difference(
        target=block.target,
        elements=int(beyond.sum()),
        largest=float(np.nanmax(distance)) if not np.isnan(distance).all() else float("nan"),
        first=start + first,
        first_values=(float(numbers[0][position]), float(numbers[1][position])),
    )


def _as_numbers(elements: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    if dtype == "F64":
        return elements.view(np.float64)
    if dtype in ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"):
        return NumpyArithmetic().as_float32(elements, dtype).astype(np.float64)
    if dtype.startswith("I"):
        return elements.view(np.dtype(f"i{elements.itemsize}")).astype(np.float64)
    return elements.astype(np.float64)


def _merged(before: _Difference | None, new: _Difference) -> _Difference:
    if before is None:
        return new
    earliest = min(before, new, key=lambda difference: difference.first)
    return _Difference(
        target=new.target,
        elements=before.elements + new.elements,
        largest=max(before.largest, new.largest),
        first=earliest.first,
        first_values=earliest.first_values,
    )


def _difference_text(plan: Plan, difference: _Difference) -> str:
    _, shape = _kind(plan, difference.target)
    index = list(map(int, np.unravel_index(difference.first, shape))) if shape else []
    a, b = difference.first_values
    return (
        f"tensor {_full_name(plan, difference.target)}: {difference.elements} of {prod(shape)} elements differ, "
        f"by up to {difference.largest:g}; first at {index}: {a:g} and {b:g}"
    )
