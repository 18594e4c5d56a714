"""Tables as SQLAlchemy Core sees them; the same on SQLite and PostgreSQL.

A change here needs a migration beside it; a released migration is never edited.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
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
BATCH_STATES = ("running", "cancelling", "completed", "cancelled")
WATCH_STATES = ("active", "paused")
WATCH_ITEM_STATES = ("waiting", "submitted", "refused")
WEBHOOK_STATES = ("active", "disabled")
DELIVERY_STATES = ("pending", "delivered", "failed")
ROWS_PER_QUERY = 500
"""Values in one IN list: SQLite takes at most some thousands."""


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
    Column("owner", String(40), nullable=False, server_default=""),
    # Not foreign keys: SQLite adds such a column only by making the table anew, which would cascade to its events.
    Column("batch_id", String(40)),
    Column("watch_id", String(40)),
    Column("request_digest", String(64)),
    Column("not_before", UtcTime),
    CheckConstraint(_one_of("state", STATES), name="state"),
    Index("ix_jobs_queue", "state", "priority", "id"),
    Index("ix_jobs_owner", "owner", "state"),
    Index("ix_jobs_batch_id", "batch_id", "state"),
    Index("ix_jobs_updated_at", "updated_at"),
    Index("ix_jobs_request_digest", "request_digest"),
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

job_attempts = Table(
    "job_attempts",
    metadata,
    Column("job_id", String(40), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("lease_owner", String(120), nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime),
    Column("outcome", String(16)),
    Column("error", JSON(none_as_null=True)),
)

shards = Table(
    "shards",
    metadata,
    Column("job_id", String(40), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("tensors", Integer, nullable=False),
    Column("digest", String(80)),
    Column("finished_at", UtcTime),
    Index("ix_shards_path", "job_id", "path"),
)

job_documents = Table(
    "job_documents",
    metadata,
    Column("job_id", String(40), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("name", String(16), primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
"""What is large and read seldom, as compressed JSON: ``tensors`` (the plan's table) and ``report`` (the manifest)."""

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("owner", String(40), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("request_digest", String(64), nullable=False),
    Column("resource_id", String(40), nullable=False),
    Column("answer", JSON, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Index("ix_idempotency_keys_expires_at", "expires_at"),
)

batches = Table(
    "batches",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("owner", String(40), nullable=False),
    Column("watch_id", String(40)),
    Column("name", String(255), nullable=False),
    Column("state", String(16), nullable=False),
    Column("request", JSON, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("on_item_error", String(16), nullable=False),
    Column("max_running", Integer),
    Column("total", Integer, nullable=False),
    Column("refused", Integer, nullable=False),
    # What is told of it once it has ended, when its jobs may be gone.
    Column("tally", JSON(none_as_null=True)),
    Column("created_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime),
    CheckConstraint(_one_of("state", BATCH_STATES), name="state"),
    CheckConstraint(_one_of("on_item_error", ("fail", "continue")), name="on_item_error"),
    Index("ix_batches_state", "state"),
)

batch_items = Table(
    "batch_items",
    metadata,
    Column("batch_id", String(40), ForeignKey("batches.id", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("source", Text, nullable=False),
    Column("destination", Text, nullable=False),
    Column("job_id", String(40)),
    Column("error", JSON(none_as_null=True)),
)
"""What a batch asked for, in its order: each became a job or was refused."""

watches = Table(
    "watches",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("owner", String(40), nullable=False),
    Column("name", String(255), nullable=False),
    Column("state", String(16), nullable=False),
    Column("prefix", Text, nullable=False),
    Column("pattern", String(255), nullable=False),
    Column("template", JSON, nullable=False),
    Column("interval_s", Float, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    Column("next_look_at", UtcTime, nullable=False),
    Column("last_look_at", UtcTime),
    Column("error", JSON(none_as_null=True)),
    CheckConstraint(_one_of("state", WATCH_STATES), name="state"),
    Index("ix_watches_next_look_at", "state", "next_look_at"),
)

watch_items = Table(
    "watch_items",
    metadata,
    Column("watch_id", String(40), ForeignKey("watches.id", ondelete="CASCADE"), primary_key=True),
    Column("source", Text, primary_key=True),
    Column("id", String(40), nullable=False, server_default=""),
    Column("state", String(16), nullable=False),
    Column("job_id", String(40)),
    Column("listing", String(64)),
    Column("listing_since", UtcTime),
    Column("error", JSON(none_as_null=True)),
    Column("first_seen_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    CheckConstraint(_one_of("state", WATCH_ITEM_STATES), name="state"),
    Index("ix_watch_items_id", "watch_id", "id", unique=True),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("owner", String(40), nullable=False),
    Column("everyone", Boolean, nullable=False),
    Column("url", Text, nullable=False),
    Column("description", String(255), nullable=False),
    Column("secret", String(80), nullable=False),
    Column("previous_secret", String(80)),
    Column("previous_secret_until", UtcTime),
    Column("events", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("disabled_reason", Text),
    Column("refusals", Integer, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    CheckConstraint(_one_of("state", WEBHOOK_STATES), name="state"),
)

webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("webhook_id", String(40), ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("event_type", String(40), nullable=False),
    Column("job_id", String(40)),
    Column("body", JSON, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("next_attempt_at", UtcTime),
    Column("last_attempt_at", UtcTime),
    Column("response_status", Integer),
    Column("error", Text),
    CheckConstraint(_one_of("state", DELIVERY_STATES), name="state"),
    Index("ix_webhook_deliveries_due", "state", "next_attempt_at"),
    Index("ix_webhook_deliveries_webhook_id", "webhook_id", "id"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("name", String(255), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("max_running", Integer),
    Column("max_queued", Integer),
    Column("requests_per_minute", Integer),
    Column("created_by", String(40), nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime),
    Column("last_used_at", UtcTime),
    Column("revoked_at", UtcTime),
    Index("uq_tokens_digest", "digest", unique=True),
)

audit = Table(
    "audit",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("at", UtcTime, nullable=False),
    Column("actor", String(40), nullable=False),
    Column("actor_name", String(255), nullable=False),
    Column("address", String(64), nullable=False),
    Column("action", String(255), nullable=False),
    Column("target", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("detail", JSON, nullable=False),
)
"""Who changed what, from where, with which answer; rows are only ever added, and taken away by age alone."""
