"""Where jobs may read and write: one check, made when a job is submitted and again when it starts.

Prefixes are compared on segment borders, local ones after links are resolved on both sides.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import unquote

from workers.errors import InvalidOption
from workers.families.custom_file import is_inline
from workers.options import ConvertOptions
from workers.storage.addresses import Location


class NotAllowed(Exception):
    """An address lies outside of what the administrator allows; ``hint`` names the setting."""

    def __init__(self, role: str, address: str, hint: str) -> None:
        super().__init__(f"the {role} {address} is not in a place that this service may use")
        self.role = role
        self.address = address
        self.hint = hint


@dataclass(frozen=True, slots=True)
class AllowedPlaces:
    """The prefixes of one direction, whose name ``role`` is. Without any, all is allowed, or all but this machine.

    A bucket without a list is bounded by the credentials that the service has for it; a disk of this machine holds
    what belongs to others, so that a service that others can reach uses only what is listed.
    """

    role: str
    prefixes: tuple[str, ...] = ()
    only_listed_local: bool = False

    def check(self, address: str, named: str | None = None) -> str:
        """The canonical form of an address that is allowed; ``NotAllowed`` or ``InvalidOption`` otherwise.

        ``named`` is what a message calls it, the role if not given.
        """
        location = _parse(named or self.role, address)
        if not self._allows(location):
            raise NotAllowed(self.role, address, self._hint())
        return location.url

    @property
    def roots(self) -> tuple[str, ...]:
        """The trees of this machine's file system that are listed."""
        locations = [Location.parse(prefix) for prefix in self.prefixes]
        return tuple(location.path for location in locations if location.scheme == "file")

    def _allows(self, location: Location) -> bool:
        if self.prefixes:
            return any(location.is_inside(_resolved(Location.parse(prefix))) for prefix in self.prefixes)
        return not (self.only_listed_local and location.scheme in LOCAL_SCHEMES)

    def _hint(self) -> str:
        setting = f"UNSHARD_ALLOWED_{self.role.upper()}S"
        if self.prefixes:
            return f"Ask the administrator of the service which prefixes it may use; {setting} lists them."
        return f"The administrator lists the folders that jobs may use in {setting}; without a list there are none."


LOCAL_SCHEMES = ("file", "memory")


@dataclass(frozen=True, slots=True)
class Places:
    """Both directions."""

    sources: AllowedPlaces
    destinations: AllowedPlaces

    @classmethod
    def of(cls, sources: tuple[str, ...], destinations: tuple[str, ...], *, only_listed_local: bool = False) -> Places:
        """From the two lists of an administrator; ``InvalidOption`` when one of their entries is no address."""
        for setting, prefixes in (("SOURCES", sources), ("DESTINATIONS", destinations)):
            for prefix in prefixes:
                _check_prefix(f"UNSHARD_ALLOWED_{setting}", prefix)
        return cls(
            AllowedPlaces("source", sources, only_listed_local),
            AllowedPlaces("destination", destinations, only_listed_local),
        )

    def check(self, source: str, destination: str, options: ConvertOptions) -> tuple[str, str]:
        """The canonical source and destination of a job, all of whose places are allowed."""
        return self.check_source(source, options), self.destinations.check(destination)

    def check_source(self, source: str, options: ConvertOptions) -> str:
        """The canonical source of what only reads."""
        mapping = options.mapping if options.mapping is not None and not is_inline(options.mapping) else None
        for option, place in (("config_dir", options.config_dir), ("base", options.base), ("mapping", mapping)):
            if place is not None:
                self.sources.check(place, f"option {option}")
        return self.sources.check(source)


def _parse(role: str, address: str) -> Location:
    if "://" not in address and not address.startswith("/"):
        raise InvalidOption(
            f"the {role} {address!r} is neither an absolute path nor a URL",
            hint="The service does not run in your working directory: write the path from / on, or a URL.",
        )
    location = Location.parse(address)
    if _is_ambiguous(location.path):
        raise InvalidOption(
            f"the {role} {address!r} can be read in more than one way",
            hint="Write it without backslashes, and without '..' and the like in percent-encoded forms.",
        )
    return _resolved(location)


def _is_ambiguous(path: str) -> bool:
    """Whether a reader that decodes a path once more than we do might see a way up in it."""
    for _ in range(MOST_DECODINGS):
        if "\\" in path or "\0" in path or not {".", ".."}.isdisjoint(path.split("/")):
            return True
        decoded = unquote(path)
        if decoded == path:
            return False
        path = decoded
    return True


MOST_DECODINGS = 4


def _check_prefix(setting: str, prefix: str) -> None:
    if "://" not in prefix and not prefix.startswith("/"):
        raise InvalidOption(
            f"{setting}: {prefix!r} is neither an absolute path nor a URL",
            hint="Write absolute paths and URLs such as /data/runs or s3://bucket/prefix, separated by commas.",
        )
    try:
        Location.parse(prefix)
    except InvalidOption as error:
        raise InvalidOption(f"{setting}: {error.message}", hint=error.hint) from None


def _resolved(location: Location) -> Location:
    if location.scheme != "file":
        return location
    return Location("file", "", os.path.realpath(location.path))
