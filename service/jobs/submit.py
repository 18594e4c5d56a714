"""From a request to a stored job: options, places, the key against doing it twice."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from service.jobs.addresses import Places
from service.jobs.records import NewJob
from workers.errors import InvalidOption
from workers.families.custom import read_mapping
from workers.families.custom_file import is_inline
from workers.options import ConvertOptions


class BadOption(Exception):
    """An option is wrong; ``name`` is None when only several together are. ``place`` is where in the request."""

    def __init__(self, name: str | None, error: InvalidOption, place: tuple[str, ...] = ("options",)) -> None:
        super().__init__(error.message)
        self.name = name
        self.hint = error.hint
        self.place = place if name is None else (*place, name)


def read_options(values: dict[str, Any], place: tuple[str, ...] = ("options",)) -> ConvertOptions:
    """The options, or a ``BadOption`` that names the culprit."""
    require_storable(values, place)
    for name, value in values.items():
        try:
            alone = ConvertOptions.from_dict({name: value})
            if alone.mapping is not None and is_inline(alone.mapping):
                read_mapping(alone.mapping)
        except InvalidOption as error:
            raise BadOption(name, error, place) from None
    try:
        return ConvertOptions.from_dict(values)
    except InvalidOption as error:
        raise BadOption(None, error, place) from None


def require_storable(values: dict[str, Any], place: tuple[str, ...] = ("options",)) -> None:
    """Refuse what no database and no answer can hold, such as NaN and halves of surrogate pairs."""
    for name, value in values.items():
        try:
            json.dumps({name: value}, allow_nan=False, ensure_ascii=False).encode()
        except ValueError:
            shown = name.encode("ascii", "backslashreplace").decode()
            fault = InvalidOption(f"option {shown}: its name or value cannot be stored")
            raise BadOption(name, fault, place) from None


def checked(asked: NewJob, places: Places) -> tuple[NewJob, ConvertOptions]:
    """The job with canonical addresses and its options, all of it allowed."""
    options = read_options(asked.options)
    source, destination = places.check(asked.source, asked.destination, options)
    return dataclasses.replace(asked, source=source, destination=destination), options
