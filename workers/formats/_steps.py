"""Choose one of the steps in a run folder: what the options ask for, what the tracker file names, or the only one.

Nothing is chosen silently: each choice is said in ``notes`` or refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.errors import AmbiguousSource, CorruptFile, IncompleteCheckpoint, InvalidOption
from workers.formats._format import Listing
from workers.options import ConvertOptions

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron-LM's and verl's note of the latest complete step."""

RELEASE = "release"
"""What the tracker of Megatron-LM says, and the folder is called, for weights that no training step wrote."""

PREFERRED_ROLES = ("actor", "policy")
"""What is taken when nothing is asked for: verl's name for the trained model, and SkyRL's."""

STILL_WRITING = "If the training still runs, it may be writing this checkpoint: try again when it is done."


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The folder of a step, relative to the source, and how it came to be chosen."""

    path: str
    notes: tuple[str, ...] = ()


def choose_step(listing: Listing, steps: Mapping[int, str], options: ConvertOptions, named: str) -> StepChoice:
    """Choose one of the folders ``steps``, of which there is at least one; ``named`` is their names' pattern.

    ``named`` has a place for the number, as in ``global_step_{}``. Raises ``IncompleteCheckpoint`` where the step
    that is meant is not there, and ``AmbiguousSource``.
    """
    listed = ", ".join(map(str, sorted(steps)))
    tracked = tracked_step(listing)
    if options.step is not None:
        if options.step not in steps:
            raise IncompleteCheckpoint(
                f"there is no {named.format(options.step)}; the steps are {listed}",
                expected=named.format(options.step),
                found=listed,
                hint="Name one of these with the option step.",
            )
        notes = [f"step {options.step}, as asked for"]
        if tracked is not None and options.step > tracked:
            notes.append(f"{TRACKER} names step {tracked}: the later step {options.step} may be half-written")
        return StepChoice(steps[options.step], tuple(notes))
    if tracked is not None:
        if tracked not in steps:
            raise IncompleteCheckpoint(
                f"{TRACKER} names step {tracked}, but there is no {named.format(tracked)}; the steps are {listed}",
                file=TRACKER,
                expected=named.format(tracked),
                found=listed,
                hint=f"It may have been deleted: name one of these with the option step. {STILL_WRITING}",
            )
        notes = [f"step {tracked}, as {TRACKER} says"]
        later = [step for step in sorted(steps) if step > tracked]
        if later:
            notes.append(f"not taken: steps after it ({', '.join(map(str, later))}), which may be half-written")
        return StepChoice(steps[tracked], tuple(notes))
    if len(steps) > 1:
        raise AmbiguousSource(
            f"the folder has the steps {listed} and no {TRACKER} that says which is the latest complete one",
            found=listed,
            hint="Say which with the option step.",
        )
    step, folder = next(iter(steps.items()))
    return StepChoice(folder, (f"step {step}, the only one",))


def check_step(listing: Listing, options: ConvertOptions, option: str = "step") -> None:
    """Refuse a step, or what ``option`` counts, that a folder given directly is not of, by the end of its name."""
    asked = getattr(options, option)
    own = listing.folder.address.url.rstrip("/").rpartition("/")[2]
    match = re.search(r"(\d{1,18})$", own)
    if asked is not None and (match is None or int(match[1]) != asked):
        raise InvalidOption(
            f"{option} {asked} is asked for, but {listing.folder.address.url} holds the weights of one {option} only",
            expected=f"the folder of a run, or of {option} {asked}",
            found=own,
            hint=f"Give the run folder, which holds the {option}s, or leave the option {option} out.",
        )


def choose_role(roles: Sequence[str], where: str, options: ConvertOptions) -> tuple[str, tuple[str, ...]]:
    """Choose one of the role folders (actor, critic ...) in ``where``, of which there is at least one; with notes."""
    if options.role is not None and options.role not in roles:
        raise IncompleteCheckpoint(
            f"there is no role {options.role} in {where}; the roles are {', '.join(roles)}",
            expected=options.role,
            found=", ".join(roles),
            hint="Name one of these with the option role.",
        )
    chosen = options.role or next((name for name in PREFERRED_ROLES if name in roles), roles[0])
    if len(roles) > 1 and options.role is None and chosen not in PREFERRED_ROLES:
        raise AmbiguousSource(
            f"{where} has the roles {', '.join(roles)} and nothing says which is meant",
            found=", ".join(roles),
            hint="Say which with the option role.",
        )
    if len(roles) == 1:
        usual = chosen in PREFERRED_ROLES or options.role is not None
        return chosen, () if usual else (f"role {chosen}, the only one in {where}",)
    others = ", ".join(name for name in roles if name != chosen)
    return chosen, (f"role {chosen}{', as asked for' if options.role else ''}; {others} lies beside it",)


def refuse_stand_in(roles: Sequence[str], folders: Sequence[str], where: str, options: ConvertOptions) -> None:
    """Refuse to take another role where the folder of the usual one is among ``folders``, but has lost its weights."""
    lost = next((name for name in PREFERRED_ROLES if name in folders and name not in roles), None)
    if lost is None or options.role is not None or not set(roles).isdisjoint(PREFERRED_ROLES):
        return
    raise IncompleteCheckpoint(
        f"{lost}/ in {where} holds no weights, and {', '.join(roles)} does",
        expected=f"weights in {lost}/",
        found=", ".join(roles),
        hint=f"Copy the files of {lost}, too, or name another role with the option role. {STILL_WRITING}",
    )


def tracker_text(listing: Listing) -> str | None:
    """What the tracker file says, None when there is none."""
    content = listing.read(TRACKER)
    return None if content is None else content.decode("ascii", "replace").strip()


def tracked_step(listing: Listing) -> int | None:
    """The step that the tracker file names, None for released weights; ``CorruptFile`` when it says neither."""
    text = tracker_text(listing)
    if text in (None, RELEASE):
        return None
    if not re.fullmatch(r"\d{1,18}", text):
        raise CorruptFile(
            f"{TRACKER} holds {text[:40]!r}, not the number of a step",
            file=TRACKER,
            expected="a whole number",
            found=repr(text[:40]),
            hint=f"Say which step with the option step and remove the file. {STILL_WRITING}",
        )
    return int(text)
