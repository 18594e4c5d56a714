"""The config of a Hugging Face model from Meta's params.json and the shapes of the weights.

params.json leaves out what llama-models' code knew: sizes are checked against the tensors, and what had to be assumed
is said.
Sources: llama-models ``models/llama3/args.py``, ``models/llama4/args.py``; transformers
``convert_llama_weights_to_hf.py``, ``convert_llama4_weights_to_hf.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workers.checkpoint import Checkpoint
from workers.errors import CorruptFile, GeometryMismatch, IncompleteCheckpoint, InvalidOption
from workers.formats._format import Listing
from workers.formats._meta_tokenizer import Tokenizer, meta_tokenizer
from workers.formats._mistral_config import is_mistral, mistral_config
from workers.formats._model_folder import read_json
from workers.options import ConvertOptions

PARAMS = "params.json"
LARGEST_SIZE = 1 << 20
"""No size of a model that a config tells by a number of its own comes near."""
LARGEST_NUMBER = 1e12
"""The largest that occurs is rope_theta, some millions."""
VERSIONS = ("1", "2", "3", "3.1", "3.2")
_LENGTHS = {"1": 2048, "2": 4096, "3": 8192, "3.1": 131072, "3.2": 131072}
"""max_position_embeddings of the releases, which params.json does not tell."""
_CODE_LLAMA_LENGTH = 16384
_SCALING = {"3.1": 8.0, "3.2": 32.0}
"""Factors of the scaled rotary embeddings, which params.json does not tell either."""
_FIRST_SPECIAL = 128000
_SPECIAL_TOKENS = 256
_OLD_ROPE_THETA = 10000.0

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Params:
    """params.json, checked for what every model must say."""

    values: Mapping[str, Any]

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive whole number; ``CorruptFile`` when it is anything else."""
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
            raise CorruptFile(
                f"{PARAMS} says {key} = {value!r}, which is no positive whole number",
                file=PARAMS,
                expected=f"{key} as a positive whole number",
                found=repr(value)[:80],
                hint="Fetch params.json again, or give a config.json with the option config_dir.",
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A number that is not negative, or the default where there is none; ``CorruptFile`` for anything else."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_NUMBER:
            raise CorruptFile(
                f"{PARAMS} says {key} = {value!r}, which is no number that a model has",
                file=PARAMS,
                expected=f"{key} as a number",
                found=repr(value)[:80],
                hint="Fetch params.json again, or give a config.json with the option config_dir.",
            )
        return float(value)

    @property
    def key_value_heads(self) -> int:
        return self.whole("n_kv_heads", self.whole("n_heads"))

    @property
    def head_dim(self) -> int:
        """Rows of a head, which only Mistral's files tell."""
        return self.whole("head_dim", self.whole("dim") // self.whole("n_heads"))


def read_params(listing: Listing) -> Params | None:
    """Read params.json, None when there is none; some releases wrap it in {"model": ...}."""
    values = read_json(listing, PARAMS)
    if values is None:
        return None
    inner = values.get("model")
    return Params(inner if isinstance(inner, dict) else values)


def with_meta_config(checkpoint: Checkpoint, listing: Listing, options: ConvertOptions) -> Checkpoint:
    """A checkpoint with Meta's names: its config from params.json, where it has no config of its own."""
    if checkpoint.config is not None:
        return replace(checkpoint, naming="meta")
    params = read_params(listing)
    if params is None:
        raise no_params(listing)
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    tokenizer = meta_tokenizer(listing)
    if "moe_args" in params.values or any(".moe_w_" in name for name in shapes):
        from workers.formats._meta_llama4 import llama4_config  # noqa: PLC0415 - which needs this module

        config, notes = llama4_config(params, shapes)
    elif any(name.startswith("text_model.") for name in shapes):
        raise _needs_config_dir()
    elif is_mistral(params):
        config, notes = mistral_config(params, shapes, options.llama_version)
    else:
        config, notes = llama_config(params, shapes, options, tokenizer)
    version = str(config.pop("_version", ""))
    side, made = tokenizer.files(version) if tokenizer is not None else ((), ())
    kept = tuple(
        file for file in checkpoint.side_files if tokenizer is None or file.target_path not in tokenizer.taken
    )
    there = {file.target_path for file in kept}
    return replace(
        checkpoint,
        naming="meta",
        config=config,
        config_path=None,
        side_files=(*kept, *(file for file in side if file.target_path not in there)),
        made_files=tuple((path, content) for path, content in made if path not in there),
        evidence=(*checkpoint.evidence, f"config from {PARAMS}"),
        notes=(*checkpoint.notes, *notes),
        missing=(),
    )


def no_params(listing: Listing) -> IncompleteCheckpoint:
    """The error for weights of which nothing says how many heads they have."""
    return IncompleteCheckpoint(
        f"{listing.folder.address.url} has no {PARAMS}: how many heads the model has and its norm_eps can't be known",
        file=PARAMS,
        expected=PARAMS,
        found="none",
        hint=f"Copy {PARAMS} of the same release beside the weights, or name a folder with the model's config.json "
        "with the option config_dir.",
    )


def llama_config(
    params: Params, shapes: Shapes, options: ConvertOptions, tokenizer: Tokenizer | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json of a Llama of text alone, and what was assumed."""
    hidden, heads = params.whole("dim"), params.whole("n_heads")
    tied = "output.weight" not in shapes
    version, why = _version(params, shapes, options)
    theta = params.number("rope_theta", _OLD_ROPE_THETA)
    width = _rows(shapes, "layers.0.feed_forward.w1.weight")
    notes = (why, *_width_note(params, width))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_special_tokens(version, _rows(shapes, "tok_embeddings.weight"), tokenizer),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": width,
        "max_position_embeddings": _length(version, theta),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": params.whole("n_layers"),
        "num_key_value_heads": params.key_value_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": params.number("norm_eps", 1e-5),
        "rope_scaling": _scaling(version, params),
        "rope_theta": theta,
        **({"tie_word_embeddings": True} if tied else {}),
        "use_cache": True,
        "vocab_size": _rows(shapes, "tok_embeddings.weight"),
        "_version": version,
    }
    return config, notes


def feed_forward_width(params: Params, base: int, divisor: float = 1.0) -> int:
    """Meta's formula for the width of an MLP, from the width before multiplier and rounding.

    Source: llama-models ``models/llama3/model.py`` (``FeedForward``), ``models/llama4/moe.py``.
    """
    width = int(params.number("ffn_dim_multiplier", 1.0) * base)
    multiple = params.whole("multiple_of", 256)
    return multiple * -(-int(width / divisor) // multiple)


def _version(params: Params, shapes: Shapes, options: ConvertOptions) -> tuple[str, str]:
    """The generation of the model, which decides what params.json does not say, and why that one."""
    if options.llama_version is not None:
        if options.llama_version not in VERSIONS:
            raise InvalidOption(
                f"llama_version {options.llama_version!r} is not known",
                expected=", ".join(VERSIONS),
                found=options.llama_version,
                hint=f"The versions are: {', '.join(VERSIONS)}; 3.3 is 3.1 here.",
            )
        return options.llama_version, f"Llama {options.llama_version}, as the option llama_version says"
    if params.values.get("use_scaled_rope"):
        version = "3.2" if "output.weight" not in shapes or params.whole("dim") < _SMALLEST_3_1 else "3.1"
        because = "use_scaled_rope and its size"
    elif params.number("rope_theta", 0.0) >= _LLAMA3_ROPE_THETA:
        version, because = "3", "its rope_theta"
    else:
        version, because = "2", "its rope_theta"
    return version, f"assumed to be Llama {version} by {because}: if not, set the option llama_version"


_SMALLEST_3_1 = 4096
"""Hidden size of Llama 3.1's smallest model; 3.2's are smaller and tied."""
_LLAMA3_ROPE_THETA = 500000.0


def _length(version: str, theta: float) -> int:
    return _CODE_LLAMA_LENGTH if version == "2" and theta > _OLD_ROPE_THETA else _LENGTHS[version]


def _scaling(version: str, params: Params) -> dict[str, Any] | None:
    if version not in _SCALING and not params.values.get("use_scaled_rope"):
        return None
    return {
        "factor": params.number("rope_scaling_factor", _SCALING.get(version, 8.0)),
        "high_freq_factor": params.number("rope_high_freq_factor", 4.0),
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }


def _special_tokens(version: str, vocabulary: int, tokenizer: Tokenizer | None) -> dict[str, int]:
    """Ids of the tokens that begin and end a text, where they are known to lie in the vocabulary."""
    if tokenizer is not None and tokenizer.ranks is not None:
        begin = tokenizer.ranks
    elif version in ("1", "2"):
        begin = 1
    elif vocabulary >= _FIRST_SPECIAL + _SPECIAL_TOKENS:
        begin = _FIRST_SPECIAL
    else:
        return {}
    return {"bos_token_id": begin, "eos_token_id": begin + 1}


def _rows(shapes: Shapes, name: str) -> int:
    shape = shapes.get(name)
    if not shape:
        raise IncompleteCheckpoint(
            f"the tensor {name} is missing, which tells a size that {PARAMS} does not",
            tensor=name,
            expected=name,
            found="no such tensor",
            hint="A part of the checkpoint is missing, or it is another kind of model.",
        )
    return shape[0]


def _width_note(params: Params, width: int) -> tuple[str, ...]:
    told = feed_forward_width(params, int(8 * params.whole("dim") / 3))
    if told == width:
        return ()
    return (f"{PARAMS} gives an MLP of width {told}, the weights have {width}: the weights are believed",)


def _needs_config_dir() -> GeometryMismatch:
    return GeometryMismatch(
        f"{PARAMS} does not describe the vision tower of the model",
        file=PARAMS,
        expected="a config.json",
        found=PARAMS,
        hint="Name a folder with config.json of the same model on the hub with the option config_dir.",
    )
