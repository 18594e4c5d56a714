"""Jobs in the database, as the API asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, and_, delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from service.db.database import Database
from service.db.tables import LIVE_STATES, ROWS_PER_QUERY, TERMINAL_STATES, events, jobs, tokens
from service.ids import is_id, reserve_ids
from service.jobs.keys import Replay, Submission, hand_in
from service.jobs.records import (
    SNAPSHOT,
    Job,
    JobEvent,
    JsonObject,
    NewJob,
    append_event,
    enter,
    event_of,
    job_of,
    now,
    spelled,
)
from service.refusals import NotFound
from service.webhooks.job_events import tell_created

RETRIABLE_STATES = ("failed", "cancelled")


class WrongState(Exception):
    """What was asked isn't possible in the job's state."""

    def __init__(self, job: Job, allowed: tuple[str, ...]) -> None:
        super().__init__(f"job {job.id} is {job.state}")
        self.job = job
        self.allowed = allowed


class BusyDestination(Exception):
    """A live job writes to this destination already."""

    def __init__(self, job_id: str, destination: str) -> None:
        super().__init__(f"{job_id} writes to {destination}")
        self.job_id = job_id
        self.destination = destination


class TooManyQueued(Exception):
    """As many jobs of this owner wait as may."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} jobs of this token wait already, and more may not")
        self.limit = limit


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs to list. ``owner`` None: everybody's."""

    owner: str | None = None
    states: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    batch_id: str | None = None
    watch_id: str | None = None
    source_prefix: str | None = None
    destination_prefix: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    search: str | None = None
    """A part of id, source or destination, in upper or lower case."""


PLAIN: Submission[Job] = Submission()


class JobStore:
    """Every question and change that isn't the work itself. Thread-safe; each method is one transaction.

    ``owner`` limits a method to the jobs of one; those of others are not there for it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, new: NewJob, how: Submission[Job] = PLAIN) -> Job | Replay:
        """Store a job, or find what the same key was answered before.

        ``BusyDestination`` while another live job has this destination, ``KeyReused`` for a key's other request,
        ``TooManyQueued`` when the owner has as many waiting as it may.
        """

        def make(connection: Connection) -> Job:
            require_room(connection, new.owner, 1, how.max_queued)
            _refuse_busy(connection, new.destination)
            [job_id] = insert_jobs(connection, [new])
            return _get(connection, job_id)

        return hand_in(self._database, how, make)

    def get(self, job_id: str, owner: str | None = None) -> Job:
        """The job, or ``NotFound``."""
        with self._database.read() as connection:
            return _get(connection, job_id, owner)

    def finished_equal(self, new: NewJob) -> Job | None:
        """The newest succeeded job that did what this one would, if nothing has replaced its result since."""
        same = (jobs.c.owner == new.owner, jobs.c.destination == new.destination)
        query = select(jobs).where(*same, jobs.c.state == "succeeded").order_by(jobs.c.id.desc()).limit(1)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return job_of(row) if row is not None and row["request_digest"] == new.request_digest else None

    def page(self, wanted: JobFilter, limit: int, before: str | None = None) -> list[Job]:
        """Jobs from the newest on, without their plans; ``before`` is the id of the last job of the page before."""
        query = _filtered(select(*SNAPSHOT), wanted).order_by(jobs.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(jobs.c.id < before)
        with self._database.read() as connection:
            return [job_of(row) for row in connection.execute(query).mappings()]

    def changed(self, wanted: JobFilter, since: datetime, limit: int, after: str = "") -> list[Job]:
        """Jobs that changed at a time or later, the longest unchanged first; without their plans.

        ``since`` and ``after`` are ``updated_at`` and ``id`` of the last job of the page before.
        """
        stamp = jobs.c.updated_at
        later = or_(stamp > since, and_(stamp == since, jobs.c.id > after))
        query = _filtered(select(*SNAPSHOT), wanted).where(later).order_by(stamp, jobs.c.id).limit(limit)
        with self._database.read() as connection:
            return [job_of(row) for row in connection.execute(query).mappings()]

    def events(self, job_id: str, after: int, limit: int, owner: str | None = None) -> tuple[Job, list[JobEvent]]:
        """The job, without its plan, and its events with a greater number than ``after``."""
        query = select(events).where(events.c.job_id == job_id, events.c.seq > after).order_by(events.c.seq)
        with self._database.read() as connection:
            job = _get(connection, job_id, owner, SNAPSHOT)
            return job, [event_of(row) for row in connection.execute(query.limit(limit)).mappings()]

    def change(
        self, job_id: str, *, priority: int | None, labels: dict[str, str] | None, owner: str | None = None
    ) -> Job:
        """Give a job another priority or other labels; what is None stays."""
        values: JsonObject = {"priority": priority, "labels": labels}
        values = {name: value for name, value in values.items() if value is not None}
        with self._database.write() as connection:
            _get(connection, job_id, owner)
            if values:
                connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values, updated_at=now()))
            return _get(connection, job_id)

    def delete(self, job_id: str, owner: str | None = None) -> None:
        """Forget a job that has ended; its result stays where it is."""
        with self._database.write() as connection:
            job = _get(connection, job_id, owner)
            gone = delete(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(TERMINAL_STATES))
            if not connection.execute(gone).rowcount:
                raise WrongState(job, TERMINAL_STATES)

    def cancel(self, job_id: str, owner: str | None = None) -> Job:
        """Ask for a job's end: at once when it waits, else as soon as who works on it has noticed."""
        with self._database.write() as connection:
            return cancel_job(connection, job_id, owner)

    def retry(
        self, job_id: str, owner: str | None = None, *, from_scratch: bool = False, max_queued: int | None = None
    ) -> Job:
        """Queue a failed or cancelled job again; what its attempts finished is kept unless ``from_scratch``.

        ``TooManyQueued`` when its owner has as many waiting as it may.
        """
        try:
            with self._database.write() as connection:
                job = _get(connection, job_id, owner)
                if job.state in RETRIABLE_STATES:
                    require_room(connection, job.owner, 1, max_queued)
                return _retry(connection, job_id, from_scratch=from_scratch)
        except IntegrityError:
            with self._database.read() as connection:
                _refuse_busy(connection, _get(connection, job_id).destination)
            raise

    def owned(self, job_ids: Sequence[str], owner: str) -> set[str]:
        """Those of these jobs that are this owner's."""
        query = select(jobs.c.id).where(jobs.c.id.in_(job_ids), jobs.c.owner == owner)
        with self._database.read() as connection:
            return set(connection.execute(query).scalars())

    def counts(self, owner: str | None = None) -> dict[str, int]:
        """Jobs by state."""
        query = select(jobs.c.state, func.count()).group_by(jobs.c.state)
        if owner is not None:
            query = query.where(jobs.c.owner == owner)
        with self._database.read() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def oldest_queued(self) -> datetime | None:
        """When the job that waits longest was made."""
        with self._database.read() as connection:
            moment: datetime | None = connection.execute(
                select(func.min(jobs.c.created_at)).where(jobs.c.state == "queued")
            ).scalar()
            return moment


def insert_jobs(connection: Connection, new: Sequence[NewJob]) -> list[str]:
    """Queue jobs, in the order that they are to run, and return their ids.

    An ``IntegrityError`` says that a live job has one of the destinations; ``busy_destinations`` tells before.
    """
    moment = now()
    ids = reserve_ids("job", len(new))
    rows = [_row(job_id, job, moment) for job_id, job in zip(ids, new, strict=True)]
    created = [
        {
            "job_id": job_id,
            "seq": 1,
            "at": moment,
            "type": "job.created",
            "data": {"source": job.source, "destination": job.destination},
        }
        for job_id, job in zip(ids, new, strict=True)
    ]
    connection.execute(insert(jobs), rows)
    connection.execute(insert(events), created)
    tell_created(connection, rows)
    return ids


def busy_destinations(connection: Connection, destinations: Sequence[str]) -> dict[str, str]:
    """Of these destinations those that a live job has, with its id."""
    found: dict[str, str] = {}
    for start in range(0, len(destinations), ROWS_PER_QUERY):
        some = destinations[start : start + ROWS_PER_QUERY]
        busy = select(jobs.c.destination, jobs.c.id).where(jobs.c.destination.in_(some), jobs.c.state.in_(LIVE_STATES))
        found |= {row[0]: row[1] for row in connection.execute(busy)}
    return found


def require_room(connection: Connection, owner: str, count: int, max_queued: int | None) -> None:
    """Refuse with ``TooManyQueued`` when ``count`` more jobs of this owner would be more than may wait."""
    if max_queued is None:
        return
    # One request of an owner at a time, so that no two take the last place: who has a limit is a token.
    connection.execute(select(tokens.c.id).where(tokens.c.id == owner).with_for_update())
    waiting = select(func.count()).where(jobs.c.owner == owner, jobs.c.state == "queued")
    if connection.execute(waiting).scalar_one() + count > max_queued:
        raise TooManyQueued(max_queued)


def cancel_job(connection: Connection, job_id: str, owner: str | None = None) -> Job:
    """End a queued job, and mark one that is at work; see ``JobStore.cancel``."""
    # Locked where the database can: else a job that enters its next state meanwhile would not be cancelled.
    job = _get(connection, job_id, owner, lock=True)
    if job.is_terminal or job.state == "cancelling":
        return job
    state = "cancelled" if job.state == "queued" else "cancelling"
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(**enter(connection, job_id, state)))
    append_event(connection, job_id, f"job.{state}", {})
    return _get(connection, job_id)


def _retry(connection: Connection, job_id: str, *, from_scratch: bool) -> Job:
    job = _get(connection, job_id, lock=True)
    if job.state not in RETRIABLE_STATES:
        raise WrongState(job, RETRIABLE_STATES)
    _refuse_busy(connection, job.destination)
    moment = now()
    fresh: JsonObject = {"error": None, "progress": None, "warnings": [], "losses": 0, "updated_at": moment}
    fresh["not_before"] = None
    if from_scratch:
        fresh["options"] = {**job.options, "resume": False}
    fresh |= {"state": "queued", "state_times": {"queued": spelled(moment)}}
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(**fresh))
    append_event(connection, job_id, "job.requeued", {"reason": "retry", "from_scratch": from_scratch})
    return _get(connection, job_id)


def _get(
    connection: Connection,
    job_id: str,
    owner: str | None = None,
    columns: Sequence[Any] = (jobs,),
    *,
    lock: bool = False,
) -> Job:
    if not is_id("job", job_id):
        raise NotFound("job", repr(job_id))
    query = select(*columns).where(jobs.c.id == job_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None or (owner is not None and row["owner"] != owner):
        raise NotFound("job", job_id)
    return job_of(row)


def _row(job_id: str, new: NewJob, moment: datetime) -> JsonObject:
    return {
        "id": job_id,
        "state": "queued",
        "source": new.source,
        "destination": new.destination,
        "options": new.options,
        "labels": new.labels,
        "priority": new.priority,
        "created_at": moment,
        "updated_at": moment,
        "state_times": {"queued": spelled(moment)},
        "attempt": 0,
        "losses": 0,
        "fence": 0,
        "last_seq": 1,
        "warnings": [],
        "owner": new.owner,
        "batch_id": new.batch_id,
        "watch_id": new.watch_id,
        "request_digest": new.request_digest,
    }


def _refuse_busy(connection: Connection, destination: str) -> None:
    for job_id in busy_destinations(connection, [destination]).values():
        raise BusyDestination(job_id, destination)


def fits(job: Job, wanted: JobFilter) -> bool:
    """Whether a job is among those that a filter lists."""
    exactly = ((wanted.owner, job.owner), (wanted.batch_id, job.batch_id), (wanted.watch_id, job.watch_id))
    search = (wanted.search or "").lower()
    return (
        all(value in (None, found) for value, found in exactly)
        and (not wanted.states or job.state in wanted.states)
        and wanted.labels.items() <= job.labels.items()
        and job.source.startswith(wanted.source_prefix or "")
        and job.destination.startswith(wanted.destination_prefix or "")
        and any(search in part.lower() for part in (job.id, job.source, job.destination))
        and (wanted.created_after is None or job.created_at > wanted.created_after)
        and (wanted.created_before is None or job.created_at < wanted.created_before)
    )


def _filtered(query: Select[Any], wanted: JobFilter) -> Select[Any]:
    exactly = {
        jobs.c.owner: wanted.owner,
        jobs.c.batch_id: wanted.batch_id,
        jobs.c.watch_id: wanted.watch_id,
    }
    for column, value in exactly.items():
        if value is not None:
            query = query.where(column == value)
    if wanted.states:
        query = query.where(jobs.c.state.in_(wanted.states))
    for name, value in wanted.labels.items():
        query = query.where(jobs.c.labels[name].as_string() == value)
    if wanted.source_prefix is not None:
        query = query.where(jobs.c.source.startswith(wanted.source_prefix, autoescape=True))
    if wanted.destination_prefix is not None:
        query = query.where(jobs.c.destination.startswith(wanted.destination_prefix, autoescape=True))
    if wanted.search:
        parts = (jobs.c.id, jobs.c.source, jobs.c.destination)
        query = query.where(or_(*(part.icontains(wanted.search, autoescape=True) for part in parts)))
    if wanted.created_after is not None:
        query = query.where(jobs.c.created_at > wanted.created_after)
    if wanted.created_before is not None:
        query = query.where(jobs.c.created_at < wanted.created_before)
    return query
