"""``/v1/jobs``."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from service.api.context import PROBLEMS, Context, Here, Reader, Writer, job_answer
from service.api.paging import cut, decoded
from service.api.replays import IdempotencyKey, created
from service.api.waiting import IfNoneMatch, Wait, etag, seconds, until
from service.jobs import schemas
from service.jobs.keys import Replay, RequestKey, Submission
from service.jobs.records import Job, JsonObject, NewJob
from service.jobs.store import JobFilter
from service.jobs.submit import checked
from service.refusals import NotFound
from workers.options import ConvertOptions

DEFAULT_RETRY = schemas.RetryRequest()
router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)


@router.post(
    "",
    status_code=201,
    response_model=schemas.Job,
    responses={
        200: {"model": schemas.Job | schemas.PlanAnswer, "description": "A dry run's plan, or the job that did this"}
    },
)
async def submit(
    request: schemas.JobRequest,
    here: Here,
    caller: Writer,
    how: Annotated[schemas.SubmitQuery, Query()],
    key: IdempotencyKey = None,
) -> Response:
    """Hand a conversion in."""
    asked = NewJob(**request.model_dump(), owner=caller.id)
    new, options = await run_in_threadpool(checked, asked, here.places)
    if how.dry_run:
        summary = await run_in_threadpool(here.planner.preview, new.source, new.destination, options)
        return JSONResponse(schemas.PlanAnswer(plan=summary).model_dump(exclude_none=True))
    if how.if_done == "return" and (done := await run_in_threadpool(_done_before, here, new, options)) is not None:
        return JSONResponse(_spelled(done), headers={"Location": f"/v1/jobs/{done.id}"})
    once = RequestKey.of(caller.id, key, ["jobs", request.model_dump(mode="json")]) if key is not None else None
    made = await run_in_threadpool(here.store.create, new, Submission(once, _spelled, caller.max_queued))
    here.runner.wake()
    if how.wait:
        job_id = made.resource_id if isinstance(made, Replay) else made.id
        with suppress(NotFound):  # forgotten since the key was answered first, or while this waits for its end
            ended = await until(here, job_id, lambda job: job.is_terminal, seconds(how.wait))
            made = dataclasses.replace(made, answer=_spelled(ended)) if isinstance(made, Replay) else ended
    return created("jobs", made if isinstance(made, Replay) else _spelled(made))


def _done_before(here: Context, new: NewJob, options: ConvertOptions) -> Job | None:
    """The job that did this already: the source is what it was then, and the result is whole where it was put."""
    done = here.store.finished_equal(new)
    if done is None or done.plan is None:
        return None
    made = here.planner.made(new.source, new.destination, options)
    return done if made is not None and made == done.plan.get("fingerprint") else None


def _spelled(job: Job) -> JsonObject:
    return job_answer(job).model_dump(mode="json")


@router.get("")
def jobs(here: Here, caller: Reader, query: Annotated[schemas.JobQuery, Query()]) -> schemas.JobPage:
    """List jobs, newest first."""
    found = here.store.page(job_filter(query, caller.only_owner), query.limit + 1, decoded(query.cursor, "job"))
    items, following = cut(found, query.limit)
    return schemas.JobPage(items=[job_answer(job) for job in items], next_cursor=following)


def job_filter(query: schemas.JobChoice, owner: str | None) -> JobFilter:
    """The filter that a query spells."""
    given = query.model_dump(exclude={"state", "label", "limit", "cursor", "job_id"})
    labels = dict(label.split(":", 1) for label in query.label)
    return JobFilter(owner=owner, states=tuple(query.state), labels=labels, **given)


@router.get("/{job_id}", response_model=schemas.Job, responses={304: {"description": "Not changed since that ETag"}})
async def job(
    job_id: str, here: Here, caller: Reader, wait: Wait = None, known: Annotated[str | None, IfNoneMatch] = None
) -> Response:
    """Show one job. With ``wait``, answer when its state changes or the time is over."""
    found = await run_in_threadpool(here.store.get, job_id, caller.only_owner)
    if wait is not None and not found.is_terminal:
        found = await until(here, job_id, lambda job: job.state != found.state, seconds(wait))
    tag = etag(found)
    if known is not None and tag in (given.strip() for given in known.split(",")):
        return Response(status_code=304, headers={"ETag": tag})
    return JSONResponse(_spelled(found), headers={"ETag": tag})


@router.patch("/{job_id}")
def change(job_id: str, request: schemas.JobChange, here: Here, caller: Writer) -> schemas.Job:
    """Give a job another priority or other labels."""
    changed = here.store.change(job_id, priority=request.priority, labels=request.labels, owner=caller.only_owner)
    return job_answer(changed)


@router.delete("/{job_id}", status_code=204)
def delete(job_id: str, here: Here, caller: Writer) -> None:
    """Forget a job that has ended. Its result stays where it is; what an unfinished attempt left there goes."""
    job = here.store.get(job_id, caller.only_owner)
    here.store.delete(job_id, caller.only_owner)
    here.janitor.clear_after(job)


@router.post("/{job_id}:cancel", status_code=202, responses={200: {"model": schemas.Job}})
def cancel(job_id: str, here: Here, caller: Writer, response: Response) -> schemas.Job:
    """Ask for a job's end. On one that has ended already this changes nothing."""
    told = job_answer(here.store.cancel(job_id, caller.only_owner))
    here.runner.wake()
    if told.is_terminal:
        response.status_code = 200
    return told


@router.post("/{job_id}:retry")
def retry(job_id: str, here: Here, caller: Writer, request: schemas.RetryRequest = DEFAULT_RETRY) -> schemas.Job:
    """Queue a failed or cancelled job again; files that an earlier attempt finished are kept, unless from scratch."""
    queued = here.store.retry(
        job_id, caller.only_owner, from_scratch=request.from_scratch, max_queued=caller.max_queued
    )
    told = job_answer(queued)
    here.runner.wake()
    return told
