"""A lease that is stolen from a stalled attempt: it commits nowhere, and what it finished isn't done again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from service.db.database import Database
from service.db.tables import jobs
from service.jobs.addresses import Places
from service.jobs.attempt import Attempt
from service.jobs.cluster import GivenConversions
from service.jobs.leases import LeaseLost, LeaseRules, Leases
from service.jobs.records import NewJob, now
from service.jobs.store import JobStore
from tests.service.conftest import eventually
from workers.convert import convert
from workers.events import Event, FileCompleted, Started
from workers.storage import open_folder

CASE = Path(__file__).parent.parent / "cases" / "verl-fsdp" / "llama-gqa-fsdp2-ws2" / "input"
PLACES = Places.of((), ())


@pytest.fixture(params=["local", "s3"])
def destination(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("service.jobs.attempt.CLAIM_POLL_S", 0.05)
    if request.param == "local":
        yield str(tmp_path / "models" / "model")
        return
    # The first attempt is stalled: it doesn't renew its claim, nor see that a later attempt has taken it.
    monkeypatch.setattr("workers.store_destination.RENEW_EVERY_S", 1000.0)
    s3 = request.getfixturevalue("s3")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    yield f"s3://{s3.bucket}/{tmp_path.name}/model"


class Owner:
    """A process that carries a job out, in a thread of this one; ``events`` is what its conversion said."""

    def __init__(self, database: Database, name: str) -> None:
        self.leases = Leases(database, name, LeaseRules(timedelta(seconds=30)))
        self.events: list[Event] = []
        self.attempt: Attempt
        self._thread: threading.Thread

    def begin(self) -> None:
        lease = self.leases.claim()
        assert lease is not None
        self.attempt = Attempt(lease, self.leases, GivenConversions(self._convert), PLACES)
        self._thread = threading.Thread(target=self.attempt.run)
        self._thread.start()

    def end(self) -> str | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.attempt.outcome

    def before_commit(self) -> None:
        """Called before the database is asked whether this attempt may commit."""

    def after_leave(self) -> None:
        """Called after the database has said that it may."""

    def _convert(self, *arguments: Any, **controls: Any) -> Any:
        observer, may_commit = controls["observer"], controls["may_commit"]

        def observe(event: Event) -> None:
            self.events.append(event)
            observer(event)

        def ask() -> None:
            self.before_commit()
            may_commit()
            self.after_leave()

        return convert(*arguments, **{**controls, "observer": observe, "may_commit": ask})


class StalledOwner(Owner):
    """Stands still right before or right after it was told that it may commit."""

    def __init__(self, database: Database, where: str) -> None:
        super().__init__(database, "stalled")
        self.reached, self.go_on = threading.Event(), threading.Event()
        setattr(self, where, self._stall)

    def _stall(self) -> None:
        self.reached.set()
        assert self.go_on.wait(60)


@pytest.mark.parametrize("where", ["before_commit", "after_leave"])
def test_whoever_lost_the_lease_commits_neither_in_the_database_nor_at_the_destination(
    database: Database, destination: str, where: str
) -> None:
    store = JobStore(database)
    job = store.create(NewJob(str(CASE), destination, {"max_shard_size": "30KB"}, {}))
    stalled, thief = StalledOwner(database, where), Owner(database, "thief")
    stalled.begin()
    assert stalled.reached.wait(60)
    with database.write() as connection:
        connection.execute(update(jobs).values(lease_expires_at=now() - timedelta(seconds=1)))
    assert thief.leases.take_back_expired() == [job.id]
    thief.begin()
    if destination.startswith("s3:"):
        assert thief.end() == "succeeded"  # a later attempt at the same job takes the claim at once
        stalled.go_on.set()
        assert stalled.end() == "lost"
    else:
        # The lock of a process that lives holds: the second waits until the first has let go of it.
        eventually(lambda: store.get(job.id).plan is not None, "the thief has planned")
        stalled.go_on.set()
        assert stalled.end() == "lost"
        assert thief.end() == "succeeded"

    done = store.get(job.id)
    assert (done.state, done.attempt) == ("succeeded", 2)
    kinds = [event.type for event in store.events(job.id, 0, 999)[1]]
    assert kinds.count("job.succeeded") == 1
    folder = open_folder(destination)
    manifest = json.loads(folder.read("unshard.json"))
    assert {entry.path for entry in folder.list()} == {
        "unshard.json",
        *(entry["path"] for entry in (*manifest["weights"], *manifest["files"])),
    }
    made_twice = [event.name for event in thief.events if isinstance(event, FileCompleted)]
    assert not made_twice
    kept = [event.kept_files for event in thief.events if isinstance(event, Started)]
    if kept:  # else the first had its model in place before the thief began, and it was recognised
        assert set(kept[0]) == {entry["path"] for entry in manifest["weights"]}
    assert not [entry for entry in open_folder(destination.rpartition("/")[0]).list() if "unshard-" in entry.path]


def test_interruptions_make_a_job_wait_longer_each_time_and_end_it_at_last(database: Database) -> None:
    store = JobStore(database)
    job_id = store.create(NewJob("/in", "/out", {}, {})).id
    rules = LeaseRules(max_attempts=3, first_pause=timedelta(minutes=1))
    leases = Leases(database, "a", rules)
    pauses = []
    for _ in range(2):
        lease = leases.claim()
        assert lease is not None
        leases.interrupted(lease, "the Ray cluster did not answer")
        assert store.get(job_id).state == "queued"
        assert leases.claim() is None
        with database.write() as connection:
            until = connection.execute(select(jobs.c.not_before)).scalar_one()
            pauses.append(round((until - now()).total_seconds() / 60))
            connection.execute(update(jobs).values(not_before=now()))
    assert pauses == [1, 4]
    last = leases.claim()
    assert last is not None
    leases.interrupted(last, "the Ray cluster did not answer")
    job = store.get(job_id)
    assert job.state == "failed"
    assert job.error is not None
    assert (job.error["kind"], job.error["type"]) == ("resource", "interrupted")
    assert "3 attempts" in job.error["message"]
    assert "did not answer" in job.error["message"]
    with pytest.raises(LeaseLost):
        leases.interrupted(last, "again")
    # A retry by hand begins to count anew, and at once.
    store.retry(job_id)
    assert leases.claim() is not None
