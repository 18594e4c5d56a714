"""``unshard serve`` in a process of its own, and models for it to make."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from service.client import Client

START_S = 120.0
TENSORS = 48


class Process:
    """``unshard serve`` in a process of its own."""

    def __init__(self, data: Path, **environment: str) -> None:
        self.log = data / "serve.log"
        data.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--data-dir", str(data)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "UNSHARD_MERGERS": "1", "UNSHARD_MERGER_CPUS": "0.5", **environment},
                start_new_session=True,
            )
        self.url = self.process.stdout.readline().split()[-1]
        self.client = Client(self.url)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self._closed()

    def stop(self) -> int:
        self.process.terminate()
        status = self.process.wait(30)
        self._closed()
        return status

    def end(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.kill()

    def _closed(self) -> None:
        self.client.close()
        self.process.stdout.close()


def many_tensors(folder: Path) -> Path:
    """A model of 48 tensors of 4 MiB."""
    folder.mkdir()
    values = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
    save_file({f"layer.{n}.weight": values + n for n in range(TENSORS)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "anything"}))
    return folder


def digests(model: Path) -> dict[str, dict]:
    found = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                values = np.ascontiguousarray(file.get_tensor(name))
                digest = hashlib.sha256(values.tobytes()).hexdigest()
                found[name] = {"shape": list(values.shape), "sha256": digest}
    return found


def completed(service: Process, job: dict) -> int:
    return [event["type"] for event in service.client.events(job["id"])].count("shard.completed")


def kept_files(service: Process, job: dict) -> list[list[str]]:
    """Of each attempt, the files that it did not make again."""
    return kept_files_of(service.client.events(job["id"]))


def kept_files_of(events: list[dict]) -> list[list[str]]:
    """The same from a job's events."""
    return [event["data"]["kept_files"] for event in events if event["type"] == "job.running"]
