"""Jobs in the database, as the API asks for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Select, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.db.database import Database
from service.db.tables import LIVE_STATES, TERMINAL_STATES, events, idempotency_keys, jobs
from service.jobs.records import (
    Job,
    JobEvent,
    JsonObject,
    NewJob,
    append_event,
    enter,
    event_of,
    is_job_id,
    job_of,
    new_job_id,
    now,
    spelled,
)

KEY_LIFETIME = timedelta(hours=24)


class JobNotFound(Exception):
    """There is no job of this id."""


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


class KeyReused(Exception):
    """An idempotency key came again with another request."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A client's word that two requests with this key are one. ``owner`` is whose key it is."""

    key: str
    request_digest: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs to list."""

    states: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    created_after: datetime | None = None
    created_before: datetime | None = None


class JobStore:
    """Every question and change that isn't the work itself. Thread-safe; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, new: NewJob, key: RequestKey | None = None) -> tuple[Job, bool]:
        """Store a job, or find the one that the same key made before; whether it is new.

        ``BusyDestination`` while another live job has this destination, ``KeyReused`` for a key's other request.
        """
        try:
            return self._create(new, key)
        except IntegrityError:
            # Another process was faster with this key or this destination, and now its row can be seen.
            return self._create(new, key)

    def _create(self, new: NewJob, key: RequestKey | None) -> tuple[Job, bool]:
        with self._database.write() as connection:
            earlier = _answered(connection, key) if key else None
            if earlier is not None:
                return earlier, False
            _refuse_busy(connection, new.destination)
            job = _insert(connection, new)
            if key is not None:
                values = {"owner": key.owner, "key": key.key, "request_digest": key.request_digest, "job_id": job.id}
                expires = now() + KEY_LIFETIME
                answer = {"id": job.id}
                connection.execute(insert(idempotency_keys).values(**values, answer=answer, expires_at=expires))
            return job, True

    def get(self, job_id: str) -> Job:
        """The job, or ``JobNotFound``."""
        with self._database.read() as connection:
            return _get(connection, job_id)

    def page(self, wanted: JobFilter, limit: int, before: str | None = None) -> list[Job]:
        """Jobs from the newest on; ``before`` is the id of the last job of the page before."""
        query = _filtered(select(jobs), wanted).order_by(jobs.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(jobs.c.id < before)
        with self._database.read() as connection:
            return [job_of(row) for row in connection.execute(query).mappings()]

    def events(self, job_id: str, after: int, limit: int) -> tuple[Job, list[JobEvent]]:
        """The job, and its events with a greater number than ``after``."""
        query = select(events).where(events.c.job_id == job_id, events.c.seq > after).order_by(events.c.seq)
        with self._database.read() as connection:
            job = _get(connection, job_id)
            return job, [event_of(row) for row in connection.execute(query.limit(limit)).mappings()]

    def cancel(self, job_id: str) -> Job:
        """Ask for a job's end: at once when it waits, else as soon as who works on it has noticed."""
        with self._database.write() as connection:
            # Locked where the database can: else a job that enters its next state meanwhile would not be cancelled.
            job = _get(connection, job_id, lock=True)
            if job.is_terminal or job.state == "cancelling":
                return job
            state = "cancelled" if job.state == "queued" else "cancelling"
            found = connection.execute(
                update(jobs)
                .where(jobs.c.id == job_id, jobs.c.state == job.state)
                .values(**enter(connection, job_id, state))
            )
            if found.rowcount:
                append_event(connection, job_id, f"job.{state}", {})
            return _get(connection, job_id)

    def retry(self, job_id: str) -> Job:
        """Queue a failed or cancelled job again; what its attempts finished at the destination is kept."""
        try:
            with self._database.write() as connection:
                return _retry(connection, job_id)
        except IntegrityError:
            with self._database.read() as connection:
                _refuse_busy(connection, _get(connection, job_id).destination)
            raise

    def counts(self) -> dict[str, int]:
        """Jobs by state."""
        query = select(jobs.c.state, func.count()).group_by(jobs.c.state)
        with self._database.read() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def oldest_queued(self) -> datetime | None:
        """When the job that waits longest was made."""
        with self._database.read() as connection:
            moment: datetime | None = connection.execute(
                select(func.min(jobs.c.created_at)).where(jobs.c.state == "queued")
            ).scalar()
            return moment


def _get(connection: Connection, job_id: str, *, lock: bool = False) -> Job:
    if not is_job_id(job_id):
        raise JobNotFound(repr(job_id))
    query = select(jobs).where(jobs.c.id == job_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        raise JobNotFound(job_id)
    return job_of(row)


def _insert(connection: Connection, new: NewJob) -> Job:
    moment = now()
    job_id = new_job_id()
    connection.execute(
        insert(jobs).values(
            id=job_id,
            state="queued",
            source=new.source,
            destination=new.destination,
            options=new.options,
            labels=new.labels,
            priority=new.priority,
            created_at=moment,
            updated_at=moment,
            state_times={"queued": spelled(moment)},
            attempt=0,
            losses=0,
            fence=0,
            last_seq=0,
            warnings=[],
        )
    )
    append_event(connection, job_id, "job.created", {"source": new.source, "destination": new.destination})
    return _get(connection, job_id)


def _answered(connection: Connection, key: RequestKey) -> Job | None:
    table = idempotency_keys
    connection.execute(delete(table).where(table.c.expires_at < now()))
    where = (table.c.owner == key.owner, table.c.key == key.key)
    row = connection.execute(select(table).where(*where)).mappings().first()
    if row is None:
        return None
    if row["request_digest"] != key.request_digest:
        raise KeyReused(key.key)
    return _get(connection, row["job_id"])


def _refuse_busy(connection: Connection, destination: str) -> None:
    busy = select(jobs.c.id).where(jobs.c.destination == destination, jobs.c.state.in_(LIVE_STATES))
    job_id = connection.execute(busy.limit(1)).scalar()
    if job_id is not None:
        raise BusyDestination(job_id, destination)


def _retry(connection: Connection, job_id: str) -> Job:
    job = _get(connection, job_id)
    allowed = tuple(state for state in TERMINAL_STATES if state != "succeeded")
    if job.state not in allowed:
        raise WrongState(job, allowed)
    _refuse_busy(connection, job.destination)
    moment = now()
    fresh: JsonObject = {"error": None, "progress": None, "warnings": [], "losses": 0, "updated_at": moment}
    found = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.state == job.state)
        .values(state="queued", state_times={"queued": spelled(moment)}, **fresh)
    )
    if found.rowcount:
        append_event(connection, job_id, "job.requeued", {"reason": "retry"})
    return _get(connection, job_id)


def _filtered(query: Select[Any], wanted: JobFilter) -> Select[Any]:
    if wanted.states:
        query = query.where(jobs.c.state.in_(wanted.states))
    for name, value in wanted.labels.items():
        query = query.where(jobs.c.labels[name].as_string() == value)
    if wanted.created_after is not None:
        query = query.where(jobs.c.created_at > wanted.created_after)
    if wanted.created_before is not None:
        query = query.where(jobs.c.created_at < wanted.created_before)
    return query
