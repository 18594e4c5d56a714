"""``/v1/jobs/{id}/events`` and ``/v1/events``: what happens, as JSON pages or as streams for who accepts them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.sse import EventSourceResponse, format_sse_event
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from service.access.principals import Principal
from service.api.batches import batch_answer
from service.api.context import PROBLEMS, Context, Here, Reader, spelled_job
from service.api.jobs import job_filter
from service.batches.store import BatchStore
from service.errors import Problem
from service.jobs import schemas
from service.jobs.changes import LOOK_AGAIN_S, LOOK_BACK, Change, changed_batches
from service.jobs.records import Job, now
from service.jobs.store import JobFilter, fits
from service.refusals import NotFound

router = APIRouter(prefix="/v1", tags=["jobs"], responses=PROBLEMS)

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": still here\n\n"
ASK_AGAIN_S = 5.0
"""How long whoever follows goes on with a token that has ended: as long as other requests do in other replicas."""

PAGE = 500
LONG_AGO = datetime.min.replace(tzinfo=UTC)
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
PAGE_OR_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "A page, or with Accept: text/event-stream a stream"}
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "Events `job` and `batch`, each with one as its data"}
}
EVENT_STREAM = "text/event-stream"
Accept = Annotated[str, Header(include_in_schema=False)]
LastEventId = Annotated[str, Header(max_length=40, description="Resume a stream after this event.")]


@router.get("/jobs/{job_id}/events", response_model=schemas.EventPage, responses=PAGE_OR_STREAM)
async def events(
    job_id: str,
    here: Here,
    caller: Reader,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    accept: Accept = "",
    last_event_id: LastEventId = "",
) -> Any:
    """Show what happened to a job, from an event on."""
    if EVENT_STREAM not in accept:
        _, found = await run_in_threadpool(here.store.events, job_id, after, PAGE, caller.only_owner)
        items = [schemas.Event.model_validate(event) for event in found]
        return schemas.EventPage(items=items, next_after=items[-1].seq if items else after)
    # A problem is still an answer now, in the stream it isn't.
    await run_in_threadpool(here.store.get, job_id, caller.only_owner)
    after = int(last_event_id) if re.fullmatch("[0-9]{1,9}", last_event_id) else after
    return _streamed(_events_of(here, _Admission(here, caller), job_id, after))


@router.get("/events", responses=STREAM, response_class=Response)
async def stream(
    here: Here,
    caller: Reader,
    query: Annotated[schemas.StreamQuery, Query()],
    accept: Accept = "",
    last_event_id: LastEventId = "",
) -> Any:
    """Follow all jobs that fit, and their batches, in one stream: each as it is whenever it changes.

    Jobs that are named by id are told at first, too, and batches are left out then.
    """
    if EVENT_STREAM not in accept:  # by which the gate knows streams as well, of which a token may have so many
        raise Problem("not-acceptable", "this is a stream of events", hint=f"Send the header Accept: {EVENT_STREAM}.")
    named = [await run_in_threadpool(here.store.get, job_id, caller.only_owner) for job_id in query.job_id]
    snapshots = _Snapshots(here, job_filter(query, caller.only_owner), frozenset(query.job_id))
    return _streamed(snapshots.follow(_Admission(here, caller), _moment(last_event_id), named))


def _streamed(content: AsyncIterator[bytes]) -> Response:
    return EventSourceResponse(content, headers=STREAM_HEADERS)


class _Calm:
    """Says when a stream was silent for so long that proxies may take it for dead."""

    def __init__(self) -> None:
        self.spoke()

    def spoke(self) -> None:
        self._at = time.monotonic()

    @property
    def left_s(self) -> float:
        return max(self._at + KEEP_ALIVE_S - time.monotonic(), 0.0)


class _Admission:
    """Says whether a stream may go on: not when the service stops, nor for long when the caller's token has ended."""

    def __init__(self, here: Context, caller: Principal) -> None:
        self._here = here
        self._caller = caller
        self._asked = time.monotonic()

    async def lasts(self) -> bool:
        if self._here.changes.closed:
            return False
        if time.monotonic() - self._asked < ASK_AGAIN_S:
            return True
        self._asked = time.monotonic()
        return await self._here.guard.still_knows(self._caller)


async def _events_of(here: Context, admission: _Admission, job_id: str, after: int) -> AsyncIterator[bytes]:
    """Events as they come, until the job has ended or the service does.

    The job is read before its events, so that one that has ended has none that was not seen. Where the database is
    away the stream ends: the client comes again with ``Last-Event-ID``.
    """
    calm = _Calm()
    gone = suppress(SQLAlchemyError, NotFound)
    with here.changes.listening(lambda change: change.id == job_id) as listener, gone:
        while await admission.lasts():
            job, found = await run_in_threadpool(here.store.events, job_id, after, PAGE)
            for event in found:
                after = event.seq
                told = schemas.Event.model_validate(event)
                yield format_sse_event(data_str=told.model_dump_json(), event=event.type, id=str(event.seq))
                calm.spoke()
            if found:
                continue
            if job.is_terminal:
                return
            if not calm.left_s:
                yield KEEP_ALIVE
                calm.spoke()
            await listener.wait(min(calm.left_s, ASK_AGAIN_S, LOOK_AGAIN_S))


class _Snapshots:
    """Jobs as they are, one stream of them: first what changed since a time, then what changes."""

    def __init__(self, here: Context, wanted: JobFilter, ids: frozenset[str]) -> None:
        self._here = here
        self._ids = ids
        self._states = frozenset(wanted.states)
        # Without states, which a job may just have left: whoever follows those that run has to hear of their end.
        self._anywhere = replace(wanted, states=())

    def wants(self, change: Change) -> bool:
        """Whether a change is told here; one of a job whose state before is not known is."""
        job, states = change.job, self._states
        if job is None:
            return not self._ids and self._hears_of(change.id, change.owner)
        told = not states or change.before is None or not states.isdisjoint((change.before, job.state))
        return told and self._fits(job)

    def _hears_of(self, batch_id: str, owner: str) -> bool:
        wanted = self._anywhere
        return wanted.owner in (None, owner) and wanted.batch_id in (None, batch_id)

    def _fits(self, job: Job) -> bool:
        return (not self._ids or job.id in self._ids) and fits(job, self._anywhere)

    async def follow(self, admission: _Admission, since: datetime, named: list[Job]) -> AsyncIterator[bytes]:
        """The stream; it ends with the service, and where the database is away: clients come again."""
        for job in named:
            yield _event(spelled_job(job), since)
        calm = _Calm()
        sent: dict[str, datetime] = {}
        # As it begins a stream tells the last seconds, too: who lists jobs and then listens misses nothing.
        behind = True
        with self._here.changes.listening(self.wants) as listener, suppress(SQLAlchemyError):
            while await admission.lasts():
                if behind:
                    listener.restart()
                    began = now()
                    async for told in self._missed(since, sent):
                        yield told
                        calm.spoke()
                    since = began
                for change in await listener.wait(min(calm.left_s, ASK_AGAIN_S)):
                    since = change.since
                    if change.job is None:
                        yield _event(change.text, since, "batch")
                    elif change.job.updated_at > sent.pop(change.id, LONG_AGO):
                        yield _event(change.text, since)
                    calm.spoke()
                behind = listener.lags
                if not calm.left_s:
                    yield KEEP_ALIVE
                    calm.spoke()

    async def _missed(self, since: datetime, sent: dict[str, datetime]) -> AsyncIterator[bytes]:
        """What changed since a time, from the database; ``sent`` is then what the feed may tell of a second time."""
        recent = now() - LOOK_BACK
        sent.clear()
        of_batches = set()
        async for job, text in self._changed(since):
            if job.updated_at >= recent:
                sent[job.id] = job.updated_at
            if job.batch_id is not None:
                of_batches.add(job.batch_id)
            yield _event(text, job.updated_at)
        async for text in self._changed_batches(since, of_batches):
            yield _event(text, since, "batch")

    async def _changed(self, since: datetime) -> AsyncIterator[tuple[Job, str]]:
        """Jobs that changed since a time or shortly before, in pages, as fast as they are taken; with their JSON."""
        since, after = since - LOOK_BACK, ""
        while True:
            found = await run_in_threadpool(self._page, since, after)
            for job, text in found:
                if text:
                    yield job, text
            if len(found) < PAGE:
                return
            since, after = found[-1][0].updated_at, found[-1][0].id

    def _page(self, since: datetime, after: str) -> list[tuple[Job, str]]:
        """Spelled here, in a thread: of hundreds of jobs with all their files that takes its time."""
        found = self._here.store.changed(self._anywhere, since, PAGE, after)
        return [(job, spelled_job(job) if self._fits(job) else "") for job in found]

    async def _changed_batches(self, since: datetime, others: set[str]) -> AsyncIterator[str]:
        """Batches that changed since a time or shortly before, and others of which a job did."""
        if self._ids:
            return
        here = self._here
        found = await run_in_threadpool(changed_batches, here.database, since - LOOK_BACK, self._anywhere.owner)
        for batch_id in sorted({*found, *others}):
            told = await run_in_threadpool(told_batch, here.batches, batch_id)
            if told is not None and self._hears_of(batch_id, told[0]):
                yield told[1]


def told_batch(store: BatchStore, batch_id: str) -> tuple[str, str] | None:
    """A batch's owner and its JSON; None when it is gone."""
    try:
        batch = store.get(batch_id)
    except NotFound:
        return None
    return batch.owner, batch_answer(batch).model_dump_json()


def _event(text: str, since: datetime, kind: str = "job") -> bytes:
    """A job or batch, and the time to come back with: all that changed before has been told."""
    return format_sse_event(data_str=text, event=kind, id=str(int(since.timestamp() * 1000)))


def _moment(event_id: str) -> datetime:
    """The time that an event's id stands for; now, where it is none."""
    if not re.fullmatch("[0-9]{1,13}", event_id):
        return now()
    return min(datetime.fromtimestamp(int(event_id) / 1000, UTC), now())
