"""The real checkpoints of ``tests/cases/megatron``, from the readers through the families to the expected bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.formats.cases import Area
from tests.formats.evaluator import Evaluator
from workers.convert import convert
from workers.errors import GeometryMismatch, IncompleteCheckpoint, UnmappedTensor, UnsafePickle
from workers.families import map_checkpoint
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

ERRORS = {
    "err-config-experts-mismatch": GeometryMismatch,
    "err-config-heads-dont-divide": GeometryMismatch,
    "err-config-unknown-family": UnmappedTensor,
    "err-config-vocab-too-big": GeometryMismatch,
    "err-dist-evil-metadata": UnsafePickle,
    "err-dist-no-metadata": IncompleteCheckpoint,
    "err-dist-truncated-distcp": IncompleteCheckpoint,
    "err-mlm-missing-tp-rank": IncompleteCheckpoint,
    "err-verl030-missing-one-rank": IncompleteCheckpoint,
}
AREA = Area("megatron")
GOOD, REFUSED = AREA.split()


@pytest.mark.parametrize("name", GOOD)
def test_a_case_gives_exactly_the_expected_tensors_config_and_files(name):
    checkpoint, _, _ = AREA.assert_converted(name)
    is_distributed = "torch_dist" in AREA.described(name)["source_format"]
    assert checkpoint.format == ("megatron-dist" if is_distributed else "megatron-legacy")


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_case_is_refused_in_the_right_words(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert type(AREA.assert_refused(name)) is ERRORS[name]
    assert not [path for place in (tmp_path, AREA.folder) for path in Path(place).rglob("UNSHARD_WAS_FOOLED")]


def test_every_broken_case_has_its_kind_of_error():
    assert sorted(ERRORS) == REFUSED


def mapped_with(name: str, folder: Path, changes: dict, **options):
    """Map a case with some keys of its config changed."""
    source = AREA.folder / name / "input"
    config = json.loads(next(source.rglob("config.json")).read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    asked = ConvertOptions(config_dir=str(folder), **options)
    checkpoint = open_checkpoint(open_folder(str(source)), asked)
    return map_checkpoint(checkpoint, asked, Evaluator(checkpoint))


@pytest.mark.parametrize(
    ("name", "changes", "options", "words"),
    [
        (
            "verl-qwen3-tied-pp2",
            {"tie_word_embeddings": False},
            {},
            ["tie_word_embeddings is false", "no output head"],
        ),
        ("verl-qwen2-tp2-padvocab", {"tie_word_embeddings": True}, {}, ["tie_word_embeddings is true", "differ"]),
        ("verl030-qwen2-tp2", {"tie_word_embeddings": True}, {}, ["tie_word_embeddings is true", "differ"]),
        ("verl-qwen2-tp2-padvocab", {}, {"value_model": True}, ["value_model", "250 rows"]),
        ("verl-qwen2-tp2-padvocab", {}, {"num_key_value_heads": 3}, ["3 key-value heads", "has 80"]),
        ("verl-qwen2-tp2-padvocab", {"num_hidden_layers": 5}, {}, ["num_hidden_layers is 5", "4 layers"]),
        ("verl-qwen2-tp2-padvocab", {"intermediate_size": 81}, {}, ["intermediate_size is 81", "80"]),
        ("mlm-torch-mixtral-ep2", {"num_local_experts": 5}, {}, ["num_local_experts is 5", "4 experts"]),
        ("verl030-llama-tp2-pp2", {"num_attention_heads": 4}, {}, ["qkv_proj", "4 query"]),
        ("mbridge-deepseek-v3-tp2-pp2", {"q_lora_rank": 24}, {}, ["q_lora_rank is 24", "28 rows"]),
        ("mbridge-deepseek-v3-tp2-pp2", {"q_lora_rank": None}, {}, ["q_lora_rank"]),
        ("mbridge-glm4-moe-mtp-pp2", {"num_hidden_layers": 4}, {}, ["num_hidden_layers is 4", "3 layers"]),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused_with_both_values(tmp_path, name, changes, options, words):
    with pytest.raises((GeometryMismatch, IncompleteCheckpoint)) as caught:
        mapped_with(name, tmp_path, changes, **options)
    said = f"{caught.value.message} {caught.value.hint}"
    assert all(word in said for word in words), said


def test_tensors_of_another_family_are_not_left_out_silently(tmp_path):
    with pytest.raises(UnmappedTensor, match=r"megatron_llama has no rule for .*mlp\.router"):
        mapped_with("verl-qwen3-moe-etp2", tmp_path, {"model_type": "qwen3"})


def test_padding_is_listed_among_what_is_dropped():
    _, _, mapped = AREA.converted("verl-qwen2-tp2-padvocab")
    assert ("lm_head.weight, rows 250 to 255", "padding beyond vocab_size") in [
        (d.name, d.reason) for d in mapped.dropped
    ]


def test_a_cast_leaves_the_bias_of_a_router_as_it_is():
    name = "mbridge-deepseek-v3-tp2-pp2"
    options = ConvertOptions(dtype="bfloat16")
    checkpoint = open_checkpoint(open_folder(str(AREA.folder / name / "input")), options)
    mapped = map_checkpoint(checkpoint, options, Evaluator(checkpoint))
    dtypes = {target.expression.dtype for target in mapped.targets if target.name.endswith("e_score_correction_bias")}
    assert dtypes == {"F32"}


LOADED = (
    "mbridge-deepseek-v3-tp2-pp2",
    "mbridge-gemma2-tp2",
    "mbridge-gpt-oss-tp2",
    "mbridge-mistral-tp2-pp3",
    "mlm-torch-llama-tied-tp2-pp2",
    "mlm-torch-mixtral-ep2",
    "verl-qwen2-moe-ep2-sharedgate",
    "verl-qwen3-moe-etp2",
    "verl-qwen3-tied-pp2",
    "verl030-qwen2-tp2",
)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", LOADED)
def test_transformers_finds_every_weight_of_a_converted_model(tmp_path, name):
    convert(str(AREA.folder / name / "input"), str(tmp_path / "model"), AREA.options(name))
    model, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert not found["mismatched_keys"]
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()
    assert logits.shape[-1] == AREA.expected(name)["config"]["vocab_size"]
