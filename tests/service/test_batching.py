"""Batches and watches from the command line's side: what is sent, what is printed, and the exit status."""

from __future__ import annotations

import json
import threading
import time

import pytest

from service.batches.drafts import Draft
from service.batches.preview import already_done
from service.cli.batching import run_batch, run_batches, run_watch, run_watches
from service.cli.remote import Endpoint
from service.client import Unreachable
from service.jobs.planning import Planner
from service.jobs.records import NewJob
from tests.service.conftest import FakeConverter, eventually, running
from workers.errors import CorruptFile, InsufficientResources
from workers.storage.local import LocalFolder


@pytest.fixture
def run(tmp_path, monkeypatch):
    for step in (1, 2, 10):
        (tmp_path / "runs" / f"global_step_{step}").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


REQUEST = {
    "name": "all",
    "discover": {"prefix": "runs", "pattern": "global_step_*"},
    "template": {"destination": "models/{step}"},
}


def test_a_batch_is_waited_for_and_told(service, run, capsys):
    assert run_batch(Endpoint(service.url), REQUEST, wait=True, as_json=False) == 0
    printed = capsys.readouterr()
    assert "is completed: 3 succeeded of 3" in printed.out
    rows = [line.split() for line in printed.out.splitlines() if "global_step" in line]
    assert rows == [[f"{run}/runs/global_step_{n}", f"{run}/models/{n}", "succeeded"] for n in (1, 2, 10)]
    assert printed.err == ""


@pytest.mark.usefixtures("run")
def test_a_batch_is_told_as_json_with_its_items(service, capsys):
    assert run_batch(Endpoint(service.url), REQUEST, wait=True, as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["counts"]["succeeded"], len(told["items"])) == ("completed", 3, 3)


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([CorruptFile("broken", hint="copy it again")], 1),
        ([InsufficientResources("too small")] * 3, 3),
        ([InsufficientResources("too small"), CorruptFile("broken")], 1),
    ],
)
@pytest.mark.usefixtures("run")
def test_the_status_is_only_zero_when_all_have_succeeded(service, converter, capsys, errors, status):
    converter.fail_with = list(errors)
    assert run_batch(Endpoint(service.url), REQUEST, wait=True, as_json=False) == status
    assert f"failed: {errors[0].message}" in capsys.readouterr().out


def test_refused_items_make_the_status_fail(service, run, capsys):
    items = {"items": [{"source": "runs/a", "destination": "m"}, {"source": "runs/b", "destination": "m"}]}
    assert run_batch(Endpoint(service.url), items, wait=True, as_json=False) == 1
    assert f"refused: {run}/m is also the destination of item 0" in capsys.readouterr().out


@pytest.mark.usefixtures("run")
def test_without_waiting_the_batch_is_named(service, capsys):
    assert run_batch(Endpoint(service.url), REQUEST, wait=False, as_json=False) == 0
    assert "3 queued of 3" in capsys.readouterr().out


def test_a_dry_run_says_what_would_be_done_and_does_nothing(service, run, capsys):
    assert run_batch(Endpoint(service.url), REQUEST, wait=True, as_json=False, dry_run=True) == 0
    out = capsys.readouterr().out
    assert "3 models to make, 0 there already, 0 refused" in out
    assert f"{run}/models/10" in out
    assert run_batches(Endpoint(service.url), None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.usefixtures("run")
def test_batches_are_listed_shown_cancelled_and_retried(settings, capsys):
    held = FakeConverter()
    with running(settings, held) as service:
        endpoint = Endpoint(service.url)
        run_batch(endpoint, REQUEST, wait=False, as_json=True)
        batch = json.loads(capsys.readouterr().out)["id"]
        assert run_batches(endpoint, batch, action="cancel", as_json=False) == 0
        assert f"batch {batch} is canc" in capsys.readouterr().out
        eventually(lambda: service.http.get(f"/v1/batches/{batch}").json()["state"] == "cancelled", "it has ended")
        run_batches(endpoint, batch, action="retry", as_json=True)
        assert json.loads(capsys.readouterr().out)["state"] == "running"
        run_batches(endpoint, None, as_json=False)
        assert capsys.readouterr().out.splitlines()[1].split()[:3] == [batch, "running", "all"]
        held.gate.set()


def test_a_watch_is_made_paused_looked_at_and_deleted(service, run, capsys):
    endpoint = Endpoint(service.url)
    request = {"prefix": "runs", "pattern": "global_step_*", "template": {"destination": "m/{name}"}, "interval_s": 30}
    assert run_watch(endpoint, request, as_json=True) == 0
    watch = json.loads(capsys.readouterr().out)
    assert (watch["prefix"], watch["template"]["destination"]) == (f"{run}/runs", f"{run}/m/{{name}}")
    eventually(lambda: service.http.get(f"/v1/watches/{watch['id']}").json()["counts"]["waiting"] == 3, "all are seen")
    assert run_watches(endpoint, watch["id"], action="look", as_json=False) == 0
    out = capsys.readouterr().out
    assert f"watch {watch['id']} is active: {run}/runs/global_step_*" in out
    assert f"{run}/runs/global_step_10" in out
    run_watches(endpoint, watch["id"], action="pause", as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], len(told["items"])) == ("paused", 3)
    run_watches(endpoint, watch["id"], action="resume", as_json=False)
    assert "is active" in capsys.readouterr().out
    run_watches(endpoint, None, as_json=False)
    assert watch["id"] in capsys.readouterr().out
    assert run_watches(endpoint, watch["id"], action="delete", as_json=False) == 0
    assert "is deleted" in capsys.readouterr().out
    run_watches(endpoint, None, as_json=True)
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.usefixtures("run")
def test_a_service_that_does_not_answer_is_said():
    with pytest.raises(Unreachable):
        run_batch(Endpoint("http://127.0.0.1:9"), REQUEST, wait=True, as_json=False)


def test_a_destination_whose_storage_does_not_answer_is_told_as_not_known(run, monkeypatch):
    answer, real = threading.Event(), LocalFolder.stat

    def hang(folder, path):
        if folder.address.url.endswith("hung"):
            answer.wait(30)
        return real(folder, path)

    monkeypatch.setattr(LocalFolder, "stat", hang)
    jobs = [NewJob("/in", str(run / name), {}, {}) for name in ("hung", "free")]
    drafts = [Draft(job.source, job.destination, job) for job in jobs]
    began = time.monotonic()
    assert already_done(drafts, Planner(), 0.5) == [None, False]
    assert time.monotonic() - began < 10
    answer.set()
