"""``/v1/batches``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from service.api.context import PROBLEMS, BatchWriter, Context, Here, Reader
from service.api.paging import cut, decoded, decoded_number, encoded
from service.api.replays import IdempotencyKey, created
from service.batches import schemas
from service.batches.discovery import LIMIT_S, discover
from service.batches.drafts import Ask, Draft, Drafter, Shape
from service.batches.naming import Found, Pattern, Template
from service.batches.preview import already_done
from service.batches.records import Batch, NewBatch
from service.batches.store import BatchFilter, ItemsRefused
from service.errors import Problem
from service.jobs.keys import Replay, RequestKey, Submission
from service.jobs.records import JsonObject
from service.jobs.schemas import JobError
from service.jobs.submit import read_options, require_storable
from service.room import Room

router = APIRouter(prefix="/v1/batches", tags=["batches"], responses=PROBLEMS)

DryRun = Annotated[bool, Query(description="Answer with what would be done and store nothing.")]
TEMPLATE_OPTIONS = ("template", "options")
_searches = Room("searches for folders or models run", at_once=4, waiting=4)


@router.post(
    "",
    status_code=201,
    response_model=schemas.Batch,
    responses={200: {"model": schemas.Preview, "description": "What a dry run found"}},
)
def submit_batch(
    request: schemas.BatchRequest,
    here: Here,
    caller: BatchWriter,
    key: IdempotencyKey = None,
    *,
    dry_run: DryRun = False,
) -> Any:
    """Hand many conversions in at once: a list, or all folders that fit a pattern."""
    once = RequestKey.of(caller.id, key, ["batches", request.model_dump(mode="json")]) if key and not dry_run else None
    if once is not None and (earlier := here.batches.answered(once)) is not None:
        return created("batches", earlier)
    drafts = _drafts(request, here, caller.id)
    if dry_run:
        return _plain(_preview(drafts, here))
    new = NewBatch(
        owner=caller.id,
        name=request.name,
        request=request.model_dump(mode="json", include={"discover", "template", "if_done"}),
        labels=request.labels,
        on_item_error=request.on_item_error,
        max_running=request.max_running,
    )
    try:
        made = here.batches.create(new, drafts, Submission(once, _spelled, caller.max_queued))
    except ItemsRefused as refusal:
        raise _refused(refusal) from None
    here.runner.wake()
    return created("batches", made if isinstance(made, Replay) else _spelled(made))


def _drafts(request: schemas.BatchRequest, here: Context, owner: str) -> list[Draft]:
    template = request.template
    require_storable(template.options, TEMPLATE_OPTIONS)
    parsed = Template.parse(template.destination) if template.destination is not None else None
    asks = _asks(request, here)
    if parsed is not None and request.discover is not None and len(asks) > 1:
        parsed.require_any()
    shape = Shape(
        owner, template.destination, template.options, template.labels, template.priority, if_done=request.if_done
    )
    return Drafter(shape, here.places).drafts(asks)


def _asks(request: schemas.BatchRequest, here: Context) -> list[Ask]:
    if request.discover is None:
        items = request.items or []
        return [
            Ask(Found.named(item.source), item.destination, item.options, item.labels, f"/items/{position}")
            for position, item in enumerate(items)
        ]
    pattern = Pattern.parse(request.discover.pattern)
    options = read_options(request.template.options, TEMPLATE_OPTIONS)
    prefix = here.places.check_source(request.discover.prefix, options)
    with _searches.entered(LIMIT_S):
        return [Ask(found) for found in discover(prefix, pattern, options.source_profile)]


def _refused(refusal: ItemsRefused) -> Problem:
    faults = []
    for position, draft in refusal.drafts:
        error = draft.error or {}
        fault = {"detail": error.get("message", ""), "pointer": draft.pointer, "type": error.get("type", "")}
        faults.append({**fault, "position": position, "source": draft.source, "hint": error.get("hint", "")})
    hint = "See errors for each item, or ask for on_item_error: continue to go on without them."
    return Problem("validation", str(refusal), hint=hint, errors=faults)


def _preview(drafts: Sequence[Draft], here: Context) -> schemas.Preview:
    with _searches.entered(LIMIT_S):
        done = already_done(drafts, here.planner)
    items = [
        schemas.PreviewItem(
            position=position,
            source=draft.job.source if draft.job else draft.source,
            destination=draft.job.destination if draft.job else draft.destination,
            done=there,
            error=JobError.model_validate(draft.error) if draft.error else None,
        )
        for position, (draft, there) in enumerate(zip(drafts, done, strict=True))
    ]
    refused = sum(draft.job is None for draft in drafts)
    return schemas.Preview(
        total=len(items), done=done.count(True), unknown=done.count(None), refused=refused, items=items
    )


def batch_answer(batch: Batch) -> schemas.Batch:
    """A batch as it is answered, with the ways to more of it."""
    here = f"/v1/batches/{batch.id}"
    links = {"self": here, "items": f"{here}/items", "jobs": f"/v1/jobs?batch_id={batch.id}"}
    if batch.state == "running":
        links["cancel"] = f"{here}:cancel"
    if batch.tally.counts.failed or batch.tally.counts.cancelled:
        links["retry_failed"] = f"{here}:retry_failed"
    own = ("id", "name", "state", "owner", "labels", "on_item_error", "max_running")
    times = ("created_at", "updated_at", "ended_at")
    return schemas.Batch(
        **{name: getattr(batch, name) for name in (*own, *times)},
        **{name: getattr(batch.tally, name) for name in ("bytes_done", "bytes_total", "bytes_per_s", "eta_s")},
        counts=schemas.Counts.model_validate(batch.tally.counts),
        **batch.request,
        links=links,
    )


def _spelled(batch: Batch) -> JsonObject:
    return batch_answer(batch).model_dump(mode="json")


def _plain(answer: schemas.Preview) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


@router.get("")
def batches(here: Here, caller: Reader, query: Annotated[schemas.BatchQuery, Query()]) -> schemas.BatchPage:
    """List batches, newest first."""
    wanted = BatchFilter(
        caller.only_owner,
        tuple(query.state),
        dict(label.split(":", 1) for label in query.label),
        query.created_after,
        query.created_before,
    )
    found = here.batches.page(wanted, query.limit + 1, decoded(query.cursor, "batch"))
    items, following = cut(found, query.limit)
    return schemas.BatchPage(items=[batch_answer(batch) for batch in items], next_cursor=following)


@router.get("/{batch_id}")
def batch(batch_id: str, here: Here, caller: Reader) -> schemas.Batch:
    """Show a batch and how far it is."""
    return batch_answer(here.batches.get(batch_id, caller.only_owner))


@router.get("/{batch_id}/items")
def batch_items(
    batch_id: str, here: Here, caller: Reader, query: Annotated[schemas.ItemQuery, Query()]
) -> schemas.BatchItemPage:
    """List what the batch asked for, in its order, with what became of it."""
    after = decoded_number(query.cursor)
    found = here.batches.items(batch_id, after, query.limit + 1, query.state, caller.only_owner)
    items = [schemas.BatchItem.model_validate(item) for item in found[: query.limit]]
    following = encoded(str(items[-1].position)) if len(found) > query.limit else None
    return schemas.BatchItemPage(items=items, next_cursor=following)


@router.patch("/{batch_id}")
def change_batch(batch_id: str, change: schemas.BatchChange, here: Here, caller: BatchWriter) -> schemas.Batch:
    """Change a batch's name, labels or cap, or the priority of its jobs that wait."""
    values = {name: getattr(change, name) for name in change.model_fields_set}
    told = batch_answer(here.batches.change(batch_id, values, caller.only_owner))
    here.runner.wake()
    return told


@router.delete("/{batch_id}", status_code=204)
def delete_batch(batch_id: str, here: Here, caller: BatchWriter) -> None:
    """Forget a batch that has ended. Its jobs and their models stay."""
    here.batches.delete(batch_id, caller.only_owner)


@router.post("/{batch_id}:cancel", status_code=202, responses={200: {"model": schemas.Batch}})
def cancel_batch(batch_id: str, here: Here, caller: BatchWriter, response: Response) -> schemas.Batch:
    """Ask for the end of all that is left. On a batch that has ended already this changes nothing."""
    found = here.batches.cancel(batch_id, caller.only_owner)
    here.runner.wake()
    if found.has_ended:
        response.status_code = 200
    return batch_answer(found)


@router.post("/{batch_id}:retry_failed")
def retry_failed(batch_id: str, here: Here, caller: BatchWriter) -> schemas.Retried:
    """Queue all failed and cancelled jobs of a batch again; what their attempts finished is kept."""
    found, requeued, busy = here.batches.retry_failed(batch_id, caller.only_owner, caller.max_queued)
    here.runner.wake()
    refused = [schemas.Busy(job_id=job_id, busy_with=other) for job_id, other in busy.items()]
    return schemas.Retried(batch=batch_answer(found), requeued=requeued, not_requeued=refused)
