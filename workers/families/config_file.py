"""Edit a model's config.json: only what the conversion makes untrue changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from workers.dtypes import ELEMENT_TYPES
from workers.expressions import Expression
from workers.families.config_values import CONFIG, given_sizes
from workers.families.registry import text_config, transformers_version
from workers.families.ties import FLAG
from workers.options import ConvertOptions

_DTYPE_KEYS: tuple[str, ...] = ("dtype", "torch_dtype")
_DTYPE_SINCE = (4, 56)
"""transformers renamed ``torch_dtype`` to ``dtype`` in 4.56 (and 5 still reads the old key)."""


def edited_config(
    config: Mapping[str, Any],
    expressions: Iterable[Expression],
    *,
    tied: bool | None,
    sizes: Mapping[str, int] | None = None,
) -> bytes:
    """config.json for a model of these weights.

    ``tied`` is what it must say of tied embeddings, None as it is; ``sizes`` are corrections of the language model's.
    """
    edited = copy.deepcopy(dict(config))
    part = text_config(edited)
    if sizes and isinstance(part, dict):
        part.update(sizes)
    if tied is not None:
        edited[FLAG] = tied
        inner = text_config(edited)
        if isinstance(inner, dict) and FLAG in inner:
            inner[FLAG] = tied
    dtype = main_dtype(expressions)
    if dtype is not None:
        _set_dtype(edited, dtype)
    if list(config) == sorted(config):
        edited = dict(sorted(edited.items()))
    return (json.dumps(edited, indent=2, ensure_ascii=False) + "\n").encode()


def corrected_sizes(config: Mapping[str, Any], options: ConvertOptions) -> dict[str, int]:
    """The sizes in which the user corrects a config, which the tensors have borne out."""
    text = text_config(config)
    given = given_sizes(options)
    changed = {key: value for key, value in given.items() if text.get(key) != value}
    told = {**text, **given}
    hidden, heads = told.get("hidden_size"), told.get("num_attention_heads")
    derived = hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None
    # What the config leaves out because it follows from the rest stays out.
    follows = {"head_dim": derived, "num_key_value_heads": heads}
    return {key: value for key, value in changed.items() if text.get(key) is not None or follows.get(key) != value}


def correction_notes(config: Mapping[str, Any], corrected: Mapping[str, int]) -> tuple[str, ...]:
    """What was corrected, in words."""
    text = text_config(config)
    return tuple(
        f"{CONFIG} said that {key} is {text[key]}; it says {value} now, as the option does"
        for key, value in corrected.items()
        if text.get(key) is not None
    )


def main_dtype(expressions: Iterable[Expression]) -> str | None:
    """Torch's name of the floating-point dtype that most weights have; None when no weight is floating-point.

    FP8 does not count: quantised models keep the dtype that they are computed in.
    """
    counts: dict[str, int] = {}
    for expression in expressions:
        if ELEMENT_TYPES[expression.dtype].floating and ELEMENT_TYPES[expression.dtype].size_bytes > 1:
            counts[expression.dtype] = counts.get(expression.dtype, 0) + prod(expression.shape)
    return ELEMENT_TYPES[max(counts, key=lambda dtype: counts[dtype])].torch_name if counts else None


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the key that the config uses, or that its version of transformers would; correct it in its parts."""
    used = [key for key in _DTYPE_KEYS if key in config]
    usual = "dtype" if transformers_version(config) >= _DTYPE_SINCE else "torch_dtype"
    for key in used or [usual]:
        config[key] = dtype
    for part in config.values():
        for key in _DTYPE_KEYS:
            if isinstance(part, dict) and isinstance(part.get(key), str) and "model_type" in part:
                part[key] = dtype
