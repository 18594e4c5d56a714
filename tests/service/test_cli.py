"""The command line: statuses, messages, JSON, options, interruption."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from service.cli import converting, inspecting
from service.cli.interrupt import StopSignals
from service.cli.options import gather
from service.cli.output import clean, duration, say_table, size
from service.cli.problems import lines
from tests.service.command import CASES, QWEN, ROOT, finish, start, unshard
from workers import events
from workers.errors import Cancelled, CorruptFile, InvalidOption
from workers.options import ConvertOptions


def test_a_conversion_ends_with_what_was_made_and_where(tmp_path, capsys):
    done = unshard(capsys, "convert", QWEN, tmp_path / "model")
    assert done.status == 0
    assert done.err == ""
    assert f"Converted {QWEN}\n     into {tmp_path / 'model'}\n" in done.out
    assert "51 tensors" in done.out
    assert "1 file\n" in done.out
    assert "/s\n" in done.out
    assert (tmp_path / "model" / "unshard.json").exists()


def test_the_summary_tells_which_step_was_chosen(tmp_path, capsys):
    done = unshard(capsys, "convert", CASES / "run-folder-latest-step" / "input", tmp_path / "model")
    assert "step 12, as latest_checkpointed_iteration.txt says" in done.out


def test_the_summary_tells_what_was_dropped_on_purpose(tmp_path, capsys):
    done = unshard(capsys, "convert", CASES / "gemma3-text-tied-bf16-fsdp2-ws3" / "input", tmp_path / "model")
    assert done.status == 0
    assert "  dropped  lm_head.weight: " in done.out


def test_json_of_a_conversion_is_one_document(tmp_path, capsys):
    done = unshard(capsys, "convert", QWEN, tmp_path / "model", "--json")
    told = json.loads(done.out)
    assert told["location"] == str(tmp_path / "model")
    assert told["plan"]["tensors"] == 51
    assert told["warnings"] == []


def test_flags_and_assignments_reach_the_plan(tmp_path, capsys):
    flags = ["--dtype", "bfloat16", "--max-shard-size", "100KB", "-o", "memory=512MiB"]
    done = unshard(capsys, "plan", QWEN, tmp_path / "model", *flags, "--json")
    told = json.loads(done.out)
    assert told["options"] == {"dtype": "bfloat16", "max_shard_size": "100KB", "memory": "512MiB"}
    assert len(told["files"]) > 1
    assert not (tmp_path / "model").exists()


def test_a_plan_shows_files_and_every_tensor_on_request(tmp_path, capsys):
    brief = unshard(capsys, "plan", QWEN, tmp_path / "model")
    full = unshard(capsys, "plan", QWEN, tmp_path / "model", "--tensors")
    assert "model.safetensors" in brief.out
    assert "lm_head.weight" not in brief.out
    assert "lm_head.weight" in full.out
    assert full.out.startswith(brief.out)


def test_a_plan_of_what_is_there_already_says_so_as_the_conversion_does(tmp_path, capsys):
    model = tmp_path / "model"
    assert not json.loads(unshard(capsys, "plan", QWEN, model, "--json").out)["already_there"]
    assert unshard(capsys, "convert", QWEN, model).status == 0
    again = unshard(capsys, "plan", QWEN, model)
    assert (again.status, again.out.splitlines()[-1]) == (
        0,
        f"{model} holds this very model already: nothing would be done",
    )
    assert json.loads(unshard(capsys, "plan", QWEN, model, "--json").out)["already_there"]
    other = unshard(capsys, "plan", QWEN, model, "--dtype", "bfloat16")
    assert other.status == 3
    assert "is not empty" in other.err


def test_the_ray_engine_is_loaded_only_on_request(tmp_path):
    code = (
        "import sys; from service.cli.run import run; "
        f"status = run(['convert', {str(QWEN)!r}, {str(tmp_path / 'model')!r}]); "
        "print(status, sorted({'torch', 'ray', 'fastapi', 'sqlalchemy', 'rich', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_inspect_gives_a_readable_account(capsys):
    done = unshard(capsys, "inspect", QWEN)
    assert done.status == 0
    assert "is a verl-fsdp checkpoint" in done.out
    assert "Qwen3MoeForCausalLM" in done.out
    assert "model_world_size_2_rank_1.pt" in done.out


def test_inspect_shows_where_the_pieces_of_a_tensor_lie(capsys):
    done = unshard(capsys, "inspect", QWEN, "--tensor", "model.embed_tokens.weight")
    assert "model.embed_tokens.weight: F32 [132, 40]" in done.out
    assert "[66:132, 0:40]" in done.out


def test_a_finished_model_verifies_and_a_changed_one_does_not(tmp_path, capsys):
    model = tmp_path / "model"
    unshard(capsys, "convert", QWEN, model)
    sound = unshard(capsys, "verify", model)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    damaged = unshard(capsys, "verify", model)
    assert (sound.status, damaged.status) == (0, 1)
    assert "is sound" in sound.out
    assert "model.safetensors is damaged" in damaged.out
    assert json.loads(unshard(capsys, "verify", model, "--json").out)["equal"] is False


def test_two_equal_sources_compare_equal_and_two_others_name_the_difference(capsys):
    equal = unshard(capsys, "verify", QWEN, QWEN)
    other = unshard(capsys, "verify", QWEN, CASES / "llama-fsdp2-ws1" / "input")
    assert (equal.status, other.status) == (0, 1)
    assert "are equal" in equal.out
    assert "every bit" in equal.out
    assert "the second model lacks" in other.out


def test_a_result_compares_with_its_source_and_with_a_result_of_another_precision(tmp_path, capsys):
    unshard(capsys, "convert", QWEN, tmp_path / "full")
    unshard(capsys, "convert", tmp_path / "full", tmp_path / "half", "--dtype", "bfloat16")
    unshard(capsys, "convert", tmp_path / "half", tmp_path / "rounded", "--dtype", "float32")
    assert unshard(capsys, "verify", QWEN, tmp_path / "full").status == 0
    exact = unshard(capsys, "verify", tmp_path / "full", tmp_path / "rounded")
    close = unshard(capsys, "verify", tmp_path / "full", tmp_path / "rounded", "--atol", "0.01")
    assert (exact.status, close.status) == (1, 0)
    assert "elements differ, by up to" in exact.out
    assert "values within 0.01" in close.out


def test_formats_are_listed(capsys):
    assert "verl-fsdp" in unshard(capsys, "formats").out
    assert "verl-fsdp" in {known["name"] for known in json.loads(unshard(capsys, "formats", "--json").out)}


def test_the_version_is_shown(capsys):
    done = unshard(capsys, "--version")
    assert done.status == 0
    assert done.out.startswith("unshard ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "a"],
        ["nonsense"],
        ["convert", "a", "b", "--engine", "x"],
        ["verify", "a", "b", "--atol", "nan"],
        ["verify", "a", "--forward"],
        ["jobs", "--cancel"],
    ],
)
def test_wrong_usage_exits_with_two_and_a_way_to_the_help(arguments, capsys):
    done = unshard(capsys, *arguments)
    assert done.status == 2
    assert done.err.startswith("error: ")
    assert "--help shows the usage" in done.err
    told = json.loads(unshard(capsys, *arguments, "--json").out)
    assert told["error"]["code"] == "usage"


def test_a_call_without_a_command_shows_the_help(capsys):
    done = unshard(capsys)
    assert done.status == 2
    assert done.err.startswith("Usage: ")
    assert "Commands:" in done.err


def test_an_unknown_option_names_the_one_that_is_near_or_all(tmp_path, capsys):
    done = unshard(capsys, "convert", QWEN, tmp_path / "model", "-o", "dtpye=bfloat16")
    assert done.status == 1
    assert done.err == "error: there is no option 'dtpye'\nhint: Perhaps dtype is meant.\n"
    done = unshard(capsys, "convert", QWEN, tmp_path / "model", "-o", "xyz=1")
    assert "hint: The options are: base, config_dir, " in done.err


@pytest.mark.parametrize("option", ["memory", "max_shard_size"])
def test_a_size_that_is_none_names_its_option(tmp_path, capsys, option):
    done = unshard(capsys, "convert", QWEN, tmp_path / "model", "-o", f"{option}=-5")
    assert f"error: option {option}: '-5' is not a size\n" in done.err


@pytest.mark.parametrize("assignment", ["dtype", "dtype=int3", "step=first", "memory=1MB", "max_shard_size=much"])
def test_an_impossible_option_value_is_refused(assignment, tmp_path, capsys):
    done = unshard(capsys, "convert", QWEN, tmp_path / "model", "-o", assignment)
    assert done.status == 1
    assert "error: " in done.err


def test_assignments_are_json_or_plain_words():
    options = gather({"source": "s", "overwrite": False, "dtype": None}, ["dtype=float16", "step=3", "overwrite=true"])
    assert options == ConvertOptions(dtype="float16", step=3, overwrite=True)


@pytest.mark.parametrize(
    ("flags", "assignments"),
    [({"ignore": ("a", "re:b")}, []), ({"ignore": ()}, ['ignore=["a", "re:b"]']), ({"ignore": ()}, ["ignore=a"])],
)
def test_a_list_comes_from_a_repeated_flag_from_json_or_from_one_word(flags, assignments):
    options = gather({"quantization": "int8-w8a8", **flags}, assignments)
    wanted = ("a",) if assignments == ["ignore=a"] else ("a", "re:b")
    assert options == ConvertOptions(quantization="int8-w8a8", ignore=wanted)
    assert ConvertOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options


@pytest.mark.parametrize("value", ["3", "[1]", "null", '{"a": 1}', '["a", null]'])
def test_a_list_of_something_else_than_texts_is_refused(value):
    with pytest.raises(InvalidOption, match="a list of texts"):
        gather({"quantization": "int8-w8a8"}, [f"ignore={value}"])


def test_an_option_given_twice_must_agree_with_itself():
    assert gather({"dtype": "float16"}, ["dtype=float16"]).dtype == "float16"
    with pytest.raises(InvalidOption, match="given twice"):
        gather({"dtype": "float16"}, ["dtype=bfloat16"])


def test_a_destination_with_something_in_it_exits_with_three(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    done = unshard(capsys, "convert", QWEN, tmp_path)
    assert done.status == 3
    assert "notes.txt" in done.err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_details_that_the_message_has_are_not_said_again():
    error = CorruptFile("a.pt is cut", file="a.pt", tensor="w", expected="2 bytes", found="1 byte", hint="Copy it.")
    assert lines(error) == ["error: a.pt is cut", "tensor: w", "expected: 2 bytes", "found: 1 byte", "hint: Copy it."]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(28, "No space left on device", "/full/disk"), 3, "error: /full/disk: no space left on device"),
        (MemoryError(), 3, "error: there is not enough memory"),
        (Cancelled("stopped"), 130, "interrupted; run the same command again to resume"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command again to resume"),
    ],
)
def test_what_the_system_refuses_is_told_in_plain_words(error, status, words, monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "inspect", raiser(error))
    done = unshard(capsys, "inspect", QWEN)
    assert done.status == status
    assert done.err.splitlines()[0] == words


def test_a_fault_of_our_own_exits_with_seventy_and_tells_how_to_see_more(monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "inspect", raiser(ZeroDivisionError("oops")))
    quiet = unshard(capsys, "inspect", QWEN)
    told = json.loads(unshard(capsys, "inspect", QWEN, "--json").out)
    monkeypatch.setenv("UNSHARD_DEBUG", "1")
    loud = unshard(capsys, "inspect", QWEN)
    assert quiet.status == loud.status == 70
    assert "a fault of unshard itself: ZeroDivisionError: oops" in quiet.err
    assert "UNSHARD_DEBUG=1" in quiet.err
    assert "Traceback" not in quiet.err
    assert "Traceback" in loud.err
    assert told["error"]["code"] == "internal"


def raiser(error):
    def fail(*_args, **_kwargs):
        raise error

    return fail


def test_a_stop_signal_during_the_work_is_passed_on_and_the_run_resumes(tmp_path, capsys, monkeypatch):
    real = converting.convert

    def stopped(*args, **kwargs):
        watch = kwargs["observer"]

        def observer(event):
            watch(event)
            if isinstance(event, events.Started):
                signal.raise_signal(signal.SIGTERM)

        return real(*args, **{**kwargs, "observer": observer})

    monkeypatch.setattr(converting, "convert", stopped)
    done = unshard(capsys, "convert", QWEN, tmp_path / "model")
    assert (done.status, done.err) == (130, "interrupted; run the same command again to resume\n")
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(converting, "convert", real)
    assert unshard(capsys, "convert", QWEN, tmp_path / "model").status == 0


def test_before_anything_is_written_a_stop_signal_stops_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), StopSignals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_stop_signal_ends_the_process():
    code = (
        "import signal; from service.cli.interrupt import StopSignals\n"
        "with StopSignals() as stop:\n"
        "    stop.defer(); signal.raise_signal(signal.SIGINT); assert stop.event.is_set()\n"
        "    print('still here', flush=True); signal.raise_signal(signal.SIGINT); print('too far')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "still here\n")


def test_a_stop_signal_reaches_a_conversion_on_ray(tmp_path):
    code = (
        "import signal, sys\n"
        "from service.cli import converting\n"
        "from service.cli.run import run\n"
        "real = converting.convert\n"
        "def stopped(*args, observer, **rest):\n"
        "    def watch(event):\n"
        "        observer(event)\n"
        "        if type(event).__name__ == 'Progress':\n"
        "            signal.raise_signal(signal.SIGTERM)\n"
        "    return real(*args, observer=watch, **rest)\n"
        "converting.convert = stopped\n"
        f"sys.exit(run(['convert', {str(QWEN)!r}, {str(tmp_path / 'model')!r}, '--engine', 'ray', '--workers', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; run the same command again to resume\n"
    assert not (tmp_path / "model").exists()


def test_a_closed_pipe_is_no_reason_for_a_traceback():
    read, write = os.pipe()
    os.close(read)
    done = finish(start("formats", stdout=write))
    os.close(write)
    assert done.err == ""
    assert done.status == 141


def test_a_finished_conversion_whose_report_is_lost_says_that_it_is_finished(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = finish(start("convert", QWEN, tmp_path / "model", stdout=full))
    assert done.status == 3
    assert done.err.startswith("error: the output could not be written: No space left on device\n")
    assert "What the command does is done" in done.err
    assert (tmp_path / "model" / "unshard.json").exists()


def test_whoever_wants_no_output_gets_none(tmp_path):
    command = f'"{sys.executable}" -m service.cli convert "{QWEN}" "{tmp_path}/model" >&- 2>&-'
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "model" / "unshard.json").exists()


def test_a_checkpoint_is_no_model_and_verify_says_what_it_is(capsys):
    done = unshard(capsys, "verify", QWEN)
    assert done.status == 1
    assert "hint: this is a checkpoint (verl-fsdp), not a model" in done.out


def on_a_terminal(*arguments, env):
    """Run the command with a terminal as stderr; its status and what the terminal was sent."""
    ours, theirs = pty.openpty()
    sent = []

    def drain():
        try:
            while chunk := os.read(ours, 4096):
                sent.append(chunk)
        except OSError:  # Linux reports the closed other end as an error
            pass

    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", **env},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    reader = threading.Thread(target=drain)
    reader.start()
    process.communicate(timeout=60)
    reader.join()
    os.close(ours)
    return process.returncode, b"".join(sent).decode()


def test_a_terminal_sees_a_progress_bar(tmp_path):
    status, sent = on_a_terminal("convert", QWEN, tmp_path / "model", env={})
    assert status == 0
    assert "converting" in sent or "checking" in sent
    assert "kB" in sent


def test_colours_stay_away_on_request(tmp_path):
    _, plain = on_a_terminal("convert", QWEN, tmp_path, "-o", "x=1", env={"NO_COLOR": "1"})
    _, coloured = on_a_terminal("convert", QWEN, tmp_path, "-o", "x=1", env={"NO_COLOR": ""})
    assert "\x1b" not in plain
    assert "\x1b[31merror:\x1b[0m there is no option" in coloured


def test_names_from_a_checkpoint_cannot_steer_the_terminal():
    assert clean("a\x1b[2Jb\r\nc\tä…") == "a\\x1b[2Jb\\x0d\nc\\x09ä…"


def test_sizes_and_times_read_well():
    assert [size(n) for n in (0, 999, 1000, 4_980_000_000, 2**40)] == ["0 B", "999 B", "1 kB", "4.98 GB", "1.1 TB"]
    assert [duration(s) for s in (0.42, 12, 200, 7322)] == ["0.42 s", "12 s", "3 min 20 s", "2 h 2 min"]


def test_a_table_without_rows_is_its_heads(capsys):
    say_table(("a", "b"), [])
    assert capsys.readouterr().out == "a  b\n"
