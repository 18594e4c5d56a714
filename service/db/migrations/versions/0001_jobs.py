"""Jobs, their events, and the keys of requests that are not to be done twice.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

STATES = "'queued', 'planning', 'running', 'verifying', 'cancelling', 'succeeded', 'failed', 'cancelled'"
LIVE = sa.text("state IN ('queued', 'planning', 'running', 'verifying', 'cancelling')")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("destination", sa.Text, nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("state_times", sa.JSON, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("losses", sa.Integer, nullable=False),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("lease_owner", sa.String(120)),
        sa.Column("lease_expires_at", TIME),
        sa.Column("heartbeat_at", TIME),
        sa.Column("last_seq", sa.Integer, nullable=False),
        sa.Column("progress", sa.JSON),
        sa.Column("plan", sa.JSON),
        sa.Column("error", sa.JSON),
        sa.Column("warnings", sa.JSON, nullable=False),
        sa.Column("result", sa.JSON),
        sa.CheckConstraint(f"state IN ({STATES})", name=op.f("ck_jobs_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_queue", "jobs", ["state", "priority", "id"])
    op.create_index(
        "uq_jobs_live_destination", "jobs", ["destination"], unique=True, sqlite_where=LIVE, postgresql_where=LIVE
    )
    op.create_table(
        "events",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("seq", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("type", sa.String(40), nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_events")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id"), ondelete="CASCADE"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(40), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_digest", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("answer", sa.JSON, nullable=False),
        sa.Column("expires_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency_keys")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_idempotency_keys_job_id"), ondelete="CASCADE"),
    )


def downgrade() -> None:
    for table in ("idempotency_keys", "events", "jobs"):
        op.drop_table(table)
