"""What ends with a token: what its holder follows, at once or soon, and its jobs if that is asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import httpx
import pytest

from service.access.tokens import NewToken
from service.api import events as routes
from service.client import ApiError, Client
from service.settings import Settings
from service.times import now
from tests.service.conftest import TOKEN, FakeConverter, Service, eventually, running


@dataclass
class Staffed:
    """A service with tokens, and a holder of one."""

    service: Service
    client: Client
    token: str
    token_id: str


@pytest.fixture
def staffed(settings: Settings, converter: FakeConverter) -> Iterator[Staffed]:
    converter.gate.clear()
    values = {"admin_token": TOKEN, "allowed_sources": ("/",), "allowed_destinations": ("/",)}
    with running(
        settings.model_copy(update=Settings(**values).model_dump(include=set(values))), converter, TOKEN
    ) as service:
        made = service.http.post("/v1/tokens", json={"name": "training", "scopes": ["jobs:read", "jobs:write"]}).json()
        with Client(service.url, made["token"]) as client:
            yield Staffed(service, client, made["token"], made["id"])
        converter.gate.set()


def ended(staffed: Staffed, path: str) -> threading.Event:
    """Set when a stream has ended, which is open when this returns."""
    opened, over = threading.Event(), threading.Event()

    def follow() -> None:
        headers = {"Accept": "text/event-stream", "Authorization": f"Bearer {staffed.token}"}
        with httpx.stream("GET", staffed.service.url + path, headers=headers, timeout=30, trust_env=False) as answer:
            for _ in answer.iter_lines():
                opened.set()
        over.set()

    threading.Thread(target=follow, daemon=True).start()
    assert opened.wait(10)
    return over


@pytest.mark.parametrize("path", ["/v1/events", "/v1/jobs/{id}/events"])
def test_a_stream_ends_with_its_token(staffed, monkeypatch, path):
    monkeypatch.setattr(routes, "ASK_AGAIN_S", 0.2)
    job = staffed.client.submit("/in", "/a")
    over = ended(staffed, path.format(**job))
    assert not over.wait(1), "it goes on as long as the token is good"
    staffed.service.http.delete(f"/v1/tokens/{staffed.token_id}")
    assert over.wait(5)


def test_a_stream_ends_when_its_token_expires(staffed, monkeypatch):
    monkeypatch.setattr(routes, "ASK_AGAIN_S", 0.2)
    new = NewToken("short", ("admin",), "administrator", expires_at=now() + timedelta(seconds=3))
    _, text = staffed.service.context.guard.tokens.create(new)
    staffed.client.submit("/in", "/a")
    everybodys = ended(replace(staffed, token=TOKEN), "/v1/events")
    assert ended(replace(staffed, token=text), "/v1/events").wait(10)
    assert not everybodys.is_set(), "the administrator's own token has no end"


def test_jobs_of_a_token_that_ended_go_on(staffed, converter):
    job = staffed.client.submit("/in", "/a")
    staffed.service.http.delete(f"/v1/tokens/{staffed.token_id}")
    with pytest.raises(ApiError, match="was revoked"):
        staffed.client.job(job["id"])
    converter.gate.set()
    staffed.service.job_in(job["id"], "succeeded")


def test_jobs_of_a_token_are_cancelled_with_it_if_that_is_asked_for(staffed, converter):
    jobs = [staffed.client.submit("/in", f"/{number}") for number in range(4)]
    other = staffed.service.client.submit("/in", "/other")
    eventually(lambda: len(converter.calls) == 2, "as many as may run do, the others wait")
    done = staffed.service.http.delete(f"/v1/tokens/{staffed.token_id}?cancel_jobs=true")
    assert done.status_code == 200, done.text
    for job in jobs:
        told = staffed.service.job_in(job["id"], "cancelled")
        assert staffed.service.client.events(job["id"])[-1]["type"] == "job.cancelled", told
    converter.gate.set()
    staffed.service.job_in(other["id"], "succeeded")
