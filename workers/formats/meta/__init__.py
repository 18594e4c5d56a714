"""Meta's original checkpoints: params.json beside consolidated.NN.pth, one file for each rank of tensor parallelism.

Which part of a tensor a file holds is for ``cuts``, the config for ``_meta_config``.
Sources: llama-models ``models/checkpoint.py``, ``models/llama3/model.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from workers.checkpoint import Checkpoint, SourceFile
from workers.checkpoint_builder import CheckpointBuilder
from workers.dtypes import ELEMENT_TYPES
from workers.errors import GeometryMismatch, IncompleteCheckpoint, UnknownFormat
from workers.formats._checkpoint_of import checkpoint_of
from workers.formats._format import Detection, Format, Listing
from workers.formats._meta_config import PARAMS, Params, no_params, read_params, with_meta_config
from workers.formats._model_folder import CONFIG, ModelFiles, find_model_files
from workers.formats._namings import META
from workers.formats._nested import no_plain_tensor
from workers.formats._torch_state_dict import StateDicts, read_state_dicts
from workers.formats.meta.cuts import Sizes, parts_of
from workers.options import ConvertOptions
from workers.storage import FileEntry
from workers.torch_file import resolve

SIGNS = "consolidated.pth, or consolidated.NN.pth"
NORM_TOLERANCE = 0.1
"""Norms that all files should have alike differ a little in released Llama 3 70B; more than this is no rounding."""

_ORIGINAL = "original"
"""Where repositories on the hub keep Meta's own files."""
_SINGLE = "consolidated.pth"
_NUMBERED = re.compile(r"consolidated\.(?P<number>\d{2,4})\.pth")
_EXTRA = "._extra_state"
_OF_A_RANK = re.compile(r"(.+\.)?(\w+_gate_stats_3E|expert_activation_DE|rope\.freqs|freq_cis)")
"""Statistics that each rank has of its own, and rotary tables: no weights, so that the first file's do."""


def detect(listing: Listing) -> Detection | None:
    """Recognise Meta's file names."""
    names = [name for name in listing.files() if name == _SINGLE or _NUMBERED.fullmatch(name)]
    if names:
        params = (PARAMS,) if PARAMS in listing.files() else ()
        return Detection((f"{len(names)} files consolidated.*.pth" if len(names) > 1 else names[0], *params))
    if _ORIGINAL in listing.folders() and not listing.files() and detect(_original(listing)) is not None:
        return Detection((f"{_ORIGINAL}/ holds consolidated.*.pth",))
    return None


def open_meta(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open the files of all ranks by their pickles."""
    entries = _files(listing)
    if not entries and _ORIGINAL in listing.folders():
        return open_meta(_original(listing), options)
    if not entries:
        raise UnknownFormat(
            f"{listing.folder.address.url} has no {SIGNS}",
            expected=SIGNS,
            found=", ".join(list(listing.files())[:8]) or "nothing",
            hint="Give the folder that holds the weights; on the hub it is called original.",
        )
    model = find_model_files(listing, {"": False}, options)
    sizes = _sizes(listing, model)
    ranks = [_Rank(number, entry, read_state_dicts(listing.folder, [entry])) for number, entry in enumerate(entries)]
    _check_plain(ranks)
    _check_same_keys(ranks)
    builder = CheckpointBuilder()
    left_out: list[tuple[str, str]] = []
    for rank in ranks:
        left_out += _add(builder, rank, sizes, len(ranks))
    whole = replace(
        checkpoint_of(listing, builder, model, ("meta", META)),
        layout={"world_size": len(ranks), "tensor_parallel": len(ranks)},
        evidence=(f"{len(ranks)} files consolidated.*.pth",),
        left_out=tuple(left_out),
        replica_tolerance=NORM_TOLERANCE,
    )
    return with_meta_config(whole, listing, options)


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    entry: FileEntry
    dicts: StateDicts


def _original(listing: Listing) -> Listing:
    return Listing(listing.folder.subfolder(_ORIGINAL))


def _files(listing: Listing) -> list[FileEntry]:
    """The files by rank; ``IncompleteCheckpoint`` names the first that is missing."""
    files = listing.files()
    found = {int(match["number"]): name for name in files if (match := _NUMBERED.fullmatch(name))}
    if not found:
        return [files[_SINGLE]] if _SINGLE in files else []
    width = len(next(iter(found.values()))) - len("consolidated..pth")
    absent = next((number for number in range(max(found)) if number not in found), None)
    if absent is not None:
        name = f"consolidated.{absent:0{width}d}.pth"
        raise IncompleteCheckpoint(
            f"{name} is missing: there are {', '.join(found[number] for number in sorted(found)[:16])}",
            file=name,
            expected=name,
            found="no such file",
            hint="Fetch the missing file of the same release.",
        )
    return [files[found[number]] for number in sorted(found)]


def _sizes(listing: Listing, model: ModelFiles) -> Sizes:
    """What cuts must know of the model: by params.json, else by the config."""
    params = read_params(listing)
    if params is not None:
        moe = params.values.get("moe_args")
        experts = Params(moe).whole("num_experts", 1) if isinstance(moe, dict) else 1
        heads = params.whole("n_heads")
        return Sizes(params.whole("dim"), heads, params.key_value_heads, params.head_dim, experts, PARAMS)
    if model.config is None:
        raise no_params(listing)
    text = model.config.get("text_config")
    told = Params(text if isinstance(text, dict) else model.config)
    hidden, heads = told.whole("hidden_size"), told.whole("num_attention_heads")
    return Sizes(
        hidden,
        heads,
        told.whole("num_key_value_heads", heads),
        told.whole("head_dim", hidden // heads),
        told.whole("num_local_experts", 1),
        CONFIG,
    )


def _check_plain(ranks: list[_Rank]) -> None:
    """Refuse weights that are no plain tensors: which rows of them a file holds, cuts can't tell."""
    for rank in ranks:
        rank.dicts.refuse_others(rank.dicts.others)
        for packed in rank.dicts.packed:
            raise no_plain_tensor(rank.entry.path, packed.name, "a tensor of torchao in 4 bits")


def _check_same_keys(ranks: list[_Rank]) -> None:
    first = ranks[0]
    for rank in ranks[1:]:
        differing = sorted(first.dicts.found.keys() ^ rank.dicts.found.keys())
        if differing:
            there, other = (first, rank) if differing[0] in first.dicts.found else (rank, first)
            raise GeometryMismatch(
                f"{there.entry.path} has the tensor {differing[0]}, which {other.entry.path} does not have",
                file=other.entry.path,
                tensor=differing[0],
                expected="the same tensors in all files",
                found=f"{len(differing)} that only one of the two has",
                hint="The files are of different releases or one is damaged: fetch them again.",
            )


def _add(builder: CheckpointBuilder, rank: _Rank, sizes: Sizes, count: int) -> list[tuple[str, str]]:
    """Add what a file holds; names of what is no weight, and why."""
    ((opened, entry),) = rank.dicts.files
    digest = opened.directory_digest
    file = builder.add_file(SourceFile(entry.path, entry.size_bytes, rank.number, digest, entry.version))
    storages: dict[str, int] = {}
    left_out = [(name, "no weight") for name in opened.root if str(name).endswith(_EXTRA)] if rank.number == 0 else []
    for name, (_, record) in rank.dicts.found.items():
        if rank.number and _OF_A_RANK.fullmatch(name):
            continue
        if record.shape == (0,):
            left_out += [(name, "an empty tensor")] if rank.number == 0 else []
            continue
        place = resolve(opened, record, name=name)
        key = record.storage.key
        if key not in storages:
            stored = place.stored
            storages[key] = builder.add_storage(file, stored.offset, stored.length_bytes, stored.crc32)
        width = ELEMENT_TYPES[record.dtype].size_bytes
        for part in parts_of(name, record.shape, (rank.number, count), sizes):
            number = builder.add_tensor(part.name, record.dtype, part.shape)
            start = place.offset + (part.first_row * place.strides[0] * width if place.strides else 0)
            builder.add_piece(number, storages[key], start, (part.offsets, part.sizes), place.strides)
    return left_out


FORMAT = Format(
    "meta",
    "Meta's original Llama checkpoints (consolidated.NN.pth)",
    SIGNS,
    detect,
    open_meta,
    frozenset({"llama_version"}),
)
