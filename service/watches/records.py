"""A watch as the rest of the service sees it, and how it comes out of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import RowMapping

from service.jobs.records import JsonObject

ITEM = "item"
"""The kind in the ids of what a watch has seen."""


@dataclass(frozen=True, slots=True)
class NewWatch:
    """A watch that somebody asks for; checked."""

    owner: str
    name: str
    prefix: str
    pattern: str
    template: JsonObject
    interval_s: float


@dataclass(frozen=True, slots=True)
class Watch:
    """A watch. ``counts`` are items by state; ``error`` is why the prefix could not be looked at the last time."""

    id: str
    owner: str
    name: str
    state: str
    prefix: str
    pattern: str
    template: JsonObject
    interval_s: float
    created_at: datetime
    updated_at: datetime
    next_look_at: datetime
    last_look_at: datetime | None
    error: JsonObject | None
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WatchItem:
    """A folder that a watch has seen. ``error`` is why it still waits, was refused, or why its job failed."""

    id: str
    source: str
    state: str
    job_id: str | None
    job_state: str | None
    error: JsonObject | None
    first_seen_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Seen:
    """What earlier looks know of a folder: its listing, since when it has been that, and the verdict on it."""

    state: str
    listing: str | None
    listing_since: datetime | None
    error: JsonObject | None
    updated_at: datetime


_FIELDS = tuple(name for name in Watch.__dataclass_fields__ if name != "counts")


def watch_of(row: RowMapping, counts: Mapping[str, int]) -> Watch:
    """The watch in a row of ``watches``."""
    return Watch(**{name: row[name] for name in _FIELDS}, counts=counts)
