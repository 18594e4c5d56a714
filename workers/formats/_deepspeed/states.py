"""Read one file of a DeepSpeed checkpoint: model states, or a rank's partition of the fp32 weights.

What a file says is checked for its form here; whether files agree with each other is for ``assembly`` to find.
Source: DeepSpeed ``runtime/engine.py`` (``_save_checkpoint``), ``runtime/zero/stage_1_and_2.py`` and ``stage3.py``
(``state_dict``), ``runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from workers.errors import CorruptFile
from workers.formats._deepspeed.tags import Rank
from workers.formats._nested import leaves, no_plain_tensor, other_weights
from workers.formats._state_dict import clean_name
from workers.formats._steps import STILL_WRITING
from workers.geometry import MOST_DIMENSIONS, Shape
from workers.pickle_records import is_count
from workers.pickles import Record, TensorRecord
from workers.shown import shown
from workers.storage import FileEntry, Folder
from workers.torch_file import TorchFile, open_torch_file


@dataclass(frozen=True, slots=True)
class StateFile:
    """An opened file and whose it is."""

    entry: FileEntry
    rank: Rank
    torch: TorchFile

    @property
    def path(self) -> str:
        return self.entry.path


@dataclass(frozen=True, slots=True)
class ModelStates:
    """What a file of model states holds. Names are those of the model, without wrappers."""

    file: StateFile
    module: dict[str, TensorRecord]
    """Weights and buffers; placeholders without elements where stage 3 keeps the weights elsewhere."""
    buffers: frozenset[str]
    groups: tuple[dict[str, Shape], ...]
    """Parameters of each flat group in the order in which they lie there; empty at stage 0."""
    frozen: dict[str, tuple[Shape, TensorRecord]]
    """Parameters that are not trained: shape, and the rank's piece (stage 3) or all of it."""
    shared: dict[str, str]
    """Further names of parameters: alias to name."""
    universal: Mapping[Any, Any]
    """``universal_checkpoint_info``: how tensor parallelism cut the parameters."""
    ignored: tuple[str, ...]
    """Names in the module of what is no tensor."""
    mp_world_size: int | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """What an optimizer file holds of the fp32 weights: this rank's piece of each flat group."""

    file: StateFile
    stage: int
    counts: tuple[int, ...]
    """In how many partitions each group is cut; empty when the file does not say."""
    pieces: tuple[TensorRecord, ...]
    paddings: tuple[tuple[int, ...], ...] | None
    """Elements of padding after each parameter, by group."""


def open_any(folder: Folder, entry: FileEntry, rank: Rank) -> StateFile:
    """Open a torch file, whatever it holds."""
    try:
        return StateFile(entry, rank, open_torch_file(folder, entry.path, entry.size_bytes))
    except CorruptFile as error:
        error.hint = f"{error.hint} {STILL_WRITING}".strip()
        raise


def open_state(folder: Folder, entry: FileEntry, rank: Rank) -> StateFile:
    """Open a file of states; a torch file that holds no dict is a ``CorruptFile``."""
    file = open_any(folder, entry, rank)
    if not isinstance(file.torch.root, dict):
        refuse(entry.path, "a dict of states", f"a {type(file.torch.root).__name__}")
    return file


def read_model_states(folder: Folder, entry: FileEntry, rank: Rank) -> ModelStates:
    """Read a file of model states."""
    file = open_state(folder, entry, rank)
    root, path = file.torch.root, entry.path
    ignored: list[str] = []
    module = state_tensors(root.get("module") or {}, path, ignored)
    shapes = root.get("param_shapes")
    groups = [shapes] if isinstance(shapes, dict) else shapes or []
    if not isinstance(groups, list):
        refuse(path, "param_shapes: a list of groups", f"a {type(groups).__name__}")
    frozen_shapes = _shapes(root.get("frozen_param_shapes") or {}, path)
    fragments = state_tensors(root.get("frozen_param_fragments") or {}, path)
    absent = next((name for name in frozen_shapes if name not in fragments), None)
    if absent is not None and fragments:
        refuse(path, f"a fragment of the frozen parameter {absent}", "none")
    shared = root.get("shared_params") or {}
    info = root.get("universal_checkpoint_info")
    return ModelStates(
        file,
        module,
        frozenset(clean_name(name) for name in _texts(root.get("buffer_names") or [], path)),
        tuple(_shapes(group, path) for group in groups),
        {name: (frozen_shapes[name], fragments[name]) for name in frozen_shapes if name in fragments},
        {clean_name(alias): clean_name(name) for alias, name in _pairs(shared, path)},
        info if isinstance(info, dict) else {},
        tuple(ignored),
        root["mp_world_size"] if type(root.get("mp_world_size")) is int else None,
    )


def read_partition(folder: Folder, entry: FileEntry, rank: Rank) -> Partition:
    """Read an optimizer file; of it only where the fp32 weights lie."""
    file = open_state(folder, entry, rank)
    path = entry.path
    state = file.torch.root.get("optimizer_state_dict")
    if not isinstance(state, dict):
        refuse(path, "optimizer_state_dict", "none")
    pieces = state.get("fp32_flat_groups")
    stage = 3
    if pieces is None:
        # Optimizers without a stage of their own (BF16_Optimizer) keep their weights as stage 1 does.
        stage, pieces = _stage(state.get("zero_stage")), state.get("single_partition_of_fp32_groups")
    if not isinstance(pieces, (list, tuple)):
        refuse(path, "the fp32 weights: fp32_flat_groups or single_partition_of_fp32_groups", "neither")
    for number, piece in enumerate(pieces):
        if not isinstance(piece, TensorRecord) or len(piece.shape) != 1 or piece.stride not in ((1,), (0,)):
            refuse(path, f"a flat tensor as group {number}", _kind(piece))
    counts = state.get("partition_count")
    known = (counts,) if type(counts) is int else counts
    if known is not None and not _are_counts(known):
        refuse(path, "partition_count: whole numbers", _kind(counts))
    return Partition(file, stage, tuple(known or ()), tuple(pieces), _paddings(state, path))


def state_tensors(values: Any, path: str, ignored: list[str] | None = None) -> dict[str, TensorRecord]:
    """The tensors of a state dict by their names; dicts inside of it are modules.

    Names of what holds no weight are added to ``ignored``. Raises ``GeometryMismatch`` for weights that are no plain
    tensors.
    """
    if not isinstance(values, dict):
        refuse(path, "a state dict: names and their tensors", f"a {type(values).__name__}")
    found: dict[str, TensorRecord] = {}
    for keys, value in leaves(values, path, lambda _, value: isinstance(value, dict)):
        odd = next((key for key in keys if type(key) is not str), None)
        if odd is not None:
            refuse(path, "names that are texts", f"the name {shown(odd)}")
        name = ".".join(map(clean_name, keys))
        what = other_weights(value)
        if what is not None:
            raise no_plain_tensor(path, name, what)
        if name in found:
            refuse(path, "each name once, when wrappers are taken off", f"{name} twice")
        if isinstance(value, TensorRecord):
            found[name] = value
        elif ignored is not None:
            ignored.append(name)
    return found


def refuse(path: str, expected: str, found: str) -> NoReturn:
    """Say that a file is not what DeepSpeed writes."""
    raise CorruptFile(
        f"{path}: expected {expected}, found {found}",
        file=path,
        expected=expected,
        found=found,
        hint="This is not what DeepSpeed saves; check that the file is whole and of one training run.",
    )


def _items(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict):
        refuse(path, "a state dict: names and their tensors", f"a {type(values).__name__}")
    for name, value in values.items():
        if type(name) is not str:
            refuse(path, "names that are texts", f"the name {shown(name)}")
        yield name, value


def _shapes(values: Any, path: str) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for raw, shape in _items(values, path):
        name = clean_name(raw)
        if not _are_counts(shape) or len(shape) > MOST_DIMENSIONS:
            refuse(path, f"the shape of {name}", _kind(shape))
        if name in shapes:
            refuse(path, "each parameter once in a group", f"{name} twice")
        shapes[name] = tuple(shape)
    return shapes


def _pairs(values: Any, path: str) -> Iterator[tuple[str, str]]:
    """``shared_params``: a dict from alias to name, or (DeepSpeed 0.8) a list of such pairs."""
    pairs = values.items() if isinstance(values, dict) else values
    for pair in pairs if isinstance(pairs, list) or isinstance(values, dict) else (None,):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(type(name) is str for name in pair):
            refuse(path, "shared_params: pairs of names", _kind(pair))
        yield pair[0], pair[1]


def _texts(values: Any, path: str) -> list[str]:
    if not isinstance(values, (list, tuple)) or not all(type(value) is str for value in values):
        refuse(path, "buffer_names: a list of names", _kind(values))
    return list(values)


def _paddings(state: Mapping[Any, Any], path: str) -> tuple[tuple[int, ...], ...] | None:
    paddings = state.get("param_alignment_paddings")
    if paddings is None:
        return None
    if not isinstance(paddings, (list, tuple)) or not all(map(_are_counts, paddings)):
        refuse(path, "param_alignment_paddings: a list of whole numbers for each group", _kind(paddings))
    return tuple(map(tuple, paddings))


def _stage(value: Any) -> int:
    """The ZeRO stage: a number in old files, else an enum; 1 where the optimizer has none."""
    if isinstance(value, Record) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int and 0 <= value <= 3 else 1


def _are_counts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(map(is_count, values))


def _kind(value: Any) -> str:
    if isinstance(value, TensorRecord):
        return f"a tensor {list(value.shape)}"
    return f"{value.kind}" if isinstance(value, Record) else shown(value, 80)
