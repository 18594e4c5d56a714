"""What ``unshard batch`` and ``unshard watch`` ask the service for, from their arguments."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from service.calls import JsonObject
from workers.errors import InvalidOption
from workers.options import ConvertOptions

WILD = re.compile(r"[*?\[]")


def discovery(folders: str) -> JsonObject:
    """``/runs/*/global_step_*`` as the folder to look below and the pattern of what lies there.

    Raises ``InvalidOption`` when nothing in it stands for several names.
    """
    scheme, separator, path = folders.rpartition("://")
    segments = path.split("/")
    first = next((number for number, segment in enumerate(segments) if WILD.search(segment)), None)
    if first is None:
        raise InvalidOption(
            f"{folders} names one folder, not several",
            hint="Write a pattern, quoted so that the shell leaves it alone: '/runs/qwen/global_step_*'. "
            "For one checkpoint there is: unshard submit.",
        )
    prefix = "/".join(segments[:first]) or ("/" if path.startswith("/") else ".")
    return {"prefix": f"{scheme}{separator}{prefix}", "pattern": "/".join(segments[first:]).rstrip("/")}


def template(destination: str | None, options: ConvertOptions, labels: dict[str, str]) -> JsonObject:
    """What the jobs have in common."""
    told: JsonObject = {"options": options.to_dict(), "labels": labels}
    return told if destination is None else {**told, "destination": destination}


def listed(file: str) -> list[JsonObject]:
    """The items of a file: one JSON object a line, or a source and a destination between tabs or spaces.

    ``-`` reads standard input. Raises ``InvalidOption`` that names the line.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidOption(f"{file} cannot be read: {why}", hint="Name a text file, or - for the input.") from None
    lines = enumerate(text.splitlines(), start=1)
    items = [_item(line.strip(), f"{file}, line {number}") for number, line in lines if line.strip()]
    if not items:
        raise InvalidOption(f"{file} names no checkpoint", hint=LINE_HINT)
    return items


def _item(line: str, where: str) -> JsonObject:
    if line.startswith("{"):
        try:
            return dict(json.loads(line))
        except ValueError as error:
            raise InvalidOption(f"{where} is not a JSON object: {error}", hint=LINE_HINT) from None
    parts = line.split("\t") if "\t" in line else line.split()
    if len(parts) > 2:
        raise InvalidOption(f"{where} has {len(parts)} words instead of a source and a destination", hint=LINE_HINT)
    return dict(zip(("source", "destination"), parts, strict=False))


LINE_HINT = 'Write lines such as: /runs/a /models/a; or {"source": "/runs/a", "destination": "/models/a"}.'


def assigned(labels: Iterable[str]) -> dict[str, str]:
    """Labels from ``NAME=VALUE``."""
    found: dict[str, Any] = {}
    for text in labels:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidOption(f"the label {text!r} is not NAME=VALUE", hint="Write --label run=42.")
        if found.get(name, value) != value:
            raise InvalidOption(
                f"label {name} is given twice: {found[name]!r} and {value!r}", hint="Leave one of them out."
            )
        found[name] = value
    return found
