"""The client for programs that run on asyncio; ``service.client`` has it beside the one for threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Self, cast

import httpx

from service import calls
from service.answers import Batch, BatchItem, Event, Job, JobAttempt, Shard, Tensor, Watch, WatchItem
from service.calls import TERMINAL_STATES, ApiError, Call, JsonObject, Options, Unreachable, path_of


class AsyncClient:
    """The same for programs that run on asyncio: every method is awaited, every list iterated with ``async for``."""

    def __init__(self, base_url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        try:
            self._http = httpx.AsyncClient(**calls.settings(base_url, token, timeout_s))
        except (httpx.InvalidURL, ValueError):
            raise calls.no_address(base_url) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    async def submit(
        self,
        source: str,
        destination: str,
        options: Options = None,
        *,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        **how: Any,
    ) -> Job:
        """Hand a job in; see ``Client.submit``."""
        return cast("Job", await self.send(calls.submit((source, destination), options, labels, idempotency_key, how)))

    async def preview(self, source: str, destination: str, options: Options = None) -> JsonObject:
        """The plan's summary of a job that is not handed in."""
        return dict((await self.send(calls.preview(source, destination, options)))["plan"])

    async def job(self, job_id: str, *, wait: str | None = None) -> Job:
        """A job as it is now; with ``wait`` ("30s"), as soon as its state changes."""
        return cast("Job", await self.send(calls.of_job(job_id, wait=wait)))

    async def jobs(self, *, limit: int = 50, **wanted: Any) -> list[Job]:
        """The latest jobs, newest first; see ``Client.jobs``."""
        return list((await self.send(calls.jobs(limit, **wanted)))["items"])

    def all_jobs(self, **wanted: Any) -> AsyncIterator[Job]:
        """All jobs, newest first, page by page."""
        return self.pages(calls.jobs(200, **wanted))

    async def change(self, job_id: str, **values: Any) -> Job:
        """Give a job another ``priority`` or other ``labels``."""
        return cast("Job", await self.send(Call("PATCH", path_of("jobs", job_id), body=values)))

    async def cancel(self, job_id: str) -> Job:
        """Ask for a job's end; the job as it is then."""
        return cast("Job", await self.send(calls.do(path_of("jobs", job_id), "cancel")))

    async def retry(self, job_id: str, *, from_scratch: bool = False) -> Job:
        """Queue a failed or cancelled job again."""
        body = {"from_scratch": from_scratch}
        return cast("Job", await self.send(calls.do(path_of("jobs", job_id), "retry", body)))

    async def delete(self, job_id: str) -> None:
        """Forget a job that has ended."""
        await self.send(Call("DELETE", path_of("jobs", job_id)))

    async def plan(self, job_id: str) -> JsonObject:
        """The summary of a job's plan."""
        return dict((await self.send(calls.of_job(job_id, "plan")))["plan"])

    async def report(self, job_id: str) -> JsonObject:
        """The manifest of a job's result."""
        return await self.send(calls.of_job(job_id, "report"))

    async def attempts(self, job_id: str) -> list[JobAttempt]:
        """The attempts at a job."""
        return list((await self.send(calls.of_job(job_id, "attempts")))["items"])

    def shards(self, job_id: str) -> AsyncIterator[Shard]:
        """The output files of a job."""
        return self.pages(calls.of_job(job_id, "shards", limit=200))

    def tensors(self, job_id: str, *, name: str | None = None) -> AsyncIterator[Tensor]:
        """The tensors of a job's result; ``name`` is a part of their names."""
        return self.pages(calls.of_job(job_id, "tensors", limit=200, name=name))

    async def events(self, job_id: str, *, after: int = 0) -> list[Event]:
        """A page of a job's events after a number."""
        return list((await self.send(calls.of_job(job_id, "events", after=after)))["items"])

    async def follow(self, job_id: str, *, after: int = 0) -> AsyncIterator[Event]:
        """A job's events as they come, to its end. Outlasts a service that restarts meanwhile."""
        patience = calls.Patience(f"job {job_id}")
        while True:
            try:
                async for event in self._stream(job_id, after):
                    patience.heard()
                    after = event["seq"]
                    yield event
                # It ends with the job, and with the service or its database: then it goes on where it was.
                has_ended = (await self.job(job_id))["state"] in TERMINAL_STATES
                patience.heard()
                while has_ended and (rest := await self.events(job_id, after=after)):
                    for event in rest:
                        after = event["seq"]
                        yield event
                if has_ended:
                    return
                await asyncio.sleep(calls.POLL_S)
            except (Unreachable, ApiError) as error:
                await asyncio.sleep(patience.pause_s(error))

    async def _stream(self, job_id: str, after: int) -> AsyncIterator[Event]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(self._timeout_s, read=max(self._timeout_s, calls.SILENCE_S))
        try:
            async with self._http.stream(
                "GET", path_of("jobs", job_id, "events"), headers=headers, timeout=timeout
            ) as response:
                if response.is_error:
                    await response.aread()
                    raise calls.error_of(response)
                async for line in response.aiter_lines():
                    for told in calls.data_lines([line]):
                        yield cast("Event", told)
        except httpx.TransportError as error:
            raise calls.unreachable(self._base_url, error) from None

    async def formats(self) -> JsonObject:
        """What can be read and written."""
        return await self.send(Call("GET", "/v1/formats"))

    async def workers(self) -> JsonObject:
        """The cluster and what its workers do."""
        return await self.send(Call("GET", "/v1/workers"))

    async def inspect(self, source: str, options: Options = None, *, tensor: str | None = None) -> JsonObject:
        """What lies at a source, and where the pieces of one tensor do."""
        return await self.send(calls.inspect(source, options, tensor))

    async def create(
        self, kind: str, body: Mapping[str, Any], *, idempotency_key: str | None = None, **how: Any
    ) -> JsonObject:
        """Make a resource of a kind; see ``Client.create``."""
        return await self.send(calls.create(kind, body, idempotency_key, **how))

    async def batch(self, batch_id: str) -> Batch:
        """A batch and how far it is."""
        return cast("Batch", await self.get(path_of("batches", batch_id)))

    def batch_items(self, batch_id: str) -> AsyncIterator[BatchItem]:
        """What a batch asked for, and what became of each."""
        return self.pages(Call("GET", path_of("batches", batch_id, "items"), {"limit": 200}))

    async def watch(self, watch_id: str) -> Watch:
        """A watch and what it has seen, in numbers."""
        return cast("Watch", await self.get(path_of("watches", watch_id)))

    def watch_items(self, watch_id: str) -> AsyncIterator[WatchItem]:
        """The folders that a watch has seen."""
        return self.pages(Call("GET", path_of("watches", watch_id, "items"), {"limit": 200}))

    async def get(self, path: str, **params: Any) -> JsonObject:
        """Read any resource, such as ``/v1/batches/{id}``."""
        return await self.send(Call("GET", path, params))

    async def do(self, path: str, verb: str, body: Any = None) -> JsonObject:
        """Have something done to any resource: ``do(f"/v1/batches/{id}", "cancel")``."""
        return await self.send(calls.do(path, verb, body))

    async def ready(self) -> bool:
        """Whether the service answers and can do its work."""
        try:
            return (await self._http.get("/readyz")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def wait(
        self, job_id: str, *, timeout_s: float | None = None, seen: Callable[[Job], None] | None = None
    ) -> Job:
        """A job when it has ended; see ``Client.wait``."""
        patience = calls.Patience(f"job {job_id}", timeout_s)
        while True:
            try:
                job = await self.job(job_id, wait=None if seen else patience.held())
            except (Unreachable, ApiError) as error:
                await asyncio.sleep(patience.pause_s(error))
                continue
            patience.heard()
            if seen is not None:
                seen(job)
            if job["state"] in TERMINAL_STATES:
                return job
            left_s = patience.left_s(f"it is {job['state']}")
            if seen is not None:
                await asyncio.sleep(min(calls.POLL_S, left_s))

    async def send(self, call: Call) -> JsonObject:
        """Send any request of the API."""
        try:
            response = await self._http.request(**call.arguments(), timeout=self._timeout_s + call.held_s)
        except httpx.TransportError as error:
            raise calls.unreachable(self._base_url, error) from None
        return calls.answer_of(response, self._base_url)

    async def pages(self, call: Call) -> AsyncIterator[Any]:
        """The items of any list, page by page."""
        while True:
            page = await self.send(call)
            for item in page["items"]:
                yield item
            if page.get("next_cursor") is None:
                return
            call = call.at(page["next_cursor"])
