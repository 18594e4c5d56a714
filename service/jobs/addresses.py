"""Where jobs may read and write: one check, made when a job is submitted and again when it starts.

Prefixes are compared on segment borders, local ones after links are resolved on both sides.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from workers.errors import InvalidOption
from workers.families.custom_file import is_inline
from workers.options import ConvertOptions
from workers.storage.addresses import Location


class NotAllowed(Exception):
    """An address lies outside of what the administrator allows."""

    def __init__(self, role: str, address: str) -> None:
        super().__init__(f"the {role} {address} is not in a place that this service may use")
        self.role = role
        self.address = address


@dataclass(frozen=True, slots=True)
class AllowedPlaces:
    """The prefixes of one direction; none at all allows everything. ``role`` names the direction in messages."""

    role: str
    prefixes: tuple[str, ...] = ()

    def check(self, address: str) -> str:
        """The canonical form of an address that is allowed; ``NotAllowed`` or ``InvalidOption`` otherwise."""
        location = _parse(self.role, address)
        if self.prefixes and not any(location.is_inside(_resolved(Location.parse(p))) for p in self.prefixes):
            raise NotAllowed(self.role, address)
        return location.url


@dataclass(frozen=True, slots=True)
class Places:
    """Both directions."""

    sources: AllowedPlaces
    destinations: AllowedPlaces

    @classmethod
    def of(cls, sources: tuple[str, ...], destinations: tuple[str, ...]) -> Places:
        """From the two lists of an administrator."""
        return cls(AllowedPlaces("source", sources), AllowedPlaces("destination", destinations))

    def check(self, source: str, destination: str, options: ConvertOptions) -> tuple[str, str]:
        """The canonical source and destination of a job, all of whose places are allowed."""
        return self.check_source(source, options), self.destinations.check(destination)

    def check_source(self, source: str, options: ConvertOptions) -> str:
        """The canonical source of what only reads."""
        mapping = options.mapping if options.mapping is not None and not is_inline(options.mapping) else None
        for place in (options.config_dir, options.base, mapping):
            if place is not None:
                self.sources.check(place)
        return self.sources.check(source)


def _parse(role: str, address: str) -> Location:
    if "://" not in address and not address.startswith("/"):
        raise InvalidOption(
            f"the {role} {address!r} is neither an absolute path nor a URL",
            hint="The service does not run in your working directory: write the path from / on, or a URL.",
        )
    return _resolved(Location.parse(address))


def _resolved(location: Location) -> Location:
    if location.scheme != "file":
        return location
    return Location("file", "", os.path.realpath(location.path))
