"""Find the folder of one Megatron checkpoint, as Megatron-LM, Megatron-Bridge, slime and verl lay out their runs.

``ROOT/latest_checkpointed_iteration.txt`` names an iteration (``iter_0000010``), the word ``release``, or a step of
verl (``global_step_10``), whose roles hold the checkpoint in ``dist_ckpt/`` or ``model/``.
Sources: Megatron-LM ``training/checkpointing.py``; verl ``utils/megatron_utils.py`` and
``utils/checkpoint/megatron_checkpoint_manager.py`` (0.3 to 0.7).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workers.errors import IncompleteCheckpoint, InvalidOption, UnknownFormat
from workers.formats._format import Listing, join
from workers.formats._model_folder import ModelFiles, find_model_files
from workers.formats._steps import RELEASE, STILL_WRITING, choose_role, choose_step, refuse_stand_in, tracker_text
from workers.options import ConvertOptions

Holds = Callable[[Listing, str], bool]
"""Whether a subfolder is the one that holds a checkpoint's files."""

STEPS_LOOKED_INTO = 4
"""To recognise a run: its steps are all of one kind, and asking for many takes long on an object store."""

HUGGING_FACE = "huggingface"

_INNER = ("", "dist_ckpt", "model")
_STEP = re.compile(r"(iter|global_step)_(\d{1,18})")


@dataclass(frozen=True, slots=True)
class MegatronFolder:
    """Where a checkpoint's files lie, relative to the source, and in which folder of a step or role that is."""

    path: str
    owner: str
    notes: tuple[str, ...] = ()


def places(listing: Listing, holds: Holds) -> Iterator[str]:
    """The folders that hold a checkpoint: of the source itself, else of its roles, else of its steps, latest first."""
    if inner := _inner(listing, "", holds):
        yield inner.path
        return
    steps = sorted(_steps(listing).items(), reverse=True)[:STEPS_LOOKED_INTO]
    for folder in [*_roles(listing, "", holds), *(name for _, name in steps), RELEASE]:
        for owner in (folder, *_roles(listing, folder, holds)):
            if inner := _inner(listing, owner, holds):
                yield inner.path


def choose_folder(listing: Listing, options: ConvertOptions, holds: Holds) -> MegatronFolder:
    """Find the folder of the iteration and role that the options, else the trainer's tracker, name."""
    if inner := _inner(listing, "", holds):
        _check_asked(listing, options)
        return inner
    steps = _steps(listing)
    if not steps and RELEASE not in listing.folders():
        _check_asked(listing, options, role_is_open=True)
        return _of_role(listing, MegatronFolder("", ""), options, holds)
    if options.step is None and (tracker_text(listing) == RELEASE or not steps):
        return _of_role(listing, MegatronFolder("", RELEASE, ("the released weights",)), options, holds)
    name = "iter_{:07d}" if next(iter(steps.values())).startswith("iter_") else "global_step_{}"
    choice = choose_step(listing, steps, options, name)
    return _of_role(listing, MegatronFolder("", choice.path, choice.notes), options, holds)


def model_files(listing: Listing, folder: MegatronFolder, options: ConvertOptions) -> ModelFiles:
    """Config and side files: beside the checkpoint or in its run folder, in ``huggingface/`` or directly."""
    around = dict.fromkeys((folder.owner, folder.path, ""))
    only_model = {join(place, HUGGING_FACE): True for place in around}
    return find_model_files(listing, only_model | dict.fromkeys(around, False), options)


def _steps(listing: Listing) -> dict[int, str]:
    return {int(match[2]): name for name in listing.folders() if (match := _STEP.fullmatch(name))}


def _roles(listing: Listing, folder: str, holds: Holds) -> list[str]:
    below = (join(folder, name) for name in listing.folders(folder) if not _STEP.fullmatch(name))
    return [place for place in below if place != RELEASE and _inner(listing, place, holds)]


def _inner(listing: Listing, owner: str, holds: Holds) -> MegatronFolder | None:
    found = (join(owner, name) for name in _INNER if not name or name in listing.folders(owner))
    return next((MegatronFolder(place, owner) for place in found if holds(listing, place)), None)


def _of_role(listing: Listing, step: MegatronFolder, options: ConvertOptions, holds: Holds) -> MegatronFolder:
    inner = _inner(listing, step.owner, holds)
    if inner is None:
        roles = [place.rpartition("/")[2] for place in _roles(listing, step.owner, holds)]
        if not roles:
            raise _nothing(listing, step.owner)
        refuse_stand_in(roles, listing.folders(step.owner), step.owner or "the folder", options)
        role, notes = choose_role(roles, step.owner or "the folder", options)
        inner = _inner(listing, join(step.owner, role), holds)
        step = MegatronFolder("", step.owner, step.notes + notes)
    if inner is None:
        raise _nothing(listing, step.owner)
    return MegatronFolder(inner.path, inner.owner, step.notes)


def _check_asked(listing: Listing, options: ConvertOptions, *, role_is_open: bool = False) -> None:
    """Refuse a step or role that a folder given directly is not of."""
    parts = listing.folder.address.url.rstrip("/").split("/")
    steps = [int(match[2]) for part in parts if (match := _STEP.fullmatch(part))]
    if options.step is not None and steps[-1:] != [options.step]:
        raise InvalidOption(
            f"step {options.step} is asked for, but {listing.folder.address.url} is not a folder of steps",
            expected=f"iter_{options.step:07d}",
            found=f"step {steps[-1]}" if steps else "no step folder",
            hint="Give the run folder, which holds the folders of iterations, or leave the option step out.",
        )
    if options.role is not None and not role_is_open and options.role not in parts[-2:]:
        raise InvalidOption(
            f"role {options.role} is asked for, but {listing.folder.address.url} holds the files of one role only",
            expected=options.role,
            found=parts[-1],
            hint="Give the step folder, which holds the roles, or leave the option role out.",
        )


def _nothing(listing: Listing, place: str) -> UnknownFormat | IncompleteCheckpoint:
    where = place or listing.folder.address.url
    there = [*(f"{name}/" for name in listing.folders(place)), *listing.files(place)]
    found = ", ".join(there[:8]) or "nothing"
    kind = IncompleteCheckpoint if place else UnknownFormat
    return kind(
        f"{where} holds no Megatron checkpoint; found: {found}",
        expected="metadata.json and .metadata, or mp_rank_* folders",
        found=found,
        hint=f"Give the folder of the run, of an iteration or of a role. {STILL_WRITING}",
    )
