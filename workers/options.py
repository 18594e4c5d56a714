"""What a user may ask of a conversion: one frozen record for the command line, REST and batch."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from workers.errors import InvalidOption

SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

FloatType = Literal["float32", "bfloat16", "float16"]
TargetFormat = Literal["hf", "peft"]
VerifyLevel = Literal["none", "digests", "reread"]
Quantization = Literal["fp8-block-128", "fp8-dynamic", "int8-w8a8", "int4-w4a16-g128"]


def parse_size(text: str | int, option: str = "") -> int:
    """Bytes of a size in Hugging Face's notation: ``5GB`` is 5 * 10^9, ``2GiB`` is 2 * 2^30.

    An error names the ``option``. Source of the notation: huggingface_hub ``parse_size_to_int`` (decimal units) plus
    binary units.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in SIZE_UNITS:
        named = f"option {option}: " if option else ""
        raise InvalidOption(f"{named}{text!r} is not a size", hint="Write a number and a unit, such as 5GB or 512MiB.")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Everything that shapes a conversion; ``docs/options.md`` explains each for users."""

    source_format: str | None = None
    """Which format the source is, if detection can't tell."""
    target_format: TargetFormat = "hf"
    """Format of the result: a Hugging Face model, or a PEFT adapter."""
    dtype: FloatType | None = None
    """Type of floating-point weights; as in the source if not given. Buffers that must stay float32 stay."""
    max_shard_size: str = "5GB"
    """Size of an output file, such as 5GB (5 * 10^9 bytes) or 2GiB (2 * 2^30)."""
    config_dir: str | None = None
    """Folder with config.json and the tokenizer, if the source has none beside its weights."""
    family: str | None = None
    """Use this family's table of names, or none to keep names; by config.json if not given."""
    mapping: str | None = None
    """A user's own mapping: a JSON object as text, or the path or URL of a file with one."""
    lora: Literal["separate", "merge"] = "separate"
    """An adapter in the checkpoint: a PEFT folder beside the base, or merged into it."""
    lora_alpha: float | None = None
    """The adapter's alpha, if no file says it."""
    step: int | None = None
    """Which checkpoint of a run folder; the tracker file's step if not given."""
    role: str | None = None
    """Which model of a run that trains several, such as actor or critic."""
    base: str | None = None
    """Base model of an adapter checkpoint."""
    dequantize: bool = False
    """Turn block-wise FP8 weights into dtype."""
    quantization: Quantization | None = None
    """Quantise the weights, with the config that loaders read."""
    ignore: tuple[str, ...] = ()
    """Modules whose weights aren't quantised: whole names, or regular expressions after ``re:``."""
    epoch: int | None = None
    """Which epoch of a torchtune run; the newest complete one if not given."""
    state_dict_key: str | None = None
    """Key under which a checkpoint keeps the model's weights; keys within keys are joined by dots."""
    source_naming: str | None = None
    """Whose names the source's tensors have, where its metadata can't tell."""
    strip_prefix: str | None = None
    """Beginning to take off the source's names."""
    model_prefix: str | None = None
    """Beginning of the names of the model that is meant, such as ema.; it is taken off."""
    layer_prefixes: str | None = None
    """What the numbered layers of DeepSpeed's pipeline engine are called, as a JSON object of numbers and names."""
    llama_version: str | None = None
    """Release of a Llama checkpoint in Meta's format, where params.json doesn't tell it."""
    num_attention_heads: int | None = None
    """Attention heads of the model, where no config tells."""
    num_key_value_heads: int | None = None
    """Key and value heads of the model, where no config tells."""
    hidden_size: int | None = None
    """Hidden size of the model, where no config tells."""
    head_dim: int | None = None
    """Size of an attention head, where no config tells."""
    value_model: bool = False
    """The source is a value model: its head gives one number."""
    experts: int | None = None
    """Experts of a layer, where no config tells."""
    tie_word_embeddings: bool | None = None
    """Insist on tied or untied embeddings; by the config and the weights if not given."""
    overwrite: bool = False
    """Replace the model at the destination. A folder that holds anything else is refused."""
    resume: bool = True
    """Keep files that an interrupted attempt finished."""
    verify: VerifyLevel = "digests"
    """What is checked: nothing, source checksums and replicas, or also the result, read back before the commit."""
    memory: str = "2GiB"
    """Memory for parts under way, such as 2GiB."""
    source_profile: str | None = None
    """Name of the storage profile to read with."""
    destination_profile: str | None = None
    """Name of the storage profile to write with."""

    def __post_init__(self) -> None:
        if parse_size(self.max_shard_size, "max_shard_size") <= 0:
            raise InvalidOption(f"max_shard_size must be more than nothing, not {self.max_shard_size!r}")
        if parse_size(self.memory, "memory") < MINIMUM_MEMORY_BYTES:
            raise InvalidOption(
                f"memory {self.memory!r} is less than the least that a conversion works with",
                hint="Give at least 64MiB.",
            )

        for name in COUNTS:
            count = getattr(self, name)
            if count is not None and not 0 < count < 1 << 31:
                raise InvalidOption(f"{name} must be a whole number above 0, not {count}")
        if self.lora == "merge" and self.target_format == "peft":
            raise InvalidOption(
                "lora=merge makes a model, and target_format=peft an adapter", hint="Leave one of the two out."
            )
        if self.lora_alpha is not None and not 0 < self.lora_alpha < float("inf"):
            raise InvalidOption(f"lora_alpha must be a number above 0, not {self.lora_alpha}")

    @property
    def max_shard_bytes(self) -> int:
        return parse_size(self.max_shard_size)

    @property
    def memory_bytes(self) -> int:
        return parse_size(self.memory)

    def to_dict(self) -> dict[str, Any]:
        """The options that differ from their defaults, as JSON values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        differing = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in differing.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ConvertOptions:
        """Check and build options from JSON values; an unknown name or a wrong type is an ``InvalidOption``."""
        known = get_type_hints(cls)
        for name, value in values.items():
            if name not in known:
                raise InvalidOption(f"there is no option {name!r}", hint=meant_or_all(name, known, "options"))
            _check_type(name, value, known[name])
        if isinstance(values.get(MAPPING), dict):
            values = {**values, MAPPING: json.dumps(values[MAPPING], ensure_ascii=False, separators=(",", ":"))}
        lists = {name: _listed(value) for name, value in values.items() if name in LIST_OPTIONS}
        return cls(**{**values, **lists})


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ConvertOptions)}
COUNTS = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "experts")
"""Options that count something that every model with it has at least once."""
MINIMUM_MEMORY_BYTES = 64 * 2**20
MAPPING = "mapping"
"""The one option that may come as a JSON object; it is kept as text."""


def meant_or_all(word: str, known: Collection[str], what: str) -> str:
    """A hint for a word that is not among the known ones: the one that is near, or else all of them."""
    near = difflib.get_close_matches(word[:80], known, n=1)
    return f"Perhaps {near[0]} is meant." if near else f"The {what} are: {', '.join(sorted(known))}."


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split ``NAME=VALUE`` of the command line; VALUE is JSON, or else a plain word."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidOption(f"{text!r} is not NAME=VALUE")
    name = name.strip().replace("-", "_")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    if name in TEXT_OPTIONS and not isinstance(parsed, str) and parsed is not None:
        parsed = value  # "max_shard_size=5000" is a text for us, though JSON reads a number
    return name, parsed


def _check_type(name: str, value: Any, hint: Any) -> None:
    allowed = _alternatives(hint)
    if name == MAPPING:
        allowed = (*allowed, dict)
    if any(_is_of(value, kind) for kind in allowed):
        return
    raise InvalidOption(f"option {name}: {value!r} is not one of: {', '.join(map(_spelled, allowed))}")


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, str) or (
            isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        )
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _listed(value: Any) -> tuple[str, ...]:
    """A list of texts, which may come as the one text that it holds."""
    return (value,) if isinstance(value, str) else tuple(value)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) not in (Literal, tuple) and get_args(hint) else (hint,)


def _spelled(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "a list of texts"
    return {
        "NoneType": "null",
        "str": "a text",
        "int": "a whole number",
        "float": "a number",
        "dict": "an object",
    }.get(kind.__name__, "true or false")


LIST_OPTIONS = frozenset(name for name, hint in get_type_hints(ConvertOptions).items() if get_origin(hint) is tuple)
TEXT_OPTIONS = frozenset(name for name, hint in get_type_hints(ConvertOptions).items() if str in _alternatives(hint))
