"""Who changed what, from where, with which answer. Rows are added and read; nothing here changes or removes one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import insert, select

from service.db.database import Database
from service.db.tables import audit
from service.ids import new_id
from service.times import now

KIND = "audit"
NOBODY = "nobody"
"""The actor of a request whose token was refused."""


@dataclass(frozen=True, slots=True)
class Deed:
    """A request that changed something or was refused.

    ``action`` is its method and route, ``target`` what it was about; ``detail`` holds small facts, never a body.
    """

    actor: str
    actor_name: str
    address: str
    action: str
    target: str
    status: int
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A row."""

    id: str
    at: datetime
    actor: str
    actor_name: str
    address: str
    action: str
    target: str
    status: int
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which rows to list; what is None fits all. Texts have to be equal."""

    actor: str | None = None
    action: str | None = None
    target: str | None = None
    status: int | None = None
    after: datetime | None = None
    before: datetime | None = None


class AuditLog:
    """Thread-safe; each method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, deed: Deed) -> None:
        """Add a row."""
        with self._database.write() as connection:
            connection.execute(insert(audit).values(id=new_id(KIND), at=now(), **asdict(deed)))

    def page(self, wanted: AuditFilter, limit: int, before: str | None = None) -> list[AuditEntry]:
        """Rows from the newest on; ``before`` is the id of the last one of the page before."""
        query = select(audit).order_by(audit.c.id.desc()).limit(limit)
        for name in ("actor", "action", "target", "status"):
            value = getattr(wanted, name)
            if value is not None:
                query = query.where(audit.c[name] == value)
        if wanted.after is not None:
            query = query.where(audit.c.at > wanted.after)
        if wanted.before is not None:
            query = query.where(audit.c.at < wanted.before)
        if before is not None:
            query = query.where(audit.c.id < before)
        with self._database.read() as connection:
            return [AuditEntry(**row) for row in connection.execute(query).mappings()]
