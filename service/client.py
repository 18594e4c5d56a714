"""Clients of the service's REST API, for programs and for our own command line.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit("/data/global_step_100", "s3://models/step-100")
        job = client.wait(job["id"])

``AsyncClient`` has the same methods to be awaited. Answers are the JSON objects of the API (``service.answers`` has
their types). An error of the API is an ``ApiError``, one without an answer an ``Unreachable``; both are
``UnshardError`` and carry a hint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, cast

import httpx

from service import calls
from service.answers import Batch, BatchItem, Event, Job, JobAttempt, Shard, Tensor, Watch, WatchItem
from service.async_client import AsyncClient
from service.calls import TERMINAL_STATES, ApiError, Call, JsonObject, Options, Unreachable, path_of

__all__ = ["TERMINAL_STATES", "ApiError", "AsyncClient", "Client", "JsonObject", "Unreachable"]


class Client:
    """A connection to one service; close it, or use it as a context manager."""

    def __init__(self, base_url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        try:
            self._http = httpx.Client(**calls.settings(base_url, token, timeout_s))
        except (httpx.InvalidURL, ValueError):
            raise calls.no_address(base_url) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def submit(
        self,
        source: str,
        destination: str,
        options: Options = None,
        *,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        **how: Any,
    ) -> Job:
        """Hand a job in. With a key, doing so again (after a lost answer, say) gives the same job.

        ``how``: ``priority``; ``if_done="return"`` for the job that did this already; ``wait="30s"``.
        """
        return cast("Job", self.send(calls.submit((source, destination), options, labels, idempotency_key, how)))

    def preview(self, source: str, destination: str, options: Options = None) -> JsonObject:
        """The plan's summary of a job that is not handed in."""
        return dict(self.send(calls.preview(source, destination, options))["plan"])

    def job(self, job_id: str, *, wait: str | None = None) -> Job:
        """A job as it is now; with ``wait`` ("30s"), as soon as its state changes."""
        return cast("Job", self.send(calls.of_job(job_id, wait=wait)))

    def jobs(self, *, limit: int = 50, **wanted: Any) -> list[Job]:
        """The latest jobs, newest first. ``wanted``: state, labels, batch_id, source_prefix and so on."""
        return list(self.send(calls.jobs(limit, **wanted))["items"])

    def all_jobs(self, **wanted: Any) -> Iterator[Job]:
        """All jobs, newest first, page by page."""
        return self.pages(calls.jobs(200, **wanted))

    def change(self, job_id: str, **values: Any) -> Job:
        """Give a job another ``priority`` or other ``labels``."""
        return cast("Job", self.send(Call("PATCH", path_of("jobs", job_id), body=values)))

    def cancel(self, job_id: str) -> Job:
        """Ask for a job's end; the job as it is then."""
        return cast("Job", self.send(calls.do(path_of("jobs", job_id), "cancel")))

    def retry(self, job_id: str, *, from_scratch: bool = False) -> Job:
        """Queue a failed or cancelled job again."""
        body = {"from_scratch": from_scratch}
        return cast("Job", self.send(calls.do(path_of("jobs", job_id), "retry", body)))

    def delete(self, job_id: str) -> None:
        """Forget a job that has ended."""
        self.send(Call("DELETE", path_of("jobs", job_id)))

    def plan(self, job_id: str) -> JsonObject:
        """The summary of a job's plan."""
        return dict(self.send(calls.of_job(job_id, "plan"))["plan"])

    def report(self, job_id: str) -> JsonObject:
        """The manifest of a job's result."""
        return self.send(calls.of_job(job_id, "report"))

    def attempts(self, job_id: str) -> list[JobAttempt]:
        """The attempts at a job."""
        return list(self.send(calls.of_job(job_id, "attempts"))["items"])

    def shards(self, job_id: str) -> Iterator[Shard]:
        """The output files of a job."""
        return self.pages(calls.of_job(job_id, "shards", limit=200))

    def tensors(self, job_id: str, *, name: str | None = None) -> Iterator[Tensor]:
        """The tensors of a job's result; ``name`` is a part of their names."""
        return self.pages(calls.of_job(job_id, "tensors", limit=200, name=name))

    def events(self, job_id: str, *, after: int = 0) -> list[Event]:
        """A page of a job's events after a number."""
        return list(self.send(calls.of_job(job_id, "events", after=after))["items"])

    def follow(self, job_id: str, *, after: int = 0) -> Iterator[Event]:
        """A job's events as they come, to its end. Outlasts a service that restarts meanwhile."""
        patience = calls.Patience(f"job {job_id}")
        while True:
            try:
                for event in self._stream(job_id, after):
                    patience.heard()
                    after = event["seq"]
                    yield event
                # It ends with the job, and with the service or its database: then it goes on where it was.
                has_ended = self.job(job_id)["state"] in TERMINAL_STATES
                patience.heard()
                while has_ended and (rest := self.events(job_id, after=after)):
                    for event in rest:
                        after = event["seq"]
                        yield event
                if has_ended:
                    return
                time.sleep(calls.POLL_S)
            except (Unreachable, ApiError) as error:
                time.sleep(patience.pause_s(error))

    def _stream(self, job_id: str, after: int) -> Iterator[Event]:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(self._timeout_s, read=max(self._timeout_s, calls.SILENCE_S))
        try:
            with self._http.stream(
                "GET", path_of("jobs", job_id, "events"), headers=headers, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise calls.error_of(response)
                for line in response.iter_lines():
                    for told in calls.data_lines([line]):
                        yield cast("Event", told)
        except httpx.TransportError as error:
            raise calls.unreachable(self._base_url, error) from None

    def formats(self) -> JsonObject:
        """What can be read and written."""
        return self.send(Call("GET", "/v1/formats"))

    def workers(self) -> JsonObject:
        """The cluster and what its workers do."""
        return self.send(Call("GET", "/v1/workers"))

    def inspect(self, source: str, options: Options = None, *, tensor: str | None = None) -> JsonObject:
        """What lies at a source, and where the pieces of one tensor do."""
        return self.send(calls.inspect(source, options, tensor))

    def create(
        self, kind: str, body: Mapping[str, Any], *, idempotency_key: str | None = None, **how: Any
    ) -> JsonObject:
        """Make a resource of a kind: ``batches``, ``watches``, ``webhooks`` or ``tokens``.

        A key counts for the first two. The others are made anew each time, since their secret is told once.
        """
        return self.send(calls.create(kind, body, idempotency_key, **how))

    def batch(self, batch_id: str) -> Batch:
        """A batch and how far it is."""
        return cast("Batch", self.get(path_of("batches", batch_id)))

    def batch_items(self, batch_id: str) -> Iterator[BatchItem]:
        """What a batch asked for, and what became of each."""
        return self.pages(Call("GET", path_of("batches", batch_id, "items"), {"limit": 200}))

    def watch(self, watch_id: str) -> Watch:
        """A watch and what it has seen, in numbers."""
        return cast("Watch", self.get(path_of("watches", watch_id)))

    def watch_items(self, watch_id: str) -> Iterator[WatchItem]:
        """The folders that a watch has seen."""
        return self.pages(Call("GET", path_of("watches", watch_id, "items"), {"limit": 200}))

    def get(self, path: str, **params: Any) -> JsonObject:
        """Read any resource, such as ``/v1/batches/{id}``."""
        return self.send(Call("GET", path, params))

    def do(self, path: str, verb: str, body: Any = None) -> JsonObject:
        """Have something done to any resource: ``do(f"/v1/batches/{id}", "cancel")``."""
        return self.send(calls.do(path, verb, body))

    def ready(self) -> bool:
        """Whether the service answers and can do its work."""
        try:
            return self._http.get("/readyz").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def wait(
        self,
        job_id: str,
        *,
        timeout_s: float | None = None,
        seen: Callable[[Job], None] | None = None,
    ) -> Job:
        """A job when it has ended, shown to ``seen`` on its way; ``TimeoutError`` when that takes long.

        Outlasts a service that restarts meanwhile.
        """
        patience = calls.Patience(f"job {job_id}", timeout_s)
        while True:
            try:
                job = self.job(job_id, wait=None if seen else patience.held())
            except (Unreachable, ApiError) as error:
                time.sleep(patience.pause_s(error))
                continue
            patience.heard()
            if seen is not None:
                seen(job)
            if job["state"] in TERMINAL_STATES:
                return job
            left_s = patience.left_s(f"it is {job['state']}")
            if seen is not None:
                time.sleep(min(calls.POLL_S, left_s))

    def send(self, call: Call) -> JsonObject:
        """Send any request of the API."""
        try:
            response = self._http.request(**call.arguments(), timeout=self._timeout_s + call.held_s)
        except httpx.TransportError as error:
            raise calls.unreachable(self._base_url, error) from None
        return calls.answer_of(response, self._base_url)

    def pages(self, call: Call) -> Iterator[Any]:
        """The items of any list, page by page."""
        while True:
            page = self.send(call)
            yield from page["items"]
            if page.get("next_cursor") is None:
                return
            call = call.at(page["next_cursor"])
