"""A cluster of two nodes: jobs use both, and outlive the one that is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.service.conftest import eventually
from tests.service.serving import START_S, Process, completed, digests, many_tensors
from tests.service.test_fault_cluster import children

OPTIONS = {"max_shard_size": "5MB", "family": "none"}
STORE_BYTES = 80 << 20
MOST_WAITED_S = 25.0
"""A job that waited for a new merger, which finds no place on one node, would take longer."""


class TwoNodes:
    """A head and a second node on this machine, of one CPU each."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False},
        )
        self.second: Node = self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)

    def kill_second(self) -> None:
        """As a machine goes that loses its power: its raylet and all workers at once, without a word to anybody."""
        [raylet] = self.second.all_processes["raylet"]
        below = children(raylet.process.pid)
        for pid in (raylet.process.pid, *below):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    started = TwoNodes()
    yield started
    started.close()


@pytest.fixture(scope="module")
def serving(nodes: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(
        tmp_path_factory.mktemp("serving"),
        RAY_ADDRESS=nodes.cluster.address,
        UNSHARD_MERGERS="2",
        UNSHARD_MERGER_CPUS="1",
    )
    yield process
    process.end()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_tensors(tmp_path_factory.mktemp("checkpoint") / "source")


def nodes_of(serving: Process, kind: str) -> set[str]:
    return {item["node"] for item in serving.client.workers()["items"] if item["kind"] == kind}


def test_a_collector_that_dies_alone_comes_back_to_its_node(
    nodes: TwoNodes, serving: Process, source: Path, tmp_path: Path
) -> None:
    client = serving.client
    eventually(client.ready, "the cluster is ready", within_s=START_S)
    both = {node["id"] for node in client.workers()["nodes"]}
    second = nodes.second.node_id
    collectors = [item for item in client.workers()["items"] if item["kind"] == "collector"]
    [dead] = [item["pid"] for item in collectors if item["node"] == second]
    job = client.submit(str(source), str(tmp_path / "model"), OPTIONS)
    eventually(lambda: completed(serving, job) >= 1, "a shard is done", within_s=START_S)
    os.kill(dead, signal.SIGKILL)
    done = client.wait(job["id"], timeout_s=START_S)
    assert done["state"] == "succeeded", done["error"]
    assert digests(tmp_path / "model") == digests(source)
    eventually(lambda: nodes_of(serving, "collector") == both, "both nodes have a collector", within_s=START_S)


def test_a_job_spreads_over_two_nodes_and_outlives_the_loss_of_one(
    nodes: TwoNodes, serving: Process, source: Path, tmp_path: Path
) -> None:
    client = serving.client
    eventually(client.ready, "the cluster is ready", within_s=START_S)
    told = client.workers()
    second = nodes.second.node_id
    [first] = {node["id"] for node in told["nodes"]} - {second}
    assert len(told["nodes"]) == 2
    assert nodes_of(serving, "merger") == nodes_of(serving, "collector") == {first, second}

    job = client.submit(str(source), str(tmp_path / "model"), OPTIONS)
    eventually(lambda: completed(serving, job) >= 1, "a shard is done", within_s=START_S)
    # The second node's merger keeps the parts that it has, so that the job can't end before the node is gone.
    [merger] = [item["pid"] for item in told["items"] if item["kind"] == "merger" and item["node"] == second]
    os.kill(merger, signal.SIGSTOP)
    nodes.kill_second()
    killed = time.monotonic()
    done = client.wait(job["id"], timeout_s=START_S)
    assert done["state"] == "succeeded", done["error"]
    assert time.monotonic() - killed < MOST_WAITED_S
    assert done["attempt"] == 1
    assert digests(tmp_path / "model") == digests(source)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    kinds = [event["type"] for event in client.events(job["id"])]
    assert kinds.count("job.succeeded") == 1
    assert "part.retried" in kinds

    eventually(lambda: [node["id"] for node in client.workers()["nodes"]] == [first], "one node is left", START_S)
    eventually(lambda: {item["node"] for item in client.workers()["items"]} == {first}, "its workers alone", START_S)
    again = client.submit(str(source), str(tmp_path / "again"), OPTIONS)
    assert client.wait(again["id"], timeout_s=START_S)["state"] == "succeeded"
    assert digests(tmp_path / "again") == digests(source)
