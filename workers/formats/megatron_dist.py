"""Megatron-Core's distributed checkpoints (``torch_dist``): a torch DCP folder with global tensors.

However training was cut, the tensors are there whole: tensor, pipeline and expert parallelism show in chunks only.
Optimizer state, random states and TransformerEngine's ``_extra_state`` lie beside them and are not read.
Source: Megatron-Core ``dist_checkpointing`` (0.14 to 0.19); see the format's page for the writers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from workers.checkpoint import Checkpoint
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import CorruptFile, IncompleteCheckpoint
from workers.families.megatron import NAMING
from workers.formats._checkpoint_of import checkpoint_of
from workers.formats._dcp_items import add_tensors
from workers.formats._dcp_metadata import METADATA, DcpMetadata, read_dcp_metadata
from workers.formats._format import LARGEST_NOTE_BYTES, Detection, Format, Listing, join
from workers.formats._megatron_folders import HUGGING_FACE, MegatronFolder, choose_folder, model_files, places
from workers.formats._model_folder import ModelFiles, read_json
from workers.formats._steps import STILL_WRITING
from workers.options import ConvertOptions

NAME = "megatron-dist"
BACKEND_FILE = "metadata.json"
BACKEND, BACKEND_KEY = "torch_dist", "sharded_backend"
COMMON_FILE = "common.pt"
"""What is not sharded; Megatron-Core 0.19 no longer writes it."""

_NO_WEIGHT = re.compile(
    r"(chained_\d+\.)?optimizer\..* | chained_\d+\..* | rng_state(/.*)? | rerun_state_machine_state(/.*)?"
    r"| .*\._extra_state(/.*)? | opt_param_scheduler.*",
    re.VERBOSE,
)
# What wrappers of the model put before the names of its modules.
_WRAPPER = re.compile(
    r"^(?:(?:model|module)\.)+(?=(?:embedding|decoder|output_layer|mtp|language_model|vision_model|visual|vision_tower)\.)"
)


def detect(listing: Listing) -> Detection | None:
    """Recognise a folder of ``dist_checkpointing``, of a step or role around it, or of a run."""
    place = next(places(listing, holds), None)
    if place is None:
        return None
    signs = f"{join(place, BACKEND_FILE)} names a {BACKEND_KEY}"
    return Detection(
        (signs if BACKEND_FILE in listing.files(place) else f"{join(place, COMMON_FILE)} of Megatron-Core",)
    )


def holds(listing: Listing, place: str) -> bool:
    """Whether a subfolder holds a distributed checkpoint, finished or not."""
    names = listing.files(place)
    entry = names.get(BACKEND_FILE)
    if entry is None:
        return COMMON_FILE in names and (METADATA in names or any(name.endswith(".distcp") for name in names))
    if entry.size_bytes > LARGEST_NOTE_BYTES:
        return False
    return f'"{BACKEND_KEY}"'.encode() in (listing.read(entry.path) or b"")


def open_megatron_dist(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the checkpoint of the iteration and role that the options or the trainer's own files name."""
    folder = choose_folder(listing, options, holds)
    _check_backend(listing, folder.path)
    metadata = read_dcp_metadata(listing, folder.path)
    names = {tensor.name: _name(tensor.name) for tensor in metadata.tensors if not _NO_WEIGHT.fullmatch(tensor.name)}
    if not names:
        raise _no_weights(listing, folder)
    builder = CheckpointBuilder()
    add_tensors(builder, listing, folder.path, metadata, names)
    model = model_files(listing, folder, options)
    return replace(
        checkpoint_of(listing, builder, model, (NAME, NAMING)),
        layout={"files": len(builder.files), "layers": _layers(names)},
        evidence=_evidence(folder, model),
        notes=folder.notes,
        left_out=_left_out(metadata, names),
    )


def _check_backend(listing: Listing, place: str) -> None:
    path = join(place, BACKEND_FILE)
    if BACKEND_FILE not in listing.files(place):
        raise IncompleteCheckpoint(
            f"{path} is missing: Megatron-Core writes it last, so the save was not finished",
            file=path,
            expected=BACKEND_FILE,
            found=", ".join(sorted(listing.files(place))[:8]),
            hint=f"Take another checkpoint of the run, or copy the missing file, too. {STILL_WRITING}",
        )
    backend = (read_json(listing, path) or {}).get(BACKEND_KEY)
    if backend != BACKEND:
        raise CorruptFile(
            f"{path}: the checkpoint was saved with the backend {backend!r}; only {BACKEND} is read",
            file=path,
            expected=BACKEND,
            found=repr(backend),
            hint=f"Load it with the Megatron-LM that wrote it and save it with --dist-ckpt-format {BACKEND}.",
        )
    if METADATA not in listing.files(place):
        raise IncompleteCheckpoint(
            f"{join(place, METADATA)} is missing, though {path} is there: a copy with * loses files whose names begin "
            "with a dot",
            file=join(place, METADATA),
            expected=METADATA,
            found=", ".join(sorted(listing.files(place))[:8]),
            hint=f"Copy the folder as a whole (cp -r, rsync -a) from where it was saved. {STILL_WRITING}",
        )


def _name(stored: str) -> str:
    return _WRAPPER.sub("", stored)


def _no_weights(listing: Listing, folder: MegatronFolder) -> IncompleteCheckpoint:
    beside = join(folder.owner, HUGGING_FACE)
    has_weights = any(name.endswith(".safetensors") for name in listing.files(beside))
    where = f"{beside}/ has the weights as a Hugging Face model" if has_weights else "its weights lie elsewhere"
    return IncompleteCheckpoint(
        f"{folder.path or 'the folder'} holds optimizer and random states, but no weight of a model; {where}",
        file=join(folder.path, METADATA),
        expected="model tensors such as embedding.word_embeddings.weight",
        found="none",
        hint=f"verl with mbridge saves weights in {HUGGING_FACE}/ only: take that folder as the source.",
    )


def _layers(names: Mapping[str, str]) -> str:
    numbered = any(re.match(r"(language_model\.)?decoder\.layers\.\d+\.", name) for name in names.values())
    return "one by one" if numbered else "stacked"


def _evidence(folder: MegatronFolder, model: ModelFiles) -> tuple[str, ...]:
    backend = f"{join(folder.path, BACKEND_FILE)} says {BACKEND_KEY} {BACKEND}"
    return (backend, *model.evidence, *folder.notes)


def _left_out(metadata: DcpMetadata, taken: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    left = [(name, "optimizer or random state") for name in (t.name for t in metadata.tensors) if name not in taken]
    count = sum("._extra_state" in name for name in metadata.objects)
    return (*left, *([(f"*._extra_state ({count} objects)", "TransformerEngine's own state")] if count else ()))


FORMAT = Format(
    NAME,
    "Megatron-Core torch_dist (Megatron-LM, Megatron-Bridge, slime, verl)",
    "metadata.json with sharded_backend and .metadata, here or in iter_<N>/, release/, <role>/dist_ckpt/",
    detect,
    open_megatron_dist,
    frozenset({"step", "role"}),
)
