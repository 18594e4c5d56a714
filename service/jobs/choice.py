"""Which queued job comes first: by priority, then fairly between owners, then by age; within everybody's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, Connection, func, or_, select

from service.db.tables import LEASED_STATES, batches, jobs, tokens


@dataclass(frozen=True, slots=True)
class Group:
    """Queued jobs that are alike to the queue; ``first`` is the id of the oldest."""

    owner: str
    batch_id: str | None
    priority: int
    first: str


@dataclass(frozen=True, slots=True)
class Load:
    """How many jobs are at work, by owner and by batch, and how many may be; who isn't listed has no limit."""

    running: Mapping[str, int]
    in_batch: Mapping[str, int]
    owner_limits: Mapping[str, int]
    batch_limits: Mapping[str, int]

    def has_room(self, group: Group) -> bool:
        """Whether one more of this group may start."""
        limit = self.owner_limits.get(group.owner)
        if limit is not None and self.running.get(group.owner, 0) >= limit:
            return False
        if group.batch_id is None:
            return True
        cap = self.batch_limits.get(group.batch_id)
        return cap is None or self.in_batch.get(group.batch_id, 0) < cap

    def rank(self, group: Group) -> tuple[int, int, str]:
        """Of two groups the one with the lower rank goes first."""
        return -group.priority, self.running.get(group.owner, 0), group.first


def may_start(moment: datetime) -> ColumnElement[bool]:
    """Queued jobs whose pause, after they were lost, is over."""
    return or_(jobs.c.not_before.is_(None), jobs.c.not_before <= moment)


def in_order(connection: Connection) -> list[Group]:
    """The groups of queued jobs that may start, the one that comes first at the front."""
    found = connection.execute(
        select(jobs.c.owner, jobs.c.batch_id, jobs.c.priority, func.min(jobs.c.id))
        .where(jobs.c.state == "queued", may_start(datetime.now(UTC)))
        .group_by(jobs.c.owner, jobs.c.batch_id, jobs.c.priority)
    )
    groups = [Group(*row) for row in found]
    load = _load(connection)
    return sorted(filter(load.has_room, groups), key=load.rank)


def _load(connection: Connection) -> Load:
    running: dict[str, int] = {}
    in_batch: dict[str, int] = {}
    at_work = (
        select(jobs.c.owner, jobs.c.batch_id, func.count())
        .where(jobs.c.state.in_(LEASED_STATES))
        .group_by(jobs.c.owner, jobs.c.batch_id)
    )
    for owner, batch_id, count in connection.execute(at_work):
        running[owner] = running.get(owner, 0) + count
        if batch_id is not None:
            in_batch[batch_id] = in_batch.get(batch_id, 0) + count
    owners = select(tokens.c.id, tokens.c.max_running).where(tokens.c.max_running.is_not(None))
    caps = select(batches.c.id, batches.c.max_running).where(
        batches.c.max_running.is_not(None), batches.c.state == "running"
    )
    return Load(
        running,
        in_batch,
        {row[0]: row[1] for row in connection.execute(owners)},
        {row[0]: row[1] for row in connection.execute(caps)},
    )
