"""Answers that wait for a job, and answers that say that nothing changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import Header, Query
from starlette.concurrency import run_in_threadpool

from service.api.context import Context
from service.jobs.changes import LOOK_AGAIN_S
from service.jobs.records import Job
from service.schemas import DURATION

LONGEST_WAIT_S = 120.0
WAIT_HELP = f"Seconds, such as 30s; at most {LONGEST_WAIT_S:g} are waited."

Wait = Annotated[str | None, Query(pattern=DURATION, description=WAIT_HELP)]
IfNoneMatch = Header(alias="If-None-Match", max_length=1000, description="The ETag that you have.")


def seconds(text: str) -> float:
    """How long ``30`` or ``30s`` is, within what a request may take."""
    return min(float(text.rstrip("s")), LONGEST_WAIT_S)


def etag(job: Job) -> str:
    """What an answer about a job is known by: it changes whenever the answer does."""
    text = f"{job.id} {job.state} {job.attempt} {job.updated_at.isoformat()} {job.priority} {job.labels}"
    return f'W/"{hashlib.sha256(text.encode()).hexdigest()[:20]}"'


async def until(here: Context, job_id: str, enough: Callable[[Job], bool], limit_s: float) -> Job:
    """The job as soon as it is as wanted, or as it is when the time is over or the service stops."""
    deadline = time.monotonic() + limit_s
    with here.changes.listening(lambda change: change.id == job_id) as listener:
        while True:
            job = await run_in_threadpool(here.store.get, job_id)
            left_s = deadline - time.monotonic()
            if enough(job) or left_s <= 0 or here.changes.closed:
                return job
            await listener.wait(min(left_s, LOOK_AGAIN_S))
