"""What is taken away with time: finished jobs, their events, what is left of them at their destinations.

Everything goes in small transactions, and by conditions on the rows themselves: several services may do this at the
same time, and one that is killed in the middle has left nothing half gone.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Connection, Table, delete, exists, select
from sqlalchemy.exc import SQLAlchemyError

from service.db.database import Database
from service.db.tables import (
    LIVE_STATES,
    TERMINAL_STATES,
    audit,
    batches,
    events,
    idempotency_keys,
    jobs,
    webhook_deliveries,
)
from service.jobs.records import Job, job_of, now
from service.loop import Loop
from workers.destination import open_destination
from workers.errors import UnshardError
from workers.options import ConvertOptions
from workers.storage import FolderAddress

SWEEP_EVERY_S = 3600.0
ROWS_AT_ONCE = 200
AWAY_PAUSE_S = 5.0
SWEEP_LOCK = 8_241_907_358
"""Key of the lock that sweeps hold for each transaction: two that delete the same rows could wait for each other."""

ENDED_DELIVERIES = ("delivered", "failed")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """How long things are kept after they have ended."""

    jobs: timedelta = timedelta(days=90)
    events: timedelta = timedelta(days=30)
    audit: timedelta = timedelta(days=365)


class Janitor:
    """A thread that sweeps every hour, and clears destinations of jobs that were deleted."""

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._retention = retention
        self._deleted: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._next_sweep = float("-inf")
        self._loop = Loop("janitor", self._turn, AWAY_PAUSE_S)

    def start(self) -> None:
        """Begin; the first sweep comes at once."""
        self._loop.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End after what is under way."""
        self._deleted.put(None)
        self._loop.stop(timeout_s)

    def clear_after(self, job: Job) -> None:
        """Clear away, soon, what a job that is deleted now has left at its destination."""
        self._deleted.put(job)

    def sweep(self) -> None:
        """Take away everything whose time is over."""
        moment = now()
        self._delete_events(moment - self._retention.events)
        self._delete_jobs(moment - self._retention.jobs)
        old_delivery = (
            webhook_deliveries.c.state.in_(ENDED_DELIVERIES),
            webhook_deliveries.c.created_at < moment - self._retention.events,
        )
        old_batch = (batches.c.ended_at.is_not(None), batches.c.ended_at < moment - self._retention.jobs)
        self._delete_rows(webhook_deliveries, old_delivery)
        self._delete_rows(batches, old_batch)
        self._delete_rows(audit, (audit.c.at < moment - self._retention.audit,))
        with self._sweeping() as connection:
            connection.execute(delete(idempotency_keys).where(idempotency_keys.c.expires_at < moment))

    def _turn(self) -> bool:
        """Sweep when it is time, else clear after one deleted job when there is any."""
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_EVERY_S
            self.sweep()
            return True
        try:
            job = self._deleted.get(timeout=max(0.0, self._next_sweep - time.monotonic()))
        except queue.Empty:
            return True
        if job is not None:
            try:
                self._clear(job)
            except SQLAlchemyError:
                self._deleted.put(job)
                raise
        return True

    # --- rows -----------------------------------------------------------------------------------------------
    def _delete_events(self, before: datetime) -> None:
        """Of old jobs only the last event stays, which says how it ended."""
        earlier = exists().where(events.c.job_id == jobs.c.id, events.c.seq < jobs.c.last_seq)
        old = (jobs.c.state.in_(TERMINAL_STATES), jobs.c.updated_at < before, earlier)

        def delete_some(connection: Connection) -> int:
            found = connection.execute(select(jobs.c.id, jobs.c.last_seq).where(*old).limit(ROWS_AT_ONCE)).all()
            for job_id, last in found:
                connection.execute(delete(events).where(events.c.job_id == job_id, events.c.seq < last))
            return len(found)

        self._repeat(delete_some)

    def _delete_jobs(self, before: datetime) -> None:
        at_work = exists().where(batches.c.id == jobs.c.batch_id, batches.c.ended_at.is_(None))
        old = (jobs.c.state.in_(TERMINAL_STATES), jobs.c.updated_at < before, ~at_work)
        last = ""
        while not self._loop.stopping:
            with self._database.read() as connection:
                some = select(jobs).where(*old, jobs.c.id > last).order_by(jobs.c.id).limit(ROWS_AT_ONCE)
                found = [job_of(row) for row in connection.execute(some).mappings()]
            if not found:
                return
            last = found[-1].id
            for job in found:
                self._clear(job)
            with self._sweeping() as connection:
                # Again with all conditions: one may have been retried since.
                connection.execute(delete(jobs).where(*old, jobs.c.id.in_([job.id for job in found])))

    def _delete_rows(self, table: Table, old: Sequence[ColumnElement[bool]]) -> None:
        def delete_some(connection: Connection) -> int:
            found = connection.execute(select(table.c.id).where(*old).limit(ROWS_AT_ONCE)).scalars().all()
            if found:
                connection.execute(delete(table).where(table.c.id.in_(found)))
            return len(found)

        self._repeat(delete_some)

    def _repeat(self, delete_some: Callable[[Connection], int]) -> None:
        while not self._loop.stopping:
            with self._sweeping() as connection:
                if delete_some(connection) < ROWS_AT_ONCE:
                    return

    @contextmanager
    def _sweeping(self) -> Iterator[Connection]:
        with self._database.write() as connection:
            self._database.serialize(connection, SWEEP_LOCK)
            yield connection

    # --- destinations ---------------------------------------------------------------------------------------
    def _clear(self, job: Job) -> None:
        """Take away what a job that did not succeed has left at its destination, unless another is at work there."""
        fingerprint = (job.plan or {}).get("fingerprint")
        if job.state == "succeeded" or not isinstance(fingerprint, str) or self._is_live(job.destination):
            return
        try:
            profile = ConvertOptions.from_dict(job.options).destination_profile
            open_destination(FolderAddress(job.destination, profile)).clear(fingerprint)
        except UnshardError as error:
            log.warning("what %s left at its destination stays there: %s", job.id, error.message)
        except Exception:
            log.exception("what %s left at its destination stays there", job.id)

    def _is_live(self, destination: str) -> bool:
        live = select(jobs.c.id).where(jobs.c.destination == destination, jobs.c.state.in_(LIVE_STATES)).limit(1)
        with self._database.read() as connection:
            return connection.execute(live).first() is not None
