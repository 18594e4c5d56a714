"""The store alone: schema, leases, and several processes at once."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from datetime import timedelta
from itertools import count, pairwise

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from service.access.tokens import NewToken, TokenStore
from service.db.database import Database, newest_revision
from service.db.tables import metadata
from service.jobs import leases as leases_module
from service.jobs import records
from service.jobs.keys import Submission
from service.jobs.leases import LeaseLost, LeaseRules, Leases
from service.jobs.records import NewJob, now
from service.jobs.store import (
    BusyDestination,
    JobFilter,
    JobStore,
    TooManyQueued,
    cancel_job,
    insert_jobs,
    require_room,
)
from workers.errors import InvalidOption, StorageError

EXPIRED = LeaseRules(timedelta(seconds=-1), max_attempts=2)


@pytest.fixture
def store(database):
    return JobStore(database)


def new(destination="/out", **fields):
    return NewJob("/in", destination, {}, fields.pop("labels", {}), **fields)


def test_migrations_make_exactly_the_tables(database):
    database.migrate()
    assert database.revision() == newest_revision()
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_an_sqlite_file_has_one_service_at_a_time(tmp_path):
    url = f"sqlite:///{tmp_path}/jobs.db"
    database = Database(url)
    assert database.own()
    second = Database(url)
    with pytest.raises(StorageError, match="another service uses the database"):
        second.own()
    database.close()
    assert second.own()
    second.close()


def test_a_database_in_memory_and_an_unknown_url_are_refused():
    with pytest.raises(InvalidOption, match="survive a restart"):
        Database("sqlite://")
    with pytest.raises(InvalidOption, match="not a database URL") as caught:
        Database("canary:secret")
    assert "secret" not in caught.value.message


def test_a_database_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "jobs.db").write_text("this is no database, but long enough to have a header " * 20)
    with pytest.raises(StorageError, match=r"jobs\.db cannot be used: file is not a database"):
        Database(f"sqlite:///{tmp_path}/jobs.db").migrate()


def claim_all(url, owner, found):
    leases = Leases(Database(url), owner)
    while (lease := leases.claim()) is not None:
        found.put((owner, lease.job.id))
    found.put((owner, None))


def test_processes_that_claim_at_once_never_get_the_same_job(store, url):
    wanted = {store.create(new(f"/out/{number}")).id for number in range(60)}
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    workers = [context.Process(target=claim_all, args=(url, f"w{n}", found)) for n in range(2)]
    for worker in workers:
        worker.start()
    claimed = Counter()
    ended = 0
    while ended < len(workers):
        _, job_id = found.get(timeout=60)
        ended += job_id is None
        claimed.update([job_id] if job_id else [])
    for worker in workers:
        worker.join(30)
    assert set(claimed) == wanted
    assert set(claimed.values()) == {1}


def test_whoever_lost_a_lease_changes_nothing_any_more(store, database):
    job = store.create(new())
    first = Leases(database, "a", EXPIRED)
    stale = first.claim()
    assert first.take_back_expired() == [job.id]
    fresh = Leases(database, "a", EXPIRED).claim()
    assert fresh.fence > stale.fence
    for change in (
        lambda: first.heartbeat(stale),
        lambda: first.advance(stale, "running", {}),
        lambda: first.note(stale, "job.warned", {}),
        lambda: first.finish(stale, "succeeded", {}),
    ):
        with pytest.raises(LeaseLost):
            change()
    first.give_back(stale, "too late")
    assert store.get(job.id).state == "planning"


def test_a_job_that_loses_its_lease_too_often_fails(store, database):
    job = store.create(new())
    leases = Leases(database, "a", EXPIRED)
    for _ in range(EXPIRED.max_attempts):
        assert leases.claim() is not None
        leases.take_back_expired()
    failed = store.get(job.id)
    assert (failed.state, failed.attempt) == ("failed", 2)
    assert (failed.error["kind"], failed.error["type"]) == ("internal", "lease-lost")


def test_a_job_that_is_being_cancelled_stays_so_until_its_end(store, database):
    job = store.create(new())
    leases = Leases(database, "a")
    lease = leases.claim()
    store.cancel(job.id)
    leases.advance(lease, "running", {})
    assert leases.heartbeat(lease) == "cancelling"
    leases.give_back(lease, "stopped")
    assert store.get(job.id).state == "cancelled"


@pytest.mark.parametrize("end", [Leases.give_back, Leases.interrupted])
def test_a_cancellation_that_is_committed_while_a_job_is_given_back_counts(store, database, end):
    job = store.create(new())
    leases = Leases(database, "a")
    lease = leases.claim()
    giving = threading.Thread(target=end, args=(leases, lease, "stopped"))
    with database.write() as connection:
        cancel_job(connection, job.id)
        giving.start()
        giving.join(0.3)
        assert giving.is_alive()
    giving.join(30)
    assert store.get(job.id).state == "cancelled"


def test_leases_of_replicas_hold_however_far_their_clocks_differ(store, database, monkeypatch):
    job = store.create(new())
    lease = Leases(database, "behind").claim()
    monkeypatch.setattr(leases_module, "now", lambda: now() + timedelta(hours=1))
    assert Leases(database, "ahead").take_back_expired() == []
    monkeypatch.setattr(leases_module, "now", lambda: now() - timedelta(hours=1))
    assert Leases(database, "behind").heartbeat(lease) == "planning"
    monkeypatch.undo()
    assert Leases(database, "exact").take_back_expired() == []
    assert store.get(job.id).state == "planning"


def test_of_progress_the_newest_and_a_history_of_bounded_size_are_kept(store, database, monkeypatch):
    job = store.create(new())
    leases = Leases(database, "a")
    lease = leases.claim()
    began = now()
    ticks = count()
    monkeypatch.setattr(records, "now", lambda: began + timedelta(seconds=0.1 * next(ticks)))
    for done in range(240):
        leases.note(lease, "job.progress", {"bytes_done": done}, progress={"bytes_done": done})
    _, events = store.events(job.id, 0, 500)
    told = [event.data["bytes_done"] for event in events if event.type == "job.progress"]
    assert told[0] == 0
    assert told[-1] == 239
    assert records.MOST_PROGRESS / 2 <= len(told) <= records.MOST_PROGRESS
    steps = [after - before for before, after in pairwise(told)]
    assert max(steps) <= 4 * 240 / records.MOST_PROGRESS  # evenly spread: no hole in a chart
    assert events[-1].seq == 242


def test_the_history_of_progress_begins_again_with_a_new_plan(store, database):
    job = store.create(new())
    leases = Leases(database, "a")
    lease = leases.claim()
    leases.note(lease, "job.progress", {"bytes_done": 7}, progress={"bytes_done": 7})
    leases.planned(lease, {}, {"files": []}, b"")
    _, events = store.events(job.id, 0, 100)
    assert "job.progress" not in [event.type for event in events]


def limited(database, max_queued=1):
    token, _ = TokenStore(database).create(NewToken("training", ("jobs:write",), "administrator"))
    return token.id, Submission(max_queued=max_queued)


def test_two_requests_at_once_do_not_both_take_the_last_place_of_an_owner(store, database):
    owner, how = limited(database)
    refused = []

    def second():
        try:
            store.create(new("/b", owner=owner), how)
        except TooManyQueued as error:
            refused.append(error)

    other = threading.Thread(target=second)
    with database.write() as connection:
        require_room(connection, owner, 1, 1)
        insert_jobs(connection, [new("/a", owner=owner)])
        other.start()
        other.join(0.3)
    other.join(30)
    assert len(refused) == 1


def test_a_retry_takes_a_place_in_the_queue_like_a_new_job(store, database):
    owner, how = limited(database)
    first = store.create(new("/a", owner=owner), how)
    store.cancel(first.id)
    second = store.create(new("/b", owner=owner), how)
    with pytest.raises(TooManyQueued):
        store.retry(first.id, owner, max_queued=1)
    store.cancel(second.id)
    assert store.retry(first.id, owner, max_queued=1).state == "queued"


def test_a_busy_destination_is_free_again_after_the_end(store):
    job = store.create(new())
    with pytest.raises(BusyDestination):
        store.create(new())
    store.cancel(job.id)
    store.create(new())


def test_jobs_are_filtered_by_labels_and_time(store):
    first = store.create(new("/a", labels={"run": "1", "team.x/y": "b"}))
    second = store.create(new("/b", labels={"run": "2"}))
    assert [job.id for job in store.page(JobFilter(labels={"run": "2"}), 10)] == [second.id]
    assert [job.id for job in store.page(JobFilter(labels={"team.x/y": "b", "run": "1"}), 10)] == [first.id]
    assert [job.id for job in store.page(JobFilter(created_after=first.created_at), 10)] == [second.id]
    assert [job.id for job in store.page(JobFilter(created_before=second.created_at), 10)] == [first.id]
