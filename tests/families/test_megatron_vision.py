"""Vision-language models under Megatron's names: what transformers loads sees pictures as the source did."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.dcp_files import DcpFolder, DcpSaved
from tests.families.framework_writers import WRITERS
from tests.families.test_logits import hub_tensors, model_of, randomised
from tests.families.tiny_models import tiny_model
from tests.test_expressions import Memory
from workers.convert import convert
from workers.errors import GeometryMismatch, UnmappedTensor
from workers.expressions import Source
from workers.families import find_tables
from workers.families.megatron import TABLES
from workers.families.operations import Facts
from workers.families.registry import ANY_MODEL
from workers.families.rules import apply_rules
from workers.formats.megatron_legacy.cuts import Cut, cut_of
from workers.options import ConvertOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of transformers' own
    pytest.mark.usefixtures("quiet_transformers"),
]

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def write(folder, tensors, model):
    model.config.save_pretrained(folder)
    saved = DcpFolder()
    for name, values in tensors.items():
        saved.add(name, DcpSaved(values.contiguous(), []), ranks=1)
    saved.write(folder)
    (folder / "metadata.json").write_text(json.dumps(BACKEND))
    return folder


def look(model):
    """Logits for a text with a picture of 4 x 4 patches, which become 4 tokens."""
    config = model.config
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 40, (1, 12), generator=generator)
    tokens[0, 2:6] = config.image_token_id
    tokens[0, 1] = config.vision_start_token_id
    size = config.vision_config
    pixels = torch.randn(16, 3 * size.temporal_patch_size * size.patch_size**2, generator=generator)
    kinds = (tokens == config.image_token_id).long()
    with torch.no_grad():
        return model(
            input_ids=tokens,
            pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, 4, 4]]),
            mm_token_type_ids=kinds,
            attention_mask=torch.ones_like(tokens),
        ).logits


def vision_model(kind):
    # Heads of 4 numbers in Qwen2.5-VL and of 8 in Qwen3-VL: their halves are of time, height and width.
    sections = [1, 1, 0] if kind == "qwen2_5_vl" else [2, 1, 1]
    model = model_of(kind, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections})
    model.config.image_token_id, model.config.vision_start_token_id, model.config.video_token_id = 50, 51, 52
    return model


@pytest.mark.parametrize("tower", ["vision_tower.vision_model.", "vision_tower."])
def test_a_gemma_3_sees_what_the_source_saw(tower, tmp_path):
    """With the tower's names of transformers 4, and with those of 5."""
    config = tiny_model("gemma3").config
    config.mm_tokens_per_image, config.image_token_id = 4, 50
    model = randomised(AutoModelForImageTextToText.from_config(config))
    hub = hub_tensors(model, tmp_path)
    made = WRITERS["megatron-gemma3"](hub, model.config)
    made = {
        f"{tower}{name.removeprefix('vision_tower.').removeprefix('vision_model.')}"
        if name.startswith("vision_tower.")
        else name: values
        for name, values in made.items()
    }
    source = write(tmp_path / "run", made, model)
    convert(str(source), str(tmp_path / "model"), ConvertOptions())
    loaded, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    generator = torch.Generator().manual_seed(3)
    size = model.config.vision_config.image_size
    tokens = torch.randint(1, 40, (1, 12), generator=generator)
    tokens[0, 2 : 2 + model.config.mm_tokens_per_image] = model.config.image_token_id
    picture = torch.randn(1, 3, size, size, generator=generator)
    kinds = (tokens == model.config.image_token_id).long()
    with torch.no_grad():
        expected, found = (
            each(input_ids=tokens, pixel_values=picture, token_type_ids=kinds).logits
            for each in (model, loaded.eval())
        )
    assert expected.std() > 0
    assert torch.equal(found, expected)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(".vision_model." in name for name in written if name.startswith("vision_tower."))


def stacked(tensors):
    """Layers in one tensor each, as ``dist_checkpointing`` stores those that are alike."""
    made = {name: values for name, values in tensors.items() if ".layers." not in name}
    for name in (name for name in tensors if ".layers.0." in name):
        others = [tensors[name.replace(".layers.0.", f".layers.{number}.")] for number in range(2)]
        made[name.replace(".layers.0.", ".layers.")] = torch.stack(others)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["one by one", "stacked", "hub's tower"])
def test_the_result_sees_what_the_source_saw(kind, form, tmp_path):
    model = vision_model(kind)
    hub = hub_tensors(model, tmp_path)
    made = WRITERS["megatron-vision"](hub, model.config)
    if form == "stacked":
        made = stacked(made)
    elif form == "hub's tower":
        made = {name: values for name, values in made.items() if name.startswith("language_model.")}
        prefix = "visual." if kind == "qwen2_5_vl" else "vision_model."
        made |= {prefix + name.partition("visual.")[2]: values for name, values in hub.items() if "visual." in name}
    source = write(tmp_path / "run", made, model)
    convert(str(source), str(tmp_path / "model"), ConvertOptions())
    loaded, report = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    expected, found = look(model), look(loaded.eval())
    assert expected.std() > 0
    assert torch.equal(found, expected)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert set(written) == set(hub)
    for name, values in written.items():
        turned = values.shape != hub[name].shape  # experts, which transformers 5 writes the other way round
        assert torch.equal(values.transpose(1, 2) if turned else values, hub[name]), name


def filled(expression, arrays):
    out = np.empty(expression.shape, np.float32)
    expression.fill(out, (0,) * out.ndim, Memory(arrays))
    return torch.from_numpy(out)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_table_leads_back(kind, tmp_path):
    model = vision_model(kind)
    tensors = WRITERS["megatron-vision"](hub_tensors(model, tmp_path), model.config)
    text, tower = model.config.get_text_config().to_dict(), model.config.vision_config.to_dict()
    sizes = {key: value for key, value in text.items() if type(value) is int}
    sizes |= {f"vision_config.{key}": value for key, value in tower.items() if type(value) is int}
    names, arrays = list(tensors), [values.numpy() for values in tensors.values()]
    entries = [(name, Source(number, "F32", arrays[number].shape)) for number, name in enumerate(names)]
    tables = list(find_tables("megatron", model.config.to_dict()))
    for table in tables:
        entries = apply_rules(table.rules, entries, Facts(sizes)).entries
    (table,) = (table for table in tables if ANY_MODEL not in table.model_types)
    back = apply_rules(table.inverse_rules((5, 10)), entries, Facts(sizes))
    assert not back.unmatched
    found = {name.replace(".experts.local_experts.", ".experts.experts."): e for name, e in back.entries}
    for name in [name for name in tensors if ".experts.experts." in name]:
        parts = [found.pop(name.replace("experts.experts.", f"experts.experts.{n}.")) for n in range(4)]
        got = torch.stack([filled(part, arrays) for part in parts])
        assert torch.equal(got, tensors.pop(name)), name
    assert set(found) == set(tensors)
    for name, expression in found.items():
        assert torch.equal(filled(expression, arrays), tensors[name]), name


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "decoder.deepstack_merger_list.0.linear_fc1.weight",
            lambda values: values[:32],
            r"64 x 64 \(vision_config.hidden_size, vision_config.spatial_merge_size\), but .* \[32, 64\]",
        ),
        ("merger.linear_fc2.weight", lambda values: values[:, :32], r"any x 64 .* has shape \[16, 32\]"),
        ("decoder.layers.1.self_attention.linear_qkv.bias", lambda values: values[:46], r"4 heads .* shape \[46\]"),
    ],
)
def test_a_part_of_a_towers_tensor_is_refused(name, change, words, tmp_path):
    """Writers that know nothing of the cuts of the mergers save those of one tensor-parallel rank as if whole."""
    model = vision_model("qwen3_vl")
    tensors = WRITERS["megatron-vision"](hub_tensors(model, tmp_path), model.config)
    tensors[f"vision_model.{name}"] = change(tensors[f"vision_model.{name}"])
    source = write(tmp_path / "run", tensors, model)
    with pytest.raises(GeometryMismatch, match=words):
        convert(str(source), str(tmp_path / "model"), ConvertOptions())


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (
            "vision_model.decoder.layers.1.",
            "vision_config.depth is 2, but the checkpoint holds 1 layers of the vision",
        ),
        ("language_model.decoder.layers.1.", "num_hidden_layers is 2, but the checkpoint holds 1 layers"),
    ],
)
def test_layers_of_both_stacks_are_counted(gone, words, tmp_path):
    model = vision_model("qwen3_vl")
    tensors = WRITERS["megatron-vision"](hub_tensors(model, tmp_path), model.config)
    source = write(tmp_path / "run", {n: t for n, t in tensors.items() if not n.startswith(gone)}, model)
    with pytest.raises(GeometryMismatch, match=words):
        convert(str(source), str(tmp_path / "model"), ConvertOptions())


def test_a_name_that_the_towers_do_not_have_is_refused(tmp_path):
    model = vision_model("qwen3_vl")
    tensors = WRITERS["megatron-vision"](hub_tensors(model, tmp_path), model.config)
    tensors["vision_model.decoder.layers.0.mlp.linear_fc3.weight"] = torch.ones(2)
    source = write(tmp_path / "run", tensors, model)
    with pytest.raises(UnmappedTensor, match=r"megatron_qwen3_vl has no rule for the tensor vision_model.decoder"):
        convert(str(source), str(tmp_path / "model"), ConvertOptions())


def test_rank_files_with_a_tower_are_not_put_together():
    """Whether their first matrices have gates, and whose layers a rank's are, the names do not tell."""
    assert cut_of("vision_model.decoder.layers.0.mlp.linear_fc1.weight", (8, 4)) is None
    assert cut_of("language_model.decoder.layers.0.mlp.linear_fc1.weight", (8, 4)) is None
    assert cut_of("decoder.layers.0.mlp.linear_fc1.weight", (8, 4)) is Cut.GATE_AND_UP


def test_gates_and_their_biases_that_are_stored_apart_come_together():
    leaves = ("weight_w", "weight_v", "bias_w", "bias_v")
    entries = [(f"decoder.layers.0.mlp.linear_fc1.{leaf}", Source(n, "F32", (2,))) for n, leaf in enumerate(leaves)]
    table = next(table for table in TABLES if table.name == "megatron_gate_and_up")
    joined = dict(apply_rules(table.rules, entries, Facts({})).entries)
    arrays = [np.full(2, number, np.float32) for number in range(4)]
    for leaf, expected in (("weight", [0, 0, 1, 1]), ("bias", [2, 2, 3, 3])):
        assert filled(joined[f"decoder.layers.0.mlp.linear_fc1.{leaf}"], arrays).tolist() == expected
