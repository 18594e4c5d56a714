"""Watches: a checkpoint becomes a job once, when it is whole and nobody writes to it any more."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import column, insert, table, update

from service.db.database import Database, _alembic
from service.db.tables import jobs, tokens, watch_items, watches
from service.jobs.addresses import Places
from service.jobs.records import NewJob, now
from service.jobs.store import JobFilter, JobStore
from service.watches import looks as looks_module
from service.watches import watcher as watcher_module
from service.watches.look import LONGEST_LOOK_S, Tools
from service.watches.looks import LookOver, Looks
from service.watches.records import NewWatch
from service.watches.store import WatchStore
from service.watches.watcher import Watcher
from tests.service.command import CASES
from tests.service.conftest import eventually
from workers.convert import plan_source
from workers.errors import StorageError
from workers.storage.local import LocalFolder

CASE = CASES / "llama-gqa-fsdp2-ws2" / "input"
RANKS = ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt")
QUICK_S = 0.002


def begin(folder: Path) -> Path:
    """A checkpoint of which rank 1 has not been written."""
    shutil.copytree(CASE, folder, ignore=shutil.ignore_patterns(RANKS[1]))
    return folder


def finish(folder: Path) -> None:
    shutil.copy(CASE / RANKS[1], folder)


class Watched:
    """A watch in a database, and a process that looks at it when it is told to."""

    def __init__(self, database, prefix, allowed=(), **fields):
        self.database = database
        self.store = WatchStore(database)
        self.jobs = JobStore(database)
        self.planned = []
        template = {"destination": str(prefix / "models" / "{name}"), "options": {}, "labels": {"by": "watch"}}
        fields = {"pattern": "global_step_*", "interval_s": QUICK_S, "template": template, "owner": "local", **fields}
        self.watch = self.store.create(NewWatch(name="w", prefix=str(prefix), **fields))
        self.tools = Tools(Looks(database, LONGEST_LOOK_S), Places.of(allowed, ()), self.check, threading.Event())
        self.watcher = Watcher(self.tools, 1.0)

    def check(self, source, options, _limit_s):
        self.planned.append(Path(source).name)
        plan_source(source, options)

    def look(self, times=1):
        for _ in range(times):
            eventually(self.watcher.look, "a look is due")

    def items(self):
        return {Path(item.source).name: item for item in self.store.items(self.watch.id, None, 100)}

    def made(self):
        return self.jobs.page(JobFilter(watch_id=self.watch.id), 100)


def test_a_checkpoint_that_is_being_written_waits_with_the_reason_and_becomes_one_job_when_it_is_whole(
    database, tmp_path
):
    watched = Watched(database, tmp_path)
    watched.look()
    assert watched.items() == {}
    assert watched.store.get(watched.watch.id).error is None

    folder = begin(tmp_path / "global_step_7")
    watched.look()
    assert watched.items()["global_step_7"].error["type"] == "settling"
    assert watched.planned == []
    watched.look()
    waiting = watched.items()["global_step_7"]
    assert (waiting.state, waiting.error["type"]) == ("waiting", "incomplete-checkpoint")
    assert RANKS[1] in waiting.error["message"] + waiting.error.get("file", "")

    finish(folder)
    watched.look()
    assert watched.items()["global_step_7"].error["message"] == "its files have changed since the last look"
    assert watched.made() == []
    watched.look()
    [job] = watched.made()
    item = watched.items()["global_step_7"]
    assert (item.state, item.job_id, item.job_state, item.error) == ("submitted", job.id, "queued", None)
    assert (job.source, job.destination) == (str(folder), str(tmp_path / "models" / "global_step_7"))
    assert (job.labels, job.owner, job.watch_id) == ({"by": "watch"}, "local", watched.watch.id)
    assert watched.store.get(watched.watch.id).counts == {"submitted": 1}


def test_what_became_a_job_is_never_one_again_whatever_becomes_of_its_folder(database, tmp_path):
    watched = Watched(database, tmp_path)
    folder = begin(tmp_path / "global_step_7")
    finish(folder)
    watched.look(2)
    [job] = watched.made()
    shutil.rmtree(folder)
    watched.look()
    begin(folder)
    watched.look(3)
    assert watched.made() == [job]
    assert watched.items()["global_step_7"].state == "submitted"


def test_a_broken_checkpoint_is_planned_once_and_waits_while_others_go_on(database, tmp_path):
    watched = Watched(database, tmp_path)
    begin(tmp_path / "global_step_7")
    finish(begin(tmp_path / "global_step_8"))
    watched.look(4)
    assert watched.planned == ["global_step_7", "global_step_8"]
    assert [job.source for job in watched.made()] == [str(tmp_path / "global_step_8")]
    assert watched.items()["global_step_7"].error["type"] == "incomplete-checkpoint"
    watched.store.look_now(watched.watch.id)
    watched.look()
    assert watched.planned.count("global_step_7") == 2


@pytest.mark.parametrize("case", ["error-truncated-pt", "error-missing-config-json", "error-malicious-pickle"])
def test_a_faulty_input_waits_with_its_error(database, tmp_path, case):
    watched = Watched(database, tmp_path)
    shutil.copytree(CASES / case / "input", tmp_path / "global_step_1")
    watched.look(3)
    item = watched.items()["global_step_1"]
    assert item.state == "waiting"
    assert item.error["type"] not in ("settling", "internal")
    assert item.error["hint"]
    assert watched.made() == []


def test_a_prefix_that_is_gone_is_told_and_looked_at_again(database, tmp_path):
    watched = Watched(database, tmp_path / "run")
    watched.look()
    assert "there is nothing at" in watched.store.get(watched.watch.id).error["message"]
    finish(begin(tmp_path / "run" / "global_step_1"))
    watched.look(2)
    assert watched.store.get(watched.watch.id).error is None
    assert len(watched.made()) == 1


def test_a_prefix_that_is_not_allowed_any_more_is_told(database, tmp_path):
    watched = Watched(database, tmp_path, allowed=("/elsewhere",))
    finish(begin(tmp_path / "global_step_1"))
    watched.look(2)
    assert watched.store.get(watched.watch.id).error["type"] == "source-not-allowed"
    assert watched.items() == {}


def test_a_folder_that_vanishes_while_it_waits_is_told_and_taken_up_when_it_comes_back(database, tmp_path):
    watched = Watched(database, tmp_path)
    folder = begin(tmp_path / "global_step_1")
    watched.look()
    shutil.rmtree(folder)
    watched.look()
    assert watched.items()["global_step_1"].error["type"] == "gone"
    finish(begin(folder))
    watched.look(2)
    assert len(watched.made()) == 1


def test_a_folder_that_cannot_be_listed_waits_with_the_reason(database, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise StorageError("the disk does not answer")

    watched = Watched(database, tmp_path)
    finish(begin(tmp_path / "global_step_1"))
    with monkeypatch.context() as broken:
        broken.setattr("workers.storage.local.LocalFolder.list", refuse)
        watched.look(2)
        assert watched.items()["global_step_1"].error["message"] == "the disk does not answer"
    watched.look(2)
    assert len(watched.made()) == 1


def test_a_destination_that_a_live_job_has_is_waited_for(database, tmp_path):
    watched = Watched(database, tmp_path)
    finish(begin(tmp_path / "global_step_1"))
    other = watched.jobs.create(NewJob("/in", str(tmp_path / "models" / "global_step_1"), {}, {}))
    watched.look(2)
    assert watched.items()["global_step_1"].error["type"] == "destination-busy"
    watched.jobs.cancel(other.id)
    watched.look()
    assert len(watched.made()) == 1


def test_what_a_template_cannot_name_is_refused_until_the_template_is_another(database, tmp_path):
    watched = Watched(database, tmp_path, pattern="*", template={"destination": str(tmp_path / "models" / "x-{step}")})
    for run in ("a", "b"):
        finish(begin(tmp_path / run))
    watched.look(2)
    items = watched.items().values()
    assert [(item.state, item.error["type"]) for item in items] == [("refused", "no-step")] * 2
    watched.store.change(watched.watch.id, {"template": {"destination": str(tmp_path / "models" / "{flat}")}})
    watched.look()
    assert {Path(job.destination).name for job in watched.made()} == {"a", "b"}


def test_a_second_checkpoint_with_the_destination_of_an_earlier_one_is_refused(database, tmp_path):
    watched = Watched(
        database, tmp_path, pattern="run-*/global_step_*", template={"destination": str(tmp_path / "m" / "{step}")}
    )
    finish(begin(tmp_path / "run-a" / "global_step_1"))
    watched.look(2)
    [job] = watched.made()
    watched.jobs.cancel(job.id)
    finish(begin(tmp_path / "run-b" / "global_step_1"))
    watched.look(2)
    second = watched.store.items(watched.watch.id, None, 10)[1]
    assert (second.state, second.error["type"]) == ("refused", "duplicate-destination")
    assert job.id in second.error["message"]
    assert len(watched.made()) == 1


def test_a_look_that_dies_between_the_mark_and_the_job_leaves_neither(database, tmp_path, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    watched = Watched(database, tmp_path)
    finish(begin(tmp_path / "global_step_1"))
    watched.look()
    with monkeypatch.context() as dying:
        dying.setattr(looks_module, "insert_jobs", die)
        with pytest.raises(KeyboardInterrupt):
            watched.look()
    assert watched.items()["global_step_1"].state == "waiting"
    assert watched.made() == []
    # Whoever dies in a look leaves it claimed for as long as a look may take.
    assert not watched.watcher.look()
    with database.write() as connection:
        connection.execute(update(watches).values(next_look_at=now() - timedelta(seconds=1)))
    watched.look()
    assert len(watched.made()) == 1


def test_of_several_processes_one_makes_the_job(database, tmp_path):
    watched = Watched(database, tmp_path)
    for number in range(6):
        finish(begin(tmp_path / f"global_step_{number}"))
    watched.look()
    # As if each of four had claimed the look: that two may overlap is what the marks are for.
    turn = watched.tools.looks.claim() or eventually(watched.tools.looks.claim, "a look is due")
    listings = {source: seen.listing for source, seen in watched.tools.looks.seen(turn).items()}

    def submit_all(_):
        done = []
        for source, listing in listings.items():
            job = NewJob(source, f"/models/{Path(source).name}", {}, {}, owner="local", watch_id=watched.watch.id)
            done.append(watched.tools.looks.submit(turn, source, listing, job))
        return [job_id for job_id in done if job_id is not None]

    with ThreadPoolExecutor(4) as pool:
        made = [job_id for some in pool.map(submit_all, range(4)) for job_id in some]
    assert len(made) == len(set(made)) == 6
    assert {job.id for job in watched.made()} == set(made)


def test_one_look_is_one_process_s_turn(database, tmp_path):
    watched = Watched(database, tmp_path, interval_s=60.0)
    with ThreadPoolExecutor(4) as pool:
        turns = list(pool.map(lambda _: watched.tools.looks.claim(), range(8)))
    assert sum(turn is not None for turn in turns) == 1


@pytest.mark.parametrize("change", [{"state": "paused"}, {"name": "other"}, None])
def test_a_watch_that_was_paused_changed_or_deleted_meanwhile_makes_no_job(database, tmp_path, change):
    watched = Watched(database, tmp_path)
    turn = eventually(watched.tools.looks.claim, "a look is due")
    watched.tools.looks.note_listing(turn, "/in", "digest", {"kind": "input", "type": "settling"})
    if change is None:
        watched.store.delete(watched.watch.id)
    else:
        watched.store.change(watched.watch.id, change)
    job = NewJob("/in", "/out", {}, {}, owner="local", watch_id=watched.watch.id)
    with pytest.raises(LookOver):
        watched.tools.looks.submit(turn, "/in", "digest", job)
    assert watched.made() == []


def test_a_paused_watch_is_not_looked_at(database, tmp_path):
    watched = Watched(database, tmp_path)
    watched.store.change(watched.watch.id, {"state": "paused"})
    assert not watched.watcher.look()
    watched.store.change(watched.watch.id, {"state": "active"})
    watched.look()


def test_failed_jobs_show_in_the_items_and_are_not_made_again(database, tmp_path):
    watched = Watched(database, tmp_path)
    finish(begin(tmp_path / "global_step_1"))
    watched.look(2)
    [job] = watched.made()
    error = {"kind": "input", "type": "corrupt-file", "message": "broken", "hint": "copy it again"}
    with database.write() as connection:
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(state="failed", error=error))
    watched.look(2)
    item = watched.items()["global_step_1"]
    assert (item.state, item.job_state, item.error["message"]) == ("submitted", "failed", "broken")
    assert len(watched.made()) == 1


def test_the_watch_of_a_token_that_is_revoked_makes_no_job_and_says_so(database, tmp_path):
    give_token(database, "token_1", revoked_at=now())
    watched = Watched(database, tmp_path, owner="token_1")
    finish(begin(tmp_path / "global_step_1"))
    watched.look(2)
    assert "revoked" in watched.store.get(watched.watch.id).error["message"]
    assert watched.made() == []


def test_a_token_with_as_many_jobs_waiting_as_may_has_its_checkpoints_wait(database, tmp_path):
    give_token(database, "token_1", max_queued=1)
    watched = Watched(database, tmp_path, owner="token_1")
    for number in (1, 2):
        finish(begin(tmp_path / f"global_step_{number}"))
    watched.look(2)
    [job] = watched.made()
    assert watched.items()["global_step_2"].error["type"] == "too-many-queued"
    watched.jobs.cancel(job.id)
    watched.look()
    assert len(watched.made()) == 2


def give_token(database, token_id, **fields):
    with database.write() as connection:
        connection.execute(
            insert(tokens).values(
                id=token_id, name="t", digest=token_id, scopes=[], created_by="admin", created_at=now(), **fields
            )
        )


def test_pages_of_what_was_seen_lose_nothing_while_folders_become_jobs(database, tmp_path):
    for number in range(6):
        begin(tmp_path / f"global_step_{number}")
    watched = Watched(database, tmp_path)
    watched.look()
    waiting = {Path(item.source).name for item in watched.store.items(watched.watch.id, None, 100, ["waiting"])}
    assert len(waiting) == 6
    first = watched.store.items(watched.watch.id, None, 3, ["waiting"])
    with database.write() as connection:  # between the pages, those of the first one become jobs
        mine = watch_items.c.source.in_([item.source for item in first])
        connection.execute(update(watch_items).where(mine).values(state="submitted"))
    rest = watched.store.items(watched.watch.id, first[-1].id, 3, ["waiting"])
    assert {Path(item.source).name for item in (*first, *rest)} == waiting


def test_what_was_seen_before_there_were_ids_gets_them_in_its_order(url):
    database = Database(url)
    with database.write() as connection:
        command.upgrade(_alembic(connection), "0002")
    moment = now()
    times = {"created_at": moment, "updated_at": moment, "next_look_at": moment}
    watch = {"owner": "", "name": "", "prefix": "/in", "pattern": "*", "template": {}, "interval_s": 1.0, **times}
    names = [f"/in/{number}" for number in (3, 1, 2)]
    with database.write() as connection:
        connection.execute(insert(watches).values(id="watch_1", state="active", **watch))
        for number, source in enumerate(names):
            seen = {"first_seen_at": moment + timedelta(seconds=number), "updated_at": moment, "state": "waiting"}
            old = table(
                "watch_items", *(column(one.name, one.type) for one in watch_items.columns if one.name != "id")
            )
            connection.execute(insert(old).values(watch_id="watch_1", source=source, **seen))
    database.migrate()
    items = WatchStore(database).items("watch_1", None, 10)
    assert [item.source for item in items] == names
    assert len({item.id for item in items}) == 3
    database.close()


def test_a_storage_that_hangs_holds_up_its_own_watch_alone_and_says_so(database, tmp_path, monkeypatch):
    monkeypatch.setattr(watcher_module, "LONGEST_LOOK_S", 0.3)
    answer, asked, real = threading.Event(), [], LocalFolder.list

    def hang(folder, *given, **how):
        if "hung" in folder.address.url:
            asked.append(folder.address.url)
            answer.wait(30)
        return real(folder, *given, **how)

    monkeypatch.setattr(LocalFolder, "list", hang)
    begin(tmp_path / "hung" / "global_step_1")
    shutil.copytree(CASE, tmp_path / "well" / "global_step_1")
    hung = Watched(database, tmp_path / "hung")
    well = WatchStore(database).create(NewWatch(**{**fields_of(hung.watch), "prefix": str(tmp_path / "well")}))
    hung.look(times=6)
    error = hung.store.get(hung.watch.id).error
    assert "does not answer" in error["message"]
    assert error["hint"]
    assert len(asked) == 1, "it is not asked again while the question hangs"
    assert [job.watch_id for job in hung.jobs.page(JobFilter(), 10)] == [well.id]
    answer.set()

    def answered():
        hung.watcher.look()
        return hung.store.get(hung.watch.id).error is None

    eventually(answered, "the watch goes on")


def fields_of(watch):
    return {name: getattr(watch, name) for name in NewWatch.__dataclass_fields__}
