"""``/v1/webhooks`` of a running service, with receivers that are really there."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from fastapi import Request
from fastapi.security import SecurityScopes

from service.access.principals import Principal
from service.api.context import _caller
from service.webhooks import claims as rules
from tests.service.conftest import eventually, running
from tests.service.receivers import receiver, reply

OPEN = {"webhook_allow_http": True, "webhook_allowed_networks": "127.0.0.0/8"}


@pytest.fixture
def settings(settings):
    return settings.model_copy(update=type(settings)(**OPEN).model_dump(include=set(OPEN)))


@pytest.fixture
def there():
    with receiver() as made:
        yield made


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    monkeypatch.setattr(rules, "RETRY_DELAYS_S", (0.01,) * 10)


def make(service, url, events=("*",), **more):
    answer = service.http.post("/v1/webhooks", json={"url": url, "events": list(events), **more})
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/v1/webhooks/{answer.json()['id']}"
    return answer.json()


def log_of(service, webhook, query=""):
    answer = service.http.get(f"/v1/webhooks/{webhook['id']}/deliveries{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()["items"]


def test_a_job_tells_its_course_signed_and_enough_to_go_on_with(service, there):
    webhook = make(service, there.url, ["job.created", "job.running", "job.succeeded"], description="evaluation")
    job = service.client.submit("/in", "/out", labels={"run": "7"})
    eventually(lambda: len(there.came) == 3, "three deliveries")
    assert {got.event["type"] for got in there.came} == {"job.created", "job.running", "job.succeeded"}
    assert all(got.is_signed_with(webhook["secret"]) for got in there.came)
    assert len({got.id for got in there.came}) == 3
    [done] = there.events("job.succeeded")
    assert done["data"]["job_id"] == job["id"]
    assert done["data"]["result"]["location"] == "/out"
    assert done["data"]["labels"] == {"run": "7"}
    delivered = eventually(lambda: log_of(service, webhook, "?state=delivered")[2:], "the log") and log_of(
        service, webhook
    )
    assert {item["id"] for item in delivered} == {got.id for got in there.came}
    shown = service.http.get(f"/v1/webhooks/{webhook['id']}/deliveries/{delivered[0]['id']}").json()
    assert shown["body"] in [got.event for got in there.came]
    assert (shown["state"], shown["response_status"], shown["error"]) == ("delivered", 204, None)
    counted = 'unshard_webhook_deliveries_total{result="delivered"} 3.0'
    eventually(lambda: counted in service.http.get("/metrics").text, counted)


def test_a_refused_delivery_comes_again_with_the_same_id(service, there):
    answers = iter([500, 503, 302, 200])
    there.answer = lambda handler: reply(handler, next(answers))
    webhook = make(service, there.url, ["job.created"])
    service.client.submit("/in", "/out")
    eventually(lambda: len(there.came) == 4, "four attempts")
    assert len({got.id for got in there.came}) == 1
    assert len({got.body for got in there.came}) == 1
    [done] = eventually(lambda: log_of(service, webhook, "?state=delivered"), "delivered")
    assert (done["attempts"], done["response_status"], done["error"]) == (4, 200, None)


def test_a_webhook_that_is_gone_is_disabled_and_goes_on_when_it_is_enabled(service, there):
    there.answer = lambda handler: reply(handler, 410)
    webhook = make(service, there.url, ["job.created"])
    service.client.submit("/in", "/out")
    path = f"/v1/webhooks/{webhook['id']}"
    eventually(lambda: service.http.get(path).json()["state"] == "disabled", "disabled")
    assert service.http.get(path).json()["disabled_reason"] == "refused 5 times in a row, at last: answered 410"
    [waiting] = log_of(service, webhook)
    refused = service.http.post(f"{path}/deliveries/{waiting['id']}:redeliver")
    assert (refused.status_code, refused.json()["type"]) == (409, "/problems/invalid-state")
    service.client.submit("/in", "/other")
    there.answer = lambda handler: reply(handler, 200)
    assert service.http.patch(path, json={"state": "active"}).json()["disabled_reason"] is None
    eventually(lambda: log_of(service, webhook, "?state=delivered"), "delivered")
    assert len(log_of(service, webhook)) == 1, "what happened while it was disabled is not told"


def test_a_receiver_that_hangs_does_not_keep_another_waiting(service, there):
    over = threading.Event()
    with receiver() as stuck:
        stuck.answer = lambda _handler: over.wait(20)
        make(service, stuck.url, ["job.created"])
        make(service, there.url, ["job.created"])
        for number in range(6):
            service.client.submit("/in", f"/out/{number}")
        eventually(lambda: len(there.came) == 6, "all deliveries to the other one")
        assert len(stuck.came) == 2
        over.set()


def test_a_test_is_sent_at_once_and_tells_what_came_of_it(service, there):
    webhook = make(service, there.url, ["job.failed"])
    told = service.http.post(f"/v1/webhooks/{webhook['id']}:test")
    assert (told.status_code, told.json()["state"], told.json()["response_status"]) == (200, "delivered", 204)
    [got] = there.came
    assert got.event["type"] == "webhook.test"
    assert got.event["data"]["webhook_id"] == webhook["id"]
    assert got.id == told.json()["id"]
    assert got.is_signed_with(webhook["secret"])
    there.answer = lambda handler: reply(handler, 307, {"Location": "http://127.0.0.1/"})
    refused = service.http.post(f"/v1/webhooks/{webhook['id']}:test").json()
    assert (refused["state"], refused["next_attempt_at"], refused["response_status"]) == ("failed", None, 307)
    assert "redirects are not followed" in refused["error"]
    assert service.http.get(f"/v1/webhooks/{webhook['id']}").json()["state"] == "active"


def test_a_delivery_is_sent_again_on_request(service, there):
    webhook = make(service, there.url, ["job.created"])
    service.client.submit("/in", "/out")
    [done] = eventually(lambda: log_of(service, webhook, "?state=delivered"), "delivered")
    again = service.http.post(f"/v1/webhooks/{webhook['id']}/deliveries/{done['id']}:redeliver")
    assert (again.status_code, again.json()["id"]) == (202, done["id"])
    eventually(lambda: len(there.came) == 2, "the second time")
    assert there.came[0].id == there.came[1].id == done["id"]


def test_after_a_rotation_both_secrets_sign(service, there):
    webhook = make(service, there.url)
    rotated = service.http.post(f"/v1/webhooks/{webhook['id']}:rotate_secret").json()
    assert rotated["secret"] != webhook["secret"]
    assert rotated["previous_secret_until"] is not None
    service.http.post(f"/v1/webhooks/{webhook['id']}:test")
    [got] = there.came
    assert got.is_signed_with(webhook["secret"])
    assert got.is_signed_with(rotated["secret"])
    assert len(got.headers["webhook-signature"].split(" ")) == 2


def test_a_secret_is_shown_once_and_never_again(service, there, caplog):
    caplog.set_level(logging.DEBUG)
    webhook = make(service, there.url + "?key=canary")
    path = f"/v1/webhooks/{webhook['id']}"
    secrets = [webhook["secret"], service.http.post(f"{path}:rotate_secret").json()["secret"]]
    there.answer = lambda handler: reply(handler, 500)
    service.client.submit("/in", "/out")
    eventually(lambda: log_of(service, webhook, "?state=pending") or log_of(service, webhook), "a delivery")
    answers = [
        service.http.get(path),
        service.http.get("/v1/webhooks"),
        service.http.patch(path, json={"description": "new"}),
        service.http.post(f"{path}:test"),
        service.http.get(f"{path}/deliveries"),
        service.http.get("/metrics"),
        service.http.patch(path, json={"url": "http://user:canary@127.0.0.1/"}),
        service.http.post("/v1/webhooks", json={"url": "ftp://canary/", "events": ["*"]}),
    ]
    shown = "".join(answer.text for answer in answers) + caplog.text + "".join(str(got.event) for got in there.came)
    for secret in secrets:
        assert secret not in shown
        assert secret.removeprefix("whsec_") not in shown
    assert "canary" not in "".join(answer.text for answer in answers[3:]) + caplog.text
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 200, 200, 422, 422]


def test_webhooks_are_listed_changed_and_deleted(service, there):
    made = [make(service, there.url, ["job.*"], description=str(number)) for number in range(3)]
    first = service.http.get("/v1/webhooks?limit=2").json()
    rest = service.http.get("/v1/webhooks", params={"cursor": first["next_cursor"]}).json()
    assert [item["description"] for item in first["items"] + rest["items"]] == ["2", "1", "0"]
    path = f"/v1/webhooks/{made[0]['id']}"
    changed = service.http.patch(path, json={"events": ["batch.*", "batch.*"], "url": there.url + "2"}).json()
    assert (changed["events"], changed["url"], changed["description"]) == (["batch.*"], there.url + "2", "0")
    paused = service.http.patch(path, json={"state": "disabled"}).json()
    assert (paused["state"], paused["disabled_reason"]) == ("disabled", "disabled on request")
    assert service.http.delete(path).status_code == 204
    for gone in (service.http.get(path), service.http.delete(path), service.http.get(f"{path}/deliveries")):
        assert (gone.status_code, gone.json()["type"]) == (404, "/problems/not-found")
    assert service.http.get(f"/v1/webhooks/{made[1]['id']}/deliveries/delivery_0").status_code == 404


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        ({"events": ["*"]}, "/url"),
        ({"url": "http://127.0.0.1/ x", "events": ["*"]}, "/url"),
        ({"url": "ftp://127.0.0.1/", "events": ["*"]}, "/url"),
        ({"url": "https://no-such-host.invalid/", "events": ["*"]}, "/url"),
        ({"url": "http://127.0.0.1/", "events": []}, "/events"),
        ({"url": "http://127.0.0.1/", "events": ["job.progress"]}, "/events"),
        ({"url": "http://127.0.0.1/", "events": ["*"], "secret": "mine"}, "/secret"),
    ],
)
def test_a_request_that_is_wrong_is_told_where(service, request_, where):
    answer = service.http.post("/v1/webhooks", json=request_)
    assert answer.status_code == 422
    assert [fault["pointer"] for fault in answer.json()["errors"]] == [where]


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1/", "https://[::1]:8443/x", "https://169.254.169.254/latest", "https://10.0.0.1/"]
)
def test_without_the_administrators_leave_private_addresses_are_refused(idle, url):
    answer = idle.http.post("/v1/webhooks", json={"url": url, "events": ["*"]})
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/target-not-allowed")
    unencrypted = idle.http.post("/v1/webhooks", json={"url": "http://8.8.8.8/", "events": ["*"]})
    assert (unencrypted.status_code, unencrypted.json()["type"]) == (422, "/problems/validation")


def test_an_address_that_may_no_longer_be_used_is_sent_nothing(settings, converter, there):
    with running(settings, converter) as service:
        webhook = make(service, there.url, ["job.created"])
    closed = settings.model_copy(update={"webhook_allowed_networks": ()})
    with running(closed, converter) as service:
        service.client.submit("/in", "/out")
        failed = eventually(lambda: [item for item in log_of(service, webhook) if item["error"]], "a failed attempt")
        assert failed[0]["error"] == "the host of the URL has an address that is of this machine itself"
    assert there.came == []


def test_only_administrators_hear_of_everybody_and_others_see_their_own(service, there):
    theirs = make(service, there.url)
    callers = [Principal("token_1", "anna", frozenset({"webhooks", "jobs:write"}))]

    def somebody(request: Request, needed: SecurityScopes) -> Principal:
        request.scope["principal"] = callers[-1]
        return _caller(request, needed)

    service.server.config.app.dependency_overrides[_caller] = somebody
    refused = service.http.post("/v1/webhooks", json={"url": there.url, "events": ["*"], "everyone": True})
    assert (refused.status_code, refused.json()["required_scope"]) == (403, "admin")
    assert service.http.get(f"/v1/webhooks/{theirs['id']}").status_code == 404
    assert service.http.get("/v1/webhooks").json()["items"] == []
    mine = make(service, there.url)
    assert [item["id"] for item in service.http.get("/v1/webhooks").json()["items"]] == [mine["id"]]
    callers.append(Principal("token_2", "ben", frozenset({"jobs:read"})))
    assert service.http.get("/v1/webhooks").status_code == 403


def test_an_event_is_delivered_though_the_service_stopped_before_it_was_sent(settings, converter, there):
    with running(settings, converter) as service:
        webhook = make(service, there.url, ["job.created"])
        service.context.hooks.deliverer.stop()
        service.client.submit("/in", "/out")
        assert [item["attempts"] for item in log_of(service, webhook)] == [0]
    assert there.came == []
    with running(settings, converter) as service:
        eventually(lambda: there.came, "delivered after the restart")
    assert json.loads(there.came[0].body)["type"] == "job.created"
