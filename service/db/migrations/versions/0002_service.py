"""Batches, watches, webhooks, tokens, audit; and of a job its owner, attempts, shards and documents.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def _id(name: str = "id", *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(40), nullable=nullable)


def _time(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, TIME, nullable=nullable)


def _key(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=op.f(f"pk_{table}"))


def _part_of(table: str, column: str, whole: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{whole}.id"], name=op.f(f"fk_{table}_{column}"), ondelete="CASCADE")


def _one_of(table: str, column: str, *values: str) -> sa.CheckConstraint:
    listed = ", ".join(repr(value) for value in values)
    return sa.CheckConstraint(f"{column} IN ({listed})", name=op.f(f"ck_{table}_{column}"))


def upgrade() -> None:
    _extend_jobs()
    _make_parts_of_jobs()
    _make_idempotency_keys()
    _make_batches()
    _make_watches()
    _make_webhooks()
    _make_access()


def _extend_jobs() -> None:
    op.add_column("jobs", sa.Column("owner", sa.String(40), nullable=False, server_default=""))
    op.add_column("jobs", _id("batch_id", nullable=True))
    op.add_column("jobs", _id("watch_id", nullable=True))
    op.add_column("jobs", sa.Column("request_digest", sa.String(64)))
    op.add_column("jobs", _time("not_before", nullable=True))
    op.create_index("ix_jobs_owner", "jobs", ["owner", "state"])
    op.create_index("ix_jobs_batch_id", "jobs", ["batch_id", "state"])
    op.create_index("ix_jobs_updated_at", "jobs", ["updated_at"])
    op.create_index("ix_jobs_request_digest", "jobs", ["request_digest"])


def _make_parts_of_jobs() -> None:
    op.create_table(
        "job_attempts",
        _id("job_id"),
        sa.Column("attempt", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("lease_owner", sa.String(120), nullable=False),
        _time("started_at"),
        _time("ended_at", nullable=True),
        sa.Column("outcome", sa.String(16)),
        sa.Column("error", sa.JSON),
        _key("job_attempts", "job_id", "attempt"),
        _part_of("job_attempts", "job_id", "jobs"),
    )
    op.create_table(
        "shards",
        _id("job_id"),
        sa.Column("position", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("tensors", sa.Integer, nullable=False),
        sa.Column("digest", sa.String(80)),
        _time("finished_at", nullable=True),
        _key("shards", "job_id", "position"),
        _part_of("shards", "job_id", "jobs"),
    )
    op.create_index("ix_shards_path", "shards", ["job_id", "path"])
    op.create_table(
        "job_documents",
        _id("job_id"),
        sa.Column("name", sa.String(16), nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        _key("job_documents", "job_id", "name"),
        _part_of("job_documents", "job_id", "jobs"),
    )


def _make_idempotency_keys() -> None:
    # Anew: keys live for a day, and those that are there lack the answer that is to be given again.
    op.drop_table("idempotency_keys")
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_digest", sa.String(64), nullable=False),
        _id("resource_id"),
        sa.Column("answer", sa.JSON, nullable=False),
        _time("expires_at"),
        _key("idempotency_keys", "owner", "key"),
    )
    op.create_index("ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"])


def _make_batches() -> None:
    op.create_table(
        "batches",
        _id(),
        _id("owner"),
        _id("watch_id", nullable=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("on_item_error", sa.String(16), nullable=False),
        sa.Column("max_running", sa.Integer),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("refused", sa.Integer, nullable=False),
        sa.Column("tally", sa.JSON),
        _time("created_at"),
        _time("updated_at"),
        _time("ended_at", nullable=True),
        _one_of("batches", "state", "running", "cancelling", "completed", "cancelled"),
        _one_of("batches", "on_item_error", "fail", "continue"),
        _key("batches", "id"),
    )
    op.create_index("ix_batches_state", "batches", ["state"])
    op.create_table(
        "batch_items",
        _id("batch_id"),
        sa.Column("position", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("destination", sa.Text, nullable=False),
        _id("job_id", nullable=True),
        sa.Column("error", sa.JSON),
        _key("batch_items", "batch_id", "position"),
        _part_of("batch_items", "batch_id", "batches"),
    )


def _make_watches() -> None:
    op.create_table(
        "watches",
        _id(),
        _id("owner"),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("pattern", sa.String(255), nullable=False),
        sa.Column("template", sa.JSON, nullable=False),
        sa.Column("interval_s", sa.Float, nullable=False),
        _time("created_at"),
        _time("updated_at"),
        _time("next_look_at"),
        _time("last_look_at", nullable=True),
        sa.Column("error", sa.JSON),
        _one_of("watches", "state", "active", "paused"),
        _key("watches", "id"),
    )
    op.create_index("ix_watches_next_look_at", "watches", ["state", "next_look_at"])
    op.create_table(
        "watch_items",
        _id("watch_id"),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        _id("job_id", nullable=True),
        sa.Column("listing", sa.String(64)),
        _time("listing_since", nullable=True),
        sa.Column("error", sa.JSON),
        _time("first_seen_at"),
        _time("updated_at"),
        _one_of("watch_items", "state", "waiting", "submitted", "refused"),
        _key("watch_items", "watch_id", "source"),
        _part_of("watch_items", "watch_id", "watches"),
    )


def _make_webhooks() -> None:
    op.create_table(
        "webhooks",
        _id(),
        _id("owner"),
        sa.Column("everyone", sa.Boolean, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("description", sa.String(255), nullable=False),
        sa.Column("secret", sa.String(80), nullable=False),
        sa.Column("previous_secret", sa.String(80)),
        _time("previous_secret_until", nullable=True),
        sa.Column("events", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("disabled_reason", sa.Text),
        sa.Column("refusals", sa.Integer, nullable=False),
        _time("created_at"),
        _time("updated_at"),
        _one_of("webhooks", "state", "active", "disabled"),
        _key("webhooks", "id"),
    )
    op.create_table(
        "webhook_deliveries",
        _id(),
        _id("webhook_id"),
        sa.Column("event_type", sa.String(40), nullable=False),
        _id("job_id", nullable=True),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        _time("created_at"),
        _time("next_attempt_at", nullable=True),
        _time("last_attempt_at", nullable=True),
        sa.Column("response_status", sa.Integer),
        sa.Column("error", sa.Text),
        _one_of("webhook_deliveries", "state", "pending", "delivered", "failed"),
        _key("webhook_deliveries", "id"),
        _part_of("webhook_deliveries", "webhook_id", "webhooks"),
    )
    op.create_index("ix_webhook_deliveries_due", "webhook_deliveries", ["state", "next_attempt_at"])
    op.create_index("ix_webhook_deliveries_webhook_id", "webhook_deliveries", ["webhook_id", "id"])


def _make_access() -> None:
    op.create_table(
        "tokens",
        _id(),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("max_running", sa.Integer),
        sa.Column("max_queued", sa.Integer),
        sa.Column("requests_per_minute", sa.Integer),
        _id("created_by"),
        _time("created_at"),
        _time("expires_at", nullable=True),
        _time("last_used_at", nullable=True),
        _time("revoked_at", nullable=True),
        _key("tokens", "id"),
    )
    op.create_index("uq_tokens_digest", "tokens", ["digest"], unique=True)
    op.create_table(
        "audit",
        _id(),
        _time("at"),
        _id("actor"),
        sa.Column("actor_name", sa.String(255), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("action", sa.String(255), nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        _key("audit", "id"),
    )


def downgrade() -> None:
    for table in (
        "audit",
        "tokens",
        "webhook_deliveries",
        "webhooks",
        "watch_items",
        "watches",
        "batch_items",
        "batches",
        "job_documents",
        "shards",
        "job_attempts",
        "idempotency_keys",
    ):
        op.drop_table(table)
    for index in ("request_digest", "updated_at", "batch_id", "owner"):
        op.drop_index(f"ix_jobs_{index}", "jobs")
    for column in ("not_before", "request_digest", "watch_id", "batch_id", "owner"):
        op.drop_column("jobs", column)
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_digest", sa.String(64), nullable=False),
        _id("job_id"),
        sa.Column("answer", sa.JSON, nullable=False),
        _time("expires_at"),
        _key("idempotency_keys", "owner", "key"),
        _part_of("idempotency_keys", "job_id", "jobs"),
    )
