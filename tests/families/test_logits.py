"""Frameworks' checkpoints of whole models: what transformers loads of the result computes what the source computed.

Each model is random and tiny, saved under a framework's names by ``framework_writers`` and in a format that the
framework writes, converted from folder to folder, loaded by transformers, and asked for logits.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests import deepspeed_files
from tests.dcp_files import DcpFolder, DcpSaved
from tests.families.framework_writers import WRITERS
from tests.families.tiny_models import tiny_model
from tests.formats.cases import Area
from workers.convert import convert
from workers.options import ConvertOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of transformers' own
    pytest.mark.usefixtures("quiet_transformers"),
]

TOKENS = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(1))
TITAN = ("llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text")
TUNE = ("llama", "mistral", "gemma", "gemma2", "phi3", "qwen2", "qwen3")
MEGATRON = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
)
HUB = ("glm4_moe", "phi3", "gemma3_text", "deepseek_v2")
ZERO = {"qwen2": 2, "llama": 2, "mixtral": 3, "qwen3_moe": 3}
CHANGES = {
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
    "deepseek_v3": {"head_dim": 4},  # that of the rotary embedding
}


# Real checkpoints, some with vision towers; other tests compare each tensor with the source model's by its digest.
CASES = {
    ("torchtune", "llama32-vision-tune-061"): AutoModelForImageTextToText,
    ("torchtune", "llama4-tune-head"): AutoModelForImageTextToText,
    ("torchtune", "meta-llama32-vision-1file"): AutoModelForImageTextToText,
    ("torchtune", "meta-llama4-tp2-interleaved"): AutoModelForImageTextToText,
    ("verl-fsdp", "qwen2_5_vl-fsdp1-frozen-vision-ws2"): AutoModelForImageTextToText,
    ("verl-fsdp", "critic-token-cls-fsdp2-ws3-empty-shards"): AutoModelForTokenClassification,
    ("megatron", "mbridge-deepseek-v3-tp2-pp2"): AutoModelForCausalLM,
    ("megatron", "mbridge-glm4-moe-mtp-pp2"): AutoModelForCausalLM,
    ("megatron", "mlm-torch-mixtral-ep2"): AutoModelForCausalLM,
    ("megatron", "verl030-llama-tp2-pp2"): AutoModelForCausalLM,
}


def model_of(kind, **changes):
    """A model whose every parameter matters, norms and biases included; and the hub's tensors of it."""
    model = tiny_model(kind, **CHANGES.get(kind, {}), **changes)
    return randomised(model)


def randomised(model):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0))
    model.config.architectures = [type(model).__name__]
    return model.eval()


def hub_tensors(model, folder):
    model.save_pretrained(folder / "hub")
    return load_file(folder / "hub" / "model.safetensors")


def assert_same_logits(source, model, *, auto=AutoModelForCausalLM, **options):
    """Convert, load, and compare what both compute."""
    destination = source.parent / "model"
    convert(str(source), str(destination), ConvertOptions(**options))
    loaded, report = auto.from_pretrained(destination, output_loading_info=True, dtype=torch.float32)
    assert type(loaded) is type(model)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    with torch.no_grad():
        expected, found = model(TOKENS).logits, loaded.eval()(TOKENS).logits
    assert expected.isfinite().all()
    assert expected.std() > 0
    assert torch.equal(found, expected)


def write_dcp(folder, tensors, **more):
    saved = DcpFolder()
    for name, values in tensors.items():
        cuts = [[values.shape[0] // 2]] if values.dim() and values.shape[0] > 1 else []
        saved.add(name, DcpSaved(values.contiguous(), cuts), ranks=2, **more)
    saved.write(folder)


@pytest.mark.parametrize("kind", TUNE)
def test_torchtune(kind, tmp_path):
    model = model_of(kind)
    source = tmp_path / "run"
    model.config.save_pretrained(source)
    torch.save(WRITERS["torchtune"](hub_tensors(model, tmp_path), model.config), source / "torchtune_model_0.pt")
    assert_same_logits(source, model)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_torchtune_classifiers(kind, tmp_path):
    config = tiny_model(kind).config
    config.num_labels = 3
    model = randomised(AutoModelForSequenceClassification.from_config(config))
    source = tmp_path / "run"
    model.config.save_pretrained(source)
    made = WRITERS["torchtune"](hub_tensors(model, tmp_path), model.config)
    save_file(made, source / "model-00001-of-00001.safetensors")
    assert_same_logits(source, model, auto=AutoModelForSequenceClassification)


@pytest.mark.parametrize("ranks", [1, 2])
def test_meta(ranks, tmp_path):
    """The config is made from params.json, so what it says of the rotary embedding is a part of the proof."""
    model = model_of(
        "llama", head_dim=4, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    source = tmp_path / "run"
    source.mkdir()
    whole = WRITERS["meta"](hub_tensors(model, tmp_path), model.config)
    for rank in range(ranks):
        parts = {}
        for name, values in whole.items():
            dim = (
                None if "norm" in name else 1 if name.endswith(("wo.weight", "w2.weight", "embeddings.weight")) else 0
            )
            parts[name] = values if dim is None else values.chunk(ranks, dim)[rank].clone()
        torch.save(parts, source / f"consolidated.{rank:02d}.pth")
    params = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64, "norm_eps": 1e-5}
    (source / "params.json").write_text(json.dumps({**params, "multiple_of": 8}))
    assert_same_logits(source, model, llama_version="2")


@pytest.mark.parametrize("window", [None, 4, "4"])
def test_mistrals_own_files(window, tmp_path):
    """Heads are larger than the hidden size tells, and a window decides what a token sees."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    told = window and int(window)
    model = model_of("mistral", rms_norm_eps=1e-5, rope_parameters=rope, sliding_window=told)
    source = tmp_path / "run"
    source.mkdir()
    torch.save(WRITERS["meta"](hub_tensors(model, tmp_path), model.config), source / "consolidated.00.pth")
    params = {"dim": 16, "n_layers": 2, "head_dim": 8, "hidden_dim": 24, "n_heads": 4, "n_kv_heads": 2}
    params |= {"norm_eps": 1e-5, "vocab_size": 64, "rope_theta": 1e6, "sliding_window": window, "moe": None}
    (source / "params.json").write_text(json.dumps(params))
    assert_same_logits(source, model)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "mistral"
    assert config["sliding_window"] == told
    assert config["max_position_embeddings"] == 32768


@pytest.mark.parametrize("kind", TITAN)
def test_torchtitan(kind, tmp_path):
    model = model_of(kind)
    source = tmp_path / "run"
    model.config.save_pretrained(source)
    write_dcp(source, WRITERS["torchtitan"](hub_tensors(model, tmp_path), model.config))
    assert_same_logits(source, model)


@pytest.mark.parametrize("kind", MEGATRON)
def test_megatron(kind, tmp_path):
    model = model_of(kind)
    source = tmp_path / "run"
    model.config.save_pretrained(source)
    write_dcp(source, WRITERS["megatron"](hub_tensors(model, tmp_path), model.config))
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (source / "metadata.json").write_text(json.dumps(backend))
    assert_same_logits(source, model)


@pytest.mark.parametrize("kind", HUB)
def test_dcp_of_a_model_of_transformers(kind, tmp_path):
    """A trainer saves the model's own modules, whose experts transformers 5 has fused."""
    model = model_of(kind)
    source = tmp_path / "run"
    model.config.save_pretrained(source)
    write_dcp(source, model.state_dict())
    assert_same_logits(source, model)


@pytest.mark.parametrize(("kind", "stage"), ZERO.items())
def test_deepspeed(kind, stage, tmp_path):
    model = model_of(kind)
    source = tmp_path / "run"
    model.config.save_pretrained(source)
    groups = [{name: values.detach().numpy() for name, values in model.named_parameters()}]
    if stage == 3:
        deepspeed_files.stage_3(source / "global_step1", groups, 3)
    else:
        deepspeed_files.stage_1_or_2(source / "global_step1", groups, 3)
    (source / "latest").write_text("global_step1")
    assert_same_logits(source, model)


@pytest.mark.parametrize(("area", "name"), CASES)
def test_real_checkpoints_load_without_a_tensor_that_is_missing_or_left_over(area, name, tmp_path):
    case = Area(area)
    source = case.folder / name / case.described(name)["input"]
    convert(str(source), str(tmp_path / "model"), case.options(name))
    loaded, report = CASES[area, name].from_pretrained(tmp_path / "model", output_loading_info=True)
    text = loaded.config.get_text_config()
    # Layers that predict further tokens are counted after the model's own, and transformers does not build them.
    further = tuple(f"model.layers.{text.num_hidden_layers + n}." for n in range(2))
    assert not report["missing_keys"]
    assert not [key for key in report["unexpected_keys"] if not key.startswith(further)]
    assert not report["mismatched_keys"]
    with torch.no_grad():
        logits = loaded.eval()(TOKENS % text.vocab_size).logits
    assert logits.isfinite().all()
    assert logits.std() > 0
