"""Secrets stay secret: a service full of marked ones is driven through good and bad, and nothing that it says is."""

from __future__ import annotations

import json
import logging
import secrets

import pytest
from pydantic import SecretStr
from sqlalchemy import select

from service.db.tables import metadata
from service.logs import JsonLines, PlainLines
from tests.postgres import PostgresServer
from tests.service.conftest import FakeConverter, eventually, running
from tests.service.test_api import CASE
from tests.service.test_tokens import as_token
from workers.errors import StorageError

PROFILES = """
[profiles.lab]
scheme = "s3"
endpoint = "http://127.0.0.1:9"
allow_http = true
region = "us-east-1"
access_key_id_env = "LAB_KEY_ID"
secret_access_key_file = "{secret}"
connect_timeout_s = 1
request_timeout_s = 1
retry_timeout_s = 1
max_retries = 0
"""


class Everything:
    """All that a service says: answers, log lines in both forms, and what its processes print."""

    def __init__(self):
        self.answers: list[str] = []
        self.records: list[logging.LogRecord] = []

    def ask(self, http, method, path, **more):
        answer = http.request(method, path, **more)
        self.answers.append(f"{method} {path} {answer.status_code} {answer.headers} {answer.text}")
        return answer

    def lines(self):
        return [form.format(record) for record in self.records for form in (JsonLines(), PlainLines())]


@pytest.fixture
def said():
    everything = Everything()

    class Kept(logging.Handler):
        def emit(self, record):
            everything.records.append(record)

    handler, root = Kept(logging.DEBUG), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield everything
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.mark.system("initdb")
def test_no_secret_is_ever_told(settings, tmp_path, monkeypatch, said, capfd):
    marks = {name: f"canary{secrets.token_hex(16)}" for name in ("admin", "database", "key", "secret", "guess", "url")}
    (tmp_path / "secret").write_text(marks["secret"])
    (tmp_path / "profiles.toml").write_text(PROFILES.format(secret=tmp_path / "secret"))
    monkeypatch.setenv("LAB_KEY_ID", marks["key"])
    monkeypatch.setenv("UNSHARD_STORAGE_PROFILES", str(tmp_path / "profiles.toml"))
    postgres = PostgresServer()
    try:
        url = postgres.new_database().replace("postgres@", f"postgres:{marks['database']}@")
        asking = {"admin_token": SecretStr(marks["admin"]), "database_url": url}
        lists = {"allowed_sources": ("/", "s3://runs"), "allowed_destinations": ("/", "s3://models")}
        converter = FakeConverter()
        converter.gate.set()
        with running(settings.model_copy(update={**asking, **lists}), converter, marks["admin"]) as service:
            marks |= _drive(service, converter, said, marks)
            stored = _all_rows(service.context.database)
            postgres.stop("immediate")
            for path in ("/v1/jobs", "/v1/tokens/self", "/readyz", "/metrics"):
                said.ask(service.http, "GET", path)
            with as_token(service, marks["token"]) as http:
                said.ask(http, "GET", "/v1/jobs")
    finally:
        postgres.close()
    printed = "".join(capfd.readouterr())
    assert len(said.answers) > 40
    assert any("503" in answer for answer in said.answers)
    assert any("/problems/storage" in answer for answer in said.answers)
    assert len(said.lines()) > 20
    for name, mark in marks.items():
        assert mark not in "\n".join(said.answers), f"an answer has the {name}"
        assert mark not in "\n".join(said.lines()), f"the log has the {name}"
        assert mark not in printed, f"a process printed the {name}"
        if name != "webhook":  # which deliveries are signed with
            assert mark not in stored, f"the database has the {name}"


def _drive(service, converter, said, marks):
    """Good and bad requests to everything there is; the secrets that were made on the way."""
    http = service.http
    token = http.post("/v1/tokens", json={"name": "ci", "scopes": ["jobs:read", "jobs:write", "webhooks"]}).json()
    converter.fail_with.append(StorageError("the store said no"))
    hook = http.post("/v1/webhooks", json={"url": "https://1.1.1.1:1/", "events": ["job.created"]}).json()
    lab = {"options": {"source_profile": "lab", "destination_profile": "lab"}}
    bodies = [
        {"source": str(CASE), "destination": "s3://models/1", **lab},
        {"source": "s3://runs/1", "destination": "s3://models/1", **lab},
        {"source": f"s3://me:{marks['url']}@runs/1", "destination": "s3://models/1"},
        {"source": f"s3://runs/1?token={marks['url']}", "destination": "/out"},
        {"source": f"https://me:{marks['url']}@host/x", "destination": "/out"},
        {"source": 5, "destination": {"password": marks["url"]}, "priority": marks["url"]},
        {"source": "/in", "destination": "/out", "options": {"source_profile": "none"}},
    ]
    with as_token(service, token["token"]) as held:
        for body in bodies:
            said.ask(held, "POST", "/v1/jobs", json=body)
        for body in bodies[1:4]:
            said.ask(held, "POST", "/v1/inspect", json={"source": body["source"], "options": body.get("options", {})})
        said.ask(held, "POST", "/v1/jobs?dry_run=true", json=bodies[0])
        said.ask(held, "POST", "/v1/webhooks", json={"url": f"https://me:{marks['url']}@host/", "events": ["*"]})
        said.ask(held, "POST", "/v1/batches", json={"template": {}, "items": [bodies[2]]})
    for shown in (marks["guess"], f"unshard_{'0' * 26}_{marks['guess']}", token["token"][:-4] + "AAAA"):
        with as_token(service, shown) as stranger:
            said.ask(stranger, "GET", "/v1/jobs")
            said.ask(stranger, "POST", "/v1/jobs", json=bodies[0])
    said.ask(http, "POST", "/v1/jobs", content=json.dumps(bodies[2]), headers={"Content-Type": "text/plain"})
    said.ask(http, "DELETE", f"/v1/tokens/{token['id']}")
    with as_token(service, token["token"]) as ended:
        said.ask(ended, "GET", "/v1/jobs")
    _look_around(service, said, hook)
    return {"token": token["token"], "webhook": hook["secret"]}


def _look_around(service, said, hook):
    http = service.http
    ended = {"succeeded", "failed", "cancelled"}
    eventually(lambda: all(job["state"] in ended for job in service.client.all_jobs()), "all jobs have ended")
    for job in service.client.all_jobs():
        for below in ("", "/events", "/plan", "/attempts", "/shards", "/tensors", "/report"):
            said.ask(http, "GET", f"/v1/jobs/{job['id']}{below}")
    for path in (
        "/v1/jobs",
        "/v1/batches",
        "/v1/tokens",
        "/v1/tokens/self",
        "/v1/audit?limit=200",
        "/v1/webhooks",
        f"/v1/webhooks/{hook['id']}",
        f"/v1/webhooks/{hook['id']}/deliveries",
        "/v1/workers",
        "/v1/formats",
        "/v1/openapi.json",
        "/healthz",
        "/readyz",
        "/metrics",
        "/",
        "/v1/docs",
    ):
        said.ask(http, "GET", path)


def _all_rows(database):
    with database.read() as connection:
        return "\n".join(
            str(tuple(row))
            for table in metadata.sorted_tables
            if table.name != "webhooks"
            for row in connection.execute(select(table))
        )
