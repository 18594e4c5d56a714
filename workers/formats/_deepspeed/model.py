"""Choose for each parameter which of its copies counts: fp32 weights, 16-bit module weights, frozen fragments.

The fp32 weights are what training knows best, so they count unless the wish is exactly the dtype of the module's
weights, which are the fp32 weights rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workers.checkpoint import Checkpoint
from workers.dtypes import BY_TORCH_NAME
from workers.errors import IncompleteCheckpoint
from workers.families.config_checks import CERTAIN
from workers.families.registry import model_types
from workers.formats._checkpoint_of import checkpoint_of
from workers.formats._deepspeed.assembly import Assembly, Local
from workers.formats._deepspeed.states import ModelStates
from workers.formats._deepspeed.tags import TagFiles
from workers.formats._format import Listing
from workers.formats._model_folder import ModelFiles, find_model_files
from workers.formats._state_dict import naming_of
from workers.formats._steps import STILL_WRITING
from workers.options import ConvertOptions

HALF = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Weights:
    """What one model-parallel rank has: its module, and beside it the fp32 and the frozen weights."""

    model: ModelStates
    fp32: Mapping[str, Local]
    frozen: Mapping[str, Local]


class Chooser:
    """Chooses the copies that count, and remembers what it chose."""

    def __init__(self, assembly: Assembly, options: ConvertOptions, buffers_to_drop: frozenset[str]) -> None:
        self._assembly = assembly
        self._wanted = BY_TORCH_NAME[options.dtype].name if options.dtype in HALF else None
        self._buffers_to_drop = buffers_to_drop
        self.dropped: dict[str, str] = {}
        self.from_module: list[str] = []
        self.rounded: list[str] = []

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """What is no part of the model, and why."""
        return tuple(self.dropped.items())

    def tensors(self, weights: Weights) -> dict[str, Local]:
        """The tensors of one model-parallel rank in the order of its module."""
        model = weights.model
        found: dict[str, Local] = {}
        self.dropped |= dict.fromkeys(model.ignored, "no tensor")
        for name in dict.fromkeys((*model.module, *weights.fp32, *weights.frozen, *model.shared)):
            if name in self._buffers_to_drop and name in model.buffers:
                self.dropped[name] = "a buffer that models of this type do not have"
                continue
            real = name if name in weights.fp32 else model.shared.get(name, name)
            local = self._choose(weights, real, name)
            if local is None:
                raise _no_weights(model, name)
            found[name] = local
        return found

    def _choose(self, weights: Weights, real: str, name: str) -> Local | None:
        """The copy that counts of the parameter ``real``, for which ``name`` may be an alias."""
        in_module = self._in_module(weights.model, real) or self._in_module(weights.model, name)
        if in_module is not None and in_module.dtype == self._wanted:
            self.rounded += [name] if real in weights.fp32 else []
            return in_module
        kept = weights.fp32.get(real) or weights.frozen.get(real)
        if kept is None and in_module is not None and name not in weights.model.buffers:
            self.from_module.append(name)
        return kept or in_module

    def _in_module(self, model: ModelStates, name: str) -> Local | None:
        """A parameter or buffer of the module; None for a placeholder, as stage 3 leaves them."""
        record = model.module.get(name)
        if record is None or (record.shape == (0,) and name not in model.buffers):
            return None
        return self._assembly.local(model.file, record, name)


def _no_weights(model: ModelStates, name: str) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(
        f"tensor {name} has only a placeholder in {model.file.path}, as ZeRO stage 3 leaves it, and no file of this "
        "checkpoint holds its elements",
        file=model.file.path,
        tensor=name,
        expected="zero_pp_rank_*_mp_rank_*_optim_states.pt with the fp32 weights",
        found="a placeholder of shape [0]",
        hint=f"Copy the optimizer files of all ranks into the same folder. {STILL_WRITING}",
    )


def foreign_buffers(
    states: Iterable[ModelStates], config: Mapping[str, Any] | None, family: str | None
) -> frozenset[str]:
    """Buffers that the trainer added: all of them, in models whose own classes save none."""
    if config is None or family == "none" or not any(kind in CERTAIN for kind in model_types(config)):
        return frozenset()
    return frozenset().union(*(model.buffers for model in states))


def find_config(listing: Listing, files: TagFiles, options: ConvertOptions) -> ModelFiles:
    """config.json and side files: beside the tags, where the HF Trainer puts them, or in the tag's folder."""
    tag = files.tag.path
    return find_model_files(listing, dict.fromkeys((tag.rpartition("/")[0], tag, ""), False), options)


def make_checkpoint(
    listing: Listing, assembly: Assembly, model: ModelFiles, options: ConvertOptions, name: str
) -> Checkpoint:
    """The checkpoint of what was assembled, of the format ``name``."""
    naming = naming_of((tensor.name for tensor in assembly.builder.tensors), options)
    return replace(checkpoint_of(listing, assembly.builder, model, (name, naming)), notes=tuple(assembly.notes))


def choice_notes(chooser: Chooser, *, has_fp32: bool, options: ConvertOptions) -> list[str]:
    """Say where the weights come from, where that isn't simply the fp32 weights."""
    notes = []
    if chooser.rounded:
        notes.append(
            f"{len(chooser.rounded)} tensors are the module's {options.dtype} weights: the fp32 weights, rounded"
        )
    if chooser.from_module and has_fp32:
        shown = ", ".join(chooser.from_module[:4]) + (" ..." if chooser.from_module[4:] else "")
        notes.append(f"{len(chooser.from_module)} tensors are not trained and come from the module: {shown}")
    elif chooser.from_module and options.dtype not in HALF:
        notes.append("the checkpoint has no fp32 weights of parameters: those of the module are taken as they are")
    return notes
