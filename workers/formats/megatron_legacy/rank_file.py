"""Read one rank file: the tensors of each virtual pipeline stage, where they lie, and what training was told.

Megatron-LM saves a dict with ``model`` (``model0``, ``model1`` ... with virtual stages) beside ``args``; verl saves a
list of state dicts. Names are as the modules have them, with local layer and expert numbers.
Sources: Megatron-LM ``training/checkpointing.py``; verl ``utils/checkpoint/megatron_checkpoint_manager.py`` (0.3).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from workers.errors import CorruptFile, GeometryMismatch, InputError
from workers.formats._nested import leaves
from workers.formats._steps import STILL_WRITING
from workers.geometry import Shape
from workers.pickles import Record, TensorRecord, paused_collector
from workers.shown import shown
from workers.storage import FileEntry, Folder
from workers.torch_file import StoredRange, TorchFile, open_torch_file, resolve

OLDEST_VERSION = 2.0
"""Before it, query_key_value has its rows in other orders (Megatron-LM ``fix_query_key_value_ordering``)."""

_MODEL = re.compile(r"model(\d*)")
_WRAPPER = re.compile(r"^(module\.)+")
# Names of before Megatron-Core; shapes and orders of rows are the same.
_OLD_NAMES = (
    (re.compile(r"^language_model\.embedding\."), "embedding."),
    (re.compile(r"^(language_model\.)?output_layer\."), "output_layer."),
    (re.compile(r"^language_model\.(encoder|transformer)\.layers\."), "decoder.layers."),
    (re.compile(r"^language_model\.(encoder|transformer)\.final_(layer)?norm\."), "decoder.final_layernorm."),
    (re.compile(r"\.(self_)?attention\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.(self_)?attention\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.mlp\.dense_h_to_4h\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.dense_4h_to_h\."), ".mlp.linear_fc2."),
    (re.compile(r"\.input_(layer)?norm\."), ".input_layernorm."),
    (re.compile(r"\.post_attention_(layer)?norm\."), ".pre_mlp_layernorm."),
)


class Held(NamedTuple):
    """A tensor as one rank holds it: its place in the file, and the storage that holds it."""

    name: str
    dtype: str
    shape: Shape
    strides: Shape
    start: int
    stored: StoredRange


@dataclass(frozen=True, slots=True)
class RankContent:
    """What one rank file holds: tensors by virtual stage, and the arguments of the training run."""

    entry: FileEntry
    digest: str
    stages: tuple[tuple[Held, ...], ...]
    arguments: Mapping[str, Any]
    iteration: int | None
    """The training step, where the file tells."""
    extra_states: int
    """How many entries of TransformerEngine are left out."""


def read_rank_file(folder: Folder, entry: FileEntry) -> RankContent:
    """Read a rank file's metadata. Raises what ``open_torch_file`` raises, and ``CorruptFile`` for other content."""
    with paused_collector:
        try:
            file = open_torch_file(folder, entry.path, entry.size_bytes)
        except CorruptFile as error:
            error.hint = f"{error.hint} {STILL_WRITING}".strip()
            raise
        stages, arguments = _stages(file)
        entries = [list(_flat(entry.path, stage)) for stage in stages]
        held = tuple(tuple(_held(file, stage)) for stage in entries)
        extra = sum(len(stage) for stage in entries) - sum(map(len, held))
    iteration = file.root.get("iteration") if isinstance(file.root, dict) else None
    told = iteration if type(iteration) is int else None
    return RankContent(entry, file.directory_digest, held, arguments, told, extra)


def _stages(file: TorchFile) -> tuple[list[Any], Mapping[str, Any]]:
    root = file.root
    if isinstance(root, list):
        return list(root), {}
    if not isinstance(root, dict):
        _refuse(file.path, "a dict with model, or a list of state dicts", f"a {type(root).__name__}")
    numbered = {
        match[1]: value for key, value in root.items() if isinstance(key, str) and (match := _MODEL.fullmatch(key))
    }
    if not numbered:
        keys = ", ".join(key if type(key) is str else shown(key, 80) for key in islice(root, 8))
        _refuse(file.path, "the key model, or model0, model1 ...", keys or "an empty dict")
    if "" in numbered and len(numbered) > 1:
        _refuse(file.path, "model, or model0, model1 ...", "both: " + ", ".join(f"model{key}" for key in numbered))
    _check_version(file.path, root)
    arguments = root.get("args")
    told = arguments.state if isinstance(arguments, Record) and isinstance(arguments.state, dict) else {}
    plain = {key: value for key, value in told.items() if value is None or type(value) in (bool, int, float, str)}
    return [numbered[key] for key in sorted(numbered, key=lambda text: int(text or 0))], plain


def _check_version(path: str, root: Mapping[Any, Any]) -> None:
    version = root.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < OLDEST_VERSION:
        raise GeometryMismatch(
            f"{path}: its checkpoint_version is {shown(version)}: before {OLDEST_VERSION:g} query_key_value has its "
            "rows in another order, which is not read",
            file=path,
            expected=f"checkpoint_version {OLDEST_VERSION:g} or later",
            found=shown(version),
            hint="Load it with a Megatron-LM of 2021 or later and save it again.",
        )


def _flat(path: str, stage: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of a state dict, also of one in nested dicts as Megatron-LM had before Megatron-Core."""
    if not isinstance(stage, dict):
        _refuse(path, "a state dict: names and their tensors", f"a {type(stage).__name__}")
    for keys, value in leaves(stage, path, _is_module):
        odd = next((key for key in keys if type(key) is not str), None)
        if odd is not None:
            _refuse(path, "names that are texts", shown(odd))
        yield ".".join(keys), value


def _is_module(key: Any, value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and not (type(key) is str and key.endswith("_extra_state"))


def _held(file: TorchFile, entries: list[tuple[str, Any]]) -> Iterator[Held]:
    for raw, value in entries:
        name = clean_name(raw)
        if name.endswith("_extra_state"):
            continue
        if type(value) is not TensorRecord:
            _refuse(file.path, f"a tensor as {name}", f"a {type(value).__name__}", name)
        place = resolve(file, value, name=name)
        yield Held(name, value.dtype, value.shape, place.strides, place.offset, place.stored)


def clean_name(name: str) -> str:
    """A tensor's name without wrappers, in Megatron-Core's words."""
    name = _WRAPPER.sub("", name)
    if name.startswith("language_model.") or ".query_key_value." in name:
        for pattern, new in _OLD_NAMES:
            name = pattern.sub(new, name)
    return name


def _refuse(path: str, expected: str, found: str, tensor: str | None = None) -> NoReturn:
    kind: type[InputError] = GeometryMismatch if tensor else CorruptFile
    raise kind(
        f"{path}: expected {expected}, found {found}",
        file=path,
        tensor=tensor,
        expected=expected,
        found=found,
        hint="This is not what Megatron-LM or verl save: check that it is the weights' file, and of one training run.",
    )
