"""Find the tables that apply to a model.

Every module of this package that has ``TABLES`` is one, so that a new family is one new file.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import workers.families
from workers.errors import InvalidOption, UnmappedTensor
from workers.families.config_values import Sizes, check_values, told_sizes
from workers.families.layer_lists import layer_lists
from workers.families.operations import Facts, Version
from workers.families.rules import Table
from workers.options import ConvertOptions

ANY_MODEL = "*"
NAMES_KEPT = "names kept"
KEEP = "none"
"""Value of the option ``family`` that asks for the source's own names."""

HUB_NAMING = "huggingface"
"""Naming of a source that is a Hugging Face model already: no table renames it."""

HUB_LIKE = frozenset(("transformers", HUB_NAMING))
"""Namings whose names are the hub's where no table says otherwise; in any other, a name without a rule is unknown."""

TIES_UNDECIDED = frozenset(("meta", "torchtune"))
"""Namings whose files may repeat the embedding as output head, whatever the config says: the weights decide."""

VISION = "vision_config"
"""Key of the part of a config that describes the vision tower; its sizes are facts with this before their names."""

_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Keys under which a config holds that of its language model."""


@cache
def all_tables() -> tuple[Table, ...]:
    """Every table there is."""
    modules = (module.name for module in pkgutil.iter_modules(workers.families.__path__))
    found = (getattr(importlib.import_module(f"workers.families.{name}"), "TABLES", ()) for name in modules)
    return tuple(table for tables in found for table in tables)


def find_tables(naming: str, config: Mapping[str, Any], family: str | None = None) -> tuple[Table, ...]:
    """The tables for tensors of one naming, in the order in which they are applied.

    Those for every model come first, then that of the language model inside, then that of the whole. ``family``
    names one table instead of what the config says; ``none`` stands for no table at all.
    """
    if family == KEEP:
        return ()
    tables = [table for table in all_tables() if table.naming == naming and _fits(table, config)]
    always = [table for table in tables if ANY_MODEL in table.model_types]
    if family is not None:
        return (*always, _named(family, tables))
    by_type = {model_type: table for table in tables for model_type in table.model_types}
    found = [(depth, by_type[kind]) for depth, kind in enumerate(model_types(config)) if kind in by_type]
    chain = [table for depth, table in found if table.inside or depth == 0]
    if not chain and naming not in HUB_LIKE:
        raise _unsupported(naming, config, by_type)
    return (*always, *dict.fromkeys(reversed(chain)))


def _fits(table: Table, config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else ()
    return not table.architectures or any(str(name).endswith(table.architectures) for name in named)


def model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """The model types of a config, the whole first and the language model inside last."""
    part: Any = config
    while isinstance(part, dict):
        if isinstance(part.get("model_type"), str):
            yield part["model_type"]
        part = next((part[key] for key in _PARTS if isinstance(part.get(key), dict)), None)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    part: Mapping[str, Any] = config
    while inner := next((part[key] for key in _PARTS if isinstance(part.get(key), dict)), None):
        part = inner
    return part


@dataclass(frozen=True, slots=True)
class ConfigFacts(Facts):
    """Facts of a model's config, which remember which of its sizes rules asked for."""

    @property
    def asked(self) -> set[str]:
        """Keys of the sizes that were asked for."""
        return self.sizes.asked if isinstance(self.sizes, Sizes) else set()


def model_facts(config: Mapping[str, Any], options: ConvertOptions) -> ConfigFacts:
    """What rules may ask of a config; where the user says otherwise, that counts.

    Raises ``GeometryMismatch`` where a size of the config is none.
    """
    text = text_config(config)
    check_values(text)
    sizes = {key: told.value for key, told in told_sizes(text, options).items()}
    vision = config.get(VISION)
    if isinstance(vision, dict):
        sizes |= {f"{VISION}.{key}": value for key, value in vision.items() if type(value) is int}
    return ConfigFacts(Sizes(sizes), transformers_version(config), layer_lists(text))


def transformers_version(config: Mapping[str, Any]) -> Version:
    """Major and minor version of transformers that wrote a config; (0, 0) when it does not say."""
    match = re.match(r"(\d+)\.(\d+)", str(config.get("transformers_version", "")))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _unsupported(naming: str, config: Mapping[str, Any], by_type: Mapping[str, Table]) -> UnmappedTensor:
    names = next(model_types(config), "of no model_type")
    architectures = config.get("architectures")
    told = f"{names} ({', '.join(map(str, architectures))})" if isinstance(architectures, list) else names
    known = ", ".join(sorted(set(by_type) - {ANY_MODEL}))
    return UnmappedTensor(
        f"the model family {told} is not supported for checkpoints with {naming} names",
        file="config.json",
        expected=known,
        found=told,
        hint=f"The model types are: {known}. If one of them has the same tensors, name it with the option family; "
        "none keeps the names as they are.",
    )


def _named(family: str, tables: list[Table]) -> Table:
    for table in tables:
        if family == table.name or family in table.model_types:
            return table
    names = ", ".join(sorted(table.name for table in tables))
    raise InvalidOption(
        f"there is no family {family!r} for these names",
        expected=names,
        found=family,
        hint=f"The families are: {names}; none keeps the names as they are.",
    )
