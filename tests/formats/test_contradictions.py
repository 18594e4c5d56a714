"""A config or an option that contradicts the tensors is refused with both values, in every format."""

from __future__ import annotations

import json
import re

import pytest

from tests.formats.cases import CASES
from tests.formats.evaluator import Evaluator
from workers.errors import GeometryMismatch, IncompleteCheckpoint, InputError, InvalidOption
from workers.families import map_checkpoint
from workers.formats import known_formats, open_checkpoint
from workers.options import ConvertOptions
from workers.storage import open_folder

# A real checkpoint of a model with grouped heads in each format, by its folder in the cases.
SOURCES = {
    "verl-fsdp": "verl-fsdp/llama-gqa-fsdp2-ws2",
    "dcp": "torch/dcp-fsdp2-tp-2x2-llama",
    "accelerate-fsdp": "torch/accelerate-fsdp2-perrank-bin-w2",
    "deepspeed-zero": "deepspeed/ds-z1-bf16-w2-llama",
    "deepspeed-universal": "deepspeed/ds-universal-from-z2-w3-llama",
    "megatron-dist": "megatron/mlm-dist-llama-kv4-tp2-pp2",
    "megatron-legacy": "megatron/mlm-torch-llama-h8kv2-tp4",
    "torchtune": "torchtune/llama3-tune-061",
    "hf": "torch/hf-reshard-with-side-files",
    "hf-bin": "torch/hf-bin-sharded-mistral",
}
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size")


class Source:
    """A case with its config in a folder of its own, where a test can change it."""

    def __init__(self, name: str, folder) -> None:
        case = CASES / SOURCES[name]
        described = json.loads((case / "case.json").read_text())
        self.folder = open_folder(str(case / described["input"]))
        told = described.get("options") or {}
        self.options = {"config_dir": str(case / told["config_dir"])} if "config_dir" in told else {}
        checkpoint = open_checkpoint(self.folder, ConvertOptions(**self.options))
        assert checkpoint.format == name
        assert checkpoint.config is not None
        self.config = dict(checkpoint.config)
        self.config_dir = folder

    def map(self, *, config=None, **options):
        """What a conversion writes, with changes to the config or a config as it is."""
        (self.config_dir / "config.json").write_text(json.dumps(config))
        asked = ConvertOptions.from_dict({"config_dir": str(self.config_dir), **options})
        checkpoint = open_checkpoint(self.folder, asked)
        return map_checkpoint(checkpoint, asked, Evaluator(checkpoint))


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    return Source(request.param, tmp_path)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))


def test_the_right_config_passes_and_options_that_agree_change_nothing(source):
    expected = source.map(config=source.config)
    heads = source.config["num_attention_heads"]
    agreeing = {"num_attention_heads": heads, "num_key_value_heads": source.config["num_key_value_heads"]}
    agreeing |= {"hidden_size": source.config["hidden_size"]}
    agreeing["head_dim"] = source.config.get("head_dim") or source.config["hidden_size"] // heads
    found = source.map(config=source.config, **agreeing)
    assert found.targets == expected.targets
    assert dict(found.files)["config.json"] == dict(expected.files)["config.json"]


@pytest.mark.parametrize("key", [*SIZES, "num_hidden_layers"])
@pytest.mark.parametrize("change", [lambda value: value * 2, lambda value: value * 3 + 3], ids=["double", "odd"])
def test_a_config_that_says_another_size_is_refused_with_both(source, key, change):
    if key == "intermediate_size" and "moe_intermediate_size" in source.config:
        key = "moe_intermediate_size"  # all layers of this model have experts
    wrong = change(source.config[key])
    with pytest.raises(InputError) as caught:
        source.map(config={**source.config, key: wrong})
    assert isinstance(caught.value, GeometryMismatch | IncompleteCheckpoint)
    told = f"{caught.value.message} {caught.value.expected} {caught.value.found}"
    assert str(wrong) in numbers(told) or str(wrong - 1) in numbers(told), told
    assert caught.value.hint


@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "head_dim"])
def test_an_option_that_says_another_size_is_refused_with_both(source, key):
    size = source.config.get("head_dim") or source.config["hidden_size"] // source.config["num_attention_heads"]
    right = source.config.get(key) or size
    with pytest.raises(GeometryMismatch) as caught:
        source.map(config=source.config, **{key: right * 8})
    told = f"{caught.value.message} {caught.value.expected} {caught.value.found}"
    assert str(right * 8) in numbers(told), told
    assert "option" in f"{told} {caught.value.hint}"


@pytest.mark.parametrize("value", ["abc", -4, 0, 1 << 40, 2.5, True, [4, 4], {}])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers"])
def test_a_config_with_nonsense_in_place_of_a_size_is_refused(source, key, value):
    with pytest.raises(InputError) as caught:
        source.map(config={**source.config, key: value})
    assert key in caught.value.message
    if not isinstance(value, list):
        assert f"{key} is {value!r}, which is no size" in caught.value.message


def test_an_empty_config_is_refused(source):
    with pytest.raises(InputError, match="model_type"):
        source.map(config={})


def test_a_size_of_the_config_that_the_user_corrects_is_written(source):
    key = "num_key_value_heads"
    right = source.config[key]
    found = source.map(config={**source.config, key: right * 8}, **{key: right})
    assert json.loads(dict(found.files)["config.json"])[key] == right
    assert f"config.json said that {key} is {right * 8}; it says {right} now, as the option does" in found.notes


OWN_OPTIONS = {
    "step": 7,
    "role": "actor",
    "epoch": 3,
    "base": "/nowhere",
    "experts": 4,
    "llama_version": "3",
    "layer_prefixes": "{}",
    "state_dict_key": "model",
    "source_naming": "transformers",
    "strip_prefix": "x.",
    "model_prefix": "x.",
    "lora_alpha": 8,
}
READ = {
    "verl-fsdp": {"step", "role"},
    "dcp": {"step", "state_dict_key", "source_naming", "strip_prefix", "model_prefix"},
    "accelerate-fsdp": {"step"},
    "deepspeed-zero": {"step", "source_naming", "strip_prefix"},
    "deepspeed-universal": {"step", "source_naming", "strip_prefix"},
    "megatron-dist": {"step", "role"},
    "megatron-legacy": {"step", "role", "experts"},
    "torchtune": {"step", "epoch", "base", "llama_version"}
    | {"state_dict_key", "source_naming", "strip_prefix", "model_prefix"},
    "hf": set(),
    "hf-bin": {"state_dict_key", "source_naming", "strip_prefix", "model_prefix"},
}


def test_an_option_that_the_format_does_not_read_is_refused_by_name(source, request):
    name = request.node.callspec.params["source"]
    for option in OWN_OPTIONS.keys() - READ[name]:
        with pytest.raises(InvalidOption) as caught:
            source.map(config=source.config, **{option: OWN_OPTIONS[option]})
        assert f"the option {option} " in caught.value.message
        if option != "lora_alpha":
            assert name in caught.value.message
            assert caught.value.hint.startswith("Leave it out. It is for sources of the formats ")


def test_a_step_that_the_folder_is_not_of_is_refused(source, request):
    if "step" not in READ[request.node.callspec.params["source"]]:
        return
    with pytest.raises(InputError, match="4711"):
        source.map(config=source.config, step=4711)


def test_formats_say_which_options_they_read():
    assert {known.name for known in known_formats()} >= SOURCES.keys()


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "experts"])
@pytest.mark.parametrize("value", [0, -1, 1 << 31])
def test_an_option_that_counts_is_above_nothing(name, value):
    with pytest.raises(InvalidOption, match=f"{name} must be a whole number above 0, not {value}"):
        ConvertOptions.from_dict({name: value})


@pytest.mark.parametrize("value", [0, -1.5, float("inf"), float("nan")])
def test_an_alpha_is_above_nothing(value):
    with pytest.raises(InvalidOption, match="lora_alpha must be a number above 0"):
        ConvertOptions.from_dict({"lora_alpha": value})
