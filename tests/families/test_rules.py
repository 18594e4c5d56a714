"""Rules and tables: names, order, what belongs together, and what is missing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_expressions import Memory
from workers.errors import GeometryMismatch, InternalError, InvalidOption, UnmappedTensor
from workers.families import all_tables, find_tables
from workers.families.llama_vision import CROSS, FUSION, SELF
from workers.families.operations import Facts, Split, Stack, Transpose, Unstack
from workers.families.registry import ANY_MODEL, model_types, text_config
from workers.families.rules import Drop, Pattern, Rule, apply_rules, rename

FACTS = Facts({"hidden_size": 4, "num_hidden_layers": 3}, (5, 0))
WITH_LISTS = dataclasses.replace(FACTS, lists=dict.fromkeys((CROSS, FUSION, SELF), (0, 2)))
EXPERTS = Rule(
    ("{module}.experts.gate_up",),
    ("{module}.experts.{expert}.gate", "{module}.experts.{expert}.up"),
    (Split(1, 2), Unstack(0)),
)


def entries(*names, shape=(3, 4, 2)):
    memory = Memory()
    return [(name, memory.source(shape)) for name in names]


def names_after(rules, given):
    return [name for name, _ in apply_rules(rules, given, FACTS).entries]


def test_a_pattern_finds_its_parts_and_makes_names_of_them():
    pattern = Pattern("{module}.layers.{layer}.w.{rest}")
    assert pattern.match("model.layers.12.w.bias") == {"module": "model", "layer": "12", "rest": "bias"}
    assert pattern.name({"module": "m", "layer": "1", "rest": "r"}) == "m.layers.1.w.r"
    assert pattern.match("model.layers.x.w.bias") is None
    assert Pattern("a.b").match("axb") is None


def test_names_that_no_rule_fits_stay_where_and_as_they_are():
    assert names_after([rename("a.{rest}", "b.{rest}")], entries("x", "a.1", "y", "a.2")) == ["x", "b.1", "y", "b.2"]


def test_the_first_rule_that_fits_counts():
    rules = [rename("a.b", "first"), rename("a.{rest}", "second.{rest}")]
    assert names_after(rules, entries("a.b", "a.c")) == ["first", "second.c"]


def test_one_tensor_becomes_many_in_its_place():
    found = names_after([EXPERTS], entries("x", "m.experts.gate_up", "y"))
    assert found == ["x", *(f"m.experts.{e}.{part}" for e in range(3) for part in ("gate", "up")), "y"]


def test_many_tensors_become_one_where_the_first_stood():
    spread = apply_rules([EXPERTS], entries("m.experts.gate_up", "x", "n.experts.gate_up"), FACTS).entries
    assert names_after([EXPERTS.inverse], spread) == ["m.experts.gate_up", "x", "n.experts.gate_up"]
    assert names_after([EXPERTS.inverse], spread[::-1]) == ["n.experts.gate_up", "x", "m.experts.gate_up"]


def test_entries_are_ordered_by_number_and_not_by_text():
    rule = Rule(("e.{expert}",), ("all",), (Stack(0),))
    memory = Memory()
    given = [(f"e.{number}", memory.source((1,))) for number in (10, *range(10))]
    ((_, stacked),) = apply_rules([rule], given, FACTS).entries
    assert [source.tensor for source in stacked.inputs] == [*range(1, 11), 0]


@pytest.mark.parametrize("missing", ["m.experts.1.up", "m.experts.0.gate", "m.experts.2.up"])
def test_a_missing_part_is_named_with_what_it_belongs_to(missing):
    spread = apply_rules([EXPERTS], entries("m.experts.gate_up"), FACTS).entries
    with pytest.raises(UnmappedTensor) as caught:
        apply_rules([EXPERTS.inverse], [entry for entry in spread if entry[0] != missing], FACTS)
    assert caught.value.tensor == missing
    assert "m.experts." in caught.value.found


def test_dropped_tensors_are_told_with_the_reason():
    applied = apply_rules([Drop("{module}.inv_freq", "computed from the config")], entries("r.inv_freq", "w"), FACTS)
    assert applied.dropped == [("r.inv_freq", "computed from the config")]
    assert [name for name, _ in applied.entries] == ["w"]


def test_shapes_that_do_not_fit_a_rule_are_told_with_the_name():
    with pytest.raises(GeometryMismatch, match=r"m\.experts\.gate_up: a tensor of shape \[3, 5, 2\]"):
        apply_rules([EXPERTS], entries("m.experts.gate_up", shape=(3, 5, 2)), FACTS)


def test_a_rule_counts_by_one_placeholder_only():
    with pytest.raises(InternalError):
        apply_rules([Rule(("a",), ("a.{layer}.{expert}",), ())], entries("a"), FACTS)


def test_the_inverse_of_a_rule_undoes_its_operations_in_reverse():
    rule = Rule(("a",), ("b",), (Split(0, 2), Transpose(0, 1)))
    assert [type(operation).__name__ for operation in rule.inverse.operations] == ["Transpose", "Concatenate"]
    assert rule.inverse.inverse == rule


def test_every_rule_of_every_table_is_sound():
    for table in all_tables():
        apply_rules(table.rules, [], WITH_LISTS)
        apply_rules(table.inverse_rules((9, 0)), [], WITH_LISTS)


def test_no_model_type_has_two_tables():
    pairs = [
        (table.naming, model_type, table.architectures)
        for table in all_tables()
        for model_type in table.model_types
        if model_type != ANY_MODEL
    ]
    assert len(pairs) == len(set(pairs))
    assert len({table.name for table in all_tables()}) == len(all_tables())


def test_rules_of_later_versions_are_left_out_on_the_way_to_older_modules():
    table = next(table for table in all_tables() if table.name == "qwen2_vl")
    assert len(table.inverse_rules((4, 51))) == 0
    assert len(table.inverse_rules((4, 52))) == 2


def test_tables_are_found_by_the_whole_model_and_the_language_model_inside():
    config = {
        "model_type": "internvl",
        "text_config": {"model_type": "qwen3_moe"},
        "vision_config": {"model_type": "x"},
    }
    assert [table.name for table in find_tables("transformers", config)] == ["trl_value_head", "qwen2_moe", "internvl"]
    assert list(model_types(config)) == ["internvl", "qwen3_moe"]
    assert text_config(config) == {"model_type": "qwen3_moe"}


def test_a_family_can_be_named_by_its_table_or_a_model_type():
    for family in ("qwen2_moe", "deepseek_v3"):
        assert [table.name for table in find_tables("transformers", {}, family)][1:] == ["qwen2_moe"]
    assert find_tables("transformers", {"model_type": "mixtral"}, "none") == ()
    with pytest.raises(InvalidOption) as caught:
        find_tables("transformers", {}, "qwen9")
    assert "mixtral" in caught.value.hint


def test_an_unknown_model_type_has_no_table_of_its_own():
    assert [table.name for table in find_tables("transformers", {"model_type": "brand_new"})] == ["trl_value_head"]
    with pytest.raises(UnmappedTensor, match=r"brand_new \(NewForCausalLM\).*megatron names") as caught:
        find_tables("megatron", {"model_type": "brand_new", "architectures": ["NewForCausalLM"]})
    assert "llama" in caught.value.hint


LITERALS = ("a", "7", "a7", "{layer}", "{rest}", "w{layer}", "0")


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(LITERALS), min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.lists(st.sampled_from(("a", "7", "0", "00", "12", "a7", "w3")), min_size=1, max_size=4), max_size=9),
)
def test_rules_are_found_for_names_with_numbers_as_if_each_were_tried(patterns, names):
    usable = ["x." + ".".join(parts) for parts in patterns if max(map(parts.count, parts)) == 1]
    usable = [text for text in usable if text.count("{layer}") <= 1]
    rules = [rename(text, f"{number}:{text}") for number, text in enumerate(usable)]
    given_names = list(dict.fromkeys("x." + ".".join(parts) for parts in names))
    expected = []
    for name in given_names:
        hits = ((number, Pattern(text)) for number, text in enumerate(usable))
        found = next((f"{n}:{p.text}".format_map(v) for n, p in hits if (v := p.match(name)) is not None), name)
        expected.append(found)
    assert names_after(rules, entries(*given_names)) == expected
