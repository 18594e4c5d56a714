"""Which of torchtune's folders and files hold the model that is meant: by names alone.

Sources: torchtune 0.2 to 0.7 ``training/checkpointing/_checkpointer.py``, ``_utils.py``
(``get_most_recent_checkpoint``).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from workers.errors import AmbiguousSource, IncompleteCheckpoint, UnknownFormat
from workers.formats._format import Detection, Listing
from workers.formats._steps import check_step
from workers.formats._weight_files import BIN, OF_EPOCH, SAFETENSORS, Weights, find_weights
from workers.options import ConvertOptions
from workers.storage import FileEntry

SIGNS = (
    "torchtune_model_E.pt, meta_model_E.pt, hf_model_NNNN_E.pt, adapter_model.pt, model-*-of-*.bin, or epoch_E/ and "
    "step_S/ with weights"
)

_ADAPTER = "adapter_model.pt"
_FOLDER = re.compile(r"(?P<kind>epoch|step)_(?P<number>\d{1,18})")
_FLAT = re.compile(r"(torchtune|meta)_model_(?P<epoch>\d{1,18})\.pt")
_FLAT_SHARD = re.compile(r"hf_model_(?P<shard>\d{4})_(?P<epoch>\d{1,18})\.pt")
_FLAT_ADAPTER = re.compile(r"adapter_(?P<epoch>\d{1,18})\.pt")
_NUMBERED_BIN = re.compile(r"(ft-)?model-\d{5}-of-\d{5}\.bin")
_MODEL_SAFETENSORS = re.compile(r"((ft-)?model-\d{5}-of-\d{5}|model)\.safetensors")


class Kind(Enum):
    """What files hold the weights."""

    TORCH = "files of torch.save"
    SAFETENSORS = "safetensors files"
    DCP = "a DCP folder"
    ADAPTER = "an adapter alone"


@dataclass(frozen=True, slots=True)
class Place:
    """The folder that holds the model, and which of its files do."""

    listing: Listing
    kind: Kind
    weights: Weights
    evidence: str
    notes: tuple[str, ...] = ()


def detect(listing: Listing) -> Detection | None:
    """Recognise torchtune's names, here or in folders of epochs and steps."""
    files = listing.files()
    flat = next((name for name in files if _is_flat(name)), None)
    if flat is not None:
        return Detection((flat,))
    if _ADAPTER in files and not _has_model(files):
        return Detection((f"{_ADAPTER} and no model beside it",))
    numbered = next(filter(_NUMBERED_BIN.fullmatch, files), None)
    if numbered is not None:
        return Detection((numbered,))
    newest = next(iter(_folders(listing).values()), None)
    return Detection((f"{newest}/ holds weights",)) if newest is not None else None


def choose(listing: Listing, options: ConvertOptions) -> Place:
    """Choose the folder, then the files. Raises ``IncompleteCheckpoint`` where what is asked for is not there."""
    folders = _folders(listing, with_dcp=True)
    if any(map(_is_flat, listing.files())) or _holds_weights(listing.files()) or not folders:
        check_step(listing, options)
        if not any(map(_is_flat, listing.files())):
            check_step(listing, options, "epoch")
        return _in_folder(listing, options, ())
    name = _chosen(listing, folders, options)
    others = [other for other in folders.values() if other != name]
    told = f"{name}/, {'as asked for' if _asked(options) else 'the newest'}"
    notes = [f"{told}; not taken: {', '.join(others[:8])}" if others else told]
    if not _asked(options):
        newer = itertools.takewhile(lambda other: other != name, folders.values())
        notes += [f"{other}/ is newer, but not complete: files of its model are missing" for other in newer]
    return _in_folder(Listing(listing.folder.subfolder(name)), options, tuple(notes))


def _in_folder(listing: Listing, options: ConvertOptions, notes: tuple[str, ...]) -> Place:
    files = listing.files()
    if ".metadata" in files:
        return Place(listing, Kind.DCP, Weights((), ""), ".metadata of torch DCP", notes)
    if any(map(_is_flat, files)):
        return _flat(listing, options, notes)
    if any(map(_MODEL_SAFETENSORS.fullmatch, files)):
        weights = find_weights(listing, SAFETENSORS)
        return Place(listing, Kind.SAFETENSORS, weights, "safetensors files of torchtune", notes)
    if any(name.endswith(BIN.end) for name in files if name != "adapter_model.bin"):
        return Place(listing, Kind.TORCH, find_weights(listing, BIN), "torch files of torchtune", notes)
    if _ADAPTER in files:
        weights = Weights((files[_ADAPTER],), _ADAPTER)
        beside = next((name for name in files if name in ("adapter_model.safetensors", "adapter_model.bin")), None)
        if beside is not None:
            notes = (*notes, f"{_ADAPTER} is taken, not {beside}: torchtune's own export is wrong for some models")
        return Place(listing, Kind.ADAPTER, weights, f"{_ADAPTER} and no model beside it", notes)
    raise UnknownFormat(
        f"{listing.folder.address.url} has no weights of torchtune",
        expected=SIGNS,
        found=", ".join(list(files)[:8]) or "nothing",
        hint="Give the folder of an epoch or step.",
    )


def _flat(listing: Listing, options: ConvertOptions, notes: tuple[str, ...]) -> Place:
    """The files of one epoch of torchtune 0.1 to 0.4, which lie beside those of the others."""
    files = listing.files()
    found = [
        (int(match["epoch"]), pattern, name)
        for pattern in (_FLAT, _FLAT_SHARD, OF_EPOCH, _FLAT_ADAPTER)
        for name in sorted(files)
        if (match := pattern.fullmatch(name))
    ]
    models = [row for row in found if row[1] is not _FLAT_ADAPTER] or found
    epochs = sorted({epoch for epoch, _, _ in models})
    epoch = options.epoch if options.epoch is not None else epochs[-1]
    if epoch not in epochs:
        raise _no_such("epoch", epoch, epochs)
    rows = [row for row in models if row[0] == epoch]
    pattern = rows[0][1]
    names = [name for _, _, name in rows]
    if any(kind is not pattern for _, kind, _ in rows) or (pattern is _FLAT and len(names) > 1):
        raise AmbiguousSource(
            f"{listing.folder.address.url} holds several models of epoch {epoch}: {', '.join(names[:8])}",
            expected="one model of each epoch",
            found=", ".join(names[:8]),
            hint="They are of runs with different checkpointers: move the files of one into a folder of their own.",
        )
    if pattern in (_FLAT_SHARD, OF_EPOCH):
        _check_shards(names, pattern)
    kind = Kind.SAFETENSORS if pattern is OF_EPOCH else Kind.TORCH
    kind = Kind.ADAPTER if pattern is _FLAT_ADAPTER else kind
    told = "the option epoch says so" if options.epoch is not None else f"the newest of {len(epochs)}"
    notes = (*notes, f"epoch {epoch}: {told}")
    return Place(listing, kind, Weights(tuple(files[name] for name in names), names[0]), names[0], notes)


def _check_shards(names: list[str], pattern: re.Pattern[str]) -> None:
    """Shards are numbered from 1 without a gap; safetensors say how many there are."""
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    numbers = {int(match["shard"]) for match in matches}
    counts = {int(match["count"]) for match in matches} if pattern is OF_EPOCH else {max(numbers)}
    absent = next((number for number in range(1, max(counts) + 1) if number not in numbers), None)
    if absent is not None:
        start, end = matches[0].span("shard")
        missing = f"{names[0][:start]}{absent:04d}{names[0][end:]}"
        raise IncompleteCheckpoint(
            f"{missing} is missing: the shards of epoch {matches[0]['epoch']} are {', '.join(names[:8])}",
            file=missing,
            expected=missing,
            found=", ".join(names[:8]),
            hint="Never mix shards of different epochs: fetch the missing one, or take another epoch.",
        )


def _folders(listing: Listing, *, with_dcp: bool = False) -> dict[tuple[str, int], str]:
    """The folders that hold weights, the newest first: epochs before steps, then by number."""
    found = {}
    for name in listing.folders():
        match = _FOLDER.fullmatch(name)
        if match is None:
            continue
        files = listing.files(name)
        if (".metadata" in files and with_dcp) or _holds_weights(files):
            found[match["kind"], int(match["number"])] = name
    newest = sorted(found, key=lambda key: (key[0] != "epoch", -key[1]))
    if newest and not with_dcp and ".metadata" in listing.files(found[newest[0]]):
        return {}
    return {key: found[key] for key in newest}


def _chosen(listing: Listing, folders: Mapping[tuple[str, int], str], options: ConvertOptions) -> str:
    """The folder that is asked for, else the newest complete one, else the newest, which then says what it lacks."""
    for kind, asked in (("step", options.step), ("epoch", options.epoch)):
        if asked is not None:
            if (kind, asked) not in folders:
                raise _no_such(kind, asked, [number for there, number in folders if there == kind])
            return folders[kind, asked]
    complete = (name for name in folders.values() if _is_complete(listing.files(name)))
    return next(complete, next(iter(folders.values())))


def _is_complete(files: Mapping[str, FileEntry]) -> bool:
    """Whether all of the numbered files of a model are there, for all that their names tell."""
    found = [match for name in files for kind in (BIN, SAFETENSORS) if (match := kind.numbered.fullmatch(name))]
    there = Counter((match["stem"], match["count"]) for match in found)
    return all(int(count) == number for (_, count), number in there.items())


def _asked(options: ConvertOptions) -> bool:
    return options.step is not None or options.epoch is not None


def _no_such(kind: str, asked: int, there: list[int]) -> IncompleteCheckpoint:
    listed = ", ".join(map(str, sorted(there))) or "none"
    return IncompleteCheckpoint(
        f"there is no complete {kind}_{asked}; there are: {listed}",
        expected=f"{kind}_{asked}",
        found=listed,
        hint=f"Name one of these with the option {kind}.",
    )


def _is_flat(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_FLAT, _FLAT_SHARD, OF_EPOCH, _FLAT_ADAPTER))


def _has_model(files: Mapping[str, FileEntry]) -> bool:
    return any(_NUMBERED_BIN.fullmatch(name) or _MODEL_SAFETENSORS.fullmatch(name) for name in files)


def _holds_weights(files: Mapping[str, FileEntry]) -> bool:
    return _ADAPTER in files or _has_model(files)
