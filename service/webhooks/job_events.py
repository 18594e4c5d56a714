"""What webhooks are told of a job: enough that whoever hears it can act without asking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, RowMapping, select

from service.db.tables import ROWS_PER_QUERY, jobs
from service.webhooks.outbox import EVENT_TYPES, Happening, JsonObject, deliver, hearers

SHOWN = (
    jobs.c.id,
    jobs.c.state,
    jobs.c.source,
    jobs.c.destination,
    jobs.c.labels,
    jobs.c.attempt,
    jobs.c.batch_id,
    jobs.c.watch_id,
    jobs.c.warnings,
    jobs.c.error,
    jobs.c.result,
)
OUTCOMES = ("job.failed", "job.succeeded")
"""Events whose own data is the job's error or result, which is told anyway."""


def tell(connection: Connection, happening: Happening, seq: int) -> None:
    """Put an event of a job into the outbox; ``happening.data`` is what the event itself says.

    Without a webhook that hears it this costs one query, and for what nobody may hear none.
    """
    if happening.type not in EVENT_TYPES:
        return
    ears = hearers(connection, happening.owner, happening.type)
    if not ears:
        return
    row = connection.execute(select(*SHOWN).where(jobs.c.id == happening.job_id)).mappings().one()
    detail = {} if happening.type in OUTCOMES else happening.data
    told = Happening(happening.owner, happening.type, happening.at, _data(row, seq, detail), happening.job_id)
    deliver(connection, [told], ears)


def tell_created(connection: Connection, rows: Sequence[JsonObject]) -> None:
    """Put the first event of jobs that have just been inserted into the outbox, given their rows."""
    for owner in sorted({row["owner"] for row in rows}):
        ears = hearers(connection, owner, "job.created")
        if not ears:
            continue
        made = [row for row in rows if row["owner"] == owner]
        told = [Happening(owner, "job.created", row["created_at"], _data(row, 1, {}), row["id"]) for row in made]
        deliver(connection, told, ears)


def tell_changed(connection: Connection, happening: Happening, seqs: Mapping[str, int]) -> None:
    """Put the same event of many jobs of one owner into the outbox, given its number in each job's sequence."""
    if happening.type not in EVENT_TYPES:
        return
    ears = hearers(connection, happening.owner, happening.type)
    ids = list(seqs) if ears else []
    for start in range(0, len(ids), ROWS_PER_QUERY):
        some = select(*SHOWN).where(jobs.c.id.in_(ids[start : start + ROWS_PER_QUERY])).order_by(jobs.c.id)
        told = [
            Happening(
                happening.owner,
                happening.type,
                happening.at,
                _data(row, seqs[row["id"]], happening.data),
                row["id"],
            )
            for row in connection.execute(some).mappings()
        ]
        deliver(connection, told, ears)


def _data(row: RowMapping | JsonObject, seq: int, detail: JsonObject) -> JsonObject:
    data: JsonObject = {"job_id": row["id"], "seq": seq}
    for column in SHOWN[1:]:
        data[column.name] = row.get(column.name)
    return {**data, "detail": detail, "links": {"self": f"/v1/jobs/{row['id']}"}}
