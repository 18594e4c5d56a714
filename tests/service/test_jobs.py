"""The life of a job, told by the API while a converter that does as it is told stands in for the real one."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import timedelta

import pytest
from sqlalchemy import update

from service.client import ApiError
from service.db.tables import jobs
from service.jobs.records import now
from service.logs import JsonLines, logged_as
from tests.service.conftest import FakeConverter, eventually, running
from workers.errors import (
    CorruptFile,
    DestinationBusy,
    DestinationNotEmpty,
    IncompleteCheckpoint,
    InsufficientResources,
    StorageError,
    VerificationFailed,
)


def test_a_job_goes_through_its_states_and_ends_with_a_result(service, converter):
    job = service.client.submit("/in", "/out", {"dtype": "bfloat16"}, labels={"run": "7"})
    assert (job["state"], job["attempt"]) == ("queued", 0)
    done = service.client.wait(job["id"], timeout_s=10)
    assert done["state"] == "succeeded"
    assert list(done["state_times"]) == ["queued", "planning", "running", "verifying", "succeeded"]
    assert done["attempt"] == 1
    assert done["labels"] == {"run": "7"}
    assert done["result"]["location"] == "/out"
    assert done["result"]["bytes"] == 10
    assert done["result"]["digest"].startswith("xxh3-128:")
    assert done["warnings"] == ["all zeros"]
    assert converter.calls[0]["options"].dtype == "bfloat16"


def test_a_running_job_tells_its_progress(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    service.job_in(job["id"], "running")
    told = eventually(lambda: service.client.job(job["id"])["progress"], "progress")
    assert (told["bytes_done"], told["bytes_total"], told["tensors_done"]) == (5, 10, 1)
    assert (told["bytes_read"], told["bytes_merged"]) == (7, 6)
    assert told["workers"] == {"merger-0": "model.layers.0"}
    assert service.client.plan(job["id"])["tensors"] == 2


def test_a_queued_job_is_cancelled_at_once(settings, converter):
    converter.gate.clear()
    with running(settings.model_copy(update={"max_concurrent_jobs": 1}), converter) as service:
        first = service.client.submit("/in", "/a")
        service.job_in(first["id"], "running")
        second = service.client.submit("/in", "/b")
        answer = service.http.post(f"/v1/jobs/{second['id']}:cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        assert len(converter.calls) == 1


def test_a_running_job_is_cancelled_within_a_second(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    service.job_in(job["id"], "running")
    answer = service.http.post(f"/v1/jobs/{job['id']}:cancel")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelling")
    eventually(lambda: service.client.job(job["id"])["state"] == "cancelled", "cancelled", within_s=1)
    assert not converter.committed


def test_what_breaks_while_a_job_is_cancelled_does_not_make_it_a_failed_one(service, converter):
    converter.gate.clear()
    converter.when_cancelled = StorageError("the cluster is gone")
    job = service.client.submit("/in", "/out")
    service.job_in(job["id"], "running")
    service.client.cancel(job["id"])
    assert service.client.wait(job["id"], timeout_s=10)["state"] == "cancelled"


def test_cancelling_a_finished_job_changes_nothing(service):
    job = service.client.submit("/in", "/out")
    service.client.wait(job["id"], timeout_s=10)
    answer = service.http.post(f"/v1/jobs/{job['id']}:cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "succeeded")


def test_a_job_that_is_cancelled_just_before_its_commit_does_not_commit(service, converter):
    ids = []
    converter.before_commit = lambda: service.client.cancel(ids[0])
    converter.gate.clear()
    ids.append(service.client.submit("/in", "/out")["id"])
    converter.gate.set()
    assert service.client.wait(ids[0], timeout_s=10)["state"] == "cancelled"
    assert not converter.committed


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (
            IncompleteCheckpoint("rank 1 is missing", hint="copy it", file="rank_1.pt"),
            "input",
            "incomplete-checkpoint",
        ),
        (CorruptFile("damaged"), "input", "corrupt-file"),
        (VerificationFailed("differs"), "input", "verification-failed"),
        (DestinationNotEmpty("full of things"), "destination", "destination-not-empty"),
        (StorageError("bucket gone"), "destination", "storage"),
        (InsufficientResources("too little disk"), "resource", "insufficient-resources"),
        (ZeroDivisionError("canary in a message"), "internal", "internal"),
    ],
)
def test_a_failed_job_says_who_has_to_act_and_how(service, converter, error, kind, name):
    converter.fail_with = [error]
    job = service.client.submit("/in", "/out")
    done = service.client.wait(job["id"], timeout_s=10)
    assert done["state"] == "failed"
    assert (done["error"]["kind"], done["error"]["type"]) == (kind, name)
    assert done["error"]["message"]
    if isinstance(error, IncompleteCheckpoint):
        assert (done["error"]["hint"], done["error"]["file"]) == ("copy it", "rank_1.pt")
    assert "canary" not in service.http.get(f"/v1/jobs/{job['id']}").text
    assert "canary" not in service.http.get(f"/v1/jobs/{job['id']}/events").text


def test_a_job_that_takes_too_long_fails_by_timeout(settings, converter):
    converter.gate.clear()
    with running(settings.model_copy(update={"job_timeout_s": 0.2}), converter) as service:
        job = service.client.submit("/in", "/out")
        assert service.client.wait(job["id"], timeout_s=10)["error"]["kind"] == "timeout"


def test_a_failed_job_succeeds_when_it_is_retried(service, converter):
    converter.fail_with = [StorageError("bucket gone")]
    job = service.client.submit("/in", "/out")
    service.client.wait(job["id"], timeout_s=10)
    again = service.client.retry(job["id"])
    assert again["id"] == job["id"]
    assert again["error"] is None
    done = service.client.wait(job["id"], timeout_s=10)
    assert (done["state"], done["attempt"]) == ("succeeded", 2)
    assert len({call["attempt"] for call in converter.calls}) == 2


def test_a_later_attempt_waits_until_an_earlier_one_has_let_go_of_the_destination(service, converter, monkeypatch):
    monkeypatch.setattr("service.jobs.attempt.CLAIM_POLL_S", 0.02)
    converter.fail_with = [DestinationBusy("claimed"), DestinationBusy("claimed"), DestinationBusy("claimed")]
    job = service.client.submit("/in", "/out")
    assert service.client.wait(job["id"], timeout_s=10)["error"]["type"] == "destination-busy"
    service.client.retry(job["id"])
    assert service.client.wait(job["id"], timeout_s=10)["state"] == "succeeded"
    assert len(converter.calls) == 4


def test_a_job_that_succeeded_is_not_retried(service):
    job = service.client.submit("/in", "/out")
    service.client.wait(job["id"], timeout_s=10)
    with pytest.raises(ApiError) as caught:
        service.client.retry(job["id"])
    assert (caught.value.status, caught.value.code) == (409, "invalid-state")
    assert caught.value.problem["allowed"] == ["failed", "cancelled"]


def test_two_live_jobs_do_not_share_a_destination_but_two_in_turn_do(service, converter, tmp_path):
    converter.gate.clear()
    (tmp_path / "link").symlink_to(tmp_path / "models")
    first = service.client.submit("/in", str(tmp_path / "models" / "a"))
    with pytest.raises(ApiError) as caught:
        service.client.submit("/in", str(tmp_path / "link" / "x" / ".." / "a"))
    assert (caught.value.status, caught.value.code) == (409, "destination-busy")
    assert caught.value.problem["job_id"] == first["id"]
    converter.gate.set()
    service.client.wait(first["id"], timeout_s=10)
    service.client.wait(service.client.submit("/in", str(tmp_path / "models" / "a"))["id"], timeout_s=10)


def test_a_retry_waits_for_whoever_has_the_destination_now(service, converter):
    converter.fail_with = [StorageError("bucket gone")]
    failed = service.client.submit("/in", "/out")
    service.client.wait(failed["id"], timeout_s=10)
    converter.gate.clear()
    service.client.submit("/in", "/out")
    with pytest.raises(ApiError, match="writes to /out"):
        service.client.retry(failed["id"])


def test_jobs_of_higher_priority_go_first(settings, converter):
    converter.gate.clear()
    with running(settings.model_copy(update={"max_concurrent_jobs": 1}), converter) as service:
        service.job_in(service.client.submit("/in", "/running")["id"], "running")
        for name, priority in (("low", -1), ("high", 5), ("middle", 0)):
            body = {"source": "/in", "destination": f"/{name}", "priority": priority}
            assert service.http.post("/v1/jobs", json=body).status_code == 201
        converter.gate.set()
        eventually(lambda: len(converter.committed) == 4, "all jobs are done")
    order = [call["destination"] for call in converter.calls]
    assert order == ["/running", "/high", "/middle", "/low"]


def test_a_stopping_service_gives_its_jobs_back_and_the_next_one_finishes_them(settings, converter):
    converter.gate.clear()
    with running(settings, converter) as service:
        job = service.client.submit("/in", "/out")
        service.job_in(job["id"], "running")
    again = FakeConverter()
    again.gate.set()
    with running(settings, again) as service:
        done = service.client.wait(job["id"], timeout_s=10)
        assert (done["state"], done["attempt"]) == ("succeeded", 2)
        kinds = [event["type"] for event in service.client.events(job["id"])]
        assert "job.requeued" in kinds
    assert not converter.committed


def test_a_lost_lease_requeues_the_job_and_the_stale_attempt_cannot_commit(service, converter):
    reached, gone_on = threading.Event(), threading.Event()
    ids = []

    def stall():
        if not reached.is_set():
            reached.set()
            gone_on.wait(10)

    converter.before_commit = stall
    ids.append(service.client.submit("/in", "/out")["id"])
    assert reached.wait(10)
    with service.context.database.write() as connection:
        # As if this process had been stalled for longer than the lease.
        connection.execute(update(jobs).values(lease_expires_at=now() - timedelta(seconds=1), lease_owner="nobody"))
    done = service.client.wait(ids[0], timeout_s=10)
    gone_on.set()
    assert (done["state"], done["attempt"]) == ("succeeded", 2)
    eventually(lambda: "unshard_lease_lost_total 2.0" in service.http.get("/metrics").text, "the loss is counted")
    assert len(converter.calls) == 2
    assert converter.committed == [converter.calls[1]["attempt"]]


def test_events_come_in_order_as_pages_and_as_a_stream_that_resumes(service):
    job = service.client.submit("/in", "/out")
    streamed = list(service.client.follow(job["id"]))
    kinds = [event["type"] for event in streamed]
    assert kinds[0] == "job.created"
    assert kinds[-1] == "job.succeeded"
    assert "shard.completed" in kinds
    numbers = [event["seq"] for event in streamed]
    assert numbers == sorted(numbers)
    assert list(service.client.follow(job["id"], after=numbers[2])) == streamed[3:]
    assert service.client.events(job["id"], after=numbers[2]) == streamed[3:]


def test_metrics_count_jobs_and_bytes(service):
    job = service.client.submit("/in", "/out")
    service.client.wait(job["id"], timeout_s=10)
    wanted = [
        'unshard_jobs{state="succeeded"} 1.0',
        'unshard_job_duration_seconds_count{state="succeeded"} 1.0',
        'unshard_bytes_total{direction="read"} 7.0',
        'unshard_bytes_total{direction="merged"} 8.0',
        'unshard_bytes_total{direction="written"} 10.0',
        "unshard_tensors_total 2.0",
        "unshard_queue_age_seconds 0.0",
    ]
    eventually(lambda: all(line in service.http.get("/metrics").text for line in wanted), "metrics")


def test_a_line_of_the_log_is_json_and_names_its_job():
    record = logging.LogRecord("service", logging.ERROR, __file__, 1, "part %d", (3,), None)
    with logged_as("job_1"):
        line = json.loads(JsonLines().format(record))
    assert (line["level"], line["message"], line["job_id"]) == ("error", "part 3", "job_1")
    try:
        int("broken")
    except ValueError:
        record = logging.LogRecord("service", logging.ERROR, __file__, 1, "fault", (), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line
    assert "ValueError: invalid literal" in json.loads(line)["trace"]
    assert "job_id" not in json.loads(line)
