"""The process that drives Ray, without a cluster: it says what is wrong and ends, and a new one is begun."""

from __future__ import annotations

import socket
import threading

from service.jobs.child import Child, told_status
from service.jobs.cluster import Controls, Interrupted, RayConversions
from service.jobs.driver import DriverOptions
from service.jobs.planning import Planner
from service.settings import Settings
from tests.service.conftest import eventually
from tests.service.staged import CASE
from workers.events import ignore
from workers.options import ConvertOptions


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_driver_without_a_cluster_says_so_and_ends():
    child = Child("service.jobs.driver:serve")
    address = closed_port()
    child.channel.send(DriverOptions(address=address))
    said = child.channel.receive()
    while said[1] == "starting":
        said = child.channel.receive()
    assert said[:2] == ("state", "failed")
    assert f"no Ray cluster at {address}: Connection refused" in said[2]
    assert "RAY_ADDRESS" in said[2]
    assert child.status(10) is not None
    assert child.kill() == -9


def test_a_service_whose_cluster_is_not_there_says_so_and_interrupts_jobs_instead_of_failing_them(tmp_path):
    settings = Settings(data_dir=tmp_path, ray_address=closed_port())
    planner = Planner()
    conversions = RayConversions(settings, planner)
    conversions.start()
    try:
        eventually(lambda: conversions.state()[0] == "failed", "the cluster is told as missing", within_s=60)
        assert "Connection refused" in conversions.state()[1]
        assert conversions.describe() == {"nodes": [], "items": []}
        controls = Controls(ignore, threading.Event(), "job_1-1-1", lambda: None)
        raised = []
        try:
            conversions.run(str(CASE), str(tmp_path / "model"), ConvertOptions(), controls)
        except Interrupted as error:
            raised.append(str(error))
        assert "Connection refused" in raised[0]
        # It is tried again, and stays told as failed with its reason meanwhile.
        before = conversions._child
        eventually(lambda: conversions._child not in (None, before), "a new process", within_s=60)
        assert conversions.state()[0] == "failed"
    finally:
        conversions.close()
        planner.close()


def test_how_a_process_ended_is_told_in_words():
    assert told_status(-9) == "was ended by SIGKILL"
    assert told_status(-99) == "was ended by signal 99"
    assert told_status(3) == "ended with status 3"
    assert told_status(None) == "stopped answering"


def test_a_driver_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    conversions = RayConversions(Settings(data_dir=tmp_path), Planner())
    tried = []

    def start(_function):
        tried.append(1)
        raise OSError("no more processes")

    monkeypatch.setattr("service.jobs.cluster.Child", start)
    monkeypatch.setattr("service.jobs.cluster.FIRST_RETRY_S", 0.01)
    conversions.start()
    try:
        eventually(lambda: len(tried) > 1, "it is tried again")
        assert conversions.state() == ("failed", "the process that drives Ray could not be used: OSError")
    finally:
        conversions.close()
