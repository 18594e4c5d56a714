"""Batches over HTTP: a list or a pattern in, jobs out, and what is told of them."""

from __future__ import annotations

import pytest

from tests.service.conftest import eventually


def steps(folder, *numbers):
    for number in numbers:
        (folder / f"global_step_{number}").mkdir(parents=True)
    return folder


@pytest.fixture
def run(tmp_path):
    return steps(tmp_path / "runs" / "qwen", 100, 20, 3)


def submitted(service, request, status=201, **params):
    response = service.http.post("/v1/batches", json=request, params=params)
    assert response.status_code == status, response.text
    return response.json()


def ended(service, batch):
    def look():
        told = service.http.get(f"/v1/batches/{batch['id']}").json()
        return told if told["state"] in ("completed", "cancelled") else None

    return eventually(look, f"{batch['id']} has ended")


def test_every_step_of_a_run_becomes_a_job_in_the_order_of_the_steps(service, run, tmp_path):
    request = {
        "name": "all of it",
        "discover": {"prefix": str(run), "pattern": "global_step_*"},
        "template": {"destination": f"{tmp_path}/models/{{run}}-{{step}}", "labels": {"team": "a"}},
    }
    batch = submitted(service, request)
    assert (batch["state"], batch["counts"]["total"], batch["counts"]["queued"]) == ("running", 3, 3)
    items = service.http.get(f"/v1/batches/{batch['id']}/items").json()["items"]
    assert [item["source"] for item in items] == [f"{run}/global_step_{step}" for step in (3, 20, 100)]
    assert [item["destination"] for item in items] == [f"{tmp_path}/models/qwen-{step}" for step in (3, 20, 100)]
    done = ended(service, batch)
    assert done["state"] == "completed"
    assert done["counts"] == {**dict.fromkeys(done["counts"], 0), "total": 3, "succeeded": 3}
    assert (done["bytes_done"], done["bytes_total"], done["eta_s"]) == (30, 30, None)
    jobs = service.http.get("/v1/jobs", params={"batch_id": batch["id"]}).json()["items"]
    assert {job["labels"]["team"] for job in jobs} == {"a"}
