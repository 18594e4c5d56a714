"""Looks in the database: whose turn it is, what is known, and the one moment in which a checkpoint becomes a job.

A look is claimed by moving the watch's next one forward, so that of several processes one has it. It may still happen
that two look at the same time, when one is slow; what decides then is that a folder leaves ``waiting`` only once, in
the transaction that makes its job.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection, Update, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.db.database import Database
from service.db.tables import jobs, tokens, watch_items, watches
from service.ids import new_id
from service.jobs.records import JsonObject, NewJob, now
from service.jobs.store import BusyDestination, busy_destinations, insert_jobs, require_room
from service.watches.records import ITEM, Seen, Watch, watch_of
from workers.errors import InputError


class LookOver(Exception):
    """The watch was changed, paused or deleted since the look began: what it found is void."""


class DestinationTaken(InputError):
    """Another checkpoint of the watch has this destination."""

    code = "duplicate-destination"


class OwnerGone(InputError):
    """The token that made the watch is no longer good."""

    code = "unauthenticated"


@dataclass(frozen=True, slots=True)
class Turn:
    """A look that is this process's to make. ``token`` tells it from a later one; ``at`` is when it began."""

    watch: Watch
    at: datetime
    token: datetime


class Looks:
    """The looks of all watches. Thread-safe; each method is one transaction."""

    def __init__(self, database: Database, longest_s: float) -> None:
        self._database = database
        self._longest = timedelta(seconds=longest_s)

    def claim(self) -> Turn | None:
        """Take the look that is due longest, None when none is.

        The next one is due when this one has taken the time that a look may take: that counts if this process dies.
        """
        moment = now()
        due = (watches.c.state == "active", watches.c.next_look_at <= moment)
        first = select(watches).where(*due).order_by(watches.c.next_look_at).limit(1)
        with self._database.read() as connection:
            if connection.execute(first).first() is None:
                return None
        with self._database.write() as connection:
            row = connection.execute(first.with_for_update(skip_locked=True)).mappings().first()
            if row is None:
                return None
            token = moment + timedelta(seconds=row["interval_s"]) + self._longest
            mine = update(watches).where(watches.c.id == row["id"], watches.c.next_look_at == row["next_look_at"])
            taken = connection.execute(mine.values(next_look_at=token, last_look_at=moment))
            return Turn(watch_of(row, {}), moment, token) if taken.rowcount else None

    def end(self, turn: Turn, error: JsonObject | None, *, again: bool) -> None:
        """Write down how a look ended; the next one comes at once when there is more to do."""
        following = now() if again else turn.at + timedelta(seconds=turn.watch.interval_s)
        mine = (watches.c.id == turn.watch.id,)
        with self._database.write() as connection:
            connection.execute(update(watches).where(*mine).values(error=error))
            # Not when somebody asked for a look meanwhile.
            unchanged = (watches.c.next_look_at == turn.token,)
            connection.execute(update(watches).where(*mine, *unchanged).values(next_look_at=following))

    def seen(self, turn: Turn) -> dict[str, Seen]:
        """What earlier looks know, by source."""
        names = tuple(Seen.__dataclass_fields__)
        query = select(watch_items.c.source, *(watch_items.c[name] for name in names))
        with self._database.read() as connection:
            rows = connection.execute(query.where(watch_items.c.watch_id == turn.watch.id)).mappings()
            return {row["source"]: Seen(**{name: row[name] for name in names}) for row in rows}

    def max_queued(self, turn: Turn) -> int | None:
        """How many jobs of the watch's owner may wait; ``OwnerGone`` when it may do nothing any more."""
        query = select(tokens).where(tokens.c.id == turn.watch.owner)
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        if row is None:
            return None
        if row["revoked_at"] is not None or (row["expires_at"] is not None and row["expires_at"] <= now()):
            hint = "Make the watch again with a token that is good."
            raise OwnerGone("the token that made this watch was revoked or has expired", hint=hint)
        limit: int | None = row["max_queued"]
        return limit

    def note_listing(self, turn: Turn, source: str, listing: str | None, why: JsonObject) -> None:
        """A folder was seen for the first time, or with other files than before: from now on it has to stay so."""
        moment = now()
        values: JsonObject = {"listing": listing, "listing_since": moment, "error": why, "updated_at": moment}
        with self._database.write() as connection:
            _require(connection, turn)
            changed = connection.execute(_waiting(turn, source).values(**values))
            if not changed.rowcount and not _exists(connection, turn, source):
                new: JsonObject = {"watch_id": turn.watch.id, "source": source, "id": new_id(ITEM)}
                new |= {"state": "waiting", "first_seen_at": moment}
                connection.execute(insert(watch_items).values(**new, **values))

    def note_verdict(self, turn: Turn, source: str, error: JsonObject, state: str = "waiting") -> None:
        """A folder can't be a job yet, or with ``refused`` not at all, and why."""
        with self._database.write() as connection:
            _require(connection, turn)
            connection.execute(_waiting(turn, source).values(state=state, error=error, updated_at=now()))

    def submit(self, turn: Turn, source: str, listing: str, job: NewJob) -> str | None:
        """Make the job of a folder that was found whole, once for all looks; None when that was done already.

        ``BusyDestination`` and ``TooManyQueued`` for now, ``DestinationTaken`` for good, ``LookOver`` when the watch
        isn't what it was.
        """
        limit = self.max_queued(turn)
        try:
            return self._submit(turn, source, (listing, limit), job)
        except IntegrityError:
            return self._submit(turn, source, (listing, limit), job)

    def _submit(self, turn: Turn, source: str, given: tuple[str, int | None], job: NewJob) -> str | None:
        listing, limit = given
        with self._database.write() as connection:
            _require(connection, turn)
            mine = _waiting(turn, source).where(watch_items.c.listing == listing)
            if not connection.execute(mine.values(state="submitted", error=None, updated_at=now())).rowcount:
                return None
            for job_id in busy_destinations(connection, [job.destination]).values():
                raise BusyDestination(job_id, job.destination)
            _refuse_taken(connection, turn, job.destination)
            require_room(connection, job.owner, 1, limit)
            [job_id] = insert_jobs(connection, [job])
            connection.execute(
                update(watch_items)
                .where(watch_items.c.watch_id == turn.watch.id, watch_items.c.source == source)
                .values(job_id=job_id)
            )
            return job_id


def _waiting(turn: Turn, source: str) -> Update:
    return update(watch_items).where(
        watch_items.c.watch_id == turn.watch.id, watch_items.c.source == source, watch_items.c.state == "waiting"
    )


def _exists(connection: Connection, turn: Turn, source: str) -> bool:
    query = select(watch_items.c.source).where(watch_items.c.watch_id == turn.watch.id, watch_items.c.source == source)
    return connection.execute(query).first() is not None


def _require(connection: Connection, turn: Turn) -> None:
    """Hold the watch as it was when the look began; whoever wants to change it waits for this transaction."""
    query = select(watches.c.state, watches.c.updated_at).where(watches.c.id == turn.watch.id).with_for_update()
    row = connection.execute(query).first()
    if row is None or row.state != "active" or row.updated_at != turn.watch.updated_at:
        raise LookOver


def _refuse_taken(connection: Connection, turn: Turn, destination: str) -> None:
    query = select(jobs.c.id, jobs.c.source).where(jobs.c.watch_id == turn.watch.id, jobs.c.destination == destination)
    earlier = connection.execute(query.limit(1)).first()
    if earlier is not None:
        raise DestinationTaken(
            f"{destination} is also the destination of {earlier[1]}, which became {earlier[0]}",
            hint="Give each checkpoint a destination of its own, by a field such as {path} or {flat} in the template.",
        )
