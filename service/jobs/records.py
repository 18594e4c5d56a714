"""A job as the rest of the service sees it, and how it comes out of its row."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, insert, null, select, update

from service.db import tables
from service.times import now, spelled
from service.webhooks.job_events import tell
from service.webhooks.outbox import Happening

__all__ = ["Job", "JobEvent", "Lease", "NewJob", "append_event", "enter", "event_of", "job_of", "now", "spelled"]

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NewJob:
    """A conversion that somebody asks for; checked and with canonical addresses."""

    source: str
    destination: str
    options: JsonObject
    labels: dict[str, str]
    priority: int = 0
    owner: str = ""
    batch_id: str | None = None
    watch_id: str | None = None

    @property
    def request_digest(self) -> str:
        """The same for jobs that do the same: from this source to this destination with these options."""
        parts = [self.source, self.destination, self.options]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Job:
    """A job and everything that is known of it."""

    id: str
    state: str
    source: str
    destination: str
    options: JsonObject
    labels: dict[str, str]
    priority: int
    created_at: datetime
    updated_at: datetime
    state_times: dict[str, str]
    attempt: int
    progress: JsonObject | None
    plan: JsonObject | None
    error: JsonObject | None
    warnings: list[str]
    result: JsonObject | None
    owner: str
    batch_id: str | None
    watch_id: str | None

    @property
    def is_terminal(self) -> bool:
        return self.state in tables.TERMINAL_STATES


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a job: good as long as nobody else has claimed it since (``fence``)."""

    job: Job
    owner: str
    fence: int

    @property
    def attempt_name(self) -> str:
        """The name of this attempt at the destination."""
        return f"{self.job.id}-{self.job.attempt}-{self.fence}"


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job; ``seq`` counts from 1 within the job."""

    job_id: str
    seq: int
    at: datetime
    type: str
    data: JsonObject


_JOB_FIELDS = tuple(Job.__dataclass_fields__)
SNAPSHOT = tuple(null().label(name) if name == "plan" else tables.jobs.c[name] for name in _JOB_FIELDS)
"""The columns of a job without its plan, which may be large and does not change while it is followed."""


def job_of(row: RowMapping) -> Job:
    """The job in a row of ``jobs``."""
    return Job(**{name: row[name] for name in _JOB_FIELDS})


def event_of(row: RowMapping) -> JobEvent:
    """The event in a row of ``events``."""
    return JobEvent(**{name: row[name] for name in JobEvent.__dataclass_fields__})


def append_event(connection: Connection, job_id: str, kind: str, data: JsonObject) -> None:
    """Add an event to a job's sequence, and to the outbox of webhooks; call it when the job's row is as it is to be.

    Of progress the newest is kept, and of its history since the last plan so many points, evenly spread, that a
    chart can be drawn and a long job stays small.
    """
    jobs, events = tables.jobs, tables.events
    if kind == PLANNED:
        connection.execute(delete(events).where(events.c.job_id == job_id, events.c.type == PROGRESS))
    elif kind == PROGRESS:
        _thin_progress(connection, job_id)
    seq, owner = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id)
        .values(last_seq=jobs.c.last_seq + 1)
        .returning(jobs.c.last_seq, jobs.c.owner)
    ).one()
    moment = now()
    connection.execute(insert(events).values(job_id=job_id, seq=seq, at=moment, type=kind, data=data))
    tell(connection, Happening(owner, kind, moment, data, job_id), seq)


def _thin_progress(connection: Connection, job_id: str) -> None:
    """Make room for one more event of progress."""
    events = tables.events
    history = (events.c.job_id == job_id, events.c.type == PROGRESS)
    points = connection.execute(select(events.c.seq, events.c.at).where(*history).order_by(events.c.seq)).all()
    superfluous: list[int] = []
    if len(points) > 1 and points[-1].at - points[-2].at < (now() - points[0].at) / MOST_PROGRESS:
        superfluous = [points[-1].seq]
    elif len(points) >= MOST_PROGRESS:
        superfluous = [point.seq for point in points[1::2]]
    if superfluous:
        connection.execute(delete(events).where(events.c.job_id == job_id, events.c.seq.in_(superfluous)))


PLANNED = "job.planned"
PROGRESS = "job.progress"
MOST_PROGRESS = 100
"""Points of a job's history of progress."""


def enter(connection: Connection, job_id: str, state: str) -> JsonObject:
    """The columns that put a job into a state, its time included; call inside the transaction that writes them."""
    jobs = tables.jobs
    times = connection.execute(select(jobs.c.state_times).where(jobs.c.id == job_id)).scalar_one()
    moment = now()
    return {"state": state, "state_times": {**times, state: spelled(moment)}, "updated_at": moment}
