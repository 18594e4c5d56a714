"""The service as a user starts it, on a Ray cluster of its own: nothing is faked."""

from __future__ import annotations

import signal

import pytest

from service.client import Client
from service.demo import CHECKPOINT, EXPECTED
from service.demo.process import ServiceProcess
from service.demo.proof import compare
from workers.storage import FolderAddress


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with ServiceProcess.start(tmp_path_factory.mktemp("service")) as service:
        service.wait_until_ready()
        yield service


def test_jobs_become_models_one_after_the_other(running, tmp_path):
    with Client(running.url) as client:
        for name in ("first", "second"):
            job = client.wait(client.submit(str(CHECKPOINT), str(tmp_path / name))["id"], timeout_s=60)
            assert job["state"] == "succeeded", job["error"]
            tensors, _ = compare(FolderAddress(str(tmp_path / name)), EXPECTED)
            assert tensors == job["progress"]["tensors_done"]


def test_a_missing_checkpoint_is_a_failed_job_and_the_service_goes_on(running, tmp_path):
    with Client(running.url) as client:
        job = client.wait(client.submit(str(tmp_path / "none"), str(tmp_path / "model"))["id"], timeout_s=60)
        assert job["state"] == "failed"
        assert job["error"]["hint"]
        assert client.ready()


def test_a_stop_signal_ends_the_service_and_its_cluster_in_order(running):
    running.process.send_signal(signal.SIGTERM)
    status = running.process.wait(30)
    assert status in {0, -signal.SIGTERM}, running.log.read_text()
