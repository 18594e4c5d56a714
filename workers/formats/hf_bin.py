"""A Hugging Face model folder whose weights are torch files: ``pytorch_model.bin``, or several and their index.

Source: transformers ``modeling_utils.py`` of before version 5, huggingface_hub ``serialization``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from workers.checkpoint import Checkpoint
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import IncompleteCheckpoint
from workers.formats._checkpoint_of import checkpoint_of
from workers.formats._format import Detection, Format, Listing
from workers.formats._model_folder import CONFIG, find_model_files, read_json
from workers.formats._state_dict import STATE_DICT_OPTIONS, ModelPart, naming_of
from workers.formats._torch_state_dict import StateDicts, add_model, read_state_dicts
from workers.formats._weight_files import BIN, SAFETENSORS, Weights, check_listed, find_weights
from workers.options import ConvertOptions

SIGNS = "pytorch_model.bin, or pytorch_model-*-of-*.bin and pytorch_model.bin.index.json"


def detect(listing: Listing) -> Detection | None:
    """Recognise a folder with such files; safetensors beside them come first, as in transformers."""
    files = listing.files()
    if any(name.endswith((SAFETENSORS.end, SAFETENSORS.index_end)) for name in files):
        return None
    numbered = [name for name in files if BIN.numbered.fullmatch(name)]
    if numbered or f"{BIN.usual[0]}.index.json" in files:
        return Detection((f"{len(numbered)} files pytorch_model-*-of-*.bin",), generic=True)
    return Detection((BIN.usual[0],), generic=True) if BIN.usual[0] in files else None


def open_hf_bin(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open a model folder by the pickles of its files."""
    return open_torch_model(listing, options, find_weights(listing, BIN), "hf-bin")


def open_torch_model(listing: Listing, options: ConvertOptions, weights: Weights, name: str) -> Checkpoint:
    """Open the given files of a model by their pickles."""
    dicts = read_state_dicts(listing.folder, weights.files)
    notes = _check_index(dicts, weights, read_json(listing, CONFIG))
    builder = CheckpointBuilder()
    part = add_model(builder, dicts, options)
    return whole_model(listing, options, builder, name, (weights.evidence, part, (*weights.notes, *notes)))


def whole_model(
    listing: Listing,
    options: ConvertOptions,
    builder: CheckpointBuilder,
    name: str,
    found: tuple[str, ModelPart, tuple[str, ...]],
) -> Checkpoint:
    """The checkpoint of a model that lies in a folder as whole tensors; ``found`` is evidence, part and notes."""
    evidence, part, notes = found
    model = find_model_files(listing, {"": name == "hf-bin"}, options)
    return replace(
        checkpoint_of(listing, builder, model, (name, naming_of(part.names.values(), options))),
        layout={"files": len(builder.files)},
        evidence=(evidence, *model.evidence),
        notes=(*notes, *part.notes),
        left_out=part.left_out,
        packed=part.packed,
        strict_ties=True,
    )


def _check_index(dicts: StateDicts, weights: Weights, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Each tensor must be where the index says; what it does not list is said."""
    listed = check_listed(weights.where, dicts.found, config)
    for name, file in weights.where.items():
        there = dicts.found.get(name)
        if there is not None and dicts.files[there[0]][1].path != file:
            raise IncompleteCheckpoint(
                f"the index says that tensor {name} is in {file}, but it is not",
                file=file,
                tensor=name,
                expected=file,
                found=dicts.files[there[0]][1].path,
                hint="Files of different downloads or versions are mixed: fetch the folder again.",
            )
    beside = [name for name in dicts.found if weights.where and name not in weights.where]
    unlisted = f"{len(beside)} tensors such as {beside[0]} are not in the index" if beside else None
    return tuple(filter(None, (listed, unlisted)))


FORMAT = Format(
    "hf-bin", "Hugging Face model folder (pytorch_model.bin)", SIGNS, detect, open_hf_bin, STATE_DICT_OPTIONS
)
