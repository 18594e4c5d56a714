"""A Hugging Face model folder as a source: one safetensors file, or several and their index.

The index and each file's header must agree: nothing is taken from a file that the index would not lead to, and no
name in the index may lead out of the folder.
Source: transformers ``utils/hub.py`` (``get_checkpoint_shard_files``), safetensors' format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import xxhash

from workers.checkpoint import Checkpoint, SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.errors import GeometryMismatch
from workers.formats._checkpoint_of import checkpoint_of
from workers.formats._dcp_safetensors import SHARD
from workers.formats._format import Detection, Format, Listing, join
from workers.formats._meta_config import with_meta_config
from workers.formats._model_folder import find_model_files
from workers.formats._namings import META, TORCHTUNE, naming_of_keys
from workers.formats._reading import read_ahead
from workers.formats._weight_files import ADAPTER, OF_EPOCH, SAFETENSORS, Weights, check_listed, find_weights
from workers.geometry import contiguous_strides
from workers.options import ConvertOptions
from workers.safetensors_file import SafetensorsFile, StoredTensor, open_safetensors
from workers.storage import FileEntry, Folder

NAMING = "huggingface"
ADAPTER_FOLDER = "lora_adapter"
"""Where an adapter is kept apart from the model that it belongs to: by verl, and by a conversion."""

SIGNS = "model.safetensors, or model-*-of-*.safetensors and model.safetensors.index.json"
_Copy = tuple[str, StoredTensor, int]
"""A tensor's name, the tensor, and the number of a file that has it although the index leads to another."""


def detect(listing: Listing) -> Detection | None:
    """Recognise a folder with safetensors files or an index of them."""
    ends = SAFETENSORS.end, SAFETENSORS.index_end
    names = [name for name in listing.files() if name.endswith(ends) and not OF_EPOCH.fullmatch(name)]
    if not names or all(map(SHARD.fullmatch, names)) or names == [ADAPTER]:
        return None
    return Detection((names[0] if len(names) == 1 else f"{len(names)} files *.safetensors",))


def open_huggingface(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open a model folder by its headers."""
    weights = find_weights(listing, SAFETENSORS)
    return open_safetensors_model(listing, options, replace(weights, notes=(*weights.notes, *_left_out(listing))))


def _left_out(listing: Listing) -> Iterator[str]:
    """A note on adapters beside the model, which are no part of it."""
    for folder in ("", *(name for name in listing.folders() if name == ADAPTER_FOLDER)):
        if ADAPTER in listing.files(folder):
            yield f"{join(folder, ADAPTER)} beside the model is an adapter, and left out"


def open_safetensors_model(listing: Listing, options: ConvertOptions, weights: Weights) -> Checkpoint:
    """Open the given files of a model by their headers."""
    builder = CheckpointBuilder()
    notes = list(weights.notes)
    holders: dict[str, str] = {}
    copies: list[_Copy] = []
    with read_ahead(listing.folder, weights.files, partial(_open, listing.folder)) as files:
        for opened, entry in files:
            notes += _add(builder, opened, entry, weights.where, (holders, copies))
    model = find_model_files(listing, {"": True}, options)
    listed = check_listed(weights.where, holders, model.config)
    notes += [listed] if listed else []
    for name, tensor, file in copies:  # behind all others: the index says which is the model's
        _add_tensor(builder, name, tensor, file)
    naming = naming_of_keys(holders, listing.folder.address.url)
    naming = naming if naming in (TORCHTUNE, META) else NAMING
    whole = replace(
        checkpoint_of(listing, builder, model, ("hf", naming)),
        layout={"files": len(builder.files)},
        evidence=(weights.evidence, *model.evidence),
        notes=tuple(notes),
    )
    return with_meta_config(whole, listing, options) if naming == META else whole


def _open(folder: Folder, entry: FileEntry) -> tuple[SafetensorsFile, FileEntry]:
    return open_safetensors(folder, entry.path, entry.size_bytes), entry


def _add(
    builder: CheckpointBuilder,
    opened: SafetensorsFile,
    entry: FileEntry,
    where: Mapping[str, str],
    met: tuple[dict[str, str], list[_Copy]],
) -> list[str]:
    """Add a file's tensors; ``met`` collects which file each came from, and copies of those. Returns notes."""
    holders, copies = met
    name_here = entry.path.rpartition("/")[2]
    digest = xxhash.xxh3_128_hexdigest(opened.header)
    file = builder.add_file(SourceFile(entry.path, entry.size_bytes, None, digest, entry.version))
    repeated = [name for name in opened.tensors if where.get(name, name_here) != name_here]
    beside = [name for name in opened.tensors if where and name not in where]
    for name, tensor in opened.tensors.items():
        if where.get(name, name_here) != name_here:
            copies.append((name, tensor, file))
            continue
        if name in holders:
            raise GeometryMismatch(
                f"tensor {name} is in {holders[name]} and in {name_here}, and no index says which counts",
                file=name_here,
                tensor=name,
                hint="Files of different models are mixed: fetch the folder again.",
            )
        holders[name] = name_here
        _add_tensor(builder, name, tensor, file)
    notes = [f"{name_here} repeats {len(repeated)} tensors that the index has elsewhere"] if repeated else []
    return notes + ([f"{name_here} has {len(beside)} tensors that the index does not list"] if beside else [])


def _add_tensor(builder: CheckpointBuilder, name: str, tensor: StoredTensor, file: int) -> None:
    number = builder.add_tensor(name, tensor.dtype, tensor.shape)
    storage = builder.add_storage(file, tensor.offset, tensor.length_bytes, None)
    box = (0,) * len(tensor.shape), tensor.shape
    builder.add_piece(number, storage, tensor.offset, box, contiguous_strides(tensor.shape))


FORMAT = Format("hf", "Hugging Face model folder (safetensors)", SIGNS, detect, open_huggingface)
