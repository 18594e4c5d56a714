"""The wire: answers, problems, pages, and who may ask."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest

from service import app as application
from service.app import create_app
from service.batches.keeper import Keeper
from service.client import ApiError, Client, Unreachable
from service.errors import PROBLEMS
from service.jobs.retention import Janitor
from service.jobs.runner import Runner
from service.watches.watcher import Watcher
from service.webhooks.deliverer import Deliverer
from tests.service.conftest import TOKEN, FakeConverter, eventually, running

CASES = Path(__file__).parent.parent / "cases" / "verl-fsdp"
CASE = CASES / "llama-gqa-fsdp2-ws2" / "input"
BODY = {"source": "/in", "destination": "/out"}


def assert_problem(response, status, name):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert document["type"] == f"/problems/{name}"
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    assert document["hint"]
    return document


def test_a_submitted_job_is_answered_with_its_place(service):
    response = service.http.post("/v1/jobs", json=BODY)
    assert response.status_code == 201
    assert response.headers["location"] == f"/v1/jobs/{response.json()['id']}"
    assert service.http.get(response.headers["location"]).json()["id"] == response.json()["id"]
    assert response.json()["links"]["cancel"].endswith(":cancel")


def test_the_same_key_and_request_give_the_same_job(service):
    headers = {"Idempotency-Key": "step-100"}
    first = service.http.post("/v1/jobs", json=BODY, headers=headers)
    second = service.http.post("/v1/jobs", json=BODY, headers=headers)
    assert first.json()["id"] == second.json()["id"]
    assert second.status_code == 201
    assert second.headers["idempotency-replayed"] == "true"
    other = service.http.post("/v1/jobs", json={**BODY, "destination": "/other"}, headers=headers)
    assert_problem(other, 422, "idempotency-key-reuse")
    assert len(service.client.jobs()) == 1


def test_a_dry_run_answers_with_the_plan_and_stores_nothing(idle, tmp_path):
    body = {"source": str(CASE), "destination": str(tmp_path / "out")}
    response = idle.http.post("/v1/jobs", params={"dry_run": True}, json=body)
    assert response.status_code == 200
    assert response.json()["plan"]["source"]["format"] == "verl-fsdp"
    assert idle.client.jobs() == []
    assert not (tmp_path / "out").exists()


def test_a_list_of_modules_to_ignore_travels_to_the_plan_and_to_the_job(idle, tmp_path):
    options = {"ignore": ["lm_head", "re:.*o_proj$"], "quantization": "fp8-dynamic"}
    body = {"source": str(CASE), "destination": str(tmp_path / "out"), "options": options}
    plan = idle.http.post("/v1/jobs", params={"dry_run": True}, json=body).json()["plan"]
    assert plan["options"] == options
    assert any("self_attn.o_proj" in note for note in plan["notes"])
    job = idle.client.submit(body["source"], body["destination"], options)
    assert idle.client.job(job["id"])["options"] == options
    schema = idle.client.formats()["options"]["properties"]["ignore"]
    assert (schema["type"], schema["items"]) == ("array", {"type": "string"})
    document = assert_problem(
        idle.http.post("/v1/jobs", json={**body, "options": options | {"ignore": [1]}}), 422, "validation"
    )
    assert document["errors"][0]["pointer"] == "/options/ignore"


def test_a_dry_run_of_a_broken_checkpoint_says_what_is_wrong(idle, tmp_path):
    body = {"source": str(CASES / "error-missing-rank-file" / "input"), "destination": str(tmp_path / "out")}
    response = idle.http.post("/v1/jobs", params={"dry_run": True}, json=body)
    assert_problem(response, 422, "incomplete-checkpoint")


def test_jobs_come_in_pages_from_the_newest_on(service):
    made = [service.client.submit("/in", f"/out/{n}", labels={"n": str(n % 2)})["id"] for n in range(7)]
    seen, cursor = [], None
    for size in (3, 3, 1):
        params = {"limit": 3} | ({"cursor": cursor} if cursor else {})
        page = service.http.get("/v1/jobs", params=params).json()
        assert len(page["items"]) == size
        seen += [job["id"] for job in page["items"]]
        cursor = page["next_cursor"]
    assert cursor is None
    assert seen == made[::-1] == [job["id"] for job in service.client.all_jobs()]
    labelled = service.http.get("/v1/jobs", params={"label": "n:1"}).json()["items"]
    assert [job["id"] for job in labelled] == [made[5], made[3], made[1]]


def test_jobs_are_filtered_by_states(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    service.job_in(job["id"], "running")
    states = {"state": ["running", "failed"]}
    assert [found["id"] for found in service.http.get("/v1/jobs", params=states).json()["items"]] == [job["id"]]
    assert service.client.jobs(state="succeeded") == []


@pytest.mark.parametrize(
    ("request_", "status", "name"),
    [
        (("GET", "/v1/nothing", {}), 404, "not-found"),
        (("GET", "/v1/jobs/job_0", {}), 404, "not-found"),
        (("POST", "/v1/jobs/job_0:cancel", {}), 404, "not-found"),
        (("GET", "/v1/jobs/job_0/events", {}), 404, "not-found"),
        (("GET", "/v1/jobs/job_0/events", {"headers": {"Accept": "text/event-stream"}}), 404, "not-found"),
        (("DELETE", "/v1/jobs", {}), 405, "method-not-allowed"),
        (("POST", "/v1/jobs", {"content": b"{", "headers": {"Content-Type": "application/json"}}), 400, "bad-request"),
        (("POST", "/v1/jobs", {"content": b"[" * 100 + b"]" * 100}), 400, "bad-request"),
        (("POST", "/v1/jobs", {"content": b"x" * (2**20 + 1)}), 413, "payload-too-large"),
        (("POST", "/v1/jobs", {"json": {"source": "/in"}}), 422, "validation"),
        (("POST", "/v1/jobs", {"json": {"source": "in", "destination": "/out"}}), 422, "invalid-option"),
        (("GET", "/v1/jobs?limit=0", {}), 422, "validation"),
        (("GET", "/v1/jobs?cursor=%C3%A9", {}), 422, "validation"),
        (("GET", "/v1/jobs?cursor=am9i", {}), 422, "validation"),
        (("GET", "/v1/jobs?label=x", {}), 422, "validation"),
        (("GET", "/v1/jobs?label=%22:x", {}), 422, "validation"),
        (("GET", "/v1/jobs?created_after=0001-01-01T00:00:00%2B14:00", {}), 422, "validation"),
        (("GET", "/v1/jobs/%00", {}), 404, "not-found"),
        (("GET", "/v1/jobs/job_0/events?after=99999999999999999999", {}), 422, "validation"),
        (("POST", "/v1/inspect", {"json": {"source": "/nowhere/at/all"}}), 422, "unknown-format"),
    ],
)
def test_every_error_has_the_same_form(idle, request_, status, name):
    method, path, extra = request_
    assert_problem(idle.http.request(method, path, **extra), status, name)


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"source": "/in"}, "/destination"),
        ({**BODY, "options": {"dtype": "float8"}}, "/options/dtype"),
        ({**BODY, "options": {"colour": "red"}}, "/options/colour"),
        ({**BODY, "options": {"memory": "1MB"}}, "/options/memory"),
        ({**BODY, "options": {"config_dir": "\ud800"}}, "/options/config_dir"),
        ({**BODY, "options": {"\ud800": 1}}, "/options/\ud800"),
        ({**BODY, "labels": {"a/b": 1}}, "/labels/a~1b"),
        ({**BODY, "priority": "high"}, "/priority"),
        ({**BODY, "endpoint": "http://elsewhere"}, "/endpoint"),
        ({**BODY, "source": "/in\u0000"}, "/source"),
    ],
)
def test_a_wrong_place_in_a_request_is_pointed_at(idle, body, pointer):
    content = json.dumps(body).encode()
    response = idle.http.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    document = response.json()
    assert (response.status_code, document["type"]) == (422, "/problems/validation")
    assert document["errors"][0]["pointer"] == pointer
    assert document["hint"]


def test_an_unexpected_fault_tells_nothing_of_itself(service, monkeypatch):
    def broken(_job_id):
        raise ValueError("canary")

    monkeypatch.setattr(service.context.store.__class__, "get", lambda _self, job_id: broken(job_id))
    response = service.http.get("/v1/jobs/job_0")
    assert_problem(response, 500, "internal")
    assert "canary" not in response.text


def test_each_problem_says_what_its_type_means(idle):
    for name, (status, title) in PROBLEMS.items():
        document = idle.http.get(f"/problems/{name}").json()
        assert (document["status"], document["title"]) == (status, title)


def test_places_outside_of_the_allowed_ones_are_refused(settings, converter, tmp_path):
    allowed = {"allowed_sources": (str(tmp_path / "in"),), "allowed_destinations": (str(tmp_path / "out"),)}
    good = {"source": str(tmp_path / "in" / "x"), "destination": str(tmp_path / "out" / "y")}
    with running(settings.model_copy(update=allowed), converter) as service:
        assert service.http.post("/v1/jobs", json=good).status_code == 201
        wrong = {**good, "source": "/etc"}
        assert_problem(service.http.post("/v1/jobs", json=wrong), 403, "source-not-allowed")
        wrong = {**good, "destination": str(tmp_path / "out" / ".." / "y")}
        assert_problem(service.http.post("/v1/jobs", json=wrong), 403, "destination-not-allowed")
        wrong = {**good, "options": {"config_dir": "/etc"}}
        assert_problem(service.http.post("/v1/jobs", json=wrong), 403, "source-not-allowed")
        assert_problem(service.http.post("/v1/inspect", json={"source": "/etc"}), 403, "source-not-allowed")


def test_a_link_that_was_bent_while_the_job_waited_is_seen(settings, converter, tmp_path):
    for name in ("in/x", "out", "secret"):
        (tmp_path / name).mkdir(parents=True)
    converter.gate.clear()
    allowed = {"allowed_sources": (str(tmp_path / "in"),), "max_concurrent_jobs": 1}
    with running(settings.model_copy(update=allowed), converter) as service:
        service.job_in(service.client.submit(str(tmp_path / "in"), "/a")["id"], "running")
        job = service.client.submit(str(tmp_path / "in" / "x"), "/b")
        (tmp_path / "in" / "x").rmdir()
        (tmp_path / "in" / "x").symlink_to(tmp_path / "secret")
        converter.gate.set()
        done = service.client.wait(job["id"], timeout_s=10)
        assert (done["state"], done["error"]["type"]) == ("failed", "source-not-allowed")


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Host": "evil.example:8000"}, {"Host": "127.0.0.1.evil"}]
)
def test_a_name_that_points_here_from_elsewhere_is_refused(idle, headers):
    assert_problem(idle.http.get("/v1/jobs", headers=headers), 403, "unknown-host")
    assert idle.http.get("/healthz", headers=headers).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1"])
def test_a_page_of_another_site_may_not_change_anything(service, origin):
    response = service.http.post("/v1/jobs", json=BODY, headers={"Origin": origin})
    assert_problem(response, 403, "foreign-origin")
    assert service.client.jobs() == []
    own = service.http.post("/v1/jobs", json=BODY, headers={"Origin": service.url})
    assert own.status_code == 201


def test_with_a_token_nothing_is_told_without_it(settings, converter):
    asking = {"admin_token": _secret(), "allowed_sources": ("/in",), "allowed_destinations": ("/out",)}
    with running(settings.model_copy(update=asking), converter, TOKEN) as service:
        job = service.client.submit("/in", "/out")
        service.client.wait(job["id"], timeout_s=10)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            for path in ("/v1/jobs", f"/v1/jobs/{job['id']}", "/v1/workers", "/v1/nothing"):
                response = httpx.get(service.url + path, headers=headers, trust_env=False)
                assert_problem(response, 401, "unauthenticated")
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/healthz", "/readyz", "/metrics", "/v1/docs", "/v1/openapi.json"):
            assert httpx.get(service.url + path, trust_env=False).status_code == 200
        with Client(service.url) as stranger, pytest.raises(ApiError, match="no valid token"):
            stranger.jobs()
        everything = [service.http.get(path).text for path in ("/v1/jobs", f"/v1/jobs/{job['id']}/events", "/metrics")]
        assert TOKEN not in "".join(everything)


def _secret():
    from pydantic import SecretStr

    return SecretStr(TOKEN)


def test_the_pages_run_under_a_strict_policy(idle):
    response = idle.http.get("/")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    page = response.text
    assert "<script>" not in page
    assert "style=" not in page
    assert "http" not in page
    for path in ("/static/main.js", "/static/style/base.css", "/static/docs.js", "/static/icon.svg", "/favicon.ico"):
        assert idle.http.get(path).status_code == 200
    assert_problem(idle.http.get("/static/../app.py"), 404, "not-found")
    assert_problem(idle.http.get("/static/%2e%2e/app.py"), 404, "not-found")


def test_the_schema_lists_the_options_and_the_problems(idle):
    document = idle.http.get("/v1/openapi.json").json()
    models = document["components"]["schemas"]
    options = models["JobRequest"]["properties"]["options"]
    assert "max_shard_size" in options["properties"]
    assert options["properties"]["verify"]["enum"] == ["none", "digests", "reread"]
    assert {"ProblemDocument", "Fault", "Job", "JobPage"} <= models.keys()
    assert "/v1/jobs/{job_id}:cancel" in document["paths"]


def test_formats_and_inspection_answer(idle):
    formats = idle.client.formats()
    assert "verl-fsdp" in {known["name"] for known in formats["read"]}
    assert formats["write"] == ["hf", "peft"]
    assert "dtype" in formats["options"]["properties"]
    assert idle.client.inspect(str(CASE))["format"] == "verl-fsdp"
    assert idle.client.workers()["state"] == "ok"


def test_readiness_names_the_part_that_is_missing(service, monkeypatch):
    assert service.client.ready()
    monkeypatch.setattr(type(service.context.conversions), "state", lambda _self: ("starting", "soon"))
    response = service.http.get("/readyz")
    assert response.status_code == 503
    parts = response.json()["parts"]
    assert {name: part["state"] for name, part in parts.items()} == {
        "database": "ok",
        "migrations": "ok",
        "ray": "starting",
    }


def test_jobs_wait_until_the_cluster_is_there(service, monkeypatch):
    monkeypatch.setattr(type(service.context.conversions), "state", lambda _self: ("starting", "soon"))
    job = service.client.submit("/in", "/out")
    assert service.client.job(job["id"])["state"] == "queued"
    monkeypatch.undo()
    eventually(lambda: service.client.job(job["id"])["state"] == "succeeded", "the job is done")


def test_a_service_that_is_not_there_is_named():
    with Client("http://127.0.0.1:9") as client:
        assert not client.ready()
        with pytest.raises(Unreachable, match=r"no service answers at http://127\.0\.0\.1:9"):
            client.jobs()


def test_all_that_runs_by_itself_is_stopped_at_the_same_time(settings, monkeypatch):
    context = create_app(settings, run_conversion=FakeConverter()).state.context
    parts = (Runner, Watcher, Keeper, Janitor, Deliverer)
    together = threading.Barrier(len(parts))
    for part in parts:
        monkeypatch.setattr(part, "stop", lambda _: together.wait(10))
    application._stop(context)
    assert not together.broken


def test_a_service_without_a_cluster_is_ready_for_who_can_do_without(service, monkeypatch):
    monkeypatch.setattr(type(service.context.conversions), "state", lambda _: ("failed", "no cluster"))
    whole, without = service.http.get("/readyz"), service.http.get("/readyz", params={"exclude": "ray"})
    assert (whole.status_code, without.status_code) == (503, 200)
    assert whole.json()["parts"] == without.json()["parts"]
    assert (whole.json()["ready"], without.json()["ready"]) == (False, True)
    monkeypatch.setattr(type(service.context.database), "problem", lambda _: "gone")
    assert service.http.get("/readyz", params={"exclude": "ray"}).status_code == 503
    assert_problem(service.http.get("/readyz", params={"exclude": "disk"}), 422, "validation")


def test_a_number_too_long_to_be_read_is_a_bad_request_with_a_hint(idle):
    headers = {"Content-Type": "application/json"}
    assert_problem(idle.http.post("/v1/jobs", content=b"1" * 5000, headers=headers), 400, "bad-request")
