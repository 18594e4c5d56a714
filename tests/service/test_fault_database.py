"""The job store goes away while jobs run, at each of their stages: they go on when it is back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.settings import Settings
from tests.postgres import PostgresServer
from tests.service.conftest import Service, eventually, running
from tests.service.staged import STAGES, Staged, begin_all

pytestmark = pytest.mark.system("initdb")
AWAY_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.close()


@pytest.fixture
def settings(server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Settings(
        data_dir=tmp_path, database_url=server.new_database(), poll_s=0.05, max_concurrent_jobs=len(STAGES)
    )


def check_done_once(service: Service, staged: Staged, ids: dict[str, str], attempts: set[int]) -> None:
    for stage, job_id in ids.items():
        job = service.client.wait(job_id, timeout_s=60)
        assert (job["state"], job["error"]) == ("succeeded", None), stage
        assert job["attempt"] in attempts, stage
        manifest = json.loads((Path(job["destination"]) / "unshard.json").read_text())
        kinds = [event["type"] for event in service.client.events(job_id)]
        assert kinds.count("job.succeeded") == 1
        if attempts == {1}:
            # Nothing that happened meanwhile was forgotten.
            assert kinds.count("shard.completed") == len(manifest["weights"])
            assert [kind for kind in kinds if kind in {"job.planned", "job.running", "job.verifying"}] == [
                "job.planned",
                "job.running",
                "job.verifying",
            ]
    if attempts == {1}:
        assert sorted(staged.commits) == sorted(STAGES)
    folders = {Path(service.client.job(job_id)["destination"]).parent for job_id in ids.values()}
    assert {entry.name for folder in folders for entry in folder.iterdir()} == set(STAGES)


def test_a_database_that_is_away_for_ten_seconds_costs_no_job_an_attempt(
    server: PostgresServer, settings: Settings, tmp_path: Path
) -> None:
    staged = Staged()
    with running(settings, staged) as service:
        ids = begin_all(service, staged, str(tmp_path / "models"))
        server.stop("immediate")
        began = time.monotonic()
        try:
            staged.go_on.set()
            answer = service.http.get("/v1/jobs")
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/unavailable")
            assert int(answer.headers["Retry-After"]) > 0
            assert service.http.get("/healthz").status_code == 200
            assert service.http.get("/readyz").json()["parts"]["database"]["state"] == "failed"
            threading.Event().wait(AWAY_S - (time.monotonic() - began))
        finally:
            server.start()
        check_done_once(service, staged, ids, {1})
        assert service.client.ready()


def test_a_database_that_is_away_for_longer_than_a_lease_costs_an_attempt_and_no_job(
    server: PostgresServer, settings: Settings, tmp_path: Path
) -> None:
    staged = Staged()
    with running(settings.model_copy(update={"lease_s": 1.0}), staged) as service:
        ids = begin_all(service, staged, str(tmp_path / "models"))
        server.stop("immediate")
        try:
            staged.go_on.set()
            threading.Event().wait(4.0)
        finally:
            server.start()
        eventually(lambda: service.http.get("/v1/jobs").status_code == 200, "the service answers")
        check_done_once(service, staged, ids, {1, 2, 3})
