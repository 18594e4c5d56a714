"""Connections to SQLite or PostgreSQL, used from threads, and the way to the newest schema.

Transactions are short: nothing that reads a checkpoint, calls Ray or waits happens inside one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import (
    ColumnElement,
    Connection,
    Interval,
    create_engine,
    event,
    func,
    literal,
    text,
    type_coerce,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from service.db.tables import UtcTime
from workers.errors import InvalidOption, StorageError

MIGRATIONS = Path(__file__).parent / "migrations"
MIGRATION_LOCK = 8_241_907_355
"""Key of PostgreSQL's advisory lock: any number that nobody else uses."""

BUSY_TIMEOUT_MS = 30_000
PATIENCE = {"connect_timeout": 5, "tcp_user_timeout": 15_000, "keepalives_idle": 10, "keepalives_interval": 5}
"""libpq's parameters: a server whose machine or network is gone is an error within a lease, not a wait without end."""


class Database:
    """An engine and its transactions: ``read`` sees a snapshot, ``write`` holds SQLite's only write lock."""

    def __init__(self, url: str) -> None:
        try:
            self.url = make_url(url)
        except ArgumentError:
            raise InvalidOption("database_url is not a database URL", hint=URL_HINT) from None
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite and (self.url.database or ":memory:") == ":memory:":
            raise InvalidOption("jobs have to survive a restart: an SQLite database needs a file", hint=URL_HINT)
        self._engine = _make_engine(self)
        self._lock: int | None = None

    @property
    def shown(self) -> str:
        """Where the data is, for people; without a password."""
        return str(self.url.database) if self.is_sqlite else self.url.render_as_string(hide_password=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes; rolled back when the block raises."""
        with self._engine.connect() as connection:
            connection.execution_options(unshard_write=True)
            with connection.begin():
                yield connection

    def serialize(self, connection: Connection, key: int) -> None:
        """Let one transaction of all processes at a time go on from here; a writing one of SQLite is alone anyway."""
        if not self.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})

    def clock(self, later: timedelta = timedelta()) -> ColumnElement[datetime]:
        """The time, or one that much later, by the one clock that all who share the database go by.

        For what one process writes and another compares: the clocks of their machines may differ.
        """
        if self.is_sqlite:
            return literal(datetime.now(UTC) + later, UtcTime())
        moment: ColumnElement[datetime] = func.clock_timestamp(type_=UtcTime())
        return type_coerce(moment + literal(later, Interval()), UtcTime())

    def own(self) -> bool:
        """Become the only service of an SQLite file; False on PostgreSQL, which several may share.

        Whoever owns the file knows that every lease it finds there is of a process that is gone.
        """
        if not self.is_sqlite or self._lock is not None:
            return self.is_sqlite
        path = Path(f"{self.url.database}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise StorageError(
                f"another service uses the database {self.shown}",
                hint="Stop it, give this one a data_dir of its own, or use PostgreSQL for several replicas.",
            ) from None
        self._lock = lock
        return True

    def migrate(self) -> None:
        """Bring the schema to the newest revision; of several processes one does it and the others wait."""
        try:
            with self.write() as connection:
                self.serialize(connection, MIGRATION_LOCK)
                command.upgrade(_alembic(connection), "head")
        except SQLAlchemyError as error:
            raise StorageError(
                f"the database {self.shown} cannot be used: {_first_line(error)}",
                hint="Check UNSHARD_DATABASE_URL, and that the database can be reached and written.",
            ) from error

    def problem(self) -> str | None:
        """Why the database does not answer; None when it does."""
        try:
            with self.read() as connection:
                connection.execute(text("SELECT 1"))
        except SQLAlchemyError as error:
            return _first_line(error)
        return None

    def revision(self) -> str | None:
        """The revision of the schema that is there."""
        with suppress(SQLAlchemyError), self.read() as connection:
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
        return None

    def close(self) -> None:
        """Close all connections and give the file free."""
        self._engine.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


URL_HINT = "Write sqlite:////absolute/path.db or postgresql+psycopg://user@host/name."


def newest_revision() -> str | None:
    """The revision that this version of the service works with."""
    return ScriptDirectory(str(MIGRATIONS)).get_current_head()


def _alembic(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _make_engine(database: Database) -> Any:
    if not database.is_sqlite:
        try:
            given = {name: value for name, value in PATIENCE.items() if name not in database.url.query}
            return create_engine(database.url, pool_size=16, pool_pre_ping=True, connect_args=given)
        except ImportError as error:
            raise InvalidOption(
                f"the driver of this database is missing: {error.name}", hint="Install unshard[postgres]."
            ) from None
    Path(str(database.url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(database.url, pool_size=16, connect_args={"check_same_thread": False})
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # BEGIN is ours, see below
    for setting in (
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "foreign_keys=ON",
    ):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that reads and then writes fails at once, whatever the timeout, when another wrote
    # between; one that takes the write lock first waits for its turn.
    writes = connection.get_execution_options().get("unshard_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _first_line(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().split("\n")[0]
