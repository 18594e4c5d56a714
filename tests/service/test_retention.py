"""What goes with time, and what is left alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select, update
from sqlalchemy.exc import OperationalError

from service.db.tables import (
    audit,
    batches,
    events,
    idempotency_keys,
    job_documents,
    jobs,
    webhook_deliveries,
    webhooks,
)
from service.jobs.keys import KeyReused, Replay, RequestKey, Submission
from service.jobs.leases import Leases
from service.jobs.parts import REPORT, keep_document
from service.jobs.records import NewJob, now
from service.jobs.retention import Janitor, Retention
from service.jobs.store import JobStore
from service.jobs.waiting import Waiting
from service.refusals import NotFound
from tests.seaweed import S3Server
from tests.service.conftest import FakeConverter, eventually, running
from workers.convert import convert
from workers.errors import StorageError
from workers.options import ConvertOptions
from workers.storage import open_folder

CASE = Path(__file__).parent.parent / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"
OPTIONS = {"max_shard_size": "30KB"}
DAYS = Retention(jobs=timedelta(days=10), events=timedelta(days=3), audit=timedelta(days=100))


@pytest.fixture
def store(database):
    return JobStore(database)


@pytest.fixture
def janitor(database) -> Janitor:
    return Janitor(database, DAYS)


def ended(database, store, destination, state="succeeded", *, days=0.0, **columns):
    """A job that ended some days ago."""
    job = store.create(NewJob("/in", destination, dict(OPTIONS), {}))
    leases = Leases(database, "a")
    lease = leases.claim()
    leases.note(lease, "job.warned", {"message": "x"})
    leases.finish(lease, state, {}, **columns)
    with database.write() as connection:
        keep_document(connection, job.id, REPORT, b"x")
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(updated_at=now() - timedelta(days=days)))
    return job.id


def count(database, table, *where):
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(table).where(*where)).scalar_one()


def test_finished_jobs_go_after_their_time_and_their_events_before(database, store, janitor):
    old, middle, young = (ended(database, store, f"/{days}", days=days) for days in (11, 4, 1))
    live = store.create(NewJob("/in", "/live", {}, {})).id
    with database.write() as connection:
        connection.execute(update(jobs).where(jobs.c.id == live).values(updated_at=now() - timedelta(days=99)))
    janitor.sweep()
    with pytest.raises(NotFound):
        store.get(old)
    assert count(database, job_documents, job_documents.c.job_id == old) == 0
    assert [event.type for event in store.events(middle, 0, 99)[1]] == ["job.succeeded"]
    assert store.get(middle).state == "succeeded"
    assert len(store.events(young, 0, 99)[1]) > 3
    assert store.get(live).state == "queued"
    before = count(database, events)
    janitor.sweep()
    assert count(database, events) == before


def test_more_than_one_transaction_takes_are_all_taken(database, store, janitor, monkeypatch):
    monkeypatch.setattr("service.jobs.retention.ROWS_AT_ONCE", 2)
    for number in range(5):
        ended(database, store, f"/{number}", days=20)
    ended(database, store, "/young", days=5)
    janitor.sweep()
    assert count(database, jobs) == 1


def test_jobs_of_a_batch_that_goes_on_stay(database, store, janitor):
    moment = now()
    common = {
        "owner": "", "name": "", "state": "running", "request": {}, "labels": {}, "on_item_error": "continue",
        "total": 1, "refused": 0, "created_at": moment, "updated_at": moment,
    }  # fmt: skip
    with database.write() as connection:
        connection.execute(insert(batches).values(id="batch_1", **common))
    job_id = ended(database, store, "/1", days=50)
    with database.write() as connection:
        connection.execute(update(jobs).values(batch_id="batch_1"))
    janitor.sweep()
    assert store.get(job_id)
    with database.write() as connection:
        connection.execute(update(batches).values(state="completed", ended_at=moment - timedelta(days=11)))
    janitor.sweep()
    assert (count(database, jobs), count(database, batches)) == (0, 0)


def test_deliveries_keys_and_audit_rows_go_by_age(database, store, janitor):
    key = RequestKey.of("", "k", {})
    store.create(NewJob("/in", "/out", {}, {}), Submission(key))
    moment = now()
    hook = {
        "id": "webhook_1", "owner": "", "everyone": False, "url": "https://x", "description": "", "secret": "s",
        "events": [], "state": "active", "refusals": 0, "created_at": moment, "updated_at": moment,
    }  # fmt: skip
    sent = {"webhook_id": "webhook_1", "event_type": "job.succeeded", "body": {}, "attempts": 1}
    row = {
        "actor": "a", "actor_name": "", "address": "", "action": "x", "target": "", "status": 200, "detail": {},
    }  # fmt: skip
    old, young = moment - timedelta(days=4), moment - timedelta(days=1)
    with database.write() as connection:
        connection.execute(update(idempotency_keys).values(expires_at=old))
        connection.execute(insert(webhooks).values(**hook))
        for name, state, at in (("1", "delivered", old), ("2", "pending", old), ("3", "failed", young)):
            connection.execute(insert(webhook_deliveries).values(id=name, state=state, created_at=at, **sent))
        for name, days in (("1", 101), ("2", 99)):
            connection.execute(insert(audit).values(id=name, at=moment - timedelta(days=days), **row))
    janitor.sweep()
    assert count(database, idempotency_keys) == 0
    with database.read() as connection:
        assert set(connection.execute(select(webhook_deliveries.c.id)).scalars()) == {"2", "3"}
        assert set(connection.execute(select(audit.c.id)).scalars()) == {"2"}


@pytest.fixture(params=["local", "s3"])
def destination(request, tmp_path, monkeypatch) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "models" / "model")
        return
    s3: S3Server = request.getfixturevalue("s3")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    yield f"s3://{s3.bucket}/{tmp_path.name}/model"


def fail_before_the_commit(destination: str) -> str:
    """Leave a conversion unfinished, and return its plan's fingerprint."""
    plans: list[str] = []

    def may_not() -> None:
        raise StorageError("the disk is gone")

    with pytest.raises(StorageError):
        convert(
            str(CASE),
            destination,
            ConvertOptions.from_dict(OPTIONS),
            observer=lambda event: plans.append(event.summary["fingerprint"]) if hasattr(event, "summary") else None,
            may_commit=may_not,
        )
    return plans[0]


def parent_of(destination: str):
    return open_folder(destination.rpartition("/")[0])


def test_what_a_failed_job_left_at_its_destination_goes_with_it(database, store, janitor, destination):
    fingerprint = fail_before_the_commit(destination)
    folder = parent_of(destination)
    folder.write(".model.unshard-0123456789abcdef/mine", b"mine")
    folder.write("model/.unshard/note", b"mine") if not folder.is_local else None
    left = {entry.path for entry in folder.list()}
    assert len(left) > 3
    error = {"kind": "destination"}
    ended(database, store, destination, "failed", days=11, error=error, plan={"fingerprint": fingerprint})
    janitor.sweep()
    assert count(database, jobs) == 0
    rest = {entry.path for entry in folder.list()}
    assert not {path for path in rest if path.endswith(".safetensors")}
    assert not {path for path in rest if fingerprint[:16] in path}
    assert ".model.unshard-0123456789abcdef/mine" in rest


def test_what_a_failed_job_left_stays_while_another_works_on_it(database, store, janitor, destination):
    fingerprint = fail_before_the_commit(destination)
    folder = parent_of(destination)
    left = {entry.path for entry in folder.list()}
    ended(database, store, destination, "failed", days=11, error={}, plan={"fingerprint": fingerprint})
    store.create(NewJob("/in", destination, {}, {}))
    janitor.sweep()
    assert {entry.path for entry in folder.list()} == left


def test_a_model_that_somebody_else_finished_there_stays(database, store, janitor, destination):
    fingerprint = fail_before_the_commit(destination)
    convert(str(CASE), destination, ConvertOptions.from_dict(OPTIONS))
    folder = open_folder(destination)
    model = {entry.path for entry in folder.list()}
    folder.write(f".unshard/{fingerprint}/started.json", b'{"paths": ["model.safetensors"]}')
    ended(database, store, destination, "cancelled", days=11, plan={"fingerprint": fingerprint})
    janitor.sweep()
    assert {entry.path for entry in folder.list() if not entry.path.startswith(".unshard")} == model
    assert json.loads(folder.read("unshard.json"))["plan"] == fingerprint


def test_a_deleted_job_is_cleared_away_soon(settings, tmp_path):
    destination = str(tmp_path / "models" / "model")
    fingerprint = fail_before_the_commit(destination)
    converter = FakeConverter(fail_with=[StorageError("gone")])
    converter.gate.set()
    with running(settings, converter) as service:
        job = service.client.submit(str(CASE), destination)
        service.client.wait(job["id"], timeout_s=10)
        with service.context.database.write() as connection:
            connection.execute(update(jobs).values(plan={"fingerprint": fingerprint}))
        assert service.http.delete(f"/v1/jobs/{job['id']}").status_code == 204
        eventually(lambda: not list((tmp_path / "models").iterdir()), "nothing is left at the destination")


def test_jobs_that_wait_for_a_cluster_say_for_what_and_fail_in_the_end(database, store):
    waits = store.create(NewJob("/in", "/out", {}, {})).id
    waiting = Waiting(database, 0.05)
    waiting.tell("0 of 0 GPU are free")
    told = [event for event in store.events(waits, 0, 9)[1] if event.type == "job.waiting"]
    assert [event.data for event in told] == [{"reason": "0 of 0 GPU are free"}]
    assert store.get(waits).state == "queued"

    def failed():
        waiting.tell("0 of 0 GPU are free")
        job = store.get(waits)
        return job if job.state == "failed" else None

    job = eventually(failed, "the job has failed")
    assert (job.error["kind"], job.error["type"]) == ("resource", "no-cluster")
    assert "0 of 0 GPU are free" in job.error["message"]
    assert job.error["hint"]
    kinds = [event.type for event in store.events(waits, 0, 9)[1]]
    assert kinds == ["job.created", "job.waiting", "job.failed"]


def test_a_service_without_a_cluster_leaves_the_queue_to_one_that_has_one(database, store):
    store.create(NewJob("/in", "/at-work", {}, {}))
    assert Leases(database, "another").claim() is not None
    waits = store.create(NewJob("/in", "/out", {}, {})).id
    waiting = Waiting(database, 0.05)
    waiting.tell("0 of 0 GPU are free")
    with database.write() as connection:
        connection.execute(update(jobs).where(jobs.c.id == waits).values(updated_at=now() - timedelta(hours=1)))
    waiting._since = waiting._looked = float("-inf")
    waiting.tell("0 of 0 GPU are free")
    assert store.get(waits).state == "queued"


def test_a_database_that_is_away_does_not_end_the_janitor(database, store, monkeypatch):
    away = [OperationalError("SELECT", {}, Exception("gone"))]

    def live(_, destination):
        if away:
            raise away.pop()
        cleared.append(destination)
        return True

    cleared = []
    monkeypatch.setattr(Janitor, "_is_live", live)
    monkeypatch.setattr("service.jobs.retention.AWAY_PAUSE_S", 0.01)
    janitor = Janitor(database, DAYS)
    job = dataclasses.replace(store.create(NewJob("/in", "/out", {}, {})), plan={"fingerprint": "f"})
    janitor.start()
    janitor.clear_after(job)
    eventually(lambda: cleared == ["/out"], "the destination is looked at again")
    janitor.stop()


def test_a_key_whose_time_is_over_is_new_again_and_those_of_others_are_left_to_the_sweep(database, store):
    def asked(key, destination):
        new = NewJob("/in", destination, {}, {})
        return store.create(new, Submission(RequestKey.of("", key, [destination])))

    asked("a", "/a")
    asked("b", "/b")
    with database.write() as connection:
        connection.execute(update(idempotency_keys).values(expires_at=now() - timedelta(seconds=1)))
    assert not isinstance(asked("a", "/c"), Replay)
    with pytest.raises(KeyReused):
        asked("a", "/d")
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(idempotency_keys)).scalar() == 2


def test_a_cluster_that_works_again_is_waited_for_anew(database, store):
    waits = store.create(NewJob("/in", "/out", {}, {})).id
    waiting = Waiting(database, 1000)
    waiting.tell("a")
    waiting.over()
    waiting._looked = float("-inf")
    waiting.tell("a")
    kinds = [event.type for event in store.events(waits, 0, 9)[1]]
    assert kinds == ["job.created", "job.waiting", "job.waiting"]
