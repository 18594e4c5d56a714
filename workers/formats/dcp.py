"""torch DCP folders: ``.metadata`` beside ``__R_N.distcp``, in folders of steps and of accelerate.

Finds the folder of the model and opens it. What the metadata and items say is for ``_dcp_metadata`` and
``_dcp_items``, which part is the model for ``_state_dict``, DCP's safetensors output for ``_dcp_safetensors``.
Sources: torch ``distributed/checkpoint``, accelerate ``utils/fsdp_utils.py``, torchtitan ``components/checkpoint.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from workers.checkpoint import Checkpoint
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import AmbiguousSource, IncompleteCheckpoint
from workers.formats._checkpoint_of import checkpoint_of
from workers.formats._dcp_items import add_tensors
from workers.formats._dcp_metadata import METADATA, DcpMetadata, has_metadata, read_dcp_metadata
from workers.formats._dcp_safetensors import add_sharded_tensors, sharded_files
from workers.formats._format import Detection, Format, Listing, join
from workers.formats._model_folder import find_model_files
from workers.formats._state_dict import STATE_DICT_OPTIONS, ModelPart, choose_model, naming_of
from workers.formats._steps import check_step, choose_step
from workers.options import ConvertOptions

SIGNS = ".metadata and __R_N.distcp, here, in pytorch_model_fsdp_N/ or in step folders; shard-*-model-*.safetensors"

_ACCELERATE = re.compile(r"pytorch_model_fsdp_(\d+)")
_STEP = re.compile(r"(?P<name>step-|step_|checkpoint-|checkpoint_|global_step_?|iter_)(?P<step>\d+)")
_RUN = "checkpoint"
"""torchtitan's folder of steps inside of its dump folder."""
_OF_OTHERS = ("common.pt", "metadata.json")
"""What Megatron-Core writes beside the metadata: its torch_dist format has a reader of its own."""
_NOT_MODEL = re.compile(r"optim.*|.*optimizer.*|.*scheduler.*|dataloader.*|random_.*|rng.*|\..*")
_MOST_FOLDERS = 64
"""Folders that are looked into for metadata: a run folder has steps, and a checkpoint a few parts."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder with a DCP checkpoint, and how it was chosen."""

    prefix: str
    evidence: str
    notes: tuple[str, ...] = ()


def detect(listing: Listing) -> Detection | None:
    """Recognise a DCP folder, or a folder of accelerate or of a run that has some."""
    here = _signs(listing, "")
    if here:
        return Detection((here,), generic=not sharded_files(listing))
    parts = _parts(listing, "")
    if parts:
        accelerate = [name for name in parts if _ACCELERATE.fullmatch(name)]
        return Detection((f"{parts[0]}/ is a DCP folder",), generic=not accelerate)
    runs, steps = _steps(listing)
    for step, name in sorted(steps.items(), reverse=True)[:_MOST_FOLDERS]:
        folder = join(runs, name)
        if _signs(listing, folder) or _parts(listing, folder):
            return Detection((f"a run folder with step {step}, which has a DCP folder",), generic=True)
    return None


def open_dcp(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the checkpoint of the step that the options name, or of the only one."""
    place = _find(listing, options)
    builder = CheckpointBuilder()
    files = sharded_files(listing, place.prefix)
    if files and not has_metadata(listing, place.prefix):
        notes = add_sharded_tensors(builder, listing, place.prefix, files)
        part = ModelPart({tensor.name: tensor.name for tensor in builder.tensors}, notes=notes)
    else:
        part = _add_model(builder, listing, options, place.prefix)
    return _checkpoint(listing, options, builder, place, part)


def _add_model(builder: CheckpointBuilder, listing: Listing, options: ConvertOptions, prefix: str) -> ModelPart:
    """Add the model among what was saved. A function of its own, so that large metadata are let go of."""
    metadata = read_dcp_metadata(listing, prefix)
    part = choose_model(metadata.tensors, metadata.paths, options, prefix or "the DCP folder")
    add_tensors(builder, listing, prefix, metadata, part.names)
    return replace(part, notes=(*part.notes, *_objects(metadata)))


def _checkpoint(
    listing: Listing, options: ConvertOptions, builder: CheckpointBuilder, place: _Place, part: ModelPart
) -> Checkpoint:
    above = place.prefix.rpartition("/")[0]
    places = dict.fromkeys((place.prefix, above, ""), False)
    model = find_model_files(listing, places, options)
    ranks = {file.rank for file in builder.files if file.rank is not None}
    return replace(
        checkpoint_of(listing, builder, model, ("dcp", naming_of(part.names.values(), options))),
        layout={"ranks_that_wrote": len(ranks), "files": len(builder.files)},
        evidence=(place.evidence, *model.evidence),
        notes=(*place.notes, *part.notes),
        left_out=part.left_out,
        strict_ties=True,
    )


def _objects(metadata: DcpMetadata) -> tuple[str, ...]:
    if not metadata.objects:
        return ()
    shown = ", ".join(metadata.objects[:3])
    return (f"left out, since they are no tensors: {len(metadata.objects)} objects such as {shown}",)


def _find(listing: Listing, options: ConvertOptions) -> _Place:
    here = _signs(listing, "")
    if here:
        check_step(listing, options)
        return _Place("", here)
    if _parts(listing, ""):
        check_step(listing, options)
        return _part(listing, "", ())
    runs, steps = _steps(listing)
    usable = {
        step: join(runs, name)
        for step, name in steps.items()
        if _signs(listing, join(runs, name)) or _parts(listing, join(runs, name))
    }
    if not usable:
        raise IncompleteCheckpoint(
            f"{listing.folder.address.url} has no {METADATA}, which is written last: the save was not finished",
            file=METADATA,
            expected=METADATA,
            found="none",
            hint="Take another checkpoint of the run, or copy the missing file, too.",
        )
    named = next(iter(steps.values())).rstrip("0123456789") + "{}"
    choice = choose_step(listing, usable, options, named)
    here = _signs(listing, choice.path)
    if here:
        return _Place(choice.path, f"{here} in {choice.path}", choice.notes)
    return _part(listing, choice.path, choice.notes)


def _part(listing: Listing, prefix: str, notes: tuple[str, ...]) -> _Place:
    """The only part of a folder that is a model; accelerate numbers them when there are several."""
    parts = _parts(listing, prefix)
    if len(parts) > 1:
        raise AmbiguousSource(
            f"{prefix or listing.folder.address.url} holds several models: {', '.join(parts[:8])}",
            expected="one model",
            found=", ".join(parts[:8]),
            hint=f"Give the folder of one, for example {parts[0]}, and its config with the option config_dir.",
        )
    return _Place(join(prefix, parts[0]), f"{parts[0]}/ is a DCP folder", notes)


def _signs(listing: Listing, prefix: str) -> str:
    """By what a folder itself is recognised as a DCP folder; "" when it isn't."""
    files = listing.files(prefix)
    if any(name in files for name in _OF_OTHERS):
        return ""
    if has_metadata(listing, prefix):
        return f"{METADATA} of torch DCP" if METADATA in files else "__R.metadata of the ranks of a torch DCP save"
    if any(name.endswith(".distcp") for name in files):
        return "files *.distcp of torch DCP"
    return "shard-*-model-*.safetensors of torch DCP" if sharded_files(listing, prefix) else ""


def _parts(listing: Listing, prefix: str) -> list[str]:
    """The folders directly below that are DCP folders of models: accelerate's, or else all that are."""
    names = [name for name in listing.folders(prefix)[:_MOST_FOLDERS] if not _NOT_MODEL.fullmatch(name)]
    accelerate = [name for name in names if _ACCELERATE.fullmatch(name)]
    others = [name for name in names if not _STEP.fullmatch(name) and name != _RUN]
    return [name for name in accelerate or others if _signs(listing, join(prefix, name))]


def _steps(listing: Listing) -> tuple[str, dict[int, str]]:
    """The folders of steps, and the folder that they lie in."""
    for runs in ("", _RUN):
        if runs and runs not in listing.folders():
            continue
        steps = {int(found["step"]): name for name in listing.folders(runs) if (found := _STEP.fullmatch(name))}
        if steps:
            return runs, steps
    return "", {}


FORMAT = Format(
    "dcp",
    "torch distributed checkpoints (DCP) of FSDP, torchtitan, accelerate",
    SIGNS,
    detect,
    open_dcp,
    frozenset({"step"}) | STATE_DICT_OPTIONS,
)
