"""The engine of a cluster: parts are made by merger actors, output files are owned by collector actors."""

from __future__ import annotations

import secrets
from typing import Any

from workers.engines import Work
from workers.engines.ray_pool import Pool, PoolOptions
from workers.engines.ray_run import RayRun


class RayEngine:
    """Makes parts in actors. One engine serves many jobs at a time."""

    name = "ray"

    def __init__(self, options: PoolOptions | None = None) -> None:
        self._pool = Pool(options or PoolOptions())
        self._runs: dict[str, RayRun] = {}

    def start(self) -> None:
        """Connect to the cluster, or start one, and place the actors; returns when they are ready."""
        self._pool.start()

    def close(self) -> None:
        """End the actors and, where this engine started it, the cluster."""
        self._pool.close()

    def run(self, work: Work) -> None:
        """See ``Engine.run``."""
        self._pool.start()
        job = f"job-{secrets.token_hex(6)}"
        run = RayRun(self._pool, work, job)
        self._runs[job] = run
        try:
            run.run()
        finally:
            del self._runs[job]

    def check(self) -> str | None:
        """Why the cluster can't be worked with; None when it can. Waits as long as a head that is gone lets it.

        Also places the workers that were lost earlier and find room now.
        """
        fault = self._pool.check()
        if fault is None:
            self._pool.refill()
        return fault

    def overview(self) -> dict[str, Any]:
        """The nodes as ``check`` saw them last, and the actors, as JSON values; asks nobody."""
        return {"nodes": self._pool.nodes, "items": self.describe()}

    def describe(self) -> list[dict[str, Any]]:
        """The actors and what each does now, as JSON values."""
        doing: dict[str, list[dict[str, str]]] = {}
        for run in list(self._runs.values()):
            for name, file in run.doing().items():
                doing.setdefault(name, []).append({"attempt": run.attempt, "file": file})
        return [
            {
                "name": worker.name,
                "kind": worker.name.partition("-")[0],
                "node": worker.node,
                "pid": worker.pid,
                "doing": doing.get(worker.name, []),
            }
            for worker in (*self._pool.mergers, *self._pool.collectors)
        ]
