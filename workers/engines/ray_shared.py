"""Proof that the nodes of a cluster see one and the same file system at a destination, before they write to it."""

from __future__ import annotations

import secrets
from typing import Any

import ray
import ray.exceptions

from workers.engines.ray_pool import LOST, Pool, Worker
from workers.errors import StorageError
from workers.storage import FolderAddress, open_folder

NONCE = ".unshard-nonce"
ROUNDS = 3
"""Times that workers are asked, since those that were lost since the last job are found and replaced here."""

TIMEOUT_S = 60.0


def prove_shared(pool: Pool, staging: FolderAddress) -> None:
    """See that a file which is written here is there for all workers; raises ``StorageError``."""
    here = ray.get_runtime_context().get_node_id()
    if {worker.node for worker in _workers(pool)} == {here}:
        return
    content = secrets.token_bytes(16)
    root = open_folder(staging)
    root.write(NONCE, content)
    try:
        blind = _blind_nodes(pool, staging, content)
    finally:
        root.delete([NONCE])
    if blind:
        raise StorageError(
            f"{staging.url} is not shared: node {blind[0]} and {len(blind) - 1} more don't see it",
            file=staging.url,
            hint="Convert to storage that all nodes mount, or to a bucket.",
        )


def _blind_nodes(pool: Pool, staging: FolderAddress, content: bytes) -> list[str]:
    """Nodes that don't see the nonce."""
    for _ in range(ROUNDS):
        workers = _workers(pool)
        calls = [_sees(worker).remote(staging, NONCE, content) for worker in workers]
        blind, lost = set(), False
        for worker, call in zip(workers, calls, strict=True):
            try:
                if not ray.get(call, timeout=TIMEOUT_S):
                    blind.add(worker.node)
            except LOST:
                lost = True
                _replace(pool, worker)
            except ray.exceptions.GetTimeoutError:
                raise StorageError(
                    f"node {worker.node} did not say within {TIMEOUT_S:.0f} s whether it sees {staging.url}",
                    file=staging.url,
                    hint="Its mount of that file system may hang: look at it there, or convert to a bucket.",
                ) from None
        if not lost:
            return sorted(blind)
    raise StorageError(
        f"workers of the Ray cluster were lost {ROUNDS} times before they could begin",
        hint="Look at the cluster's logs: its nodes or their workers end.",
    )


def _sees(worker: Worker) -> Any:
    """The question, asked of a merger beside what it does for other jobs, which may take long."""
    sees = worker.handle.sees
    return sees.options(concurrency_group="control") if worker.name.startswith("merger") else sees


def _workers(pool: Pool) -> list[Worker]:
    return [*pool.mergers, *pool.collectors]


def _replace(pool: Pool, dead: Worker) -> None:
    if dead.name.startswith("merger"):
        pool.replace_merger(dead)
    else:
        pool.replace_collector(dead)
