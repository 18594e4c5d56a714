"""What one token made is not there for another: on no route, in no list, stream, filter or replay."""

from __future__ import annotations

import ipaddress
import re

import pytest

from service.access.principals import SCOPES
from tests.service.conftest import TOKEN, running
from tests.service.test_api import assert_problem
from tests.service.test_tokens import as_token, new_token, with_token

BODIES = {
    "POST /v1/jobs/{job_id}:retry": {"from_scratch": True},
    "PATCH /v1/jobs/{job_id}": {"priority": 1},
    "PATCH /v1/batches/{batch_id}": {"name": "mine"},
    "PATCH /v1/watches/{watch_id}": {"template": {"destination": "/models/{name}"}},
    "PATCH /v1/webhooks/{webhook_id}": {"url": "http://127.0.0.1:9/"},
}
OWNED = re.compile(r"\{(job|batch|watch|webhook)_id\}")
EVERY_SCOPE = [scope for scope in SCOPES if scope != "admin"]


@pytest.fixture
def two(settings, converter):
    """A service and clients of two tokens, with a job at work."""
    converter.gate.clear()
    more = {"webhook_allow_http": True, "webhook_allowed_networks": (ipaddress.ip_network("127.0.0.0/8"),)}
    with running(with_token(settings, **more), converter, TOKEN) as service:
        tokens = [new_token(service, *EVERY_SCOPE)["token"] for _ in range(2)]
        with as_token(service, tokens[0]) as mine, as_token(service, tokens[1]) as others:
            yield service, mine, others
        converter.gate.set()


def made(http, tmp_path):
    """One of each kind, by its name in paths."""
    requests = {
        "job": {"source": "/in", "destination": "/out"},
        "batch": {"items": [{"source": "/in", "destination": "/of-batch"}]},
        "watch": {"prefix": str(tmp_path), "pattern": "step_*", "template": {"destination": "/models/{name}"}},
        "webhook": {"url": "http://127.0.0.1:9/", "events": ["job.failed"]},
    }
    ids = {}
    for kind, body in requests.items():
        path = "/v1/batches" if kind == "batch" else "/v1/watches" if kind == "watch" else f"/v1/{kind}s"
        answer = http.post(path, json=body, headers={"Idempotency-Key": kind})
        assert answer.status_code == 201, answer.text
        ids[f"{kind}_id"] = answer.json()["id"]
    return ids


def owned_routes(service):
    document = service.http.get("/v1/openapi.json").json()
    for path, methods in document["paths"].items():
        if OWNED.search(path):
            yield from ((method.upper(), path) for method in methods if method in ("get", "post", "patch", "delete"))


def test_no_route_shows_or_changes_what_another_token_made(two, tmp_path):
    service, mine, others = two
    ids = made(mine, tmp_path)
    before = {path: mine.get(path.format(**ids)).json() for path in ("/v1/batches/{batch_id}", "/v1/jobs/{job_id}")}
    routes = list(owned_routes(service))
    assert len(routes) > 25
    for method, path in routes:
        address = path.format(**ids, delivery_id="delivery_0")
        answer = others.request(method, address, json=BODIES.get(f"{method} {path}"))
        assert_problem(answer, 404, "not-found")
        unknown = OWNED.sub(lambda found: f"{found[1]}_{'0' * 26}", path).format(delivery_id="delivery_0")
        assert_problem(others.request(method, unknown, json=BODIES.get(f"{method} {path}")), 404, "not-found")
    for path, was in before.items():
        now = mine.get(path.format(**ids)).json()
        assert {name: now[name] for name in ("owner", "labels")} == {name: was[name] for name in ("owner", "labels")}
        assert now["state"] != "cancelled"


def test_no_list_filter_or_stream_tells_of_what_another_token_made(two, tmp_path):
    _, mine, others = two
    ids = made(mine, tmp_path)
    for path in ("/v1/jobs", "/v1/batches", "/v1/watches", "/v1/webhooks"):
        [one, *_] = mine.get(path, params={"limit": 1}).json()["items"]
        cursor = mine.get(path, params={"limit": 1}).json()["next_cursor"]
        assert one["id"] not in others.get(path).text
        if cursor:
            assert others.get(path, params={"cursor": cursor}).json()["items"] == []
    for name in ("batch_id", "watch_id"):
        assert others.get("/v1/jobs", params={name: ids[name]}).json()["items"] == []
    headers = {"Accept": "text/event-stream"}
    assert_problem(others.get("/v1/events", params={"job_id": ids["job_id"]}, headers=headers), 404, "not-found")
    assert others.get("/v1/overview").json()["jobs"] == {}


def test_an_idempotency_key_is_each_tokens_own(two):
    _, mine, others = two
    first = mine.post("/v1/jobs", json={"source": "/in", "destination": "/a"}, headers={"Idempotency-Key": "k"})
    second = others.post("/v1/jobs", json={"source": "/in", "destination": "/b"}, headers={"Idempotency-Key": "k"})
    assert (first.status_code, second.status_code) == (201, 201)
    assert "idempotency-replayed" not in second.headers
    assert first.json()["id"] != second.json()["id"]


def test_workers_are_told_to_be_busy_but_not_with_whose_job(two, monkeypatch):
    service, mine, others = two
    job_id = mine.post("/v1/jobs", json={"source": "/in", "destination": "/out"}).json()["id"]
    doing = {"job_id": job_id, "attempt": f"{job_id}-1-1", "file": "model.safetensors"}
    worker = {"name": "merger-0", "kind": "merger", "node": "n", "pid": 1, "doing": [doing]}
    conversions = service.context.conversions
    monkeypatch.setattr(type(conversions), "describe", lambda _: {"nodes": [], "items": [worker]})
    assert mine.get("/v1/workers").json()["items"][0]["doing"] == [doing]
    assert service.client.workers()["items"][0]["doing"] == [doing]
    assert others.get("/v1/workers").json()["items"][0]["doing"] == [dict.fromkeys(doing)]
