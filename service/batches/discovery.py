"""Finds folders by a pattern, local or in a bucket, by asking for one level of names after the other.

A level of a bucket is one request for each thousand names, however many objects lie below them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from service.batches.naming import Found, Pattern, fits, is_wild, natural
from workers.errors import InputError, StorageError
from workers.storage import Folder, FolderAddress, open_folder
from workers.storage.addresses import Location, is_portable

MOST_FOUND = 10_000
LIMIT_S = 60.0
"""For all listings of one pattern."""

SHOWN = 10
CONCURRENT_LISTINGS = 16
"""Requests under way at once: a level of many runs is otherwise as slow as the sum of their answers."""


class NothingFound(InputError):
    """No folder fits a pattern."""

    code = "nothing-found"


class TooSlow(StorageError):
    """The names of folders could not be had in the time that is given to it."""


class TooManyFound(InputError):
    """More folders fit a pattern than one request may name."""

    code = "too-many-found"


def discover(prefix: str, pattern: Pattern, profile: str | None = None) -> list[Found]:
    """The folders below a prefix that a pattern means, by step; ``NothingFound`` says what is there when none fits.

    ``TooManyFound`` beyond ``MOST_FOUND``.
    """
    found = look_for(prefix, pattern, profile)
    if not found:
        folder = open_folder(FolderAddress(prefix, profile))
        try:
            raise _nothing_fits(folder.subfolders(), prefix, pattern)
        finally:
            folder.close()
    return found


def look_for(prefix: str, pattern: Pattern, profile: str | None = None) -> list[Found]:
    """The same for whoever is content with none; ``NothingFound`` when the prefix itself is not there."""
    folder = open_folder(FolderAddress(prefix, profile))
    # Not waited for at the end: a store that doesn't answer must not hold whoever asks.
    pool = ThreadPoolExecutor(CONCURRENT_LISTINGS, "discovery")
    deadline = time.monotonic() + LIMIT_S
    try:
        paths: list[str] = [""]
        for segment in pattern.segments:
            found = pool.map(_step(folder, segment), paths, timeout=max(deadline - time.monotonic(), 0))
            paths = list(_bounded(path for some in found for path in some))
        if not paths and not folder.exists():
            raise NothingFound(
                f"there is nothing at {prefix}", hint="Check the path, and that this service can reach it."
            )
    except TimeoutError:
        raise TooSlow(
            f"the folders below {prefix} could not be listed within {LIMIT_S:.0f} s",
            hint="Check that its storage answers, or use a narrower pattern or a longer prefix.",
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        folder.close()
    above = Location.parse(prefix).url.rstrip("/").rpartition("/")[2]
    return [_found(folder, path, pattern, above) for path in sorted(paths, key=natural)]


def _step(folder: Folder, segment: str) -> Callable[[str], list[str]]:
    """What leads from a path to those below it that a segment of the pattern stands for."""

    def those_that_fit(path: str) -> list[str]:
        names = folder.subfolders(path)
        return [_joined(path, name) for name in names if fits(segment, name) and is_portable(name)]

    def the_one(path: str) -> list[str]:
        below = _joined(path, segment)
        return [below] if folder.subfolder(below).exists() else []

    return those_that_fit if is_wild(segment) else the_one


def _bounded(paths: Iterator[str]) -> Iterator[str]:
    for number, path in enumerate(paths):
        if number == MOST_FOUND:
            raise TooManyFound(
                f"more than {MOST_FOUND:,} folders fit the pattern",
                hint="Use a narrower pattern or a longer prefix, and several batches.",
            )
        yield path


def _found(folder: Folder, path: str, pattern: Pattern, above: str) -> Found:
    return Found(folder.address.child(path).url, tuple(path.split("/")[: pattern.named + 1]), above)


def _joined(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _nothing_fits(names: Sequence[str], prefix: str, pattern: Pattern) -> NothingFound:
    text = "/".join(pattern.segments)
    shown = ", ".join(sorted(names, key=natural)[:SHOWN])
    if len(names) > SHOWN:
        shown += f" and {len(names) - SHOWN:,} more"
    return NothingFound(
        f"no folder below {prefix} fits the pattern {text!r}: "
        + (f"there are {shown}" if names else "it has no folders"),
        hint="The pattern is compared with the names of folders, segment by segment.",
        expected=text,
        found=shown,
    )
