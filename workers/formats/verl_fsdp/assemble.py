"""Put the rank files of one checkpoint together: compare what they say, then prove that they hold everything once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from workers.checkpoint import Checkpoint, PieceTable, SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import CorruptFile, GeometryMismatch, IncompleteCheckpoint
from workers.formats._checkpoint_of import checkpoint_of
from workers.formats._distributed import Sharding
from workers.formats._format import Listing, join
from workers.formats._mesh import placement_text
from workers.formats._model_folder import ModelFiles, find_model_files
from workers.formats._steps import STILL_WRITING
from workers.formats.verl_fsdp.adapter import read_adapter
from workers.formats.verl_fsdp.folders import FSDP_CONFIG, RankFiles
from workers.formats.verl_fsdp.ranks import RankTable, first_difference
from workers.formats.verl_fsdp.reading import read_ranks
from workers.options import ConvertOptions
from workers.tolerance import has_refused

_ONE_CHECKPOINT = "Bring together the files of one checkpoint: same run, same step, same role."


def assemble(listing: Listing, ranks: RankFiles, options: ConvertOptions) -> Checkpoint:
    """Read the rank files that are there and make a ``Checkpoint`` of them."""
    _check_sizes(ranks)
    builder = CheckpointBuilder()
    first: RankTable | None = None
    with closing(read_ranks(listing.folder, ranks)) as tables:
        for table in tables:
            _check_origin(table, ranks.world_size)
            if first is None:
                first = table
                for index, name in enumerate(table.names):
                    builder.add_tensor(name, table.kind(index).dtype, table.kind(index).shape)
            else:
                _check_same(table, first)
            _add(builder, table, first)
    if first is None or not first.names:
        raise CorruptFile("the rank files hold no tensors", hint=STILL_WRITING)
    folder = ranks.folder.path
    model = find_model_files(listing, {join(folder, "huggingface"): True, folder: False}, options)
    whole = checkpoint_of(listing, builder, model, ("verl-fsdp", "transformers"), partial(_explained, ranks))
    return replace(
        whole,
        adapter=read_adapter(listing, folder, first.names, options),
        layout=_layout(first, ranks),
        evidence=_evidence(ranks, model),
        notes=_notes(ranks, first, whole.replicas),
        missing=(*((ranks.missing_text(),) if ranks.missing else ()), *model.missing),
    )


def _check_sizes(ranks: RankFiles) -> None:
    for rank, entry in ranks.files.items():
        if entry.size_bytes == 0:
            raise CorruptFile(
                f"{entry.path} (rank {rank}) is empty",
                file=entry.path,
                found="0 bytes",
                hint=f"The disk may have been full when it was saved. {STILL_WRITING}",
            )


def _check_origin(table: RankTable, world_size: int) -> None:
    """The file's own records of how many processes saved it, and which of them, must agree with its name.

    A mesh of torch before 2.11 may be a part of a larger one without saying so: then the largest counts.
    """
    totals = {mesh.total_ranks for mesh in table.meshes if not mesh.is_part} | {size for size, _ in table.groups}
    partial = [mesh.total_ranks for mesh in table.meshes if mesh.is_part]
    totals |= {max(partial)} if partial else set()
    wrong = next((total for total in sorted(totals) if total != world_size), None)
    path, rank = table.entry.path, table.rank
    if wrong is not None:
        raise GeometryMismatch(
            f"{path} (rank {rank}) was saved by a run with {wrong} processes, but by its name the checkpoint is of a "
            f"run with {world_size}",
            file=path,
            expected=f"{world_size} processes",
            found=f"{wrong} processes",
            hint=_ONE_CHECKPOINT,
        )
    claimed = {mesh.rank for mesh in table.meshes if mesh.rank is not None} | {rank for _, rank in table.groups}
    other = next((claim for claim in sorted(claimed) if claim != rank), None)
    if other is not None:
        raise GeometryMismatch(
            f"{path} is named for rank {rank}, but was saved by rank {other}",
            file=path,
            expected=f"rank {rank}",
            found=f"rank {other}",
            hint=f"The file was renamed or copied over another. {_ONE_CHECKPOINT}",
        )


def _check_same(table: RankTable, first: RankTable) -> None:
    difference = first_difference(table, first)
    if difference is None:
        return
    name, here, there = difference
    path, rank, other = table.entry.path, table.rank, first.entry.path
    if here is None or there is None:
        has, lacks = (other, path) if here is None else (path, other)
        raise GeometryMismatch(
            f"tensor {name} is in {has} but not in {lacks}; all ranks save the same names",
            file=lacks,
            tensor=name,
            expected=name,
            found="no such tensor",
            hint=_ONE_CHECKPOINT,
        )
    expected, found = (f"{kind.dtype} {list(kind.shape)}, {kind.sharding}" for kind in (there, here))
    raise GeometryMismatch(
        f"tensor {name} is {found} in {path} (rank {rank}), but {expected} in {other}",
        file=path,
        tensor=name,
        expected=expected,
        found=found,
        hint=_ONE_CHECKPOINT,
    )


def _add(builder: CheckpointBuilder, table: RankTable, first: RankTable) -> None:
    """Add a file's pieces in bulk; tensors are numbered as in the first file."""
    entry = table.entry
    file = builder.add_file(SourceFile(entry.path, entry.size_bytes, table.rank, table.digest, entry.version))
    storages = np.frombuffer(table.storages, dtype=np.int64).reshape(-1, 3)
    first_storage = builder.add_storages(file, storages)
    boxes = np.array([builder.add_box(*box) for box in table.boxes], dtype=np.int64)
    rows = np.frombuffer(table.pieces, dtype=np.int64).reshape(-1, 4).copy()
    if table.names != first.names:
        numbers = {name: number for number, name in enumerate(first.names)}
        rows[:, 0] = np.array([numbers[name] for name in table.names], dtype=np.int64)[rows[:, 0]]
    rows[:, 1] += first_storage
    rows[:, 3] = boxes[rows[:, 3]]
    builder.add_pieces(rows)


def _explained(ranks: RankFiles, gap: IncompleteCheckpoint) -> IncompleteCheckpoint:
    """A gap in a tensor, told by the ranks whose files are missing, where some are."""
    if not ranks.missing:
        return gap
    count = sum(last - first + 1 for first, last in ranks.missing)
    of = f"{_spans(ranks)} of {ranks.world_size}, numbered from 0"
    return IncompleteCheckpoint(
        f"{ranks.missing_text()} {'is' if count == 1 else 'are'} missing ({of}): {gap.message}",
        file=ranks.missing_text().partition(" to ")[0].partition(",")[0],
        tensor=gap.tensor,
        expected=f"the files of {ranks.world_size} ranks",
        found=f"{len(ranks.files)} file{'s' if len(ranks.files) != 1 else ''}",
        hint=f"Without a shared disk each node saves only its own ranks: copy them together. {STILL_WRITING}",
    )


def _spans(ranks: RankFiles) -> str:
    text = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranks.missing)
    return f"rank{'s' if ' ' in text else ''} {text}"


def _layout(first: RankTable, ranks: RankFiles) -> Mapping[str, Any]:
    kinds = Counter(_placements(first.kind(index).sharding) for index in range(len(first.names)))
    meshes = {(mesh.sizes, mesh.names) for mesh in first.meshes if not mesh.sizes or mesh.names}
    return {
        "world_size": ranks.world_size,
        "ranks_present": len(ranks.files),
        "fsdp_version": ranks.fsdp_version,
        "meshes": [dict(zip(names, sizes, strict=False)) for sizes, names in sorted(meshes, reverse=True)],
        "placements": dict(kinds.most_common()),
    }


def _placements(sharding: Sharding) -> str:
    if sharding.placements:
        return ", ".join(map(placement_text, sharding.placements))
    return "ShardedTensor" if sharding.explicit else "whole on each rank"


def _evidence(ranks: RankFiles, model: ModelFiles) -> tuple[str, ...]:
    where = ranks.folder.path or "the folder itself"
    lines = [f"{len(ranks.files)} of {ranks.world_size} rank files {ranks.file_name('*')} in {where}"]
    if ranks.fsdp_version is not None:
        lines.append(f"{FSDP_CONFIG}: FSDP{ranks.fsdp_version}")
    return (*lines, *model.evidence, *ranks.notes)


def _notes(ranks: RankFiles, first: RankTable, replicas: PieceTable) -> tuple[str, ...]:
    notes = list(ranks.notes)
    if ranks.missing and not has_refused():
        notes.append(f"not there, and not needed: {ranks.missing_text()}; other ranks hold the same pieces")
    if len(replicas):
        notes.append(f"{len(replicas)} pieces are copies that other ranks hold, too; they must be equal")
    if first.ignored:
        notes.append(f"left out, since they are no tensors: {', '.join(first.ignored[:8])}")
    return tuple(notes)
