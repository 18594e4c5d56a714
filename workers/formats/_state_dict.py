"""Which part of what was saved is the model, and what its tensors are called without the trainer's additions.

Trainers save the model's state dict bare, or inside of dicts beside optimizer, scheduler and counters, under names
that FSDP, activation checkpointing and torch.compile made longer. Works on names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from workers.checkpoint import PackedTensor, TensorInfo
from workers.errors import AmbiguousSource, GeometryMismatch, InvalidOption, UnknownFormat, UnmappedTensor
from workers.families.megatron import NAMING as MEGATRON
from workers.formats._namings import TORCHTUNE, naming_of_keys
from workers.formats.verl_fsdp.ranks import WRAPPERS
from workers.options import ConvertOptions

Path = tuple[str | int, ...]

_NOT_MODEL = re.compile(
    r"(optim|optimizers?|optimizer_states?|optim_states?|optimizer_state_dict|lr_schedulers?|schedulers?"
    r"|dataloader|data_loader|train_state|trainer_state|extra.*|rng.*|random_.*|grad_scaler|scaler|loops|callbacks"
    r"|hyper_parameters|hparams|loss|epoch|step|global_step|iteration|args|ema_optimizer)(_\d+)?"
)
"""Keys under which trainers keep what is no weight (torch's tutorials, accelerate, torchtitan, Lightning)."""

_BEFORE = ("module.", "_forward_module.")
"""What DistributedDataParallel and Lightning put before all names."""

_LARGEST_COUNTER = 1024
"""Elements of the largest tensor that can be a counter or a state of a generator and not a weight."""

TORCHTITAN = re.compile(
    r"layers\.\d+\.(attention\.(qkv_linear\.)?w[qkvo]|attention\.wkv_[ab]|feed_forward\.w[123]|attention_norm)\..*"
)
"""Names of torchtitan's modules; Meta's own are the same, and are saved in other files."""

_HEAD = "lm_head.weight"


NAME_OPTIONS = frozenset({"strip_prefix", "source_naming"})
"""What ``clean_names`` and ``naming_of`` read."""

STATE_DICT_OPTIONS = NAME_OPTIONS | {"model_prefix", "state_dict_key"}
"""What ``choose_model`` reads, too."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The tensors of the model: their names as saved, and what they are called here."""

    names: dict[str, str]
    left_out: tuple[tuple[str, str], ...] = ()
    """Names of further tensors, and why they are no part of the model."""
    packed: tuple[PackedTensor, ...] = ()
    """Tensors in NF4, whose parts are among the names."""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Group:
    """Tensors that were saved in one dict."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    """By their names in the dict."""
    saved: dict[str, str] = field(default_factory=dict)
    """From names in the dict to the names they were saved under."""


def choose_model(
    tensors: Sequence[TensorInfo], paths: Mapping[str, Path], options: ConvertOptions, where: str
) -> ModelPart:
    """Find the model among what was saved at ``where``, by the options or by the names.

    ``paths`` says in which dicts a tensor stood. Raises ``AmbiguousSource`` when several parts could be the model,
    ``UnknownFormat`` when none could.
    """
    if options.model_prefix is not None:
        return _by_prefix(tensors, options.model_prefix, options, where)
    groups, ignored = _groups(tensors, paths)
    if options.state_dict_key is not None:
        groups = _below_key(groups, options.state_dict_key, where)
    groups, counters = _without_counters(groups, only_training_state=bool(ignored))
    if not groups:
        raise _no_model(tensors, ignored, where)
    if len(groups) > 1:
        raise _several(groups, where)
    (group,) = groups.values()
    names = clean_names(group.tensors, options)
    left_out = [(name, "training state, not a weight") for name in ignored]
    left_out += [(name, "a counter beside the model") for name in counters]
    return ModelPart({group.saved[name]: names[name] for name in group.tensors}, tuple(left_out))


def clean_names(names: Iterable[str], options: ConvertOptions) -> dict[str, str]:
    """Names without what wrappers and the option ``strip_prefix`` say; no two may become one."""
    cleaned = {name: clean_name(name, options.strip_prefix) for name in names}
    if cleaned and all(name.startswith("model.") for name in cleaned.values()):
        inner = {name: short.removeprefix("model.") for name, short in cleaned.items()}
        if any(short.startswith(("model.", "lm_head.")) for short in inner.values()):
            cleaned = inner
    seen: dict[str, str] = {}
    for name, short in cleaned.items():
        if short in seen:
            raise GeometryMismatch(
                f"{seen[short]} and {name} are both {short} without what wrappers add to names",
                tensor=short,
                expected="one tensor of each name",
                found="two",
                hint="Say with the option model_prefix which part of the checkpoint is the model.",
            )
        seen[short] = name
    return cleaned


def clean_name(name: str, strip_prefix: str | None = None) -> str:
    """A name without the segments that wrappers add, and without a prefix."""
    if strip_prefix is not None:
        name = name.removeprefix(strip_prefix)
    before = None
    while before != name:
        before = name
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        for prefix in _BEFORE:
            name = name.removeprefix(prefix)
    if name.endswith("_flat_param"):
        raise UnmappedTensor(
            f"{name} is a flat parameter of FSDP: several weights in one, whose borders are not saved",
            tensor=name,
            expected="one tensor for each parameter",
            found="a flat parameter",
            hint="Save with use_orig_params=True, or with SHARDED_STATE_DICT or FULL_STATE_DICT.",
        )
    return name


def naming_of(names: Iterable[str], options: ConvertOptions) -> str:
    """Whose names these are, by the option ``source_naming`` or by how they look."""
    if options.source_naming is not None:
        return options.source_naming
    names = set(names)
    if names & {"embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight"}:
        return MEGATRON
    is_torchtitan = "tok_embeddings.weight" in names and any(map(TORCHTITAN.fullmatch, names))
    # torchtitan calls its output head as the hub does since 0.3; every other name of the hub's is foreign to it.
    naming = naming_of_keys(names - {_HEAD} if is_torchtitan else names, "the checkpoint")
    if naming == TORCHTUNE:
        return TORCHTUNE
    return "torchtitan" if is_torchtitan else "transformers"


def _by_prefix(tensors: Sequence[TensorInfo], prefix: str, options: ConvertOptions, where: str) -> ModelPart:
    below = {tensor.name: tensor.name.removeprefix(prefix) for tensor in tensors if tensor.name.startswith(prefix)}
    if not below:
        some = ", ".join(tensor.name for tensor in tensors[:4])
        raise InvalidOption(
            f"no tensor of {where} has a name that begins with {prefix!r}, as the option model_prefix says",
            expected=prefix,
            found=some,
            hint=f"Names there are for example {some}.",
        )
    cleaned = clean_names(below.values(), options) if options.family != "none" else {v: v for v in below.values()}
    others = [tensor.name for tensor in tensors if tensor.name not in below]
    left_out = tuple((name, f"does not begin with {prefix}") for name in others)
    return ModelPart({name: cleaned[short] for name, short in below.items()}, left_out)


def _groups(tensors: Sequence[TensorInfo], paths: Mapping[str, Path]) -> tuple[dict[Path, _Group], list[str]]:
    """Tensors by the dict that they stood in, and the names of those that stood beside the model."""
    groups: dict[Path, _Group] = {}
    ignored = []
    for tensor in tensors:
        *above, last = paths.get(tensor.name) or (tensor.name,)
        if any(isinstance(key, str) and _NOT_MODEL.fullmatch(key) for key in above) or (
            not above and _NOT_MODEL.fullmatch(tensor.name.partition(".")[0])
        ):
            ignored.append(tensor.name)
            continue
        group = groups.setdefault(tuple(above), _Group())
        group.tensors[str(last)] = tensor
        group.saved[str(last)] = tensor.name
    return groups, ignored


def _below_key(groups: dict[Path, _Group], key: str, where: str) -> dict[Path, _Group]:
    chosen = {path: group for path, group in groups.items() if _text(path) == key or _text(path).startswith(f"{key}.")}
    if not chosen:
        there = ", ".join(_text(path) or "the top level" for path in groups)
        raise InvalidOption(
            f"{where} has no tensors under {key!r}, as the option state_dict_key says",
            expected=key,
            found=there,
            hint=f"There are tensors under: {there}.",
        )
    return chosen


def _without_counters(
    groups: dict[Path, _Group], *, only_training_state: bool
) -> tuple[dict[Path, _Group], list[str]]:
    """Leave groups out that hold nothing but counters, if others hold weights or there is training state beside."""
    small = {path for path, group in groups.items() if all(map(_is_counter, group.tensors.values()))}
    if len(small) == len(groups) and not only_training_state:
        return groups, []
    counters = [name for path in small for name in groups[path].saved.values()]
    return {path: group for path, group in groups.items() if path not in small}, counters


def _is_counter(tensor: TensorInfo) -> bool:
    elements = 1
    for length in tensor.shape:
        elements *= length
    return len(tensor.shape) == 0 or (
        tensor.dtype[0] in "IUB" and tensor.dtype != "BF16" and elements < _LARGEST_COUNTER
    )


def _no_model(tensors: Sequence[TensorInfo], ignored: list[str], where: str) -> UnknownFormat:
    found = f"{len(ignored)} tensors such as {ignored[0]}" if ignored else f"{len(tensors)} tensors"
    return UnknownFormat(
        f"{where} holds no model: {found}",
        expected="the weights of a model",
        found=found,
        hint="Only optimizer state or counters lie here: the weights are saved in another folder of the run.",
    )


def _several(groups: dict[Path, _Group], where: str) -> AmbiguousSource:
    parts = [
        f"{_text(path) or 'the top level'} ({len(group.tensors)} tensors such as {next(iter(group.tensors))})"
        for path, group in groups.items()
    ]
    keys = [f"{_text(path)}." for path in groups if path]
    return AmbiguousSource(
        f"{where} holds several parts that could be the model: {'; '.join(parts[:6])}",
        expected="one model",
        found="; ".join(parts[:6]),
        hint=f"Say which with the option model_prefix, for example {keys[0]!r}.",
    )


def _text(path: Path) -> str:
    return ".".join(map(str, path))
