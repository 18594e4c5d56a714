"""Changes to many jobs at once, in the transaction of the caller: the same as one by one, in a few statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, bindparam, insert, select, update

from service.db.database import Database
from service.db.tables import LEASED_STATES, LIVE_STATES, events, jobs
from service.jobs.records import JsonObject, now, spelled
from service.jobs.store import RETRIABLE_STATES, busy_destinations, require_room
from service.webhooks.job_events import tell_changed
from service.webhooks.outbox import Happening

CANCELLED, CANCELLING = "cancelled", "cancelling"


def cancel_live(connection: Connection, batch_id: str) -> int:
    """Cancel what waits of a batch, and ask for the end of what is at work; the number of jobs."""
    return _cancel(connection, _of(batch_id))


def cancel_of(database: Database, owner: str) -> int:
    """Cancel all that an owner has waiting, and ask for the end of what is at work; the number of jobs."""
    with database.write() as connection:
        return _cancel(connection, _columns().where(jobs.c.owner == owner))


def _cancel(connection: Connection, query: Select[Any]) -> int:
    rows = _locked(connection, query.where(jobs.c.state.in_(LIVE_STATES), jobs.c.state != CANCELLING))
    states = {row["id"]: CANCELLING if row["state"] in LEASED_STATES else CANCELLED for row in rows}
    _enter(connection, rows, states, {})
    return len(rows)


def cancel_queued_before(connection: Connection, batch_id: str, moment: str, reason: str) -> int:
    """Cancel what waits of a batch since that time or longer; ``moment`` as it is spelled in ``state_times``."""
    waited = jobs.c.state_times["queued"].as_string() <= moment
    rows = _locked(connection, _of(batch_id).where(jobs.c.state == "queued", waited))
    _enter(connection, rows, {row["id"]: CANCELLED for row in rows}, {"reason": reason})
    return len(rows)


def requeue_failed(
    connection: Connection, batch_id: str, owner: str, max_queued: int | None
) -> tuple[int, dict[str, str]]:
    """Queue the failed and cancelled jobs of a batch of this owner again, as a retry of each would.

    ``TooManyQueued`` when the owner may not have all of them waiting.
    The number of those, and of the jobs whose destination another live job has by now the ids, with that job's.
    """
    rows = _locked(connection, _of(batch_id).where(jobs.c.state.in_(RETRIABLE_STATES)))
    busy = busy_destinations(connection, [row["destination"] for row in rows])
    ready = [row for row in rows if row["destination"] not in busy]
    require_room(connection, owner, len(ready), max_queued)
    moment = now()
    fresh: JsonObject = {"error": None, "progress": None, "warnings": [], "losses": 0, "not_before": None}
    fresh |= {"state": "queued", "state_times": {"queued": spelled(moment)}, "updated_at": moment}
    _change(connection, ready, {}, fresh)
    _tell(connection, ready, {row["id"]: "job.requeued" for row in ready}, {"reason": "retry", "from_scratch": False})
    return len(ready), {row["id"]: busy[row["destination"]] for row in rows if row["destination"] in busy}


def set_priority(connection: Connection, batch_id: str, priority: int) -> None:
    """Give what waits of a batch another priority."""
    queued = update(jobs).where(jobs.c.batch_id == batch_id, jobs.c.state == "queued")
    connection.execute(queued.values(priority=priority, updated_at=now()))


def _of(batch_id: str) -> Select[Any]:
    return _columns().where(jobs.c.batch_id == batch_id)


def _columns() -> Select[Any]:
    columns = (jobs.c.id, jobs.c.state, jobs.c.state_times, jobs.c.last_seq, jobs.c.owner, jobs.c.destination)
    return select(*columns).order_by(jobs.c.id)


def _locked(connection: Connection, query: Select[Any]) -> Sequence[RowMapping]:
    # Whoever claims or ends one of them meanwhile is waited for, and rows that don't fit any more are left out.
    return connection.execute(query.with_for_update()).mappings().all()


def _enter(connection: Connection, rows: Sequence[RowMapping], states: Mapping[str, str], data: JsonObject) -> None:
    moment = now()
    changes = {
        row["id"]: {"new_state": state, "new_times": {**row["state_times"], state: spelled(moment)}}
        for row in rows
        if (state := states[row["id"]])
    }
    _change(connection, rows, changes, {"updated_at": moment})
    _tell(connection, rows, {job_id: f"job.{state}" for job_id, state in states.items()}, data)


def _change(
    connection: Connection, rows: Sequence[RowMapping], changes: Mapping[str, JsonObject], same: JsonObject
) -> None:
    """Write what is the same for all rows and what is new in each, with the number of its next event."""
    if not rows:
        return
    each = {"state": "new_state", "state_times": "new_times"} if changes else {}
    values = {**same, **{column: bindparam(name) for column, name in each.items()}, "last_seq": bindparam("new_seq")}
    changed = update(jobs).where(jobs.c.id == bindparam("job_id")).values(**values)
    sets = [{"job_id": row["id"], "new_seq": row["last_seq"] + 1, **changes.get(row["id"], {})} for row in rows]
    connection.execute(changed, sets)


def _tell(connection: Connection, rows: Sequence[RowMapping], kinds: Mapping[str, str], data: JsonObject) -> None:
    """Add the event of each row's change to its sequence, and to the outbox of webhooks."""
    if not rows:
        return
    moment = now()
    made = [
        {"job_id": row["id"], "seq": row["last_seq"] + 1, "at": moment, "type": kinds[row["id"]], "data": data}
        for row in rows
    ]
    connection.execute(insert(events), made)
    seqs: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        seqs.setdefault((row["owner"], kinds[row["id"]]), {})[row["id"]] = row["last_seq"] + 1
    for (owner, kind), those in seqs.items():
        tell_changed(connection, Happening(owner, kind, moment, data), those)
