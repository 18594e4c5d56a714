"""The config of a Mistral model from its params.json, which lies beside ``consolidated.*`` as Meta's does.

The weights have Meta's names and order of rows. What params.json says beyond a plain decoder is refused, since it
is not known how the hub's config says it.
Source: transformers 4 ``models/mistral/convert_mistral_weights_to_hf.py`` (``convert_config``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workers.errors import CorruptFile, InvalidOption, UnknownFormat

if TYPE_CHECKING:
    from workers.formats._meta_config import Params

_PARAMS = "params.json"
_OWN_KEYS = frozenset(("hidden_dim", "head_dim"))
"""What Mistral's params.json has and Meta's has not."""
_KNOWN = _OWN_KEYS | {
    *("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "vocab_size", "rope_theta"),
    *("sliding_window", "max_seq_len"),
}
_LENGTH = 32768
"""max_position_embeddings where nothing tells it, as of the first releases."""
_LONGEST = 1 << 31


def is_mistral(params: Params) -> bool:
    """Whether a params.json is of a model of Mistral's."""
    return params.values.keys() >= _OWN_KEYS


def mistral_config(
    params: Params, shapes: Mapping[str, tuple[int, ...]], llama_version: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json of a Mistral of text alone, and what was assumed."""
    if llama_version is not None:
        raise InvalidOption(
            f"the option llama_version says {llama_version}, but {_PARAMS} is one of Mistral's",
            expected="no llama_version",
            found=llama_version,
            hint="Leave the option out.",
        )
    more = sorted(key for key, value in params.values.items() if key not in _KNOWN and value not in (None, False))
    if more:
        raise UnknownFormat(
            f"{_PARAMS} of a Mistral model says {', '.join(more)}, and how config.json says that is not known",
            file=_PARAMS,
            expected=", ".join(sorted(_KNOWN)),
            found=", ".join(more),
            hint="Name a folder with config.json of the same model on the hub with the option config_dir.",
        )
    length = _optional(params, "max_seq_len")
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "hidden_size": params.whole("dim"),
        "initializer_range": 0.02,
        "intermediate_size": params.whole("hidden_dim"),
        "max_position_embeddings": length or _LENGTH,
        "model_type": "mistral",
        "num_attention_heads": params.whole("n_heads"),
        "num_hidden_layers": params.whole("n_layers"),
        "num_key_value_heads": params.key_value_heads,
        "rms_norm_eps": params.number("norm_eps", 1e-5),
        "rope_theta": params.number("rope_theta", 10000.0),
        "sliding_window": _optional(params, "sliding_window"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "use_cache": True,
        "vocab_size": params.whole("vocab_size"),
    }
    assumed = f"assumed max_position_embeddings {_LENGTH}, which {_PARAMS} does not tell: if not, give a config_dir"
    return config, (f"{_PARAMS} is one of Mistral's", *(() if length else (assumed,)))


def _optional(params: Params, key: str) -> int | None:
    """A positive whole number, in some releases as text; None when it is not there."""
    value = params.values.get(key)
    if value is None:
        return None
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value
    if type(number) is not int or not 1 <= number <= _LONGEST:
        raise CorruptFile(
            f"{_PARAMS} says {key} = {value!r}, which is no positive whole number",
            file=_PARAMS,
            expected=f"{key} as a positive whole number",
            found=repr(value)[:80],
            hint=f"Fetch {_PARAMS} again, or give a config.json with the option config_dir.",
        )
    return number
