"""A warm pool of Ray actors that jobs share: starting it, placing it, replacing what dies.

All options of Ray's that aren't plainly public are kept in this file.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.exceptions
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from workers.engines.ray_actors import CollectorActor, MergerActor
from workers.engines.ray_reasons import MEMORY_HINT, is_short_of_memory, reason_of
from workers.errors import InsufficientResources, StorageError

_RAY: Any = ray
"""Ray's own type hints lack the options and calls that are used through this name."""

NAMESPACE = "unshard"
EMBEDDED_STORE_BYTES = 1 << 30
"""Object store of an embedded cluster: it carries parts on their way to a bucket, and nothing else."""

COLLECTOR_MEMORY_BYTES = 1
"""What a collector asks for: Ray puts an actor that asks for nothing on any node, whatever node it is told."""

STORE_SHARE = 0.6
"""Share of a node's object store that parts under way may fill; beyond it Ray spills to disk."""

START_TIMEOUT_S = 90.0
REPLACE_TIMEOUT_S = 30.0
REFILL_EVERY_S = 1.0
START_ATTEMPTS = 3
"""Times that a worker is begun in place of another when it ends before it answers."""

LISTENER_TIMEOUT_S = 10.0
LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
)
"""What a call raises when an actor, its node or an object on it is gone: the work can be done again elsewhere."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How many actors, and what each asks of the cluster."""

    address: str | None = None
    """``auto``, ``ray://…`` or host:port; None takes RAY_ADDRESS, or starts a cluster inside this process."""
    mergers: int | None = None
    """None: as many as the cluster's CPUs (GPUs, when they ask for those) allow."""
    num_cpus: float = 1.0
    num_gpus: float = 0.0


@dataclass(slots=True)
class Worker:
    """An actor of the pool."""

    name: str
    handle: Any
    node: str
    pid: int = 0


class _DidNotStartError(InsufficientResources):
    """Workers ended before they answered."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """A worker that was placed and has not answered yet."""

    worker: Worker
    ready: Any
    deadline: float
    """By the monotonic clock."""


class Pool:
    """Mergers and collectors of one cluster. Thread-safe."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._lock = threading.RLock()
        self._owns_cluster = False
        self._numbers = 0
        self._missing = 0
        self._lacks_collectors = False
        self._coming: _Coming | None = None
        self._look_again = 0.0
        self.nodes: list[dict[str, Any]] = []
        """The cluster's nodes as ``check`` saw them last, as JSON values."""
        self.mergers: list[Worker] = []
        self.collectors: list[Worker] = []

    def start(self) -> None:
        """Connect, place the actors and wait until they answer; does nothing when they are there already."""
        with self._lock:
            if self.mergers and ray.is_initialized():
                return
            self._connect()
            self.collectors = [self._new_collector(node) for node in _alive_nodes()]
            self.mergers = self._place([self._new_merger() for _ in range(self._wanted())])
            self._place(self.collectors)
            self.nodes = _described_nodes()

    def check(self) -> str | None:
        """Why the cluster can't be worked with; None when it can."""
        self.nodes = _described_nodes()
        if not self.nodes:
            return "no node of the Ray cluster is alive"
        alive = {node["id"] for node in self.nodes}
        if ray.get_runtime_context().get_node_id() not in alive:
            return "the Ray node of this machine is gone"
        self._drop_lost(alive)
        return None

    def refill(self) -> None:
        """Place workers that were lost, mergers as soon as there is room for them; waits for nothing."""
        wanted = self._missing or self._lacks_collectors
        if not wanted or time.monotonic() < self._look_again or not self._lock.acquire(blocking=False):
            return
        try:
            self._look_again = time.monotonic() + REFILL_EVERY_S
            if self._coming is not None:
                self._take_in(self._coming)
            elif (worker := self._next_missing()) is not None:
                self._coming = _Coming(worker, worker.handle.ready.remote(), time.monotonic() + REPLACE_TIMEOUT_S)
        finally:
            self._lock.release()

    def _next_missing(self) -> Worker | None:
        """Begin one of the workers that are missing; None when there is none, or no room for it."""
        if self._lacks_collectors:
            bare = [node for node in _alive_nodes() if node not in {worker.node for worker in self.collectors}]
            if bare:
                return self._new_collector(bare[0])
            self._lacks_collectors = False
        if self._missing and _RAY.available_resources().get("CPU", 0) >= self._options.num_cpus:
            return self._new_merger()
        return None

    def _take_in(self, coming: _Coming) -> None:
        """Use a worker that was placed when it answers; one that doesn't in time is given up."""
        ready, _ = ray.wait([coming.ready], timeout=0)
        if not ready and time.monotonic() < coming.deadline:
            return
        self._coming = None
        worker = coming.worker
        if not ready:
            ray.kill(worker.handle)
            return
        with suppress(*LOST):
            worker.node, worker.pid = ray.get(coming.ready)
            if worker.name.startswith("merger"):
                self.mergers.append(worker)
                self._missing -= 1
            elif worker.node in {other.node for other in self.collectors}:
                ray.kill(worker.handle)  # its node went meanwhile, and Ray has put it elsewhere
            else:
                self.collectors.append(worker)

    def _drop_lost(self, alive: set[str]) -> None:
        """Leave out workers of nodes that are gone. The last of a kind stays: whoever needs it replaces it."""
        if not self._lock.acquire(blocking=False):
            return  # somebody replaces workers already, and may wait for a place
        try:
            for workers in (self.mergers, self.collectors):
                for worker in [worker for worker in workers if worker.node not in alive]:
                    if len(workers) > 1:
                        workers.remove(worker)
                        self._missing += workers is self.mergers
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the actors, and the cluster if this pool started it."""
        with self._lock:
            if not ray.is_initialized():
                return
            coming = () if self._coming is None else (self._coming.worker,)
            for worker in (*self.mergers, *self.collectors, *coming):
                ray.kill(worker.handle)
            self.mergers, self.collectors, self._coming = [], [], None
            if self._owns_cluster:
                ray.shutdown()

    def replace_merger(self, dead: Worker) -> None:
        """Go on without a merger that died; the last one is replaced at once, the others by ``refill``."""
        with self._lock:
            ray.kill(dead.handle)  # one that only seemed dead would keep its place and go on writing
            if dead not in self.mergers:
                return  # another job missed it, too
            if len(self.mergers) > 1:
                self.mergers.remove(dead)
                self._missing += 1
            else:
                self.mergers[:] = [self._placed(self._new_merger for _ in range(START_ATTEMPTS))]

    def replace_collector(self, dead: Worker) -> Worker:
        """The collector to go on with after one that died: another, or a new one where it was the last."""
        with self._lock:
            ray.kill(dead.handle)
            if dead in self.collectors and len(self.collectors) > 1:
                self.collectors.remove(dead)
                self._lacks_collectors = True
            elif dead in self.collectors:
                # A node that has just gone may still be told as alive; this one is.
                here = ray.get_runtime_context().get_node_id()
                nodes = (dead.node, *(here,) * (START_ATTEMPTS - 1)) if dead.node in _alive_nodes() else (here,)
                fresh = self._placed(partial(self._new_collector, node) for node in nodes)
                self.collectors[self.collectors.index(dead)] = fresh
                return fresh
            return next((worker for worker in self.collectors if worker.node == dead.node), self.collectors[0])

    def store_budget_bytes(self) -> int:
        """Bytes of parts that may be under way through the object stores of the cluster."""
        return int(_RAY.cluster_resources().get("object_store_memory", EMBEDDED_STORE_BYTES) * STORE_SHARE)

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        address = self._options.address or os.environ.get("RAY_ADDRESS")
        local: dict[str, Any] = {}
        if address:
            _require_listener(address)
        else:
            self._owns_cluster = True
            local = {"include_dashboard": False, "object_store_memory": EMBEDDED_STORE_BYTES, "address": "local"}
        try:
            ray.init(
                **(local or {"address": address}),
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise _no_cluster(address or "this machine", str(error).splitlines()[0]) from error

    def _wanted(self) -> int:
        if self._options.mergers:
            return self._options.mergers
        resources = _RAY.cluster_resources()
        by_cpu = resources.get("CPU", 1) / max(self._options.num_cpus, 0.01)
        by_gpu = resources.get("GPU", 0) / self._options.num_gpus if self._options.num_gpus else by_cpu
        return max(1, int(min(by_cpu, by_gpu)))

    def _new_merger(self) -> Worker:
        self._numbers += 1
        actor = _RAY.remote(
            num_cpus=self._options.num_cpus,
            num_gpus=self._options.num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            concurrency_groups={"control": 2},
        )(MergerActor)
        return Worker(f"merger-{self._numbers}", actor.remote(self._options.num_gpus > 0), "")

    def _new_collector(self, node: str) -> Worker:
        self._numbers += 1
        actor = _RAY.remote(
            num_cpus=0,
            memory=COLLECTOR_MEMORY_BYTES,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        )(CollectorActor)
        return Worker(f"collector-{self._numbers}", actor.remote(), node)

    def _placed(self, attempts: Iterable[Callable[[], Worker]]) -> Worker:
        """The first of several attempts at a worker that starts: Ray may try a node that is just going."""
        failure: InsufficientResources | None = None
        for attempt in attempts:
            try:
                return self._place([attempt()], REPLACE_TIMEOUT_S)[0]
            except _DidNotStartError as error:
                failure = error
        assert failure is not None  # noqa: S101 - there is at least one attempt
        raise failure

    def _place(self, workers: list[Worker], timeout_s: float | None = None) -> list[Worker]:
        """Wait until actors run, since Ray lets one that fits nowhere wait for ever without a word."""
        timeout_s = START_TIMEOUT_S if timeout_s is None else timeout_s
        refs = [worker.handle.ready.remote() for worker in workers]
        _, waiting = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        if waiting:
            for worker in workers:
                ray.kill(worker.handle)
            raise self._no_place(f"{len(waiting)} of {len(refs)} workers found no place", timeout_s)
        try:
            places = ray.get(refs)
        except LOST as error:
            for worker in workers:
                ray.kill(worker.handle)
            short = is_short_of_memory(error)
            raise _DidNotStartError(
                f"workers of the Ray cluster could not start: {reason_of(error)}",
                expected="nodes with memory to spare" if short else None,
                found=reason_of(error) if short else None,
                hint=MEMORY_HINT
                if short
                else "Look at the cluster's logs; workers that ask for a GPU need a CUDA build of torch.",
            ) from error
        for worker, (node, pid) in zip(workers, places, strict=True):
            worker.node, worker.pid = node, pid
        return workers

    def _no_place(self, what: str, waited_s: float) -> InsufficientResources:
        total, free = _RAY.cluster_resources(), _RAY.available_resources()
        asked = {"CPU": self._options.num_cpus, "GPU": self._options.num_gpus}
        shown = [f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in asked]
        return InsufficientResources(
            f"{what} in the Ray cluster within {waited_s:.0f} s: each asks for {asked['CPU']:g} CPU and "
            f"{asked['GPU']:g} GPU, and {' and '.join(shown)} are free",
            expected=f"{asked['CPU']:g} CPU and {asked['GPU']:g} GPU for each worker",
            found=f"{' and '.join(shown)} free",
            hint="Ask for fewer workers, for less per worker, or add nodes.",
        )


def _require_listener(address: str) -> None:
    """See whether anything listens where the cluster's head should be: Ray itself takes minutes to find out."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENER_TIMEOUT_S).close()
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from None


def _no_cluster(where: str, reason: str) -> StorageError:
    return StorageError(
        f"no Ray cluster at {where}: {reason}",
        hint="Check RAY_ADDRESS, the cluster's token, and that Ray and Python have the same versions on both sides; "
        "without RAY_ADDRESS a cluster is started on this machine.",
    )


def _described_nodes() -> list[dict[str, Any]]:
    """The nodes that are alive. ``object_store`` is in bytes."""
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "total": _plain(node["Resources"]),
            "available": _plain(free.get(node["NodeID"], {})),
            "object_store_bytes": int(node["Resources"].get("object_store_memory", 0)),
            "object_store_used_bytes": max(
                0,
                int(node["Resources"].get("object_store_memory", 0))
                - int(free.get(node["NodeID"], {}).get("object_store_memory", 0)),
            ),
        }
        for node in _RAY.nodes()
        if node["Alive"]
    ]


def _plain(resources: dict[str, float]) -> dict[str, float]:
    """Resources that people ask for, without Ray's own names for nodes and memory in use by its store."""
    return {
        name: float(amount)
        for name, amount in resources.items()
        if not name.startswith("node:") and name != "object_store_memory"
    }


def _alive_nodes() -> list[str]:
    return [node["NodeID"] for node in _RAY.nodes() if node["Alive"] and node["Resources"].get("object_store_memory")]
