"""Look at sources that are not whole: what is missing in them is collected instead of raised.

Only who looks may do this (``workers.inspect``); a plan is always made of a source that was proved to be whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from workers.errors import InputError

MOST_COLLECTED = 100

_collected: ContextVar[list[InputError] | None] = ContextVar("collected", default=None)


@contextmanager
def tolerated() -> Iterator[list[InputError]]:
    """Collect what this thread refuses from now on; the first 100 errors, in their order."""
    found: list[InputError] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def refuse(error: InputError) -> None:
    """Raise an error after which a reader could go on; where errors are tolerated, keep it and return."""
    found = _collected.get()
    if found is None:
        raise error
    if len(found) < MOST_COLLECTED:
        found.append(error)


def has_refused() -> bool:
    """Whether something was refused and tolerated."""
    return bool(_collected.get())
