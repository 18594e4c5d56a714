"""Quantised models: real cases, what is quantised and what not, what loaders make of it, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.families.quantized_models import dequantized, save_model
from tests.families.tiny_models import tiny_model
from tests.formats.cases import Area
from tests.quantized_weights import reference
from tests.test_expressions import Memory
from workers.compare import compare_sources
from workers.convert import convert, plan_source
from workers.errors import GeometryMismatch, InvalidOption, UnshardError
from workers.expressions import Source
from workers.families.quantize import quantize
from workers.mapping import Target
from workers.options import ConvertOptions
from workers.quantization import SCHEMES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of transformers' own
    pytest.mark.usefixtures("quiet_transformers"),
]

AREA = Area("quantized")
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", torch.bfloat16)


def converted(source, destination, scheme, **options):
    convert(str(source), str(destination), ConvertOptions(quantization=scheme, **options))
    return load_file(destination / "model.safetensors"), json.loads((destination / "config.json").read_text())


def kept_names(config):
    told = config["quantization_config"]
    return told["ignore"] if "ignore" in told else told["modules_to_not_convert"]


# --- values ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", AREA.names)
def test_a_case_gives_the_bytes_and_the_config_of_the_programs_that_quantise(name):
    AREA.assert_converted(name)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_linear_weights_are_quantised_from_the_asked_dtype_and_all_else_is_cast(scheme, dtype, qwen3, tmp_path):
    found, config = converted(qwen3, tmp_path / "model", scheme, dtype=dtype)
    kind = getattr(torch, dtype or "float32")
    expected = {}
    for name, tensor in load_file(qwen3 / "model.safetensors").items():
        weight = tensor.to(kind)
        if not name.endswith("_proj.weight"):
            expected[name] = weight
            continue
        module = name.removesuffix(".weight")
        numbers, scale = reference(weight, scheme)
        expected[f"{module}.{SCHEMES[scheme].weight_suffix}"] = numbers
        expected[f"{module}.{SCHEMES[scheme].scale_suffix}"] = scale
        if scheme.startswith("int4"):
            expected[f"{module}.weight_shape"] = torch.tensor(weight.shape)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    assert config["dtype"] == (dtype or "float32")
    assert kept_names(config) == ["lm_head"]


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_sharded_run_is_quantised_to_the_bytes_of_its_converted_model(scheme, tmp_path):
    source = Area("verl-fsdp").folder / "llama-fsdp2-ws1" / "input"
    convert(str(source), str(tmp_path / "plain"), ConvertOptions())
    if scheme.startswith("int4"):
        with pytest.raises(GeometryMismatch, match="columns"):
            converted(source, tmp_path / "at-once", scheme)
        return
    at_once, config = converted(source, tmp_path / "at-once", scheme)
    in_two, config_in_two = converted(tmp_path / "plain", tmp_path / "in-two", scheme)
    assert at_once.keys() == in_two.keys()
    assert all(torch.equal(at_once[name].view(torch.uint8), in_two[name].view(torch.uint8)) for name in at_once)
    assert config == config_in_two


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_verify_makes_the_model_again_and_names_a_changed_weight(scheme, qwen3, tmp_path):
    destination = tmp_path / "model"
    tensors, _ = converted(qwen3, destination, scheme, ignore=(DOWN,))
    report = compare_sources(str(qwen3), str(destination))
    assert report.equal
    assert report.tensors == len(tensors)
    assert f"quantization={scheme}" in report.checks[-1]
    content = bytearray((destination / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (destination / "model.safetensors").write_bytes(content)
    assert len(compare_sources(str(qwen3), str(destination)).problems) == 1


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_model_in_a_bucket_is_quantised_to_the_same_bytes(scheme, qwen3, tmp_path, s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{s3.bucket}/{tmp_path.name}"
    convert(str(qwen3), url, ConvertOptions())
    converted(qwen3, tmp_path / "model", scheme)
    convert(url, str(tmp_path / "from-bucket"), ConvertOptions(quantization=scheme))
    paths = [tmp_path / name / "model.safetensors" for name in ("model", "from-bucket")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_another_dtype_does_not_change_what_quantised_weights_stand_for(scheme, qwen3, tmp_path):
    """bfloat16 reaches further than float16: a scale must not be rounded to it."""
    before, _ = converted(qwen3, tmp_path / "bfloat16", scheme, dtype="bfloat16")
    convert(str(tmp_path / "bfloat16"), str(tmp_path / "float16"), ConvertOptions(dtype="float16"))
    after = load_file(tmp_path / "float16" / "model.safetensors")
    assert after["model.embed_tokens.weight"].dtype == torch.float16
    parts = [name for name in before if "weight_" in name or before[name].dtype == torch.float8_e4m3fn]
    assert parts
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in parts)


def test_fp8_in_blocks_becomes_what_it_was_by_dequantising(qwen3, tmp_path):
    converted(qwen3, tmp_path / "fp8", "fp8-block-128", dtype="bfloat16")
    convert(str(tmp_path / "fp8"), str(tmp_path / "back"), ConvertOptions(dequantize=True))
    back, expected = load_file(tmp_path / "back" / "model.safetensors"), dequantized(tmp_path / "fp8")
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in back)
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_fp8_in_blocks_can_be_quantised_anew(qwen3, tmp_path):
    converted(qwen3, tmp_path / "fp8", "fp8-block-128", dtype="bfloat16")
    found, config = converted(tmp_path / "fp8", tmp_path / "int8", "int8-w8a8", dequantize=True)
    plain = dequantized(tmp_path / "fp8")
    for name in (f"{DOWN}.weight", "model.layers.1.self_attn.q_proj.weight"):
        numbers, scale = reference(plain[name], "int8-w8a8")
        assert torch.equal(found[name], numbers)
        assert torch.equal(found[f"{name}_scale"], scale)
    assert config["quantization_config"]["format"] == "int-quantized"


# --- what loaders make of it -----------------------------------------------------------------------------------
@pytest.mark.parametrize("ignore", [(), ("re:.*experts",), ("model.layers.0.self_attn.q_proj",)])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_transformers_loads_fp8_in_blocks_and_computes_the_dequantised_models_logits(
    model_type, ignore, qwen3, moe, tmp_path
):
    if model_type == "qwen3" and ignore == ("re:.*experts",):
        return
    source = qwen3 if model_type == "qwen3" else moe
    converted(source, tmp_path / "fp8", "fp8-block-128", dtype="bfloat16", ignore=ignore)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", output_loading_info=True)
    assert not any(loading.values())
    convert(str(source), str(tmp_path / "plain"), ConvertOptions(dtype="bfloat16"))
    save_file(dequantized(tmp_path / "fp8"), tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    tokens = torch.arange(32).reshape(2, 16)
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


# --- what is quantised -----------------------------------------------------------------------------------------
def targets(*shapes, dtype="BF16"):
    memory = Memory()
    made = []
    for name, shape in shapes:
        memory.source((1,))
        made.append(Target(name, Source(len(memory.tensors) - 1, dtype, shape)))
    return made


def quantized_names(found):
    return [target.name for target in found.targets if target.name.endswith(".weight_scale")]


def test_routers_towers_heads_embeddings_and_norms_stay_as_they_are():
    square = (128, 128)
    layer = "model.language_model.layers.0"
    given = targets(
        ("model.visual.blocks.0.attn.qkv.weight", square),
        ("model.language_model.embed_tokens.weight", square),
        (f"{layer}.input_layernorm.weight", (128,)),
        (f"{layer}.linear_attn.conv1d.weight", (128, 1, 4)),
        (f"{layer}.linear_attn.in_proj_ba.weight", square),
        (f"{layer}.linear_attn.in_proj_qkvz.weight", square),
        (f"{layer}.mlp.experts.0.gate_proj.weight", square),
        (f"{layer}.mlp.gate.weight", (4, 128)),
        (f"{layer}.mlp.shared_expert.gate_proj.weight", square),
        (f"{layer}.mlp.shared_expert_gate.weight", (1, 128)),
        (f"{layer}.self_attn.q_proj.bias", (128,)),
        ("lm_head.weight", square),
    )
    found = quantize(given, {"model_type": "qwen3_next"}, ConvertOptions(quantization="fp8-dynamic"))
    assert quantized_names(found) == [
        f"{layer}.linear_attn.in_proj_qkvz.weight_scale",
        f"{layer}.mlp.experts.0.gate_proj.weight_scale",
        f"{layer}.mlp.shared_expert.gate_proj.weight_scale",
    ]
    assert found.config["ignore"] == [
        "model.visual.blocks.0.attn.qkv",
        f"{layer}.linear_attn.in_proj_ba",
        f"{layer}.mlp.gate",
        f"{layer}.mlp.shared_expert_gate",
        "lm_head",
    ]


def test_the_head_of_a_tied_model_is_listed_though_it_has_no_tensor():
    given = targets(("model.embed_tokens.weight", (9, 128)), (f"{DOWN}.weight", (128, 128)))
    for scheme in SCHEMES:
        found = quantize(given, {}, ConvertOptions(quantization=scheme, ignore=("lm_head",)))
        assert kept_names({"quantization_config": found.config}) == ["lm_head"]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "falcon", "glm4v_moe", "jamba", "mamba", "qwen3_next"])
def test_what_is_quantised_are_transformers_linear_layers_and_the_other_ones_are_listed(model_type):
    model = tiny_model(model_type)
    modules = dict(model.named_modules())
    shapes = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items() if ".experts." not in name]
    found = quantize(targets(*shapes), {}, ConvertOptions(quantization="fp8-dynamic"))
    done = {name.removesuffix(".weight_scale") for name in quantized_names(found)}
    linear = {name for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    assert done
    assert done <= linear
    assert linear - done <= set(found.config["ignore"])


def test_ignore_takes_whole_names_and_regular_expressions_from_the_first_letter_on():
    given = targets(*((f"model.layers.{n}.mlp.{kind}_proj.weight", (128, 128)) for n in (1, 11) for kind in "ab"))
    options = ConvertOptions(quantization="int8-w8a8", ignore=("model.layers.1.mlp.a_proj", r"re:model\.layers\.11\."))
    found = quantize(given, {}, options)
    assert quantized_names(found) == ["model.layers.1.mlp.b_proj.weight_scale"]
    kept = ["model.layers.1.mlp.a_proj", "model.layers.11.mlp.a_proj", "model.layers.11.mlp.b_proj", "lm_head"]
    assert found.config["ignore"] == kept
    with pytest.raises(InvalidOption, match="names no module"):
        quantize(given, {}, ConvertOptions(quantization="int8-w8a8", ignore=("re:mlp",)))


def test_experts_that_stay_are_listed_with_the_module_that_holds_them():
    given = targets(
        *((f"model.layers.0.mlp.experts.{n}.up_proj.weight", (128, 128)) for n in (0, 1)), (f"{DOWN}.weight", (8, 128))
    )
    found = quantize(given, {}, ConvertOptions(quantization="fp8-block-128", ignore=(r"re:.*\.experts\.",)))
    names = found.config["modules_to_not_convert"]
    assert "model.layers.0.mlp.experts" in names
    with pytest.raises(InvalidOption, match="some experts") as caught:
        quantize(given, {}, ConvertOptions(quantization="fp8-block-128", ignore=(r"re:.*\.experts\.1\.",)))
    assert r"re:model\.layers\.0\.mlp\.experts\." in caught.value.hint


def test_fused_experts_are_refused_unless_they_stay():
    fused = "model.layers.0.mlp.experts"
    given = targets((f"{fused}.gate_up_proj", (4, 256, 128)), (f"{DOWN}.weight", (128, 128)))
    with pytest.raises(InvalidOption, match="4 experts in one tensor") as caught:
        quantize(given, {}, ConvertOptions(quantization="fp8-dynamic"))
    assert caught.value.tensor == f"{fused}.gate_up_proj"
    found = quantize(given, {}, ConvertOptions(quantization="fp8-dynamic", ignore=(r"re:.*\.experts$",)))
    assert quantized_names(found) == [f"{DOWN}.weight_scale"]
    assert found.config["ignore"] == [fused, "lm_head"]


def test_a_plan_tells_dtypes_sizes_what_stays_and_that_weights_are_read_twice(moe):
    made = plan_source(str(moe), ConvertOptions(quantization="fp8-block-128"))
    rows = {row["name"]: row for row in made.table()}
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert (rows[name]["dtype"], rows[name]["size_bytes"]) == ("F8_E4M3", 128 * 128)
    assert (rows[f"{name}_scale_inv"]["dtype"], rows[f"{name}_scale_inv"]["shape"]) == ("F32", [1, 1])
    assert rows[f"{name}_scale_inv"]["operation"] == "scales"
    quantized = [row for row in rows.values() if row["operation"] == "quantize"]
    assert any(f"{len(quantized)} weights are quantised to fp8-block-128" in note for note in made.mapping.notes)
    source_bytes = sum(tensor.size_bytes for tensor in made.checkpoint.tensors)
    assert made.cost()["bytes_read"] == source_bytes + sum(2 * row["size_bytes"] for row in quantized)


# --- what is refused -------------------------------------------------------------------------------------------
GIVEN = ((f"{DOWN}.weight", (128, 192)), ("model.layers.0.mlp.up_proj.weight", (192, 128)))
WRONG = {
    "a name that is not there": ({"ignore": ("model.layers.0.mlp.donw_proj",)}, {}, DOWN),
    "a module that holds others": ({"ignore": ("model.layers.0.mlp",)}, {}, r"re:model\.layers\.0\.mlp\."),
    "a class": ({"ignore": ("Linear",)}, {}, "names no module"),
    "a broken expression": ({"ignore": ("re:(",)}, {}, "no regular expression"),
    "everything": ({"ignore": ("re:.*",)}, {}, "nothing is left"),
    "a quantised source": ({}, {"quantization_config": {"quant_method": "awq"}}, "awq"),
    "transposed layers": ({}, {"model_type": "gpt2"}, "gpt2"),
}


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_what_cannot_be_quantised_so_is_refused_with_a_hint(kind):
    changes, config, words = WRONG[kind]
    with pytest.raises(InvalidOption) as caught:
        quantize(targets(*GIVEN), config, ConvertOptions(quantization="fp8-dynamic", **changes))
    error = caught.value
    assert error.hint
    assert words in f"{error} {error.hint} {error.expected}"


def test_columns_that_groups_do_not_divide_are_named():
    with pytest.raises(GeometryMismatch, match="192 columns") as caught:
        quantize(targets(*GIVEN), {}, ConvertOptions(quantization="int4-w4a16-g128"))
    assert caught.value.tensor == f"{DOWN}.weight"
    found = quantize(targets(*GIVEN), {}, ConvertOptions(quantization="int4-w4a16-g128", ignore=(DOWN,)))
    assert found.config["ignore"] == [DOWN, "lm_head"]


def test_blocks_may_be_cut_short_and_the_plan_says_so():
    found = quantize(targets(*GIVEN), {}, ConvertOptions(quantization="fp8-block-128"))
    assert [target.expression.shape for target in found.targets if target.name.endswith("_inv")] == [(1, 2), (2, 1)]
    assert any("2 weights" in note and "cut short" in note for note in found.notes)


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
def test_a_weight_of_another_dtype_is_refused(dtype):
    with pytest.raises(InvalidOption) as caught:
        quantize(targets(*GIVEN, dtype=dtype), {}, ConvertOptions(quantization="fp8-dynamic"))
    assert caught.value.tensor == f"{DOWN}.weight"


def test_ignore_needs_quantization(qwen3):
    with pytest.raises(InvalidOption, match="ignore") as caught:
        plan_source(str(qwen3), ConvertOptions(ignore=("lm_head",)))
    assert "int8-w8a8" in caught.value.hint


def test_an_adapter_alone_is_not_quantised(tmp_path):
    source = Area("verl-fsdp").folder / "llama-fsdp2-ws1" / "input"
    with pytest.raises(InvalidOption, match="adapter"):
        plan_source(str(source), ConvertOptions(quantization="fp8-dynamic", target_format="peft"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(
        {f"base_model.model.{DOWN}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"},
        adapter / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidOption, match="adapter alone"):
        plan_source(str(adapter), ConvertOptions(quantization="fp8-dynamic"))


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_a_weight_with_nan_stops_the_conversion_and_nothing_is_left(scheme, qwen3, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    tensors = load_file(qwen3 / "model.safetensors")
    tensors[f"{DOWN}.weight"][127, 200] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes((qwen3 / "config.json").read_bytes())
    with pytest.raises(UnshardError, match=r"infinity or NaN at \[127, 200\]") as caught:
        converted(source, tmp_path / "model", scheme)
    assert caught.value.tensor == f"{DOWN}.weight"
    assert not (tmp_path / "model").exists()
    found, _ = converted(source, tmp_path / "model", scheme, ignore=(DOWN,))
    assert found[f"{DOWN}.weight"][127, 200].isnan()
