"""``/v1/jobs``."""

from __future__ import annotations

import base64
import binascii
import re
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Response
from pydantic import AwareDatetime

from service import schemas
from service.api.context import PROBLEMS, Here, job_answer
from service.errors import Problem
from service.jobs.records import NewJob, is_job_id
from service.jobs.store import JobFilter
from service.jobs.submit import checked, request_key
from workers.convert import plan

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)

Moment = Annotated[
    AwareDatetime | None, Query(ge=datetime(1970, 1, 2, tzinfo=UTC), lt=datetime(9000, 1, 1, tzinfo=UTC))
]
Key = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=255, description="Kept for 24 hours."),
]
DryRun = Annotated[bool, Query(description="Answer with the plan and store nothing.")]


@router.post(
    "",
    status_code=201,
    response_model=schemas.Job,
    responses={200: {"model": schemas.PlanAnswer, "description": "The plan of a dry run"}},
)
def submit(
    request: schemas.JobRequest, here: Here, response: Response, key: Key = None, *, dry_run: DryRun = False
) -> Any:
    """Hand a conversion in."""
    new, options = checked(NewJob(**request.model_dump()), here.places)
    if dry_run:
        summary = plan(new.source, new.destination, options).summary()
        return _plain(schemas.PlanAnswer(plan=summary))
    job, fresh = here.store.create(new, request_key(key, new) if key is not None else None)
    here.runner.wake()
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    if not fresh:
        response.headers["Idempotency-Replayed"] = "true"
    return job_answer(job)


def _plain(answer: schemas.PlanAnswer) -> Response:
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


def _filter(
    state: Annotated[list[schemas.State] | None, Query(description="May be given several times.")] = None,
    label: Annotated[list[str] | None, Query(description="NAME:VALUE; all that are given have to fit.")] = None,
    created_after: Moment = None,
    created_before: Moment = None,
) -> JobFilter:
    labels = dict(_label(text) for text in label or ())
    return JobFilter(tuple(state or ()), labels, created_after, created_before)


def _label(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(schemas.LABEL, name):
        fault = {"parameter": "label", "detail": "not NAME:VALUE"}
        raise Problem("validation", "label: not NAME:VALUE", hint="Write label=run:42.", errors=[fault])
    return name, value


@router.get("")
def jobs(
    here: Here,
    wanted: Annotated[JobFilter, Depends(_filter)],
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
) -> schemas.JobPage:
    """List jobs, newest first."""
    found = here.store.page(wanted, limit + 1, _decoded(cursor) if cursor else None)
    items = [job_answer(job) for job in found[:limit]]
    return schemas.JobPage(items=items, next_cursor=_encoded(items[-1].id) if len(found) > limit else None)


@router.get("/{job_id}")
def job(job_id: str, here: Here) -> schemas.Job:
    """Show one job."""
    return job_answer(here.store.get(job_id))


@router.post("/{job_id}:cancel", status_code=202, responses={200: {"model": schemas.Job}})
def cancel(job_id: str, here: Here, response: Response) -> schemas.Job:
    """Ask for a job's end. On one that has ended already this changes nothing."""
    told = job_answer(here.store.cancel(job_id))
    here.runner.wake()
    if told.is_terminal:
        response.status_code = 200
    return told


@router.post("/{job_id}:retry")
def retry(job_id: str, here: Here) -> schemas.Job:
    """Queue a failed or cancelled job again; finished files at the destination are kept."""
    told = job_answer(here.store.retry(job_id))
    here.runner.wake()
    return told


@router.get("/{job_id}/plan")
def job_plan(job_id: str, here: Here) -> schemas.PlanAnswer:
    """Show what the conversion does."""
    found = here.store.get(job_id)
    if found.plan is None:
        detail = f"job {job_id} has no plan yet: it is {found.state}"
        raise Problem("not-found", detail, hint="Ask again when it is running, or use dry_run.")
    return schemas.PlanAnswer(job_id=job_id, plan=found.plan)


def _encoded(job_id: str) -> str:
    return base64.urlsafe_b64encode(job_id.encode()).decode()


def _decoded(cursor: str) -> str:
    try:
        job_id = base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        job_id = ""
    if not is_job_id(job_id):
        fault = {"parameter": "cursor", "detail": "not a cursor"}
        hint = "Use next_cursor of the page before as it is."
        raise Problem("validation", "cursor: not a cursor of this list", hint=hint, errors=[fault])
    return job_id
