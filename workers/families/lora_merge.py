"""Add a LoRA adapter to its base weights, as expressions: W + scale * (B @ A).

What can't be merged exactly as peft would is refused by name.
Source: peft ``tuners/lora/layer.py`` (``get_delta_weight`` of Linear and Embedding), ``tuners/lora/config.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import sqrt
from typing import Any, NoReturn

from workers.checkpoint import Adapter
from workers.dora import AddDora
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InvalidOption, UnmappedTensor
from workers.expressions import AddLora, Expression, Transpose
from workers.families.adapters import LoraModule, PeftParts
from workers.families.patterns import LONGEST_NAME, compiled
from workers.families.rules import Entry

_MERGEABLE = frozenset(("F64", "F32", "BF16", "F16"))

_OTHER_SUMS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
"""Settings of adapters that are no plain sums of a base and a product."""

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What ``init_lora_weights`` begins with where peft takes the adapter's first product off the base before training."""


def merge(parts: PeftParts, adapter: Adapter) -> list[Entry]:
    """The merged model's tensors, in the order of the base's.

    Modules that were trained as a whole come as they are after training.
    """
    if parts.is_adapter_only:
        raise IncompleteCheckpoint(
            "the checkpoint holds an adapter and no base weights, so that there is nothing to merge it into",
            hint="Leave the option lora at separate: the result is the adapter, to be merged into its base model.",
        )
    other = next((key for key in _OTHER_SUMS if adapter.settings.get(key)), None)
    if other is not None:
        raise InvalidOption(
            f"unshard cannot merge an adapter whose settings have {other}",
            expected="LoRA, or DoRA",
            found=f"{other} = {adapter.settings[other]!r}"[:200],
            hint="Keep the adapter apart with lora=separate, or merge with peft (merge_and_unload).",
        )
    weights = dict(parts.base)
    for module in parts.modules.values():
        name = f"{module.name}.weight"
        if name not in weights:
            raise UnmappedTensor(
                f"the adapter has parts for {module.name}, but there is no base weight {name}",
                tensor=name,
                expected=name,
                found=", ".join(module.parts),
                hint="Adapters of parameters that are no linear layer or embedding can be kept apart: lora=separate.",
            )
        weights[name] = _merged(weights[name], module, adapter)
    weights.update((name, expression) for name, expression in parts.original if name not in weights)
    weights.update((f"{module}.{leaf}", expression) for module, leaf, expression in parts.trained)
    return [(name, weights[name]) for name in dict.fromkeys((*parts.order, *weights))]


def check_base(settings: Mapping[str, Any]) -> None:
    """Refuse to merge an adapter into the base that it was made for where training went on from another one.

    Source: peft ``tuners/lora/layer.py`` (``pissa_init``, ``olora_init`` ...).
    """
    way = settings.get("init_lora_weights")
    if isinstance(way, str) and way.lower().startswith(_CHANGES_BASE):
        raise InvalidOption(
            f"the adapter's settings say init_lora_weights {way}: peft changed the base weights before it trained the "
            "adapter, so that it does not belong to the base as it is",
            expected="an adapter of the base itself",
            found=f"init_lora_weights {way}",
            hint="Save it with peft's path_initial_model_for_weight_conversion, or merge it with peft where it was "
            "trained (merge_and_unload), or keep it apart: lora=separate.",
        )


def alpha_of(module: LoraModule, adapter: Adapter) -> float:
    """The alpha of a module; ``InvalidOption`` when nothing tells it."""
    pattern = _by_pattern(adapter.settings.get("alpha_pattern"), module.name)
    alpha = adapter.lora_alpha if pattern is None else pattern
    if alpha is None:
        raise InvalidOption(
            f"merging needs lora_alpha, which the checkpoint does not tell: {adapter.alpha_source}",
            expected="lora_alpha",
            found="none",
            hint="Give the alpha of the training run with the option lora_alpha, or keep the adapter: lora=separate.",
        )
    return alpha


def _merged(base: Expression, module: LoraModule, adapter: Adapter) -> Expression:
    alpha = alpha_of(module, adapter)
    parts = set(module.parts)
    magnitude = module.parts.get("lora_magnitude_vector")
    parts.discard("lora_magnitude_vector")
    if magnitude is None and adapter.settings.get("use_dora"):
        _refuse(module, "DoRA without magnitudes")
    if base.dtype not in _MERGEABLE:
        _refuse(module, f"an adapter of a base of {base.dtype}")
    a: Expression
    b: Expression
    if parts == {"lora_embedding_A", "lora_embedding_B"}:
        # The embedding is [tokens, features]: the transposed product of B [features, r] and A [r, tokens].
        a = Transpose(module.parts["lora_embedding_B"], 0, 1)
        b = Transpose(module.parts["lora_embedding_A"], 0, 1)
    elif parts == {"lora_A.weight", "lora_B.weight"}:
        a, b = module.parts["lora_A.weight"], module.parts["lora_B.weight"]
    else:
        _refuse(module, f"an adapter with the parts {', '.join(sorted(parts))}")
    if not all(len(part.shape) == 2 for part in (base, a, b)):
        _refuse(module, "an adapter of a layer that is neither linear nor an embedding")
    rank = module.rank
    scale = alpha / (sqrt(rank) if adapter.settings.get("use_rslora") else rank)
    if magnitude is not None:
        if module.is_embedding or adapter.settings.get("fan_in_fan_out"):
            _refuse(module, "DoRA of a layer that keeps its weight transposed")
        return _dora(_sum(base, (a, b), scale, module), magnitude, module)
    if adapter.settings.get("fan_in_fan_out") and not module.is_embedding:
        # The base is [in, out], as in GPT-2's Conv1D.
        return Transpose(_sum(Transpose(base, 0, 1), (a, b), scale, module), 0, 1)
    return _sum(base, (a, b), scale, module)


def _sum(base: Expression, ab: tuple[Expression, Expression], scale: float, module: LoraModule) -> AddLora:
    a, b = ab
    if a.shape[0] != b.shape[1] or base.shape != (b.shape[0], a.shape[1]):
        raise GeometryMismatch(
            f"the adapter of {module.name} does not fit its base {list(base.shape)}: A is {list(a.shape)}, B is "
            f"{list(b.shape)}",
            tensor=f"{module.name}.weight",
            expected=f"A [r, {base.shape[1]}] and B [{base.shape[0]}, r]",
            found=f"A {list(a.shape)} and B {list(b.shape)}",
        )
    return AddLora(base, a, b, scale)


def _dora(plain: AddLora, magnitude: Expression, module: LoraModule) -> AddDora:
    if magnitude.shape != plain.shape[:1]:
        raise GeometryMismatch(
            f"the magnitude of {module.name} has shape {list(magnitude.shape)}, but its base {list(plain.shape)}",
            tensor=f"{module.name}.lora_magnitude_vector",
            expected=str(list(plain.shape[:1])),
            found=str(list(magnitude.shape)),
            hint="Adapter and base belong to different models.",
        )
    return AddDora(plain, magnitude)


def _by_pattern(patterns: Any, name: str) -> float | None:
    """The value of the first pattern that fits the end of a module's name, as peft matches ``alpha_pattern``."""
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or compiled(pattern, groups=2, repetitions=2) is None or len(name) > LONGEST_NAME:
            raise InvalidOption(
                f"the adapter's alpha_pattern has {pattern[:80]!r}: {str(value)[:40]}, which is no simple pattern of "
                "names and a number",
                expected="patterns with at most two groups and two repetitions, and numbers",
                found=f"{pattern[:80]!r}: {str(value)[:40]}",
                hint="Merge it with peft (merge_and_unload), or keep the adapter apart with lora=separate.",
            )
        if re.match(rf"(.*\.)?({pattern})$", name):
            return float(value)
    return None


def _refuse(module: LoraModule, what: str) -> NoReturn:
    raise InvalidOption(
        f"unshard cannot merge {what} at {module.name}",
        expected="LoRA of a linear layer or an embedding: A and B",
        found=", ".join(sorted(module.parts)),
        hint="Keep the adapter apart with lora=separate, or merge with peft (merge_and_unload).",
    )
