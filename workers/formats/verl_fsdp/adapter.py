"""What a verl checkpoint knows of its LoRA adapter: alpha, task type, and the settings of a saved adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workers.checkpoint import Adapter
from workers.errors import InvalidOption
from workers.formats._format import Listing, join
from workers.formats._model_folder import read_json
from workers.options import ConvertOptions

TRAIN_META = "lora_train_meta.json"
"""verl 0.7.1 (SFT) and 0.9.1: r, lora_alpha, task_type."""
ADAPTER_CONFIG = "lora_adapter/adapter_config.json"
"""verl 0.4 to 0.7 save the adapter apart, with PEFT's own config."""


def read_adapter(listing: Listing, folder: str, names: Iterable[str], options: ConvertOptions) -> Adapter | None:
    """Collect what is known of the adapter; None when no tensor belongs to one."""
    if not any(".lora_" in name or ".modules_to_save." in name for name in names):
        return None
    meta = read_json(listing, join(folder, TRAIN_META)) or {}
    saved = read_json(listing, join(folder, ADAPTER_CONFIG)) or {}
    settings = dict(saved)
    if isinstance(meta.get("task_type"), str) and not settings.get("task_type"):
        settings["task_type"] = meta["task_type"].rpartition(".")[2]
    if isinstance(meta.get("r"), int):
        settings.setdefault("r", meta["r"])
    for source, told in ((TRAIN_META, meta), (ADAPTER_CONFIG, saved)):
        alpha = _alpha(told)
        if alpha is not None:
            _check_option(alpha, source, options)
            return Adapter(alpha, source, settings)
    if options.lora_alpha is not None:
        return Adapter(options.lora_alpha, "the option lora_alpha", settings)
    return Adapter(None, f"neither {TRAIN_META} nor {ADAPTER_CONFIG} has it", settings)


def _alpha(told: Mapping[str, Any]) -> float | None:
    """A usable alpha; verl's own merger has written 0 where it knew none."""
    alpha = told.get("lora_alpha")
    return alpha if isinstance(alpha, int | float) and not isinstance(alpha, bool) and alpha > 0 else None


def _check_option(alpha: float, source: str, options: ConvertOptions) -> None:
    if options.lora_alpha is not None and options.lora_alpha != alpha:
        raise InvalidOption(
            f"the option lora_alpha says {options.lora_alpha:g}, but {source} says {alpha:g}",
            expected=f"{alpha:g}",
            found=f"{options.lora_alpha:g}",
            hint="Leave the option out, or correct the file.",
        )
