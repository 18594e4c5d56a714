"""Watches in the database, as the API asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from service.db.database import Database
from service.db.tables import jobs, watch_items, watches
from service.ids import is_id, new_id
from service.jobs.keys import Replay, Submission, hand_in
from service.jobs.records import JsonObject, now
from service.refusals import NotFound, StateRefused, TooMany, require_fewer
from service.watches.records import NewWatch, Watch, WatchItem, watch_of

MOST_PER_OWNER = 100
"""A few threads look at all watches in turn: one owner should not keep the others waiting."""

ENOUGH_HINT = "Delete some, or let one of them look with a wider pattern."
RESUME_HINT = 'Resume it first: PATCH it with {"state": "active"}.'


PLAIN: Submission[Watch] = Submission()


class WatchStore:
    """Every question and change to watches but the looks. Thread-safe; each method is one transaction.

    ``owner`` limits a method to the watches of one; those of others are not there for it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, new: NewWatch, how: Submission[Watch] = PLAIN) -> Watch | Replay:
        """Store a watch, whose first look is due at once, or find what the same key was answered before.

        ``TooMany`` when its owner has enough, ``KeyReused`` for a key's other request.
        """
        watch_id, moment = new_id("watch"), now()
        values: JsonObject = {name: getattr(new, name) for name in NewWatch.__dataclass_fields__}
        times = dict.fromkeys(("created_at", "updated_at", "next_look_at"), moment)

        def make(connection: Connection) -> Watch:
            enough = TooMany("watch", MOST_PER_OWNER, ENOUGH_HINT)
            require_fewer(self._database, connection, watches, new.owner, enough)
            connection.execute(insert(watches).values(id=watch_id, state="active", **values, **times))
            return _get(connection, watch_id)

        return hand_in(self._database, how, make)

    def get(self, watch_id: str, owner: str | None = None) -> Watch:
        """The watch, or ``NotFound``."""
        with self._database.read() as connection:
            return _get(connection, watch_id, owner)

    def page(
        self, limit: int, before: str | None = None, states: Sequence[str] = (), owner: str | None = None
    ) -> list[Watch]:
        """Watches from the newest on; ``before`` is the id of the last one of the page before."""
        query = select(watches).order_by(watches.c.id.desc()).limit(limit)
        if owner is not None:
            query = query.where(watches.c.owner == owner)
        if states:
            query = query.where(watches.c.state.in_(states))
        if before is not None:
            query = query.where(watches.c.id < before)
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
            counts = _counts(connection, [row["id"] for row in rows])
            return [watch_of(row, counts[row["id"]]) for row in rows]

    def items(
        self, watch_id: str, after: str | None, limit: int, states: Sequence[str] = (), owner: str | None = None
    ) -> list[WatchItem]:
        """What a watch has seen, the first seen first; ``after`` is the id of the last one of the page before."""
        query = (
            select(watch_items, jobs.c.state.label("job_state"), jobs.c.error.label("job_error"))
            .select_from(watch_items.outerjoin(jobs, jobs.c.id == watch_items.c.job_id))
            .where(watch_items.c.watch_id == watch_id)
            .order_by(watch_items.c.id)
            .limit(limit)
        )
        if after is not None:
            query = query.where(watch_items.c.id > after)
        if states:
            query = query.where(watch_items.c.state.in_(states))
        with self._database.read() as connection:
            _row(connection, watch_id, owner)
            return [_item(row) for row in connection.execute(query).mappings()]

    def change(self, watch_id: str, values: Mapping[str, Any], owner: str | None = None) -> Watch:
        """Change ``name``, ``state``, ``interval_s`` or ``template``; what waits is judged anew by a new template."""
        moment = now()
        with self._database.write() as connection:
            row = _row(connection, watch_id, owner, lock=True)
            own: JsonObject = {**values, "updated_at": moment}
            if row["state"] == "paused" or "interval_s" in values:
                own["next_look_at"] = moment
            connection.execute(update(watches).where(watches.c.id == watch_id).values(**own))
            if "template" in values:
                _judge_again(connection, watch_id, ("waiting", "refused"))
            return _get(connection, watch_id)

    def look_now(self, watch_id: str, owner: str | None = None) -> Watch:
        """Make the next look due at once, and have it judge anew what waits; ``StateRefused`` for a paused one."""
        with self._database.write() as connection:
            if _row(connection, watch_id, owner, lock=True)["state"] == "paused":
                raise StateRefused(f"watch {watch_id}", "paused", ("active",), RESUME_HINT)
            connection.execute(update(watches).where(watches.c.id == watch_id).values(next_look_at=now()))
            _judge_again(connection, watch_id, ("waiting",))
            return _get(connection, watch_id)

    def delete(self, watch_id: str, owner: str | None = None) -> None:
        """Forget a watch and what it has seen; its jobs stay."""
        with self._database.write() as connection:
            _row(connection, watch_id, owner, lock=True)
            connection.execute(delete(watches).where(watches.c.id == watch_id))


def _judge_again(connection: Connection, watch_id: str, states: Sequence[str]) -> None:
    seen = update(watch_items).where(watch_items.c.watch_id == watch_id, watch_items.c.state.in_(states))
    connection.execute(seen.values(state="waiting", error=None, updated_at=now()))


def _row(connection: Connection, watch_id: str, owner: str | None = None, *, lock: bool = False) -> RowMapping:
    if not is_id("watch", watch_id):
        raise NotFound("watch", repr(watch_id))
    query = select(watches).where(watches.c.id == watch_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None or (owner is not None and row["owner"] != owner):
        raise NotFound("watch", watch_id)
    return row


def _get(connection: Connection, watch_id: str, owner: str | None = None) -> Watch:
    row = _row(connection, watch_id, owner)
    return watch_of(row, _counts(connection, [watch_id])[watch_id])


def _counts(connection: Connection, watch_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {watch_id: {} for watch_id in watch_ids}
    query = (
        select(watch_items.c.watch_id, watch_items.c.state, func.count())
        .where(watch_items.c.watch_id.in_(watch_ids))
        .group_by(watch_items.c.watch_id, watch_items.c.state)
    )
    for watch_id, state, count in connection.execute(query):
        counts[watch_id][state] = count
    return counts


def _item(row: RowMapping) -> WatchItem:
    error = row["error"] or row["job_error"]
    fields = {name: row[name] for name in WatchItem.__dataclass_fields__ if name != "error"}
    return WatchItem(**fields, error=error)
