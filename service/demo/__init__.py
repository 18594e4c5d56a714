"""``unshard demo``: a real checkpoint through a real service, proved tensor by tensor.

``checkpoint`` is what two training processes saved of a small Qwen3-MoE; ``expected.json`` holds the SHA-256 of each
tensor that transformers saves of the same model.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from service.answers import Job
from service.cli.interrupt import StopSignals
from service.cli.output import count, say, size, styled
from service.cli.remote import JobFailed, follow
from service.client import Client
from service.demo.process import ServiceProcess
from service.demo.proof import compare
from workers.storage import FolderAddress

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoint"
EXPECTED = HERE / "expected.json"


def run_demo(folder: str) -> int:
    """Start a service with its data in ``folder``, convert, prove the result, stop the service."""
    began = time.monotonic()
    data = Path(folder)
    # A place of its own for each run: an earlier one that was killed may still own its place when the service is back.
    model = data.absolute() / "models" / f"qwen3-moe-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    say(styled("unshard demo", "title"))
    say()
    with _service(data) as service:
        with _step("starting the service"):
            service.wait_until_ready()
        _done("service", f"{service.url}, data in {data}, log in {service.log}")
        with Client(service.url) as client:
            job = _convert(client, model)
    tensors, size_bytes = compare(FolderAddress(str(model)), EXPECTED)
    _done("verified", f"{count(tensors, 'tensor')}, {size(size_bytes)}: SHA-256 equal to what transformers saved")
    say()
    shown = data / model.relative_to(data.absolute())
    say(f"The model is in {shown} ({time.monotonic() - began:.0f} s in all; job {job['id']}).")
    say(f"Open the dashboard again:  {_command()} serve --data-dir {folder}")
    return 0


def _command() -> str:
    """How this command can be called from here: by its name alone only where a shell would find it."""
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "unshard" and shutil.which("unshard") is None else "unshard"


@contextmanager
def _service(data: Path) -> Iterator[ServiceProcess]:
    """A service that doesn't outlive the block, at whatever moment a stop signal comes."""
    with StopSignals() as stop:
        stop.defer()
        with ServiceProcess.start(data) as service:
            stop.before_exit = service.kill
            stop.undefer()
            yield service


def _convert(client: Client, model: Path) -> Job:
    job = client.submit(str(CHECKPOINT), str(model))
    _done("submitted", f"POST /v1/jobs: {job['id']}")
    job = follow(client, job["id"], visible=sys.stderr.isatty())
    if job["state"] != "succeeded":
        raise JobFailed(job)
    source = sum(path.stat().st_size for path in CHECKPOINT.glob("*.pt"))
    _done("converted", f"2 rank files, {size(source)}: experts split, ranks joined")
    return job


def _done(label: str, text: str) -> None:
    tick = styled("✓", "good") if (sys.stdout.encoding or "").lower().startswith("utf") else "-"
    sys.stdout.write(f"  {tick} {label:<10} {text}{os.linesep}")
    sys.stdout.flush()


@contextmanager
def _step(text: str) -> Iterator[None]:
    """Show on a terminal what is being waited for."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal is worth the import

    with Console(file=sys.stderr).status(text):
        yield
