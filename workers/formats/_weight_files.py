"""The weight files of a Hugging Face model folder: one file, or several and their index.

The same for safetensors and for torch's ``.bin``. No name in an index may lead out of the folder.
Source: transformers ``utils/hub.py`` (``get_checkpoint_shard_files``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.errors import AmbiguousSource, CorruptFile, IncompleteCheckpoint, UnknownFormat
from workers.formats._format import Listing
from workers.formats._model_folder import read_json
from workers.storage import FileEntry

_HEAD = "lm_head.weight"
_MADE_ANEW = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Names:
    """How the files of a kind are called."""

    end: str
    usual: tuple[str, ...]
    """What transformers looks for first."""
    others: bool
    """Whether any file with that end may be the model when it is the only one."""

    @property
    def index_end(self) -> str:
        """End of the names of indexes."""
        return f"{self.end}.index.json"

    @property
    def numbered(self) -> re.Pattern[str]:
        """Names of files that are some of several."""
        return re.compile(rf"(?P<stem>.+)-(?P<number>\d{{5}})-of-(?P<count>\d{{5}}){re.escape(self.end)}")


OF_EPOCH = re.compile(r"model-0(?P<shard>\d{4})-of-0(?P<count>\d{4})_(?P<epoch>\d{1,18})\.safetensors")
"""Names of torchtune 0.2 to 0.4, which keeps the epochs of a run in one folder: no loader of the hub knows these."""

ADAPTER = "adapter_model.safetensors"
"""PEFT's adapter. It may lie beside a model, and is none."""

SAFETENSORS = Names(".safetensors", ("model.safetensors",), others=True)
BIN = Names(".bin", ("pytorch_model.bin",), others=False)


@dataclass(frozen=True, slots=True)
class Weights:
    """The files of a model, and the file of each tensor where an index tells it."""

    files: tuple[FileEntry, ...]
    evidence: str
    where: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find_weights(listing: Listing, kind: Names) -> Weights:
    """Choose the model's files: by an index, by transformers' usual names, else the only ones there are."""
    files = listing.files()
    indexes = [name for name in files if name.endswith(kind.index_end) and name != f"{ADAPTER}.index.json"]
    index = next((f"{usual}.index.json" for usual in kind.usual if f"{usual}.index.json" in indexes), None)
    if index is None and len(indexes) > 1:
        raise _several(indexes)
    if indexes:
        return _indexed(listing, kind, index or indexes[0])
    usual = next((name for name in kind.usual if name in files), None)
    if usual is not None:
        stem = usual.removesuffix(kind.end)
        parts = [name for name in files if (match := kind.numbered.fullmatch(name)) and match["stem"] == stem]
        if parts:
            raise _several([usual, *sorted(parts)])
        return Weights((files[usual],), usual)
    names = sorted(
        name
        for name in files
        if name.endswith(kind.end) and name != ADAPTER and (kind.others or kind.numbered.fullmatch(name))
    )
    if not names:
        raise UnknownFormat(
            f"{listing.folder.address.url} has no {kind.end[1:]} files of a model",
            expected=kind.usual[0],
            hint=f"{ADAPTER} is an adapter: its format is peft." if ADAPTER in files else "Give a model folder.",
        )
    numbered = [match for name in names if (match := kind.numbered.fullmatch(name))]
    if numbered and len({(match["stem"], match["count"]) for match in numbered}) == 1:
        return _numbered(listing, kind, numbered)
    if len(names) > 1:
        raise _several(names)
    return Weights((files[names[0]],), names[0])


def check_listed(where: Mapping[str, str], present: Collection[str], config: Mapping[str, Any] | None) -> str | None:
    """See that all tensors of an index are there; a note on those that trainers list although they save them not.

    torchtune's index keeps what was loaded: rotary tables, and the head of models whose embeddings are tied.
    Source: torchtune 0.4 to 0.6 ``training/checkpointing/_checkpointer.py`` (``_weight_map``).
    """
    absent = [name for name in where if name not in present]
    tied = config is None or config.get("tie_word_embeddings") is not False
    lost = next((name for name in absent if not (name.endswith(_MADE_ANEW) or (name == _HEAD and tied))), None)
    if lost is not None:
        raise IncompleteCheckpoint(
            f"the index says that tensor {lost} is in {where[lost]}, but it is not",
            file=where[lost],
            tensor=lost,
            expected=where[lost],
            found="no such tensor",
            hint="Files of different downloads or versions are mixed: fetch the folder again.",
        )
    return f"the index lists {len(absent)} tensors such as {absent[0]} that no file has or needs" if absent else None


def _several(names: list[str]) -> AmbiguousSource:
    listed = ", ".join(names[:8])
    return AmbiguousSource(
        f"the folder holds several models, and nothing says which is meant: {listed}",
        found=listed,
        hint="Move the one that is wanted into a folder of its own, with its config.json.",
    )


def _numbered(listing: Listing, kind: Names, found: list[re.Match[str]]) -> Weights:
    """Files numbered 1 to N without an index: all must be there."""
    stem, count = found[0]["stem"], int(found[0]["count"])
    there = {int(match["number"]) for match in found}
    missing = [f"{stem}-{n:05d}-of-{count:05d}{kind.end}" for n in range(1, count + 1) if n not in there]
    if missing:
        raise _missing_files(missing)
    files = tuple(listing.files()[match.group()] for match in found)
    return Weights(files, f"{count} files {stem}-*-of-{count:05d}{kind.end}", notes=("there is no index file",))


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


def _indexed(listing: Listing, kind: Names, index: str) -> Weights:
    where = (read_json(listing, index) or {}).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CorruptFile(f"{index} has no weight_map from tensors to files", file=index, expected="a weight_map")
    names = sorted(set(where.values()))
    outside = next((name for name in names if not _is_plain(name, kind)), None)
    if outside is not None:
        raise CorruptFile(
            f"{index} names the file {outside!r}, which is no file of its folder",
            file=index,
            expected=f"the name of a file *{kind.end} beside the index",
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
    return Weights(tuple(listing.files()[name] for name in names), f"{index} over {len(names)} files", where)


def _is_plain(name: str, kind: Names) -> bool:
    return name.endswith(kind.end) and not re.search(r"[/\\\x00]", name)
