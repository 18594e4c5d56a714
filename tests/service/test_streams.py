"""Streams of events and of jobs: nothing that matters is lost, nobody has to be fast, nothing is asked for nobody."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile

import pytest
from sqlalchemy import event, insert, update

from service.api import events as routes
from service.db.tables import jobs
from service.jobs import changes as feed
from service.jobs.changes import Change, Changes, Listener
from service.jobs.leases import Leases
from service.jobs.records import NewJob, now
from service.jobs.store import JobFilter, JobStore, fits
from tests.service.conftest import eventually


@dataclass
class Stream:
    """An open stream, read in a thread."""

    came: list[tuple[str, str, dict]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def read(self, lines) -> None:
        name, data, number = "", "", ""
        for line in lines:
            key, _, value = line.partition(": ")
            if line.startswith(":"):
                self.comments.append(line)
            elif key == "event":
                name = value
            elif key == "data":
                data = value
            elif key == "id":
                number = value
            elif not line and name:
                self.came.append((name, number, json.loads(data)))
                name = ""

    def states(self, job_id: str) -> list[str]:
        told = [job["state"] for _, _, job in self.came if job["id"] == job_id]
        return [state for number, state in enumerate(told) if told[number - 1 : number] != [state]]


@contextmanager
def following(service, path, **headers):
    stream = Stream()
    opened, close = threading.Event(), threading.Event()

    def follow():
        with service.http.stream(
            "GET", path, headers={"Accept": "text/event-stream", **headers}, timeout=20
        ) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            opened.set()
            stream.read(takewhile(lambda _line: not close.is_set(), answer.iter_lines()))
        stream.ended.set()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert opened.wait(10)
    yield stream
    close.set()  # it hangs up with the next line


def test_a_jobs_stream_ends_with_its_last_event(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    with following(service, f"/v1/jobs/{job['id']}/events") as stream:
        eventually(lambda: any(name == "job.progress" for name, _, _ in stream.came), "progress")
        assert not stream.ended.is_set()
        converter.gate.set()
        assert stream.ended.wait(5)
    assert stream.came[0][0] == "job.created"
    assert stream.came[-1][0] == "job.succeeded"
    numbers = [int(number) for _, number, _ in stream.came]
    assert numbers == sorted(set(numbers))
    middle = numbers[len(numbers) // 2]
    with following(service, f"/v1/jobs/{job['id']}/events", **{"Last-Event-ID": str(middle)}) as rest:
        assert rest.ended.wait(5)
    assert rest.came == [told for told in stream.came if int(told[1]) > middle]


def test_one_stream_tells_of_all_jobs(service):
    with following(service, "/v1/events") as stream:
        ids = [service.client.submit("/in", f"/out/{number}")["id"] for number in range(3)]
        for job_id in ids:
            eventually(lambda job_id=job_id: stream.states(job_id)[-1:] == ["succeeded"], "each of them succeeded")
    shown = service.http.get(f"/v1/jobs/{ids[0]}").json()
    assert [job for _, _, job in stream.came if job["id"] == ids[0]][-1] == shown
    assert {name for name, _, _ in stream.came} == {"job"}


def test_a_stream_can_be_narrowed_like_the_list_and_tells_how_a_job_leaves_it(service, converter):
    converter.gate.clear()
    wanted = service.client.submit("/in", "/a", labels={"run": "7"})
    other = service.client.submit("/in", "/b", labels={"run": "8"})
    service.job_in(wanted["id"], "running")
    service.job_in(other["id"], "running")
    paths = (
        "/v1/events?label=run:7&state=running",
        f"/v1/events?job_id={wanted['id']}",
        "/v1/events?source_prefix=/i",
    )
    with (
        following(service, paths[0]) as one,
        following(service, paths[1]) as two,
        following(service, paths[2]) as all_,
    ):
        eventually(lambda: one.came and two.came and all_.came, "what is there already")
        converter.gate.set()
        for stream in (one, two):
            eventually(lambda stream=stream: stream.states(wanted["id"])[-1:] == ["succeeded"], "its end")
            assert stream.states(other["id"]) == []
        eventually(lambda: all_.states(other["id"])[-1:] == ["succeeded"], "the other's end")


def test_batches_are_told_as_their_jobs_go_on_and_when_they_end(service, converter):
    converter.gate.clear()
    with following(service, "/v1/events") as stream:
        items = [{"source": f"/in/step_{step}", "destination": f"/out/{step}"} for step in (1, 2)]
        made = service.http.post("/v1/batches", json={"items": items, "name": "run"})
        assert made.status_code == 201, made.text
        batch = made.json()
        other = service.http.post("/v1/batches", json={"items": [{"source": "/in/x", "destination": "/x"}]}).json()

        def told(wanted=batch, stream=stream):
            return [item for name, _, item in stream.came if name == "batch" and item["id"] == wanted["id"]]

        eventually(lambda: any(item["counts"]["running"] for item in told()), "its jobs are running")
        with following(service, f"/v1/events?batch_id={batch['id']}") as narrow:
            converter.gate.set()
            eventually(lambda: told() and told()[-1]["state"] == "completed", "its end")
            eventually(lambda: told(stream=narrow) and told(stream=narrow)[-1]["state"] == "completed", "its end here")
            assert told()[-1]["counts"]["succeeded"] == 2
            assert told(other, narrow) == []
        path = f"/v1/batches/{batch['id']}"
        assert told()[-1] == service.http.get(path).json()


@pytest.mark.parametrize("query", ["state=none", "limit=5", "cursor=x", "job_id=x", "label=novalue", "more=1"])
def test_a_stream_that_cannot_be_is_a_problem(idle, query):
    accept = {"Accept": "text/event-stream"}
    assert idle.http.get(f"/v1/events?{query}", headers=accept).status_code == 422
    unknown = idle.http.get("/v1/events?job_id=job_0", headers=accept)
    assert (unknown.status_code, unknown.json()["type"]) == (404, "/problems/not-found")
    page = idle.http.get("/v1/events")
    assert (page.status_code, page.json()["type"]) == (406, "/problems/not-acceptable")


def test_a_stream_that_is_taken_up_again_tells_what_changed_meanwhile(service, monkeypatch):
    monkeypatch.setattr(routes, "LOOK_BACK", timedelta(0))
    monkeypatch.setattr(feed, "LOOK_BACK", timedelta(0))
    with following(service, "/v1/events") as stream:
        first = service.client.submit("/in", "/a")["id"]
        eventually(lambda: stream.states(first)[-1:] == ["succeeded"], "the first one's end")
    number = stream.came[-1][1]
    second = service.client.submit("/in", "/b")["id"]
    service.job_in(second, "succeeded")
    with following(service, "/v1/events", **{"Last-Event-ID": number}) as again:
        eventually(lambda: again.states(second) == ["succeeded"], "what happened in between")
    with following(service, "/v1/events", **{"Last-Event-ID": "nonsense"}) as fresh:
        third = service.client.submit("/in", "/c")["id"]
        eventually(lambda: fresh.states(third)[-1:] == ["succeeded"], "the third one's end")


def test_a_stream_in_silence_says_that_it_is_there(service, monkeypatch):
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.1)
    with following(service, "/v1/events") as stream:
        eventually(lambda: len(stream.comments) > 2, "comments")
    assert stream.came == []


def test_streams_end_when_the_service_is_to_stop(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    with (
        following(service, "/v1/events") as one,
        following(service, f"/v1/jobs/{job['id']}/events") as two,
    ):
        service.server.should_exit = True
        assert one.ended.wait(5)
        assert two.ended.wait(5)


def test_a_request_that_waits_is_answered_when_the_job_changes(service, converter):
    converter.gate.clear()
    job = service.client.submit("/in", "/out")
    service.job_in(job["id"], "running")
    threading.Timer(0.3, converter.gate.set).start()
    answer = service.http.get(f"/v1/jobs/{job['id']}?wait=10s").json()
    assert answer["state"] in ("verifying", "succeeded")


def test_nobody_asks_the_database_while_nobody_listens(service, monkeypatch):
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.05)
    changes, asked = service.context.changes, []
    event.listen(service.context.database._engine, "before_cursor_execute", lambda *told: asked.append(told[2]))
    assert changes._looking is None
    with following(service, "/v1/events"), following(service, "/v1/events"), following(service, "/v1/events"):
        eventually(lambda: len(changes._listeners) == 3, "three listeners")
        before = len([text for text in asked if "updated_at >=" in text])
        eventually(lambda: len([text for text in asked if "updated_at >=" in text]) > before + 2, "looks")
    eventually(lambda: not changes._listeners and changes._looking.done(), "nobody looks")
    with following(service, "/v1/events") as stream:
        job_id = service.client.submit("/in", "/out")["id"]
        eventually(lambda: stream.states(job_id)[-1:] == ["succeeded"], "and looks again when somebody comes")


def change(number: int, state: str = "running", before: str | None = "running") -> Change:
    return Change(f"job_{number}", "anna", f"{number} {state}", now(), None, before)


def test_a_slow_listener_gets_the_newest_of_each_job():
    async def listen():
        listener = Listener(lambda _change: True)
        for state in ("planning", "running", "succeeded"):
            for number in range(3):
                listener.offer(change(number, state))
        return await listener.wait(0), await listener.wait(0)

    heard, nothing = asyncio.run(listen())
    assert [told.text for told in heard] == ["0 succeeded", "1 succeeded", "2 succeeded"]
    assert nothing == []


def test_a_listener_that_lags_far_behind_keeps_nothing_and_begins_anew(monkeypatch):
    monkeypatch.setattr(feed, "MOST_PENDING", 5)

    async def listen():
        listener = Listener(lambda _change: True)
        for number in range(20):
            listener.offer(change(number))
        assert listener.lags
        assert await listener.wait(0) == []
        listener.restart()
        listener.offer(change(7))
        return await listener.wait(0)

    assert [told.text for told in asyncio.run(listen())] == ["7 running"]


def test_a_client_that_lags_far_behind_still_hears_of_every_job(service, monkeypatch):
    monkeypatch.setattr(feed, "MOST_PENDING", 1)
    monkeypatch.setattr(routes, "PAGE", 2)
    with following(service, "/v1/events") as stream:
        ids = [service.client.submit("/in", f"/out/{number}")["id"] for number in range(7)]
        for job_id in ids:
            eventually(lambda job_id=job_id: stream.states(job_id)[-1:] == ["succeeded"], "each of them succeeded")


def looks(changes):
    return [(told.id, told.before, told.job.state) for told in changes._look()]


def test_a_change_that_is_committed_late_is_told_and_none_is_told_twice(database):
    store = JobStore(database)
    changes = Changes(database, lambda job: job.id)
    first = store.create(NewJob("/in", "/a", {}, {}))
    assert looks(changes) == [(first.id, None, "queued")]
    assert looks(changes) == []
    late = store.create(NewJob("/in", "/b", {}, {}))
    with database.write() as connection:
        stamp = now() - timedelta(seconds=10)
        connection.execute(update(jobs).where(jobs.c.id == late.id).values(updated_at=stamp))
    assert looks(changes) == [(late.id, None, "queued")]
    store.cancel(first.id)
    assert looks(changes) == [(first.id, "queued", "cancelled")]
    assert looks(changes) == []


def test_every_job_of_a_large_batch_is_told_though_all_have_one_time(database, monkeypatch):
    monkeypatch.setattr(feed, "STAMPS_PER_QUERY", 7)
    monkeypatch.setattr(feed, "ROWS_PER_QUERY", 5)
    store = JobStore(database)
    template = store.create(NewJob("/in", "/x", {}, {}))
    moment = now()
    with database.write() as connection:
        row = dict(connection.execute(jobs.select()).mappings().one())
        rows = [{**row, "id": f"job_{n:04x}", "destination": f"/{n}", "updated_at": moment} for n in range(40)]
        connection.execute(insert(jobs), rows)
    changes = Changes(database, lambda job: job.id)
    assert len({told.id for told in changes._look()}) == 41
    found, since, after = [], moment, ""
    while page := store.changed(JobFilter(), since, 9, after):
        found += [job.id for job in page]
        since, after = page[-1].updated_at, page[-1].id
    assert sorted(found) == sorted(row["id"] for row in rows)
    assert template.id not in found


def test_a_snapshot_has_everything_of_a_job_but_its_plan(database):
    store = JobStore(database)
    job = store.create(NewJob("/in", "/a", {"dtype": "bfloat16"}, {"run": "7"}, priority=3, owner="anna"))
    leases = Leases(database, "tester")
    leases.planned(leases.claim(), {}, {"files": [], "tensors": 2}, b"")
    [told] = Changes(database, lambda job: job.id)._look()
    assert store.get(job.id).plan is not None
    assert told.job.plan is None
    whole = store.get(job.id)
    names = [name for name in type(whole).__dataclass_fields__ if name != "plan"]
    assert [getattr(told.job, name) for name in names] == [getattr(whole, name) for name in names]


FILTERS = [
    JobFilter(),
    JobFilter(owner="anna"),
    JobFilter(states=("queued", "running")),
    JobFilter(states=("failed",)),
    JobFilter(labels={"run": "7"}),
    JobFilter(labels={"run": "7", "step": "10"}),
    JobFilter(batch_id="batch_1"),
    JobFilter(watch_id="watch_1"),
    JobFilter(source_prefix="/in/q"),
    JobFilter(destination_prefix="/out/1%"),
    JobFilter(search="QWEN"),
    JobFilter(created_after=now() - timedelta(hours=1)),
    JobFilter(created_before=now() - timedelta(hours=1)),
]


def test_a_filter_says_the_same_of_a_job_here_and_in_the_database(database):
    store = JobStore(database)
    store.create(NewJob("/in/qwen", "/out/1", {}, {"run": "7"}, owner="anna", batch_id="batch_1"))
    store.create(NewJob("/in/glm", "/out/1%", {}, {"run": "7", "step": "10"}, owner="ben", watch_id="watch_1"))
    store.cancel(store.create(NewJob("/else", "/out/qwen", {}, {}, owner="anna")).id)
    everything = store.page(JobFilter(), 100)
    assert len(everything) == 3
    for wanted in FILTERS:
        assert store.page(wanted, 100) == [job for job in everything if fits(job, wanted)], wanted


def test_a_fault_in_the_feed_does_not_silence_it(database, monkeypatch):
    monkeypatch.setattr("service.jobs.changes.AWAY_PAUSE_S", 0.01)
    store = JobStore(database)
    spelled = []

    def spell(job):
        spelled.append(job.id)
        if len(spelled) == 1:
            raise ValueError("a fault")
        return "{}"

    async def heard():
        changes = Changes(database, spell)
        with changes.listening(lambda _: True) as listener:
            made = await asyncio.to_thread(store.create, NewJob("/in", "/out", {}, {}))
            assert [change.id for change in await listener.wait(15)] == [made.id]
        changes.close()

    asyncio.run(heard())
    assert len(spelled) == 2
