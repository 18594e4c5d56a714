"""What an API user can ask about one job, and change of it."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from safetensors.numpy import save_file

from service.client import ApiError
from tests.service.conftest import TENSORS, FakeConverter, eventually, running
from workers.convert import convert


def finished(service, destination="/out"):
    job = service.client.submit("/in", destination)
    return service.client.wait(job["id"], timeout_s=10)


def test_the_tensors_of_a_job_are_listed_page_by_page_with_their_sources(service):
    job = finished(service)
    path = f"/v1/jobs/{job['id']}/tensors"
    first = service.http.get(path, params={"limit": 1}).json()
    second = service.http.get(path, params={"limit": 1, "cursor": first["next_cursor"]}).json()
    assert [first["total"], second["total"], second["next_cursor"]] == [2, 2, None]
    expected = [{"position": number, "state": "done", **row} for number, row in enumerate(TENSORS)]
    assert first["items"] + second["items"] == expected


def test_tensors_are_found_by_a_part_of_their_name_or_by_their_file(service):
    path = f"/v1/jobs/{finished(service)['id']}/tensors"
    assert [item["name"] for item in service.http.get(path, params={"name": "B.W"}).json()["items"]] == ["b.weight"]
    assert service.http.get(path, params={"file": "other.safetensors"}).json()["total"] == 0


def test_shards_are_pending_before_they_are_written_and_done_after(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    service.job_in(job["id"], "running")
    path = f"/v1/jobs/{job['id']}/shards"
    [shard] = service.http.get(path).json()["items"]
    assert (shard["path"], shard["state"], shard["size_bytes"]) == ("model.safetensors", "pending", 10)
    assert service.http.get(f"/v1/jobs/{job['id']}/tensors").json()["items"][0]["state"] == "pending"
    converter.gate.set()
    service.client.wait(job["id"], timeout_s=10)
    [shard] = service.http.get(path).json()["items"]
    assert (shard["state"], shard["digest"]) == ("done", "xxh3-128:d")
    assert shard["finished_at"]


def test_the_report_of_a_job_is_the_manifest(service):
    job = finished(service)
    report = service.http.get(f"/v1/jobs/{job['id']}/report").json()
    assert report["weights"] == [{"path": "model.safetensors", "size_bytes": 10, "digest": "xxh3-128:d"}]


def test_what_is_not_there_yet_says_when_to_ask_again(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    service.job_in(job["id"], "running")
    problem = service.http.get(f"/v1/jobs/{job['id']}/report")
    assert problem.status_code == 404
    assert problem.json()["detail"].endswith("has no report yet: it is running")


def test_each_attempt_is_told_with_its_outcome(service, converter):
    converter.fail_with = [ValueError("no")]
    job = finished(service)
    service.client.retry(job["id"])
    service.client.wait(job["id"], timeout_s=10)
    items = service.http.get(f"/v1/jobs/{job['id']}/attempts").json()["items"]
    assert [(item["attempt"], item["outcome"]) for item in items] == [(1, "failed"), (2, "succeeded")]
    assert items[0]["error"]["kind"] == "internal"
    assert all(item["started_at"] <= item["ended_at"] for item in items)


def test_priority_and_labels_can_be_changed_and_nothing_else(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out", labels={"run": "1"})
    path = f"/v1/jobs/{job['id']}"
    assert service.http.patch(path, json={"priority": 7}).json()["priority"] == 7
    changed = service.http.patch(path, json={"labels": {"run": "2"}}).json()
    assert (changed["priority"], changed["labels"]) == (7, {"run": "2"})
    assert service.http.patch(path, json={"source": "/other"}).status_code == 422


def test_a_higher_priority_goes_first(settings):
    converter = FakeConverter()
    with running(settings.model_copy(update={"max_concurrent_jobs": 1}), converter) as service:
        running_job = service.client.submit("/in", "/0")
        service.job_in(running_job["id"], "running")
        late = [service.client.submit("/in", f"/{number}") for number in (1, 2, 3)]
        service.http.patch(f"/v1/jobs/{late[2]['id']}", json={"priority": 5})
        converter.gate.set()
        for job in late:
            service.client.wait(job["id"], timeout_s=10)
    assert [call["destination"] for call in converter.calls] == ["/0", "/3", "/1", "/2"]


def test_a_job_that_has_ended_can_be_forgotten_and_one_that_runs_cannot(service, converter):
    job = finished(service)
    assert service.http.delete(f"/v1/jobs/{job['id']}").status_code == 204
    assert service.http.get(f"/v1/jobs/{job['id']}").status_code == 404
    converter.gate.clear()
    live = service.client.submit("/in", "/out")
    service.job_in(live["id"], "running")
    refused = service.http.delete(f"/v1/jobs/{live['id']}")
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/invalid-state")


def test_an_answer_that_waits_comes_with_the_change_of_state(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    service.job_in(job["id"], "running")
    threading.Timer(0.2, converter.gate.set).start()
    told = service.http.get(f"/v1/jobs/{job['id']}", params={"wait": "10s"}).json()
    assert told["state"] in {"verifying", "succeeded"}


def test_a_submission_that_waits_is_answered_with_the_finished_job(service):
    told = service.http.post("/v1/jobs", params={"wait": "10s"}, json={"source": "/in", "destination": "/out"})
    assert (told.status_code, told.json()["state"]) == (201, "succeeded")


def test_the_wait_ends_with_its_time(service, converter):
    converter.gate.clear()
    told = service.http.post("/v1/jobs", params={"wait": "0.1s"}, json={"source": "/in", "destination": "/out"})
    assert told.json()["state"] in {"queued", "planning", "running"}


def test_an_unchanged_job_is_not_sent_again(service):
    path = f"/v1/jobs/{finished(service)['id']}"
    tag = service.http.get(path).headers["ETag"]
    again = service.http.get(path, headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    service.http.patch(path, json={"labels": {"a": "b"}})
    assert service.http.get(path, headers={"If-None-Match": tag}).status_code == 200


def test_the_same_request_with_the_same_key_gets_the_first_answer_even_when_the_job_went_on(service):
    key = {"Idempotency-Key": "once"}
    body = {"source": "/in", "destination": "/out"}
    first = service.http.post("/v1/jobs", json=body, headers=key)
    service.client.wait(first.json()["id"], timeout_s=10)
    again = service.http.post("/v1/jobs", json=body, headers=key)
    assert again.json() == first.json()
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.headers["Location"] == first.headers["Location"]


@pytest.fixture
def converting(settings):
    with running(settings, convert) as started:
        yield started


def write_model(folder, value=1.0):
    folder.mkdir(exist_ok=True)
    save_file({"a.weight": np.full((4, 4), value, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "anything"}))
    return folder


@pytest.fixture
def source(tmp_path):
    return write_model(tmp_path / "source")


def handed_in(service, source, destination):
    body = {"source": str(source), "destination": str(destination), "options": {"family": "none"}}
    return service.http.post("/v1/jobs", params={"if_done": "return", "wait": "20s"}, json=body)


def test_what_was_done_already_is_answered_with_the_job_that_did_it(converting, source, tmp_path):
    first = handed_in(converting, source, tmp_path / "model")
    assert (first.status_code, first.json()["state"]) == (201, "succeeded")
    again = handed_in(converting, source, tmp_path / "model")
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


def test_what_changed_since_is_done_again(converting, source, tmp_path):
    first = handed_in(converting, source, tmp_path / "model")
    write_model(source, value=2.0)
    again = handed_in(converting, source, tmp_path / "model")
    assert again.status_code == 201
    assert again.json()["id"] != first.json()["id"]


def test_what_was_taken_away_is_done_again(converting, source, tmp_path):
    first = handed_in(converting, source, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    again = handed_in(converting, source, tmp_path / "model")
    assert again.status_code == 201
    assert again.json()["id"] != first.json()["id"]


def test_a_retry_from_scratch_makes_everything_again(service, converter):
    converter.fail_with = [ValueError("no")]
    job = finished(service)
    service.http.post(f"/v1/jobs/{job['id']}:retry", json={"from_scratch": True})
    service.client.wait(job["id"], timeout_s=10)
    assert [call["options"].resume for call in converter.calls] == [True, False]


def test_jobs_are_found_by_where_they_read_and_write(service):
    wanted = finished(service, "/models/a_b/1")
    finished(service, "/models/aXb/1")
    found = service.http.get("/v1/jobs", params={"destination_prefix": "/models/a_b"}).json()["items"]
    assert [job["id"] for job in found] == [wanted["id"]]
    assert service.http.get("/v1/jobs", params={"source_prefix": "/other"}).json()["items"] == []
    with pytest.raises(ApiError, match="not a cursor"):
        service.client.jobs(cursor="%00")


def test_a_parameter_that_does_not_exist_is_refused(service):
    refused = service.http.get("/v1/jobs", params={"stat": "failed"})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["parameter"] == "stat"
    assert eventually(lambda: service.client.jobs() == [], "no jobs")
