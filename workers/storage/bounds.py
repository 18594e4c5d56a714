"""Trees that local folders and the links in them may not lead out of.

Who plans in the name of others sets them around its work. A folder that is opened meanwhile keeps them in its address,
so that they hold wherever it is opened again: in a thread, another process or on another machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from workers.errors import StorageError
from workers.storage.addresses import Location

_roots: ContextVar[tuple[str, ...]] = ContextVar("unshard_roots", default=())


@contextmanager
def bounded(roots: tuple[str, ...]) -> Iterator[None]:
    """Keep the local folders that this thread opens inside these trees; none at all bound nothing."""
    token = _roots.set(roots)
    try:
        yield
    finally:
        _roots.reset(token)


def current_roots() -> tuple[str, ...]:
    """The trees of whoever opens a folder now."""
    return _roots.get()


def admits(roots: tuple[str, ...], real_path: str) -> bool:
    """Whether a path without links is inside one of the trees."""
    real = Location("file", "", real_path)
    return any(real.is_inside(Location("file", "", os.path.realpath(root))) for root in roots)


def refusal(path: str, profile: str | None) -> StorageError:
    """The error of a path whose links lead out."""
    who = f"storage profile {profile!r}" if profile is not None else "this service"
    return StorageError(
        f"{path} leads out of the folders that {who} allows",
        file=path,
        expected="a file below an allowed folder, also behind a link",
        hint="Put the file itself there, or have the administrator allow the folder that the link leads to.",
    )
