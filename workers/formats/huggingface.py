"""A Hugging Face model folder as a source: one safetensors file, or several and their index.

The index and each file's header must agree: nothing is taken from a file that the index would not lead to, and no
name in the index may lead out of the folder.
Source: transformers ``utils/hub.py`` (``get_checkpoint_shard_files``), safetensors' format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from workers.checkpoint import Checkpoint, CheckpointBuilder, SourceFile
from workers.errors import AmbiguousSource, CorruptFile, GeometryMismatch, IncompleteCheckpoint, UnknownFormat
from workers.formats._dcp_safetensors import SHARD
from workers.formats._format import Detection, Format, Listing
from workers.formats._model_folder import CONFIG, find_model_files, read_json
from workers.geometry import contiguous_strides
from workers.options import ConvertOptions
from workers.safetensors_file import SafetensorsFile, StoredTensor, open_safetensors
from workers.storage import FileEntry, Folder

NAMING = "huggingface"
SIGNS = "model.safetensors, or model-*-of-*.safetensors and model.safetensors.index.json"
FILES_AT_ONCE = 8
"""Headers asked of an object store at the same time."""

_INDEX_END = ".safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_USUAL = ("model.safetensors", "adapter_model.safetensors")


_Copy = tuple[str, StoredTensor, int]
"""A tensor's name, the tensor, and the number of a file that has it although the index leads to another."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """The files of a model, and the file of each tensor where an index tells it."""

    files: tuple[FileEntry, ...]
    evidence: str
    where: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def detect(listing: Listing) -> Detection | None:
    """Recognise a folder with safetensors files or an index of them."""
    names = [name for name in listing.files() if name.endswith((".safetensors", _INDEX_END))]
    if not names or all(map(SHARD.fullmatch, names)):
        return None
    return Detection((names[0] if len(names) == 1 else f"{len(names)} files *.safetensors",))


def open_huggingface(listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open a model folder by its headers."""
    weights = _find_weights(listing)
    builder = CheckpointBuilder()
    notes = list(weights.notes)
    holders: dict[str, str] = {}
    copies: list[_Copy] = []
    for opened, entry in _open_all(listing.folder, weights.files):
        notes += _add(builder, opened, entry, weights.where, (holders, copies))
    absent = next((name for name in weights.where if name not in holders), None)
    if absent is not None:
        raise IncompleteCheckpoint(
            f"the index says that tensor {absent} is in {weights.where[absent]}, but it is not",
            file=weights.where[absent],
            tensor=absent,
            hint="Files of different downloads or versions are mixed: fetch the folder again.",
        )
    for name, tensor, file in copies:  # behind all others: the index says which is the model's
        _add_tensor(builder, name, tensor, file)
    storages, pieces, replicas = builder.tables()
    model = find_model_files(listing, {"": True}, options)
    return Checkpoint(
        address=listing.folder.address,
        format="hf",
        naming=NAMING,
        files=tuple(builder.files),
        tensors=tuple(builder.tensors),
        storages=storages,
        pieces=pieces,
        replicas=replicas,
        config=model.config,
        config_path=model.config_path,
        side_files=model.side_files,
        layout={"files": len(builder.files)},
        evidence=(weights.evidence, *((f"config from {model.config_path}",) if model.config_path else ())),
        notes=tuple(notes),
        missing=() if model.config is not None else (f"{CONFIG} (looked in {model.looked_in})",),
    )


def _find_weights(listing: Listing) -> _Weights:
    """Choose the model's files: by an index, by transformers' usual names, else the only ones there are."""
    files = listing.files()
    indexes = [name for name in files if name.endswith(_INDEX_END)]
    index = next((f"{usual}.index.json" for usual in _USUAL if f"{usual}.index.json" in indexes), None)
    if index is None and len(indexes) > 1:
        raise _several(indexes)
    if indexes:
        return _indexed(listing, index or indexes[0])
    usual = next((name for name in _USUAL if name in files), None)
    if usual is not None:
        return _Weights((files[usual],), usual)
    names = sorted(name for name in files if name.endswith(".safetensors"))
    if not names:
        raise UnknownFormat(
            f"{listing.folder.address.url} has no safetensors files", expected=SIGNS, hint="Give a model folder."
        )
    numbered = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    if numbered and len({(match["stem"], match["count"]) for match in numbered}) == 1:
        return _numbered(listing, numbered)
    if len(names) > 1:
        raise _several(names)
    return _Weights((files[names[0]],), names[0])


def _several(names: list[str]) -> AmbiguousSource:
    listed = ", ".join(names[:8])
    return AmbiguousSource(
        f"the folder holds several models, and nothing says which is meant: {listed}",
        found=listed,
        hint="Move the one that is wanted into a folder of its own, with its config.json.",
    )


def _numbered(listing: Listing, found: list[re.Match[str]]) -> _Weights:
    """Files numbered 1 to N without an index: all must be there."""
    stem, count = found[0]["stem"], int(found[0]["count"])
    there = {int(match["number"]) for match in found}
    missing = [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1) if n not in there]
    if missing:
        raise _missing_files(missing)
    files = tuple(listing.files()[match.group()] for match in found)
    return _Weights(files, f"{count} files {stem}-*-of-{count:05d}.safetensors", notes=("there is no index file",))


def _missing_files(names: list[str], tensor: str | None = None) -> IncompleteCheckpoint:
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    example = f"; by the index, {names[0]} holds for example tensor {tensor}" if tensor is not None else ""
    return IncompleteCheckpoint(
        f"weights are missing: {listed}{example}",
        file=names[0],
        tensor=tensor,
        expected=listed,
        found="no such file",
        hint="The download or copy is not complete: fetch the folder again.",
    )


def _indexed(listing: Listing, index: str) -> _Weights:
    where = (read_json(listing, index) or {}).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CorruptFile(f"{index} has no weight_map from tensors to files", file=index, expected="a weight_map")
    names = sorted(set(where.values()))
    outside = next((name for name in names if not _is_plain(name)), None)
    if outside is not None:
        raise CorruptFile(
            f"{index} names the file {outside!r}, which is no file of its folder",
            file=index,
            expected="the name of a safetensors file beside the index",
            found=outside,
            hint="Do not use an index that leads out of its folder.",
        )
    missing = [name for name in names if name not in listing.files()]
    if missing:
        raise _missing_files(missing, next(tensor for tensor, name in where.items() if name == missing[0]))
    whole = index.removesuffix(".index.json")
    if whole in listing.files() and whole not in names:
        raise AmbiguousSource(
            f"the folder holds {whole}, which transformers would load, and {index}, which other loaders follow, and "
            "that names other files",
            file=index,
            found=f"{whole}, {', '.join(names[:4])}",
            hint="They may be of different versions of the model: move one of the two out of the folder.",
        )
    return _Weights(tuple(listing.files()[name] for name in names), f"{index} over {len(names)} files", where)


def _is_plain(name: str) -> bool:
    return name.endswith(".safetensors") and not re.search(r"[/\\\x00]", name)


def _open_all(folder: Folder, files: tuple[FileEntry, ...]) -> Iterator[tuple[SafetensorsFile, FileEntry]]:
    with ThreadPoolExecutor(1 if folder.is_local else FILES_AT_ONCE, thread_name_prefix="headers") as pool:
        opened = pool.map(lambda entry: open_safetensors(folder, entry.path, entry.size_bytes), files)
        yield from zip(opened, files, strict=True)


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
