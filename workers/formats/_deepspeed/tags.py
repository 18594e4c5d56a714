"""Find the folder of one saved step, and the files in it by kind and rank. Works on names alone.

A run folder holds one folder for each step (its *tag*), and a file ``latest`` with the tag that was saved last.
Source of the names: DeepSpeed ``runtime/engine.py`` (``_get_ckpt_name``, ``_get_zero_ckpt_name``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.errors import AmbiguousSource, CorruptFile, GeometryMismatch, IncompleteCheckpoint, InvalidOption
from workers.formats._format import Listing, join
from workers.formats._steps import STILL_WRITING, choose_step
from workers.options import ConvertOptions
from workers.storage import FileEntry

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
ONE_CHECKPOINT = "Bring together the files of one checkpoint: same run, same tag."

_MODEL = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
_MODEL_SHARDED = re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?P<prefix>bf16_|fp16_|)zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)-(model_(?P<mp>\d+)-)?model_states\.pt")
_EXPERT = re.compile(
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
_TRAINER = re.compile(r"checkpoint-(\d{1,18})")
_STEP = re.compile(r".*?(\d+)")

Rank = tuple[int, int]
"""Model-parallel rank and data-parallel rank."""


@dataclass(frozen=True, slots=True)
class Tag:
    """The folder of one saved step, relative to the source, and how it came to be chosen."""

    path: str
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class TagFiles:
    """The files of one saved step by kind, and by model-parallel and data-parallel rank."""

    tag: Tag
    model: dict[Rank, FileEntry] = field(default_factory=dict)
    """Model states; of stages 0 to 2 the data-parallel rank is 0."""
    optimizer: dict[Rank, FileEntry] = field(default_factory=dict)
    layers: dict[tuple[int, int], FileEntry] = field(default_factory=dict)
    """Layer files of the pipeline engine, by layer and model-parallel rank."""
    experts: list[str] = field(default_factory=list)
    prefix: str = ""
    """What the optimizer files' names begin with."""

    @property
    def model_ranks(self) -> list[int]:
        """Model-parallel ranks (or pipeline stages) that have model states."""
        return sorted({rank for rank, _ in self.model})

    def optimizer_name(self, rank: Rank) -> str:
        """The name of an optimizer file, there or not."""
        return join(self.tag.path, f"{self.prefix}zero_pp_rank_{rank[1]}_mp_rank_{rank[0]:02d}_optim_states.pt")


def collect_files(listing: Listing, tag: Tag) -> TagFiles:
    """Sort the files of a tag's folder by their names."""
    found = TagFiles(tag)
    prefixes: dict[str, str] = {}
    for name, entry in listing.files(tag.path).items():
        if match := _MODEL.fullmatch(name):
            _put(found.model, (int(match["mp"]), 0), entry)
        elif match := _MODEL_SHARDED.fullmatch(name):
            _put(found.model, (int(match["mp"]), int(match["dp"])), entry)
        elif match := _OPTIMIZER.fullmatch(name):
            prefixes.setdefault(match["prefix"], entry.path)
            _put(found.optimizer, (int(match["mp"]), int(match["dp"])), entry)
        elif match := _LAYER.fullmatch(name):
            _put(found.layers, (int(match["layer"]), int(match["mp"] or 0)), entry)
        elif _EXPERT.fullmatch(name):
            found.experts.append(entry.path)
    found.prefix = next(iter(prefixes), "")
    found.model, found.optimizer = dict(sorted(found.model.items())), dict(sorted(found.optimizer.items()))
    found.layers = dict(sorted(found.layers.items()))
    return found


def _put(files: dict[Rank, FileEntry], rank: Rank, entry: FileEntry) -> None:
    """Note a file; two for one rank are of different runs."""
    other = files.setdefault(rank, entry)
    if other is not entry:
        raise GeometryMismatch(
            f"{other.path} and {entry.path} are both files of model-parallel rank {rank[0]}, rank {rank[1]}",
            file=entry.path,
            expected="one file for each rank",
            found="two",
            hint=ONE_CHECKPOINT,
        )
    if entry.size_bytes == 0:
        raise CorruptFile(
            f"{entry.path} is empty",
            file=entry.path,
            found="0 bytes",
            hint=f"The disk may have been full when it was saved. {STILL_WRITING}",
        )


def checked_model_ranks(files: TagFiles) -> list[int]:
    """Model-parallel ranks; a gap, or optimizer files of a rank without model states, is an error."""
    ranks = files.model_ranks
    known = {*ranks, *(rank for rank, _ in files.optimizer)}
    missing = next((rank for rank in range(max(known, default=-1) + 1) if rank not in ranks), None)
    if missing is not None:
        raise missing_model_rank(files, missing, f"files of other ranks up to {max(known)} are there")
    return ranks


def missing_model_rank(files: TagFiles, rank: int, reason: str) -> IncompleteCheckpoint:
    """The error for a model-parallel rank without model states."""
    name = join(files.tag.path, f"mp_rank_{rank:02d}_model_states.pt")
    return IncompleteCheckpoint(
        f"{name} is missing: {reason}",
        file=name,
        expected="the model states of all model-parallel ranks",
        found=f"those of {', '.join(map(str, files.model_ranks)) or 'none'}",
        hint=f"Each node saves the files of its own ranks: copy them together. {STILL_WRITING}",
    )


def holds_states(listing: Listing, folder: str) -> str | None:
    """The name of a file of model states directly in a folder; None when there is none."""
    names = listing.files(folder)
    return next((name for name in names if _MODEL.fullmatch(name) or _MODEL_SHARDED.fullmatch(name)), None)


def holds_layers(listing: Listing, folder: str) -> str | None:
    """The name of a layer file of the pipeline engine directly in a folder; None when there is none."""
    return next((name for name in listing.files(folder) if _LAYER.fullmatch(name)), None)


def is_universal(listing: Listing, folder: str) -> bool:
    """Whether a tag's folder is a universal checkpoint: it has ``zero/`` with one folder for each parameter."""
    return "zero" in listing.folders(folder) and bool(listing.folders(join(folder, "zero")))


def find_tags(listing: Listing, fits: Callable[[str], bool]) -> list[str]:
    """The folders that hold a saved step, "" for the source itself; ``fits`` looks into one.

    In a run folder of the HF Trainer they lie below ``checkpoint-<N>``.
    """
    if fits(""):
        return [""]
    steps = [name for name in listing.folders() if _TRAINER.fullmatch(name)]
    below = (join(step, name) for step in steps for name in listing.folders(step))
    return [name for name in listing.folders() if fits(name)] or [path for path in below if fits(path)]


def choose_tag(listing: Listing, tags: list[str], options: ConvertOptions, latest: str = LATEST) -> Tag:
    """The tag that the options ask for, else the one that ``latest`` names, else the only one there is."""
    steps = {int(match[1]): match[0] for tag in tags if (match := _TRAINER.match(tag)) and "/" in tag}
    if steps:
        step = choose_step(listing, steps, options, "checkpoint-{}")
        inner = [tag for tag in tags if tag.startswith(f"{step.path}/")]
        chosen = choose_tag_in(listing, inner, None, join(step.path, latest))
        return Tag(chosen.path, (*step.notes, *chosen.notes))
    if tags == [""]:
        _check_step(listing, options)
        return Tag("")
    return choose_tag_in(listing, tags, options.step, latest)


def choose_tag_in(listing: Listing, tags: list[str], step: int | None, latest: str) -> Tag:
    """The tag of a step, else the one that the file ``latest`` beside the tags names, else the only one."""
    listed = ", ".join(tags) or "none"
    told = _told(listing, latest)
    if step is not None:
        return _asked(tags, step)
    if told is not None:
        if told not in tags:
            raise IncompleteCheckpoint(
                f"the file {latest} names {told}, but there is no such checkpoint; the tags are: {listed}",
                file=latest,
                expected=told,
                found=listed,
                hint=f"It may have been deleted, or not copied: name another with the option step. {STILL_WRITING}",
            )
        return Tag(told, (f"tag {told}, as {latest} says",))
    if len(tags) > 1:
        raise AmbiguousSource(
            f"the folder has the tags {listed} and no file {latest} that says which was saved last",
            found=listed,
            hint="Say which with the option step, or give the tag's own folder.",
        )
    if not tags:
        raise IncompleteCheckpoint(
            f"{listing.folder.address.url} has no folder with DeepSpeed's model states",
            expected="mp_rank_*_model_states.pt or zero_pp_rank_*_model_states.pt",
            found=", ".join([*listing.folders(), *listing.files()][:8]) or "nothing",
            hint=STILL_WRITING,
        )
    return Tag(tags[0], (f"tag {tags[0]}, the only one",))


def _told(listing: Listing, latest: str) -> str | None:
    content = listing.read(latest)
    return (
        None if content is None else join(latest.rpartition("/")[0], content.decode("utf-8", "replace").strip()[:255])
    )


def _asked(tags: list[str], step: int) -> Tag:
    found = [tag for tag in tags if (match := _STEP.fullmatch(tag)) and int(match[1]) == step]
    if len(found) == 1:
        return Tag(found[0], (f"tag {found[0]}, as asked for",))
    raise IncompleteCheckpoint(
        f"{'several tags are' if found else 'no tag is'} of step {step}; the tags are: {', '.join(tags)}",
        expected=f"global_step{step}",
        found=", ".join(tags),
        hint="Name one of these steps with the option step, or give the tag's own folder.",
    )


def _check_step(listing: Listing, options: ConvertOptions) -> None:
    own = listing.folder.address.url.rstrip("/").rpartition("/")[2]
    match = _STEP.fullmatch(own)
    if options.step is not None and (match is None or int(match[1]) != options.step):
        raise InvalidOption(
            f"step {options.step} is asked for, but {listing.folder.address.url} is the folder of one tag",
            expected=f"global_step{options.step}",
            found=own,
            hint="Give the folder above it, which holds the tags, or leave the option step out.",
        )
