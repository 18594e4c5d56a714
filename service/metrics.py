"""What Prometheus is told; one registry per application, so that several can live in one process."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from service.db.tables import STATES
from service.jobs.store import JobStore

DURATIONS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)


class Metrics:
    """Counters of one service."""

    def __init__(self, store: JobStore) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Queue(store))
        self.seconds = Histogram(
            "unshard_job_duration_seconds",
            "Wall time of attempts by how they ended",
            ["state"],
            registry=self.registry,
            buckets=DURATIONS_S,
        )
        self.bytes = Counter(
            "unshard_bytes", "Bytes of weights moved by succeeded jobs", ["direction"], registry=self.registry
        )
        self.tensors = Counter("unshard_tensors", "Tensors written by succeeded jobs", registry=self.registry)
        self.deliveries = Counter(
            "unshard_webhook_deliveries", "Webhook attempts by result", ["result"], registry=self.registry
        )
        self.lost = Counter("unshard_lease_lost", "Leases that ended without a result", registry=self.registry)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class _Queue(Collector):
    """What the database knows, asked at each scrape."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("unshard_jobs", "Jobs by state")
        yield GaugeMetricFamily("unshard_queue_age_seconds", "Age of the job that waits longest")

    def collect(self) -> Iterator[Metric]:
        try:
            counts, oldest = self._store.counts(), self._store.oldest_queued()
        except SQLAlchemyError:
            return  # the database is away; the counters are still told
        jobs = GaugeMetricFamily("unshard_jobs", "Jobs by state", labels=["state"])
        for state in STATES:
            jobs.add_metric([state], counts.get(state, 0))
        yield jobs
        age = (datetime.now(UTC) - oldest).total_seconds() if oldest else 0.0
        yield GaugeMetricFamily("unshard_queue_age_seconds", "Age of the job that waits longest", value=max(age, 0.0))
