"""Find the rank files of one verl checkpoint: which step, which role, which world size, and what is missing.

Works on names and sizes; of files it reads the tracker and ``fsdp_config.json``. Nothing is chosen silently: each
choice is said in ``notes`` or refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from workers.errors import AmbiguousSource, IncompleteCheckpoint, InvalidOption, UnknownFormat
from workers.formats._format import Listing, join
from workers.formats._model_folder import read_json
from workers.formats._steps import STILL_WRITING, choose_role, choose_step, refuse_stand_in
from workers.options import ConvertOptions
from workers.storage import FileEntry

FSDP_CONFIG = "fsdp_config.json"
_RANK_FILE = re.compile(r"model_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")
_STEP = re.compile(r"global_step_(\d{1,18})")


@dataclass(frozen=True, slots=True)
class RoleFolder:
    """The folder that is converted, relative to the source, and how it came to be chosen."""

    path: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The rank files of one world size that are there, by rank."""

    folder: RoleFolder
    world_size: int
    files: dict[int, FileEntry]
    fsdp_version: int | None = None
    notes: tuple[str, ...] = ()
    pattern: str = "model_world_size_{world_size}_rank_{rank}.pt"
    """Names of the files; other trainers save the same content under names of their own."""

    def file_name(self, rank: int | str) -> str:
        """The name of a rank's file."""
        return self.pattern.format(world_size=self.world_size, rank=rank)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """First and last of each run of ranks without a file."""
        borders = [-1, *sorted(self.files), self.world_size]
        return [(low + 1, high - 1) for low, high in pairwise(borders) if high - low > 1]

    def missing_text(self) -> str:
        """The missing files by name, in ranges where they follow on each other."""
        names = ((self.file_name(first), self.file_name(last)) for first, last in self.missing)
        return ", ".join(first if first == last else f"{first} to {last}" for first, last in names)


def file_name(world_size: int, rank: int) -> str:
    """The name of a rank's file."""
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def rank_file_count(listing: Listing, folder: str) -> int:
    """How many rank files lie directly in a folder."""
    return sum(1 for name in listing.files(folder) if _RANK_FILE.fullmatch(name))


def step_folders(listing: Listing) -> dict[int, str]:
    """The step folders of a run folder, by step."""
    return {int(match[1]): name for name in listing.folders() if (match := _STEP.fullmatch(name))}


def choose_role_folder(listing: Listing, options: ConvertOptions) -> RoleFolder:
    """Find the folder of one step and role. The options decide, then the tracker file, then there being only one."""
    if rank_file_count(listing, ""):
        _check_asked(listing, options)
        return RoleFolder("")
    steps = step_folders(listing)
    if not steps:
        _check_asked(listing, options, role_is_open=True)
        return _choose_role(listing, RoleFolder(""), options)
    choice = choose_step(listing, steps, options, "global_step_{}")
    return _choose_role(listing, RoleFolder(choice.path, choice.notes), options)


def _check_asked(listing: Listing, options: ConvertOptions, *, role_is_open: bool = False) -> None:
    """Refuse a step or role that a folder given directly does not have."""
    parts = listing.folder.address.url.rstrip("/").split("/")
    steps = [int(match[1]) for part in parts if (match := _STEP.fullmatch(part))]
    if options.step is not None and steps[-1:] != [options.step]:
        raise InvalidOption(
            f"step {options.step} is asked for, but {listing.folder.address.url} is not a folder of steps",
            expected=f"global_step_{options.step}",
            found=f"step {steps[-1]}" if steps else "no step folder",
            hint="Give the run folder, which holds the step folders, or leave the option step out.",
        )
    if options.role is not None and not role_is_open and parts[-1] != options.role:
        raise InvalidOption(
            f"role {options.role} is asked for, but {listing.folder.address.url} holds the files of one role only",
            expected=options.role,
            found=parts[-1],
            hint="Give the step folder, which holds the roles, or leave the option role out.",
        )


def _choose_role(listing: Listing, step: RoleFolder, options: ConvertOptions) -> RoleFolder:
    if rank_file_count(listing, step.path) and options.role is None:
        return step
    roles = [name for name in listing.folders(step.path) if rank_file_count(listing, join(step.path, name))]
    where = step.path or "the folder"
    if not roles:
        raise _no_rank_files(listing, step)
    refuse_stand_in(roles, listing.folders(step.path), where, options)
    chosen, notes = choose_role(roles, where, options)
    return RoleFolder(join(step.path, chosen), step.notes + notes)


def _no_rank_files(listing: Listing, step: RoleFolder) -> UnknownFormat | IncompleteCheckpoint:
    where = step.path or listing.folder.address.url
    there = [*(f"{name}/" for name in listing.folders(step.path)), *listing.files(step.path)]
    found = ", ".join(there[:8]) or "nothing"
    kind = IncompleteCheckpoint if step.path else UnknownFormat
    return kind(
        f"{where} has no files model_world_size_<W>_rank_<R>.pt, neither directly nor in a role folder; "
        f"found: {found}",
        expected="model_world_size_<W>_rank_<R>.pt",
        found=found,
        hint=f"Give the folder of the run, of a step or of a role. {STILL_WRITING}",
    )


def find_rank_files(listing: Listing, folder: RoleFolder) -> RankFiles:
    """Settle the world size and list its files.

    Two world sizes in a folder (a run resumed on more processes) are settled by ``fsdp_config.json`` alone.
    """
    by_size: dict[int, dict[int, FileEntry]] = {}
    for name, entry in listing.files(folder.path).items():
        match = _RANK_FILE.fullmatch(name)
        if match is None or name != file_name(int(match[1]), int(match[2])):
            continue
        by_size.setdefault(int(match[1]), {})[int(match[2])] = entry
    if not by_size:
        raise _no_rank_files(listing, folder)
    config = read_json(listing, join(folder.path, FSDP_CONFIG)) or {}
    told, version = (config.get(key) for key in ("world_size", "FSDP_version"))
    world_size = _world_size(by_size, told if type(told) is int else None)
    files = dict(sorted(by_size[world_size].items()))
    beyond = [rank for rank in files if rank >= world_size]
    if beyond:
        raise IncompleteCheckpoint(
            f"{files[beyond[0]].path} claims rank {beyond[0]} of {world_size} processes, which are numbered from 0",
            file=files[beyond[0]].path,
            hint="The file was renamed; restore its name.",
        )
    notes = list(folder.notes)
    if len(by_size) > 1:
        sizes = " and ".join(map(str, sorted(by_size)))
        notes.append(f"world size {world_size}, as {FSDP_CONFIG} says; files of world sizes {sizes} lie there")
    return RankFiles(folder, world_size, files, version if type(version) is int else None, tuple(notes))


def _world_size(by_size: dict[int, dict[int, FileEntry]], told: int | None) -> int:
    sizes = " and ".join(map(str, sorted(by_size)))
    if told is not None and told not in by_size:
        raise IncompleteCheckpoint(
            f"{FSDP_CONFIG} says that the world size is {told}, but the files are of world size {sizes}",
            file=FSDP_CONFIG,
            expected=f"files model_world_size_{told}_rank_*.pt",
            found=f"files of world size {sizes}",
            hint=f"Bring together the files of one checkpoint. {STILL_WRITING}",
        )
    if told is not None:
        return told
    if len(by_size) > 1:
        counts = ", ".join(f"{len(by_size[size])} of world size {size}" for size in sorted(by_size))
        raise AmbiguousSource(
            f"rank files of the world sizes {sizes} lie in the folder ({counts}) and no {FSDP_CONFIG} says which "
            "belong to the checkpoint",
            found=counts,
            hint="Move the files of the other run elsewhere.",
        )
    return next(iter(by_size))
