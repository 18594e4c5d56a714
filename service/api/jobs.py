"""``/v1/jobs``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from starlette.responses import JSONResponse

from service import schemas
from service.api.context import PROBLEMS, Here, Reader, Writer, job_answer
from service.api.paging import cut, decoded
from service.errors import Problem
from service.jobs.keys import Replay, RequestKey
from service.jobs.records import Job, JsonObject, NewJob
from service.jobs.store import JobFilter, Submission
from service.jobs.submit import checked
from workers.convert import plan

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)

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
    request: schemas.JobRequest, here: Here, caller: Writer, key: Key = None, *, dry_run: DryRun = False
) -> Any:
    """Hand a conversion in."""
    new, options = checked(NewJob(**request.model_dump(), owner=caller.id), here.places)
    if dry_run:
        summary = plan(new.source, new.destination, options).summary()
        return _plain(schemas.PlanAnswer(plan=summary))
    once = RequestKey.of(caller.id, key, ["jobs", request.model_dump(mode="json")]) if key is not None else None
    made = here.store.create(new, Submission(once, _spelled, caller.max_queued))
    here.runner.wake()
    if isinstance(made, Replay):
        return _created(made.answer, {"Idempotency-Replayed": "true"})
    return _created(_spelled(made))


def _spelled(job: Job) -> JsonObject:
    return job_answer(job).model_dump(mode="json")


def _created(answer: JsonObject, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(answer, 201, headers={"Location": f"/v1/jobs/{answer['id']}", **(headers or {})})


def _plain(answer: schemas.PlanAnswer) -> Response:
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


@router.get("")
def jobs(here: Here, caller: Reader, query: Annotated[schemas.JobQuery, Query()]) -> schemas.JobPage:
    """List jobs, newest first."""
    found = here.store.page(job_filter(query, caller.only_owner), query.limit + 1, decoded(query.cursor, "job"))
    items, following = cut(found, query.limit)
    return schemas.JobPage(items=[job_answer(job) for job in items], next_cursor=following)


def job_filter(query: schemas.JobQuery, owner: str | None) -> JobFilter:
    """The filter that a query spells."""
    given = query.model_dump(exclude={"state", "label", "limit", "cursor"})
    labels = dict(label.split(":", 1) for label in query.label)
    return JobFilter(owner=owner, states=tuple(query.state), labels=labels, **given)


@router.get("/{job_id}")
def job(job_id: str, here: Here, caller: Reader) -> schemas.Job:
    """Show one job."""
    return job_answer(here.store.get(job_id, caller.only_owner))


@router.post("/{job_id}:cancel", status_code=202, responses={200: {"model": schemas.Job}})
def cancel(job_id: str, here: Here, caller: Writer, response: Response) -> schemas.Job:
    """Ask for a job's end. On one that has ended already this changes nothing."""
    told = job_answer(here.store.cancel(job_id, caller.only_owner))
    here.runner.wake()
    if told.is_terminal:
        response.status_code = 200
    return told


@router.post("/{job_id}:retry")
def retry(job_id: str, here: Here, caller: Writer) -> schemas.Job:
    """Queue a failed or cancelled job again; finished files at the destination are kept."""
    told = job_answer(here.store.retry(job_id, caller.only_owner))
    here.runner.wake()
    return told


@router.get("/{job_id}/plan")
def job_plan(job_id: str, here: Here, caller: Reader) -> schemas.PlanAnswer:
    """Show what the conversion does."""
    found = here.store.get(job_id, caller.only_owner)
    if found.plan is None:
        detail = f"job {job_id} has no plan yet: it is {found.state}"
        raise Problem("not-found", detail, hint="Ask again when it is running, or use dry_run.")
    return schemas.PlanAnswer(job_id=job_id, plan=found.plan)
