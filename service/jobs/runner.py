"""Claims jobs and carries them out, each in a thread of this process, as many at a time as is allowed."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from service.db.database import Database
from service.jobs.addresses import Places
from service.jobs.attempt import Attempt
from service.jobs.cluster import Conversions
from service.jobs.leases import LeaseLost, LeaseRules, Leases
from service.jobs.waiting import Waiting
from service.loop import Loop
from service.metrics import Metrics
from service.settings import Settings

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 5
"""So many may fail, while the database is away, before a lease runs out."""

STOP_TIMEOUT_S = 20.0
"""How long a stopping service waits for its conversions: they stop within a second each, unless a disk hangs."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the runner works with."""

    database: Database
    conversions: Conversions
    places: Places
    metrics: Metrics


class Runner:
    """A loop that keeps leases alive, takes lost ones back, and starts what waits."""

    def __init__(self, tools: Tools, settings: Settings) -> None:
        rules = LeaseRules(timedelta(seconds=settings.lease_s), settings.max_attempts)
        owner = f"{socket.gethostname()[:80]}:{os.getpid()}:{secrets.token_hex(4)}"
        self._leases = Leases(tools.database, owner, rules)
        self._tools = tools
        self._settings = settings
        self._attempts: dict[Attempt, threading.Thread] = {}
        self._waiting = Waiting(tools.database, settings.cluster_wait_s)
        self._beaten = time.monotonic()
        self._loop = Loop("runner", self._tick, settings.poll_s)

    def start(self, *, sole: bool) -> None:
        """Begin. ``sole``: no other process can be alive, so that every lease in the database is a dead one's."""
        for job_id in self._leases.take_back_expired(everyone=True) if sole else ():
            log.info("%s was interrupted by a restart and goes on", job_id)
        self._loop.start()

    def wake(self) -> None:
        """Look at once: a job came, or one is to be cancelled."""
        self._loop.wake()

    def stop(self) -> None:
        """Claim nothing more, stop what runs and give its leases back."""
        self._loop.stop(STOP_TIMEOUT_S)
        attempts = dict(self._attempts)
        for attempt in attempts:
            attempt.stop("shutdown")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for thread in attempts.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _tick(self) -> None:
        self._collect()
        self._keep_leases()
        for job_id in self._leases.take_back_expired():
            self._tools.metrics.lost.inc()
            log.warning("the lease of %s had run out", job_id)
        state, detail = self._tools.conversions.state()
        if state == "failed":
            self._waiting.tell(detail)
        elif state == "ok":
            self._waiting.over()
        while len(self._attempts) < self._settings.max_concurrent_jobs and self._can_run():
            if not self._start_next():
                return

    def _can_run(self) -> bool:
        return not self._loop.stopping and self._tools.conversions.state()[0] == "ok"

    def _start_next(self) -> bool:
        lease = self._leases.claim()
        if lease is None:
            return False
        attempt = Attempt(lease, self._leases, self._tools.conversions, self._tools.places)
        thread = threading.Thread(target=self._carry_out, args=(attempt,), name=lease.job.id, daemon=True)
        self._attempts[attempt] = thread
        thread.start()
        return True

    def _carry_out(self, attempt: Attempt) -> None:
        attempt.run()
        self.wake()

    def _keep_leases(self) -> None:
        """Extend each lease and see whether its job is to be cancelled or has run too long."""
        limit_s = self._settings.job_timeout_s
        due = time.monotonic() - self._beaten > self._settings.lease_s / HEARTBEATS_PER_LEASE
        began = time.monotonic()
        for attempt in self._attempts:
            try:
                state = self._leases.heartbeat(attempt.lease) if due else self._leases.state(attempt.lease)
            except LeaseLost:
                attempt.stop("lost")
                continue
            if state == "cancelling":
                attempt.stop("cancelled")
            elif limit_s is not None and time.monotonic() - attempt.began > limit_s:
                attempt.stop("timeout", limit_s)
        if due:
            self._beaten = began  # only now: where the database was away, the next look extends what is left

    def _collect(self) -> None:
        """Forget attempts that have ended, and count them."""
        metrics = self._tools.metrics
        for attempt in [attempt for attempt, thread in self._attempts.items() if not thread.is_alive()]:
            del self._attempts[attempt]
            if attempt.outcome == "lost":
                metrics.lost.inc()
            metrics.seconds.labels(attempt.outcome or "lost").observe(attempt.seconds)
            if attempt.result is not None and attempt.outcome == "succeeded":
                metrics.bytes.labels("read").inc(attempt.result.bytes_read)
                metrics.bytes.labels("merged").inc(attempt.result.bytes_merged)
                metrics.bytes.labels("written").inc(attempt.result.bytes_written)
                metrics.tensors.inc(int(attempt.result.plan_summary.get("tensors", 0)))
