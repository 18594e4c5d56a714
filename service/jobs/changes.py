"""What changes about jobs and batches, told to everyone in this process who listens, by one look at the database.

The database is asked only while somebody listens. Each look goes back over the last seconds once more, since a
transaction stamps a job before it is committed and the clocks of several replicas differ; what was told is not told
again. All of this runs on the event loop, but for the looks themselves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import and_, or_, select
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from service.db.database import Database
from service.db.tables import ROWS_PER_QUERY, batches, jobs
from service.jobs.records import SNAPSHOT, Job, job_of, now

LOOK_EVERY_S = 0.3
BATCHES_EVERY_S = 1.0
LOOK_BACK = timedelta(seconds=15)
"""How late a change may be committed, and how far clocks may differ, for it to be told all the same."""

STAMPS_PER_QUERY = 5000
MOST_PENDING = 1000
"""Jobs that a listener may have to hear of. One that lags behind further has to ask the database itself."""

LOOK_AGAIN_S = 15.0
"""How long whoever waits for a change trusts in being told before looking for itself."""

AWAY_PAUSE_S = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """A job or a batch as it is now.

    ``text`` is its JSON, made once for all listeners. ``since``: everything before this time has been told. ``job`` is
    None of a batch, and has no plan; ``before`` is the state that it was last told in, None when that is not known.
    """

    id: str
    owner: str
    text: str
    since: datetime
    job: Job | None = None
    before: str | None = None


Batches = Callable[[str], "tuple[str, str] | None"]
"""From a batch's id to its owner and its JSON; None when it is gone."""


class Listener:
    """Somebody who hears of what ``wants`` says yes to: the newest of each job, however slowly they are taken."""

    def __init__(self, wants: Callable[[Change], bool]) -> None:
        self._wants = wants
        self._pending: dict[str, Change] = {}
        self._heard = asyncio.Event()
        self.lags = False

    def offer(self, change: Change) -> None:
        """Hear of a change."""
        if self.lags or not self._wants(change):
            return
        if len(self._pending) >= MOST_PENDING and change.id not in self._pending:
            self._pending.clear()
            self.lags = True
        else:
            self._pending.pop(change.id, None)
            self._pending[change.id] = change
        self._heard.set()

    def wake(self) -> None:
        """Let go whoever waits."""
        self._heard.set()

    def restart(self) -> None:
        """Begin anew, now that what was missed is about to be read from the database."""
        self._pending.clear()
        self.lags = False

    async def wait(self, limit_s: float) -> list[Change]:
        """What was heard since the last call, as soon as there is anything; nothing when the time is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._heard.wait(), limit_s)
        self._heard.clear()
        heard = list(self._pending.values())
        self._pending.clear()
        return heard


class Changes:
    """The feed of one process."""

    def __init__(self, database: Database, spell: Callable[[Job], str], batches: Batches = lambda _: None) -> None:
        self._database = database
        self._spell = spell
        self._batches = batches
        self._listeners: set[Listener] = set()
        self._looking: asyncio.Task[None] | None = None
        self._told: dict[str, tuple[datetime, str]] = {}
        self._batches_told: dict[str, datetime] = {}
        self._batches_due: set[str] = set()
        self._batches_at = float("-inf")
        self._since: datetime | None = None
        self.closed = False

    @contextmanager
    def listening(self, wants: Callable[[Change], bool]) -> Iterator[Listener]:
        """Hear of changes while the block runs; call it on the event loop."""
        listener = Listener(wants)
        self._listeners.add(listener)
        if self._looking is None or self._looking.done():
            self._told, self._batches_told, self._since = {}, {}, None
            self._looking = asyncio.get_running_loop().create_task(self._look_again_and_again())
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        """Let go of everyone who listens: the service stops. Call it on the event loop."""
        self.closed = True
        for listener in self._listeners:
            listener.wake()

    async def _look_again_and_again(self) -> None:
        while self._listeners and not self.closed:
            try:
                found = await run_in_threadpool(self._look)
            except SQLAlchemyError:
                log.warning("the job store does not answer", exc_info=True)
                await asyncio.sleep(AWAY_PAUSE_S)
                continue
            except Exception:
                # Else whoever listens would hear nothing more, and never know.
                log.exception("the feed stumbled and goes on")
                await asyncio.sleep(AWAY_PAUSE_S)
                continue
            for change in found:
                for listener in list(self._listeners):
                    listener.offer(change)
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self) -> list[Change]:
        moment = now()
        since = self._since or moment
        stamps = self._stamps(since - LOOK_BACK)
        fresh = [job_id for job_id, stamp in stamps.items() if self._told.get(job_id, (None, ""))[0] != stamp]
        changes = []
        told = {job_id: self._told[job_id] for job_id in stamps if job_id in self._told}
        for job in self._jobs(fresh):
            before = self._told.get(job.id)
            state = before[1] if before else None
            changes.append(Change(job.id, job.owner, self._spell(job), since, job, state))
            told[job.id] = (job.updated_at, job.state)
        self._batches_due |= {change.job.batch_id for change in changes if change.job and change.job.batch_id}
        changes += self._changed_batches(since)
        self._told, self._since = told, moment
        return changes

    def _changed_batches(self, since: datetime) -> list[Change]:
        """Batches of which a job changed, or that changed themselves. Not at every look: each is counted."""
        if time.monotonic() - self._batches_at < BATCHES_EVERY_S:
            return []
        self._batches_at = time.monotonic()
        stamps = changed_batches(self._database, since - LOOK_BACK)
        due = self._batches_due | {batch for batch, stamp in stamps.items() if self._batches_told.get(batch) != stamp}
        self._batches_told, self._batches_due = stamps, set()
        found = ((batch_id, self._batches(batch_id)) for batch_id in sorted(due))
        return [Change(batch_id, told[0], told[1], since) for batch_id, told in found if told is not None]

    def _stamps(self, since: datetime) -> dict[str, datetime]:
        """When the jobs that changed since a time did so last; the longest unchanged first."""
        stamp = jobs.c.updated_at
        query = select(jobs.c.id, stamp).order_by(stamp, jobs.c.id).limit(STAMPS_PER_QUERY)
        found: dict[str, datetime] = {}
        page = query.where(stamp >= since)
        with self._database.read() as connection:
            while rows := connection.execute(page).all():
                found |= {row[0]: row[1] for row in rows}
                if len(rows) < STAMPS_PER_QUERY:
                    break
                last = rows[-1]
                page = query.where(or_(stamp > last[1], and_(stamp == last[1], jobs.c.id > last[0])))
        return found

    def _jobs(self, ids: list[str]) -> Iterator[Job]:
        for start in range(0, len(ids), ROWS_PER_QUERY):
            some = select(*SNAPSHOT).where(jobs.c.id.in_(ids[start : start + ROWS_PER_QUERY]))
            with self._database.read() as connection:
                rows = connection.execute(some.order_by(jobs.c.updated_at, jobs.c.id)).mappings().all()
            yield from map(job_of, rows)


def changed_batches(database: Database, since: datetime, owner: str | None = None) -> dict[str, datetime]:
    """When the batches that changed since a time, apart from their jobs, did so last."""
    query = select(batches.c.id, batches.c.updated_at).where(batches.c.updated_at >= since)
    if owner is not None:
        query = query.where(batches.c.owner == owner)
    with database.read() as connection:
        return {row[0]: row[1] for row in connection.execute(query)}
