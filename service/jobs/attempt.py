"""One attempt at a job: drives the conversion in a thread of its own and writes down what it says."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from service.jobs.addresses import NotAllowed, Places
from service.jobs.cluster import Controls, Conversions, Interrupted
from service.jobs.driver import PackedTable
from service.jobs.failures import describe, timed_out
from service.jobs.leases import LeaseLost, Leases
from service.jobs.parts import pack, pack_rows
from service.jobs.records import PROGRESS, JsonObject, Lease
from service.logs import logged_as
from workers import events
from workers.convert import Result
from workers.errors import Cancelled, DestinationBusy, DestinationError
from workers.manifest import DIGEST_PREFIX, digest_of_list
from workers.options import ConvertOptions

PROGRESS_INTERVAL_S = 0.5
RATE_WINDOW_S = 10.0
MOST_WARNINGS = 200
WRITTEN = "written"
"""The part of progress that is of interest only now: events leave it out, since many of them are kept."""

PLAN_BRIEF = ("fingerprint", "tensors", "bytes_total", "parts")
WRITE_ATTEMPTS = 20
"""Times that a final state is tried to be written while the database is away, a second apart."""

CLAIM_OUTLASTS_S = 120.0
"""How long an attempt that was lost may keep its destination: a claim in a bucket is void after 90 s of silence."""

CLAIM_POLL_S = 2.0
DATABASE_POLL_S = 0.5

log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Attempt:
    """A claimed job at work. ``stop`` is why it is being ended early: cancelled, timeout, shutdown or lost."""

    def __init__(self, lease: Lease, leases: Leases, conversions: Conversions, places: Places) -> None:
        self.lease = lease
        self.began = time.monotonic()
        self.outcome: str | None = None
        self.seconds = 0.0
        self.result: Result | None = None
        self._leases = leases
        self._conversions = conversions
        self._places = places
        self._cancel = threading.Event()
        self._stop: str | None = None
        self._limit_s = 0.0
        self._warnings: list[str] = []
        self._progress = _ProgressMeter()

    def stop(self, why: str, limit_s: float = 0.0) -> None:
        """End the work within a second; the first reason stays."""
        if self._stop is None:
            self._stop, self._limit_s = why, limit_s
        self._cancel.set()

    def run(self) -> None:
        """Convert, and write the outcome down. Never raises."""
        with logged_as(self.lease.job.id):
            log.info("attempt %d started", self.lease.job.attempt)
            try:
                result = self._convert()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the job needs an outcome
                self._write(lambda caught=error: self._failed(caught))
            else:
                self.result = result
                self._write(lambda: self._succeeded(result))
            self.seconds = time.monotonic() - self.began
            log.info("attempt %d ended: %s", self.lease.job.attempt, self.outcome)

    def _convert(self) -> Result:
        job = self.lease.job
        options = ConvertOptions.from_dict(job.options)
        # Again, since a link may have changed while the job waited.
        source, destination = self._places.check(job.source, job.destination, options)
        controls = Controls(self._observe, self._cancel, self.lease.attempt_name, self._may_commit)
        while True:
            try:
                return self._conversions.run(source, destination, options, controls)
            except DestinationBusy:
                if job.attempt == 1 or time.monotonic() - self.began > CLAIM_OUTLASTS_S:
                    raise
            log.info("an earlier attempt may still have the destination: waiting for its claim to run out")
            if self._cancel.wait(CLAIM_POLL_S):
                raise Cancelled("the conversion was stopped")

    def _may_commit(self) -> None:
        # A third time: who can bend links at the destination could have done so while the work went on.
        try:
            self._places.destinations.check(self.lease.job.destination)
        except NotAllowed as error:
            raise DestinationError(str(error), hint=error.hint) from None
        try:
            state = self._outlasting_the_database(lambda: self._leases.heartbeat(self.lease))
        except LeaseLost:
            self.stop("lost")
            raise Cancelled("the job is in other hands now") from None
        except SQLAlchemyError:
            raise Interrupted("the job store could not be asked whether the attempt may still commit") from None
        if state == "cancelling":
            self.stop("cancelled")
        if self._cancel.is_set():
            raise Cancelled("the conversion was stopped")

    def _outlasting_the_database(self, ask: Callable[[], _T]) -> _T:
        """Ask the job store, again and again while it is away, for as long as a lease holds without being extended."""
        deadline = time.monotonic() + self._leases.rules.length.total_seconds()
        while True:
            try:
                return ask()
            except SQLAlchemyError:
                if time.monotonic() > deadline or self._cancel.wait(DATABASE_POLL_S):
                    raise
                log.warning("the job store does not answer")

    def _succeeded(self, result: Result) -> None:
        outcome = outcome_of(result)
        final = self._progress.final()
        columns: JsonObject = {"result": outcome, "warnings": list(result.warnings)[:MOST_WARNINGS]}
        if final:
            columns["progress"] = final
        self._leases.finish(self.lease, "succeeded", outcome, report=pack(result.manifest), **columns)
        self.outcome = "succeeded"

    def _failed(self, error: BaseException) -> None:
        # What breaks while the work is being stopped, such as a cluster on its way down, is no fault of the job.
        stop = self._stop
        if stop == "shutdown":
            self._leases.give_back(self.lease, "the service was stopped")
            self.outcome = "given back"
        elif stop == "cancelled":
            self._leases.finish(self.lease, "cancelled", {})
            self.outcome = "cancelled"
        elif stop == "lost":
            self.outcome = "lost"
        elif isinstance(error, Interrupted):
            log.warning("interrupted: %s", error)
            self._leases.interrupted(self.lease, str(error))
            self.outcome = "interrupted"
        else:
            told = timed_out(self._limit_s) if stop == "timeout" else describe(error)
            if told["type"] == "internal":
                log.error("unexpected fault", exc_info=error)
            self._leases.finish(self.lease, "failed", told, error=told)
            self.outcome = "failed"

    def _write(self, outcome: Any) -> None:
        """Write the outcome, outlasting a database that is away for a moment."""
        for _ in range(WRITE_ATTEMPTS):
            try:
                outcome()
            except LeaseLost:
                self.outcome = "lost"
            except SQLAlchemyError:
                log.warning("the outcome could not be written yet", exc_info=True)
                threading.Event().wait(1.0)
                continue
            return
        self.outcome = "lost"

    def _observe(self, event: events.Event) -> None:
        """Write an event of the conversion down; it must not raise, and losing one isn't losing the job."""
        try:
            if isinstance(event, events.Progress):
                self._record(event)  # the next one comes soon
            else:
                self._outlasting_the_database(lambda: self._record(event))
        except LeaseLost:
            self.stop("lost")
        except SQLAlchemyError:
            log.warning("an event could not be written", exc_info=True)

    def _record(self, event: events.Event) -> None:
        match event:
            case events.Planned(summary, table):
                brief: JsonObject = {name: summary[name] for name in PLAN_BRIEF if name in summary}
                packed = table.packed if isinstance(table, PackedTable) else pack_rows(table())
                self._leases.planned(self.lease, brief, summary, packed)
            case events.Started(_, kept):
                self._leases.advance(self.lease, "running", {"kept_files": list(kept)})
                if kept:
                    self._leases.shards_done(self.lease, dict.fromkeys(kept))
            case events.Progress():
                progress = self._progress.take(event)
                if progress is not None:
                    told = {name: value for name, value in progress.items() if name != WRITTEN}
                    self._leases.note(self.lease, PROGRESS, told, progress=progress)
            case events.FileCompleted(name, size_bytes, digest):
                data = {"name": name, "size_bytes": size_bytes, "digest": DIGEST_PREFIX + digest}
                self._leases.shards_done(self.lease, {name: DIGEST_PREFIX + digest}, data)
            case events.Warned(message):
                self._warnings = [*self._warnings, message][:MOST_WARNINGS]
                self._leases.note(self.lease, "job.warned", {"message": message}, warnings=self._warnings)
            case events.Retried(part, attempt, reason):
                self._leases.note(
                    self.lease, "part.retried", {"part": part, "attempt": attempt, "reason": reason.split("\n")[0]}
                )
            case events.Verifying():
                self._leases.advance(self.lease, "verifying", {})
            case _:  # Committed: told by the outcome
                pass


class _ProgressMeter:
    """Turns what an engine says into progress with a rate, at most twice a second and always at the end."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._written = float("-inf")
        self._last: JsonObject | None = None

    def take(self, event: events.Progress) -> JsonObject | None:
        moment = time.monotonic()
        self._samples.append((moment, event.bytes_done))
        while moment - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        rate = self._rate()
        left = event.bytes_total - event.bytes_done
        self._last = {
            "bytes_done": event.bytes_done,
            "bytes_total": event.bytes_total,
            "bytes_read": event.bytes_read,
            "bytes_merged": event.bytes_merged,
            "tensors_done": event.tensors_done,
            "tensors_total": event.tensors_total,
            "files_done": event.files_done,
            "files_total": event.files_total,
            "bytes_per_s": rate,
            "eta_s": round(left / rate, 1) if rate else None,
            "workers": dict(event.workers),
            WRITTEN: event.written,
        }
        if moment - self._written < PROGRESS_INTERVAL_S:
            return None
        self._written = moment
        return self._last

    def final(self) -> JsonObject | None:
        """The newest progress, whether it was written or not, with nobody at work any more."""
        return {**self._last, "eta_s": None, "workers": {}, WRITTEN: {}} if self._last else None

    def _rate(self) -> int | None:
        (first, start), (last, end) = self._samples[0], self._samples[-1]
        return int((end - start) / (last - first)) if last - first > 0.2 and end > start else None


def outcome_of(result: Result) -> JsonObject:
    """What an answer says of a finished conversion; the manifest at the destination says it in full."""
    manifest = result.manifest
    files = [
        {"path": file["path"], "size_bytes": file["size_bytes"], "digest": file["digest"]}
        for file in (*manifest.get("weights", ()), *manifest.get("files", ()))
    ]
    return {
        "location": result.location,
        "files": files,
        "bytes": result.bytes_written,
        "bytes_read": result.bytes_read,
        "seconds": round(result.seconds, 3),
        "digest": DIGEST_PREFIX + digest_of_list(file["digest"] for file in files),
        "already_there": result.already_there,
    }
