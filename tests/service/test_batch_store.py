"""The store of batches alone: all or nothing, limits, the end of a batch, and several processes at once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import delete, select, update

from service.batches import store as store_module
from service.batches.drafts import Draft
from service.batches.keeper import Keeper
from service.batches.records import NewBatch
from service.batches.store import BatchStore, ItemsRefused
from service.db.tables import batch_items, batches, jobs, webhook_deliveries, webhooks
from service.jobs.keys import Submission
from service.jobs.leases import LeaseRules, Leases
from service.jobs.records import NewJob, now
from service.jobs.store import JobFilter, JobStore, TooManyQueued
from service.refusals import StateRefused

RESULT = {"bytes": 100, "seconds": 2.0, "already_there": False}
SKIPPED = {"bytes": 0, "seconds": 0.1, "already_there": True}
FAULT = {"kind": "input", "type": "corrupt-file", "message": "broken", "hint": "copy it again"}


class Made:
    """A store with the parts that work on it."""

    def __init__(self, database):
        self.database = database
        self.batches = BatchStore(database)
        self.jobs = JobStore(database)
        self.leases = Leases(database, "worker")
        self.keeper = Keeper(database, 1.0)

    def batch(self, *destinations, owner="a", priority=0, **fields):
        drafts = [
            Draft("/in", place, NewJob("/in", place, {}, {}, priority, owner))
            if place
            else Draft("/in", "", error=FAULT)
            for place in destinations
        ]
        return self.batches.create(NewBatch(owner, "b", {"template": {}}, {}, **fields), drafts)

    def finish(self, state, count=1, **columns):
        for _ in range(count):
            self.leases.finish(self.leases.claim(), state, {}, **columns)

    def counts(self, batch):
        told = self.batches.get(batch.id).tally.counts
        return {name: number for name in told.__slots__ if (number := getattr(told, name))}


@pytest.fixture
def made(database):
    return Made(database)


@pytest.fixture
def heard(database):
    """What a webhook for everything is told."""
    times = dict.fromkeys(("created_at", "updated_at"), now())
    with database.write() as connection:
        connection.execute(
            webhooks.insert().values(
                id="webhook_1",
                owner="a",
                everyone=True,
                url="https://example.com",
                description="",
                secret="s",
                events=["*"],
                state="active",
                refusals=0,
                **times,
            )
        )

    def look(kind):
        with database.read() as connection:
            query = select(webhook_deliveries.c.body).where(webhook_deliveries.c.event_type == kind)
            return [body["data"] for body in connection.execute(query).scalars()]

    return look


def test_a_batch_ends_with_its_last_job_and_tells_so_once(made, heard):
    batch = made.batch("/1", "/2", "/3", None)
    made.finish("succeeded", result=RESULT)
    made.finish("succeeded", result=SKIPPED)
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "running"
    made.finish("failed", error=FAULT)
    made.keeper.keep()
    made.keeper.keep()
    ended = made.batches.get(batch.id)
    assert (ended.state, ended.ended_at is not None) == ("completed", True)
    assert made.counts(batch) == {"total": 4, "succeeded": 1, "skipped": 1, "failed": 1, "refused": 1}
    [told] = heard("batch.completed")
    assert (told["batch_id"], told["state"], told["counts"]["failed"], told["bytes_done"]) == (
        batch.id,
        "completed",
        1,
        100,
    )


def test_a_batch_is_not_queued_again_beyond_what_its_owner_may_have_waiting(made):
    batch = made.batch("/a", "/b")
    made.batches.cancel(batch.id)
    made.keeper.keep()
    with pytest.raises(TooManyQueued):
        made.batches.retry_failed(batch.id, "a", max_queued=1)
    assert made.counts(batch) == {"total": 2, "cancelled": 2}
    assert made.batches.retry_failed(batch.id, "a", max_queued=2)[1] == 2


def test_several_keepers_at_once_end_a_batch_once(made, heard, database):
    for number in range(4):
        made.batch(f"/{number}")
    made.finish("succeeded", 4, result=RESULT)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Keeper(database, 1.0).keep(), range(8)))
    assert len(heard("batch.completed")) == 4
    assert len({told["batch_id"] for told in heard("batch.completed")}) == 4


def test_a_batch_of_refused_items_alone_ends_at_once(made):
    batch = made.batch(None, None)
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "completed"
    assert made.counts(batch) == {"total": 2, "refused": 2}


def test_a_creation_that_breaks_leaves_nothing(made, database, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "_get", die)
    with pytest.raises(KeyboardInterrupt):
        made.batch("/1", "/2")
    with database.read() as connection:
        for table in (jobs, batches, batch_items):
            assert connection.execute(select(table)).first() is None


def test_destinations_that_live_jobs_have_are_refused_or_refuse_the_batch(made):
    first = made.jobs.create(NewJob("/in", "/1", {}, {}))
    batch = made.batch("/1", "/2")
    [busy, fine] = made.batches.items(batch.id, -1, 10)
    assert (busy.state, busy.error["type"], fine.state) == ("refused", "destination-busy", "queued")
    assert first.id in busy.error["message"]
    with pytest.raises(ItemsRefused) as caught:
        made.batch("/3", "/1", on_item_error="fail")
    assert [position for position, _ in caught.value.drafts] == [1]
    assert len(made.jobs.page(JobFilter(), 10)) == 2


def test_a_batch_that_has_more_jobs_than_may_wait_is_refused_as_a_whole(made):
    drafts = [Draft("/in", place, NewJob("/in", place, {}, {}, 0, "a")) for place in ("/1", "/2")]
    new = NewBatch("a", "b", {"template": {}}, {})
    with pytest.raises(TooManyQueued):
        made.batches.create(new, drafts, Submission(max_queued=1))
    assert made.jobs.page(JobFilter(), 10) == []
    made.batches.create(new, drafts, Submission(max_queued=2))
    assert len(made.jobs.page(JobFilter(), 10)) == 2


def test_batches_with_the_same_destinations_at_the_same_moment_share_them_out(made):
    places = [f"/{number}" for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda turn: made.batch(*(places if turn % 2 else reversed(places))), range(4)))
    taken = Counter(job.destination for job in made.jobs.page(JobFilter(states=("queued",)), 200))
    assert taken == Counter(places)


def test_a_batch_never_has_more_at_work_than_its_cap(made):
    capped = made.batch("/1", "/2", "/3", max_running=1)
    free = made.batch("/4", "/5", owner="b")
    claimed = [made.leases.claim() for _ in range(4)]
    assert Counter(lease.job.batch_id for lease in claimed if lease) == {capped.id: 1, free.id: 2}
    made.leases.finish(
        next(lease for lease in claimed if lease.job.batch_id == capped.id), "succeeded", {}, result=RESULT
    )
    assert made.leases.claim().job.batch_id == capped.id
    assert made.leases.claim() is None
    made.batches.change(capped.id, {"max_running": None})
    assert made.leases.claim().job.batch_id == capped.id


def test_a_large_batch_of_one_owner_does_not_hold_up_another(made):
    made.batch(*(f"/a/{number}" for number in range(50)), owner="a")
    made.batch("/b/1", "/b/2", owner="b")
    assert [made.leases.claim().job.owner for _ in range(5)] == ["a", "b", "a", "b", "a"]


def test_jobs_of_a_batch_go_in_its_order_and_by_priority(made):
    made.batch("/1", "/2")
    urgent = made.batch("/3", priority=5)
    later = made.batch("/4")
    assert made.leases.claim().job.batch_id == urgent.id
    made.batches.change(later.id, {"priority": 9, "name": "now"})
    assert made.batches.get(later.id).name == "now"
    assert [made.leases.claim().job.destination for _ in range(3)] == ["/4", "/1", "/2"]


def test_cancelling_ends_what_waits_and_asks_what_runs_to_end(made, heard):
    batch = made.batch("/1", "/2", "/3")
    lease = made.leases.claim()
    told = made.batches.cancel(batch.id)
    assert told.state == "cancelling"
    assert made.counts(batch) == {"total": 3, "running": 1, "cancelled": 2}
    assert made.leases.heartbeat(lease) == "cancelling"
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "cancelling"
    made.leases.finish(lease, "cancelled", {})
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "cancelled"
    assert made.batches.cancel(batch.id).state == "cancelled"
    assert [told["state"] for told in heard("batch.completed")] == ["cancelled"]
    assert {told["job_id"] for told in heard("job.cancelled")} == {item.job_id for item in items(made, batch)}
    _, happened = made.jobs.events(items(made, batch)[2].job_id, 0, 10)
    assert [(event.seq, event.type) for event in happened] == [(1, "job.created"), (2, "job.cancelled")]


def items(made, batch):
    return made.batches.items(batch.id, -1, 100)


def test_failed_and_cancelled_jobs_are_queued_again_and_the_batch_goes_on(made, heard):
    batch = made.batch("/1", "/2", "/3", "/4")
    made.finish("succeeded", result=RESULT)
    made.finish("failed", 2, error=FAULT)
    made.jobs.cancel(items(made, batch)[3].job_id)
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "completed"
    made.jobs.create(NewJob("/in", "/2", {}, {}))
    told, requeued, busy = made.batches.retry_failed(batch.id)
    assert (told.state, told.ended_at, requeued) == ("running", None, 2)
    assert list(busy) == [items(made, batch)[1].job_id]
    assert made.counts(batch) == {"total": 4, "succeeded": 1, "queued": 2, "failed": 1}
    assert len(heard("job.requeued")) == 2
    retried = made.jobs.get(items(made, batch)[2].job_id)
    assert (retried.state, retried.error, retried.attempt, list(retried.state_times)) == (
        "queued",
        None,
        1,
        ["queued"],
    )
    # The job that was handed in between is first by neither age nor owner; all end.
    while made.leases.claim() is not None:
        pass
    with made.database.write() as connection:
        connection.execute(update(jobs).values(state="succeeded", result=RESULT))
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "completed"
    assert len(heard("batch.completed")) == 2


def test_nothing_is_queued_again_while_a_batch_is_being_cancelled(made):
    batch = made.batch("/1", "/2")
    made.leases.claim()
    made.batches.cancel(batch.id)
    with pytest.raises(StateRefused, match="is cancelling") as caught:
        made.batches.retry_failed(batch.id)
    assert caught.value.hint
    with pytest.raises(StateRefused, match="is cancelling"):
        made.batches.delete(batch.id)


def test_with_on_item_error_fail_the_first_failure_stops_what_waits_and_lets_run_what_runs(made):
    batch = made.batch("/1", "/2", "/3", on_item_error="fail")
    first, second = made.leases.claim(), made.leases.claim()
    made.leases.finish(first, "failed", {}, error=FAULT)
    made.keeper.keep()
    assert made.counts(batch) == {"total": 3, "running": 1, "failed": 1, "cancelled": 1}
    _, happened = made.jobs.events(items(made, batch)[2].job_id, 0, 10)
    assert "another item" in happened[-1].data["reason"]
    made.leases.finish(second, "succeeded", {}, result=RESULT)
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "completed"


def test_a_job_that_is_retried_after_such_a_failure_is_not_stopped_by_it(made):
    batch = made.batch("/1", "/2", on_item_error="fail")
    made.finish("failed", error=FAULT)
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "completed"
    made.jobs.retry(items(made, batch)[1].job_id)
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "running"
    assert made.counts(batch) == {"total": 2, "queued": 1, "failed": 1}
    made.finish("succeeded", result=RESULT)
    made.keeper.keep()
    assert made.batches.get(batch.id).state == "completed"


def test_with_continue_the_others_go_on_after_a_failure(made):
    batch = made.batch("/1", "/2")
    made.finish("failed", error=FAULT)
    made.keeper.keep()
    assert made.counts(batch) == {"total": 2, "queued": 1, "failed": 1}


def test_what_an_ended_batch_tells_outlasts_its_jobs(made, database):
    batch = made.batch("/1", "/2")
    made.finish("succeeded", 2, result=RESULT)
    made.keeper.keep()
    with database.write() as connection:
        connection.execute(delete(jobs))
    assert made.counts(batch) == {"total": 2, "succeeded": 2}
    assert made.batches.get(batch.id).tally.bytes_done == 200
    assert [(item.position, item.state) for item in items(made, batch)] == [(0, None), (1, None)]
    made.batches.delete(batch.id)
    with database.read() as connection:
        assert connection.execute(select(batch_items)).first() is None


def test_a_batch_of_a_killed_process_ends_in_the_next_one(made, database):
    batch = made.batch("/1")
    lost = Leases(database, "dead", LeaseRules(timedelta(seconds=-1)))
    lost.claim()
    assert lost.take_back_expired()
    with database.write() as connection:
        connection.execute(update(jobs).values(not_before=None))
    made.finish("succeeded", result=RESULT)
    # Nobody was there to end it; whoever comes next finds it.
    Keeper(database, 1.0).keep()
    assert made.batches.get(batch.id).state == "completed"


def test_sizes_and_the_time_left_come_from_what_runs_and_what_has_ended(made):
    batch = made.batch(*(f"/{number}" for number in range(6)))
    assert made.batches.get(batch.id).tally.bytes_total is None
    made.finish("succeeded", result={**RESULT, "bytes": 3_000_000_000})
    made.finish("succeeded", result=SKIPPED)
    lease = made.leases.claim()
    progress = {"bytes_done": 1_000_000_000, "bytes_total": 3_000_000_000, "bytes_per_s": 100_000_000}
    made.leases.note(lease, "job.progress", progress, progress=progress)
    tally = made.batches.get(batch.id).tally
    # Three jobs are known, with 2 GB on average: the skipped one counts as nothing. Three are not.
    assert (tally.bytes_done, tally.bytes_total) == (4_000_000_000, 12_000_000_000)
    assert (tally.bytes_per_s, tally.eta_s) == (100_000_000, 80.0)


def test_without_live_rates_the_time_left_comes_from_finished_jobs(made):
    batch = made.batch("/1", "/2", "/3")
    made.finish("succeeded", result=RESULT)
    made.leases.claim()
    tally = made.batches.get(batch.id).tally
    assert (tally.bytes_total, tally.bytes_per_s, tally.eta_s) == (300, 50, 4.0)
