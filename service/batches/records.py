"""A batch as the rest of the service sees it, and how it comes out of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import RowMapping

from service.batches.tally import Tally
from service.jobs.records import JsonObject

ENDED_STATES = ("completed", "cancelled")


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch that is to be made of drafts; ``request`` is what its answers repeat of what was asked."""

    owner: str
    name: str
    request: JsonObject
    labels: dict[str, str]
    on_item_error: str = "continue"
    max_running: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch and how far it is."""

    id: str
    owner: str
    name: str
    state: str
    request: JsonObject
    labels: dict[str, str]
    on_item_error: str
    max_running: int | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    tally: Tally

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_STATES


@dataclass(frozen=True, slots=True)
class BatchItem:
    """What a batch asked for at one place, and what became of it. ``state`` None: its job was deleted."""

    position: int
    source: str
    destination: str
    job_id: str | None
    state: str | None
    already_there: bool
    error: JsonObject | None


_FIELDS = tuple(name for name in Batch.__dataclass_fields__ if name != "tally")


def batch_of(row: RowMapping, tally: Tally) -> Batch:
    """The batch in a row of ``batches``."""
    return Batch(**{name: row[name] for name in _FIELDS}, tally=tally)
