"""Batches in the database, as the API asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from service.batches.bulk import cancel_live, requeue_failed, set_priority
from service.batches.drafts import Draft
from service.batches.records import ENDED_STATES, Batch, BatchItem, NewBatch, batch_of
from service.batches.tally import Tally, tallies
from service.db.database import Database
from service.db.tables import batch_items, batches, jobs
from service.ids import is_id, new_id
from service.jobs.keys import Replay, RequestKey, Submission, hand_in, replayed
from service.jobs.records import JsonObject, NewJob, now
from service.jobs.store import busy_destinations, insert_jobs, require_room
from service.refusals import NotFound, StateRefused

CREATION_LOCK = 8_241_907_357
"""Key of the lock that batches hold while they are made: two with the same destinations could wait for each other."""


class ItemsRefused(Exception):
    """Items of a batch can't be jobs, and the batch wants all or none."""

    def __init__(self, drafts: Sequence[tuple[int, Draft]], total: int) -> None:
        super().__init__(f"{len(drafts):,} of {total:,} items cannot be done, and on_item_error is fail")
        self.drafts = drafts


PLAIN: Submission[Batch] = Submission()


@dataclass(frozen=True, slots=True)
class BatchFilter:
    """Which batches to list. ``owner`` None: everybody's."""

    owner: str | None = None
    states: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    created_after: datetime | None = None
    created_before: datetime | None = None


class BatchStore:
    """Every question and change to batches. Thread-safe; each method is one transaction.

    ``owner`` limits a method to the batches of one; those of others are not there for it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def answered(self, key: RequestKey) -> Replay | None:
        """What a request with this key was answered before, so that it need not be worked out again."""
        with self._database.read() as connection:
            return replayed(connection, key)

    def create(self, new: NewBatch, drafts: Sequence[Draft], how: Submission[Batch] = PLAIN) -> Batch | Replay:
        """Store a batch with all its jobs, or nothing; or find what the same key was answered before.

        ``ItemsRefused`` when an item can't be a job and the batch doesn't go on without it, ``TooManyQueued`` when the
        owner has as many waiting as it may, ``KeyReused`` for a key's other request.
        """

        def make(connection: Connection) -> Batch:
            able = _without_busy(connection, drafts)
            refused = [(number, draft) for number, draft in enumerate(able) if draft.job is None]
            if refused and new.on_item_error == "fail":
                raise ItemsRefused(refused, len(able))
            require_room(connection, new.owner, len(able) - len(refused), how.max_queued)
            return _get(connection, _insert(connection, new, able))

        return hand_in(self._database, how, make, CREATION_LOCK)

    def get(self, batch_id: str, owner: str | None = None) -> Batch:
        """The batch, or ``NotFound``."""
        with self._database.read() as connection:
            return _get(connection, batch_id, owner)

    def page(self, wanted: BatchFilter, limit: int, before: str | None = None) -> list[Batch]:
        """Batches from the newest on; ``before`` is the id of the last batch of the page before."""
        query = select(batches).order_by(batches.c.id.desc()).limit(limit)
        if wanted.owner is not None:
            query = query.where(batches.c.owner == wanted.owner)
        if wanted.states:
            query = query.where(batches.c.state.in_(wanted.states))
        for name, value in wanted.labels.items():
            query = query.where(batches.c.labels[name].as_string() == value)
        if wanted.created_after is not None:
            query = query.where(batches.c.created_at > wanted.created_after)
        if wanted.created_before is not None:
            query = query.where(batches.c.created_at < wanted.created_before)
        if before is not None:
            query = query.where(batches.c.id < before)
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
            counted = _tallies(connection, rows)
            return [batch_of(row, counted[row["id"]]) for row in rows]

    def items(
        self, batch_id: str, after: int, limit: int, states: Sequence[str] = (), owner: str | None = None
    ) -> list[BatchItem]:
        """Items in their order, from behind a position; ``refused`` counts as a state beside those of jobs."""
        already_there = jobs.c.result["already_there"].as_boolean()  # a result lists all files of a model
        query = (
            select(batch_items, jobs.c.state, already_there.label("already_there"), jobs.c.error.label("job_error"))
            .select_from(batch_items.outerjoin(jobs, jobs.c.id == batch_items.c.job_id))
            .where(batch_items.c.batch_id == batch_id, batch_items.c.position > after)
            .order_by(batch_items.c.position)
            .limit(limit)
        )
        if states:
            refused = [batch_items.c.job_id.is_(None)] if "refused" in states else []
            query = query.where(or_(jobs.c.state.in_(states), *refused))
        with self._database.read() as connection:
            _row(connection, batch_id, owner)
            return [_item(row) for row in connection.execute(query).mappings()]

    def cancel(self, batch_id: str, owner: str | None = None) -> Batch:
        """Ask for the end of all that is left of a batch; what waits ends at once. An ended one stays as it is."""
        with self._database.write() as connection:
            row = _row(connection, batch_id, owner, lock=True)
            if row["state"] == "running":
                _set(connection, batch_id, state="cancelling")
                cancel_live(connection, batch_id)
            return _get(connection, batch_id)

    def retry_failed(
        self, batch_id: str, owner: str | None = None, max_queued: int | None = None
    ) -> tuple[Batch, int, dict[str, str]]:
        """Queue failed and cancelled jobs again; see ``bulk.requeue_failed`` for the two numbers."""
        try:
            return self._retry_failed(batch_id, owner, max_queued)
        except IntegrityError:
            # A job took one of the destinations in this very moment: now it can be seen.
            return self._retry_failed(batch_id, owner, max_queued)

    def _retry_failed(
        self, batch_id: str, owner: str | None, max_queued: int | None
    ) -> tuple[Batch, int, dict[str, str]]:
        with self._database.write() as connection:
            row = _row(connection, batch_id, owner, lock=True)
            if row["state"] == "cancelling":
                raise _refused(row, ("running", *ENDED_STATES))
            requeued, busy = requeue_failed(connection, batch_id, row["owner"], max_queued)
            if requeued:
                _set(connection, batch_id, state="running", ended_at=None, tally=None)
            return _get(connection, batch_id), requeued, busy

    def change(self, batch_id: str, values: Mapping[str, Any], owner: str | None = None) -> Batch:
        """Give a batch another ``name``, ``labels`` or ``max_running``, and its queued jobs another ``priority``."""
        own = {name: value for name, value in values.items() if name != "priority"}
        with self._database.write() as connection:
            _row(connection, batch_id, owner, lock=True)
            if own:
                _set(connection, batch_id, **own)
            if "priority" in values:
                set_priority(connection, batch_id, values["priority"])
            return _get(connection, batch_id)

    def delete(self, batch_id: str, owner: str | None = None) -> None:
        """Forget a batch that has ended; its jobs and their results stay."""
        with self._database.write() as connection:
            row = _row(connection, batch_id, owner, lock=True)
            if row["state"] not in ENDED_STATES:
                raise _refused(row, ENDED_STATES)
            connection.execute(delete(batches).where(batches.c.id == batch_id))


def _insert(connection: Connection, new: NewBatch, drafts: Sequence[Draft]) -> str:
    batch_id = new_id("batch")
    wanted = [_in_batch(draft.job, batch_id) for draft in drafts if draft.job is not None]
    moment = now()
    connection.execute(
        insert(batches).values(
            id=batch_id,
            state="running",
            total=len(drafts),
            refused=len(drafts) - len(wanted),
            created_at=moment,
            updated_at=moment,
            **{name: getattr(new, name) for name in NewBatch.__dataclass_fields__},
        )
    )
    ids = iter(insert_jobs(connection, wanted) if wanted else ())
    rows = [
        {
            "batch_id": batch_id,
            "position": position,
            "source": draft.job.source if draft.job else draft.source,
            "destination": draft.job.destination if draft.job else draft.destination,
            "job_id": next(ids) if draft.job else None,
            "error": draft.error,
        }
        for position, draft in enumerate(drafts)
    ]
    connection.execute(insert(batch_items), rows)
    return batch_id


def _in_batch(job: NewJob, batch_id: str) -> NewJob:
    return NewJob(
        job.source, job.destination, job.options, job.labels, job.priority, job.owner, batch_id, job.watch_id
    )


def _without_busy(connection: Connection, drafts: Sequence[Draft]) -> list[Draft]:
    """The drafts, those refused whose destination a live job has."""
    busy = busy_destinations(connection, [draft.job.destination for draft in drafts if draft.job])
    if not busy:
        return list(drafts)
    return [
        draft.refused(busy_error(busy[draft.job.destination], draft.job.destination), "/template/destination")
        if draft.job and draft.job.destination in busy
        else draft
        for draft in drafts
    ]


def busy_error(job_id: str, destination: str) -> JsonObject:
    """The error of an item whose destination a live job has."""
    return {
        "kind": "destination",
        "type": "destination-busy",
        "message": f"{job_id} writes to {destination}",
        "hint": "Wait for it, cancel it, or name another destination.",
    }


def _set(connection: Connection, batch_id: str, **values: Any) -> None:
    connection.execute(update(batches).where(batches.c.id == batch_id).values(**values, updated_at=now()))


def _refused(row: RowMapping, allowed: tuple[str, ...]) -> StateRefused:
    hint = f"This is for batches that are {' or '.join(allowed)}."
    return StateRefused(f"batch {row['id']}", row["state"], allowed, hint)


def _row(connection: Connection, batch_id: str, owner: str | None = None, *, lock: bool = False) -> RowMapping:
    if not is_id("batch", batch_id):
        raise NotFound("batch", repr(batch_id))
    query = select(batches).where(batches.c.id == batch_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None or (owner is not None and row["owner"] != owner):
        raise NotFound("batch", batch_id)
    return row


def _get(connection: Connection, batch_id: str, owner: str | None = None) -> Batch:
    row = _row(connection, batch_id, owner)
    return batch_of(row, _tallies(connection, [row])[batch_id])


def _tallies(connection: Connection, rows: Sequence[RowMapping]) -> dict[str, Tally]:
    """Kept ones of ended batches, whose jobs may be gone; the others are counted."""
    kept = {row["id"]: Tally.kept(row["tally"]) for row in rows if row["tally"] is not None}
    live = {row["id"]: (row["total"], row["refused"]) for row in rows if row["tally"] is None}
    return kept | tallies(connection, live)


def _item(row: RowMapping) -> BatchItem:
    state = "refused" if row["job_id"] is None else row["state"]
    already_there = bool(row["already_there"])
    error = row["error"] or row["job_error"]
    return BatchItem(row["position"], row["source"], row["destination"], row["job_id"], state, already_there, error)
