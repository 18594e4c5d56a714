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
    """An option is wrong; ``name`` is None when only several together are."""

    def __init__(self, name: str | None, error: InvalidOption) -> None:
        super().__init__(error.message)
        self.name = name
        self.hint = error.hint


def read_options(values: dict[str, Any]) -> ConvertOptions:
    """The options, or a ``BadOption`` that names the culprit."""
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
            alone = ConvertOptions.from_dict({name: value})
            if alone.mapping is not None and is_inline(alone.mapping):
                read_mapping(alone.mapping)
        except InvalidOption as error:
            raise BadOption(name, error) from None
        except ValueError:
            raise BadOption(name, InvalidOption(f"option {name}: the value cannot be stored")) from None
    try:
        return ConvertOptions.from_dict(values)
    except InvalidOption as error:
        raise BadOption(None, error) from None


def checked(asked: NewJob, places: Places) -> tuple[NewJob, ConvertOptions]:
    """The job with canonical addresses and its options, all of it allowed."""
    options = read_options(asked.options)
    source, destination = places.check(asked.source, asked.destination, options)
    return dataclasses.replace(asked, source=source, destination=destination), options
