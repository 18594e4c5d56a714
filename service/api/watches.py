"""``/v1/watches``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from service.api.context import PROBLEMS, BatchWriter, Context, Here, Reader
from service.api.paging import cut, decoded
from service.api.replays import IdempotencyKey, created
from service.batches.naming import Found, Pattern, Template
from service.errors import Problem
from service.jobs.keys import Replay, RequestKey, Submission
from service.jobs.records import JsonObject
from service.jobs.submit import read_options
from service.watches import schemas
from service.watches.records import ITEM, NewWatch, Watch

router = APIRouter(prefix="/v1/watches", tags=["watches"], responses=PROBLEMS)


@router.post("", status_code=201, response_model=schemas.Watch)
def create_watch(request: schemas.WatchRequest, here: Here, caller: BatchWriter, key: IdempotencyKey = None) -> Any:
    """Watch a prefix: each checkpoint that appears below it becomes a job once it is whole."""
    _check_interval(request.interval_s, here)
    prefix = _checked(request.prefix, request.pattern, request.template, here)
    new = NewWatch(
        caller.id,
        request.name,
        prefix,
        request.pattern,
        request.template.model_dump(mode="json"),
        request.interval_s,
    )
    once = RequestKey.of(caller.id, key, ["watches", request.model_dump(mode="json")]) if key else None
    made = here.watches.create(new, Submission(once, _spelled))
    return created("watches", made if isinstance(made, Replay) else _spelled(made))


def _spelled(watch: Watch) -> JsonObject:
    return _answer(watch).model_dump(mode="json")


def _checked(prefix: str, pattern: str, template: schemas.WatchTemplate, here: Context) -> str:
    """The canonical prefix; what would refuse every checkpoint is refused now."""
    places = Pattern.parse(pattern)
    options = read_options(template.options, ("template", "options"))
    prefix = here.places.check_source(prefix, options)
    destination = Template.parse(template.destination)
    destination.require_distinct()
    example = Found(f"{prefix}/step_1", ("step_1",) * (places.named + 1), "run")
    here.places.destinations.check(destination.destination(example))
    return prefix


def _check_interval(interval_s: float, here: Context) -> None:
    least = here.settings.min_watch_interval_s
    if interval_s < least:
        detail = f"interval_s: a watch is looked at every {least:g} s at most"
        fault = {"pointer": "/interval_s", "detail": detail}
        raise Problem("validation", detail, hint="Ask for a longer interval.", errors=[fault])


def _answer(watch: Watch) -> schemas.Watch:
    told = schemas.Watch.model_validate(watch)
    here = f"/v1/watches/{told.id}"
    links = {"self": here, "items": f"{here}/items", "jobs": f"/v1/jobs?watch_id={told.id}"}
    if told.state == "active":
        links["look"] = f"{here}:look"
    return told.model_copy(update={"links": links})


@router.get("")
def watches(here: Here, caller: Reader, query: Annotated[schemas.WatchQuery, Query()]) -> schemas.WatchPage:
    """List watches, newest first."""
    before = decoded(query.cursor, "watch")
    items, following = cut(here.watches.page(query.limit + 1, before, query.state, caller.only_owner), query.limit)
    return schemas.WatchPage(items=[_answer(watch) for watch in items], next_cursor=following)


@router.get("/{watch_id}")
def watch(watch_id: str, here: Here, caller: Reader) -> schemas.Watch:
    """Show a watch."""
    return _answer(here.watches.get(watch_id, caller.only_owner))


@router.get("/{watch_id}/items")
def watch_items(
    watch_id: str, here: Here, caller: Reader, query: Annotated[schemas.WatchItemQuery, Query()]
) -> schemas.WatchItemPage:
    """List the folders that were seen, and what became of each or what it waits for."""
    after = decoded(query.cursor, ITEM)
    found = here.watches.items(watch_id, after, query.limit + 1, query.state, caller.only_owner)
    items, following = cut(found, query.limit)
    told = [schemas.WatchItem.model_validate(item) for item in items]
    return schemas.WatchItemPage(items=told, next_cursor=following)


@router.patch("/{watch_id}")
def change_watch(watch_id: str, change: schemas.WatchChange, here: Here, caller: BatchWriter) -> schemas.Watch:
    """Pause or resume a watch, or change its name, interval or template."""
    values = {name: getattr(change, name) for name in change.model_fields_set}
    if "interval_s" in values:
        _check_interval(change.interval_s, here)
    if change.template is not None:
        before = here.watches.get(watch_id, caller.only_owner)
        _checked(before.prefix, before.pattern, change.template, here)
        values["template"] = change.template.model_dump(mode="json")
    elif "template" in values:
        fault = {"pointer": "/template", "detail": "a watch needs a template"}
        raise Problem("validation", "/template: a watch needs a template", hint="Leave it out.", errors=[fault])
    return _answer(here.watches.change(watch_id, values, caller.only_owner))


@router.delete("/{watch_id}", status_code=204)
def delete_watch(watch_id: str, here: Here, caller: BatchWriter) -> None:
    """Stop watching. What became jobs goes on."""
    here.watches.delete(watch_id, caller.only_owner)


@router.post("/{watch_id}:look", status_code=202)
def look_now(watch_id: str, here: Here, caller: BatchWriter) -> schemas.Watch:
    """Look at once, and judge anew what waits. Files must still have been at rest for a while."""
    return _answer(here.watches.look_now(watch_id, caller.only_owner))
