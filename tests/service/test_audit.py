"""The audit: what changes is written down before it is answered, and nothing takes it back."""

from __future__ import annotations

import logging

import pytest
from sqlalchemy.exc import OperationalError

from service.access.audit import AuditFilter, AuditLog, Deed
from service.api import audit as routes
from tests.service.conftest import TOKEN, running
from tests.service.test_api import assert_problem
from tests.service.test_tokens import as_token, new_token, with_token

BODY = {"source": "/in", "destination": "/out"}


@pytest.fixture
def guarded(settings, converter):
    with running(with_token(settings), converter, TOKEN) as started:
        yield started


def rows(service, **query):
    answer = service.http.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["items"]


def test_rows_are_kept_and_found_on_both_databases(database):
    log = AuditLog(database)
    for number in range(5):
        log.add(Deed(f"token_{number % 2}", "n", "192.0.2.1", "POST /v1/jobs", f"job_{number}", 201, {"a": [1]}))
    page = log.page(AuditFilter(), 2)
    assert [row.target for row in page] == ["job_4", "job_3"]
    assert [row.target for row in log.page(AuditFilter(), 9, page[-1].id)] == ["job_2", "job_1", "job_0"]
    assert [row.target for row in log.page(AuditFilter(actor="token_1"), 9)] == ["job_3", "job_1"]
    assert [row.target for row in log.page(AuditFilter(target="job_2", status=201), 9)] == ["job_2"]
    assert log.page(AuditFilter(action="DELETE /v1/jobs"), 9) == []
    moment = page[-1].at
    assert [row.target for row in log.page(AuditFilter(after=moment), 9)] == ["job_4"]
    assert [row.target for row in log.page(AuditFilter(before=moment), 9)] == ["job_2", "job_1", "job_0"]
    assert page[0].detail == {"a": [1]}
    long = Deed("token_" + "0" * 26, "n" * 255, "1" * 64, "a" * 255, "ü" * 1024, 599)
    log.add(long)
    assert log.page(AuditFilter(), 1)[0].target == long.target


def test_every_change_is_a_row(guarded):
    made = new_token(guarded, "jobs:write")
    with as_token(guarded, made["token"]) as http:
        job = http.post("/v1/jobs", json=BODY).json()
        http.post(f"/v1/jobs/{job['id']}:cancel")
        http.get("/v1/jobs")
        http.post("/v1/jobs", json={"source": "/in"})
        http.post("/v1/jobs", content=b"{", headers={"Content-Type": "application/json"})
        http.post("/v1/tokens", json={"name": "more", "scopes": ["admin"]})
        http.delete("/v1/nothing/%00%0a")
    told = [(row["action"], row["target"], row["status"], row["detail"]) for row in rows(guarded, actor=made["id"])]
    assert told[::-1] == [
        ("POST /v1/jobs", job["id"], 201, {}),
        ("POST /v1/jobs/{job_id}:cancel", job["id"], told[-2][2], {}),
        ("POST /v1/jobs", "/v1/jobs", 422, {"problem": "validation"}),
        ("POST /v1/jobs", "/v1/jobs", 400, {"problem": "bad-request"}),
        ("POST /v1/tokens", "/v1/tokens", 403, {"problem": "forbidden"}),
        ("DELETE /v1/nothing/%00%0A", "/v1/nothing/%00%0A", 404, {"problem": "not-found"}),
    ]
    [row] = rows(guarded, target=made["id"])
    assert (row["actor"], row["actor_name"], row["action"]) == (
        "administrator",
        "the administrator's token",
        "POST /v1/tokens",
    )
    assert row["address"] == "127.0.0.1"


def test_a_refused_token_is_a_row_without_it(guarded):
    made = new_token(guarded, "jobs:read")
    guarded.http.delete(f"/v1/tokens/{made['id']}")
    for shown in (made["token"], "unshard_guess"):
        with as_token(guarded, shown) as http:
            assert http.get("/v1/jobs?label=a:b").status_code == 401
    found = rows(guarded, action="authentication")
    assert [row["detail"]["reason"] for row in found] == ["unknown token", f"{made['id']} was revoked"]
    assert {(row["actor"], row["target"], row["status"]) for row in found} == {("nobody", "/v1/jobs", 401)}
    assert made["token"][-43:] not in str(rows(guarded))


def test_a_row_is_there_before_the_answer(guarded, monkeypatch):
    order = []
    add = AuditLog.add
    monkeypatch.setattr(AuditLog, "add", lambda log, deed: (order.append(len(rows_of(guarded))), add(log, deed)))
    for number in range(3):
        guarded.http.post("/v1/jobs", json={**BODY, "destination": f"/out/{number}"})
        assert len(rows_of(guarded)) == number + 1
    assert order == [0, 1, 2]


def rows_of(service):
    return service.context.guard.audit.page(AuditFilter(action="POST /v1/jobs"), 100)


def test_a_row_that_cannot_be_written_is_an_error_in_the_log(guarded, monkeypatch, caplog):
    def away(_log, _deed):
        raise OperationalError("INSERT", {}, Exception("away"))

    monkeypatch.setattr(AuditLog, "add", away)
    with caplog.at_level(logging.ERROR):
        job = guarded.http.post("/v1/jobs", json=BODY).json()
    [record] = [record for record in caplog.records if "audit could not be written" in record.getMessage()]
    assert record.levelname == "ERROR"
    assert job["id"] in record.getMessage()


def test_an_unexpected_fault_is_a_row_too(guarded, monkeypatch):
    def broken(*_args, **_more):
        raise ValueError("canary")

    monkeypatch.setattr(type(guarded.context.store), "create", broken)
    assert_problem(guarded.http.post("/v1/jobs", json=BODY), 500, "internal")
    [row] = rows_of(guarded)
    assert (row.status, row.detail) == (500, {"problem": "internal"})


def test_the_audit_is_for_administrators_and_read_only(guarded):
    with as_token(guarded, new_token(guarded, "jobs:read", "jobs:write")["token"]) as http:
        assert_problem(http.get("/v1/audit"), 403, "forbidden")
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert guarded.http.request(method, "/v1/audit").status_code == 405
    assert [method for route in routes.router.routes for method in route.methods] == ["GET"]


def test_pages_and_times_of_the_audit(guarded):
    for _ in range(3):
        new_token(guarded, "jobs:read")
    first = guarded.http.get("/v1/audit", params={"limit": 2}).json()
    rest = guarded.http.get("/v1/audit", params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert len(first["items"]) == 2
    assert [row["id"] for row in first["items"] + rest["items"]] == [row["id"] for row in rows(guarded)]
    assert rest["next_cursor"] is None
    assert rows(guarded, after=first["items"][0]["at"]) == []
    assert len(rows(guarded, before="2100-01-01T00:00:00Z", status=201)) == 3
    for wrong in ("actor=%00", "status=1", "after=yesterday", "cursor=am9i", "colour=red"):
        assert_problem(guarded.http.get(f"/v1/audit?{wrong}"), 422, "validation")


def test_where_no_token_is_asked_for_changes_are_rows_as_well(service):
    job = service.client.submit("/in", "/out")
    [row] = rows(service)
    assert (row["actor"], row["target"], row["status"]) == ("local", job["id"], 201)
