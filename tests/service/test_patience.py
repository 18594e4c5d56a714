"""What clients outlast while they wait for a job or follow it: restarts, proxies, limits, their own timeouts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from service import calls
from service.client import ApiError, AsyncClient, Client, Unreachable
from service.settings import Settings
from tests.service.conftest import TOKEN, running
from tests.service.outage import Line

BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def waited(url: str, job_id: str, *, asynchronous: bool, client_s: float = 60.0, **how) -> dict:
    """What either client makes of waiting for a job."""
    if not asynchronous:
        with Client(url, timeout_s=client_s) as client:
            return client.wait(job_id, **how)

    async def work():
        async with AsyncClient(url, timeout_s=client_s) as client:
            return await client.wait(job_id, **how)

    return asyncio.run(work())


def followed(url: str, job_id: str, *, asynchronous: bool) -> Iterator[dict]:
    """The events that either client follows, as they come."""
    if not asynchronous:
        with Client(url) as client:
            yield from client.follow(job_id)
        return
    loop = asyncio.new_event_loop()
    client = AsyncClient(url)
    events = client.follow(job_id)
    try:
        while (event := loop.run_until_complete(anext(events, None))) is not None:
            yield event
    finally:
        loop.run_until_complete(client.close())
        loop.close()


@pytest.fixture
def held(service, converter):
    """A job that does not end before ``converter.gate`` is set."""
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    return service.job_in(job["id"], "running")["id"]


@BOTH
def test_a_wait_longer_than_the_clients_own_timeout_is_no_outage(service, converter, held, monkeypatch, asynchronous):
    monkeypatch.setattr(calls, "PATIENCE_S", 0.5)
    threading.Timer(3, converter.gate.set).start()
    assert waited(service.url, held, asynchronous=asynchronous, client_s=0.5)["state"] == "succeeded"


@BOTH
def test_a_job_that_does_not_end_in_time_is_said_to_go_on(service, held, asynchronous):
    with pytest.raises(TimeoutError, match=r"after 0\.4 s: it is running"):
        waited(service.url, held, asynchronous=asynchronous, timeout_s=0.4)


@BOTH
def test_a_wait_takes_no_longer_than_it_may_though_nobody_answers(asynchronous):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="no service answers"):
        waited("http://127.0.0.1:9", "job_0", asynchronous=asynchronous, timeout_s=0.5)
    assert time.monotonic() - began < 10


@BOTH
def test_a_service_that_stays_away_is_told_after_a_while(monkeypatch, asynchronous):
    monkeypatch.setattr(calls, "PATIENCE_S", 0.5)
    with pytest.raises(Unreachable):
        waited("http://127.0.0.1:9", "job_0", asynchronous=asynchronous)


def test_whoever_asks_too_often_waits_as_long_as_it_is_told(tmp_path, converter):
    converter.gate.clear()
    settings = Settings(
        data_dir=tmp_path, admin_token=TOKEN, poll_s=0.05, allowed_sources=("/",), allowed_destinations=("/",)
    )
    with running(settings, converter, TOKEN) as service:
        body = {"name": "slow", "scopes": ["jobs:read", "jobs:write"], "requests_per_minute": 30}
        token = service.http.post("/v1/tokens", json=body).json()["token"]
        with Client(service.url, token) as client:
            job = client.submit("/in", "/out")
            with pytest.raises(ApiError) as caught:
                [client.job(job["id"]) for _ in range(40)]
            assert caught.value.status == 429
            assert caught.value.retry_after_s >= 1
            threading.Timer(1, converter.gate.set).start()
            assert client.wait(job["id"], seen=lambda _: None)["state"] == "succeeded"


@contextmanager
def answering(*answers: tuple[int, dict]) -> Iterator[str]:
    """A server that gives these answers, one after the other and the last again and again."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = left.pop(0) if len(left) > 1 else left[0]
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@BOTH
@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_that_has_no_service_for_a_moment_is_outlasted(status, asynchronous):
    with answering((status, {}), (status, {}), (200, {"id": "job_0", "state": "succeeded"})) as url:
        assert waited(url, "job_0", asynchronous=asynchronous)["state"] == "succeeded"


@BOTH
def test_a_refusal_ends_the_wait(service, asynchronous):
    with pytest.raises(ApiError, match="there is no job"):
        waited(service.url, "job_0", asynchronous=asynchronous)


@BOTH
def test_events_are_followed_over_a_cut_line_to_the_last_and_none_comes_twice(service, converter, held, asynchronous):
    parts = urlsplit(service.url)
    line = Line(parts.hostname, parts.port)
    seen = []
    for event in followed(f"http://{line.address}", held, asynchronous=asynchronous):
        seen.append(event)
        if event["type"] == "job.progress":
            line.cut()
            converter.gate.set()
            service.job_in(held, "succeeded")
            threading.Timer(0.3, line.mend).start()
    line.cut()
    assert [event["seq"] for event in seen] == sorted({event["seq"] for event in seen})
    assert seen[-1]["type"] == "job.succeeded"
    assert seen == service.client.events(held)
