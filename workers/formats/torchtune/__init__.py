"""torchtune's checkpoints: single files of 0.1 to 0.4, folders of epochs and steps since 0.5, adapters.

Which folder and which files is for ``folders``; the files are those of other formats, and so are read as these.
Sources: torchtune 0.2.1, 0.4.0, 0.5.0, 0.6.1 and 0.7 ``training/checkpointing/_checkpointer.py``.
"""

from __future__ import annotations

from dataclasses import replace

from workers.checkpoint import Checkpoint
from workers.formats import dcp, hf_bin, huggingface
from workers.formats._adapter import open_adapter
from workers.formats._format import Format, Listing
from workers.formats._meta_config import with_meta_config
from workers.formats._namings import META, naming_of_keys
from workers.formats._state_dict import STATE_DICT_OPTIONS
from workers.formats.torchtune.folders import SIGNS, Kind, Place, choose, detect
from workers.options import ConvertOptions


def open_torchtune(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the epoch or step that the options name, or the newest."""
    place = choose(listing, options)
    opened = _open_place(place, options)
    return replace(
        opened,
        format="torchtune",
        evidence=(place.evidence, *opened.evidence),
        notes=(*place.notes, *opened.notes),
    )


def _open_place(place: Place, options: ConvertOptions) -> Checkpoint:
    if place.kind is Kind.DCP:
        return dcp.open_dcp(place.listing, options)
    if place.kind is Kind.SAFETENSORS:
        return huggingface.open_safetensors_model(place.listing, options, place.weights)
    if place.kind is Kind.ADAPTER:
        return open_adapter(place.listing, options, place.weights)
    opened = hf_bin.open_torch_model(place.listing, options, place.weights, "torchtune")
    if naming_of_keys((tensor.name for tensor in opened.tensors), place.evidence) == META:
        return with_meta_config(opened, place.listing, options)
    return opened


FORMAT = Format(
    "torchtune",
    "torchtune checkpoints, with their adapters",
    SIGNS,
    detect,
    open_torchtune,
    frozenset({"step", "epoch", "base", "llama_version"}) | STATE_DICT_OPTIONS,
)
