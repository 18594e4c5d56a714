"""Finds folders by a pattern, local or in a bucket, by asking for one level of names after the other.

A level of a bucket is one request for each thousand names, however many objects lie below them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from service.batches.naming import Found, Pattern, fits, is_wild, natural
from workers.errors import InputError
from workers.storage import Folder, FolderAddress, open_folder
from workers.storage.addresses import Location, is_portable

MOST_FOUND = 10_000
SHOWN = 10
CONCURRENT_LISTINGS = 16
"""Requests under way at once: a level of many runs is otherwise as slow as the sum of their answers."""


class NothingFound(InputError):
    """No folder fits a pattern."""

    code = "nothing-found"


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
        raise _nothing_fits(folder.subfolders(), prefix, pattern)
    return found


def look_for(prefix: str, pattern: Pattern, profile: str | None = None) -> list[Found]:
    """The same for whoever is content with none; ``NothingFound`` when the prefix itself is not there."""
    folder = open_folder(FolderAddress(prefix, profile))
    try:
        with ThreadPoolExecutor(CONCURRENT_LISTINGS, "discovery") as pool:
            paths: list[str] = [""]
            for segment in pattern.segments:
                paths = _below(folder, paths, segment, pool)
        if not paths and not folder.exists():
            raise NothingFound(
                f"there is nothing at {prefix}", hint="Check the path, and that this service can reach it."
            )
    finally:
        folder.close()
    above = Location.parse(prefix).url.rstrip("/").rpartition("/")[2]
    return [_found(folder, path, pattern, above) for path in sorted(paths, key=natural)]


def _below(folder: Folder, paths: Sequence[str], segment: str, pool: ThreadPoolExecutor) -> list[str]:
    look: Callable[[str], list[str]]
    if is_wild(segment):

        def look(path: str) -> list[str]:
            return [
                _joined(path, name) for name in folder.subfolders(path) if fits(segment, name) and is_portable(name)
            ]

    else:

        def look(path: str) -> list[str]:
            path = _joined(path, segment)
            return [path] if folder.subfolder(path).exists() else []

    return list(_bounded(path for some in pool.map(look, paths) for path in some))


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
