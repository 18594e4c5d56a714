"""Tables as SQLAlchemy Core sees them; the same on SQLite and PostgreSQL.

A change here needs a migration beside it; a released migration is never edited.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    JSON,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    text,
)

STATES = ("queued", "planning", "running", "verifying", "cancelling", "succeeded", "failed", "cancelled")
LEASED_STATES = ("planning", "running", "verifying", "cancelling")
LIVE_STATES = ("queued", *LEASED_STATES)
TERMINAL_STATES = ("succeeded", "failed", "cancelled")


class UtcTime(TypeDecorator[datetime]):
    """A point in time with its zone: SQLite forgets it, so that it is put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name != "sqlite":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _one_of(column: str, values: tuple[str, ...]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("source", Text, nullable=False),
    Column("destination", Text, nullable=False),
    Column("options", JSON, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    Column("state_times", JSON, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("losses", Integer, nullable=False),
    Column("fence", Integer, nullable=False),
    Column("lease_owner", String(120)),
    Column("lease_expires_at", UtcTime),
    Column("heartbeat_at", UtcTime),
    Column("last_seq", Integer, nullable=False),
    Column("progress", JSON(none_as_null=True)),
    Column("plan", JSON(none_as_null=True)),
    Column("error", JSON(none_as_null=True)),
    Column("warnings", JSON, nullable=False),
    Column("result", JSON(none_as_null=True)),
    CheckConstraint(_one_of("state", STATES), name="state"),
    Index("ix_jobs_queue", "state", "priority", "id"),
    # At most one live job writes to a destination; the database is what decides between two at the same moment.
    Index(
        "uq_jobs_live_destination",
        "destination",
        unique=True,
        sqlite_where=text(_one_of("state", LIVE_STATES)),
        postgresql_where=text(_one_of("state", LIVE_STATES)),
    ),
)

events = Table(
    "events",
    metadata,
    Column("job_id", String(40), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("at", UtcTime, nullable=False),
    Column("type", String(40), nullable=False),
    Column("data", JSON, nullable=False),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("owner", String(40), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request_digest", String(64), nullable=False),
    Column("job_id", String(40), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("answer", JSON, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
)
