"""How far a batch is: jobs by what became of them, bytes, and the time that the rest will take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Connection, Float, cast, func, select
from sqlalchemy.sql.elements import ColumnElement

from service.db.tables import LEASED_STATES, jobs
from service.jobs.records import JsonObject


@dataclass(frozen=True, slots=True)
class Counts:
    """Items by what became of them. ``skipped``: this very model was there already, and nothing was written."""

    total: int = 0
    queued: int = 0
    running: int = 0
    succeeded: int = 0
    skipped: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts, and sizes in bytes of output; of jobs that are not planned yet the size is taken for an average one."""

    counts: Counts
    bytes_done: int = 0
    bytes_total: int | None = None
    bytes_per_s: int | None = None
    eta_s: float | None = None

    def to_dict(self) -> JsonObject:
        """As it is kept when the batch has ended."""
        counts = {name: getattr(self.counts, name) for name in Counts.__dataclass_fields__}
        return {"counts": counts, "bytes_done": self.bytes_done, "bytes_total": self.bytes_total}

    @classmethod
    def kept(cls, values: JsonObject) -> Tally:
        """As it was kept."""
        return cls(Counts(**values["counts"]), values["bytes_done"], values["bytes_total"])


@dataclass(frozen=True, slots=True)
class _Row:
    """The jobs of one state in a batch."""

    batch_id: str
    state: str
    jobs: int
    skipped: int
    made_bytes: int
    made_seconds: float
    done_bytes: int
    known_bytes: int
    known_jobs: int
    bytes_per_s: int


def tallies(connection: Connection, batches: Mapping[str, tuple[int, int]]) -> dict[str, Tally]:
    """The tally of each of these batches, of which the number of all items and of refused ones is given."""
    rows: dict[str, list[_Row]] = {batch_id: [] for batch_id in batches}
    if batches:
        for row in connection.execute(_query(list(batches))):
            told = _Row(*row)
            rows[told.batch_id].append(told)
    return {batch_id: _tally(rows[batch_id], *size) for batch_id, size in batches.items()}


def _query(batch_ids: list[str]) -> Any:
    already = jobs.c.result["already_there"].as_boolean()
    known = _number(jobs.c.progress, "bytes_total")
    return (
        select(
            jobs.c.batch_id,
            jobs.c.state,
            func.count(),
            func.count().filter(already),
            _sum(_number(jobs.c.result, "bytes")),
            func.coalesce(func.sum(cast(jobs.c.result["seconds"].as_string(), Float)), 0.0),
            _sum(_number(jobs.c.progress, "bytes_done")),
            _sum(known),
            func.count(known),
            _sum(_number(jobs.c.progress, "bytes_per_s")),
        )
        .where(jobs.c.batch_id.in_(batch_ids))
        .group_by(jobs.c.batch_id, jobs.c.state)
    )


def _number(column: Any, name: str) -> ColumnElement[int]:
    # By way of text: what SQLAlchemy takes for an integer of a JSON column is one of 32 bits on PostgreSQL.
    return cast(column[name].as_string(), BigInteger)


def _sum(values: ColumnElement[int]) -> ColumnElement[int]:
    # A sum of 64-bit integers is a decimal on PostgreSQL.
    return cast(func.coalesce(func.sum(values), 0), BigInteger)


def _tally(rows: Iterable[_Row], total: int, refused: int) -> Tally:
    by_state = {row.state: row for row in rows}
    live = [row for state, row in by_state.items() if state in LEASED_STATES]
    done = by_state.get("succeeded", _Row("", "", 0, 0, 0, 0.0, 0, 0, 0, 0))
    running = sum(row.jobs for row in live)
    counts = Counts(
        total=total,
        queued=_jobs(by_state, "queued"),
        running=running,
        succeeded=done.jobs - done.skipped,
        skipped=done.skipped,
        failed=_jobs(by_state, "failed"),
        cancelled=_jobs(by_state, "cancelled"),
        refused=refused,
    )
    bytes_done = done.made_bytes + sum(row.done_bytes for row in live)
    known_bytes = done.made_bytes + sum(row.known_bytes for row in live)
    known_jobs = done.jobs + sum(row.known_jobs for row in live)
    unknown_jobs = counts.queued + running - sum(row.known_jobs for row in live)
    if not known_jobs:
        return Tally(counts, bytes_done, None if unknown_jobs else 0)
    bytes_total = known_bytes + round(known_bytes / known_jobs * unknown_jobs)
    left = bytes_total - bytes_done
    rate = _rate(live, done, running)
    is_live = counts.queued + running > 0
    eta_s = round(left / rate, 1) if rate and is_live else None
    return Tally(counts, bytes_done, bytes_total, rate if running else None, eta_s)


def _rate(live: list[_Row], done: _Row, running: int) -> int | None:
    """Bytes per second: what running jobs say, else what finished ones took, for as many as are at work."""
    now = sum(row.bytes_per_s for row in live)
    if now:
        return now
    if done.made_seconds <= 0 or not done.made_bytes:
        return None
    return round(done.made_bytes / done.made_seconds * max(running, 1))


def _jobs(by_state: Mapping[str, _Row], state: str) -> int:
    return by_state[state].jobs if state in by_state else 0
