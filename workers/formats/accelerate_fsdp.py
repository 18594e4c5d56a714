"""accelerate's FSDP checkpoints of one torch file per rank: what its ``use_dcp=False`` saves.

The files hold the same as verl's rank files, under other names; they are read and put together by the same code.
Source: accelerate ``utils/fsdp_utils.py`` (``save_fsdp_model``).
"""

from __future__ import annotations

import re
from dataclasses import replace

from workers.checkpoint import Checkpoint
from workers.errors import AmbiguousSource
from workers.formats._format import Detection, Format, Listing
from workers.formats._state_dict import clean_names
from workers.formats._steps import check_step, choose_step
from workers.formats.verl_fsdp.assemble import assemble
from workers.formats.verl_fsdp.folders import RankFiles, RoleFolder
from workers.formats.verl_fsdp.ranks import read_rank
from workers.options import ConvertOptions

SIGNS = "pytorch_model_fsdp_<N>_rank<R>.bin, here or in checkpoint-<S>/"

_RANK_FILE = re.compile(r"(?P<stem>pytorch_model_fsdp(_\d+)?)_rank(?P<rank>\d{1,9})\.bin")
_STEP = re.compile(r"checkpoint[-_](\d{1,18})")


def detect(listing: Listing) -> Detection | None:
    """Recognise a folder with rank files, or a run folder of such."""
    count = sum(map(len, _rank_files(listing, "").values()))
    if count:
        return Detection((f"{count} files pytorch_model_fsdp*_rank*.bin",))
    steps = _steps(listing)
    return Detection((f"a run folder with steps {', '.join(map(str, sorted(steps)[:8]))}",)) if steps else None


def open_accelerate_fsdp(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the rank files of the step that the options name, or of the only one."""
    folder = RoleFolder("")
    if not _rank_files(listing, ""):
        choice = choose_step(listing, _steps(listing), options, "checkpoint-{}")
        folder = RoleFolder(choice.path, choice.notes)
    else:
        check_step(listing, options)
    models = _rank_files(listing, folder.path)
    if len(models) > 1:
        raise AmbiguousSource(
            f"{folder.path or listing.folder.address.url} holds several models: {', '.join(sorted(models))}",
            expected="one model",
            found=", ".join(sorted(models)),
            hint="Move the files of one into a folder of their own, with its config.json.",
        )
    ((stem, names),) = models.items()
    files = {rank: listing.files(folder.path)[name] for rank, name in sorted(names.items())}
    lowest = next(iter(files))
    table = read_rank(listing.folder, files[lowest], lowest)
    world_size = max(
        (*(mesh.total_ranks for mesh in table.meshes), *(size for size, _ in table.groups), max(files) + 1)
    )
    clean_names(table.names, options)  # flat parameters are refused by their names
    ranks = RankFiles(folder, world_size, files, notes=folder.notes, pattern=f"{stem}_rank{{rank}}.bin")
    return replace(assemble(listing, ranks, options), format="accelerate-fsdp", strict_ties=True)


def _rank_files(listing: Listing, prefix: str) -> dict[str, dict[int, str]]:
    """The names of rank files by model and rank."""
    found: dict[str, dict[int, str]] = {}
    for name in listing.files(prefix):
        if match := _RANK_FILE.fullmatch(name):
            found.setdefault(match["stem"], {})[int(match["rank"])] = name
    return found


def _steps(listing: Listing) -> dict[int, str]:
    steps = {int(match[1]): name for name in listing.folders() if (match := _STEP.fullmatch(name))}
    return {step: name for step, name in steps.items() if _rank_files(listing, name)}


FORMAT = Format(
    "accelerate-fsdp",
    "accelerate FSDP rank files (without DCP)",
    SIGNS,
    detect,
    open_accelerate_fsdp,
    frozenset({"step"}),
)
