"""FP8 weights in blocks, each with a scale of its own: back to ordinary floating-point weights.

``X.weight`` F8_E4M3 [out, in] belongs to ``X.weight_scale_inv`` [ceil(out / b0), ceil(in / b1)], the block being in
the config; stacked experts have one more dimension before. The last blocks may be cut short. Lossless inverse there is
none.
Sources: DeepSeek-V3 ``inference/kernel.py``; transformers ``integrations/finegrained_fp8.py`` for names and config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.dtypes import BY_TORCH_NAME
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InvalidOption
from workers.expressions import FP8_BLOCK, DequantizeBlocks, Expression, Select, Source, Stack
from workers.families.rules import Entry
from workers.mapping import Dropped

QUANTIZATION = "quantization_config"

_SCALE = "_scale_inv"
_ACTIVATIONS = (".input_scale", ".activation_scale")
_FP8 = "F8_E4M3"
_SCALE_TYPES = frozenset(("F32", "BF16", "F16", "F8_E8M0"))


@dataclass(slots=True)
class Dequantized:
    """The model's tensors after dequantising, and what that left out."""

    entries: list[Entry]
    dropped: list[Dropped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_fp8(config: Mapping[str, Any]) -> bool:
    """Whether the config tells of FP8 weights in blocks."""
    told = config.get(QUANTIZATION)
    return isinstance(told, dict) and told.get("quant_method") == "fp8"


def check_scales(entries: Sequence[Entry]) -> None:
    """Each FP8 weight must have its scale and each scale its weight; raises ``IncompleteCheckpoint``."""
    tensors = dict(entries)
    for name, expression in entries:
        if expression.dtype == _FP8 and name + _SCALE not in tensors:
            raise _alone(name, f"{name}{_SCALE}", "FP8 weight without its scale")
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) not in tensors:
            raise _alone(name, name.removesuffix(_SCALE), "scale without its weight")


def dequantize(entries: Sequence[Entry], config: Mapping[str, Any], dtype: str | None) -> Dequantized:
    """Multiply FP8 weights with their scales, rounded once to ``dtype`` (torch's name).

    Without ``dtype`` the config's own counts, or else bfloat16. Raises ``InvalidOption`` for a model that isn't
    quantised so, ``IncompleteCheckpoint`` and ``GeometryMismatch`` for scales that are missing or don't fit.
    """
    told = config.get(QUANTIZATION)
    if not is_fp8(config) and not any(name.endswith(_SCALE) for name, _ in entries):
        method = told.get("quant_method") if isinstance(told, dict) else None
        raise InvalidOption(
            "the option dequantize asks for FP8 weights in blocks, but the model is "
            + (f"quantised by {method}" if method else "not quantised"),
            expected="quantization_config with quant_method fp8",
            found=str(method or "none"),
            hint="Leave the option out.",
        )
    check_scales(entries)
    target = BY_TORCH_NAME[dtype or _own_dtype(config)].name
    block = _block(told)
    tensors, result = dict(entries), Dequantized([])
    for name, expression in entries:
        if name.endswith((_SCALE, *_ACTIVATIONS)):
            result.dropped.append(Dropped(name, "its weight is dequantised"))
        elif name + _SCALE in tensors:
            result.entries.append((name, _product(name, expression, tensors[name + _SCALE], (block, target))))
        else:
            result.entries.append((name, expression))
    count = sum(1 for name, _ in entries if name + _SCALE in tensors)
    result.notes.append(f"{count} weights are dequantised from FP8 in blocks of {block[0]} x {block[1]}")
    return result


def _product(name: str, weight: Expression, scale: Expression, how: tuple[tuple[int, int], str]) -> Expression:
    block, target = how
    if isinstance(scale, Source) and scale.dtype == "U8":
        scale = Source(scale.tensor, "F8_E8M0", scale.shape)  # powers of two, saved as bytes
    if (
        len(weight.shape) == 3 and len(scale.shape) == 3 and weight.shape[0] == scale.shape[0]
    ):  # experts, rows, columns
        parts = (
            _product(f"{name}[{index}]", Select(weight, 0, index), Select(scale, 0, index), how)
            for index in range(weight.shape[0])
        )
        return Stack(tuple(parts), 0)
    blocks = tuple(-(-length // size) for length, size in zip(weight.shape, block, strict=False))
    if weight.dtype != _FP8 or scale.dtype not in _SCALE_TYPES:
        raise _misfit(name, f"{_FP8} and a scale of floating point", f"{weight.dtype} and {scale.dtype}")
    if len(weight.shape) != 2 or scale.shape != blocks:  # rows and columns
        raise _misfit(name, f"a scale of shape {list(blocks)} for blocks of {list(block)}", f"{list(scale.shape)}")
    return DequantizeBlocks(weight, scale, target, block)


def _own_dtype(config: Mapping[str, Any]) -> str:
    told = config.get("dtype", config.get("torch_dtype"))
    return told if told in ("bfloat16", "float16", "float32") else "bfloat16"


def _block(told: Any) -> tuple[int, int]:
    size = told.get("weight_block_size") if isinstance(told, dict) else None
    if size is None:
        return FP8_BLOCK, FP8_BLOCK
    if not isinstance(size, list) or len(size) != 2 or not all(type(length) is int and length > 0 for length in size):
        raise GeometryMismatch(
            f"config.json says weight_block_size {size!r}, which is no rows and columns",
            file="config.json",
            expected="two numbers, such as [128, 128]",
            found=str(size)[:80],
            hint="Correct the config, or take that of the model's own repository.",
        )
    return size[0], size[1]


def _alone(name: str, partner: str, what: str) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(
        f"{name} is an {what}: there is no {partner}"
        if what[0] == "F"
        else f"{name} is a {what}: there is no {partner}",
        tensor=name,
        expected=partner,
        found="no such tensor",
        hint="A file of the model is missing: fetch the folder again.",
    )


def _misfit(name: str, expected: str, found: str) -> GeometryMismatch:
    return GeometryMismatch(
        f"{name} cannot be dequantised: expected {expected}, found {found}",
        tensor=name,
        expected=expected,
        found=found,
        hint="weight_block_size of config.json does not fit the weights: take the model's own config.",
    )
