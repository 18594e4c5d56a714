"""Comparing models by what they compute."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.convert import convert
from workers.errors import InvalidOption, VerificationFailed
from workers.forward import compare_logits
from workers.options import ConvertOptions

CASES = Path(__file__).parent / "cases" / "verl-fsdp"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("models") / "base"
    convert(str(CASES / "llama-gqa-fsdp2-ws2" / "input"), str(destination))
    return destination


def changed(model: Path, folder: Path, name: str, by: float) -> Path:
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    if by:
        tensors[name] += by
    else:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_same_checkpoint_in_other_shards_computes_the_same(model: Path, tmp_path: Path) -> None:
    source = str(CASES / "llama-gqa-fsdp2-ws2" / "input")
    convert(source, str(tmp_path / "sharded"), ConvertOptions(max_shard_size="50KB"))
    report = compare_logits(str(model), str(tmp_path / "sharded"))
    assert report.equal
    assert report.details["largest_difference"] == 0


def test_a_changed_weight_changes_the_logits(model: Path, tmp_path: Path) -> None:
    other = changed(model, tmp_path / "other", "model.norm.weight", 0.25)
    report = compare_logits(str(model), str(other))
    assert not report.equal
    assert "logits differ by up to" in report.problems[0]


def test_a_missing_weight_is_named_and_never_made_up(model: Path, tmp_path: Path) -> None:
    other = changed(model, tmp_path / "other", "model.norm.weight", 0)
    with pytest.raises(VerificationFailed, match=r"model\.norm\.weight"):
        compare_logits(str(model), str(other))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.skipif(bool(find_spec("compressed_tensors")), reason="the package that must be missing is installed")
def test_a_package_that_a_quantised_model_needs_is_named(model: Path, tmp_path: Path) -> None:
    convert(str(model), str(tmp_path / "int8"), ConvertOptions(quantization="int8-w8a8"))
    with pytest.raises(InvalidOption, match="compressed-tensors") as caught:
        compare_logits(str(model), str(tmp_path / "int8"))
    assert "--forward" in caught.value.hint
