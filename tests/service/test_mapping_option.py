"""A user's own mapping on its ways in: the command's file, the service's object, a path that the service may read."""

from __future__ import annotations

import json

import pytest

from service.errors import PROBLEMS
from tests.service.command import unshard
from tests.service.conftest import running
from tests.service.test_api import assert_problem
from tests.test_custom_mapping import MAPPING, hub_tensors, loaded, own_tensors, source

__all__ = ["source"]


def test_the_command_reads_a_file_and_says_what_it_did(source, tmp_path, capsys):
    file = tmp_path / "my.yaml"
    file.write_text(json.dumps(MAPPING))
    done = unshard(capsys, "convert", source, tmp_path / "model", "--mapping", file)
    assert done.status == 0, done.err
    assert "mine (mapping)" in done.out
    assert loaded(tmp_path / "model").keys() == hub_tensors(own_tensors()).keys()
    assert unshard(capsys, "verify", source, tmp_path / "model").status == 0


def test_a_plan_shows_the_mappings_digest_and_not_its_text(source, tmp_path, capsys):
    done = unshard(capsys, "plan", source, tmp_path / "model", "-o", f"mapping={json.dumps(MAPPING)}")
    assert done.status == 0, done.err
    assert '"rules"' not in done.out
    digest = json.loads(
        unshard(capsys, "plan", source, tmp_path / "model", "-o", f"mapping={json.dumps(MAPPING)}", "--json").out
    )["mapping"]
    assert f"mapping={digest}" in done.out


def test_a_mistake_is_told_with_file_and_place(source, tmp_path, capsys):
    file = tmp_path / "my.json"
    file.write_text(
        json.dumps({**MAPPING, "rules": [{"source": "a", "target": "b", "operations": [{"op": "trimm"}]}]})
    )
    done = unshard(capsys, "plan", source, tmp_path / "model", "--mapping", file)
    assert done.status == 1
    assert f"error: {file}: rules[0].operations[0].op: 'trimm' is not one of" in done.err
    assert "hint: Perhaps trim is meant." in done.err


def test_a_job_is_submitted_with_what_the_file_holds(service, source, tmp_path, capsys):
    file = tmp_path / "my.json"
    file.write_text(json.dumps(MAPPING, indent=2))
    done = unshard(capsys, "submit", source, tmp_path / "model", "--mapping", file, "--server", service.url, "--json")
    assert done.status == 0, done.err
    assert json.loads(json.loads(done.out)["options"]["mapping"]) == MAPPING


def test_the_service_plans_with_an_object(idle, source, tmp_path):
    body = {"source": str(source), "destination": str(tmp_path / "model"), "options": {"mapping": MAPPING}}
    response = idle.http.post("/v1/jobs", params={"dry_run": True}, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["plan"]["source"]["family"] == "mine (mapping)"
    schema = idle.http.get("/v1/formats").json()["options"]["properties"]["mapping"]
    assert {"type": "object"} in schema["anyOf"]


@pytest.mark.parametrize("mapping", [{"schema": 1}, '{"schema": 1}', 7])
def test_a_mapping_that_is_wrong_is_refused_when_it_is_submitted(idle, mapping):
    body = {"source": "/in", "destination": "/out", "options": {"mapping": mapping}}
    document = assert_problem(idle.http.post("/v1/jobs", json=body), PROBLEMS["validation"][0], "validation")
    assert document["errors"][0]["pointer"] == "/options/mapping"


def test_a_path_must_lie_where_the_service_may_read(settings, converter, source, tmp_path):
    inside, outside = source / "m.json", tmp_path / "m.json"
    inside.write_text(json.dumps(MAPPING))
    outside.write_text(json.dumps(MAPPING))
    body = {"source": str(source), "destination": str(tmp_path / "model")}
    with running(settings.model_copy(update={"allowed_sources": (str(source),)}), converter) as service:
        wrong = {**body, "options": {"mapping": str(outside)}}
        assert_problem(service.http.post("/v1/jobs", json=wrong), 403, "source-not-allowed")
        right = {**body, "options": {"mapping": str(inside)}}
        response = service.http.post("/v1/jobs", params={"dry_run": True}, json=right)
        assert response.json()["plan"]["source"]["family"] == "mine (mapping)"
        assert json.loads(response.json()["plan"]["options"]["mapping"]) == MAPPING
