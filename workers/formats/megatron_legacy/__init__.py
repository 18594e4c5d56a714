"""Megatron's checkpoints of one file per model-parallel rank: Megatron-LM's ``torch`` format and verl's before 0.4.

``folders`` finds the rank files, ``rank_file`` reads one, ``topology`` knows the grid of ranks, ``cuts`` how each
parameter is cut, ``assemble`` puts whole tensors together.
Sources: Megatron-LM ``training/checkpointing.py``; verl ``utils/checkpoint/megatron_checkpoint_manager.py`` (0.3).
"""

from __future__ import annotations

from dataclasses import replace

from workers.checkpoint import Checkpoint
from workers.errors import CorruptFile, IncompleteCheckpoint
from workers.families.megatron import NAMING, VERL_NAMING
from workers.families.operations import NO_FACTS
from workers.families.registry import model_facts
from workers.formats._checkpoint_of import checkpoint_of
from workers.formats._format import Detection, Format, Listing
from workers.formats._megatron_folders import MegatronFolder, choose_folder, model_files, places
from workers.formats._model_folder import CONFIG, ModelFiles
from workers.formats._reading import read_ahead
from workers.formats._steps import STILL_WRITING
from workers.formats.megatron_legacy.assemble import (
    Assembly,
    RankPart,
    check_same_names,
    expert_count,
    first_layers,
    has_gates,
)
from workers.formats.megatron_legacy.folders import holds, rank_folders
from workers.formats.megatron_legacy.rank_file import RankContent, read_rank_file
from workers.formats.megatron_legacy.topology import Grid, check_all_there, check_one_run, find_grid
from workers.options import ConvertOptions
from workers.storage import FileEntry, Folder

NAME = "megatron-legacy"
SIGNS = "mp_rank_<TP>[_<PP>][_<EP>]/model_optim_rng.pt or model.pt, here or in iter_<N>/, release/, <role>/model/"


def detect(listing: Listing) -> Detection | None:
    """Recognise a folder of rank folders, of a step or role around it, or of a run."""
    place = next(places(listing, holds), None)
    if place is None:
        return None
    count = len(rank_folders(listing, place))
    return Detection((f"{count} rank folders mp_rank_* in {place or 'the folder itself'}",))


def open_megatron_legacy(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the checkpoint of the iteration and role that the options or the trainer's own files name."""
    folder = choose_folder(listing, options, holds)
    model = model_files(listing, folder, options)
    facts = NO_FACTS if model.config is None else model_facts(model.config, options)
    grid, parts = _read(listing, folder)
    if model.config is None and grid.tensor > 1 and _is_verl(parts[0]):
        raise _no_config(model.looked_in)
    paths = {part.rank: part.content.entry.path for part in parts}
    arguments = parts[0].content.arguments
    experts = options.experts or expert_count(facts, arguments)
    check_same_names(parts)
    assembly = Assembly(grid, facts, first_layers(parts, paths), experts, has_gates(arguments))
    for part in parts:
        assembly.add(part)
    builder = assembly.builder
    if not builder.tensors:
        path = parts[0].content.entry.path
        raise CorruptFile(
            f"{path} and the other rank files hold no tensors", file=path, found="no tensors", hint=STILL_WRITING
        )
    whole = checkpoint_of(listing, builder, model, (NAME, VERL_NAMING if _is_verl(parts[0]) else NAMING))
    notes = [*folder.notes]
    if len(whole.replicas):
        notes.append(f"{len(whole.replicas)} pieces are copies that other ranks hold, too; they must be equal")
    return replace(
        whole,
        layout=_layout(grid, parts),
        evidence=_evidence(folder, parts, model),
        notes=tuple(notes),
        left_out=_left_out(parts),
    )


def _read(listing: Listing, folder: MegatronFolder) -> tuple[Grid, list[RankPart]]:
    """Read the rank files, each with its place in the grid, by stage. What is missing shows once the first is read."""
    folders = rank_folders(listing, folder.path)
    first = read_rank_file(listing.folder, folders[0].entry)
    grid, ranks = find_grid(folders, first)
    check_all_there(grid, ranks, folder.path, first.arguments)
    contents = [first, *_read_others(listing.folder, [other.entry for other in folders[1:]])]
    check_one_run(contents)
    parts = [RankPart(rank, content) for rank, content in zip(ranks, contents, strict=True)]
    return grid, sorted(parts, key=lambda part: (part.rank.pipeline, part.rank.tensor, part.rank.expert))


def _read_others(folder: Folder, entries: list[FileEntry]) -> list[RankContent]:
    """Read rank files one after the other, or several at a time where waiting for a store is what takes time."""
    with read_ahead(folder, entries, lambda entry: read_rank_file(folder, entry)) as contents:
        return list(contents)


def _no_config(looked_in: str) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(
        f"{CONFIG} (looked in {looked_in}) is missing: without it the queries, keys and values of each rank can't be "
        "told apart",
        file=CONFIG,
        expected="the model's config.json",
        found="none",
        hint="verl 0.3 wrote none: name a folder with the model's config.json with the option config_dir.",
    )


def _left_out(parts: list[RankPart]) -> tuple[tuple[str, str], ...]:
    count = sum(part.content.extra_states for part in parts)
    return ((f"*._extra_state ({count} entries)", "TransformerEngine's own state"),) if count else ()


def _is_verl(part: RankPart) -> bool:
    names = [held.name for stage in part.content.stages for held in stage]
    return any(name.startswith(("model.layers.", "model.embed_tokens.")) for name in names)


def _layout(grid: Grid, parts: list[RankPart]) -> dict[str, int]:
    return {
        "tensor_parallel": grid.tensor,
        "pipeline_parallel": grid.pipeline,
        "virtual_stages": max(len(part.content.stages) for part in parts),
        "expert_parallel": grid.expert,
        "expert_tensor_parallel": grid.expert_tensor,
        "rank_files": len(parts),
    }


def _evidence(folder: MegatronFolder, parts: list[RankPart], model: ModelFiles) -> tuple[str, ...]:
    lines = [f"{len(parts)} rank files mp_rank_* in {folder.path or 'the folder itself'}"]
    if parts[0].content.arguments:
        lines.append(f"arguments of the training run in {parts[0].content.entry.path}")
    return (*lines, *model.evidence, *folder.notes)


FORMAT = Format(
    NAME,
    "Megatron-LM torch and verl rank files (mp_rank_*)",
    SIGNS,
    detect,
    open_megatron_legacy,
    frozenset({"step", "role", "experts"}),
)
