"""Compare what a config says with the tensors' shapes, for models where that is certain.

A config of another model, a vocabulary resized after saving, a layer that is missing: all load into a
wrong model or none, and show here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.errors import GeometryMismatch
from workers.families.operations import Facts
from workers.families.registry import model_types, text_config
from workers.families.rules import Count, Entry, Pattern

CERTAIN = frozenset(
    (
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm4",
        "llama",
        "mistral",
        "mistral3",
        "mixtral",
        "olmo",
        "olmo2",
        "olmo3",
        "phimoe",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "qwen2_vl",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
    )
)
"""Model types whose config has these keys in the meaning below."""

_TEXT = r"(model\.language_model\.|language_model\.model\.|model\.)"
_LAYER = re.compile(rf"{_TEXT}layers\.(\d+)\..+")


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """That dimension ``dim`` of the tensors whose names fit has the size of a config key."""

    names: re.Pattern[str]
    dim: int
    key: str


CHECKS = (
    SizeCheck(re.compile(rf"{_TEXT}embed_tokens\.weight|(language_model\.)?lm_head\.weight"), 0, "vocab_size"),
    SizeCheck(re.compile(rf"{_TEXT}embed_tokens\.weight|(language_model\.)?lm_head\.weight"), 1, "hidden_size"),
    SizeCheck(re.compile(rf"{_TEXT}norm\.weight"), 0, "hidden_size"),
    SizeCheck(re.compile(rf"{_TEXT}layers\.\d+\.mlp\.(gate|up)_proj\.weight"), 0, "intermediate_size"),
    SizeCheck(re.compile(rf"{_TEXT}layers\.\d+\.mlp\.down_proj\.weight"), 1, "intermediate_size"),
    SizeCheck(
        re.compile(rf"{_TEXT}layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj\.weight"), 0, "moe_intermediate_size"
    ),
    SizeCheck(re.compile(rf"{_TEXT}layers\.\d+\.mlp\.experts\.\d+\.down_proj\.weight"), 1, "moe_intermediate_size"),
    SizeCheck(
        re.compile(rf"{_TEXT}layers\.\d+\.block_sparse_moe\.experts\.\d+\.w[13]\.weight"), 0, "intermediate_size"
    ),
)


def check_config(entries: Iterable[Entry], config: Mapping[str, Any]) -> None:
    """Raise ``GeometryMismatch`` where tensors under the hub's names contradict the config, with both values."""
    if not any(model_type in CERTAIN for model_type in model_types(config)):
        return
    told = text_config(config)
    checks = [(check, told[check.key]) for check in CHECKS if isinstance(told.get(check.key), int)]
    layers = 0
    for name, expression in entries:
        layer = _LAYER.fullmatch(name)
        layers = max(layers, int(layer[2]) + 1) if layer else layers
        for check, size in checks:
            if (
                not _is_value_head(name, expression.shape)
                and check.names.fullmatch(name)
                and len(expression.shape) > check.dim
                and expression.shape[check.dim] != size
            ):
                raise _contradiction(check.key, size, expression.shape[check.dim], (name, list(expression.shape)))
    count = told.get("num_hidden_layers")
    if isinstance(count, int) and layers and layers != count:
        raise _contradiction("num_hidden_layers", count, layers, None)


def _is_value_head(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a value model's head, of one row, stands in place of the one for tokens."""
    return name == "lm_head.weight" and shape[:1] == (1,)


def check_value_model(entries: Iterable[Entry], *, asked: bool) -> None:
    """Refuse to call a model with a head for tokens a value model."""
    head = next((expression for name, expression in entries if name == "lm_head.weight"), None)
    if asked and head is not None and head.shape[:1] != (1,):
        raise GeometryMismatch(
            f"the option value_model says true, but lm_head.weight has {head.shape[0]} rows: it is a head for tokens",
            tensor="lm_head.weight",
            expected="a head of one row",
            found=str(list(head.shape)),
            hint="Leave the option out, or name the critic's checkpoint with the option role.",
        )


def check_counts(names: Iterable[str], counts: Iterable[Count], facts: Facts) -> None:
    """Raise ``GeometryMismatch`` where layers, experts or the like are not as many as the config says."""
    names = list(names)
    for count in counts:
        key = next((key for key in count.keys if key in facts.sizes), None)
        if key is not None:
            _check_count(names, count, (key, facts.sizes[key]), facts)


def _check_count(names: Iterable[str], count: Count, told: tuple[str, int], facts: Facts) -> None:
    pattern = Pattern(count.pattern, facts)
    found: dict[tuple[str, ...], set[int]] = {}
    for values in filter(None, map(pattern.match, names)):
        number = int(values.pop(count.placeholder))
        values.pop("rest", None)
        found.setdefault(tuple(values.values()), set()).add(number)
    key, size = told
    for owner, numbers in found.items():
        if numbers == set(range(size)):
            continue
        where = f"{count.what} in layer {', '.join(owner)}" if owner else count.what
        absent = sorted(set(range(size)) - numbers)
        which = f"; number {absent[0]} is the first that is missing" if absent else ""
        raise GeometryMismatch(
            f"config.json says that {key} is {size}, but the checkpoint holds {len(numbers)} {where}{which}",
            file="config.json",
            expected=f"{key} = {size}",
            found=str(len(numbers)),
            hint="The config belongs to another model, or a part of the checkpoint is missing; option config_dir "
            "names another config.",
        )


def _contradiction(key: str, told: int, found: int, tensor: tuple[str, list[int]] | None) -> GeometryMismatch:
    where = f"tensor {tensor[0]} {tensor[1]} has {found}" if tensor else f"the tensors are those of {found} layers"
    return GeometryMismatch(
        f"config.json says that {key} is {told}, but {where}",
        file="config.json",
        tensor=tensor[0] if tensor else None,
        expected=f"{key} = {told}",
        found=str(found),
        hint="The config belongs to another model, or a part of the checkpoint is missing; option config_dir names "
        "another config.",
    )
