"""A service as a process of its own, stopped with everything that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from service.client import Client
from workers.errors import InsufficientResources

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
LOG_LINES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """``unshard serve`` on a free port of the loopback interface."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @classmethod
    def start(cls, data: Path) -> Self:
        """Start it; whoever enters it stops it."""
        data.mkdir(parents=True, exist_ok=True)
        log = data / "serve.log"
        port = _free_port()
        command = [sys.executable, "-m", "service.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches this process only, which then stops the service in order.
            process = subprocess.Popen(  # noqa: S603 - this interpreter and our own arguments
                [*command, "--data-dir", str(data)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(),
            )
        return cls(process, f"http://127.0.0.1:{port}", log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        """Return when it takes jobs. Raises ``InsufficientResources`` when it ends or takes too long."""
        until = time.monotonic() + START_TIMEOUT_S
        with Client(self.url) as client:
            while not client.ready():
                if self.process.poll() is not None:
                    raise self._failed(f"the service ended with status {self.process.returncode}")
                if time.monotonic() > until:
                    raise self._failed(f"the service was not ready after {START_TIMEOUT_S:.0f} s")
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Ask it to end; what is still there of its session after a while is killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()

    def kill(self) -> None:
        """End it and its session at once; Ray's own processes see that and follow."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def _failed(self, message: str) -> InsufficientResources:
        last = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return InsufficientResources(
            "\n".join([f"{message}; the last lines of {self.log}:", *last]), hint=f"See all of {self.log}."
        )


def _environment() -> dict[str, str]:
    """This process's, without settings that would tie the demo to a deployment's database or cluster."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UNSHARD_") and k != "RAY_ADDRESS"}
    return kept | {"RAY_USAGE_STATS_ENABLED": "0"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
