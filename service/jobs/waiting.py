"""Jobs that wait for a cluster which doesn't work: they say for what, and don't wait for ever."""

from __future__ import annotations

import time
from datetime import timedelta

from sqlalchemy import and_, or_, select, update

from service.db.database import Database
from service.db.tables import LEASED_STATES, jobs
from service.jobs.records import JsonObject, append_event, enter, now

TOLD_AT_ONCE = 200
TELL_EVERY_S = 5.0


class Waiting:
    """Tells queued jobs, in their events, why they don't start; not thread-safe."""

    def __init__(self, database: Database, limit_s: float) -> None:
        self._database = database
        self._limit_s = limit_s
        self._told: dict[str, str] = {}
        self._since: float | None = None
        self._looked = float("-inf")

    def over(self) -> None:
        """The cluster works."""
        self._told.clear()
        self._since = None

    def tell(self, reason: str) -> None:
        """The cluster doesn't work, for this reason. Jobs that have waited for too long fail by it."""
        moment = time.monotonic()
        self._since = moment if self._since is None else self._since
        if moment - self._looked < min(TELL_EVERY_S, self._limit_s / 2):
            return
        self._looked = moment
        with self._database.read() as connection:
            waiting = select(jobs.c.id).where(jobs.c.state == "queued").order_by(jobs.c.id).limit(TOLD_AT_ONCE)
            found = connection.execute(waiting).scalars().all()
        for job_id in found:
            if self._told.get(job_id) != reason:
                self._note(job_id, reason)
        self._told = dict.fromkeys(found, reason)
        if moment - self._since > self._limit_s and not self._others_work():
            self._give_up(reason)

    def _note(self, job_id: str, reason: str) -> None:
        with self._database.write() as connection:
            still = select(jobs.c.id).where(jobs.c.id == job_id, jobs.c.state == "queued").with_for_update()
            if connection.execute(still).first() is not None:
                append_event(connection, job_id, "job.waiting", {"reason": reason})

    def _others_work(self) -> bool:
        """Whether another service with a cluster of its own is at work: then what waits is its to run, in time."""
        at_work = and_(jobs.c.state.in_(LEASED_STATES), jobs.c.lease_expires_at > self._database.clock())
        lately = jobs.c.updated_at > now() - timedelta(seconds=self._limit_s)
        sign = select(jobs.c.id).where(or_(at_work, and_(jobs.c.state == "succeeded", lately))).limit(1)
        with self._database.read() as connection:
            return connection.execute(sign).first() is not None

    def _give_up(self, reason: str) -> None:
        """Fail the jobs that have been queued for as long as the cluster has been gone."""
        error: JsonObject = {
            "kind": "resource",
            "type": "no-cluster",
            "message": f"no cluster could take the job within {self._limit_s:g} s: {reason}",
            "hint": "Repair the cluster or ask for less (see /readyz), then retry the job; UNSHARD_CLUSTER_WAIT_S is "
            "how long jobs wait.",
        }
        overdue = (jobs.c.state == "queued", jobs.c.updated_at < now() - timedelta(seconds=self._limit_s))
        with self._database.write() as connection:
            query = select(jobs.c.id).where(*overdue).limit(TOLD_AT_ONCE).with_for_update(skip_locked=True)
            for job_id in connection.execute(query).scalars().all():
                values = {**enter(connection, job_id, "failed"), "error": error}
                connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values))
                append_event(connection, job_id, "job.failed", error)
