"""How Alembic meets our database: over the connection that ``Database.migrate`` hands it, in its transaction."""

from __future__ import annotations

from alembic import context

from service.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the transaction is the caller's
)
context.run_migrations()
