"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres import PostgresServer
from tests.seaweed import S3Server, SeaweedFS


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with authentication, started once and only when a test asks for it."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    try:
        yield server.start()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL server for all tests that leave it as it is."""
    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """An empty database of its own."""
    return postgres.new_database()
