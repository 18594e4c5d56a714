"""Meta's files of random geometry, cut as fairscale and llama-models cut them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.formats.evaluator import Evaluator
from workers.errors import CorruptFile, GeometryMismatch, IncompleteCheckpoint, InvalidOption, UnknownFormat
from workers.formats import open_checkpoint
from workers.formats._meta_config import Params, feed_forward_width
from workers.options import ConvertOptions
from workers.storage import open_folder


class Model:
    """A whole model under Meta's names, and how its ranks hold it."""

    def __init__(self, heads=2, groups=1, head=4, width=8, vocabulary=8, *, embedding=0):
        self.heads, self.groups, self.head = heads, groups, head
        hidden = heads * head
        self.params = {"dim": hidden, "n_heads": heads, "n_kv_heads": groups, "n_layers": 1, "norm_eps": 1e-5}
        self.dims = {
            "tok_embeddings.weight": embedding,
            "output.weight": 0,
            "layers.0.attention.wq.weight": 0,
            "layers.0.attention.wk.weight": 0,
            "layers.0.attention.wv.weight": 0,
            "layers.0.attention.wo.weight": 1,
            "layers.0.feed_forward.w1.weight": 0,
            "layers.0.feed_forward.w3.weight": 0,
            "layers.0.feed_forward.w2.weight": 1,
        }
        rows = {"wk": groups * head, "wv": groups * head, "w1": width, "w3": width, "wq": hidden, "wo": hidden}
        self.whole = {"norm.weight": torch.randn(hidden)}
        for name in self.dims:
            part = name.split(".")[-2]
            shape = (rows.get(part, vocabulary), hidden) if part != "w2" else (hidden, width)
            self.whole[name] = torch.randn(shape)
        self.whole["layers.0.attention_norm.weight"] = torch.randn(hidden)
        self.whole["layers.0.ffn_norm.weight"] = torch.randn(hidden)

    def parts(self, count):
        """The state dict of each rank."""
        cut = {name: tensor.chunk(count, self.dims[name]) for name, tensor in self.whole.items() if name in self.dims}
        return [
            {name: cut[name][rank].clone() if name in cut else tensor for name, tensor in self.whole.items()}
            for rank in range(count)
        ]


def save(folder: Path, parts, params):
    for rank, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    (folder / "params.json").write_text(json.dumps(params))


def opened(folder, **options):
    return open_checkpoint(open_folder(str(folder)), ConvertOptions(**options))


def assert_whole(checkpoint, whole):
    evaluator = Evaluator(checkpoint)
    assert {tensor.name for tensor in checkpoint.tensors} == set(whole)
    for name, tensor in whole.items():
        number = checkpoint.index[name]
        assert checkpoint.tensors[number].shape == tuple(tensor.shape)
        assert (evaluator.whole(number) == tensor.contiguous().view(torch.uint32).numpy()).all(), name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.sampled_from([1, 2, 4]),
    group=st.integers(1, 2),
    heads=st.integers(1, 2),
    half=st.integers(1, 3),
    embedding=st.integers(0, 1),
)
def test_the_parts_of_all_ranks_make_the_whole(tmp_path_factory, count, group, heads, half, embedding):
    folder = tmp_path_factory.mktemp("meta")
    groups = count * heads
    model = Model(groups * group, groups, 2 * half, 3 * count, 5 * count, embedding=embedding)
    save(folder, model.parts(count), model.params)
    checkpoint = opened(folder)
    assert_whole(checkpoint, model.whole)
    assert checkpoint.config is not None
    assert checkpoint.config["vocab_size"] == 5 * count
    assert checkpoint.config["intermediate_size"] == 3 * count


def test_heads_that_are_there_several_times_are_taken_once(tmp_path):
    model = Model(8, 2, 4, 16, 16)
    parts = model.parts(4)
    for name in ("layers.0.attention.wk.weight", "layers.0.attention.wv.weight"):
        heads = model.whole[name].chunk(2)
        for rank, part in enumerate(parts):
            part[name] = heads[rank // 2].clone()
    save(tmp_path, parts, model.params)
    checkpoint = opened(tmp_path)
    assert_whole(checkpoint, model.whole)
    assert len(checkpoint.replicas.rows(checkpoint.index["layers.0.attention.wk.weight"])) == 2


def test_what_a_rank_fuses_is_taken_apart(tmp_path):
    model = Model(4, 2, 4, 8, 8)
    experts, width = 3, 4
    moe_in, moe_out = torch.randn(experts, 16, width), torch.randn(experts, width, 16)
    parts = model.parts(2)
    for rank, part in enumerate(parts):
        attention, mlp = "layers.0.attention.", "layers.0.feed_forward."
        fused = [part.pop(f"{attention}w{x}.weight") for x in "qkv"]
        part[f"{attention}wqkv.weight"] = torch.cat(fused)
        part[f"{mlp}mlp.fc1_weight"] = torch.cat([part.pop(f"{mlp}{x}.weight") for x in ("w1", "w3")])
        half = slice(rank * 2, rank * 2 + 2)
        part[f"{mlp}experts.moe_w_in_eD_F"] = moe_in[:, :, half].reshape(experts * 16, 2).clone()
        part[f"{mlp}experts.moe_w_out_eF_D"] = moe_out[:, half].reshape(experts * 2, 16).clone()
        part[f"{mlp}global_gate_stats_3E"] = torch.full((3, experts), float(rank))
    save(tmp_path, parts, model.params | {"moe_args": {"num_experts": experts}})
    whole = model.whole | {
        "layers.0.feed_forward.experts.moe_w_in_eD_F": moe_in.reshape(-1, width),
        "layers.0.feed_forward.experts.moe_w_out_eF_D": moe_out.reshape(-1, 16),
        "layers.0.feed_forward.global_gate_stats_3E": torch.zeros(3, experts),
    }
    assert_whole(opened(tmp_path), whole)


def test_a_gapless_set_that_is_not_whole_shows_in_the_shapes(tmp_path):
    model = Model(8, 4, 4, 16, 16)
    save(tmp_path, model.parts(4)[:2], model.params)
    with pytest.raises(IncompleteCheckpoint) as caught:
        opened(tmp_path)
    assert "2 files" in caught.value.message
    assert "4 such files would" in caught.value.message


def test_files_of_different_releases_are_refused(tmp_path):
    model = Model(2, 2, 4, 8, 8)
    first, second = model.parts(2)
    second["extra.weight"] = torch.ones(2)
    save(tmp_path, [first, second], model.params)
    with pytest.raises(GeometryMismatch, match=r"consolidated\.01\.pth has the tensor extra\.weight"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "weight", [torch.eye(8).to_sparse(), torch.ones(8, device="meta"), torch._neg_view(torch.ones(8))]
)
def test_a_weight_that_is_no_plain_tensor_is_named(tmp_path, weight):
    model = Model()
    save(tmp_path, [{**model.whole, "layers.0.extra.weight": weight}], model.params)
    with pytest.raises(GeometryMismatch) as caught:
        opened(tmp_path)
    assert caught.value.tensor == "layers.0.extra.weight"


def test_rows_of_a_fused_weight_are_found_whatever_the_width_of_its_elements(tmp_path):
    model = Model()
    fused = torch.arange(16 * 8).reshape(16, 8).to(torch.uint16)  # in a file, on a storage without a type
    others = {name: tensor for name, tensor in model.whole.items() if name[-8:-7] not in "qkv"}
    save(tmp_path, [{**others, "layers.0.attention.wqkv.weight": fused}], model.params)
    checkpoint = opened(tmp_path)
    found = Evaluator(checkpoint).whole(checkpoint.index["layers.0.attention.wv.weight"])
    assert (found == fused[12:].numpy()).all()


@pytest.mark.parametrize("value", [0, -1, "8", 1.5, None, True, [8]])
def test_sizes_that_are_none_are_refused(tmp_path, value):
    model = Model()
    save(tmp_path, model.parts(1), model.params | {"n_heads": value})
    with pytest.raises(CorruptFile, match="n_heads"):
        opened(tmp_path)


def test_params_may_be_wrapped(tmp_path):
    model = Model()
    save(tmp_path, model.parts(1), {"model": model.params})
    assert opened(tmp_path).config["num_attention_heads"] == 2


@pytest.mark.parametrize(
    ("params", "options", "expected"),
    [
        ({}, {}, {"max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_scaling": None}),
        ({"rope_theta": 1e6}, {"llama_version": "2"}, {"max_position_embeddings": 16384}),
        ({}, {"llama_version": "1"}, {"max_position_embeddings": 2048}),
        ({"rope_theta": 500000.0}, {}, {"max_position_embeddings": 8192, "rope_scaling": None}),
        ({"rope_theta": 500000.0}, {"llama_version": "3.1"}, {"max_position_embeddings": 131072}),
    ],
)
def test_what_params_do_not_say_follows_from_the_version(tmp_path, params, options, expected):
    model = Model()
    save(tmp_path, model.parts(1), model.params | params)
    checkpoint = opened(tmp_path, **options)
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert any("Llama" in note for note in checkpoint.notes)


@pytest.mark.parametrize(("version", "factor"), [("3.1", 8.0), ("3.2", 32.0)])
def test_the_factor_of_scaled_rotary_embeddings_follows_from_the_version(tmp_path, version, factor):
    model = Model()
    save(tmp_path, model.parts(1), model.params | {"rope_theta": 500000.0, "use_scaled_rope": True})
    assert opened(tmp_path, llama_version=version).config["rope_scaling"]["factor"] == factor


def test_a_version_that_is_none_is_refused(tmp_path):
    model = Model()
    save(tmp_path, model.parts(1), model.params)
    with pytest.raises(InvalidOption, match=r"4\.5"):
        opened(tmp_path, llama_version="4.5")


@pytest.mark.parametrize(
    ("params", "hidden", "width"),
    [
        ({"multiple_of": 256}, 4096, 11008),  # Llama 2 7B
        ({"multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 4096, 14336),  # Llama 3 8B
        ({"multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 8192, 28672),  # Llama 3 70B
        ({"multiple_of": 256, "ffn_dim_multiplier": 1.5}, 2048, 8192),  # Llama 3.2 1B
    ],
)
def test_the_width_of_the_mlp_is_that_of_the_releases(params, hidden, width):
    assert feed_forward_width(Params(params), int(8 * hidden / 3)) == width


MISTRAL = {"head_dim": 4, "hidden_dim": 8, "vocab_size": 8}


@pytest.mark.parametrize(
    ("more", "options", "kind", "words"),
    [
        ({"moe": {"num_experts": 8}}, {}, UnknownFormat, "says moe, and how config.json says that is not known"),
        ({"vision_encoder": {}, "yarn": {"factor": 2}}, {}, UnknownFormat, "says vision_encoder, yarn, and how"),
        ({"sliding_window": [4, None]}, {}, CorruptFile, r"sliding_window = \[4, None\], which is no positive"),
        ({"max_seq_len": 0}, {}, CorruptFile, "max_seq_len = 0, which is no positive whole number"),
        ({}, {"llama_version": "2"}, InvalidOption, "llama_version says 2, but params.json is one of Mistral's"),
    ],
)
def test_params_of_mistrals_that_say_more_are_refused(more, options, kind, words, tmp_path):
    model = Model()
    save(tmp_path, model.parts(1), model.params | MISTRAL | more)
    with pytest.raises(kind, match=words):
        opened(tmp_path, **options)


def test_params_of_mistrals_make_their_own_config(tmp_path):
    model = Model()
    save(tmp_path, model.parts(1), model.params | MISTRAL | {"max_seq_len": 1024})
    checkpoint = opened(tmp_path)
    assert checkpoint.config["architectures"] == ["MistralForCausalLM"]
    assert checkpoint.config["max_position_embeddings"] == 1024
    assert not any("assumed" in note for note in checkpoint.notes)


def test_safetensors_of_mistrals_make_a_config_too(tmp_path):
    model = Model()
    whole = {name: values.contiguous() for name, values in model.whole.items()}
    save_file(whole, tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text(json.dumps(model.params | MISTRAL))
    checkpoint = opened(tmp_path)
    assert (checkpoint.format, checkpoint.naming) == ("hf", "meta")
    assert checkpoint.config["model_type"] == "mistral"
    (tmp_path / "params.json").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"has no params\.json"):
        opened(tmp_path)
