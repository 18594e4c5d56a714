"""The demo, for real, and the commands that talk to a running service."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest

from service.demo import CHECKPOINT, EXPECTED
from service.demo import _command as demo_command
from service.demo.process import ServiceProcess
from service.demo.proof import compare
from tests.service.command import CASES, QWEN, finish, start, unshard
from workers.convert import convert
from workers.errors import InsufficientResources, VerificationFailed
from workers.storage import FolderAddress


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service as ``unshard demo`` starts it."""
    with ServiceProcess.start(tmp_path_factory.mktemp("service")) as running:
        running.wait_until_ready()
        yield running


def test_the_shipped_checkpoint_is_a_real_one():
    for path in CHECKPOINT.rglob("*.*"):
        assert path.read_bytes() == (QWEN / path.relative_to(CHECKPOINT)).read_bytes()
    case = json.loads((QWEN.parent / "expected.json").read_text())
    assert json.loads(EXPECTED.read_text())["tensors"] == case["tensors"]


def test_the_proof_counts_what_it_read_and_names_a_difference(tmp_path):
    convert(str(CHECKPOINT), str(tmp_path / "model"))
    model = FolderAddress(str(tmp_path / "model"))
    assert compare(model, EXPECTED) == (51, 200928)
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x00")
    with pytest.raises(VerificationFailed, match="is not what it should be"):
        compare(model, EXPECTED)


def test_a_service_that_cannot_start_shows_the_end_of_its_log(tmp_path):
    data = tmp_path / "data"
    (data / "unshard.db").mkdir(parents=True)  # where its database should be
    with ServiceProcess.start(data) as failing, pytest.raises(InsufficientResources, match=r"serve\.log"):
        failing.wait_until_ready()


@pytest.mark.parametrize(
    ("called", "found", "said"),
    [
        ("/here/.venv/bin/unshard", None, ".venv/bin/unshard"),
        ("/here/.venv/bin/unshard", "/here/.venv/bin/unshard", "unshard"),
        ("/here/service/cli/__main__.py", None, "unshard"),
    ],
)
def test_the_demo_names_a_command_that_can_be_called_from_here(monkeypatch, called, found, said):
    monkeypatch.setattr("sys.argv", [called, "demo"])
    monkeypatch.setattr("shutil.which", lambda _: found)
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    assert demo_command() == said


def left_of(folder):
    """Processes that know the folder."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if str(folder) in " ".join(process.info["cmdline"] or [])]


def test_an_interrupted_demo_stops_what_it_started_and_the_next_one_proves_its_result(tmp_path):
    process = start("demo", "--folder", tmp_path)
    assert process.stdout is not None
    assert "unshard demo" in process.stdout.readline()
    while not [found for found in left_of(tmp_path) if found.pid != process.pid]:
        pass
    process.send_signal(signal.SIGINT)
    interrupted = finish(process)
    assert interrupted.status == 130
    assert "Traceback" not in interrupted.err
    assert left_of(tmp_path) == []

    done = finish(start("demo", "--folder", tmp_path))
    assert (done.status, done.err) == (0, "")
    assert "51 tensors" in done.out
    assert f"The model is in {tmp_path / 'models' / 'qwen3-moe-'}" in done.out
    assert f"unshard serve --data-dir {tmp_path}" in done.out
    assert left_of(tmp_path) == []


def test_a_submitted_job_is_followed_to_its_end(service, tmp_path, capsys):
    done = unshard(capsys, "submit", QWEN, tmp_path / "model", "--wait", "--server", service.url)
    assert (done.status, done.err) == (0, "")
    assert "is succeeded" in done.out
    assert compare(FolderAddress(str(tmp_path / "model")), EXPECTED)[0] == 51


def test_jobs_are_listed_shown_and_printed_as_json(service, tmp_path, capsys):
    submitted = unshard(capsys, "submit", QWEN, tmp_path / "model", "--wait", "--json", "--server", service.url)
    job = json.loads(submitted.out)
    listed = unshard(capsys, "jobs", "--server", service.url)
    shown = unshard(capsys, "jobs", job["id"], "--server", service.url)
    assert job["id"] in listed.out
    assert f"job {job['id']} is succeeded" in shown.out
    assert job["id"] in {j["id"] for j in json.loads(unshard(capsys, "jobs", "--json", "--server", service.url).out)}


def test_a_failed_job_tells_why_as_a_conversion_would(service, tmp_path, capsys):
    broken = CASES / "error-missing-rank-file" / "input"
    done = unshard(capsys, "submit", broken, tmp_path / "model", "--wait", "--server", service.url)
    assert done.status == 1
    assert done.err.startswith("error: ")
    assert "model_world_size_3_rank_1.pt" in done.err


def test_a_job_that_nobody_knows_is_a_plain_error(service, capsys):
    done = unshard(capsys, "jobs", "job_nonsense", "--server", service.url)
    assert done.status == 1
    assert done.err.startswith("error: ")
    assert "internal" not in done.err


def test_a_service_that_is_not_there_is_a_plain_error(capsys):
    done = unshard(capsys, "jobs", "--server", "http://127.0.0.1:9")
    assert done.status == 3
    assert done.err.startswith("error: ")
    assert "hint: " in done.err


def test_a_wrong_setting_is_named_without_its_value(monkeypatch, capsys):
    monkeypatch.setenv("UNSHARD_LEASE_S", "secret")
    done = unshard(capsys, "serve")
    assert done.status == 1
    assert "UNSHARD_LEASE_S" in done.err
    assert "secret" not in done.err
