"""The bucket goes away while jobs run, at each of their stages: nothing is half visible, and nothing is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from service.settings import Settings
from tests.seaweed import S3Server
from tests.service.conftest import Service, running
from tests.service.outage import Line
from tests.service.serving import kept_files_of
from tests.service.staged import STAGES, Staged, begin_all
from workers.manifest import MANIFEST_NAME
from workers.storage import open_folder
from workers.verify import verify_model

AWAY_S = 10.0
HASTY = """
[profiles.hasty]
scheme = "s3"
endpoint = "http://{address}"
allow_http = true
region = "us-east-1"
access_key_id_env = "AWS_ACCESS_KEY_ID"
secret_access_key_env = "AWS_SECRET_ACCESS_KEY"
retry_timeout_s = 1
max_retries = 2
"""
"""A profile that gives up soon, so that a job fails while its bucket is away."""


@pytest.fixture
def line(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """The only way to the store that jobs know of."""
    host, _, port = s3.endpoint.removeprefix("http://").partition(":")
    made = Line(host, int(port))
    for name, value in replace(s3, endpoint=f"http://{made.address}").environment().items():
        monkeypatch.setenv(name, value)
    yield made
    made.cut()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Settings(data_dir=tmp_path / "data", poll_s=0.05, max_concurrent_jobs=len(STAGES))


def check_models(folder: str) -> None:
    """Each place holds a whole model and nothing else."""
    for stage in STAGES:
        place = open_folder(f"{folder}/{stage}")
        manifest = json.loads(place.read(MANIFEST_NAME))
        files = {entry["path"] for entry in (*manifest["weights"], *manifest["files"])}
        assert {entry.path for entry in place.list()} == files | {MANIFEST_NAME}
        assert not verify_model(f"{folder}/{stage}").problems


def test_a_bucket_that_is_away_for_ten_seconds_costs_no_job_an_attempt(
    line: Line, s3: S3Server, settings: Settings, tmp_path: Path
) -> None:
    folder = f"s3://{s3.bucket}/{tmp_path.name}"
    staged = Staged()
    with running(settings, staged) as service:
        ids = begin_all(service, staged, folder)
        line.cut()
        staged.go_on.set()
        threading.Event().wait(AWAY_S)
        line.mend()
        for stage, job_id in ids.items():
            job = service.client.wait(job_id, timeout_s=60)
            assert (job["state"], job["attempt"], job["error"]) == ("succeeded", 1, None), f"{stage}: {job}"
        assert sorted(staged.commits) == sorted(STAGES)
        check_models(folder)


def test_a_bucket_that_is_away_for_too_long_fails_jobs_whose_retry_keeps_what_was_finished(
    line: Line, s3: S3Server, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profiles.toml").write_text(HASTY.format(address=line.address))
    monkeypatch.setenv("UNSHARD_STORAGE_PROFILES", str(tmp_path / "profiles.toml"))
    folder = f"s3://{s3.bucket}/{tmp_path.name}"
    staged = Staged()
    with running(settings, staged) as service:
        ids = begin_all(service, staged, folder, {"destination_profile": "hasty"})
        line.cut()
        staged.go_on.set()
        failed = {stage: service.client.wait(job_id, timeout_s=60) for stage, job_id in ids.items()}
        line.mend()
        for stage, job in failed.items():
            assert job["state"] == "failed", stage
            assert (job["error"]["kind"], job["error"]["type"]) == ("destination", "storage"), stage
            assert job["error"]["hint"]
            assert not open_folder(f"{folder}/{stage}").stat(MANIFEST_NAME)
        retry_all(service, ids)
        check_models(folder)


def retry_all(service: Service, ids: dict[str, str]) -> None:
    for stage, job_id in ids.items():
        service.client.retry(job_id)
        job = service.client.wait(job_id, timeout_s=60)
        assert (job["state"], job["attempt"], job["error"]) == ("succeeded", 2, None), stage
        if stage in {"verifying", "commit"}:
            kept = kept_files_of(service.client.events(job_id))
            assert len(kept[-1]) == sum(file["path"].endswith(".safetensors") for file in job["result"]["files"])
