"""``unshard serve``: run the service in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from service.server import serve
from service.settings import Settings
from workers.errors import InvalidOption
from workers.storage import load_profiles


def run_serve(given: Mapping[str, Any]) -> int:
    """Serve until a stop signal; flags win over the environment's settings."""
    load_profiles()  # a mistake in the file is for who starts the service, not for the first job that needs it
    serve(settings({name: value for name, value in given.items() if value is not None}))
    return 0


def settings(given: Mapping[str, Any]) -> Settings:
    """The settings, or an ``InvalidOption`` that names the first wrong one and not its value, which may be secret."""
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        name = "_".join(map(str, first["loc"][:1])).upper()
        variable = name if "UNSHARD_" in name else f"UNSHARD_{name}"
        raise InvalidOption(
            f"the setting {variable} is wrong: {first['msg'].lower()}", hint=f"Correct {variable} in the environment."
        ) from None
