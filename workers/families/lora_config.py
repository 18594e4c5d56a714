"""Write adapter_config.json for an adapter that is kept apart, from its tensors and what training noted.

Source: peft ``tuners/lora/config.py``.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from workers.checkpoint import Adapter
from workers.errors import GeometryMismatch
from workers.families.adapters import PeftParts

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FOLDER = "lora_adapter"


def adapter_config(parts: PeftParts, adapter: Adapter, base_model: str | None) -> dict[str, Any]:
    """The settings that peft needs to load the adapter; a ``lora_alpha`` that nothing tells is null, never a guess."""
    ranks = Counter(module.rank for module in parts.modules.values() if module.rank)
    rank = ranks.most_common(1)[0][0] if ranks else 0
    others = {module.name: module.rank for module in parts.modules.values() if module.rank not in (0, rank)}
    told = adapter.settings.get("r")
    if isinstance(told, int) and ranks and told not in ranks:
        raise GeometryMismatch(
            f"the adapter's settings say that its rank r is {told}, but its tensors have {sorted(ranks)}",
            expected=f"r = {told}",
            found=", ".join(map(str, sorted(ranks))),
            hint="The settings belong to another run; correct or remove the file that holds them.",
        )
    alpha = adapter.lora_alpha
    dora = any("lora_magnitude_vector" in module.parts for module in parts.modules.values())
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_dropout": 0.0,
        "task_type": None,
        "use_dora": False,
        **adapter.settings,
        "r": rank,
        "lora_alpha": int(alpha) if alpha is not None and float(alpha).is_integer() else alpha,
        "target_modules": target_modules(parts),
        "modules_to_save": trained_modules(parts, adapter),
        **({"use_dora": True} if dora else {}),
        **({"rank_pattern": others} if others else {}),
    }


def trained_modules(parts: PeftParts, adapter: Adapter) -> list[str] | None:
    """Modules that were trained as a whole, by the last parts of their names; trained biases are none of them."""
    biases = adapter.settings.get("bias", "none") != "none"
    modules = {module.rpartition(".")[2] for module, leaf, _ in parts.trained if not (biases and leaf == "bias")}
    return sorted(modules) or None


def target_modules(parts: PeftParts) -> list[str]:
    """The adapted modules by the last part of their names, or in full where that would fit others, too."""
    short = sorted({name.rpartition(".")[2] for name in parts.modules})
    adapted = set(parts.modules)
    base_modules = {name.rpartition(".")[0] for name, _ in parts.base}
    if any(name.rpartition(".")[2] in short for name in base_modules - adapted):
        return sorted(adapted)
    return short


def to_json(settings: dict[str, Any]) -> bytes:
    """JSON as Hugging Face's libraries write it."""
    return (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()
