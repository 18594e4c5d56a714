"""Adapters under a framework's own names: to peft's names, or into its own order where the hub fuses matrices.

Source: torchtune ``modules/peft/lora.py``, ``modules/peft/dora.py``, ``models/convert_weights.py``
(``tune_to_peft_adapter_weights``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from workers.checkpoint import Adapter
from workers.errors import InvalidOption, UnmappedTensor
from workers.families.adapters import PREFIX
from workers.families.operations import Facts
from workers.families.rules import Entry, Rule, Table, apply_rules

_LEAVES = {
    ".lora_a.weight": ".lora_A.weight",
    ".lora_b.weight": ".lora_B.weight",
    ".magnitude": ".lora_magnitude_vector",
}


@dataclass(frozen=True, slots=True)
class Renamed:
    """An adapter, and perhaps its base, under names that show the parts of modules as peft's do."""

    entries: list[Entry]
    naming: str
    """Whose names the modules have."""


def is_own(names: Iterable[str]) -> bool:
    """Whether there are parts of an adapter under torchtune's names."""
    return any(name.endswith(".lora_a.weight") for name in names)


def hub_names(entries: list[Entry], tables: Sequence[Table], facts: Facts, *, merge: bool) -> Renamed:
    """Give an adapter peft's names and the hub's order of rows.

    Where the hub fuses what the adapter has apart, no adapter of the hub's model is equal to it: with ``merge`` the
    base comes into the framework's own order instead, else it is an ``UnmappedTensor``.
    """
    result = entries
    for table in tables:
        applied = apply_rules(table.rules, result, facts)
        if applied.unmatched:
            if merge and _fused(applied.unmatched[0], table):
                return Renamed(_own_order(entries, tables, facts), table.naming)
            _refuse(applied.unmatched[0], table)
        result = applied.entries
    return Renamed(result, "transformers")


def no_alpha(adapter: Adapter) -> InvalidOption:
    """The error for an adapter whose alpha nothing tells."""
    return InvalidOption(
        f"the adapter's lora_alpha is not known: {adapter.alpha_source}",
        expected="lora_alpha",
        found="none",
        hint="Give the alpha of the training run with the option lora_alpha; it is never guessed.",
    )


def _own_order(entries: list[Entry], tables: Sequence[Table], facts: Facts) -> list[Entry]:
    """The base's weights under the framework's names, and the adapter's parts for them under peft's names of parts."""
    base = [(name.removeprefix(PREFIX), expression) for name, expression in entries if name.startswith(PREFIX)]
    own = [(_peft_leaf(name), expression) for name, expression in entries if not name.startswith(PREFIX)]
    for table in reversed(tables):
        applied = apply_rules(table.inverse_rules(facts.transformers), base, facts)
        if applied.unmatched:
            _refuse(applied.unmatched[0], table)
        base = applied.entries
    return [*base, *own]


def _peft_leaf(name: str) -> str:
    end = next((end for end in _LEAVES if name.endswith(end)), None)
    return name if end is None else name.removesuffix(end) + _LEAVES[end]


def _fused_into(name: str, table: Table) -> str | None:
    """What the hub fuses a module into, by the rule for its weight; None when it does not."""
    end = next((end for end in _LEAVES if name.endswith(end)), None)
    if end is None:
        return None
    weight = name.removesuffix(end) + ".weight"
    rules = (rule for rule in table.rules if isinstance(rule, Rule) and len(rule.sources) > 1)
    found = next((rule for rule in rules if any(_like(text, weight) for text in rule.sources)), None)
    return found.targets[0].removesuffix(".weight").rpartition(".")[2] if found else None


def _like(pattern: str, name: str) -> bool:
    before, _, after = pattern.partition("{layer}")
    return name.startswith(before) and name.endswith(after)


def _fused(name: str, table: Table) -> bool:
    return _fused_into(name, table) is not None


def _refuse(name: str, table: Table) -> NoReturn:
    fused = _fused_into(name, table)
    if fused is None:
        raise UnmappedTensor(
            f"the family {table.name} has no rule for the adapter's tensor {name}",
            tensor=name,
            expected=f"a name of the family {table.name}",
            found=name,
            hint="The config belongs to another model: name the right one with the option config_dir.",
        )
    raise UnmappedTensor(
        f"{name} can't be part of a PEFT adapter: Hugging Face's model has the fused {fused}, and no adapter of it of "
        "the same rank is equal to adapters of its parts",
        tensor=name,
        expected=f"an adapter of {fused}",
        found=name,
        hint="Merge the adapter into its base model: lora=merge, and the base's folder with the option base.",
    )
