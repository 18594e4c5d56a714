"""Leased work: who may carry a job out, and what they may still say about it.

A claim gives the job a new fencing token. Every later change names that token, so that whoever lost the lease (a
stalled process, a partitioned node) changes nothing and learns that it is out. Nothing here waits or works: a
transaction marks, the work happens outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, select, update

from service.db.database import Database
from service.db.tables import LEASED_STATES, jobs
from service.jobs.choice import Group, in_order, may_start
from service.jobs.parts import REPORT, TENSORS, begin_attempt, end_attempt, enter_shards, finish_shards, keep_document
from service.jobs.records import JsonObject, Lease, append_event, enter, job_of, now, spelled

CLAIM_LOCK = 8_241_907_356
"""Key of the lock that claims hold; see ``Database.serialize``."""

WORKING_STATES = ("planning", "running", "verifying")
PAUSE_GROWTH = 4
LONGEST_PAUSE = timedelta(minutes=10)


class LeaseLost(Exception):
    """Somebody else has the job now, or nobody: whatever was still to be said of it comes too late."""


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """How long a lease holds without a heartbeat, and how often a job may lose it before that is a failure."""

    length: timedelta = timedelta(seconds=30)
    max_attempts: int = 3
    first_pause: timedelta = timedelta(seconds=1)
    """How long a job waits that was interrupted once; after each further time ``PAUSE_GROWTH`` times as long."""

    def pause(self, losses: int) -> timedelta:
        """How long a job waits that was interrupted so often."""
        growth: int = PAUSE_GROWTH ** max(0, losses - 1)
        return min(self.first_pause * growth, LONGEST_PAUSE) if losses else timedelta()


class Leases:
    """The leases of one owner. Thread-safe; each method is one transaction."""

    def __init__(self, database: Database, owner: str, rules: LeaseRules | None = None) -> None:
        self._database = database
        self._owner = owner
        self.rules = rules or LeaseRules()

    def claim(self) -> Lease | None:
        """Take the queued job that comes first, as ``service.jobs.choice`` orders them. None when none may start."""
        if not self._any(jobs.c.state == "queued", may_start(now())):
            return None
        with self._database.write() as connection:
            # One claim at a time, so that no two processes both take the last place below a limit.
            self._database.serialize(connection, CLAIM_LOCK)
            for group in in_order(connection):
                row = self._take(connection, group)
                if row is not None:
                    return Lease(job_of(row), self._owner, row["fence"])
        return None

    def _take(self, connection: Connection, group: Group) -> RowMapping | None:
        moment = now()
        first = (
            select(jobs.c.id)
            .where(
                jobs.c.state == "queued",
                jobs.c.owner == group.owner,
                jobs.c.batch_id.is_not_distinct_from(group.batch_id),
                jobs.c.priority == group.priority,
                may_start(moment),
            )
            .order_by(jobs.c.id)
            .limit(1)
            .with_for_update(skip_locked=True)  # SQLite has none and needs none: there is one writer
        )
        claimed = (
            update(jobs)
            .where(jobs.c.id == first.scalar_subquery(), jobs.c.state == "queued")
            .values(
                state="planning",
                attempt=jobs.c.attempt + 1,
                fence=jobs.c.fence + 1,
                lease_owner=self._owner,
                lease_expires_at=self._database.clock(self.rules.length),
                heartbeat_at=moment,
                updated_at=moment,
                error=None,
                not_before=None,
            )
            .returning(jobs)
        )
        row = connection.execute(claimed).mappings().first()
        if row is None:
            return None
        times = {**row["state_times"], "planning": spelled(moment)}
        connection.execute(update(jobs).where(jobs.c.id == row["id"]).values(state_times=times))
        begin_attempt(connection, row["id"], row["attempt"], self._owner)
        append_event(connection, row["id"], "job.planning", {"attempt": row["attempt"]})
        return row

    def heartbeat(self, lease: Lease) -> str:
        """Extend the lease; the state that the job is in by now. ``LeaseLost`` when it isn't ours any more."""
        with self._database.write() as connection:
            state = connection.execute(
                update(jobs)
                .where(*_ours(lease))
                .values(heartbeat_at=now(), lease_expires_at=self._database.clock(self.rules.length))
                .returning(jobs.c.state)
            ).scalar()
        if state is None:
            raise LeaseLost(lease.job.id)
        return str(state)

    def state(self, lease: Lease) -> str:
        """The state that the job is in by now, without extending the lease; ``LeaseLost`` as for ``heartbeat``."""
        with self._database.read() as connection:
            state = connection.execute(select(jobs.c.state).where(*_ours(lease))).scalar()
        if state is None:
            raise LeaseLost(lease.job.id)
        return str(state)

    def advance(self, lease: Lease, state: str, event: JsonObject, **columns: Any) -> None:
        """Enter a working state; a job that is being cancelled stays so."""
        with self._database.write() as connection:
            if _held(connection, lease)["state"] in WORKING_STATES:
                values = {**enter(connection, lease.job.id, state), **columns}
                connection.execute(update(jobs).where(jobs.c.id == lease.job.id).values(**values))
                append_event(connection, lease.job.id, f"job.{state}", event)

    def note(self, lease: Lease, kind: str, event: JsonObject, **columns: Any) -> None:
        """Record something that happened, without a change of state."""
        with self._database.write() as connection:
            values = {"updated_at": now(), **columns}
            if not connection.execute(update(jobs).where(*_ours(lease)).values(**values)).rowcount:
                raise LeaseLost(lease.job.id)
            append_event(connection, lease.job.id, kind, event)

    def planned(self, lease: Lease, event: JsonObject, plan: JsonObject, tensors: bytes) -> None:
        """Record the plan: its summary, its output files, and the document that lists its tensors."""
        with self._database.write() as connection:
            values = {"updated_at": now(), "plan": plan}
            if not connection.execute(update(jobs).where(*_ours(lease)).values(**values)).rowcount:
                raise LeaseLost(lease.job.id)
            enter_shards(connection, lease.job.id, plan["files"])
            keep_document(connection, lease.job.id, TENSORS, tensors)
            append_event(connection, lease.job.id, "job.planned", event)

    def shards_done(self, lease: Lease, digests: Mapping[str, str | None], event: JsonObject | None = None) -> None:
        """Record output files as finished; with an event, that this has just happened."""
        with self._database.write() as connection:
            if not connection.execute(update(jobs).where(*_ours(lease)).values(updated_at=now())).rowcount:
                raise LeaseLost(lease.job.id)
            finish_shards(connection, lease.job.id, digests)
            if event is not None:
                append_event(connection, lease.job.id, "shard.completed", event)

    def finish(
        self, lease: Lease, state: str, event: JsonObject, *, report: bytes | None = None, **columns: Any
    ) -> None:
        """End the job and give the lease back; ``report`` is the manifest, packed."""
        with self._database.write() as connection:
            _held(connection, lease)
            values = {**enter(connection, lease.job.id, state), **columns, **_FREE}
            connection.execute(update(jobs).where(jobs.c.id == lease.job.id).values(**values))
            if report is not None:
                keep_document(connection, lease.job.id, REPORT, report)
            end_attempt(connection, lease.job.id, lease.job.attempt, state, columns.get("error"))
            append_event(connection, lease.job.id, f"job.{state}", event)

    def give_back(self, lease: Lease, reason: str) -> None:
        """Queue the job again without counting it as lost; one that is being cancelled is cancelled."""
        with self._database.write() as connection, suppress(LeaseLost):
            row = _held(connection, lease)
            _requeue(connection, row, reason, losses=row["losses"])

    def interrupted(self, lease: Lease, reason: str) -> None:
        """Queue the job again, after a pause, since the attempt lost what it needs; too often is a failure."""
        with self._database.write() as connection:
            row = _held(connection, lease)
            error = {
                "kind": "resource",
                "type": "interrupted",
                "message": f"the job was given up after {row['losses'] + 1} attempts that were interrupted: {reason}",
                "hint": "Look at the logs of the cluster and of the service, and at their memory; then retry it.",
            }
            self._take_back(connection, row, (reason, error), self.rules.pause(row["losses"] + 1))

    def take_back_expired(self, *, everyone: bool = False) -> list[str]:
        """Requeue jobs whose owner is gone: by expiry, or ``everyone``'s when no other process can be alive.

        A job that lost its lease too often fails instead. Returns the ids of the jobs.
        """
        lost: list[ColumnElement[bool]] = [jobs.c.state.in_(LEASED_STATES)]
        if not everyone:
            lost.append(jobs.c.lease_expires_at < self._database.clock())
        if not self._any(*lost):
            return []
        with self._database.write() as connection:
            rows = connection.execute(select(jobs).where(*lost).with_for_update(skip_locked=True)).mappings().all()
            for row in rows:
                # It has waited for as long as its lease was good; only who loses it again waits longer.
                why = "its process was lost", _lost_too_often(row["losses"] + 1)
                self._take_back(connection, row, why, self.rules.pause(row["losses"]))
            return [row["id"] for row in rows]

    def _any(self, *where: ColumnElement[bool]) -> bool:
        """Whether there are such jobs; without the write lock, since mostly there are none."""
        with self._database.read() as connection:
            return connection.execute(select(jobs.c.id).where(*where).limit(1)).first() is not None

    def _take_back(
        self, connection: Connection, row: RowMapping, why: tuple[str, JsonObject], pause: timedelta
    ) -> None:
        """Queue a job again after a pause, or end it by the error when it was lost too often."""
        reason, error = why
        losses = row["losses"] + 1
        if losses < self.rules.max_attempts or row["state"] == "cancelling":
            _requeue(connection, row, reason, losses=losses, not_before=now() + pause)
            return
        values = {**enter(connection, row["id"], "failed"), **_FREE, "losses": losses, "error": error}
        connection.execute(update(jobs).where(jobs.c.id == row["id"]).values(**values))
        end_attempt(connection, row["id"], row["attempt"], "lost", error)
        append_event(connection, row["id"], "job.failed", error)


def _lost_too_often(losses: int) -> JsonObject:
    return {
        "kind": "internal",
        "type": "lease-lost",
        "message": f"the job was given up after {losses} attempts whose process was lost",
        "hint": "Something about this job may end its process, such as too little memory: see the service's log, "
        "then retry it.",
    }


_FREE: JsonObject = {"lease_owner": None, "lease_expires_at": None, "heartbeat_at": None}


def _ours(lease: Lease) -> tuple[ColumnElement[bool], ...]:
    return (
        jobs.c.id == lease.job.id,
        jobs.c.lease_owner == lease.owner,
        jobs.c.fence == lease.fence,
        jobs.c.state.in_(LEASED_STATES),
    )


def _held(connection: Connection, lease: Lease) -> RowMapping:
    """The job's row, which nobody changes until the transaction ends: neither a cancellation nor another claim."""
    row = connection.execute(select(jobs).where(*_ours(lease)).with_for_update()).mappings().first()
    if row is None:
        raise LeaseLost(lease.job.id)
    return row


def _requeue(
    connection: Connection, row: RowMapping, reason: str, *, losses: int, not_before: datetime | None = None
) -> None:
    state = "cancelled" if row["state"] == "cancelling" else "queued"
    values = {**enter(connection, row["id"], state), **_FREE, "losses": losses, "not_before": not_before}
    connection.execute(update(jobs).where(jobs.c.id == row["id"]).values(**values))
    end_attempt(connection, row["id"], row["attempt"], "given back" if losses == row["losses"] else "lost", None)
    kind = "job.cancelled" if state == "cancelled" else "job.requeued"
    append_event(connection, row["id"], kind, {"reason": reason, "attempt": row["attempt"]})
