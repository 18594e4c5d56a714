"""Whatever dies of the cluster while jobs run: they are finished, once, and keep what was finished before."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.conftest import eventually
from tests.service.serving import START_S, TENSORS, Process, completed, digests, kept_files, many_tensors

OPTIONS = {"max_shard_size": "5MB", "family": "none"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_ADDRESS", raising=False)
        process = Process(tmp_path_factory.mktemp("serving"))
    yield process
    process.end()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_tensors(tmp_path_factory.mktemp("checkpoint") / "source")


def status_of(pid: int) -> list[str]:
    """Name, state and parent of a process; empty when there is none."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [name, *rest.split()[:2]]


def children(pid: int) -> dict[int, str]:
    """The process ids and names of the living processes below one."""
    found: dict[int, str] = {}
    every = {int(entry.name): status_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    parents = {pid}
    while parents:
        below = {child: s[0] for child, s in every.items() if s and s[1] != "Z" and int(s[2]) in parents}
        found |= below
        parents = set(below)
    return found


def driver_of(service: Process) -> int | None:
    """The process that drives Ray: the one below the service that has Ray's head below it, or will have."""
    for child in children(service.process.pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"service.jobs.driver:serve" in command:
            return child
    return None


def worker(service: Process, kind: str) -> int:
    """The process id of an actor, as the service tells it."""
    return next(item["pid"] for item in service.client.workers()["items"] if item["kind"] == kind)


def part_of_ray(service: Process, name: str) -> int:
    return next(pid for pid, found in children(service.process.pid).items() if found == name)


VICTIMS: dict[str, tuple[Callable[[Process], int | None], set[int]]] = {
    "a merger": (lambda service: worker(service, "merger"), {1}),
    "a collector": (lambda service: worker(service, "collector"), {1}),
    "the driver": (driver_of, {2}),
    "the head": (lambda service: part_of_ray(service, "gcs_server"), {1, 2}),
    "the node": (lambda service: part_of_ray(service, "raylet"), {1, 2}),
}
"""Whom to kill, and how many attempts the job takes: actors may outlive head and node for as long as a job lasts."""


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_job_whose_cluster_loses_a_part_is_finished_once(
    serving: Process, source: Path, tmp_path: Path, victim: str
) -> None:
    find, attempts = VICTIMS[victim]
    eventually(serving.client.ready, "the cluster is ready", within_s=START_S)
    job = serving.client.submit(str(source), str(tmp_path / "model"), OPTIONS)
    eventually(lambda: completed(serving, job) >= 3, "three shards are done", within_s=START_S)
    dead = find(serving)
    assert dead is not None
    os.kill(dead, signal.SIGKILL)
    if attempts != {1}:
        eventually(lambda: not serving.client.ready(), "the loss is noticed", within_s=START_S)

    done = serving.client.wait(job["id"], timeout_s=START_S)
    assert done["state"] == "succeeded", done["error"]
    assert digests(tmp_path / "model") == digests(source)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert done["attempt"] in attempts
    events = serving.client.events(job["id"])
    kinds = [event["type"] for event in events]
    assert kinds.count("job.succeeded") == 1
    if done["attempt"] == 2:
        reasons = [event["data"]["reason"] for event in events if event["type"] == "job.requeued"]
        assert len(reasons) == 1
        assert "Ray" in reasons[0]
        kept = kept_files(serving, job)[1]
        assert len(kept) >= 3
        # What was finished wasn't done again.
        again = [event["data"]["name"] for event in events[kinds.index("job.requeued") :] if "name" in event["data"]]
        assert not set(kept) & set(again)
        assert len({*kept, *again}) == TENSORS


def test_workers_and_nodes_are_told_with_what_they_do(serving: Process, source: Path, tmp_path: Path) -> None:
    eventually(serving.client.ready, "the cluster is ready", within_s=START_S)
    jobs: list[str] = []

    def at_work() -> list[dict[str, str]]:
        # What workers do is told every second or so, and one job may begin and end between.
        if not jobs or serving.client.job(jobs[-1])["state"] == "succeeded":
            job = serving.client.submit(str(source), str(tmp_path / "models" / str(len(jobs))), OPTIONS)
            jobs.append(job["id"])
        return [doing for item in serving.client.workers()["items"] for doing in item["doing"]]

    doing = eventually(at_work, "somebody is at work", within_s=START_S)
    assert doing[0]["job_id"] in jobs
    assert doing[0]["file"].endswith(".safetensors")
    told = serving.client.workers()
    assert told["state"] == "ok"
    [node] = told["nodes"]
    assert node["total"]["CPU"] >= node["available"]["CPU"]
    assert node["object_store_bytes"] > node["object_store_used_bytes"] >= 0
    assert {item["node"] for item in told["items"]} == {node["id"]}
    assert all(status_of(item["pid"]) for item in told["items"])
    assert serving.client.wait(jobs[-1], timeout_s=START_S)["state"] == "succeeded"


def test_nothing_of_a_service_that_is_killed_lingers(serving: Process, source: Path, tmp_path: Path) -> None:
    eventually(serving.client.ready, "the cluster is ready", within_s=START_S)
    job = serving.client.submit(str(source), str(tmp_path / "model"), OPTIONS)
    eventually(lambda: completed(serving, job) >= 1, "a shard is done", within_s=START_S)
    everybody = children(serving.process.pid)
    assert "gcs_server" in everybody.values()
    serving.kill()
    eventually(lambda: not any(status_of(pid)[1:2] not in ([], ["Z"]) for pid in everybody), "all have ended", 20)
    assert not (tmp_path / "model").exists()
