"""Find the rank files of one checkpoint and what their folders' names say: ``mp_rank_<TP>[_<PP>][_<EP>]``.

A second number is the pipeline rank when there are stages, else the expert rank: the file's own arguments tell.
Source: Megatron-LM ``training/checkpointing.py`` (``get_checkpoint_name``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from workers.formats._format import Listing, join
from workers.storage import FileEntry

FILE_NAMES = ("model_optim_rng.pt", "model.pt", "model_rng.pt")
"""Megatron-LM's, verl's, and Megatron-LM's with a distributed optimizer of before 2023."""

_RANK_FOLDER = re.compile(r"mp_rank_(\d{1,9})(?:_(\d{1,9}))?(?:_(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class RankFolder:
    """One rank's folder: the numbers in its name, and its file."""

    name: str
    numbers: tuple[int, ...]
    entry: FileEntry


def holds(listing: Listing, place: str) -> bool:
    """Whether a subfolder has rank folders with a file of weights in one of them."""
    return any(
        FILE_NAMES[0] in files or FILE_NAMES[1] in files or FILE_NAMES[2] in files
        for name in listing.folders(place)
        if _RANK_FOLDER.fullmatch(name)
        for files in (listing.files(join(place, name)),)
    )


def rank_folders(listing: Listing, place: str) -> list[RankFolder]:
    """The rank folders that have a file of weights, in the order of their numbers."""
    found = []
    for name in listing.folders(place):
        match = _RANK_FOLDER.fullmatch(name)
        files = listing.files(join(place, name)) if match else {}
        entry = next((files[file] for file in FILE_NAMES if file in files), None)
        if match and entry:
            numbers = tuple(int(number) for number in match.groups() if number is not None)
            found.append(RankFolder(name, numbers, entry))
    return sorted(found, key=lambda folder: folder.numbers)
