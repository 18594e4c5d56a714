"""Ends batches whose last job has ended, and stops those that are not to go on after a failure.

What is to be done is found in the database alone, so that nothing is lost with a process; it is done under a lock on
the batch's row, so that of several processes one does it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, func, select, update

from service.batches.bulk import cancel_queued_before
from service.batches.records import ENDED_STATES
from service.batches.tally import tallies
from service.db.database import Database
from service.db.tables import LIVE_STATES, batches, jobs
from service.jobs.records import JsonObject, now, spelled
from service.loop import Loop
from service.webhooks.outbox import enqueue

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 20.0
END_OF = {"running": "completed", "cancelling": "cancelled"}
NOT_GOING_ON = "another item of the batch failed, and on_item_error is fail"


class Keeper:
    """A loop over what is due; ``keep`` is one turn of it."""

    def __init__(self, database: Database, poll_s: float) -> None:
        self._database = database
        self._loop = Loop("batches", self.keep, poll_s)

    def start(self) -> None:
        """Begin."""
        self._loop.start()

    def stop(self) -> None:
        """End after the turn that is under way."""
        self._loop.stop(STOP_TIMEOUT_S)

    def keep(self) -> None:
        """Do whatever is due now."""
        for due, change in ((_reopened(), _reopen), (_failing(), _stop_rest), (_ended(), _end)):
            with self._database.read() as connection:
                found = connection.execute(due).scalars().all()
            for batch_id in found:
                self._change(batch_id, change)

    def _change(self, batch_id: str, change: Callable[[Connection, RowMapping], None]) -> None:
        with self._database.write() as connection:
            locked = select(batches).where(batches.c.id == batch_id).with_for_update(skip_locked=True)
            row = connection.execute(locked).mappings().first()
            if row is not None:
                change(connection, row)


def _has(*states: str) -> Any:
    return select(jobs.c.id).where(jobs.c.batch_id == batches.c.id, jobs.c.state.in_(states)).exists()


def _ended() -> Select[Any]:
    return select(batches.c.id).where(batches.c.state.in_(END_OF), ~_has(*LIVE_STATES))


def _failing() -> Select[Any]:
    waits, failed = _has("queued"), _has("failed")
    return select(batches.c.id).where(batches.c.state == "running", batches.c.on_item_error == "fail", waits, failed)


def _reopened() -> Select[Any]:
    """Batches that had ended before one of their jobs was retried by itself."""
    of_live = select(jobs.c.batch_id).where(jobs.c.state.in_(LIVE_STATES), jobs.c.batch_id.is_not(None))
    return select(batches.c.id).where(batches.c.state.in_(ENDED_STATES), batches.c.id.in_(of_live))


def _end(connection: Connection, row: RowMapping) -> None:
    """End a batch, keep its tally, and tell who waits for it; exactly once, since the state is part of the change."""
    batch_id = row["id"]
    if row["state"] not in END_OF or _any(connection, batch_id, LIVE_STATES):
        return
    tally = tallies(connection, {batch_id: (row["total"], row["refused"])})[batch_id]
    state, moment = END_OF[row["state"]], now()
    values: JsonObject = {"state": state, "ended_at": moment, "updated_at": moment, "tally": tally.to_dict()}
    changed = update(batches).where(batches.c.id == batch_id, batches.c.state == row["state"]).values(**values)
    if connection.execute(changed).rowcount:
        enqueue(connection, row["owner"], "batch.completed", _told(row, values))
        log.info("%s is %s: %s", batch_id, state, tally.counts)


def _told(row: RowMapping, values: JsonObject) -> JsonObject:
    """What webhooks are told of a batch that has ended."""
    return {
        "batch_id": row["id"],
        "name": row["name"],
        "state": values["state"],
        "labels": row["labels"],
        **values["tally"],
        "created_at": spelled(row["created_at"]),
        "ended_at": spelled(values["ended_at"]),
        "links": {"self": f"/v1/batches/{row['id']}"},
    }


def _stop_rest(connection: Connection, row: RowMapping) -> None:
    """Cancel what waited when an item failed; what was queued again since then was meant to go on."""
    failed = func.max(jobs.c.state_times["failed"].as_string())
    query = select(failed).where(jobs.c.batch_id == row["id"], jobs.c.state == "failed")
    moment = connection.execute(query).scalar()
    if moment is not None and row["state"] == "running":
        cancel_queued_before(connection, row["id"], moment, NOT_GOING_ON)


def _reopen(connection: Connection, row: RowMapping) -> None:
    if row["state"] in ENDED_STATES and _any(connection, row["id"], LIVE_STATES):
        values: JsonObject = {"state": "running", "ended_at": None, "tally": None, "updated_at": now()}
        connection.execute(update(batches).where(batches.c.id == row["id"]).values(**values))


def _any(connection: Connection, batch_id: str, states: tuple[str, ...]) -> bool:
    found = select(jobs.c.id).where(jobs.c.batch_id == batch_id, jobs.c.state.in_(states)).limit(1)
    return connection.execute(found).first() is not None
