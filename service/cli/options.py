"""``ConvertOptions`` from a command's flags and its ``-o NAME=VALUE``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from workers.errors import InvalidOption
from workers.options import MAPPING, ConvertOptions, parse_assignment

FIELDS = frozenset(field.name for field in dataclasses.fields(ConvertOptions))


def gather(parameters: Mapping[str, Any], assignments: Iterable[str]) -> ConvertOptions:
    """Build the options; parameters of the command that aren't options, or weren't given, are passed over.

    Raises ``InvalidOption`` for an unknown name, an impossible value, or two values for one option.
    """
    return ConvertOptions.from_dict(values(parameters, assignments))


def values(parameters: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """The options that were given, by name."""
    given = {name: value for name, value in parameters.items() if name in FIELDS and value not in (None, False, ())}
    for text in assignments:
        name, value = parse_assignment(text)
        if given.get(name, value) != value:
            raise InvalidOption(
                f"option {name} is given twice: {given[name]!r} and {value!r}", hint="Leave one of them out."
            )
        given[name] = value
    if isinstance(given.get(MAPPING), str):
        given[MAPPING] = _mapping(given[MAPPING])
    return given


def _mapping(option: str) -> str:
    """What a file of this machine holds; a mapping that is no file, or a URL's, is left to whoever converts."""
    from workers.families.custom import read_mapping  # noqa: PLC0415 - only with this option
    from workers.families.custom_file import is_inline  # noqa: PLC0415

    return option if is_inline(option) or "://" in option else read_mapping(option).text
