"""``unshard batch``, ``batches``, ``watch`` and ``watches`` against a real service that really converts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import service.demo
from service.cli.asking import assigned, discovery, listed
from tests.service import command
from tests.service.conftest import eventually, running
from workers.convert import convert
from workers.errors import InvalidOption

CASES = Path(__file__).parents[1] / "cases"
CHECKPOINT = Path(service.demo.__file__).parent / "checkpoint"
TORCHTUNE = CASES / "torchtune" / "llama3-tune-061" / "input" / "epoch_1"
MEGATRON = CASES / "megatron" / "mlm-dist-llama-kv4-tp2-pp2" / "input"
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
STEPS = (10, 20, 30)


@pytest.fixture
def runs(tmp_path):
    """A run folder of verl with three steps."""
    for step in STEPS:
        shutil.copytree(CHECKPOINT, tmp_path / "run" / f"global_step_{step}" / "actor")
    return tmp_path / "run"


@pytest.fixture
def converting(settings):
    with running(settings.model_copy(update={"min_watch_interval_s": 0.1}), convert) as started:
        yield started


@pytest.fixture
def unshard(converting, monkeypatch, capsys):
    monkeypatch.setenv("UNSHARD_SERVER", converting.url)
    return partial(command.unshard, capsys)


def test_a_pattern_is_split_where_it_begins():
    assert discovery("/runs/*/global_step_*") == {"prefix": "/runs", "pattern": "*/global_step_*"}
    assert discovery("s3://bucket/a/iter_???") == {"prefix": "s3://bucket/a", "pattern": "iter_???"}
    assert discovery("global_step_[0-9]*/") == {"prefix": ".", "pattern": "global_step_[0-9]*"}
    assert discovery("/*") == {"prefix": "/", "pattern": "*"}
    with pytest.raises(InvalidOption, match="names one folder"):
        discovery("/runs/qwen")


def test_a_file_lists_items_as_words_or_as_json(tmp_path):
    file = tmp_path / "items"
    file.write_text('/a /b\n\n/with space\t/d\n{"source": "/e", "options": {"dtype": "bfloat16"}}\n/f\n')
    assert listed(str(file)) == [
        {"source": "/a", "destination": "/b"},
        {"source": "/with space", "destination": "/d"},
        {"source": "/e", "options": {"dtype": "bfloat16"}},
        {"source": "/f"},
    ]


def test_a_file_that_lists_nothing_or_is_none_is_told(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidOption, match="empty names no checkpoint"):
        listed(str(tmp_path / "empty"))
    with pytest.raises(InvalidOption, match=r"none cannot be read: No such file or directory$"):
        listed(str(tmp_path / "none"))


@pytest.mark.parametrize("line", ["{broken", "a b c"])
def test_a_line_that_is_no_item_is_named(tmp_path, line):
    file = tmp_path / "items"
    file.write_text(f"/a /b\n{line}\n")
    with pytest.raises(InvalidOption, match="line 2"):
        listed(str(file))


def test_labels_are_names_with_values():
    assert assigned(["run=42", "note=a=b"]) == {"run": "42", "note": "a=b"}
    with pytest.raises(InvalidOption, match="label run is given twice: '1' and '2'"):
        assigned(["run=1", "run=2"])
    with pytest.raises(InvalidOption, match="'run' is not NAME=VALUE"):
        assigned(["run"])


def test_three_checkpoints_become_models_with_one_command_and_are_skipped_by_the_next(unshard, runs, tmp_path):
    arguments = ("batch", f"{runs}/global_step_*", f"{tmp_path}/models/{{step}}", "--dtype", "bfloat16", "--wait")
    first = unshard(*arguments, "--label", "run=7", "--json")
    assert first.status == 0, first.err
    told = json.loads(first.out)
    assert (told["counts"]["succeeded"], told["counts"]["total"]) == (3, 3)
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"10", "20", "30"}
    again = unshard(*arguments)
    assert again.status == 0, again.err
    assert "3 skipped of 3" in again.out


def test_a_dry_run_hands_nothing_in(unshard, converting, runs, tmp_path):
    told = unshard("batch", f"{runs}/global_step_*", f"{tmp_path}/models/{{step}}", "--dry-run")
    assert told.status == 0
    assert "3 models to make, 0 there already, 0 refused" in told.out
    assert converting.client.jobs() == []


def test_a_batch_with_a_failure_says_which_and_is_no_success(unshard, runs, tmp_path):
    (runs / "global_step_20" / "actor" / "model_world_size_2_rank_1.pt").unlink()
    told = unshard("batch", f"{runs}/global_step_*", f"{tmp_path}/models/{{step}}", "--wait")
    assert told.status == 1
    assert "model_world_size_2_rank_1.pt is missing" in told.out
    batch = told.out.split()[1]
    shutil.copy(CHECKPOINT / "model_world_size_2_rank_1.pt", runs / "global_step_20" / "actor")
    assert unshard("batches", batch, "--retry").status == 0
    shown = eventually(lambda: "completed: 3 succeeded" in unshard("batches", batch).out, "all succeeded")
    assert shown


@pytest.mark.parametrize("way", ["submit", "batch", "file"])
def test_a_relative_config_folder_counts_from_where_the_command_runs(unshard, tmp_path, monkeypatch, way):
    shutil.copytree(CHECKPOINT, tmp_path / "here" / "checkpoint")
    (tmp_path / "here" / "checkpoint" / "huggingface").rename(tmp_path / "here" / "config")
    monkeypatch.chdir(tmp_path / "here")
    item = {"source": "checkpoint", "destination": "../model", "options": {"config_dir": "config"}}
    Path("items").write_text(json.dumps(item))
    arguments = {
        "submit": ("submit", "checkpoint", "../model", "--config", "config"),
        "batch": ("batch", "check*", "../{name}-model", "-o", "config_dir=config"),
        "file": ("batch", "--file", "items"),
    }
    done = unshard(*arguments[way], "--wait")
    assert (done.status, done.err) == (0, "")
    assert list(tmp_path.glob("*model/config.json"))


def test_an_item_that_is_no_text_is_told_by_the_service(unshard, tmp_path):
    (tmp_path / "items").write_text('{"source": 3, "destination": "/models/a"}\n')
    done = unshard("batch", "--file", tmp_path / "items")
    assert done.status == 1
    assert "/items/0/source" in done.err


def test_what_can_not_be_done_is_told_where_it_stands(unshard, runs, tmp_path):
    step, model = runs / "global_step_10", tmp_path / "model"
    (tmp_path / "items").write_text(f"{step} {model}\n{step} {model}\n")
    done = unshard("batch", "--file", tmp_path / "items", "--stop-at-error")
    assert done.status == 1
    assert f"\n  - /items/1/destination: {model} is also the destination of item 0, {step}\n" in done.err


def test_a_batch_that_is_handed_in_says_how_to_see_what_was_refused(unshard, runs, tmp_path):
    shutil.copytree(runs, tmp_path / "other")
    done = unshard("batch", f"{tmp_path}/*/global_step_1*", tmp_path / "{step}")
    assert "1 queued, 1 refused of 2" in done.out
    assert done.out.endswith("shows how it goes, and what was refused\n")


def test_a_pattern_that_the_shell_has_taken_is_to_be_quoted(unshard, runs, tmp_path):
    done = unshard("batch", *runs.iterdir(), tmp_path / "{step}")
    assert done.status == 2
    assert "hint: Quote the pattern" in done.err


@pytest.mark.parametrize("token", ["with space", "line\n", "tök"])
def test_a_token_that_can_be_none_is_told(unshard, token):
    done = unshard("jobs", "--token", token)
    assert done.status == 1
    assert done.err.startswith("error: the token holds a space, ")


def test_a_watch_hands_in_what_appears(unshard, converting, runs, tmp_path):
    told = unshard("watch", f"{runs}/global_step_*", f"{tmp_path}/models/{{step}}", "--every", "1", "--name", "qwen")
    assert told.status == 0, told.err
    watch = told.out.split()[1]
    eventually(lambda: len(list(tmp_path.glob("models/*/unshard.json"))) == 3, "three models", within_s=30)
    assert "succeeded" in unshard("watches", watch).out
    assert "qwen" in unshard("watches").out
    assert unshard("watches", watch, "--pause").status == 0
    assert json.loads(unshard("watches", watch, "--json").out)["state"] == "paused"
    assert unshard("watches", watch, "--delete").status == 0
    assert "qwen" not in unshard("watches").out
    assert len(converting.client.jobs()) == 3


def test_flags_that_contradict_each_other_are_a_usage_error(unshard):
    assert unshard("batches", "batch_1", "--cancel", "--retry").status == 2
    assert unshard("watches", "--pause").status == 2
    assert unshard("batch", "/runs/*").status == 2


def test_a_job_is_waited_for_and_retried(unshard, runs, tmp_path):
    source, model = str(runs / "global_step_10"), str(tmp_path / "model")
    job = json.loads(unshard("submit", source, model, "--label", "a=b", "--priority", "3", "--json").out)
    assert (job["labels"], job["priority"]) == ({"a": "b"}, 3)
    waited = unshard("jobs", job["id"], "--wait")
    assert waited.status == 0, waited.err
    refused = unshard("jobs", job["id"], "--retry")
    assert refused.status == 1
    assert "succeeded" in refused.err


def example(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable] if name.endswith(".py") else ["sh"]
    command = [*program, str(EXAMPLES / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.system("curl")
@pytest.mark.parametrize("name", ["verl.sh", "verl.py"])
def test_the_examples_for_verl_work(unshard, converting, runs, tmp_path, name):  # noqa: ARG001 - unshard sets the address
    if name == "verl.sh":
        done = example(name, runs, tmp_path / "models")
        assert done.returncode == 0, done.stderr
        assert {path.name for path in (tmp_path / "models").iterdir()} == {f"step-{step}" for step in STEPS}
    else:
        step = runs / "global_step_20"
        done = example(name, step, tmp_path / "model")
        assert done.returncode == 0, done.stderr
        assert example(name, step, tmp_path / "model").stdout.split()[0] == done.stdout.split()[0]
        assert converting.client.wait(done.stdout.split()[0])["state"] == "succeeded"


@pytest.mark.usefixtures("unshard")
@pytest.mark.system("curl")
@pytest.mark.parametrize("name", ["torchtune.sh", "torchtune.py"])
def test_the_examples_for_torchtune_work(tmp_path, name):
    for epoch in (0, 1):
        shutil.copytree(TORCHTUNE, tmp_path / "run" / f"epoch_{epoch}")
    if name.endswith(".sh"):
        done = example(name, tmp_path / "run" / "epoch_1", tmp_path / "models" / "epoch_1", TORCHTUNE)
    else:
        done = example(name, tmp_path / "run", tmp_path / "models")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "models" / "epoch_1" / "unshard.json").exists()


@pytest.mark.usefixtures("unshard")
@pytest.mark.system("curl")
@pytest.mark.parametrize("name", ["megatron.sh", "megatron.py"])
def test_the_examples_for_megatron_work(converting, tmp_path, name):
    shutil.copytree(MEGATRON, tmp_path / "run")
    config = MEGATRON / "huggingface"
    done = example(name, tmp_path / "run", tmp_path / "models", config)
    assert done.returncode == 0, done.stderr + done.stdout
    if name.endswith(".py"):
        assert (tmp_path / "models" / "unshard.json").exists()
    else:
        assert example(name, tmp_path / "run", tmp_path / "models", config).stdout == done.stdout
        [watch] = converting.client.get("/v1/watches")["items"]
        assert watch["pattern"] == "iter_*"
