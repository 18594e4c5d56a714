"""A user's own rules before those of a family whose names are not the hub's."""

from __future__ import annotations

import json

import pytest

from tests.formats.test_contradictions import SOURCES, Source
from workers.errors import IncompleteCheckpoint, InvalidOption, UnmappedTensor

# Own rules for tensors that the family has rules for, too: the model must come out the same.
SAME = {
    "torchtune": [
        {"source": "tok_embeddings.weight", "target": "model.embed_tokens.weight"},
        {
            "source": "layers.{layer}.attn.q_proj.weight",
            "target": "model.layers.{layer}.self_attn.q_proj.weight",
            "operations": [{"op": "pairs_to_halves", "projection": "query"}],
        },
    ],
    "megatron-legacy": [
        {
            "source": "decoder.layers.{layer}.self_attention.linear_qkv.weight",
            "targets": [f"model.layers.{{layer}}.self_attn.{x}_proj.weight" for x in "qkv"],
            "operations": [{"op": "split_groups"}],
        },
        {
            "source": "decoder.layers.{layer}.mlp.linear_fc1.weight",
            "targets": [f"model.layers.{{layer}}.mlp.{x}_proj.weight" for x in ("gate", "up")],
            "operations": [{"op": "split", "dim": 0, "parts": 2}],
        },
    ],
}
FAMILIES = {"torchtune": "torchtune_llama", "megatron-legacy": "megatron_llama"}


def mapping(rules, **top):
    return json.dumps({"schema": 1, "name": "mine", "rules": rules, **top})


def shapes(mapped):
    return {target.name: target.expression.shape for target in mapped.targets}


@pytest.mark.parametrize("name", SAME)
def test_rules_that_say_the_same_as_the_familys_make_the_same_model(name, tmp_path):
    source = Source(name, tmp_path)
    plain = source.map(config=source.config)
    for top in ({}, {"extends": FAMILIES[name]}, {"extends": "llama", "strict": True}):
        mapped = source.map(config=source.config, mapping=mapping(SAME[name], **top))
        assert {target.name: target.expression for target in mapped.targets} == {
            target.name: target.expression for target in plain.targets
        }
        assert mapped.family == f"mine (mapping) + {FAMILIES[name]}"
        assert mapped.notes == plain.notes


@pytest.mark.parametrize("name", SAME)
def test_without_the_family_what_the_rules_leave_is_refused_with_the_nearest(name, tmp_path):
    source = Source(name, tmp_path)
    with pytest.raises(UnmappedTensor, match="mine has no rule for the tensor"):
        source.map(config=source.config, mapping=mapping(SAME[name], extends="none"))


def test_a_tensor_that_the_family_needs_must_come_from_somewhere(tmp_path):
    source = Source("torchtune", tmp_path)
    dropped = mapping([{"drop": "norm.scale"}])
    with pytest.raises(IncompleteCheckpoint, match=r"norm\.scale \(model\.norm\.weight on the hub\) is missing"):
        source.map(config=source.config, mapping=dropped)


def test_a_model_that_no_family_knows_needs_none_when_the_rules_say_everything(tmp_path):
    source = Source("torchtune", tmp_path)
    config = {**source.config, "model_type": "brand_new"}
    with pytest.raises(UnmappedTensor, match="brand_new"):
        source.map(config=config, mapping=mapping([{"keep": "norm.scale"}]))
    everything = mapping([{"source": "{name}", "target": "x.{name}"}])
    names = shapes(source.map(config=config, mapping=everything))
    assert "x.norm.scale" in names
    assert all(name.startswith("x.") for name in names)


def test_a_family_is_not_for_tensors_that_have_the_hubs_names(tmp_path):
    source = Source("hf", tmp_path)
    with pytest.raises(InvalidOption, match="the option family says llama, but the tensors have Hugging Face's names"):
        source.map(config=source.config, family="llama")
    assert set(SAME) < set(SOURCES)
