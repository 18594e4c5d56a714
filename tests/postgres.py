"""A real PostgreSQL server for tests, of Debian's package ``postgresql``: on loopback, in a folder that goes away.

A test takes the fixture ``postgres_url`` for a database of its own; a module that injects faults makes a
``PostgresServer`` of its own and stops, kills and starts it again.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import psycopg

from tests.ci_skips import find_program

START_TIMEOUT_S = 60
SETTINGS = {
    "fsync": "off",  # what a crash of this machine would lose is of no interest
    "max_connections": "200",
    "shared_buffers": "32MB",
    "unix_socket_directories": "''",
}


class PostgresServer:
    """A server with its data in a temporary folder. Everybody on this machine may connect as ``postgres``."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="unshard-postgres-"))
        # The server refuses to run as root, as whom containers run tests.
        self._user: dict[str, Any] = {"user": "postgres"} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(self._folder, "postgres")
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self._run("initdb", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-sync")
        self.start()

    def start(self) -> None:
        """Start, or start again after a stop, and wait until it answers."""
        settings = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
        self._run(
            "pg_ctl",
            "start",
            "--wait",
            f"--timeout={START_TIMEOUT_S}",
            f"--log={self._folder / 'server.log'}",
            f"--options=-h 127.0.0.1 -p {self.port} {settings}",
        )

    def stop(self, mode: str = "fast") -> None:
        """Stop: ``fast`` ends connections, ``immediate`` is as good as a crash."""
        self._run("pg_ctl", "stop", "--wait", f"--mode={mode}")

    def new_database(self) -> str:
        """The URL of a fresh, empty database."""
        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self._address("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"

    def close(self) -> None:
        """Stop and take the folder away."""
        self._run("pg_ctl", "stop", "--mode=immediate", check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _address(self, database: str) -> str:
        return f"host=127.0.0.1 port={self.port} user=postgres dbname={database}"

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        found = find_program(program)
        assert found is not None, f"{program} is missing"
        command = [found, *arguments, f"--pgdata={self._folder / 'data'}"]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        done = subprocess.run(command, check=False, cwd="/", **pipes, **self._user)
        assert done.returncode == 0 or not check, f"{program} failed: {done.stderr.decode()}"
