"""Checkpoint formats: find out what a folder holds and open it as a ``Checkpoint``.

Formats are found by looking through this package, so that a new one is one new file. Modules whose names begin with
an underscore are what formats share. Nothing here reads a weight.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from workers.checkpoint import Checkpoint
from workers.errors import AmbiguousSource, InputError, InvalidOption, UnknownFormat
from workers.formats._format import Detection, Format, FormatInfo, Listing
from workers.formats._nearby import checkpoints_nearby
from workers.options import ConvertOptions, meant_or_all
from workers.storage import Folder, open_folder

__all__ = ["Detection", "Format", "FormatInfo", "Listing", "detect", "known_formats", "open_checkpoint"]

_SHOWN_NAMES = 8


def open_checkpoint(folder: Folder, options: ConvertOptions) -> Checkpoint:
    """Recognise what lies in a folder and read its metadata.

    Raises ``UnknownFormat`` when nothing is recognised, ``AmbiguousSource`` when several formats are and
    ``options.source_format`` does not say which, and whatever the format finds wrong.
    """
    listing = Listing(folder)
    if not folder.exists():
        raise _nothing_there(listing)
    if options.source_format is not None:
        return _opened(_named(options.source_format), listing, options)
    found = detect(listing)
    if not found:
        raise _unknown(listing)
    if len(found) > 1:
        choices = "; ".join(f"{name} ({', '.join(found[name].evidence)})" for name in found)
        raise AmbiguousSource(
            f"{folder.address.url} could be one of several formats: {choices}",
            found=", ".join(found),
            hint="Say which with the option source_format.",
        )
    return _opened(_named(next(iter(found))), listing, options)


def _opened(known: Format, listing: Listing, options: ConvertOptions) -> Checkpoint:
    """Open a source, unless an option is given that its format does not read: it would change nothing, unseen.

    Where an adapter's base is named, the other options are for the base, and its format looks at them.
    """
    given = options.to_dict().keys()
    optional = frozenset[str]().union(*(other.options for other in _formats().values()))
    unread = sorted((given & optional) - known.options)
    if unread and not ("base" in given and "base" in known.options):
        users = ", ".join(other.name for other in _formats().values() if unread[0] in other.options)
        raise InvalidOption(
            f"the option {unread[0]} means nothing to {listing.folder.address.url}, whose format is {known.name}",
            expected=users,
            found=known.name,
            hint=f"Leave it out. It is for sources of the formats {users}.",
        )
    return known.open(listing, options)


def detect(listing: Listing) -> dict[str, Detection]:
    """What a folder could be: the evidence of each format that recognises it, by the format's name."""
    found = {}
    for known in _formats().values():
        detection = known.detect(listing)
        if detection is not None:
            found[known.name] = detection
    specific = {name: detection for name, detection in found.items() if not detection.generic}
    return specific or found


def known_formats() -> list[FormatInfo]:
    """The formats that can be read, by name."""
    return [known.info for _, known in sorted(_formats().items())]


@cache
def _formats() -> dict[str, Format]:
    formats = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            known: Format = importlib.import_module(f"{__name__}.{module.name}").FORMAT
            formats[known.name] = known
    return formats


def _named(name: str) -> Format:
    try:
        return _formats()[name]
    except KeyError:
        raise InvalidOption(
            f"source_format {name!r} is not a format that unshard reads",
            found=name,
            hint=meant_or_all(name, _formats(), "formats"),
        ) from None


def _unknown(listing: Listing) -> UnknownFormat:
    """Say what lies there instead, and where a checkpoint lies that may be meant."""
    url = listing.folder.address.url
    names = [*(f"{name}/" for name in listing.folders()), *listing.files()]
    if not names:
        return _nothing_there(listing)
    shown = ", ".join(names[:_SHOWN_NAMES]) + (
        f" and {len(names) - _SHOWN_NAMES} more" if names[_SHOWN_NAMES:] else ""
    )
    hint = "Give the folder that holds the checkpoint; unshard formats lists what each format is recognised by."
    if any(name.startswith("optim") for name in names):
        hint = "Only optimizer state lies here: the weights are saved beside it, or in another folder of the run."
    near = checkpoints_nearby(listing, detect)
    if near:
        hint = f"Perhaps one of these is meant: {', '.join(f'{place} ({name})' for place, name in near)}."
        if len(near) == 1:
            hint = f"Perhaps {near[0][0]} is meant, which holds a checkpoint of the format {near[0][1]}."
    return UnknownFormat(
        f"{url} holds no checkpoint that unshard knows: there are {shown}",
        expected=f"the files of one of: {', '.join(sorted(_formats()))}",
        found=shown,
        hint=hint,
    )


def _nothing_there(listing: Listing) -> UnknownFormat:
    folder = listing.folder
    if folder.exists():
        return UnknownFormat(
            f"{folder.address.url} is empty", found="an empty folder", hint="Check the path; a mount may be missing."
        )
    if _is_file(folder):
        return UnknownFormat(
            f"{folder.address.url} is a file, not a folder",
            found="a file",
            hint=f"Give the folder that holds the checkpoint's files: {folder.address.split()[0].url}.",
        )
    what = "directory" if folder.is_local else "prefix with objects"
    return UnknownFormat(
        f"{folder.address.url} does not exist",
        expected=f"a {what}",
        found="nothing of that name",
        hint="Check the spelling; a relative path counts from where the command or the service runs.",
    )


def _is_file(folder: Folder) -> bool:
    try:
        parent, name = folder.address.split()
        return open_folder(parent).stat(name) is not None
    except InputError:
        return False
