"""Tables against transformers itself: a model's modules become what ``save_pretrained`` writes, and back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.families.tiny_models import tiny_model
from tests.formats.evaluator import Evaluator
from workers.dtypes import ELEMENT_TYPES
from workers.expressions import Source
from workers.families import find_tables, map_checkpoint
from workers.families.operations import Facts
from workers.families.registry import text_config
from workers.families.rules import apply_rules
from workers.formats import open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of transformers' own
    pytest.mark.usefixtures("quiet_transformers"),
]

MOE = {
    "afmoe": {},
    "cohere2_moe": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {"num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "jamba": {},
    "laguna": {"num_attention_heads_per_layer": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {},
    "mellum": {},
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "solar_open": {},
}
UNCHANGED = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt_oss", "llama4_text", "qwen3_vl"]
TIED = ["bloom", "falcon", "falcon_mamba", "mamba"]  # by names of their own
CHANGES = MOE | {"llama4_text": {"layer_types": ["chunked_attention", "full_attention"]}}
MULTIMODAL = ["internvl", "mistral3", "qwen2_vl", "qwen2_5_vl", "glm4v_moe"]
WITH_TOWER = ["gemma3", "llava", "llava_next", "llava_onevision", "paligemma"]


def saved(model, folder):
    """A rank file of a run with one process, its config, and what transformers saves of the same model."""
    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict().values()}.values():
            if tensor.is_floating_point():
                tensor.normal_()
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder / "huggingface")
    model.save_pretrained(folder / "expected")
    return load_file(folder / "expected" / "model.safetensors")


def converted(folder):
    checkpoint = open_checkpoint(open_folder(str(folder)), ConvertOptions())
    evaluator = Evaluator(checkpoint)
    mapped = map_checkpoint(checkpoint, ConvertOptions(), evaluator)
    return checkpoint, mapped, {target.name: evaluator.evaluate(target.expression) for target in mapped.targets}


def raw(tensor):
    width = torch.uint8 if tensor.dtype == torch.bool else {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    return tensor.contiguous().view(width if tensor.dtype == torch.bool else width[tensor.itemsize]).numpy()


def assert_equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert np.array_equal(found[name], raw(tensor)), name


@pytest.mark.parametrize("model_type", [*MOE, *UNCHANGED, *TIED, *MULTIMODAL])
def test_the_result_is_what_save_pretrained_writes(model_type, tmp_path):
    expected = saved(tiny_model(model_type, **CHANGES.get(model_type, {})), tmp_path)
    checkpoint, mapped, found = converted(tmp_path)
    assert_equal(found, expected)
    fused = [tensor.name for tensor in checkpoint.tensors if tensor.name.endswith(".experts.gate_up_proj")]
    assert bool(fused) == (model_type in MOE or model_type in ("gpt_oss", "llama4_text", "glm4v_moe"))
    assert (mapped.family == "names kept") == (model_type in (*UNCHANGED, *TIED))


@pytest.mark.parametrize("model_type", WITH_TOWER)
def test_vision_towers_keep_the_hubs_name_where_transformers_5_leaves_it_out(model_type, tmp_path):
    expected = saved(tiny_model(model_type), tmp_path)
    _, _, found = converted(tmp_path)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): t for name, t in expected.items()}
    assert_equal(found, renamed)
    assert any("vision_tower.vision_model.encoder." in name for name in found)


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl", "mixtral", "qwen3_moe"])
def test_transformers_loads_the_result_and_misses_nothing(model_type, tmp_path):
    model = tiny_model(model_type)
    saved(model, tmp_path)
    _, _, found = converted(tmp_path)
    state = {name: torch.from_numpy(values.view(np.float32)) for name, values in found.items()}
    loaded, report = type(model).from_pretrained(
        None, config=model.config, state_dict=state, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("model_type", [*MOE, *MULTIMODAL, *WITH_TOWER])
def test_the_same_tables_lead_back_to_the_modules(model_type, tmp_path):
    model = tiny_model(model_type, **CHANGES.get(model_type, {}))
    saved(model, tmp_path)
    checkpoint, _, found = converted(tmp_path)
    names, values = list(found), list(found.values())
    entries = [(name, Source(number, "F32", values[number].shape)) for number, name in enumerate(names)]
    facts = Facts({k: v for k, v in text_config(checkpoint.config).items() if type(v) is int}, (5, 10))
    for table in reversed(find_tables("transformers", checkpoint.config)):
        if "*" not in table.model_types:
            entries = apply_rules(table.inverse_rules(facts.transformers), entries, facts).entries
    memory = SimpleNamespace(read=lambda tensor, at, out: fill(values[tensor], at, out))
    for name, expression in entries:
        out = np.empty(expression.shape, ELEMENT_TYPES[expression.dtype].numpy_type)
        expression.fill(out, (0,) * out.ndim, memory)
        assert np.array_equal(out, raw(model.state_dict()[name])), name
    there = {name for name, _ in entries}
    assert set(model.state_dict()) - there <= {"lm_head.weight"}


def fill(values, offsets, out):
    out[...] = values[tuple(slice(o, o + s) for o, s in zip(offsets, out.shape, strict=True))]
