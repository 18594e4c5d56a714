"""``/v1/jobs/{id}/…``: what a job consists of: plan, tensors, shards, attempts, report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query

from service.api.context import PROBLEMS, Context, Here, Reader
from service.api.paging import decoded_number, encoded
from service.errors import Problem
from service.jobs import schemas
from service.jobs.parts import REPORT, TENSORS, unpack, unpack_rows
from service.jobs.records import Job
from service.schemas import PageQuery

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)


@router.get("/{job_id}/plan")
def job_plan(job_id: str, here: Here, caller: Reader) -> schemas.PlanAnswer:
    """Show what the conversion does."""
    job = here.store.get(job_id, caller.only_owner)
    if job.plan is None:
        raise _not_yet(job, "plan")
    return schemas.PlanAnswer(job_id=job_id, plan=job.plan)


@router.get("/{job_id}/report")
def job_report(job_id: str, here: Here, caller: Reader) -> dict[str, Any]:
    """Show the manifest of the finished model: sources, options, versions, and the digest of every file and part."""
    job = here.store.get(job_id, caller.only_owner)
    content = here.parts.document(job_id, REPORT)
    if content is None:
        raise _not_yet(job, "report")
    return dict(unpack(content))


@router.get("/{job_id}/attempts")
def job_attempts(job_id: str, here: Here, caller: Reader) -> schemas.AttemptList:
    """List the attempts at a job."""
    here.store.get(job_id, caller.only_owner)
    items = [schemas.JobAttempt.model_validate(attempt) for attempt in here.parts.attempts(job_id)]
    return schemas.AttemptList(items=items)


@router.get("/{job_id}/shards")
def job_shards(job_id: str, here: Here, caller: Reader, query: Annotated[PageQuery, Query()]) -> schemas.ShardPage:
    """List the output files, and which of them are done."""
    here.store.get(job_id, caller.only_owner)
    found = here.parts.shards(job_id, decoded_number(query.cursor), query.limit + 1)
    items = [schemas.Shard.model_validate(shard) for shard in found[: query.limit]]
    following = encoded(str(items[-1].position)) if len(found) > query.limit else None
    return schemas.ShardPage(items=items, next_cursor=following)


@router.get("/{job_id}/tensors")
def job_tensors(
    job_id: str, here: Here, caller: Reader, query: Annotated[schemas.TensorQuery, Query()]
) -> schemas.TensorPage:
    """List the tensors of the result, with what each is made of."""
    job = here.store.get(job_id, caller.only_owner)
    content = here.parts.document(job_id, TENSORS)
    if content is None:
        raise _not_yet(job, "plan")
    done = _done_files(here, job_id)
    after = decoded_number(query.cursor)
    matching = _matching(content, query)
    items: list[schemas.Tensor] = []
    total = 0
    for position, row in matching:
        total += 1
        if position > after and len(items) <= query.limit:
            state = "done" if row["file"] in done else "pending"
            items.append(schemas.Tensor(position=position, state=state, **row))
    page = items[: query.limit]
    following = encoded(str(page[-1].position)) if len(items) > query.limit else None
    return schemas.TensorPage(items=page, total=total, next_cursor=following)


def _matching(content: bytes, query: schemas.TensorQuery) -> Iterator[tuple[int, dict[str, Any]]]:
    wanted = query.name.lower() if query.name else None
    for position, row in enumerate(unpack_rows(content)):
        if query.file is not None and row["file"] != query.file:
            continue
        if wanted is None or wanted in row["name"].lower():
            yield position, row


def _done_files(here: Context, job_id: str) -> set[str]:
    done: set[str] = set()
    after = -1
    while found := here.parts.shards(job_id, after, SHARDS_AT_A_TIME):
        done |= {shard.path for shard in found if shard.state == "done"}
        after = found[-1].position
    return done


SHARDS_AT_A_TIME = 1000


def _not_yet(job: Job, what: str) -> Problem:
    if job.is_terminal:
        return Problem("not-found", f"job {job.id} is {job.state} and has no {what}", hint="See its error and events.")
    hint = "Ask again when it has one: GET /v1/jobs/{id}/events tells when."
    return Problem("not-found", f"job {job.id} has no {what} yet: it is {job.state}", hint=hint)
