"""Cursors of lists: the id of a page's last item, opaque to clients and checked when it comes back."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from service.errors import Problem
from service.ids import is_id


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_Identified)


def cut(found: Sequence[Item], limit: int) -> tuple[list[Item], str | None]:
    """A page of what was asked for with one more than its size, and the cursor of the next if there is one."""
    items = list(found[:limit])
    return items, encoded(items[-1].id) if len(found) > limit else None


def encoded(item_id: str) -> str:
    """The cursor that asks for what comes after an item."""
    return base64.urlsafe_b64encode(item_id.encode()).decode()


def decoded(cursor: str | None, kind: str) -> str | None:
    """The id in a cursor; a problem when it is no cursor of a list of this kind."""
    if cursor is None:
        return None
    item_id = _text(cursor)
    if not is_id(kind, item_id):
        raise _foreign()
    return item_id


def decoded_number(cursor: str | None) -> int:
    """The number in a cursor of a list that counts its items, -1 without one; a problem when it is no such cursor."""
    if cursor is None:
        return -1
    text = _text(cursor)
    if not re.fullmatch("[0-9]{1,9}", text):
        raise _foreign()
    return int(text)


def _text(cursor: str) -> str:
    try:
        return base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _foreign() -> Problem:
    fault = {"parameter": "cursor", "detail": "not a cursor"}
    hint = "Use next_cursor of the page before as it is."
    return Problem("validation", "cursor: not a cursor of this list", hint=hint, errors=[fault])
