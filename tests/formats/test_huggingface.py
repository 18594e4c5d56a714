"""Hugging Face folders as sources: single, sharded, and sharded wrongly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.formats.evaluator import CASES, Evaluator
from workers.errors import AmbiguousSource, CorruptFile, GeometryMismatch, IncompleteCheckpoint, UnknownFormat
from workers.families import map_checkpoint
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

INDEX = "model.safetensors.index.json"
ONE, TWO = (f"model-{number:05d}-of-00002.safetensors" for number in (1, 2))


def opened(folder, **options):
    return open_checkpoint(open_folder(str(folder)), ConvertOptions(**options))


def refused(folder, kind):
    with pytest.raises(kind) as caught:
        opened(folder)
    assert caught.value.hint
    return caught.value


def values(count, start=0.0):
    return np.arange(start, start + count, dtype=np.float32)


def sharded(folder, where=None):
    """Two files with a, b and c, and an index over them."""
    save_file({"a": values(3), "b": values(4, 10).reshape(2, 2)}, folder / ONE)
    save_file({"c": values(2, 20)}, folder / TWO)
    where = {"a": ONE, "b": ONE, "c": TWO} if where is None else where
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": where}))
    return folder


def test_a_single_file_is_read_with_config_and_side_files():
    checkpoint = opened(CASES / "back-llama-fsdp2-ws3" / "input")
    assert checkpoint.format == "hf"
    assert checkpoint.config["model_type"] == "llama"
    assert [file.target_path for file in checkpoint.side_files] == [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert len(checkpoint.tensors) == 12


def test_a_sharded_folder_is_read_through_its_index(tmp_path):
    checkpoint = opened(sharded(tmp_path))
    evaluator = Evaluator(checkpoint)
    found = {name: evaluator.whole(number).view(np.float32).tolist() for name, number in checkpoint.index.items()}
    assert found == {"a": [0, 1, 2], "b": [[10, 11], [12, 13]], "c": [20, 21]}
    assert checkpoint.missing == ("config.json (looked in the folder itself)",)


def test_a_file_of_the_index_that_is_missing_is_told(tmp_path):
    (sharded(tmp_path) / TWO).unlink()
    error = refused(tmp_path, IncompleteCheckpoint)
    assert TWO in error.message
    assert error.tensor == "c"


def test_a_tensor_that_is_not_where_the_index_says_is_told(tmp_path):
    error = refused(sharded(tmp_path, {"a": ONE, "b": ONE, "c": TWO, "d": TWO}), IncompleteCheckpoint)
    assert (error.tensor, error.file) == ("d", TWO)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "pickle.bin", "a\\b"])
def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    assert refused(sharded(tmp_path, {"a": ONE, "c": name}), CorruptFile).found == name


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": {"a": 1}}', "{"])
def test_an_index_without_a_weight_map_is_corrupt(tmp_path, content):
    (sharded(tmp_path) / INDEX).write_text(content)
    with pytest.raises(CorruptFile, match="index"):
        opened(tmp_path)


@pytest.mark.parametrize("there", [ONE, TWO])
def test_the_index_decides_between_copies_of_a_tensor_and_the_other_is_a_replica(tmp_path, there):
    sharded(tmp_path, {"a": there, "b": ONE, "c": TWO})
    save_file({"c": values(2, 20), "a": values(3, 70)}, tmp_path / TWO)
    checkpoint = opened(tmp_path)
    evaluator, number = Evaluator(checkpoint), checkpoint.index["a"]
    first = {ONE: 0, TWO: 70}
    assert evaluator.whole(number).view(np.float32)[0] == first.pop(there)
    assert evaluator.whole(number, replicas=True).view(np.float32)[0] == first.popitem()[1]
    assert "repeats 1 tensors" in checkpoint.notes[0]


def test_an_index_beside_a_whole_model_that_it_does_not_name_is_ambiguous(tmp_path):
    save_file({"a": values(3)}, sharded(tmp_path) / "model.safetensors")
    assert "model.safetensors" in refused(tmp_path, AmbiguousSource).message


def test_copies_that_no_index_decides_between_are_refused(tmp_path):
    (sharded(tmp_path) / INDEX).unlink()
    save_file({"a": values(3)}, tmp_path / TWO)
    error = refused(tmp_path, GeometryMismatch)
    assert (error.tensor, error.file) == ("a", TWO)


def test_tensors_that_the_index_does_not_list_are_read_and_said(tmp_path):
    checkpoint = opened(sharded(tmp_path, {"a": ONE, "c": TWO}))
    assert set(checkpoint.index) == {"a", "b", "c"}
    assert "does not list" in checkpoint.notes[0]


def test_numbered_files_without_an_index_must_be_complete(tmp_path):
    (sharded(tmp_path) / INDEX).unlink()
    assert set(opened(tmp_path).index) == {"a", "b", "c"}
    (tmp_path / ONE).unlink()
    assert refused(tmp_path, IncompleteCheckpoint).file == ONE


def test_a_single_file_of_another_name_is_the_model(tmp_path):
    save_file({"a": values(3)}, tmp_path / "weights.safetensors")
    assert set(opened(tmp_path).index) == {"a"}
    save_file({"a": values(3)}, tmp_path / "other.safetensors")
    assert "other.safetensors, weights.safetensors" in refused(tmp_path, AmbiguousSource).message


def test_the_usual_name_comes_before_others(tmp_path):
    save_file({"a": values(3)}, tmp_path / "model.safetensors")
    save_file({"tok": values(3)}, tmp_path / "consolidated.safetensors")
    assert set(opened(tmp_path).index) == {"a"}


def test_a_whole_model_beside_numbered_files_and_no_index_is_ambiguous(tmp_path):
    save_file({"a": values(3)}, tmp_path / "model.safetensors")
    save_file({"b": values(3)}, tmp_path / "model-00001-of-00001.safetensors")
    assert "model-00001-of-00001.safetensors" in refused(tmp_path, AmbiguousSource).message


@pytest.mark.parametrize("names", [(ONE, TWO), ("foo.safetensors",)])
def test_an_adapter_beside_a_model_without_an_index_is_not_taken_for_the_model(tmp_path, names):
    for number, name in enumerate(names):
        save_file({f"of_the_model_{number}": values(3)}, tmp_path / name)
    save_file({"base_model.model.a.lora_A.weight": values(3)}, tmp_path / "adapter_model.safetensors")
    checkpoint = opened(tmp_path)
    assert set(checkpoint.index) == {f"of_the_model_{number}" for number in range(len(names))}
    assert "adapter_model.safetensors beside the model is an adapter, and left out" in checkpoint.notes


def test_an_adapter_in_a_folder_beside_a_model_is_said_to_be_left_out(tmp_path):
    (tmp_path / "lora_adapter").mkdir()
    save_file({"a": values(3)}, tmp_path / "model.safetensors")
    assert opened(tmp_path).notes == ()
    save_file({"base_model.model.a.lora_A.weight": values(3)}, tmp_path / "lora_adapter" / "adapter_model.safetensors")
    assert opened(tmp_path).notes == (
        "lora_adapter/adapter_model.safetensors beside the model is an adapter, and left out",
    )


def test_an_adapter_alone_is_no_model(tmp_path):
    save_file({"base_model.model.a.lora_A.weight": values(3)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnknownFormat) as caught:
        opened(tmp_path, source_format="hf")
    assert "peft" in caught.value.hint


def test_empty_and_scalar_tensors_are_read(tmp_path):
    save_file(
        {"none": np.zeros((0, 3), np.float32), "one": np.full((), 3, np.float32)}, tmp_path / "model.safetensors"
    )
    checkpoint = opened(tmp_path)
    assert checkpoint.tensors[checkpoint.index["none"]].shape == (0, 3)
    assert Evaluator(checkpoint).whole(checkpoint.index["one"]).view(np.float32) == 3


def test_a_git_lfs_pointer_is_told(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    assert "LFS" in refused(tmp_path, CorruptFile).message


def test_names_and_tied_embeddings_of_the_hub_stay_as_they_are(tmp_path):
    tensors = {"lm_head.weight": values(4).reshape(2, 2), "model.embed_tokens.weight": values(4).reshape(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 2, "hidden_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = opened(tmp_path)
    mapped = map_checkpoint(checkpoint, ConvertOptions(), Evaluator(checkpoint))
    assert {target.name for target in mapped.targets} == set(tensors)
