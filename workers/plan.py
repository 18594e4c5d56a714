"""``Plan``: everything that a conversion will do, decided before the first byte is written.

A plan is deterministic: the same source, options and version give the same bytes and the same fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from workers.checkpoint import Checkpoint
from workers.checks import ReplicaPair, doubtful_replicas
from workers.dtypes import ELEMENT_TYPES, size_bytes
from workers.errors import GeometryMismatch, InsufficientResources
from workers.expressions import Expression, Source, inputs_of
from workers.layout import Layout, inputs_per_element, lay_out, part_size, step_elements
from workers.manifest import MANIFEST_NAME, SCHEMA, digest, digest_of_list, program_version, version_of_files
from workers.mapping import Mapping, Target
from workers.merge import BLOCK_BYTES, Recipe
from workers.options import ConvertOptions
from workers.storage import check_path

WORKING_COPIES = 3
"""Copies of a block that a worker holds at most: the block, its source elements, and one intermediate."""

LARGEST_RESULT_BYTES = 64 << 40
"""Many times the largest model, and as much as can be planned in a minute."""

OPTIONS_WITHOUT_EFFECT = frozenset(
    {"overwrite", "resume", "verify", "source_profile", "destination_profile", "config_dir", "step", "role"}
)
"""Options that don't change the bytes of the result given the same source files; the fingerprint leaves them out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversion, decided."""

    checkpoint: Checkpoint
    mapping: Mapping
    options: ConvertOptions
    targets: tuple[Target, ...]
    """The mapping's targets in the order of writing."""
    layout: Layout
    doubtful_replicas: tuple[ReplicaPair, ...]
    """Replicas that must be compared byte by byte before the commit."""
    fingerprint: str

    @property
    def recipe(self) -> Recipe:
        return Recipe(self.checkpoint, self.targets, self.layout.parts)

    @property
    def bytes_total(self) -> int:
        """Bytes of all output files that hold weights, headers included."""
        return sum(file.size_bytes for file in self.layout.files)

    @property
    def paths(self) -> frozenset[str]:
        """All files of the result except the manifest, below the destination."""
        return frozenset(
            [file.path for file in self.layout.files]
            + [path for path, _ in (*self.layout.indexes, *self.mapping.files)]
            + [file.target_path for file in self.mapping.side_files]
        )

    @property
    def largest_unit_bytes(self) -> int:
        """The most bytes that some target makes a worker compute at once."""
        return max(BLOCK_BYTES, max(map(_unit_bytes, self.targets), default=0))

    @property
    def worker_bytes(self) -> int:
        """What a worker holds at most while it makes a part block by block."""
        return self.largest_unit_bytes * WORKING_COPIES

    @property
    def fetched_bytes(self) -> int:
        """What is read at most for one part, in bytes: a worker holds it all when the source is remote."""
        parts = self.layout.parts
        if not len(parts):
            return 0
        of_element = np.array([_input_bytes(target.expression) for target in self.targets], dtype=np.int64)
        read = (parts.end - parts.begin) * of_element[parts.target]
        return int(np.add.reduceat(read, parts.first_segment[:-1]).max())

    def summary(self) -> dict[str, Any]:
        """What a person or a program wants to know of the plan, as JSON values."""
        checkpoint = self.checkpoint
        lengths = self.layout.parts.length
        return {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "source": source_summary(checkpoint) | {"family": self.mapping.family},
            "options": self.options.to_dict(),
            "mapping": digest(self.options.mapping.encode()) if self.options.mapping is not None else None,
            "tensors": len(self.targets),
            "bytes_total": self.bytes_total,
            "files": [
                {
                    "name": file.path,
                    "size_bytes": file.size_bytes,
                    "tensors": file.stop_target - file.first_target,
                    "parts": file.stop_part - file.first_part,
                }
                for file in self.layout.files
            ],
            "small_files": sorted(self.paths - {file.path for file in self.layout.files}),
            "parts": len(lengths),
            "largest_part_bytes": int(lengths.max(initial=0)),
            "worker_memory_bytes": self.worker_bytes,
            "memory_bytes": self.options.memory_bytes,
            "dropped": [{"name": dropped.name, "reason": dropped.reason} for dropped in self.mapping.dropped],
            "notes": [*checkpoint.notes, *self.mapping.notes],
            "cost": self.cost(),
        }

    def cost(self) -> dict[str, int]:
        """A preview of what is read and written: bytes, and pieces of source tensors that are touched.

        A tensor is read whole, if only for its checksum; what several targets are made of, once for each of them.
        """
        needed = self._needed_bytes()
        tensors = self.checkpoint.tensors
        read = sum(max(tensors[tensor].size_bytes, size) for tensor, size in needed.items())
        pieces = sum(len(self.checkpoint.pieces.rows(tensor)) for tensor in needed)
        return {"bytes_read": read, "pieces_read": pieces, "bytes_written": self.bytes_total}

    def used_tensors(self) -> set[int]:
        """Numbers of the source tensors that something is made of."""
        return set(self._needed_bytes())

    def _needed_bytes(self) -> dict[int, int]:
        """Bytes that the targets need of each source tensor, added up."""
        needed: dict[int, int] = {}
        for target in self.targets:
            shape = target.expression.shape
            for need in target.expression.requires((0,) * len(shape), shape):
                size = size_bytes(self.checkpoint.tensors[need.tensor].dtype, need.sizes)
                needed[need.tensor] = needed.get(need.tensor, 0) + size
        return needed

    def table(self) -> Iterator[dict[str, Any]]:
        """One row for each target tensor: where it goes and what it is made of."""
        for file in self.layout.files:
            for number in range(file.first_target, file.stop_target):
                target = self.targets[number]
                expression = target.expression
                needs = expression.requires((0,) * len(expression.shape), expression.shape)
                yield {
                    "name": target.name,
                    "dtype": expression.dtype,
                    "shape": list(expression.shape),
                    "file": file.path,
                    "offset": int(self.layout.positions[number]),
                    "size_bytes": size_bytes(expression.dtype, expression.shape),
                    "sources": list(dict.fromkeys(self.checkpoint.tensors[need.tensor].name for need in needs)),
                    "operation": operation_name(target),
                }


def make_plan(checkpoint: Checkpoint, mapping: Mapping, options: ConvertOptions) -> Plan:
    """Lay out what a mapping asks for, and refuse what can't be right or can't be done in the memory given."""
    _check_names(mapping)
    _check_size(mapping)
    adapters = {path.rpartition("/")[0] for path, _ in mapping.files if path.endswith("adapter_config.json")}
    targets, layout = lay_out(mapping.targets, adapters, options.max_shard_bytes, part_size(options.memory_bytes))
    plan = Plan(
        checkpoint=checkpoint,
        mapping=mapping,
        options=options,
        targets=targets,
        layout=layout,
        doubtful_replicas=tuple(doubtful_replicas(checkpoint)),
        fingerprint=_fingerprint(checkpoint, mapping, options, targets),
    )
    needed = plan.largest_unit_bytes * WORKING_COPIES
    if needed > options.memory_bytes:
        largest = max(targets, key=_unit_bytes)
        raise InsufficientResources(
            f"tensor {largest.name} can't be made in pieces small enough for the memory budget: {needed} bytes are "
            f"needed, {options.memory_bytes} are allowed",
            tensor=largest.name,
            expected=f"{needed} bytes",
            found=f"{options.memory_bytes} bytes",
            hint=f"Allow more memory: --memory {-(-needed // 2**30)}GiB.",
        )
    return plan


def _check_size(mapping: Mapping) -> None:
    """Tensors can claim to be far larger than their files, by repeating what these hold."""
    sizes = [size_bytes(target.expression.dtype, target.expression.shape) for target in mapping.targets]
    if sum(sizes) > LARGEST_RESULT_BYTES:
        largest = mapping.targets[max(range(len(sizes)), key=sizes.__getitem__)]
        raise GeometryMismatch(
            f"the result would have {sum(sizes)} bytes, more than any model; tensor {largest.name} has {max(sizes)}",
            tensor=largest.name,
            expected=f"at most {LARGEST_RESULT_BYTES} bytes",
            found=f"{sum(sizes)} bytes",
            hint="The checkpoint holds expanded tensors, which are no weights: leave them out where it is saved.",
        )


def source_summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is known of a source, as JSON values."""
    dtypes: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.size_bytes
    return {
        "url": checkpoint.address.url,
        "format": checkpoint.format,
        "evidence": list(checkpoint.evidence),
        "layout": dict(checkpoint.layout),
        "fingerprint": source_fingerprint(checkpoint),
        "version": version_of_files(checkpoint.files),
        "files": len(checkpoint.files),
        "file_bytes": sum(file.size_bytes for file in checkpoint.files),
        "tensors": len(checkpoint.tensors),
        "pieces": len(checkpoint.pieces) + len(checkpoint.replicas),
        "bytes": sum(dtypes.values()),
        "dtypes": dtypes,
    }


def source_fingerprint(checkpoint: Checkpoint) -> str:
    """A digest that changes when the source's weights or its metadata do: paths, sizes, metadata digests, ETags.

    Neither times nor the place where the source lies are part of it, so a copy has the same fingerprint.
    """
    rows = [f"{file.path}\t{file.size_bytes}\t{file.digest}" for file in checkpoint.files]
    return digest_of_list([checkpoint.format, *rows])


def operation_name(target: Target) -> str:
    """How a target is made, in a word or two: the kinds of its expression's nodes from the outside in."""
    names = []
    node: Expression | None = target.expression
    while node is not None and not isinstance(node, Source):
        names.append(type(node).__name__.lower())
        node = next(inputs_of(node), None)
    return " of ".join(names) or "copy"


def _fingerprint(
    checkpoint: Checkpoint, mapping: Mapping, options: ConvertOptions, targets: tuple[Target, ...]
) -> str:
    effective = {name: value for name, value in options.to_dict().items() if name not in OPTIONS_WITHOUT_EFFECT}
    files = [f"{path}\t{digest(data)}" for path, data in mapping.files]
    files += [f"{file.source_path}\t{file.target_path}\t{file.size_bytes}" for file in mapping.side_files]
    rows = (f"{target.folder}\t{target.name}\t{target.expression!r}" for target in targets)
    made_by = [str(SCHEMA), program_version(), source_fingerprint(checkpoint), repr(sorted(effective.items()))]
    return digest_of_list([*made_by, *files, *rows])


def _check_names(mapping: Mapping) -> None:
    seen: set[tuple[str, str]] = set()
    for target in mapping.targets:
        if target.name == "__metadata__" or not _is_text(target.name):
            raise GeometryMismatch(
                f"a tensor is named {target.name!r}, which a safetensors file can't hold",
                tensor=repr(target.name),
                hint="The checkpoint is damaged or was made by hand; give the tensor another name there.",
            )
        if (target.folder, target.name) in seen:
            raise GeometryMismatch(
                f"two source tensors would both become {target.name}",
                tensor=target.name,
                hint="Their names differ only in a prefix that the mapping takes away; give a mapping of your own.",
            )
        seen.add((target.folder, target.name))
    for path in [*(path for path, _ in mapping.files), *(file.target_path for file in mapping.side_files)]:
        if check_path(path) == MANIFEST_NAME:
            raise GeometryMismatch(f"the result can't contain a file named {path}", file=path)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unit_bytes(target: Target) -> int:
    """Bytes of the largest block of a target, or of what it is made of, counted in the widest elements on its way."""
    expression = target.expression
    widths = [ELEMENT_TYPES[node.dtype].size_bytes for node in _nodes(expression)]
    inputs = inputs_per_element(expression) * max(widths[1:], default=0)
    return min(step_elements(expression, BLOCK_BYTES), _elements(target)) * max(widths[0], inputs)


def _input_bytes(expression: Expression) -> int:
    """Bytes that are read for an element, counted in the widest elements on its way."""
    return inputs_per_element(expression) * max(ELEMENT_TYPES[node.dtype].size_bytes for node in _nodes(expression))


def _nodes(expression: Expression) -> Iterator[Expression]:
    """The first of each kind of input, downwards: inputs of one node are alike."""
    yield expression
    for inner in islice(inputs_of(expression), 3):
        yield from _nodes(inner)


def _elements(target: Target) -> int:
    return math.prod(target.expression.shape)
