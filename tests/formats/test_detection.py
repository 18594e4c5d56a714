"""What is said of a folder: which format, by which evidence, or what was looked for in vain."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.formats.evaluator import CASES
from workers.errors import AmbiguousSource, InvalidOption, UnknownFormat
from workers.formats import Listing, detect, known_formats, open_checkpoint
from workers.formats._nearby import MOST_FOLDERS
from workers.options import ConvertOptions
from workers.storage import open_folder

RANK_FILE = "model_world_size_1_rank_0.pt"


def opened(path, **options):
    return open_checkpoint(open_folder(str(path)), ConvertOptions(**options))


def refusal(path, kind=UnknownFormat, **options):
    with pytest.raises(kind) as caught:
        opened(path, **options)
    assert caught.value.hint
    return caught.value


def test_every_format_is_found_and_described():
    found = {info.name: info for info in known_formats()}
    assert {"hf", "verl-fsdp"} <= set(found)
    assert all(info.title and info.signs for info in found.values())


def test_a_path_that_does_not_exist_is_said_to():
    assert "does not exist" in refusal("/no/such/folder").message


def test_a_file_instead_of_a_folder_is_said_to_be_one(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    error = refusal(tmp_path / "model.safetensors")
    assert "is a file, not a folder" in error.message
    assert error.hint.endswith(f": {tmp_path}.")


def test_an_empty_folder_is_said_to_be_empty(tmp_path):
    assert "is empty" in refusal(tmp_path).message


def test_a_store_without_objects_is_said_to_have_none():
    assert "does not exist" in refusal("memory://nothing/here").message


def test_what_is_not_recognised_is_told_with_what_lies_there_and_what_is_known(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("x")
    (tmp_path / "here" / "logs").mkdir()
    error = refusal(tmp_path / "here")
    assert error.message.endswith("logs/, notes.txt")
    assert "verl-fsdp" in error.expected
    assert "unshard formats" in error.hint


def test_the_folder_above_is_named_where_its_files_are_a_checkpoint():
    actor = CASES / "run-folder-latest-step" / "input" / "global_step_12" / "actor"
    error = refusal(actor / "huggingface")
    assert error.hint == f"Perhaps {actor} is meant, which holds a checkpoint of the format verl-fsdp."


def test_a_run_is_not_named_for_a_step_that_is_not_there_yet(tmp_path):
    for path in (tmp_path / "global_step_1" / RANK_FILE, tmp_path / "global_step_2" / "notes.txt"):
        path.parent.mkdir()
        path.write_bytes(b"x")
    assert "Perhaps" not in refusal(tmp_path / "global_step_2").hint


@pytest.mark.parametrize(("path", "named"), [("a", True), ("a/b", True), ("a/b/c", False)])
def test_a_checkpoint_up_to_two_levels_below_is_named(tmp_path, path, named):
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / path / "model.safetensors").write_bytes(b"x")
    assert (f"Perhaps {tmp_path / path} is meant" in refusal(tmp_path).hint) is named


def test_a_checkpoint_below_is_nearer_than_one_above(tmp_path):
    for place in ("run", "run/step/actor"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "model.safetensors").write_bytes(b"x")
    assert f"Perhaps {tmp_path}/run/step/actor is meant" in refusal(tmp_path / "run" / "step").hint


def test_several_checkpoints_below_are_a_choice(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    hint = refusal(tmp_path).hint
    assert f"{tmp_path}/a (hf), {tmp_path}/b (hf)" in hint


def test_only_so_many_folders_are_looked_into(tmp_path):
    for number in range(MOST_FOLDERS + 1):
        (tmp_path / f"{number:02d}").mkdir()
    (tmp_path / f"{MOST_FOLDERS:02d}" / "model.safetensors").write_bytes(b"x")
    assert "Perhaps" not in refusal(tmp_path).hint


def test_optimizer_state_alone_gets_a_hint_of_its_own(tmp_path):
    (tmp_path / "optim_world_size_1_rank_0.pt").write_bytes(b"x")
    assert "optimizer" in refusal(tmp_path).hint


def test_two_formats_in_one_folder_are_a_choice(tmp_path):
    (tmp_path / RANK_FILE).write_bytes(b"x")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    error = refusal(tmp_path, AmbiguousSource)
    assert error.found == "hf, verl-fsdp"
    assert "source_format" in error.hint


def test_the_option_settles_the_choice(tmp_path):
    source = CASES / "llama-fsdp1-ws1-plain-tensors" / "input"
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert opened(tmp_path, source_format="verl-fsdp").format == "verl-fsdp"


def test_an_unknown_format_name_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "x").write_text("x")
    assert "verl-fsdp" in refusal(tmp_path, InvalidOption, source_format="tar").hint
    assert refusal(tmp_path, InvalidOption, source_format="verl").hint == "Perhaps verl-fsdp is meant."


def test_a_format_asked_for_that_is_not_there_says_what_it_needs(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    assert "model_world_size_<W>_rank_<R>.pt" in refusal(tmp_path, source_format="verl-fsdp").message
    assert "no safetensors files" in refusal(tmp_path, source_format="hf").message


def test_detection_names_its_evidence():
    listing = Listing(open_folder(str(CASES / "run-folder-latest-step" / "input")))
    assert detect(listing)["verl-fsdp"].evidence == ("a run folder with step 12 and rank files in it",)


def test_a_folder_in_object_storage_is_recognised_alike():
    source = CASES / "two-steps-one-chosen" / "input"
    bucket = open_folder("memory://detection/run")
    for path in source.rglob("*.*"):
        bucket.write(str(path.relative_to(source)), path.read_bytes())
    checkpoint = open_checkpoint(bucket, ConvertOptions(step=3))
    local = opened(source, step=3)
    assert checkpoint.tensors == local.tensors
    assert checkpoint.pieces.start.tolist() == local.pieces.start.tolist()
    assert checkpoint.side_files == local.side_files


def test_detection_loads_neither_torch_nor_ray():
    code = (
        "import sys; from workers.formats import open_checkpoint; from workers.options import ConvertOptions;"
        "from workers.storage import open_folder; import workers.families;"
        f"open_checkpoint(open_folder({str(CASES / 'llama-fsdp2-hsdp-2x2' / 'input')!r}), ConvertOptions());"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
