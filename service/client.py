"""A client of the service's REST API, for programs and for our own command line.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit("/data/global_step_100", "s3://models/step-100")
        job = client.wait(job["id"])

Answers are the JSON objects of the API (``service.schemas`` names their fields). An error of the API is an
``ApiError``, one without an answer an ``Unreachable``; both are ``UnshardError`` and carry a hint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from workers.errors import InternalError, StorageError, UnshardError

JsonObject = dict[str, Any]

TERMINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})
POLL_S = 0.2


class ApiError(UnshardError):
    """The service refused. ``code`` is the problem's type, ``problem`` the whole document."""

    def __init__(self, status: int, problem: JsonObject) -> None:
        super().__init__(str(problem.get("detail") or f"HTTP status {status}"), hint=str(problem.get("hint") or ""))
        self.status = status
        self.problem = problem
        self.code = str(problem.get("type", "")).rpartition("/")[2] or "error"
        self.exit_status = InternalError.exit_status if status >= 500 and status != 503 else 1


class Unreachable(StorageError):
    """No service answers at the address."""


class Client:
    """A connection to one service; close it, or use it as a context manager."""

    def __init__(self, base_url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._base_url = base_url.rstrip("/")
        try:
            # A service on this machine or in this cluster is not behind the proxy of the environment.
            self._http = httpx.Client(base_url=self._base_url, headers=headers, timeout=timeout_s, trust_env=False)
        except (httpx.InvalidURL, ValueError):
            raise Unreachable(f"{base_url!r} is not the address of a service", hint=ADDRESS_HINT) from None

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
        options: Mapping[str, Any] | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> JsonObject:
        """Hand a job in. With a key, doing so again (after a lost answer, say) gives the same job."""
        body = {
            "source": source,
            "destination": destination,
            "options": dict(options or {}),
            "labels": dict(labels or {}),
        }
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._object("POST", "/v1/jobs", json=body, headers=headers)

    def preview(self, source: str, destination: str, options: Mapping[str, Any] | None = None) -> JsonObject:
        """The plan's summary of a job that is not handed in."""
        body = {"source": source, "destination": destination, "options": dict(options or {})}
        return dict(self._object("POST", "/v1/jobs", json=body, params={"dry_run": "true"})["plan"])

    def job(self, job_id: str) -> JsonObject:
        """A job as it is now."""
        return self._object("GET", f"/v1/jobs/{job_id}")

    def jobs(self, *, state: str | None = None, limit: int = 50) -> list[JsonObject]:
        """The latest jobs, newest first."""
        params: dict[str, Any] = {"limit": limit} | ({"state": state} if state else {})
        return list(self._object("GET", "/v1/jobs", params=params)["items"])

    def all_jobs(self, *, state: str | None = None) -> Iterator[JsonObject]:
        """All jobs, newest first, page by page."""
        params: dict[str, Any] = {"limit": 200} | ({"state": state} if state else {})
        while True:
            page = self._object("GET", "/v1/jobs", params=params)
            yield from page["items"]
            if page["next_cursor"] is None:
                return
            params["cursor"] = page["next_cursor"]

    def cancel(self, job_id: str) -> JsonObject:
        """Ask for a job's end; the job as it is then."""
        return self._object("POST", f"/v1/jobs/{job_id}:cancel")

    def retry(self, job_id: str) -> JsonObject:
        """Queue a failed or cancelled job again."""
        return self._object("POST", f"/v1/jobs/{job_id}:retry")

    def plan(self, job_id: str) -> JsonObject:
        """The summary of a job's plan."""
        return dict(self._object("GET", f"/v1/jobs/{job_id}/plan")["plan"])

    def events(self, job_id: str, *, after: int = 0) -> list[JsonObject]:
        """A page of a job's events after a number."""
        return list(self._object("GET", f"/v1/jobs/{job_id}/events", params={"after": after})["items"])

    def follow(self, job_id: str, *, after: int = 0) -> Iterator[JsonObject]:
        """A job's events as they come, to its end."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        with self._http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
            if response.is_error:
                response.read()
                raise _error_of(response)
            for line in response.iter_lines():
                if line.startswith("data:"):
                    yield dict(json.loads(line[5:]))

    def formats(self) -> JsonObject:
        """What can be read and written."""
        return self._object("GET", "/v1/formats")

    def workers(self) -> JsonObject:
        """The cluster and what its workers do."""
        return self._object("GET", "/v1/workers")

    def inspect(self, source: str, options: Mapping[str, Any] | None = None) -> JsonObject:
        """What lies at a source."""
        return self._object("POST", "/v1/inspect", json={"source": source, "options": dict(options or {})})

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
        seen: Callable[[JsonObject], None] = lambda _job: None,
    ) -> JsonObject:
        """Poll a job until it has ended and show it to ``seen`` each time; ``TimeoutError`` when that takes long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = self.job(job_id)
            seen(job)
            if job["state"] in TERMINAL_STATES:
                return job
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is still {job['state']} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def _object(self, method: str, path: str, **request: Any) -> JsonObject:
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise Unreachable(
                f"no service answers at {self._base_url}: {str(error) or type(error).__name__}", hint=ADDRESS_HINT
            ) from None
        if response.is_error:
            raise _error_of(response)
        try:
            return dict(response.json())
        except ValueError:
            raise Unreachable(f"{self._base_url} answers, but not as unshard does", hint=ADDRESS_HINT) from None


ADDRESS_HINT = "Start a service with: unshard serve; or name its address, such as http://127.0.0.1:8000."


def _error_of(response: httpx.Response) -> ApiError:
    try:
        problem = dict(response.json())
    except ValueError:
        problem = {}
    return ApiError(response.status_code, problem)
