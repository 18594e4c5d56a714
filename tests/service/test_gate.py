"""The gate: names, origins, kinds and sizes, for every method."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from pydantic import SecretStr

from service import security
from service import server as serving
from service.errors import Problem
from tests.service.conftest import TOKEN, running
from tests.service.test_api import BODY, assert_problem


def raw(service, text):
    """The status of an answer to bytes that no client would send."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(text.encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1.evil.example"]
)
def test_no_method_that_changes_is_open_to_other_sites(idle, method, origin):
    answer = idle.http.request(method, "/v1/jobs/job_0", headers={"Origin": origin})
    assert_problem(answer, 403, "foreign-origin")


def test_a_rebound_name_is_refused_for_every_method(idle):
    port = idle.url.rpartition(":")[2]
    for method in ("GET", "POST", "DELETE"):
        headers = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
        assert_problem(idle.http.request(method, "/v1/jobs", headers=headers), 403, "unknown-host")


def test_a_request_without_a_name_is_refused(idle):
    assert raw(idle, "GET /v1/jobs HTTP/1.0\r\n\r\n") == 403
    assert raw(idle, "GET /v1/jobs HTTP/1.1\r\n\r\n") in (400, 403)
    assert raw(idle, "GET /v1/jobs HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n") == 200
    assert raw(idle, "GET /v1/jobs HTTP/1.0\r\nHost: \r\n\r\n") == 403


def test_names_are_checked_with_a_token_where_they_are_listed(settings, converter):
    asking = {"admin_token": SecretStr(TOKEN), "allowed_hosts": ("unshard.example",), "host": ""}
    with running(settings.model_copy(update=asking), converter, TOKEN) as service:
        assert service.http.get("/v1/jobs", headers={"Host": "unshard.example"}).status_code == 200
        assert_problem(service.http.get("/v1/jobs", headers={"Host": "evil.example"}), 403, "unknown-host")
        assert raw(service, f"GET /v1/jobs HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n") == 403


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_of_another_kind_is_named(idle, kind):
    headers = {"Content-Type": kind} if kind else {}
    answer = idle.http.post("/v1/jobs", content=json.dumps(BODY).encode(), headers=headers)
    document = assert_problem(answer, 415, "unsupported-media-type")
    assert "Content-Type: application/json" in document["hint"]
    assert (kind or "no kind").partition(";")[0] in document["detail"]


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"]
)
def test_json_of_any_spelling_is_read(service, kind):
    answer = service.http.post("/v1/jobs", content=json.dumps(BODY).encode(), headers={"Content-Type": kind})
    assert answer.status_code == 201


def test_a_body_that_is_announced_as_too_large_is_not_read(idle):
    head = "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    assert raw(idle, f"{head}Content-Length: 99999999\r\n\r\n") == 413


def test_batches_may_be_larger_than_the_rest(idle):
    body = b" " * (2**20 + 1)
    headers = {"Content-Type": "application/json"}
    assert_problem(idle.http.post("/v1/jobs", content=body, headers=headers), 413, "payload-too-large")
    assert_problem(idle.http.post("/v1/batches", content=body, headers=headers), 400, "bad-request")
    body = b" " * (2**24 + 1)
    assert_problem(idle.http.post("/v1/batches", content=body, headers=headers), 413, "payload-too-large")


def test_answers_are_not_kept_and_name_no_server(idle):
    answer = idle.http.get("/v1/jobs")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    refused = idle.http.get("/v1/jobs", headers={"Host": "evil.example"})
    assert refused.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in refused.headers


def test_no_proxy_is_believed_that_is_not_listed(settings, monkeypatch, tmp_path):
    configs = []

    class Kept(serving.uvicorn.Config):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            configs.append(self)

    monkeypatch.setattr(serving.uvicorn, "Config", Kept)
    monkeypatch.setattr(serving.Server, "run", lambda *_: None)
    for number, proxies in enumerate(((), ("10.0.0.0/8",))):
        more = {"data_dir": tmp_path / str(number), "port": 0, "trusted_proxies": proxies}
        serving.serve(settings.model_copy(update=more))
    assert [config.proxy_headers for config in configs] == [False, True]
    assert configs[1].forwarded_allow_ips == ["10.0.0.0/8"]


def test_a_body_whose_sender_went_away_is_not_taken_for_a_whole_one():
    messages = [{"type": "http.request", "body": b"{}", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    with pytest.raises(Problem, match="ended within its body"):
        asyncio.run(security._read(receive, 100))
