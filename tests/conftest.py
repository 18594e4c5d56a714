"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples of a test: what lies in the one that holds it would be seen by other tests."""
    return tmp_path_factory.mktemp("scratch")
