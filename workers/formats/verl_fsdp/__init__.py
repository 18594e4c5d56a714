"""verl's FSDP checkpoints: one torch file per rank, in a role folder of a step folder of a run folder.

``folders`` finds the role folder and its rank files, ``ranks`` reads one file, ``assemble`` puts them together.
Source of the layout: verl ``utils/checkpoint/fsdp_checkpoint_manager.py`` (0.2 to 0.9).
"""

from __future__ import annotations

from workers.checkpoint import Checkpoint
from workers.formats._format import Detection, Format, Listing
from workers.formats.verl_fsdp.assemble import assemble
from workers.formats.verl_fsdp.folders import choose_role_folder, find_rank_files, rank_file_count, step_folders
from workers.options import ConvertOptions

SIGNS = "model_world_size_<W>_rank_<R>.pt, here or in global_step_<N>/<role>/"


def detect(listing: Listing) -> Detection | None:
    """Recognise a role folder, a step folder or a run folder by its rank files."""
    count = rank_file_count(listing, "")
    if count:
        return Detection((f"{count} files model_world_size_*_rank_*.pt",))
    for step, folder in sorted(step_folders(listing).items(), reverse=True):
        places = [folder, *(f"{folder}/{name}" for name in listing.folders(folder))]
        if any(rank_file_count(listing, place) for place in places):
            return Detection((f"a run folder with step {step} and rank files in it",))
    roles = [name for name in listing.folders() if rank_file_count(listing, name)]
    if roles:
        return Detection((f"a step folder with rank files in {', '.join(roles)}",))
    return None


def open_verl_fsdp(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the checkpoint of the step and role that the options or the trainer's own files name."""
    choice = choose_role_folder(listing, options)
    return assemble(listing, find_rank_files(listing, choice), options)


FORMAT = Format(
    "verl-fsdp",
    "verl FSDP rank files (PPO, GRPO, SFT; FSDP1 and FSDP2)",
    SIGNS,
    detect,
    open_verl_fsdp,
    frozenset({"step", "role"}),
)
