"""The real checkpoints of ``tests/cases/torchtune``: torchtune's, Meta's and PEFT's, as models and as adapters."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tests.formats.cases import Area, assert_tensors
from workers.convert import convert
from workers.errors import (
    AmbiguousSource,
    CorruptFile,
    GeometryMismatch,
    IncompleteCheckpoint,
    InvalidOption,
    UnmappedTensor,
    UnsafePickle,
)
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

ERRORS = {
    "adapter-base-missing": IncompleteCheckpoint,
    "broken-dcp-piece-missing": IncompleteCheckpoint,
    "broken-evil-pickle": UnsafePickle,
    "broken-meta-no-params": IncompleteCheckpoint,
    "broken-meta-shard-missing": IncompleteCheckpoint,
    "broken-missing-tensor": IncompleteCheckpoint,
    "broken-mixed-names": GeometryMismatch,
    "broken-no-config": IncompleteCheckpoint,
    "broken-shard-missing": IncompleteCheckpoint,
    "broken-truncated-bin": CorruptFile,
    "broken-unknown-key": UnmappedTensor,
    "broken-wrong-heads": GeometryMismatch,
}
AREA = Area("torchtune")
GOOD, REFUSED = AREA.split()
ADAPTERS = [name for name in AREA.names if AREA.described(name)["target_format"] == "peft"]


@pytest.mark.parametrize("name", GOOD)
def test_a_case_gives_exactly_the_expected_tensors_config_and_files(name):
    _, _, mapped = AREA.assert_converted(name)
    expected = AREA.expected(name)
    config = json.loads(dict(mapped.files)["config.json"])
    rope = config | (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    for key, value in expected.get("rope", {}).items():
        assert rope.get(key, "default") == value, key


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_case_is_refused_in_the_right_words(name):
    assert type(AREA.assert_refused(name)) is ERRORS[name]


@pytest.mark.parametrize("name", [name for name in ADAPTERS if not name.endswith("refused")])
def test_an_adapter_is_kept_as_peft_has_it(name):
    _, evaluator, mapped = AREA.converted(name)
    expected = AREA.expected(name)["adapter"]
    assert_tensors(mapped.targets, expected["tensors"], evaluator)
    settings = json.loads(dict(mapped.files)["adapter_config.json"])
    wanted = dict(expected["config"])
    assert set(settings["target_modules"]) == set(wanted.pop("target_modules_as_set"))
    assert {key: settings[key] for key in wanted} == wanted


def test_an_adapter_of_parts_that_the_hub_fuses_is_refused():
    assert type(AREA.assert_refused("adapter-phi3-to-peft-refused")) is UnmappedTensor


def test_every_case_is_tested():
    assert sorted(ERRORS) == REFUSED
    assert len(GOOD) + len(REFUSED) + len(ADAPTERS) == len(AREA.names) == 47


@pytest.mark.parametrize("name", ["hf-head-step-dirs", "dcp-async-full-head", "llama2-tune-legacy-021"])
def test_the_newest_epoch_or_step_is_taken_and_said(name):
    checkpoint, _, mapped = AREA.converted(name)
    chosen = AREA.expected(name).get("chosen", "")
    assert checkpoint.address.url.endswith(chosen)
    assert mapped.targets


def test_an_epoch_that_is_still_written_yields_to_the_one_before(tmp_path):
    for epoch in range(3):
        for number in range(1, 3 if epoch < 2 else 2):
            folder = tmp_path / f"epoch_{epoch}"
            folder.mkdir(exist_ok=True)
            save_file({f"{number}.weight": torch.ones(2)}, folder / f"model-0000{number}-of-00002.safetensors")
    found = open_checkpoint(open_folder(str(tmp_path)), ConvertOptions(family="none"))
    assert found.address.url.endswith("epoch_1")
    assert any("epoch_2/ is newer, but not complete" in note for note in found.notes)
    with pytest.raises(IncompleteCheckpoint, match="model-00002-of-00002"):
        open_checkpoint(open_folder(str(tmp_path)), ConvertOptions(family="none", epoch=2))


def test_safetensors_of_epochs_in_one_folder_are_torchtunes(tmp_path):
    for number in (1, 2):
        for epoch in (0, 1):
            tensors = {f"{number}.weight": torch.full((2,), float(epoch))}
            save_file(tensors, tmp_path / f"model-0000{number}-of-00002_{epoch}.safetensors")
    found = open_checkpoint(open_folder(str(tmp_path)), ConvertOptions(family="none"))
    assert (found.format, sorted(found.index)) == ("torchtune", ["1.weight", "2.weight"])
    assert [file.path for file in found.files] == [f"model-0000{number}-of-00002_1.safetensors" for number in (1, 2)]


@pytest.mark.parametrize("other", ["meta_model_1.pt", "hf_model_0001_1.pt", "model-00001-of-00001_1.safetensors"])
def test_two_models_of_an_epoch_are_a_choice(tmp_path, other):
    for name in ("torchtune_model_0.pt", "torchtune_model_1.pt"):
        torch.save({"norm.scale": torch.ones(2)}, tmp_path / name)
    (tmp_path / other).write_bytes(b"")
    with pytest.raises(AmbiguousSource, match=f"epoch 1: .*{re.escape(other)}"):
        open_checkpoint(open_folder(str(tmp_path)), ConvertOptions(family="none"))
    found = open_checkpoint(open_folder(str(tmp_path)), ConvertOptions(family="none", epoch=0))
    assert found.files[0].path == "torchtune_model_0.pt"


def test_an_older_step_can_be_asked_for():
    folder = open_folder(str(AREA.folder / "hf-head-step-dirs/input"))
    assert open_checkpoint(folder, ConvertOptions(step=95)).address.url.endswith("step_95")
    with pytest.raises(IncompleteCheckpoint, match="no complete step_5; there are: 95, 100"):
        open_checkpoint(folder, ConvertOptions(step=5))


def test_norms_that_differ_a_little_are_taken_from_the_first_file_with_a_warning(tmp_path):
    name = "meta-llama3-norms-slightly-differ"
    source = str(AREA.folder / name / "input")
    result = convert(source, str(tmp_path / "out"), AREA.options(name))
    (warning,) = result.warnings
    assert "norm.weight" in warning
    assert "consolidated.00.pth are taken" in warning


def test_ranks_of_bytes_become_a_tokenizer(tmp_path):
    name = "meta-llama3-1file"
    convert(str(AREA.folder / name / "input"), str(tmp_path / "out"), AREA.options(name))
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    for text, ids in AREA.expected(name)["tokenizer"]["encode"].items():
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids) == text
    assert not (tmp_path / "out/tokenizer.model").exists()


def test_a_sentencepiece_model_is_copied_with_a_config_that_names_its_class():
    _, _, mapped = AREA.converted("meta-llama2-tp2-fp16")
    assert [side.target_path for side in mapped.side_files] == ["tokenizer.model"]
    assert json.loads(dict(mapped.files)["tokenizer_config.json"])["tokenizer_class"] == "LlamaTokenizer"


def test_an_adapter_without_alpha_is_refused():
    folder = open_folder(str(AREA.folder / "adapter-llama3-all-to-peft/input/epoch_0"))
    options = ConvertOptions()
    checkpoint = open_checkpoint(folder, options)
    assert checkpoint.adapter is not None
    with pytest.raises(InvalidOption, match="lora_alpha is not known"):
        convert(folder.address.url, "/nonexistent/out", options)
