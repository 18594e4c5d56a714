"""The page on mappings: every example on it is read, and makes the shapes that it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.test_expressions import Memory
from workers.families.custom import read_mapping
from workers.families.custom_file import document, to_text
from workers.families.custom_vocabulary import OPERATIONS
from workers.families.operations import Facts
from workers.families.rules import apply_rules

PAGE = (Path(__file__).parents[2] / "docs" / "mapping.md").read_text()
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 8, "vocab_size": 10}
EXAMPLES = re.findall(r"```json\n([^`]*)```\n\nShapes: (.*)\n", PAGE)
TENSOR = re.compile(r"`([^`]+)` (\[[\d, ]+\])")


def mapping_of(*rules):
    return read_mapping(json.dumps({"schema": 1, "rules": rules}))


def tensors_of(text):
    return [(name, tuple(json.loads(shape))) for name, shape in TENSOR.findall(text)]


@pytest.mark.parametrize(("rule", "shapes"), EXAMPLES)
def test_an_example_makes_the_shapes_that_the_page_says(rule, shapes):
    before, after = shapes.split(" → ")
    memory = Memory()
    entries = [(name, memory.source(shape)) for name, shape in tensors_of(before)]
    made = apply_rules(mapping_of(json.loads(rule)).rules, entries, Facts(CONFIG))
    assert [(name, expression.shape) for name, expression in made.entries] == tensors_of(after)
    assert not made.unmatched


def test_every_operation_has_a_heading_and_an_example():
    shown = {entry["op"] for rule, _ in EXAMPLES for entry in json.loads(rule)["operations"]}
    headings = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    assert shown == set(OPERATIONS)
    assert headings == list(dict.fromkeys(headings))
    assert set(headings) == set(OPERATIONS)


def test_the_first_example_is_a_whole_mapping():
    (whole,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    mapping = read_mapping(to_text(document(whole, "my.yaml")))
    assert (mapping.name, mapping.extends, mapping.strict, len(mapping.rules)) == ("mine", "none", True, 5)


def test_the_page_says_which_operations_lose_something():
    lossy = {"trim", "cast"}
    for rule, _ in EXAMPLES:
        mapping = mapping_of(json.loads(rule))
        assert bool(mapping.lossy) == bool(lossy & {entry["op"] for entry in json.loads(rule)["operations"]})
