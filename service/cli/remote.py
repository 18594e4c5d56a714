"""``unshard submit`` and ``unshard jobs``: a running service through its client."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.answers import Job
from service.cli.output import count, duration, emit_json, say, say_fields, say_table, size
from service.cli.problems import lines
from service.cli.progress import Bar
from service.client import Client, JsonObject
from workers.errors import UnshardError
from workers.options import ConvertOptions

NOT_DONE = 1
EXIT_STATUSES = {"destination": 3, "resource": 3, "timeout": 3, "internal": 70}
"""Of a command that waited for a job, by the kind of the job's error."""
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service and the right to use it."""

    server: str
    token: str | None = None

    def client(self) -> Client:
        """A client that the caller closes."""
        return Client(self.server, token=self.token)


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that is to be handed in."""

    source: str
    destination: str
    options: ConvertOptions
    labels: dict[str, str]
    priority: int = 0


def run_submit(endpoint: Endpoint, asked: Submission, *, wait: bool, as_json: bool) -> int:
    """Hand a job in; with ``wait``, the status is the job's."""
    with endpoint.client() as client:
        job = client.submit(
            absolute(asked.source),
            absolute(asked.destination),
            placed_options(asked.options.to_dict()),
            labels=asked.labels,
            priority=asked.priority,
        )
        if not wait:
            _say_submitted(job, as_json=as_json)
            return 0
        return _wait(client, job["id"], as_json=as_json)


def run_jobs(endpoint: Endpoint, *, as_json: bool) -> int:
    """Print the latest jobs."""
    with endpoint.client() as client:
        found = client.jobs()
    if as_json:
        emit_json(found)
    else:
        _say_jobs(found)
    return 0


def run_job(endpoint: Endpoint, job_id: str, *, action: str | None, wait: bool, as_json: bool) -> int:
    """Print a job; ``action`` is ``cancel`` or ``retry`` and comes first. With ``wait``, the status is the job's."""
    with endpoint.client() as client:
        if action == "cancel":
            job = client.cancel(job_id)
        else:
            job = client.retry(job_id) if action == "retry" else client.job(job_id)
        if wait:
            return _wait(client, job_id, as_json=as_json)
    if as_json:
        emit_json(job)
    else:
        _say_job(job)
    return 0


def _wait(client: Client, job_id: str, *, as_json: bool) -> int:
    try:
        job = follow(client, job_id, visible=sys.stderr.isatty() and not as_json)
    except KeyboardInterrupt:
        say(f"job {job_id} goes on; unshard jobs {job_id} --cancel stops it", to=sys.stderr)
        return INTERRUPTED
    if as_json:
        emit_json(job)
        return 0 if job["state"] == "succeeded" else JobFailed(job).exit_status
    if job["state"] != "succeeded":
        raise JobFailed(job)
    _say_job(job)
    return 0


def absolute(place: str) -> str:
    """A path as the service must be told it: it counts from another folder than this process."""
    return place if "://" in place else str(Path(place).absolute())


def placed(values: JsonObject, *names: str) -> JsonObject:
    """The values with the paths under these names as the service must be told them; what is no text stays."""
    told = {name: values[name] for name in names if isinstance(values.get(name), str)}
    return {**values, **{name: absolute(place) for name, place in told.items()}}


def placed_options(options: JsonObject) -> JsonObject:
    """Options of a conversion with their paths as the service must be told them."""
    return placed(options, "config_dir", "base")


def follow(client: Client, job_id: str, *, visible: bool) -> Job:
    """Watch a job to its end, with a bar where it can be seen; the job as it ended."""
    if not visible:
        return client.wait(job_id)
    bar = Bar()

    def draw(job: Job) -> None:
        bar.describe(job["state"])
        if progress := job.get("progress"):
            bar.update(progress["bytes_done"], progress["bytes_total"])

    try:
        return client.wait(job_id, seen=draw)
    finally:
        bar.close()


class JobFailed(UnshardError):
    """A job that did not succeed, told and counted as if it had failed in this process."""

    def __init__(self, job: Job) -> None:
        told: dict[str, Any] = dict(job.get("error") or {})
        parts = {name: told[name] for name in ("file", "tensor", "expected", "found") if told.get(name)}
        message = told.get("message") or f"job {job['id']} is {job['state']}"
        super().__init__(message, hint=told.get("hint") or "", **parts)
        self.code = told.get("type") or job["state"]
        self.exit_status = EXIT_STATUSES.get(told.get("kind", "input"), NOT_DONE)


def _say_submitted(job: Job, *, as_json: bool) -> None:
    if as_json:
        emit_json(job)
        return
    say(f"job {job['id']} is {job['state']}")
    say(f"unshard jobs {job['id']} shows how it goes")


def _say_jobs(jobs: list[Job]) -> None:
    rows = [(job["id"], job["state"], _share(job), job["source"], job["destination"]) for job in jobs]
    say_table(("job", "state", "done", "source", "destination"), rows, right=frozenset({2}))


def _share(job: Job) -> str:
    progress: dict[str, Any] = dict(job.get("progress") or {})
    total = progress.get("bytes_total")
    return f"{progress['bytes_done'] / total:.0%}" if total else ""


def _say_job(job: Job) -> None:
    progress: dict[str, Any] = dict(job.get("progress") or {})
    fields = [("source", job["source"]), ("destination", job["destination"])]
    if progress.get("bytes_total"):
        fields.append(("done", f"{size(progress['bytes_done'])} of {size(progress['bytes_total'])}"))
    if job.get("attempt", 1) > 1:
        fields.append(("attempt", str(job["attempt"])))
    if result := job.get("result"):
        fields.append(("model", f"{count(len(result['files']), 'file')}, {size(result['bytes'])}"))
        fields.append(("time", duration(result["seconds"])))
    fields += [("warning", warning) for warning in job.get("warnings", [])]
    say(f"job {job['id']} is {job['state']}")
    say_fields(fields)
    if job.get("error"):
        for line in lines(JobFailed(job)):
            say(f"  {line}")
