"""The whole way: REST in, Ray actors at work, a model out; and a service that is killed in the middle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.service.conftest import eventually
from tests.service.serving import START_S, Process, completed, digests, kept_files, many_tensors

CASES = Path(__file__).parent.parent / "cases" / "verl-fsdp"


@pytest.fixture(scope="module", autouse=True)
def no_cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A service that the tests of this module share, the last of which ends it."""
    process = Process(tmp_path_factory.mktemp("serving"))
    yield process
    process.end()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], Process]]:
    processes = []

    def start() -> Process:
        processes.append(Process(tmp_path / "data"))
        return processes[-1]

    yield start
    for each in processes:
        each.end()


def expected(case: str) -> dict[str, dict]:
    tensors = json.loads((CASES / case / "expected.json").read_text())["tensors"]
    return {name: {key: facts[key] for key in ("shape", "sha256")} for name, facts in tensors.items()}


def test_a_checkpoint_becomes_the_expected_model_by_rest_and_ray(serving, tmp_path):
    case = "llama-gqa-fsdp2-ws2"
    # The API answers long before the cluster is there; the job waits for it.
    job = serving.client.submit(str(CASES / case / "input"), str(tmp_path / "model"))
    done = serving.client.wait(job["id"], timeout_s=START_S)
    assert done["state"] == "succeeded", done["error"]
    assert serving.client.ready()
    assert digests(tmp_path / "model") == expected(case)
    elements = sum(math.prod(facts["shape"]) for facts in expected(case).values())
    progress = done["progress"]
    assert (progress["bytes_read"], progress["bytes_merged"]) == (4 * elements, 4 * elements)
    assert progress["bytes_done"] == progress["bytes_total"] > progress["bytes_merged"]
    workers = serving.client.workers()
    assert workers["state"] == "ok"
    assert {worker["kind"] for worker in workers["items"]} == {"merger", "collector"}


def test_a_broken_checkpoint_fails_with_what_is_missing_and_leaves_nothing(serving, tmp_path):
    broken = str(CASES / "error-missing-rank-file" / "input")
    job = serving.client.submit(broken, str(tmp_path / "model"))
    failed = serving.client.wait(job["id"], timeout_s=START_S)
    assert (failed["error"]["kind"], failed["error"]["type"]) == ("input", "incomplete-checkpoint")
    assert failed["error"]["hint"]
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_that_is_not_there_is_a_failed_job_and_the_service_goes_on(serving, tmp_path):
    job = serving.client.submit(str(tmp_path / "none"), str(tmp_path / "model"))
    failed = serving.client.wait(job["id"], timeout_s=START_S)
    assert failed["state"] == "failed"
    assert failed["error"]["hint"]
    assert serving.client.ready()


def test_a_conversion_on_ray_is_cancelled_within_a_second_and_a_retry_keeps_what_was_finished(serving, tmp_path):
    options = {"max_shard_size": "5MB", "family": "none"}
    job = serving.client.submit(str(many_tensors(tmp_path / "source")), str(tmp_path / "model"), options)
    eventually(lambda: completed(serving, job) >= 1, "a shard is done", within_s=START_S)
    serving.client.cancel(job["id"])
    eventually(lambda: serving.client.job(job["id"])["state"] == "cancelled", "cancelled", within_s=2)
    assert not (tmp_path / "model").exists()
    serving.client.retry(job["id"])
    done = serving.client.wait(job["id"], timeout_s=START_S)
    assert done["state"] == "succeeded", done["error"]
    assert len(kept_files(serving, job)[1]) >= 1
    assert digests(tmp_path / "model") == digests(tmp_path / "source")


def test_a_stop_signal_is_an_orderly_end(serving):
    assert serving.stop() == 0
    log = serving.log.read_text()
    assert "Traceback" not in log
    assert "SIGTERM" not in log


def test_a_service_that_is_killed_in_the_middle_of_a_job_finishes_it_after_its_restart(started, tmp_path):
    source = many_tensors(tmp_path / "source")
    service = started()
    options = {"max_shard_size": "5MB", "family": "none"}
    job = service.client.submit(str(source), str(tmp_path / "model"), options)

    eventually(lambda: completed(service, job) >= 2, "two shards are done", within_s=START_S)
    service.kill()
    assert not (tmp_path / "model").exists()

    again = started()
    done = again.client.wait(job["id"], timeout_s=START_S)
    assert done["state"] == "succeeded", done["error"]
    assert done["attempt"] == 2
    kept = kept_files(again, job)
    assert len(kept[0]) == 0
    assert len(kept[1]) >= 2
    assert digests(tmp_path / "model") == digests(source)
    assert again.stop() == 0
