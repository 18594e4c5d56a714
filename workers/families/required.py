"""Which tensors a model must have: a layer that lacks one loads with random weights in its place."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from workers.errors import IncompleteCheckpoint
from workers.families.operations import Facts
from workers.families.rules import Pattern, Rule, Table

_LAYERS = "num_hidden_layers"


def check_required(names: Collection[str], table: Table, facts: Facts, made: Collection[str] = frozenset()) -> None:
    """Raise ``IncompleteCheckpoint`` for the first tensor that a table requires and that is not there.

    ``made`` are names on the hub that come about in another way than by the table.
    """
    for pattern in (Pattern(text, facts) for text in table.required):
        for values in _values(pattern, facts):
            name = pattern.name(values)
            if name not in names and not (hub := _hub_names(name, table, facts)) <= set(made):
                raise _missing(name, ", ".join(sorted(hub)), facts)


def _values(pattern: Pattern, facts: Facts) -> Iterator[dict[str, str]]:
    if not pattern.placeholders:
        yield {}
        return
    count = pattern.count(facts.sizes.get(_LAYERS, 0))
    yield from ({placeholder: str(number) for placeholder in pattern.placeholders} for number in range(count))


def _hub_names(name: str, table: Table, facts: Facts) -> set[str]:
    for rule in table.rules:
        if isinstance(rule, Rule):
            values = next(filter(None, (Pattern(text, facts).match(name) for text in rule.sources)), None)
            if values is not None or name in rule.sources:
                return {Pattern(text, facts).name(values or {}) for text in rule.targets}
    return {name}


def _missing(name: str, hub_name: str, facts: Facts) -> IncompleteCheckpoint:
    layers = f": config.json says that {_LAYERS} is {facts.sizes[_LAYERS]}" if _LAYERS in facts.sizes else ""
    return IncompleteCheckpoint(
        f"the tensor {name} ({hub_name} on the hub) is missing{layers}",
        tensor=name,
        expected=name,
        found="no such tensor",
        hint="A file is missing or was not written completely, or the config belongs to another model: option "
        "config_dir names another.",
    )
