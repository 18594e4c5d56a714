"""Of what a watch has seen an id, by which its pages go on: places in a list shift while it is read.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.ids import id_at

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ROWS_AT_ONCE = 500


def upgrade() -> None:
    op.add_column("watch_items", sa.Column("id", sa.String(40), nullable=False, server_default=""))
    _fill(op.get_bind())
    op.create_index("ix_watch_items_id", "watch_items", ["watch_id", "id"], unique=True)


def _fill(connection: sa.Connection) -> None:
    """Give those that are there ids in the order in which they were seen."""
    items = sa.table(
        "watch_items",
        sa.column("watch_id", sa.String),
        sa.column("source", sa.Text),
        sa.column("id", sa.String),
        sa.column("first_seen_at", sa.DateTime(timezone=True)),
    )
    some = sa.select(items.c.watch_id, items.c.source, items.c.first_seen_at).where(items.c.id == "")
    given = sa.update(items).where(
        items.c.watch_id == sa.bindparam("of_watch"), items.c.source == sa.bindparam("of_source")
    )
    while rows := connection.execute(some.order_by(items.c.first_seen_at, items.c.source).limit(ROWS_AT_ONCE)).all():
        ids = [{"of_watch": row[0], "of_source": row[1], "id": id_at("item", row[2])} for row in rows]
        connection.execute(given, ids)


def downgrade() -> None:
    op.drop_index("ix_watch_items_id", "watch_items")
    op.drop_column("watch_items", "id")
