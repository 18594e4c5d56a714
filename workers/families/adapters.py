"""LoRA adapters inside a checkpoint: take base and adapter apart, or add one to the other.

PEFT wraps modules, and its names show it: ``base_model.model.<module>.base_layer.weight`` beside
``<module>.lora_A.default.weight``. Wrapped modules that were trained as a whole are there twice, before training
(``original_module``) and after it (``modules_to_save``).
Source: peft ``tuners/lora/layer.py``, ``tuners/lora/model.py``, ``utils/other.py``, ``utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.errors import AmbiguousSource, GeometryMismatch, UnmappedTensor
from workers.expressions import Expression
from workers.families.rules import Entry

PREFIX = "base_model.model."

_LORA = re.compile(r"(?P<module>.+)\.(?P<part>lora_\w+)\.(?P<adapter>[^.]+)(\.(?P<leaf>weight|bias))?")
# As above, in a state dict from which peft took the adapter's name away already.
_UNNAMED = re.compile(r"(?P<module>.+)\.(?P<part>lora_\w+?)(\.(?P<leaf>weight|bias))?")
_TRAINED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<leaf>.+)")
_ORIGINAL = re.compile(r"(?P<module>.+)\.original_module\.(?P<leaf>.+)")
# Parts of peft's other methods, whose meaning for the base differs.
_FOREIGN = re.compile(
    r"\.(ia3_\w+|vera_\w+|hada_\w+|oft_\w+|boft_\w+|vblora_\w+|token_adapter|trainable_tokens\w*)(\.|$)"
)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The adapter's parts for one module by their names, such as ``lora_A.weight`` and ``lora_embedding_A``."""

    name: str
    parts: dict[str, Expression] = field(default_factory=dict)

    @property
    def is_embedding(self) -> bool:
        """Whether the module is an embedding, whose A counts tokens in its second dimension."""
        return "lora_embedding_A" in self.parts

    @property
    def rank(self) -> int:
        """Rows of A; 0 when there is no A."""
        a = self.parts.get("lora_A.weight", self.parts.get("lora_embedding_A"))
        return a.shape[0] if a is not None and a.shape else 0


class Trained(NamedTuple):
    """A parameter of a module that was trained as a whole."""

    module: str
    leaf: str
    expression: Expression


@dataclass(frozen=True, slots=True)
class PeftParts:
    """A PEFT checkpoint taken apart; names are those of the model without peft."""

    base: list[Entry]
    original: list[Entry]
    """Parameters before training of modules that ``trained`` has after it."""
    modules: dict[str, LoraModule]
    trained: list[Trained]
    order: list[str]
    """Names of base and original parameters as they came."""

    @property
    def is_adapter_only(self) -> bool:
        """Whether no weight of a base model is there."""
        return not self.base and not self.original


def is_peft(names: Iterable[str]) -> bool:
    """Whether these are names of a model that peft has wrapped."""
    return any(name.startswith(PREFIX) or ".lora_" in name for name in names)


def take_apart(entries: Iterable[Entry]) -> PeftParts:
    """Sort the tensors of a PEFT checkpoint; what no LoRA has is an ``UnmappedTensor``, and so it is named."""
    parts = PeftParts([], [], {}, [], [])
    adapters: dict[str, str] = {}
    meanings: dict[str, str] = {}
    for raw, expression in entries:
        name = raw.removeprefix(PREFIX)
        meaning = name.replace(".base_layer.", ".")
        if (other := meanings.setdefault(meaning, raw)) != raw:
            raise _same_meaning(other, raw, meaning)
        if _FOREIGN.search(name):
            raise _unknown_part(raw)
        if ".lora_" in name:
            match = _match_lora(name)
            if match is None:
                raise _unknown_part(raw)
            module = parts.modules.setdefault(match["module"], LoraModule(match["module"]))
            leaf = match["leaf"] if match["part"] != "lora_magnitude_vector" else None
            module.parts[f"{match['part']}.{leaf}" if leaf else match["part"]] = expression
        elif match := _TRAINED.fullmatch(name):
            parts.trained.append(Trained(match["module"], match["leaf"], expression))
        elif match := _ORIGINAL.fullmatch(name):
            parts.original.append((f"{match['module']}.{match['leaf']}", expression))
            parts.order.append(parts.original[-1][0])
            continue
        else:
            parts.base.append((meaning, expression))
            parts.order.append(parts.base[-1][0])
            continue
        adapters.setdefault(match.groupdict().get("adapter") or "", raw)
    if len(adapters) > 1:
        listed = ", ".join(f"{name} ({example})" for name, example in adapters.items())
        raise AmbiguousSource(
            f"the checkpoint holds {len(adapters)} adapters: {listed}",
            found=", ".join(adapters),
            hint="Save the one that is wanted alone.",
        )
    return parts


def adapter_entries(parts: PeftParts) -> list[Entry]:
    """The adapter under the names that peft's own files have: without the adapter's name."""
    entries = [
        (f"{PREFIX}{module.name}.{part}", expression)
        for module in parts.modules.values()
        for part, expression in module.parts.items()
    ]
    return entries + [(f"{PREFIX}{module}.{leaf}", expression) for module, leaf, expression in parts.trained]


def _match_lora(name: str) -> re.Match[str] | None:
    """Split a name at its LoRA part; "weight" after it can't be an adapter's name, since peft writes none without."""
    match = _LORA.fullmatch(name)
    return match if match and match["adapter"] not in ("weight", "bias") else _UNNAMED.fullmatch(name)


def _same_meaning(first: str, second: str, meaning: str) -> GeometryMismatch:
    return GeometryMismatch(
        f"two tensors are {meaning} of the model without peft: {first} and {second}",
        tensor=second,
        expected="one of them",
        found=f"{first} and {second}",
        hint="The checkpoint was put together from two: leave the one out that isn't wanted.",
    )


def _unknown_part(name: str) -> UnmappedTensor:
    return UnmappedTensor(
        f"tensor {name} belongs to a method of peft that unshard does not convert",
        tensor=name,
        expected="LoRA: lora_A, lora_B, lora_embedding_A, lora_embedding_B, lora_magnitude_vector, modules_to_save",
        found=name,
        hint="Merge it with peft (merge_and_unload) in the training environment and save the result.",
    )
