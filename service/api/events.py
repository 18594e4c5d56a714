"""``/v1/jobs/{id}/events``: as JSON pages, or as a stream for who accepts one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from service import schemas
from service.api.context import PROBLEMS, Context, Here, Reader

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=PROBLEMS)

STREAM_POLL_S = 0.3
KEEP_ALIVE_S = 15.0
PAGE = 500
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "A page, or with Accept: text/event-stream a stream"}
}


@router.get("/{job_id}/events", response_model=schemas.EventPage, responses=STREAM)
async def events(
    job_id: str,
    here: Here,
    caller: Reader,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[str, Header(description="Resume a stream after this event.")] = "",
) -> Any:
    """Show what happened to a job, from an event on."""
    if "text/event-stream" not in accept:
        _, found = await run_in_threadpool(here.store.events, job_id, after, PAGE, caller.only_owner)
        items = [schemas.Event.model_validate(event) for event in found]
        return schemas.EventPage(items=items, next_after=items[-1].seq if items else after)
    await run_in_threadpool(
        here.store.get, job_id, caller.only_owner
    )  # a problem is still an answer now, in the stream it isn't
    after = int(last_event_id) if re.fullmatch("[0-9]{1,9}", last_event_id) else after
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    response: Response = EventSourceResponse(_stream(here, job_id, after), headers=headers)
    return response


async def _stream(here: Context, job_id: str, after: int) -> AsyncIterator[bytes]:
    """Events as they come, until the job has ended or the service does; a comment now and then keeps proxies calm."""
    quiet_s = 0.0
    while not here.runner.stopping:
        job, found = await run_in_threadpool(here.store.events, job_id, after, PAGE)
        for event in found:
            after = event.seq
            told = schemas.Event.model_validate(event)
            yield format_sse_event(data_str=told.model_dump_json(), event=event.type, id=str(event.seq))
        if job.is_terminal and not found:
            return
        quiet_s = 0.0 if found else quiet_s + STREAM_POLL_S
        if quiet_s >= KEEP_ALIVE_S:
            quiet_s = 0.0
            yield b": still here\n\n"
        await asyncio.sleep(STREAM_POLL_S)
